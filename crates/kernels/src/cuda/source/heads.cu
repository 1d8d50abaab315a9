// Kernels on the heads of packed rows `[queries | keys | values]`: norms of queries and keys (Henry et al.,
// arXiv 2010.04245) and latent attention (DeepSeek-V2, arXiv 2405.04434, eq. 9 to 19).

// A warp to each head of a row: queries and keys are normalised, values copied. `dim` is at most 256.
extern "C" __global__ void __launch_bounds__(256)
head_norm_forward(const T *x, const T *gain_q, const T *gain_k, T *y, float *stats, u32 rows, u32 heads, u32 kv_heads,
                  u32 dim, float epsilon) {
    u32 all = heads + 2 * kv_heads, normed = heads + kv_heads, lane = threadIdx.x % 32;
    u64 at = (u64)blockIdx.x * 8 + threadIdx.x / 32;
    if (at >= (u64)rows * all) return;
    u64 row = at / all;
    u32 head = (u32)(at % all);
    const T *from = x + at * dim;
    T *to = y + at * dim;
    float v[8], squares = 0.0f;
    #pragma unroll
    for (int i = 0; i < 8; i++) {
        u32 c = i * 32 + lane;
        v[i] = c < dim ? to_float(from[c]) : 0.0f;
        squares += v[i] * v[i];
    }
    float scale = 1.0f;
    if (head < normed) {
        scale = 1.0f / sqrtf(warp_sum(squares) / dim + epsilon);
        if (lane == 0) stats[row * normed + head] = scale;
    }
    const T *gain = head < heads ? gain_q : gain_k;
    #pragma unroll
    for (int i = 0; i < 8; i++) {
        u32 c = i * 32 + lane;
        if (c < dim) store(to + c, head < normed ? v[i] * scale * to_float(gain[c]) : v[i]);
    }
}

// The gradient; a block takes rows b, b + blocks, … and sums the gradients of the gains over them and over the
// heads of a row, in `partial` [blocks, 2, dim]. `dx` may be absent.
extern "C" __global__ void __launch_bounds__(256)
head_norm_backward(const T *dy, const T *x, const T *gain_q, const T *gain_k, const float *stats, T *dx, float *partial,
                   u32 rows, u32 heads, u32 kv_heads, u32 dim) {
    u32 all = heads + 2 * kv_heads, normed = heads + kv_heads, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float sums[2][8];
    #pragma unroll
    for (int i = 0; i < 8; i++) sums[0][i] = sums[1][i] = 0.0f;
    for (u64 at = (u64)blockIdx.x * 8 + warp; at < (u64)rows * all; at += (u64)gridDim.x * 8) {
        u64 row = at / all;
        u32 head = (u32)(at % all);
        const T *from = x + at * dim, *dfrom = dy + at * dim;
        T *to = dx + at * dim;
        if (head >= normed) {
            if (dx) for (u32 c = lane; c < dim; c += 32) to[c] = dfrom[c];
            continue;
        }
        const T *gain = head < heads ? gain_q : gain_k;
        float scale = stats[row * normed + head], hat[8], g[8], across = 0.0f;
        #pragma unroll
        for (int i = 0; i < 8; i++) {
            u32 c = i * 32 + lane;
            hat[i] = c < dim ? to_float(from[c]) * scale : 0.0f;
            g[i] = c < dim ? to_float(dfrom[c]) : 0.0f;
            float d = g[i] * hat[i];
            sums[0][i] += head < heads ? d : 0.0f;
            sums[1][i] += head < heads ? 0.0f : d;
            if (c < dim) g[i] *= to_float(gain[c]);
            across += g[i] * hat[i];
        }
        across = warp_sum(across) / dim;
        #pragma unroll
        for (int i = 0; i < 8; i++) {
            u32 c = i * 32 + lane;
            if (dx && c < dim) store(to + c, scale * (g[i] - hat[i] * across));
        }
    }
    __shared__ float part[8][256];
    #pragma unroll
    for (int which = 0; which < 2; which++) {
        #pragma unroll
        for (int i = 0; i < 8; i++) part[warp][i * 32 + lane] = sums[which][i];
        __syncthreads();
        if (threadIdx.x < dim) {
            float all_warps = 0.0f;
            for (int w = 0; w < 8; w++) all_warps += part[w][threadIdx.x];
            partial[((u64)blockIdx.x * 2 + which) * dim + threadIdx.x] = all_warps;
        }
        __syncthreads();
    }
}

// Packed rows from queries, `[unrotated keys, values]` by head and the rotated part of the keys, which all heads
// share. Values are padded with zeros to the width of keys. `table` is [seq, rope / 2] of (cos, sin).
extern "C" __global__ void latent_heads(const T *q, const T *kv, const T *turned, T *qkv, const float2 *table, u32 rows,
                                        u32 heads, u32 dim, u32 rope, u32 v_dim, u32 seq) {
    u32 width = heads * dim, plain = dim - rope, half = rope / 2;
    u64 n = (u64)rows * width;
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x) {
        u64 row = i / width;
        u32 head = (u32)(i % width) / dim, c = (u32)(i % width) % dim;
        const T *own = kv + (row * heads + head) * (plain + v_dim);
        T *to = qkv + row * 3 * width + (u64)head * dim + c;
        float query, key;
        const T *qh = q + row * width + (u64)head * dim;
        if (c < plain) {
            query = to_float(qh[c]);
            key = to_float(own[c]);
        } else {
            u32 at = c - plain, pair = at % half;
            float2 turn = table[(row % seq) * half + pair];
            float low = to_float(qh[plain + pair]), high = to_float(qh[plain + half + pair]);
            const T *th = turned + row * rope;
            float klow = to_float(th[pair]), khigh = to_float(th[half + pair]);
            query = at < half ? low * turn.x - high * turn.y : high * turn.x + low * turn.y;
            key = at < half ? klow * turn.x - khigh * turn.y : khigh * turn.x + klow * turn.y;
        }
        store(to, query);
        store(to + width, key);
        store(to + 2 * width, c < v_dim ? to_float(own[plain + c]) : 0.0f);
    }
}

// Gradients of the three inputs of `latent_heads`.
extern "C" __global__ void latent_heads_gradient(const T *dqkv, T *dq, T *dkv, T *dturned, const float2 *table, u32 rows,
                                                 u32 heads, u32 dim, u32 rope, u32 v_dim, u32 seq) {
    u32 width = heads * dim, plain = dim - rope, half = rope / 2;
    u64 n = (u64)rows * width;
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x) {
        u64 row = i / width;
        u32 head = (u32)(i % width) / dim, c = (u32)(i % width) % dim;
        const T *from = dqkv + row * 3 * width + (u64)head * dim;
        T *own = dkv + (row * heads + head) * (plain + v_dim);
        float query = to_float(from[c]);
        if (c < plain) {
            store(own + c, to_float(from[width + c]));
        } else {
            u32 at = c - plain, pair = at % half;
            float2 turn = table[(row % seq) * half + pair];
            float low = to_float(from[plain + pair]), high = to_float(from[plain + half + pair]);
            query = at < half ? low * turn.x + high * turn.y : high * turn.x - low * turn.y;
            if (head == 0) {
                float klow = 0.0f, khigh = 0.0f;
                for (u32 h = 0; h < heads; h++) {
                    const T *key = dqkv + row * 3 * width + width + (u64)h * dim + plain;
                    klow += to_float(key[pair]);
                    khigh += to_float(key[half + pair]);
                }
                klow = rounded((T *)0, klow);
                khigh = rounded((T *)0, khigh);
                store(dturned + row * rope + at, at < half ? klow * turn.x + khigh * turn.y : khigh * turn.x - klow * turn.y);
            }
        }
        store(dq + row * width + (u64)head * dim + c, query);
        if (c < v_dim) store(own + plain + c, to_float(from[2 * width + c]));
    }
}

// Values without their padding (`into` 0), or gradients with it (`into` 1).
extern "C" __global__ void latent_values(const T *x, T *y, u32 rows, u32 heads, u32 dim, u32 v_dim, u32 into) {
    u32 to_dim = into ? dim : v_dim, from_dim = into ? v_dim : dim;
    u64 n = (u64)rows * heads * to_dim;
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x) {
        u32 c = (u32)(i % to_dim);
        store(y + i, c < v_dim ? to_float(x[i / to_dim * from_dim + c]) : 0.0f);
    }
}
