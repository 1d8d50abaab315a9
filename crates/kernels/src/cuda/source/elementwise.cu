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

// Eight columns from `c` on of a row of `width` elements.
template <typename E> __device__ __forceinline__ void get_row(const E *row, u32 c, u32 width, float (&x)[8]) {
    if (width % 8 == 0) load8(row + c, x);
    else load_some(row + c, (int)(width - c), x);
}
template <typename E> __device__ __forceinline__ void put_row(E *row, u32 c, u32 width, const float (&x)[8]) {
    if (width % 8 == 0) store8(row + c, x);
    else store_some(row + c, (int)(width - c), x);
}
#define EACH_CHUNK(row, c, rows, width)                                                            \
    for (u64 chunk_ = blockIdx.x * (u64)blockDim.x + threadIdx.x, chunks_ = ((width) + 7) / 8,     \
             row = chunk_ / chunks_, c = chunk_ % chunks_ * 8;                                     \
         chunk_ < (rows) * chunks_;                                                                \
         chunk_ += (u64)gridDim.x * blockDim.x, row = chunk_ / chunks_, c = chunk_ % chunks_ * 8)

// y = x + bias.
extern "C" __global__ void bias_forward(const T *x, const T *bias, T *y, u32 rows, u32 width) {
    EACH_CHUNK(row, c, rows, width) {
        float v[8], b[8];
        get_row(x + row * width, c, width, v);
        get_row(bias, c, width, b);
        for (int k = 0; k < 8; k++) v[k] += b[k];
        put_row(y + row * width, c, width, v);
    }
}

// Gated activations: x is [rows, 2 * width], gate first; y = act(gate) * up (Shazeer, 2020).
#define GATED(name, value, slope)                                                                  \
    extern "C" __global__ void name##_forward(const T *x, T *y, u32 rows, u32 width) {             \
        EACH_CHUNK(row, c, rows, width) {                                                          \
            const T *at = x + row * 2 * width;                                                     \
            float g[8], u[8];                                                                      \
            get_row(at, c, width, g);                                                              \
            get_row(at + width, c, width, u);                                                      \
            for (int k = 0; k < 8; k++) { float v = g[k]; u[k] *= (value); }                       \
            put_row(y + row * width, c, width, u);                                                 \
        }                                                                                          \
    }                                                                                              \
    extern "C" __global__ void name##_backward(const T *dy, const T *x, T *dx, u32 rows, u32 width) { \
        EACH_CHUNK(row, c, rows, width) {                                                          \
            u64 at = row * 2 * width;                                                              \
            float g[8], u[8], d[8];                                                                \
            get_row(x + at, c, width, g);                                                          \
            get_row(x + at + width, c, width, u);                                                  \
            get_row(dy + row * width, c, width, d);                                                \
            for (int k = 0; k < 8; k++) {                                                          \
                float v = g[k];                                                                    \
                g[k] = d[k] * u[k] * (slope);                                                      \
                u[k] = d[k] * (value);                                                             \
            }                                                                                      \
            put_row(dx + at, c, width, g);                                                         \
            put_row(dx + at + width, c, width, u);                                                 \
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

// Sums of columns over a block's rows, in `partial` [blocks, width], in the order of a norm's gradient: the block has
// `groups` groups of threads, each with rows of its own, whose sums are added in order. Threads take eight columns
// each; gridDim.y covers the columns.
extern "C" __global__ void __launch_bounds__(256)
column_sums(const T *x, float *partial, u32 rows, u32 width, u32 groups) {
    u32 lanes = 256 / groups, lane = threadIdx.x % lanes, group = threadIdx.x / lanes;
    u32 c = (blockIdx.y * lanes + lane) * 8;
    float sum[8];
    for (int k = 0; k < 8; k++) sum[k] = 0.0f;
    if (c < width) {
        u64 row = (u64)blockIdx.x * groups + group, step = (u64)gridDim.x * groups;
        for (; row + 3 * step < rows; row += 4 * step) {
            float v[4][8];
            #pragma unroll
            for (int j = 0; j < 4; j++) get_row(x + (row + j * step) * width, c, width, v[j]);
            #pragma unroll
            for (int j = 0; j < 4; j++)
                #pragma unroll
                for (int k = 0; k < 8; k++) sum[k] += v[j][k];
        }
        for (; row < rows; row += step) {
            float v[8];
            get_row(x + row * width, c, width, v);
            for (int k = 0; k < 8; k++) sum[k] += v[k];
        }
    }
    __shared__ float part[256 * 8];
    for (int k = 0; k < 8; k++) part[threadIdx.x * 8 + k] = sum[k];
    __syncthreads();
    if (group == 0 && c < width)
        for (int k = 0; k < 8 && c + k < width; k++) {
            float all = part[lane * 8 + k];
            for (u32 g = 1; g < groups; g++) all += part[(g * lanes + lane) * 8 + k];
            partial[(u64)blockIdx.x * width + c + k] = all;
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

// Position of a row among sequences of which a rank holds `seq` tokens each: those at `places`, or all. Its rows
// begin `offset` tokens behind the start of a sequence.
__device__ __forceinline__ u64 place_of(const u32 *places, u32 seq, u32 offset, u64 row) {
    u32 at = (u32)((row + offset) % seq);
    return places ? places[at] : at;
}

// Rows of a table whose first row is word `first`, and those of positions if given.
extern "C" __global__ void embedding_forward(const u32 *ids, const T *table, const T *positions, T *y, u32 rows,
                                             u32 width, u32 words, u32 first, const u32 *places, u32 seq, u32 offset) {
    EACH_CHUNK(row, c, rows, width) {
        u32 word = ids[row] - first;
        float v[8], p[8];
        if (word < words) get_row(table + (u64)word * width, c, width, v);
        else for (int k = 0; k < 8; k++) v[k] = 0.0f;
        if (positions) {
            get_row(positions + place_of(places, seq, offset, row) * width, c, width, p);
            for (int k = 0; k < 8; k++) v[k] = rounded((T *)0, v[k]) + p[k];
        }
        put_row(y + row * width, c, width, v);
    }
}

// y = x + positions of the rows.
extern "C" __global__ void position_forward(const T *x, const T *positions, T *y, u32 rows, u32 width,
                                            const u32 *places, u32 seq, u32 offset) {
    EACH_CHUNK(row, c, rows, width) {
        float v[8], p[8];
        get_row(x + row * width, c, width, v);
        get_row(positions + place_of(places, seq, offset, row) * width, c, width, p);
        for (int k = 0; k < 8; k++) v[k] += p[k];
        put_row(y + row * width, c, width, v);
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
        if (place < 0) get_row(to - c, c, width, sum);
        else for (int k = 0; k < 8; k++) sum[k] = 0.0f;
        u32 r = first;
        for (; r + 4 <= last; r += 4) {
            float v[4][8];
            #pragma unroll
            for (int j = 0; j < 4; j++) get_row(dy + (u64)order[r + j] * width, c, width, v[j]);
            #pragma unroll
            for (int j = 0; j < 4; j++)
                #pragma unroll
                for (int k = 0; k < 8; k++) sum[k] += v[j][k];
        }
        for (; r < last; r++) {
            float v[8];
            get_row(dy + (u64)order[r] * width, c, width, v);
            for (int k = 0; k < 8; k++) sum[k] += v[k];
        }
        put_row(to - c, c, width, sum);
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
extern "C" __global__ void position_gradient(const T *dy, float *dtable, u32 rows, u32 width, u32 fresh,
                                             const u32 *places, u32 seq, u32 offset) {
    EACH_CHUNK(at, c, seq, width) {
        float *to = dtable + (places ? places[at] : at) * width;
        float sum[8], v[8];
        if (fresh) for (int k = 0; k < 8; k++) sum[k] = 0.0f;
        else get_row(to, c, width, sum);
        for (u64 row = (at + seq - offset % seq) % seq; row < rows; row += seq) {
            get_row(dy + row * width, c, width, v);
            for (int k = 0; k < 8; k++) sum[k] += v[k];
        }
        put_row(to, c, width, sum);
    }
}

// Folds the partial sums [parts, 3, width] of a norm's backward pass into up to three gradients, one for each
// blockIdx.y; bit i of `fresh` overwrites the i-th.
extern "C" __global__ void __launch_bounds__(256)
fold_norm(const float *partial, float *a, float *b, float *d, u32 parts, u32 width, u32 fresh) {
    float *y = blockIdx.y == 0 ? a : blockIdx.y == 1 ? b : d;
    if (!y) return;
    u32 lane = threadIdx.x % 32, slice = threadIdx.x / 32;
    u32 c = blockIdx.x * 32 + lane;
    float sum = 0.0f;
    if (c < width)
        for (u32 p = slice; p < parts; p += 8) sum += partial[((u64)p * 3 + blockIdx.y) * width + c];
    __shared__ float part[8][33];
    part[slice][lane] = sum;
    __syncthreads();
    if (slice == 0 && c < width) {
        float all = 0.0f;
        for (int s = 0; s < 8; s++) all += part[s][lane];
        y[c] = fresh >> blockIdx.y & 1 ? all : y[c] + all;
    }
}

// Sum over a block of 1024 threads, in a fixed order; thread 0 has it.
__device__ __forceinline__ float block_sum(float x) {
    __shared__ float part[32];
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = x;
    __syncthreads();
    x = warp_sum(part[threadIdx.x % 32]);
    __syncthreads();
    return x;
}

// The sum of `n` numbers, added to `y` unless fresh.
extern "C" __global__ void __launch_bounds__(1024) sum_all(const float *x, float *y, u64 n, u32 fresh) {
    float sum = 0.0f;
    for (u64 i = threadIdx.x; i < n; i += 1024) sum += x[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) *y = fresh ? sum : *y + sum;
}

// Sums of squares of tensors from those of their blocks: a block to each (first block, blocks, slot) of `table`.
extern "C" __global__ void __launch_bounds__(1024) tensor_squares(const float *blocks, const u32 *table, float *sums) {
    const u32 *own = table + 3 * blockIdx.x;
    float sum = 0.0f;
    for (u32 i = threadIdx.x; i < own[1]; i += 1024) sum += blocks[own[0] + i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) sums[own[2]] = sum;
}

// The root of the sum of `n` numbers.
extern "C" __global__ void __launch_bounds__(1024) root_of_sum(const float *x, float *y, u64 n) {
    float sum = 0.0f;
    for (u64 i = threadIdx.x; i < n; i += 1024) sum += x[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) *y = sqrtf(sum);
}

// Constants of an update. `clip` is the longest gradient, or 0; a gradient of infinite norm is skipped. `decays`
// has a byte for every 1024 elements: whether their weights decay.
struct Update { float keep, rate, correction, towards, beta2, fresh, epsilon, scale, clip; };

__device__ __forceinline__ bool factor_of(const Update &c, const float *norm, float *factor) {
    *factor = c.scale;
    if (!norm) return true;
    float length = *norm * c.scale;
    if (!(fabsf(length) < INFINITY)) return false;
    if (c.clip > 0.0f) *factor *= fminf(c.clip / (length + 1e-6f), 1.0f);
    return true;
}

extern "C" __global__ void __launch_bounds__(256)
adamw(float *master, const float *g, float *m, float *v, T *weights, const u8 *decays, u64 n, Update c,
      const float *norm) {
    float scale;
    if (!factor_of(c, norm, &scale)) return;
    EACH8(i, n) {
        float p8[8], g8[8], m8[8], v8[8], keep = decays[i / 1024] ? c.keep : 1.0f;
        get(master, i, n, p8);
        get(g, i, n, g8);
        get(m, i, n, m8);
        get(v, i, n, v8);
        #pragma unroll
        for (int k = 0; k < 8; k++) {
            float d = g8[k] * scale;
            m8[k] += c.towards * (d - m8[k]);
            v8[k] = c.beta2 * v8[k] + c.fresh * (d * d);
            p8[k] = p8[k] * keep - c.rate * m8[k] / (sqrtf(v8[k]) / c.correction + c.epsilon);
        }
        put(m, i, n, m8);
        put(v, i, n, v8);
        put(master, i, n, p8);
        if (weights) put(weights, i, n, p8);
    }
}

// SGD, with momentum `beta2` if `m` is given. `keep` is the weight decay, `rate` the learning rate.
extern "C" __global__ void __launch_bounds__(256)
sgd(float *master, const float *g, float *m, T *weights, const u8 *decays, u64 n, Update c, const float *norm) {
    float scale;
    if (!factor_of(c, norm, &scale)) return;
    EACH8(i, n) {
        float p8[8], g8[8], m8[8], decay = decays[i / 1024] ? c.keep : 0.0f;
        get(master, i, n, p8);
        get(g, i, n, g8);
        if (m) get(m, i, n, m8);
        #pragma unroll
        for (int k = 0; k < 8; k++) {
            float d = g8[k] * scale + decay * p8[k];
            if (m) m8[k] = d = c.beta2 * m8[k] + d;
            p8[k] -= c.rate * d;
        }
        if (m) put(m, i, n, m8);
        put(master, i, n, p8);
        if (weights) put(weights, i, n, p8);
    }
}
