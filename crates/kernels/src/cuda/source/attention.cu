// Causal attention for any element type and any head of at most 256 elements: a warp to each row of queries, or of
// keys. Rows are packed [queries | keys | values]; `lse` and `sums` are [batch, heads, seq].

#define WARPS 8
#define SLOTS 8

struct Shape { u32 seq, heads, kv_heads, dim; float scale; };

__device__ __forceinline__ float dot(const float *a, const T *b, u32 dim) {
    float sum = 0.0f;
    for (u32 c = 0; c < dim; c++) sum += a[c] * to_float(b[c]);
    return sum;
}

// Row `at` of the warps of a grid over (rows of a sequence, heads of all sequences).
struct Where {
    u64 row;
    u32 position, head, kv_head;
    u64 own; // in [batch, heads, seq]
};
__device__ __forceinline__ Where where(const Shape &s, u32 heads) {
    Where w;
    w.position = blockIdx.x * WARPS + threadIdx.x / 32;
    w.head = blockIdx.y % heads;
    w.kv_head = w.head / (heads / s.kv_heads);
    u64 sequence = blockIdx.y / heads;
    w.row = sequence * s.seq + w.position;
    w.own = (sequence * heads + w.head) * s.seq + w.position;
    return w;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
attention_forward(const T *qkv, T *out, float *lse, Shape s) {
    __shared__ float query[WARPS][256];
    Where w = where(s, s.heads);
    if (w.position >= s.seq) return;
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, width = (s.heads + 2 * s.kv_heads) * s.dim;
    const T *first = qkv + (w.row - w.position) * width;
    const T *keys = first + (s.heads + w.kv_head) * s.dim, *values = keys + s.kv_heads * s.dim;
    float *q = query[warp];
    for (u32 c = lane; c < s.dim; c += 32) q[c] = to_float(qkv[w.row * width + w.head * s.dim + c]);
    __syncwarp();
    float acc[SLOTS], max = -INFINITY, sum = 0.0f;
    #pragma unroll
    for (int i = 0; i < SLOTS; i++) acc[i] = 0.0f;
    for (u32 from = 0; from <= w.position; from += 32) {
        u32 key = from + lane, count = min(32u, w.position + 1 - from);
        float score = lane < count ? dot(q, keys + (u64)key * width, s.dim) * s.scale : -INFINITY;
        float top = fmaxf(max, warp_max(score)), old = expf(max - top), p = lane < count ? expf(score - top) : 0.0f;
        sum = sum * old + warp_sum(p);
        max = top;
        #pragma unroll
        for (int i = 0; i < SLOTS; i++) acc[i] *= old;
        for (u32 j = 0; j < count; j++) {
            float weight = __shfl_sync(0xffffffffu, p, j);
            const T *value = values + (u64)(from + j) * width;
            #pragma unroll
            for (int i = 0; i < SLOTS; i++)
                if (i * 32 + lane < s.dim) acc[i] += weight * to_float(value[i * 32 + lane]);
        }
    }
    #pragma unroll
    for (int i = 0; i < SLOTS; i++)
        if (i * 32 + lane < s.dim)
            store(out + (w.row * s.heads + w.head) * s.dim + i * 32 + lane, acc[i] / sum);
    if (lane == 0) lse[w.own] = max + logf(sum);
}

// Gradient of the queries, and the row sums of dO * O that the other gradients need.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
attention_queries(const T *dout, const T *qkv, const T *out, const float *lse, T *dqkv, float *sums, Shape s) {
    __shared__ float query[WARPS][256], gradient[WARPS][256];
    Where w = where(s, s.heads);
    if (w.position >= s.seq) return;
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, width = (s.heads + 2 * s.kv_heads) * s.dim;
    const T *first = qkv + (w.row - w.position) * width;
    const T *keys = first + (s.heads + w.kv_head) * s.dim, *values = keys + s.kv_heads * s.dim;
    float *q = query[warp], *g = gradient[warp], total = 0.0f;
    for (u32 c = lane; c < s.dim; c += 32) {
        u64 at = (w.row * s.heads + w.head) * s.dim + c;
        q[c] = to_float(qkv[w.row * width + w.head * s.dim + c]);
        g[c] = to_float(dout[at]);
        total += g[c] * to_float(out[at]);
    }
    __syncwarp();
    total = warp_sum(total);
    if (lane == 0) sums[w.own] = total;
    float acc[SLOTS], log = lse[w.own];
    #pragma unroll
    for (int i = 0; i < SLOTS; i++) acc[i] = 0.0f;
    for (u32 from = 0; from <= w.position; from += 32) {
        u32 key = from + lane, count = min(32u, w.position + 1 - from);
        float slope = 0.0f;
        if (lane < count) {
            float p = expf(dot(q, keys + (u64)key * width, s.dim) * s.scale - log);
            slope = p * (dot(g, values + (u64)key * width, s.dim) - total) * s.scale;
        }
        for (u32 j = 0; j < count; j++) {
            float weight = __shfl_sync(0xffffffffu, slope, j);
            const T *own = keys + (u64)(from + j) * width;
            #pragma unroll
            for (int i = 0; i < SLOTS; i++)
                if (i * 32 + lane < s.dim) acc[i] += weight * to_float(own[i * 32 + lane]);
        }
    }
    #pragma unroll
    for (int i = 0; i < SLOTS; i++)
        if (i * 32 + lane < s.dim) store(dqkv + w.row * width + w.head * s.dim + i * 32 + lane, acc[i]);
}

// Gradients of keys and values: sums over the later rows, in order, of every head of the group.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
attention_keys(const T *dout, const T *qkv, const float *lse, const float *sums, T *dqkv, Shape s) {
    __shared__ float keys[WARPS][256], values[WARPS][256];
    Where w = where(s, s.kv_heads);
    if (w.position >= s.seq) return;
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, width = (s.heads + 2 * s.kv_heads) * s.dim;
    u64 sequence = blockIdx.y / s.kv_heads, start = sequence * s.seq;
    u32 kv_head = blockIdx.y % s.kv_heads, group = s.heads / s.kv_heads;
    u64 at = w.row * width + (s.heads + kv_head) * s.dim;
    float *k = keys[warp], *v = values[warp];
    for (u32 c = lane; c < s.dim; c += 32) {
        k[c] = to_float(qkv[at + c]);
        v[c] = to_float(qkv[at + s.kv_heads * s.dim + c]);
    }
    __syncwarp();
    float dk[SLOTS], dv[SLOTS];
    #pragma unroll
    for (int i = 0; i < SLOTS; i++) dk[i] = dv[i] = 0.0f;
    for (u32 head = kv_head * group; head < (kv_head + 1) * group; head++) {
        const float *logs = lse + (sequence * s.heads + head) * s.seq;
        const float *totals = sums + (sequence * s.heads + head) * s.seq;
        for (u32 from = w.position; from < s.seq; from += 32) {
            u32 row = from + lane, count = min(32u, s.seq - from);
            float p = 0.0f, slope = 0.0f;
            if (lane < count) {
                p = expf(dot(k, qkv + (start + row) * width + head * s.dim, s.dim) * s.scale - logs[row]);
                float d = dot(v, dout + ((start + row) * s.heads + head) * s.dim, s.dim);
                slope = p * (d - totals[row]) * s.scale;
            }
            for (u32 j = 0; j < count; j++) {
                float weight = __shfl_sync(0xffffffffu, p, j), along = __shfl_sync(0xffffffffu, slope, j);
                const T *g = dout + ((start + from + j) * s.heads + head) * s.dim;
                const T *q = qkv + (start + from + j) * width + head * s.dim;
                #pragma unroll
                for (int i = 0; i < SLOTS; i++)
                    if (i * 32 + lane < s.dim) {
                        dv[i] += weight * to_float(g[i * 32 + lane]);
                        dk[i] += along * to_float(q[i * 32 + lane]);
                    }
            }
        }
    }
    #pragma unroll
    for (int i = 0; i < SLOTS; i++)
        if (i * 32 + lane < s.dim) {
            store(dqkv + at + i * 32 + lane, dk[i]);
            store(dqkv + at + s.kv_heads * s.dim + i * 32 + lane, dv[i]);
        }
}

// A step of ring attention: queries from `first` on attend to the first `keys` rows of another rank's keys and
// values, packed [keys | values], without a mask.
struct Step { u32 first, keys; };

// Position of a warp's query, which starts at the step's first one.
__device__ __forceinline__ Where query_of(const Shape &s, const Step &step) {
    Where w = where(s, s.heads);
    w.position += step.first;
    w.row += step.first;
    w.own += step.first;
    return w;
}

// Merges the step into `out` and `lse`.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
step_forward(const T *qkv, const T *kv, T *out, float *lse, Shape s, Step step) {
    __shared__ float query[WARPS][256];
    Where w = query_of(s, step);
    if (w.position >= s.seq) return;
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, width = (s.heads + 2 * s.kv_heads) * s.dim;
    u32 narrow = 2 * s.kv_heads * s.dim;
    const T *keys = kv + (w.row - w.position) * narrow + w.kv_head * s.dim, *values = keys + s.kv_heads * s.dim;
    float *q = query[warp];
    for (u32 c = lane; c < s.dim; c += 32) q[c] = to_float(qkv[w.row * width + w.head * s.dim + c]);
    __syncwarp();
    float acc[SLOTS], max = -INFINITY, sum = 0.0f;
    #pragma unroll
    for (int i = 0; i < SLOTS; i++) acc[i] = 0.0f;
    for (u32 from = 0; from < step.keys; from += 32) {
        u32 key = from + lane, count = min(32u, step.keys - from);
        float score = lane < count ? dot(q, keys + (u64)key * narrow, s.dim) * s.scale : -INFINITY;
        float top = fmaxf(max, warp_max(score)), old = expf(max - top), p = lane < count ? expf(score - top) : 0.0f;
        sum = sum * old + warp_sum(p);
        max = top;
        #pragma unroll
        for (int i = 0; i < SLOTS; i++) acc[i] *= old;
        for (u32 j = 0; j < count; j++) {
            float weight = __shfl_sync(0xffffffffu, p, j);
            const T *value = values + (u64)(from + j) * narrow;
            #pragma unroll
            for (int i = 0; i < SLOTS; i++)
                if (i * 32 + lane < s.dim) acc[i] += weight * to_float(value[i * 32 + lane]);
        }
    }
    float before = lse[w.own], here = max + logf(sum), top = fmaxf(before, here);
    float both = top + log1pf(expf(fminf(before, here) - top));
    float kept = expf(before - both), added = expf(here - both) / sum;
    __syncwarp();
    #pragma unroll
    for (int i = 0; i < SLOTS; i++)
        if (i * 32 + lane < s.dim) {
            T *to = out + (w.row * s.heads + w.head) * s.dim + i * 32 + lane;
            store(to, to_float(*to) * kept + acc[i] * added);
        }
    if (lane == 0) lse[w.own] = both;
}

// Adds the step's gradient of the queries, and sums dO * O for that of the keys.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
step_queries(const T *dout, const T *qkv, const T *kv, const T *out, const float *lse, T *dqkv, float *sums, Shape s,
             Step step) {
    __shared__ float query[WARPS][256], gradient[WARPS][256];
    Where w = query_of(s, step);
    if (w.position >= s.seq) return;
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, width = (s.heads + 2 * s.kv_heads) * s.dim;
    u32 narrow = 2 * s.kv_heads * s.dim;
    const T *keys = kv + (w.row - w.position) * narrow + w.kv_head * s.dim, *values = keys + s.kv_heads * s.dim;
    float *q = query[warp], *g = gradient[warp], total = 0.0f;
    for (u32 c = lane; c < s.dim; c += 32) {
        u64 at = (w.row * s.heads + w.head) * s.dim + c;
        q[c] = to_float(qkv[w.row * width + w.head * s.dim + c]);
        g[c] = to_float(dout[at]);
        total += g[c] * to_float(out[at]);
    }
    __syncwarp();
    total = warp_sum(total);
    if (lane == 0) sums[w.own] = total;
    float acc[SLOTS], log = lse[w.own];
    #pragma unroll
    for (int i = 0; i < SLOTS; i++) acc[i] = 0.0f;
    for (u32 from = 0; from < step.keys; from += 32) {
        u32 key = from + lane, count = min(32u, step.keys - from);
        float slope = 0.0f;
        if (lane < count) {
            float p = expf(dot(q, keys + (u64)key * narrow, s.dim) * s.scale - log);
            slope = p * (dot(g, values + (u64)key * narrow, s.dim) - total) * s.scale;
        }
        for (u32 j = 0; j < count; j++) {
            float weight = __shfl_sync(0xffffffffu, slope, j);
            const T *own = keys + (u64)(from + j) * narrow;
            #pragma unroll
            for (int i = 0; i < SLOTS; i++)
                if (i * 32 + lane < s.dim) acc[i] += weight * to_float(own[i * 32 + lane]);
        }
    }
    #pragma unroll
    for (int i = 0; i < SLOTS; i++)
        if (i * 32 + lane < s.dim) {
            T *to = dqkv + w.row * width + w.head * s.dim + i * 32 + lane;
            store(to, to_float(*to) + acc[i]);
        }
}

// Gradients of the other rank's keys and values: of the step alone with `fresh`, added otherwise. Rows behind the
// step's keys have none.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
step_keys(const T *dout, const T *qkv, const T *kv, const float *lse, const float *sums, T *dkv, Shape s, Step step,
          u32 fresh) {
    __shared__ float keys[WARPS][256], values[WARPS][256];
    Where w = where(s, s.kv_heads);
    if (w.position >= s.seq) return;
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, width = (s.heads + 2 * s.kv_heads) * s.dim;
    u64 sequence = blockIdx.y / s.kv_heads, start = sequence * s.seq;
    u32 kv_head = blockIdx.y % s.kv_heads, group = s.heads / s.kv_heads;
    u64 at = w.row * 2 * s.kv_heads * s.dim + kv_head * s.dim;
    float dk[SLOTS], dv[SLOTS];
    #pragma unroll
    for (int i = 0; i < SLOTS; i++) dk[i] = dv[i] = 0.0f;
    if (w.position < step.keys) {
        float *k = keys[warp], *v = values[warp];
        for (u32 c = lane; c < s.dim; c += 32) {
            k[c] = to_float(kv[at + c]);
            v[c] = to_float(kv[at + s.kv_heads * s.dim + c]);
        }
        __syncwarp();
        for (u32 head = kv_head * group; head < (kv_head + 1) * group; head++) {
            const float *logs = lse + (sequence * s.heads + head) * s.seq;
            const float *totals = sums + (sequence * s.heads + head) * s.seq;
            for (u32 from = step.first; from < s.seq; from += 32) {
                u32 row = from + lane, count = min(32u, s.seq - from);
                float p = 0.0f, slope = 0.0f;
                if (lane < count) {
                    p = expf(dot(k, qkv + (start + row) * width + head * s.dim, s.dim) * s.scale - logs[row]);
                    float d = dot(v, dout + ((start + row) * s.heads + head) * s.dim, s.dim);
                    slope = p * (d - totals[row]) * s.scale;
                }
                for (u32 j = 0; j < count; j++) {
                    float weight = __shfl_sync(0xffffffffu, p, j), along = __shfl_sync(0xffffffffu, slope, j);
                    const T *g = dout + ((start + from + j) * s.heads + head) * s.dim;
                    const T *q = qkv + (start + from + j) * width + head * s.dim;
                    #pragma unroll
                    for (int i = 0; i < SLOTS; i++)
                        if (i * 32 + lane < s.dim) {
                            dv[i] += weight * to_float(g[i * 32 + lane]);
                            dk[i] += along * to_float(q[i * 32 + lane]);
                        }
                }
            }
        }
    }
    #pragma unroll
    for (int i = 0; i < SLOTS; i++)
        if (i * 32 + lane < s.dim) {
            T *to_k = dkv + at + i * 32 + lane, *to_v = to_k + s.kv_heads * s.dim;
            if (w.position >= step.keys && !fresh) continue;
            store(to_k, fresh ? dk[i] : to_float(*to_k) + dk[i]);
            store(to_v, fresh ? dv[i] : to_float(*to_v) + dv[i]);
        }
}

// Keys and values of fused rows, copied out, or their gradients added.
extern "C" __global__ void keys_values(const T *qkv, T *kv, u32 rows, u32 width, u32 narrow) {
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < (u64)rows * narrow; i += (u64)gridDim.x * blockDim.x)
        kv[i] = qkv[i / narrow * width + width - narrow + i % narrow];
}
extern "C" __global__ void add_keys_values(const T *dkv, T *dqkv, u32 rows, u32 width, u32 narrow) {
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < (u64)rows * narrow; i += (u64)gridDim.x * blockDim.x) {
        T *to = dqkv + i / narrow * width + width - narrow + i % narrow;
        store(to, to_float(*to) + to_float(dkv[i]));
    }
}
