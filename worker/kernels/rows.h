/* What the C kernels of recurrent layers share: a step's rows, and vectors of floats. */
#pragma once
#include "exact.h"

#define CHUNK 64 /* configs/recurrent.py: STATE_CHUNK */

/* A step's rows, as attention/state_pool.py's RowStates has them. */
typedef struct {
    const int32_t *rows, *cu_seqlens, *ends, *before, *after;
    int64_t num_rows;
} Rows;

/* One row of a step at work. Positions count the tokens of the request. */
typedef struct {
    size_t row, first; /* of its tokens in the step */
    int64_t start, end, before, after;
} Row;

static inline Row row_of(const Rows *r, int64_t i) {
    int64_t first = r->cu_seqlens[i], end = r->ends[i], start = end - (r->cu_seqlens[i + 1] - first);
    return (Row){(size_t)r->rows[i], (size_t)first, start, end, r->before[i], r->after[i]};
}

static inline v16 load_n(const void *p, size_t at, int type, size_t n) {
    return n < LANES ? load_some(p, at, type, n) : load16(p, at, type);
}

static inline void store_n(void *p, size_t at, int type, v16 x, size_t n) {
    if (n < LANES) store_some(p, at, type, x, n);
    else store16(p, at, type, x);
}

static inline float exp1(float x) { return exp16(all(x))[0]; }

static inline float softplus(float x) { return x > 20.0f ? x : (float)log1p(exp((double)x)); }

static inline float dot(const float *x, const float *y, int64_t n) {
    v16 sum = {0};
    for (int64_t i = 0; i < n; i += LANES) sum = load16(x, (size_t)i, FP32) * load16(y, (size_t)i, FP32) + sum;
    return sum16(sum);
}

/* y += x * by */
static inline void add(float *y, const float *x, float by, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES)
        store16(y, (size_t)i, FP32, load16(x, (size_t)i, FP32) * by + load16(y, (size_t)i, FP32));
}
