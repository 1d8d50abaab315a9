// Elementwise kernels, optimizer steps, sums over columns and blocks, and embeddings, for one type `T` of
// activations. `n` counts elements and need not be a multiple of eight.

#define EACH8(i, n) for (u64 i = (blockIdx.x * (u64)blockDim.x + threadIdx.x) * 8; i < (n); i += (u64)gridDim.x * blockDim.x * 8)

template <typename E> __device__ __forceinline__ void get(const E *p, u64 i, u64 n, float (&x)[8]) {
    if (i + 8 <= n) load8(p + i, x);
    else load_some(p + i, (int)(n - i), x);
}
template <typename E> __device__ __forceinline__ void put(E *p, u64 i, u64 n, const float (&x)[8]) {
    if (i + 8 <= n) store8(p + i, x);
    else store_some(p + i, (int)(n - i), x);
}

extern "C" __global__ void fill(float *y, float value, u64 n) {
    float v[8];
    for (int k = 0; k < 8; k++) v[k] = value;
    EACH8(i, n) put(y, i, n, v);
}

extern "C" __global__ void accumulate(const float *a, float *y, u64 n) {
    EACH8(i, n) {
        float v[8], w[8];
        get(a, i, n, v);
        get(y, i, n, w);
        for (int k = 0; k < 8; k++) w[k] += v[k];
        put(y, i, n, w);
    }
}

extern "C" __global__ void add(const T *a, const T *b, T *y, u64 n) {
    EACH8(i, n) {
        float v[8], w[8];
        get(a, i, n, v);
        get(b, i, n, w);
        for (int k = 0; k < 8; k++) v[k] += w[k];
        put(y, i, n, v);
    }
}

// Conversions between the types of weights and of their master copies.
extern "C" __global__ void from_float(const float *x, T *y, u64 n) {
    EACH8(i, n) {
        float v[8];
        get(x, i, n, v);
        put(y, i, n, v);
    }
}
extern "C" __global__ void to_float_all(const T *x, float *y, u64 n) {
    EACH8(i, n) {
        float v[8];
        get(x, i, n, v);
        put(y, i, n, v);
    }
}

// The tanh form of Hendrycks and Gimpel (2016).
#define GELU_A 0.7978845608028654f
#define GELU_B 0.044715f
__device__ __forceinline__ float tanh_of(float x) {
    // 1 - 2 / (exp(2x) + 1); saturates without overflow.
    return 1.0f - 2.0f / (__expf(2.0f * x) + 1.0f);
}
__device__ __forceinline__ float gelu(float v) {
    return 0.5f * v * (1.0f + tanh_of(GELU_A * (v + GELU_B * v * v * v)));
}
__device__ __forceinline__ float gelu_slope(float v) {
    float t = tanh_of(GELU_A * (v + GELU_B * v * v * v));
    return 0.5f * (1.0f + t) + 0.5f * v * (1.0f - t * t) * GELU_A * (1.0f + 3.0f * GELU_B * v * v);
}
__device__ __forceinline__ float sigmoid(float v) { return 1.0f / (1.0f + __expf(-v)); }

#define ACTIVATION(name, value, slope)                                                             \
    extern "C" __global__ void name##_forward(const T *x, T *y, u64 n) {                           \
        EACH8(i, n) {                                                                              \
            float x8[8];                                                                           \
            get(x, i, n, x8);                                                                      \
            for (int k = 0; k < 8; k++) { float v = x8[k]; x8[k] = (value); }                      \
            put(y, i, n, x8);                                                                      \
        }                                                                                          \
    }                                                                                              \
    extern "C" __global__ void name##_backward(const T *dy, const T *x, T *dx, u64 n) {            \
        EACH8(i, n) {                                                                              \
            float x8[8], d[8];                                                                     \
            get(x, i, n, x8);                                                                      \
            get(dy, i, n, d);                                                                      \
            for (int k = 0; k < 8; k++) { float v = x8[k]; d[k] *= (slope); }                      \
            put(dx, i, n, d);                                                                      \
        }                                                                                          \
    }
ACTIVATION(relu, v > 0.0f ? v : 0.0f, v > 0.0f ? 1.0f : 0.0f)
ACTIVATION(squared_relu, v > 0.0f ? v * v : 0.0f, v > 0.0f ? 2.0f * v : 0.0f)
ACTIVATION(gelu, gelu(v), gelu_slope(v))

// Gated activations: x is [rows, 2 * width], gate first; y = act(gate) * up (Shazeer, 2020). `width` is a
// multiple of eight.
#define GATED(name, value, slope)                                                                  \
    extern "C" __global__ void name##_forward(const T *x, T *y, u32 rows, u32 width) {             \
        u64 n = (u64)rows * width;                                                                 \
        EACH8(i, n) {                                                                              \
            u64 row = i / width, c = i % width;                                                    \
            const T *at = x + row * 2 * width + c;                                                 \
            float g[8], u[8];                                                                      \
            load8(at, g);                                                                          \
            load8(at + width, u);                                                                  \
            for (int k = 0; k < 8; k++) { float v = g[k]; u[k] *= (value); }                       \
            store8(y + i, u);                                                                      \
        }                                                                                          \
    }                                                                                              \
    extern "C" __global__ void name##_backward(const T *dy, const T *x, T *dx, u32 rows, u32 width) { \
        u64 n = (u64)rows * width;                                                                 \
        EACH8(i, n) {                                                                              \
            u64 row = i / width, c = i % width, at = row * 2 * width + c;                          \
            float g[8], u[8], d[8];                                                                \
            load8(x + at, g);                                                                      \
            load8(x + at + width, u);                                                              \
            load8(dy + i, d);                                                                      \
            for (int k = 0; k < 8; k++) {                                                          \
                float v = g[k];                                                                    \
                g[k] = d[k] * u[k] * (slope);                                                      \
                u[k] = d[k] * (value);                                                             \
            }                                                                                      \
            store8(dx + at, g);                                                                    \
            store8(dx + at + width, u);                                                            \
        }                                                                                          \
    }
GATED(swiglu, v * sigmoid(v), sigmoid(v) * (1.0f + v * (1.0f - sigmoid(v))))
GATED(geglu, gelu(v), gelu_slope(v))

// Rotary position embedding in place on the first `heads` heads of rows of `stride` elements. `table` is
// [seq, head_dim / 2] of (cos, sin); `sign` is -1 for the gradient. Pairs are (i, i + head_dim / 2), or
// neighbours if `neighbours` is not 0 (Su et al., 2021).
extern "C" __global__ void rope(T *x, const float2 *table, u32 rows, u32 stride, u32 heads, u32 head_dim,
                                u32 seq, u32 neighbours, float sign) {
    u32 half = head_dim / 2;
    u64 n = (u64)rows * heads * half;
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x) {
        u32 pair = (u32)(i % half);
        u64 rest = i / half;
        u32 head = (u32)(rest % heads);
        u64 row = rest / heads;
        T *at = x + row * stride + (u64)head * head_dim;
        T *pa = neighbours ? at + 2 * pair : at + pair, *pb = neighbours ? at + 2 * pair + 1 : at + half + pair;
        float2 turn = table[(row % seq) * half + pair];
        float a = to_float(*pa), b = to_float(*pb), s = sign * turn.y;
        store(pa, a * turn.x - b * s);
        store(pb, a * s + b * turn.x);
    }
}

// Sums of columns over a block's rows, in `partial` [blocks, width]: rows b, b + blocks, … in order.
// Threads take eight columns each; gridDim.y covers the columns.
extern "C" __global__ void __launch_bounds__(256)
column_sums(const T *x, float *partial, u32 rows, u32 width) {
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 c = (blockIdx.y * 32 + lane) * 8;
    float sum[8];
    for (int k = 0; k < 8; k++) sum[k] = 0.0f;
    if (c < width)
        for (u64 row = (u64)blockIdx.x * 8 + warp; row < rows; row += (u64)gridDim.x * 8) {
            float v[8];
            if (width % 8 == 0) load8(x + row * width + c, v);
            else load_some(x + row * width + c, (int)(width - c), v);
            for (int k = 0; k < 8; k++) sum[k] += v[k];
        }
    __shared__ float part[8][256];
    for (int k = 0; k < 8; k++) part[warp][lane * 8 + k] = sum[k];
    __syncthreads();
    u32 at = blockIdx.y * 256 + threadIdx.x;
    if (at < width) {
        float all = 0.0f;
        for (int w = 0; w < 8; w++) all += part[w][threadIdx.x];
        partial[(u64)blockIdx.x * width + at] = all;
    }
}

// Folds `parts` rows of `stride` elements of partial sums into a gradient: 32 columns a block, 8 slices of
// rows in order, then the slices in order.
extern "C" __global__ void __launch_bounds__(256)
fold_partials(const float *partial, float *y, u32 parts, u64 stride, u32 width, u32 fresh) {
    u32 lane = threadIdx.x % 32, slice = threadIdx.x / 32;
    u32 c = blockIdx.x * 32 + lane;
    float sum = 0.0f;
    if (c < width)
        for (u32 p = slice; p < parts; p += 8) sum += partial[(u64)p * stride + c];
    __shared__ float part[8][33];
    part[slice][lane] = sum;
    __syncthreads();
    if (slice == 0 && c < width) {
        float all = 0.0f;
        for (int s = 0; s < 8; s++) all += part[s][lane];
        y[c] = fresh ? all : y[c] + all;
    }
}

// Sum of squares of every block of 1024 elements: a warp to each.
extern "C" __global__ void __launch_bounds__(256) block_squares(const float *x, float *sums, u64 blocks) {
    u64 block = (u64)blockIdx.x * 8 + threadIdx.x / 32;
    if (block >= blocks) return;
    const float *at = x + block * 1024 + (threadIdx.x % 32) * 4;
    float sum = 0.0f;
    #pragma unroll
    for (int k = 0; k < 8; k++) {
        float4 v = *(const float4 *)(at + k * 128);
        sum += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) sums[block] = sum;
}

// Rows of a table, and those of positions if given: y = table[id] + positions[row % seq].
extern "C" __global__ void embedding_forward(const u32 *ids, const T *table, const T *positions, T *y, u32 rows,
                                             u32 width, u32 words, u32 seq) {
    u64 n = (u64)rows * width;
    EACH8(i, n) {
        u64 row = i / width, c = i % width;
        u32 word = ids[row];
        float v[8], p[8];
        if (word < words) load8(table + (u64)word * width + c, v);
        else for (int k = 0; k < 8; k++) v[k] = 0.0f;
        if (positions) {
            load8(positions + (row % seq) * width + c, p);
            for (int k = 0; k < 8; k++) v[k] = rounded((T *)0, v[k]) + p[k];
        }
        store8(y + i, v);
    }
}

// A block to each segment of rows of one word: `order` lists the rows by word, and segment i takes those from
// `starts[i]` to `starts[i + 1]`. The sums of a segment go to the table if `places[i]` is negative, for a word
// with this segment alone, and to a row of `partial` otherwise. Rows are added in order.
extern "C" __global__ void embedding_segments(const T *dy, const u32 *order, const u32 *starts, const u32 *words,
                                              const int *places, float *dtable, float *partial, u32 width) {
    u32 first = starts[blockIdx.x], last = starts[blockIdx.x + 1];
    int place = places[blockIdx.x];
    for (u32 c = threadIdx.x * 8; c < width; c += blockDim.x * 8) {
        float sum[8];
        float *to = place < 0 ? dtable + (u64)words[blockIdx.x] * width + c : partial + (u64)place * width + c;
        if (place < 0) load8(to, sum);
        else for (int k = 0; k < 8; k++) sum[k] = 0.0f;
        u32 r = first;
        for (; r + 4 <= last; r += 4) {
            float v[4][8];
            #pragma unroll
            for (int j = 0; j < 4; j++) load8(dy + (u64)order[r + j] * width + c, v[j]);
            #pragma unroll
            for (int j = 0; j < 4; j++)
                #pragma unroll
                for (int k = 0; k < 8; k++) sum[k] += v[j][k];
        }
        for (; r < last; r++) {
            float v[8];
            load8(dy + (u64)order[r] * width + c, v);
            for (int k = 0; k < 8; k++) sum[k] += v[k];
        }
        store8(to, sum);
    }
}

// Adds the segments of words that have several, in order: word i has rows `starts[i]` to `starts[i + 1]` of
// `partial`.
extern "C" __global__ void embedding_fold(const float *partial, const u32 *starts, const u32 *words, float *dtable,
                                          u32 width) {
    u32 first = starts[blockIdx.x], last = starts[blockIdx.x + 1];
    for (u32 c = threadIdx.x; c < width; c += blockDim.x) {
        float *to = dtable + (u64)words[blockIdx.x] * width + c;
        float sum = *to;
        #pragma unroll 4
        for (u32 r = first; r < last; r++) sum += partial[(u64)r * width + c];
        *to = sum;
    }
}

// Gradient of a position table: rows of one position over the sequences, in order.
extern "C" __global__ void position_gradient(const T *dy, float *dtable, u32 rows, u32 width, u32 seq, u32 fresh) {
    u64 n = (u64)seq * width;
    EACH8(i, n) {
        float sum[8], v[8];
        if (fresh) for (int k = 0; k < 8; k++) sum[k] = 0.0f;
        else load8(dtable + i, sum);
        for (u64 row = i / width; row < rows; row += seq) {
            load8(dy + row * width + i % width, v);
            for (int k = 0; k < 8; k++) sum[k] += v[k];
        }
        store8(dtable + i, sum);
    }
}

// Constants of an update, written by the host before the iteration; the clip factor and a skipped step come
// from the device.
struct UpdateConstants { float keep, rate, correction, towards, beta2, fresh, epsilon, scale; };

extern "C" __global__ void __launch_bounds__(256)
adamw(float *master, const float *g, float *m, float *v, T *weights, u64 n, const UpdateConstants *constants,
      const float *factor) {
    UpdateConstants c = *constants;
    float scale = c.scale * (factor ? *factor : 1.0f);
    EACH8(i, n) {
        float p8[8], g8[8], m8[8], v8[8];
        get(master, i, n, p8);
        get(g, i, n, g8);
        get(m, i, n, m8);
        get(v, i, n, v8);
        #pragma unroll
        for (int k = 0; k < 8; k++) {
            float d = g8[k] * scale;
            m8[k] += c.towards * (d - m8[k]);
            v8[k] = c.beta2 * v8[k] + c.fresh * (d * d);
            p8[k] = p8[k] * c.keep - c.rate * m8[k] / (sqrtf(v8[k]) / c.correction + c.epsilon);
        }
        put(m, i, n, m8);
        put(v, i, n, v8);
        put(master, i, n, p8);
        if (weights) put(weights, i, n, p8);
    }
}
