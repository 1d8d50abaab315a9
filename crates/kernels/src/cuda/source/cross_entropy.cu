// Softmax cross entropy over rows of `WIDTH` logits, of which the first `WORDS` count: a block of `THREADS`
// threads to a row. With `HELD` a row stays in registers between its two passes.

#define CHUNKS ((WIDTH + THREADS * 8 - 1) / (THREADS * 8))
#define LOG2E 1.4426950408889634f
__device__ __forceinline__ float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Maximum and scaled sum of exponentials of two parts of a row.
__device__ __forceinline__ float2 join(float2 a, float2 b) {
    float top = fmaxf(a.x, b.x);
    if (top == -INFINITY) return a;
    return make_float2(top, a.y * __expf(a.x - top) + b.y * __expf(b.x - top));
}

// `stats` gets (maximum, sum of exponentials) of each row, `losses` its loss. If `gradient` is given, it
// gets (softmax - one-hot) * scale; it may be `logits`.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
cross_entropy(const T *logits, const u32 *targets, float2 *stats, float *losses, T *gradient, float scale) {
    const T *row = logits + (u64)blockIdx.x * WIDTH;
    float2 own = make_float2(-INFINITY, 0.0f);
#if HELD
    uint4 held[CHUNKS * (sizeof(T) / 2)];
    #pragma unroll
    for (int k = 0; k < CHUNKS; k++) {
        u32 c = (k * THREADS + threadIdx.x) * 8;
        if (c >= WIDTH) continue;
        #pragma unroll
        for (int j = 0; j < sizeof(T) / 2; j++) held[k * (sizeof(T) / 2) + j] = ((const uint4 *)(row + c))[j];
    }
#endif
    #pragma unroll
    for (int k = 0; k < CHUNKS; k++) {
        u32 c = (k * THREADS + threadIdx.x) * 8;
        if (c >= WIDTH) continue;
        float x[8];
#if HELD
        load8((const T *)&held[k * (sizeof(T) / 2)], x);
#else
        load_row<WIDTH>(row, c, x);
#endif
        float top = own.x;
        #pragma unroll
        for (int i = 0; i < 8; i++) {
            if (c + i >= WORDS) x[i] = -INFINITY;
            top = fmaxf(top, x[i]);
        }
        if (top == -INFINITY) continue;
        float sum = own.y * exp2_of((own.x - top) * LOG2E), below = top * LOG2E;
        #pragma unroll
        for (int i = 0; i < 8; i++) sum += exp2_of(fmaf(x[i], LOG2E, -below));
        own = make_float2(top, sum);
    }
    #pragma unroll
    for (int step = 16; step > 0; step /= 2)
        own = join(own, make_float2(__shfl_xor_sync(0xffffffffu, own.x, step), __shfl_xor_sync(0xffffffffu, own.y, step)));
    __shared__ float2 part[32];
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = own;
    u32 target = targets[blockIdx.x];
    float hit = target < WORDS ? to_float(row[target]) : 0.0f;
    __syncthreads();
    own = threadIdx.x % 32 < THREADS / 32 ? part[threadIdx.x % 32] : make_float2(-INFINITY, 0.0f);
    #pragma unroll
    for (int step = 16; step > 0; step /= 2)
        own = join(own, make_float2(__shfl_xor_sync(0xffffffffu, own.x, step), __shfl_xor_sync(0xffffffffu, own.y, step)));
    if (threadIdx.x == 0) {
        stats[blockIdx.x] = own;
        losses[blockIdx.x] = target < WORDS ? logf(own.y) + own.x - hit : 0.0f;
    }
    if (!gradient) return;
    T *to = gradient + (u64)blockIdx.x * WIDTH;
    float over = scale / own.y, below = own.x * LOG2E;
    #pragma unroll
    for (int k = 0; k < CHUNKS; k++) {
        u32 c = (k * THREADS + threadIdx.x) * 8;
        if (c >= WIDTH) continue;
        float x[8];
#if HELD
        load8((const T *)&held[k * (sizeof(T) / 2)], x);
#else
        load_row<WIDTH>(row, c, x);
#endif
        #pragma unroll
        for (int i = 0; i < 8; i++) {
            float p = c + i < WORDS ? exp2_of(fmaf(x[i], LOG2E, -below)) * over : 0.0f;
            x[i] = c + i == target ? p - scale : p;
        }
        store_row<WIDTH>(to, c, x);
    }
}

// The gradient alone, from the statistics of the forward pass.
extern "C" __global__ void __launch_bounds__(THREADS)
cross_entropy_gradient(const T *logits, const u32 *targets, const float2 *stats, T *gradient, float scale) {
    const T *row = logits + (u64)blockIdx.x * WIDTH;
    T *to = gradient + (u64)blockIdx.x * WIDTH;
    float2 own = stats[blockIdx.x];
    u32 target = targets[blockIdx.x];
    float over = scale / own.y, below = own.x * LOG2E;
    for (u32 c = threadIdx.x * 8; c < WIDTH; c += THREADS * 8) {
        float x[8];
        load_row<WIDTH>(row, c, x);
        #pragma unroll
        for (int i = 0; i < 8; i++) {
            float p = c + i < WORDS ? exp2_of(fmaf(x[i], LOG2E, -below)) * over : 0.0f;
            x[i] = c + i == target ? p - scale : p;
        }
        store_row<WIDTH>(to, c, x);
    }
}

// Sum or maximum over the threads of a block; every thread gets it.
__device__ __forceinline__ float block_reduce(float x, bool max) {
    x = max ? warp_max(x) : warp_sum(x);
    __shared__ float part[32];
    __syncthreads();
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = x;
    __syncthreads();
    x = threadIdx.x % 32 < THREADS / 32 ? part[threadIdx.x % 32] : (max ? -INFINITY : 0.0f);
    return max ? warp_max(x) : warp_sum(x);
}

// The loss in parts, over a vocabulary of which a rank has the logits of `WORDS` words from `first` on: largest
// logit of a row, to be reduced by maximum over the shards;
extern "C" __global__ void __launch_bounds__(THREADS) row_max(const T *logits, float *max) {
    const T *row = logits + (u64)blockIdx.x * WIDTH;
    float own = -INFINITY;
    for (u32 c = threadIdx.x; c < WORDS; c += THREADS) own = fmaxf(own, to_float(row[c]));
    own = block_reduce(own, true);
    if (threadIdx.x == 0) max[blockIdx.x] = own;
}

// sum of exponentials and the target's logit below the maximum, to be reduced by sum;
extern "C" __global__ void __launch_bounds__(THREADS)
softmax_stats(const T *logits, const float *max, const u32 *targets, float2 *stats, u32 first) {
    const T *row = logits + (u64)blockIdx.x * WIDTH;
    float top = max[blockIdx.x], sum = 0.0f;
    for (u32 c = threadIdx.x; c < WORDS; c += THREADS) sum += __expf(to_float(row[c]) - top);
    sum = block_reduce(sum, false);
    u32 target = targets[blockIdx.x] - first;
    if (threadIdx.x == 0) stats[blockIdx.x] = make_float2(sum, target < WORDS ? to_float(row[target]) - top : 0.0f);
}

// loss of rows from reduced statistics;
extern "C" __global__ void loss_of_stats(const float2 *stats, float *losses, u32 rows) {
    u32 row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row < rows) losses[row] = logf(stats[row].x) - stats[row].y;
}

// gradient of the logits that a rank has.
extern "C" __global__ void __launch_bounds__(THREADS)
shard_gradient(const T *logits, const float *max, const float2 *stats, const u32 *targets, T *gradient, u32 first,
               float scale) {
    const T *row = logits + (u64)blockIdx.x * WIDTH;
    T *to = gradient + (u64)blockIdx.x * WIDTH;
    float top = max[blockIdx.x], over = scale / stats[blockIdx.x].x;
    u32 target = targets[blockIdx.x] - first;
    for (u32 c = threadIdx.x; c < WIDTH; c += THREADS) {
        float p = c < WORDS ? __expf(to_float(row[c]) - top) * over : 0.0f;
        store(to + c, c == target ? p - scale : p);
    }
}
