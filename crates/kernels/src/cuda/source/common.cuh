// Types, 8-element loads and stores, and fixed-order sums that every kernel shares.
//
// A module is compiled for one element type `T` and, where a kernel keeps rows in registers, for one
// width `WIDTH`. Arithmetic is f32. Sums run in a fixed order and nothing is atomic, so that equal
// inputs give equal bits.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif

struct bf16 { u16 bits; };
struct f16 { u16 bits; };

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float((u32)x.bits << 16); }
__device__ __forceinline__ float to_float(f16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}

__device__ __forceinline__ u32 pair_bits(bf16 *, float low, float high) {
    u32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
__device__ __forceinline__ u32 pair_bits(f16 *, float low, float high) {
    u32 y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}

__device__ __forceinline__ void store(float *p, float x) { *p = x; }
__device__ __forceinline__ void store(bf16 *p, float x) { p->bits = (u16)pair_bits(p, x, 0.0f); }
__device__ __forceinline__ void store(f16 *p, float x) { p->bits = (u16)pair_bits(p, x, 0.0f); }

// Value after rounding to an element type.
__device__ __forceinline__ float rounded(float *, float x) { return x; }
__device__ __forceinline__ float rounded(bf16 *p, float x) {
    return __uint_as_float(pair_bits(p, x, 0.0f) << 16);
}
__device__ __forceinline__ float rounded(f16 *p, float x) {
    f16 y;
    y.bits = (u16)pair_bits(p, x, 0.0f);
    return to_float(y);
}

// Eight consecutive elements, aligned to 16 bytes.
__device__ __forceinline__ void load8(const float *p, float (&x)[8]) {
    float4 a = *(const float4 *)p, b = *(const float4 *)(p + 4);
    x[0] = a.x; x[1] = a.y; x[2] = a.z; x[3] = a.w;
    x[4] = b.x; x[5] = b.y; x[6] = b.z; x[7] = b.w;
}
__device__ __forceinline__ void unpack8(bf16 *, uint4 v, float (&x)[8]) {
    u32 w[4] = {v.x, v.y, v.z, v.w};
    #pragma unroll
    for (int i = 0; i < 4; i++) {
        x[2 * i] = __uint_as_float(w[i] << 16);
        x[2 * i + 1] = __uint_as_float(w[i] & 0xffff0000u);
    }
}
__device__ __forceinline__ void unpack8(f16 *, uint4 v, float (&x)[8]) {
    u32 w[4] = {v.x, v.y, v.z, v.w};
    #pragma unroll
    for (int i = 0; i < 4; i++) {
        f16 low, high;
        low.bits = (u16)w[i];
        high.bits = (u16)(w[i] >> 16);
        x[2 * i] = to_float(low);
        x[2 * i + 1] = to_float(high);
    }
}
__device__ __forceinline__ void load8(const bf16 *p, float (&x)[8]) { unpack8((bf16 *)0, *(const uint4 *)p, x); }
__device__ __forceinline__ void load8(const f16 *p, float (&x)[8]) { unpack8((f16 *)0, *(const uint4 *)p, x); }
__device__ __forceinline__ void store8(float *p, const float (&x)[8]) {
    *(float4 *)p = make_float4(x[0], x[1], x[2], x[3]);
    *(float4 *)(p + 4) = make_float4(x[4], x[5], x[6], x[7]);
}
template <typename H> __device__ __forceinline__ void store8_half(H *p, const float (&x)[8]) {
    uint4 v;
    v.x = pair_bits(p, x[0], x[1]);
    v.y = pair_bits(p, x[2], x[3]);
    v.z = pair_bits(p, x[4], x[5]);
    v.w = pair_bits(p, x[6], x[7]);
    *(uint4 *)p = v;
}
__device__ __forceinline__ void store8(bf16 *p, const float (&x)[8]) { store8_half(p, x); }
__device__ __forceinline__ void store8(f16 *p, const float (&x)[8]) { store8_half(p, x); }

// The first `n` of eight elements, at any alignment; the others are zero.
template <typename E> __device__ __forceinline__ void load_some(const E *p, int n, float (&x)[8]) {
    #pragma unroll
    for (int i = 0; i < 8; i++) x[i] = i < n ? to_float(p[i]) : 0.0f;
}
template <typename E> __device__ __forceinline__ void store_some(E *p, int n, const float (&x)[8]) {
    #pragma unroll
    for (int i = 0; i < 8; i++)
        if (i < n) store(p + i, x[i]);
}

// Eight elements of a row of `width` from column `c` on: in one access where rows stay aligned.
template <int WIDTH_, typename E>
__device__ __forceinline__ void load_row(const E *row, int c, float (&x)[8]) {
    if (WIDTH_ % 8 == 0) load8(row + c, x);
    else load_some(row + c, WIDTH_ - c, x);
}
template <int WIDTH_, typename E>
__device__ __forceinline__ void store_row(E *row, int c, const float (&x)[8]) {
    if (WIDTH_ % 8 == 0) store8(row + c, x);
    else store_some(row + c, WIDTH_ - c, x);
}

// Sum over the lanes of a warp, in a butterfly: every lane gets the same bits.
__device__ __forceinline__ float warp_sum(float x) {
    #pragma unroll
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}
__device__ __forceinline__ float warp_max(float x) {
    #pragma unroll
    for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
}
