// Layer norm and RMS norm over rows of `WIDTH` elements that stay in registers. `WARPS_PER_ROW` warps
// share a row; a block has eight warps. `LAYER` is 1 for layer norm.

#define LANES (32 * WARPS_PER_ROW)
#define CHUNKS ((WIDTH + LANES * 8 - 1) / (LANES * 8))
#define GROUPS (8 / WARPS_PER_ROW)

__device__ __forceinline__ int lane_of() { return threadIdx.x % LANES; }
__device__ __forceinline__ int group_of() { return threadIdx.x / LANES; }

// Sums of two values over the lanes of a row.
__device__ __forceinline__ float2 row_sums(float a, float b) {
    a = warp_sum(a);
    b = warp_sum(b);
#if WARPS_PER_ROW > 1
    __shared__ float2 part[8];
    int warp = threadIdx.x / 32, first = group_of() * WARPS_PER_ROW;
    if (threadIdx.x % 32 == 0) part[warp] = make_float2(a, b);
    asm volatile("bar.sync %0, %1;" ::"r"(1 + group_of()), "r"(LANES) : "memory");
    a = 0.0f;
    b = 0.0f;
    #pragma unroll
    for (int i = 0; i < WARPS_PER_ROW; i++) {
        a += part[first + i].x;
        b += part[first + i].y;
    }
    asm volatile("bar.sync %0, %1;" ::"r"(1 + group_of()), "r"(LANES) : "memory");
#endif
    return make_float2(a, b);
}

// y = norm(x), or with `add` norm(sum) of sum = x + add, which is stored.
extern "C" __global__ void __launch_bounds__(256)
norm_forward(const T *x, const T *add, const T *gamma, const T *beta, T *sum, T *y, float *stats, u32 rows,
             float epsilon) {
    u64 row = (u64)blockIdx.x * GROUPS + group_of();
    if (row >= rows) return;
    u64 at = row * WIDTH;
    float v[CHUNKS][8];
    float total = 0.0f;
    #pragma unroll
    for (int k = 0; k < CHUNKS; k++) {
        int c = (k * LANES + lane_of()) * 8;
        if (c < WIDTH) {
            load_row<WIDTH>(x + at, c, v[k]);
            if (add) {
                float a[8];
                load_row<WIDTH>(add + at, c, a);
                #pragma unroll
                for (int i = 0; i < 8; i++) v[k][i] = rounded((T *)0, v[k][i] + a[i]);
                store_row<WIDTH>(sum + at, c, v[k]);
            }
        } else {
            #pragma unroll
            for (int i = 0; i < 8; i++) v[k][i] = 0.0f;
        }
        #pragma unroll
        for (int i = 0; i < 8; i++) total += v[k][i];
    }
    float mean = 0.0f;
#if LAYER
    mean = row_sums(total, 0.0f).x * (1.0f / WIDTH);
#endif
    float squares = 0.0f;
    #pragma unroll
    for (int k = 0; k < CHUNKS; k++) {
        int c = (k * LANES + lane_of()) * 8;
        #pragma unroll
        for (int i = 0; i < 8; i++)
            if (c + i < WIDTH) squares += (v[k][i] - mean) * (v[k][i] - mean);
    }
    float scale = 1.0f / sqrtf(row_sums(squares, 0.0f).x * (1.0f / WIDTH) + epsilon);
    #pragma unroll
    for (int k = 0; k < CHUNKS; k++) {
        int c = (k * LANES + lane_of()) * 8;
        if (c >= WIDTH) continue;
        float g[8], b[8];
        load_row<WIDTH>(gamma, c, g);
#if LAYER
        load_row<WIDTH>(beta, c, b);
#endif
        #pragma unroll
        for (int i = 0; i < 8; i++) {
            v[k][i] = (v[k][i] - mean) * scale * g[i];
#if LAYER
            v[k][i] += b[i];
#endif
        }
        store_row<WIDTH>(y + at, c, v[k]);
    }
    if (lane_of() == 0) {
#if LAYER
        stats[2 * row] = mean;
        stats[2 * row + 1] = scale;
#else
        stats[row] = scale;
#endif
    }
}

// dx = gradient of the norm, plus `add` (the residual's gradient) if given; `dx` may be absent. A block sums the
// gradients of gamma and beta, and of a bias whose gradient is the column sum of dx, over its rows, and stores
// them in `partial` [blocks, 3, WIDTH].
extern "C" __global__ void __launch_bounds__(256)
norm_backward(const T *dy, const T *x, const T *gamma, const float *stats, const T *add, T *dx, float *partial,
              u32 rows) {
    float dgamma[CHUNKS][8], dbeta[CHUNKS][8], dbias[CHUNKS][8];
    #pragma unroll
    for (int k = 0; k < CHUNKS; k++)
        #pragma unroll
        for (int i = 0; i < 8; i++) dgamma[k][i] = dbeta[k][i] = dbias[k][i] = 0.0f;
    for (u64 row = (u64)blockIdx.x * GROUPS + group_of(); row < rows; row += (u64)gridDim.x * GROUPS) {
        u64 at = row * WIDTH;
#if LAYER
        float mean = stats[2 * row], scale = stats[2 * row + 1];
#else
        float mean = 0.0f, scale = stats[row];
#endif
        float h[CHUNKS][8], g[CHUNKS][8];
        float along = 0.0f, across = 0.0f;
        #pragma unroll
        for (int k = 0; k < CHUNKS; k++) {
            int c = (k * LANES + lane_of()) * 8;
            if (c >= WIDTH) continue;
            float w[8];
            load_row<WIDTH>(x + at, c, h[k]);
            load_row<WIDTH>(dy + at, c, g[k]);
            load_row<WIDTH>(gamma, c, w);
            #pragma unroll
            for (int i = 0; i < 8; i++) {
                h[k][i] = (h[k][i] - mean) * scale;
                dgamma[k][i] += g[k][i] * h[k][i];
                dbeta[k][i] += g[k][i];
                g[k][i] *= w[i];
                if (c + i < WIDTH) {
                    along += g[k][i];
                    across += g[k][i] * h[k][i];
                }
            }
        }
        float2 sums = row_sums(along, across);
#if LAYER
        along = sums.x * (1.0f / WIDTH);
#else
        along = 0.0f;
#endif
        across = sums.y * (1.0f / WIDTH);
        #pragma unroll
        for (int k = 0; k < CHUNKS; k++) {
            int c = (k * LANES + lane_of()) * 8;
            if (c >= WIDTH) continue;
            float a[8];
            if (add) load_row<WIDTH>(add + at, c, a);
            #pragma unroll
            for (int i = 0; i < 8; i++) {
                float d = scale * (g[k][i] - along - h[k][i] * across);
                if (add) d += a[i];
                d = rounded((T *)0, d);
                dbias[k][i] += d;
                g[k][i] = d;
            }
            if (dx) store_row<WIDTH>(dx + at, c, g[k]);
        }
    }
    // Row groups of the block, in order.
    __shared__ float sums[WIDTH];
    #pragma unroll
    for (int which = 0; which < 3; which++) {
        for (int group = 0; group < GROUPS; group++) {
            if (group_of() == group) {
                #pragma unroll
                for (int k = 0; k < CHUNKS; k++) {
                    int c = (k * LANES + lane_of()) * 8;
                    #pragma unroll
                    for (int i = 0; i < 8; i++) {
                        float d = which == 0 ? dgamma[k][i] : which == 1 ? dbeta[k][i] : dbias[k][i];
                        if (c + i < WIDTH) sums[c + i] = group == 0 ? d : sums[c + i] + d;
                    }
                }
            }
            __syncthreads();
        }
        for (int c = threadIdx.x; c < WIDTH; c += 256)
            partial[((u64)blockIdx.x * 3 + which) * WIDTH + c] = sums[c];
        __syncthreads();
    }
}
