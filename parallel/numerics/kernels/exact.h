/* What the C kernels share: vectors of 16 floats, the element types, and functions whose every bit is ours.

The order of arithmetic is the contract: 16 lanes whatever the processor has, one fused multiply-add at a time
(the build contracts a * b + c), lanes summed as `sum16` does. So a machine with other vectors gives the same bits. */
#pragma once
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && !defined(__FMA__)
#error "this processor has no fused multiply-add"
#endif

#define LANES 16
typedef float v16 __attribute__((vector_size(64)));
typedef int32_t i16 __attribute__((vector_size(64)));
typedef uint32_t u16 __attribute__((vector_size(64)));
typedef uint16_t h16 __attribute__((vector_size(32)));
typedef _Float16 f16 __attribute__((vector_size(32)));

/* Element types, as parallel/numerics/kernels/c_library.py numbers them. */
enum { FP32 = 0, BF16 = 1, FP16 = 2 };
static inline size_t size_of(int type) { return type == FP32 ? 4 : 2; }

static inline v16 all(float x) { return (v16){0} + x; }

/* 16 elements from p[i] on, as floats. */
static inline v16 load16(const void *p, size_t i, int type) {
    if (type == FP32) {
        v16 x;
        memcpy(&x, (const float *)p + i, sizeof x);
        return x;
    }
    if (type == BF16) {
        h16 h;
        memcpy(&h, (const uint16_t *)p + i, sizeof h);
        u16 wide = __builtin_convertvector(h, u16) << 16;
        return (v16)wide;
    }
    f16 h;
    memcpy(&h, (const _Float16 *)p + i, sizeof h);
    return __builtin_convertvector(h, v16);
}

/* Rounds to nearest, ties to even; a NaN stays one. */
static inline void store16(void *p, size_t i, int type, v16 x) {
    if (type == FP32) {
        memcpy((float *)p + i, &x, sizeof x);
    } else if (type == BF16) {
        u16 bits = (u16)x;
        u16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
        i16 is_nan = x != x;
        rounded = (u16)((is_nan & 0x7fc0) | (~is_nan & (i16)rounded));
        h16 h = __builtin_convertvector(rounded, h16);
        memcpy((uint16_t *)p + i, &h, sizeof h);
    } else {
        f16 h = __builtin_convertvector(x, f16);
        memcpy((_Float16 *)p + i, &h, sizeof h);
    }
}

static inline float load1(const void *p, size_t i, int type) {
    if (type == FP32) return ((const float *)p)[i];
    if (type == FP16) return (float)((const _Float16 *)p)[i];
    uint32_t bits = (uint32_t)((const uint16_t *)p)[i] << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

/* The first n of 16 elements; the others are zeros, and are not touched in memory. */
static inline v16 load_some(const void *p, size_t i, int type, size_t n) {
    v16 x = {0};
    for (size_t j = 0; j < n; j++) x[j] = load1(p, i + j, type);
    return x;
}

static inline void store_some(void *p, size_t i, int type, v16 x, size_t n) {
    char whole[64];
    store16(whole, 0, type, x);
    memcpy((char *)p + i * size_of(type), whole, n * size_of(type));
}

/* ((x0 + x8) + (x4 + x12)) + ... : halves on halves. */
static inline float sum16(v16 x) {
    float s[16];
    memcpy(s, &x, sizeof s);
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; i++) s[i] += s[i + width];
    return s[0];
}

/* e^x within 2 ulp: 2^n * p(r), x = n ln 2 + r. 0 below -103, infinity above 88.7; NaN stays NaN. */
static inline v16 exp16(v16 x) {
    i16 low = x < -103.0f, high = x > 88.7228f;
    v16 y = (v16)((~(low | high)) & (i16)x); /* keeps the exponent in range; NaN passes */
    v16 n = y * 1.44269504f + 12582912.0f - 12582912.0f;
    v16 r = n * -0.693145752f + y;
    r = n * -1.42860677e-6f + r;
    v16 p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r;
    p = p + 1.0f;
    i16 e = __builtin_convertvector(n, i16);
    i16 half = e >> 1; /* in two steps, so that results below the smallest normal number come out as well */
    v16 a = (v16)((half + 127) << 23), b = (v16)((e - half + 127) << 23);
    v16 result = p * a * b;
    i16 kept = (~(low | high)) & (i16)result;
    return (v16)(kept | (high & 0x7f800000));
}
