// The kernels of one rank's program on a GPU, compiled when a device is opened.
//
// Activations are row-major [rows, width]. Kernels over elements stride over the grid, kernels over
// rows give a block to each row, and sums over rows run in their order within a thread, so that
// equal inputs give equal bits. Nothing is atomic.

typedef unsigned int u32;
typedef unsigned long long u64;

#define EACH(i, n)                                                                                \
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < (n); i += (u64)gridDim.x * blockDim.x)

// Sums a value of every thread of a block of 256, in a fixed tree; every thread gets the sum.
__device__ float block_sum(float value) {
    __shared__ float part[256];
    __syncthreads();
    part[threadIdx.x] = value;
    __syncthreads();
    for (u32 half = 128; half > 0; half /= 2) {
        if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
        __syncthreads();
    }
    return part[0];
}

__device__ float block_max(float value) {
    __shared__ float part[256];
    __syncthreads();
    part[threadIdx.x] = value;
    __syncthreads();
    for (u32 half = 128; half > 0; half /= 2) {
        if (threadIdx.x < half) part[threadIdx.x] = fmaxf(part[threadIdx.x], part[threadIdx.x + half]);
        __syncthreads();
    }
    return part[0];
}

extern "C" __global__ void fill(float *y, float value, u64 n) {
    EACH(i, n) y[i] = value;
}

extern "C" __global__ void add(const float *a, float *y, u64 n) {
    EACH(i, n) y[i] += a[i];
}

extern "C" __global__ void add3(const float *a, const float *b, float *y, u64 n) {
    EACH(i, n) y[i] = a[i] + b[i];
}

extern "C" __global__ void bias_forward(const float *x, const float *b, float *y, u64 rows, u64 width) {
    EACH(i, rows * width) y[i] = x[i] + b[i % width];
}

// A thread to each column: its rows are added in order.
extern "C" __global__ void bias_gradient(const float *dy, float *db, u64 rows, u64 width, u32 fresh) {
    EACH(c, width) {
        float sum = 0.0f;
        for (u64 r = 0; r < rows; r++) sum += dy[r * width + c];
        db[c] = fresh ? sum : db[c] + sum;
    }
}

extern "C" __global__ void relu_forward(const float *x, float *y, u64 n) {
    EACH(i, n) y[i] = x[i] > 0.0f ? x[i] : 0.0f;
}

extern "C" __global__ void relu_gradient(const float *dy, const float *x, float *dx, u64 n) {
    EACH(i, n) dx[i] = x[i] > 0.0f ? dy[i] : 0.0f;
}

extern "C" __global__ void squared_relu_forward(const float *x, float *y, u64 n) {
    EACH(i, n) {
        float p = x[i] > 0.0f ? x[i] : 0.0f;
        y[i] = p * p;
    }
}

extern "C" __global__ void squared_relu_gradient(const float *dy, const float *x, float *dx, u64 n) {
    EACH(i, n) dx[i] = x[i] > 0.0f ? 2.0f * x[i] * dy[i] : 0.0f;
}

// The tanh form of Hendrycks and Gimpel (2016).
#define GELU_A 0.7978845608028654f
#define GELU_B 0.044715f

extern "C" __global__ void gelu_forward(const float *x, float *y, u64 n) {
    EACH(i, n) {
        float v = x[i];
        y[i] = 0.5f * v * (1.0f + tanhf(GELU_A * (v + GELU_B * v * v * v)));
    }
}

extern "C" __global__ void gelu_gradient(const float *dy, const float *x, float *dx, u64 n) {
    EACH(i, n) {
        float v = x[i];
        float t = tanhf(GELU_A * (v + GELU_B * v * v * v));
        float slope = GELU_A * (1.0f + 3.0f * GELU_B * v * v);
        dx[i] = dy[i] * (0.5f * (1.0f + t) + 0.5f * v * (1.0f - t * t) * slope);
    }
}

// x is [rows, 2 * width], gate first: y = silu(gate) * up (Shazeer, 2020).
extern "C" __global__ void swiglu_forward(const float *x, float *y, u64 rows, u64 width) {
    EACH(i, rows * width) {
        const float *row = x + (i / width) * 2 * width;
        float gate = row[i % width];
        y[i] = gate / (1.0f + expf(-gate)) * row[width + i % width];
    }
}

extern "C" __global__ void swiglu_gradient(const float *dy, const float *x, float *dx, u64 rows, u64 width) {
    EACH(i, rows * width) {
        u64 at = (i / width) * 2 * width + i % width;
        float gate = x[at], up = x[at + width];
        float s = 1.0f / (1.0f + expf(-gate));
        dx[at] = dy[i] * up * (s + gate * s * (1.0f - s));
        dx[at + width] = dy[i] * gate * s;
    }
}

extern "C" __global__ void embedding_forward(const u32 *ids, const float *table, float *y, u64 rows,
                                             u64 width, u32 words) {
    EACH(i, rows * width) {
        u32 word = ids[i / width];
        y[i] = word < words ? table[(u64)word * width + i % width] : 0.0f;
    }
}

// A thread to each column: tokens are added in order, so that repeated words do not race.
extern "C" __global__ void embedding_gradient(const float *dy, const u32 *ids, float *dtable, u64 rows,
                                              u64 width, u32 words) {
    EACH(c, width) {
        for (u64 r = 0; r < rows; r++) {
            if (ids[r] < words) dtable[(u64)ids[r] * width + c] += dy[r * width + c];
        }
    }
}

extern "C" __global__ void layer_norm_forward(const float *x, const float *gamma, const float *beta,
                                              float *y, float *stats, u64 width, float epsilon) {
    const float *row = x + blockIdx.x * width;
    float sum = 0.0f;
    for (u64 c = threadIdx.x; c < width; c += blockDim.x) sum += row[c];
    float mean = block_sum(sum) / width;
    sum = 0.0f;
    for (u64 c = threadIdx.x; c < width; c += blockDim.x) sum += (row[c] - mean) * (row[c] - mean);
    float scale = 1.0f / sqrtf(block_sum(sum) / width + epsilon);
    for (u64 c = threadIdx.x; c < width; c += blockDim.x)
        y[blockIdx.x * width + c] = (row[c] - mean) * scale * gamma[c] + beta[c];
    if (threadIdx.x == 0) {
        stats[2 * blockIdx.x] = mean;
        stats[2 * blockIdx.x + 1] = scale;
    }
}

extern "C" __global__ void layer_norm_gradient(const float *dy, const float *x, const float *gamma,
                                               const float *stats, float *dx, u64 width) {
    const float *dyr = dy + blockIdx.x * width, *xr = x + blockIdx.x * width;
    float mean = stats[2 * blockIdx.x], scale = stats[2 * blockIdx.x + 1];
    float along = 0.0f, across = 0.0f;
    for (u64 c = threadIdx.x; c < width; c += blockDim.x) {
        float g = dyr[c] * gamma[c];
        along += g;
        across += g * ((xr[c] - mean) * scale);
    }
    along = block_sum(along) / width;
    across = block_sum(across) / width;
    for (u64 c = threadIdx.x; c < width; c += blockDim.x)
        dx[blockIdx.x * width + c] =
            scale * (dyr[c] * gamma[c] - along - (xr[c] - mean) * scale * across);
}

extern "C" __global__ void layer_norm_weights(const float *dy, const float *x, const float *stats,
                                              float *dgamma, float *dbeta, u64 rows, u64 width,
                                              u32 fresh) {
    EACH(c, width) {
        float g = fresh ? 0.0f : dgamma[c], b = fresh ? 0.0f : dbeta[c];
        for (u64 r = 0; r < rows; r++) {
            float d = dy[r * width + c];
            g += d * ((x[r * width + c] - stats[2 * r]) * stats[2 * r + 1]);
            b += d;
        }
        dgamma[c] = g;
        dbeta[c] = b;
    }
}

extern "C" __global__ void rms_norm_forward(const float *x, const float *gamma, float *y, float *stats,
                                            u64 width, float epsilon) {
    const float *row = x + blockIdx.x * width;
    float sum = 0.0f;
    for (u64 c = threadIdx.x; c < width; c += blockDim.x) sum += row[c] * row[c];
    float scale = 1.0f / sqrtf(block_sum(sum) / width + epsilon);
    for (u64 c = threadIdx.x; c < width; c += blockDim.x)
        y[blockIdx.x * width + c] = row[c] * scale * gamma[c];
    if (threadIdx.x == 0) stats[blockIdx.x] = scale;
}

extern "C" __global__ void rms_norm_gradient(const float *dy, const float *x, const float *gamma,
                                             const float *stats, float *dx, u64 width) {
    const float *dyr = dy + blockIdx.x * width, *xr = x + blockIdx.x * width;
    float scale = stats[blockIdx.x], across = 0.0f;
    for (u64 c = threadIdx.x; c < width; c += blockDim.x) across += dyr[c] * gamma[c] * (xr[c] * scale);
    across = block_sum(across) / width;
    for (u64 c = threadIdx.x; c < width; c += blockDim.x)
        dx[blockIdx.x * width + c] = scale * (dyr[c] * gamma[c] - xr[c] * scale * across);
}

extern "C" __global__ void rms_norm_weights(const float *dy, const float *x, const float *stats,
                                            float *dgamma, u64 rows, u64 width, u32 fresh) {
    EACH(c, width) {
        float g = fresh ? 0.0f : dgamma[c];
        for (u64 r = 0; r < rows; r++) g += dy[r * width + c] * (x[r * width + c] * stats[r]);
        dgamma[c] = g;
    }
}

extern "C" __global__ void row_max(const float *logits, float *max, u64 width) {
    const float *row = logits + blockIdx.x * width;
    float best = row[0];
    for (u64 c = threadIdx.x; c < width; c += blockDim.x) best = fmaxf(best, row[c]);
    best = block_max(best);
    if (threadIdx.x == 0) max[blockIdx.x] = best;
}

extern "C" __global__ void softmax_stats(const float *logits, const float *max, const u32 *targets,
                                         float *stats, u64 width) {
    const float *row = logits + blockIdx.x * width;
    float top = max[blockIdx.x], sum = 0.0f;
    for (u64 c = threadIdx.x; c < width; c += blockDim.x) sum += expf(row[c] - top);
    sum = block_sum(sum);
    if (threadIdx.x == 0) {
        u32 word = targets[blockIdx.x];
        stats[2 * blockIdx.x] = sum;
        stats[2 * blockIdx.x + 1] = word < width ? row[word] - top : 0.0f;
    }
}

// One block: the losses of a microbatch are few.
extern "C" __global__ void cross_entropy(const float *stats, float *total, u64 rows, u32 fresh) {
    float sum = 0.0f;
    for (u64 r = threadIdx.x; r < rows; r += blockDim.x)
        sum += (float)(log((double)stats[2 * r]) - (double)stats[2 * r + 1]);
    sum = block_sum(sum);
    if (threadIdx.x == 0) *total = fresh ? sum : *total + sum;
}

extern "C" __global__ void cross_entropy_gradient(const float *stats, const float *logits,
                                                  const float *max, const u32 *targets, float *dlogits,
                                                  u64 rows, u64 width, float scale) {
    EACH(i, rows * width) {
        u64 r = i / width;
        float p = expf(logits[i] - max[r]) / stats[2 * r];
        dlogits[i] = (p - (targets[r] == i % width ? 1.0f : 0.0f)) * scale;
    }
}

extern "C" __global__ void block_squares(const float *x, float *sums, u64 block) {
    const float *part = x + blockIdx.x * block;
    float sum = 0.0f;
    for (u64 i = threadIdx.x; i < block; i += blockDim.x) sum += part[i] * part[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

// One block: the sum of some elements into one place.
extern "C" __global__ void sum_into(const float *x, float *y, u64 n) {
    float sum = 0.0f;
    for (u64 i = threadIdx.x; i < n; i += blockDim.x) sum += x[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) *y = sum;
}

extern "C" __global__ void root_of_sum(const float *x, float *y, u64 n) {
    float sum = 0.0f;
    for (u64 i = threadIdx.x; i < n; i += blockDim.x) sum += x[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) *y = sqrtf(sum);
}

extern "C" __global__ void sgd(float *p, const float *g, u64 n, float lr, float decay, float scale) {
    EACH(i, n) p[i] -= lr * (g[i] * scale + decay * p[i]);
}

extern "C" __global__ void momentum(float *p, const float *g, float *v, u64 n, float lr, float keep,
                                    float decay, float scale) {
    EACH(i, n) {
        v[i] = keep * v[i] + (g[i] * scale + decay * p[i]);
        p[i] -= lr * v[i];
    }
}

extern "C" __global__ void adamw(float *p, const float *g, float *m, float *v, u64 n, float keep,
                                 float rate, float correction, float towards, float beta2,
                                 float fresh, float epsilon, float scale) {
    EACH(i, n) {
        float d = g[i] * scale;
        m[i] += towards * (d - m[i]);
        v[i] = beta2 * v[i] + fresh * (d * d);
        p[i] = p[i] * keep - rate * m[i] / (sqrtf(v[i]) / correction + epsilon);
    }
}
