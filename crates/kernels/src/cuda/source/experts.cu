// Routing of tokens to experts, their dispatch to the experts' rows and the combination of the results. Integer
// counts may be atomic: their sums do not depend on the order. Choices and slots are as on the CPU.

#define DROPPED 0x80000000u
#define NOWHERE 0xffffffffu
// Choices of a tile.
#define TILE 1024

struct Routing {
    u32 experts, topk, sigmoid, seq, capacity, groups, kept_groups, parts;
    float scale, balance;
};

__device__ __forceinline__ float score_of(const Routing &r, float logit, float max) {
    return r.sigmoid ? 1.0f / (1.0f + expf(-logit)) : expf(logit - max);
}

// Row of a sequence's token: rows of a sequence may be cut into shards in zigzag layout.
__device__ __forceinline__ u64 row_of(const Routing &r, u32 rows, u32 sequence, u32 token) {
    if (r.parts <= 1) return (u64)sequence * r.seq + token;
    u32 each = r.seq / r.parts, sequences = rows / r.seq, run = each / 2 > 0 ? each / 2 : 1;
    u32 at = token / run, last = 2 * r.parts - 1;
    u32 part = at < r.parts ? at : last - at, behind = at < r.parts ? 0 : run;
    return ((u64)part * sequences + sequence) * each + behind + token % run;
}

// Experts of each token of a sequence, by descending key and ascending index: a warp to each token, a lane to
// every 32nd expert. `chosen` is [sequences, seq, topk]; shared memory holds a key per expert and warp.
extern "C" __global__ void __launch_bounds__(256)
choose_experts(const T *logits, const T *bias, u32 *chosen, Routing r, u32 rows) {
    extern __shared__ float shared[];
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u64 at = (u64)blockIdx.x * 8 + warp;
    if (at >= rows) return;
    float *keys = shared + warp * r.experts;
    const T *from = logits + row_of(r, rows, (u32)(at / r.seq), (u32)(at % r.seq)) * r.experts;
    for (u32 e = lane; e < r.experts; e += 32) {
        float logit = to_float(from[e]);
        keys[e] = bias ? 1.0f / (1.0f + expf(-logit)) + to_float(bias[e]) : logit;
    }
    __syncwarp();
    if (r.kept_groups < r.groups) {
        // A lane to each group, at most 32: the sum of its two largest keys.
        u32 each = r.experts / r.groups;
        float best = -INFINITY, next = -INFINITY;
        if (lane < r.groups)
            for (u32 e = lane * each; e < (lane + 1) * each; e++) {
                float key = keys[e];
                if (key > best) { next = best; best = key; }
                else if (key > next) next = key;
            }
        float sum = best + (each > 1 ? next : 0.0f);
        u32 before = 0;
        for (u32 other = 0; other < r.groups; other++) {
            float theirs = __shfl_sync(0xffffffffu, sum, other);
            before += theirs > sum || (theirs == sum && other < lane);
        }
        __syncwarp();
        if (lane < r.groups && before >= r.kept_groups)
            for (u32 e = lane * each; e < (lane + 1) * each; e++) keys[e] = -INFINITY;
        __syncwarp();
    }
    for (u32 k = 0; k < r.topk; k++) {
        float best = -INFINITY;
        u32 expert = 0xffffffffu;
        for (u32 e = lane; e < r.experts; e += 32)
            if (keys[e] > best || (expert == 0xffffffffu && keys[e] >= best)) { best = keys[e]; expert = e; }
        #pragma unroll
        for (int step = 16; step > 0; step /= 2) {
            float other = __shfl_xor_sync(0xffffffffu, best, step);
            u32 theirs = __shfl_xor_sync(0xffffffffu, expert, step);
            if (other > best || (other == best && theirs < expert)) { best = other; expert = theirs; }
        }
        if (lane == 0) chosen[at * r.topk + k] = expert == 0xffffffffu ? 0 : expert;
        __syncwarp();
        // A chosen key is not a number: it compares as neither larger nor equal.
        if (lane == 0 && expert != 0xffffffffu) keys[expert] = __int_as_float(0x7fc00000);
        __syncwarp();
    }
}

// A block to each sequence: tokens per expert in `counts` [sequences, experts], and choices beyond the capacity are
// marked as dropped. First choices go before second ones, earlier tokens before later ones.
extern "C" __global__ void __launch_bounds__(1024)
count_and_drop(u32 *chosen, u32 *counts, u32 *dropped, Routing r) {
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 *own = chosen + (u64)blockIdx.x * r.seq * r.topk;
    __shared__ u32 lost;
    if (threadIdx.x == 0) lost = 0;
    __syncthreads();
    for (u32 e = warp; e < r.experts; e += 32) {
        u32 taken = 0;
        for (u32 place = 0; place < r.topk; place++)
            for (u32 first = 0; first < r.seq; first += 32) {
                u32 token = first + lane;
                bool mine = token < r.seq && (own[token * r.topk + place] & ~DROPPED) == e;
                u32 all = __ballot_sync(0xffffffffu, mine);
                u32 rank = taken + __popc(all & ((1u << lane) - 1));
                if (mine && r.capacity && rank >= r.capacity) own[token * r.topk + place] = e | DROPPED;
                taken += __popc(all);
            }
        if (lane == 0) {
            counts[(u64)blockIdx.x * r.experts + e] = taken;
            if (r.capacity && taken > r.capacity) atomicAdd(&lost, taken - r.capacity);
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) dropped[blockIdx.x] = lost;
}

// Choices and weights of the rows from `first` on: a warp to each row.
extern "C" __global__ void __launch_bounds__(256)
gate_weights(const T *logits, const u32 *chosen, u32 *choices, float *gates, Routing r, u32 rows, u32 first, u32 own) {
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u64 at = (u64)blockIdx.x * 8 + warp;
    if (at >= rows) return;
    u64 row = row_of(r, rows, (u32)(at / r.seq), (u32)(at % r.seq));
    if (row < first || row >= (u64)first + own) return;
    const T *from = logits + row * r.experts;
    float max = -INFINITY, sum = 0.0f;
    for (u32 e = lane; e < r.experts; e += 32) max = fmaxf(max, to_float(from[e]));
    max = warp_max(max);
    const u32 *mine = chosen + at * r.topk;
    if (r.topk == 1) {
        if (r.sigmoid) sum = 1.0f;
        else {
            for (u32 e = lane; e < r.experts; e += 32) sum += score_of(r, to_float(from[e]), max);
            sum = warp_sum(sum);
        }
    } else
        for (u32 k = 0; k < r.topk; k++) sum += score_of(r, to_float(from[mine[k] & ~DROPPED]), max);
    float factor = r.scale / sum;
    for (u32 k = lane; k < r.topk; k += 32) {
        u64 to = (row - first) * r.topk + k;
        choices[to] = mine[k];
        gates[to] = score_of(r, to_float(from[mine[k] & ~DROPPED]), max) * factor;
    }
}

// Gradient of the logits, from that of the gates and from the balancing loss (DeepSeek-V3, eq. 17 to 20).
extern "C" __global__ void __launch_bounds__(256)
route_gradient(const float *dgates, const T *logits, const u32 *chosen, const u32 *counts, T *dlogits, Routing r,
               u32 rows, u32 first, u32 own, const float *loss_scale) {
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u64 at = (u64)blockIdx.x * 8 + warp;
    if (at >= rows) return;
    u64 row = row_of(r, rows, (u32)(at / r.seq), (u32)(at % r.seq));
    if (row < first || row >= (u64)first + own) return;
    const T *from = logits + row * r.experts;
    const u32 *mine = chosen + at * r.topk, *of_sequence = counts + at / r.seq * r.experts;
    const float *dg = dgates + (row - first) * r.topk;
    float share = (float)r.experts / (float)(r.topk * r.seq);
    float weight = r.balance * (loss_scale ? *loss_scale : 1.0f) * share / (float)r.seq;
    float max = -INFINITY, all = 0.0f, mean = 0.0f;
    for (u32 e = lane; e < r.experts; e += 32) max = fmaxf(max, to_float(from[e]));
    max = warp_max(max);
    for (u32 e = lane; e < r.experts; e += 32) {
        float score = score_of(r, to_float(from[e]), max);
        all += score;
        mean += score * (float)of_sequence[e];
    }
    all = warp_sum(all);
    float normal = 1.0f / all;
    mean = warp_sum(mean) * normal;
    float sum = 0.0f, weighted = 0.0f;
    for (u32 k = 0; k < r.topk; k++) {
        float score = score_of(r, to_float(from[mine[k] & ~DROPPED]), max);
        sum += score;
        weighted += score * dg[k];
    }
    float factor, shift = 0.0f, single = 0.0f;
    if (r.topk > 1) { factor = r.scale / sum; shift = weighted / sum; }
    else if (r.sigmoid) factor = r.scale;
    else { factor = r.scale / all; single = weighted * factor; }
    for (u32 e = lane; e < r.experts; e += 32) {
        float score = score_of(r, to_float(from[e]), max);
        float by_score = weight * ((float)of_sequence[e] - mean) * normal;
        for (u32 k = 0; k < r.topk; k++)
            if ((mine[k] & ~DROPPED) == e) by_score += factor * (dg[k] - shift);
        float slope = r.sigmoid ? score * (1.0f - score) : score;
        store(dlogits + (row - first) * r.experts + e, (by_score - (r.sigmoid ? 0.0f : single * normal)) * slope);
    }
}

// Choices of each tile by expert, in `tiles` [tiles, experts]; dropped ones count if `all` is set.
extern "C" __global__ void __launch_bounds__(TILE)
tile_counts(const u32 *choices, u32 *tiles, u32 n, u32 experts, u32 all) {
    extern __shared__ u32 hist[];
    for (u32 e = threadIdx.x; e < experts; e += TILE) hist[e] = 0;
    __syncthreads();
    u32 at = blockIdx.x * TILE + threadIdx.x;
    if (at < n && (all || !(choices[at] & DROPPED))) atomicAdd(&hist[choices[at] & ~DROPPED], 1);
    __syncthreads();
    for (u32 e = threadIdx.x; e < experts; e += TILE) tiles[(u64)blockIdx.x * experts + e] = hist[e];
}

// Turns the tiles' counts into the slots where their tokens begin, and counts tokens per expert. One block; experts
// of a region lie one after the other. `overflow` gets the tokens of the fullest region if they exceed its rows.
extern "C" __global__ void __launch_bounds__(TILE)
tile_starts(u32 *tiles, u32 *counts, u32 *overflow, u32 count, u32 experts, u32 regions, u32 region_rows) {
    extern __shared__ u32 totals[];
    for (u32 e = threadIdx.x; e < experts; e += TILE) {
        u32 sum = 0;
        for (u32 t = 0; t < count; t++) {
            u32 own = tiles[(u64)t * experts + e];
            tiles[(u64)t * experts + e] = sum;
            sum += own;
        }
        totals[e] = counts[e] = sum;
    }
    __syncthreads();
    u32 each = experts / regions;
    for (u32 region = threadIdx.x; region < regions; region += TILE) {
        u32 next = region * region_rows;
        for (u32 e = region * each; e < (region + 1) * each; e++) {
            u32 own = totals[e];
            totals[e] = next;
            next += own;
        }
        if (next - region * region_rows > region_rows) atomicMax(overflow, next - region * region_rows);
    }
    __syncthreads();
    for (u32 e = threadIdx.x; e < experts; e += TILE)
        for (u32 t = 0; t < count; t++) tiles[(u64)t * experts + e] += totals[e];
}

// Slot of every choice, in token order within an expert, and the choice of every slot in `origins`, which is all
// NOWHERE before. Slots beyond a region's rows are nowhere.
extern "C" __global__ void __launch_bounds__(TILE)
assign_slots(const u32 *choices, const u32 *tiles, u32 *slots, u32 *origins, u32 n, u32 experts, u32 regions,
             u32 region_rows) {
    extern __shared__ u32 before[]; // [32 warps, experts]
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, at = blockIdx.x * TILE + threadIdx.x;
    for (u32 i = threadIdx.x; i < 32 * experts; i += TILE) before[i] = 0;
    __syncthreads();
    u32 choice = at < n ? choices[at] : DROPPED;
    u32 expert = choice & DROPPED ? NOWHERE : choice;
    u32 same = __match_any_sync(0xffffffffu, expert), rank = __popc(same & ((1u << lane) - 1));
    if (expert != NOWHERE && rank == 0) before[warp * experts + expert] = __popc(same);
    __syncthreads();
    for (u32 e = threadIdx.x; e < experts; e += TILE) {
        u32 sum = 0;
        for (u32 w = 0; w < 32; w++) {
            u32 own = before[w * experts + e];
            before[w * experts + e] = sum;
            sum += own;
        }
    }
    __syncthreads();
    if (at >= n) return;
    u32 slot = NOWHERE;
    if (expert != NOWHERE) {
        u32 region = expert / (experts / regions);
        slot = tiles[(u64)blockIdx.x * experts + expert] + before[warp * experts + expert] + rank;
        if (slot >= (region + 1) * region_rows) slot = NOWHERE;
        else origins[slot] = at;
    }
    slots[at] = slot;
}

// Rows of the experts: copies of tokens, times their gates if given; rows without a token are zero.
extern "C" __global__ void dispatch_rows(const T *x, const u32 *origins, const float *gates, T *rows, u32 slots,
                                         u32 width, u32 topk) {
    u64 n = (u64)slots * width;
    for (u64 i = (blockIdx.x * (u64)blockDim.x + threadIdx.x) * 8; i < n; i += (u64)gridDim.x * blockDim.x * 8) {
        u32 origin = origins[i / width];
        float v[8];
        if (origin == NOWHERE) for (int k = 0; k < 8; k++) v[k] = 0.0f;
        else {
            load8(x + (u64)(origin / topk) * width + i % width, v);
            if (gates) for (int k = 0; k < 8; k++) v[k] *= gates[origin];
        }
        store8(rows + i, v);
    }
}

// Tokens from the experts' rows: sums over their choices, weighted by the gates if given.
extern "C" __global__ void combine_rows(const T *rows, const u32 *slots, const float *gates, T *y, u32 tokens, u32 width,
                                        u32 topk) {
    u64 n = (u64)tokens * width;
    for (u64 i = (blockIdx.x * (u64)blockDim.x + threadIdx.x) * 8; i < n; i += (u64)gridDim.x * blockDim.x * 8) {
        u64 token = i / width;
        float sum[8];
        for (int k = 0; k < 8; k++) sum[k] = 0.0f;
        for (u32 j = 0; j < topk; j++) {
            u32 slot = slots[token * topk + j];
            if (slot == NOWHERE) continue;
            float gate = gates ? gates[token * topk + j] : 1.0f, v[8];
            load8(rows + (u64)slot * width + i % width, v);
            for (int k = 0; k < 8; k++) sum[k] += gate * v[k];
        }
        store8(y + i, sum);
    }
}

// Gradients of the gates: a warp to each choice.
extern "C" __global__ void __launch_bounds__(256)
gate_gradient(const T *dy, const T *rows, const u32 *slots, float *dgates, u32 choices, u32 width, u32 topk) {
    u64 at = (u64)blockIdx.x * 8 + threadIdx.x / 32;
    if (at >= choices) return;
    u32 slot = slots[at], lane = threadIdx.x % 32;
    float sum = 0.0f;
    if (slot != NOWHERE) {
        const T *a = dy + at / topk * width, *b = rows + (u64)slot * width;
        for (u32 c = lane * 8; c < width; c += 256) {
            float v[8], w[8];
            load8(a + c, v);
            load8(b + c, w);
            for (int k = 0; k < 8; k++) sum += v[k] * w[k];
        }
        sum = warp_sum(sum);
    }
    if (lane == 0) dgates[at] = sum;
}

// dbias (+)= factor · (choices of an expert - an equal share), DeepSeek-V3, section 2.1.2. `counts` are of all choices.
extern "C" __global__ void router_bias(const u32 *counts, float *dbias, u32 choices, u32 experts, float factor, u32 fresh) {
    u32 e = blockIdx.x * blockDim.x + threadIdx.x;
    if (e >= experts) return;
    float d = factor * ((float)counts[e] - (float)choices / (float)experts);
    dbias[e] = fresh ? d : dbias[e] + d;
}

// Adds the dropped choices of all sequences.
extern "C" __global__ void add_dropped(const u32 *lost, float *y, u32 sequences, u32 fresh) {
    if (threadIdx.x > 0) return;
    u32 sum = 0;
    for (u32 i = 0; i < sequences; i++) sum += lost[i];
    *y = fresh ? (float)sum : *y + (float)sum;
}

// The choice of every slot, in `origins`, which is all NOWHERE before.
extern "C" __global__ void invert_slots(const u32 *slots, u32 *origins, u32 n) {
    u32 at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at < n && slots[at] != NOWHERE) origins[slots[at]] = at;
}
