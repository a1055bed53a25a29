/* Norms, gated activations and soft caps whose every element follows from its own row alone, by the same operations
wherever it lies in a vector. */
#include "exact.h"

/* Below as many elements the threads take longer to wake than the work takes. */
enum { FEW = 1 << 15 };

static inline v16 load_up_to_16(const void *p, size_t i, int type, size_t n) {
    return n < LANES ? load_some(p, i, type, n) : load16(p, i, type);
}

static inline void store_up_to_16(void *p, size_t i, int type, v16 x, size_t n) {
    if (n < LANES) store_some(p, i, type, x, n);
    else store16(p, i, type, x);
}

typedef struct {
    const void *x, *weight;
    void *residual, *out; /* residual: NULL, or of out's type */
    size_t num_rows, inner, size;
    size_t outer_stride, inner_stride, residual_stride; /* row i of x: (i / inner) * outer + (i % inner) * inner's */
    int x_type, weight_type, out_type;
    float eps;
} Norm;

/* out = x / sqrt(mean(x^2) + eps) * weight, x being residual += x, rounded, where there is a residual. */
void rms_norms(const Norm *norm, int threads) {
    size_t size = norm->size;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && norm->num_rows * size > FEW)
    for (size_t row = 0; row < norm->num_rows; row++) {
        const void *x = norm->x;
        size_t from = row / norm->inner * norm->outer_stride + row % norm->inner * norm->inner_stride;
        int type = norm->x_type;
        v16 squares = {0};
        for (size_t i = 0; i < size; i += LANES) {
            v16 y = load_up_to_16(x, from + i, type, size - i);
            if (norm->residual) {
                size_t at = row * norm->residual_stride + i;
                y += load_up_to_16(norm->residual, at, norm->out_type, size - i);
                store_up_to_16(norm->residual, at, norm->out_type, y, size - i);
                y = load_up_to_16(norm->residual, at, norm->out_type, size - i);
            }
            squares = y * y + squares;
        }
        if (norm->residual) x = norm->residual, from = row * norm->residual_stride, type = norm->out_type;
        v16 scale = all(1.0f / sqrtf(sum16(squares) / (float)size + norm->eps));
        for (size_t i = 0; i < size; i += LANES) {
            v16 y = load_up_to_16(x, from + i, type, size - i) * scale;
            y *= load_up_to_16(norm->weight, i, norm->weight_type, size - i);
            store_up_to_16(norm->out, row * size + i, norm->out_type, y, size - i);
        }
    }
}

enum { SILU = 0, GELU = 1, GELU_TANH = 2, CLAMPED = 3 }; /* as cpu_pointwise.py numbers them */

static inline v16 activated(v16 x, int activation) {
    if (activation == GELU) {
        v16 y;
        for (int i = 0; i < LANES; i++) y[i] = erff(x[i] * 0.707106781f);
        return 0.5f * x * (1.0f + y);
    }
    v16 y = x;
    /* (1 + tanh(u)) / 2 = 1 / (1 + e^-2u) */
    if (activation == GELU_TANH) y = 1.595769122f * (x + 0.044715f * x * x * x);
    return x / (1.0f + exp16(-y));
}

static inline v16 at_most(v16 x, float limit) {
    i16 above = x > limit;
    return (v16)((above & (i16)all(limit)) | (~above & (i16)x)); /* NaN passes */
}

/* x = x * sigmoid(gate) */
void mul_sigmoid(void *x, const void *gate, size_t n, int type, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && n > FEW)
    for (size_t i = 0; i < n; i += LANES) {
        v16 by = 1.0f + exp16(-load_up_to_16(gate, i, type, n - i));
        store_up_to_16(x, i, type, load_up_to_16(x, i, type, n - i) / by, n - i);
    }
}

/* x [num_rows][2 * size], gate then up -> out [num_rows][size]. Limit and alpha are those of CLAMPED. */
void act_and_mul(const void *x, size_t x_stride, void *out, size_t num_rows, size_t size, int type, int activation,
                 float limit, float alpha, int threads) {
    size_t parts = (size + LANES - 1) / LANES;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && num_rows * size > FEW)
    for (size_t part = 0; part < num_rows * parts; part++) {
        size_t row = part / parts, i = part % parts * LANES, from = row * x_stride + i;
        v16 gate = load_up_to_16(x, from, type, size - i), up = load_up_to_16(x, from + size, type, size - i);
        if (activation == CLAMPED) {
            gate = at_most(gate, limit), up = 1.0f - at_most(-at_most(up, limit), limit);
            gate = gate / (1.0f + exp16(-alpha * gate));
        } else {
            gate = activated(gate, activation);
        }
        store_up_to_16(out, row * size + i, type, gate * up, size - i);
    }
}

/* x = cap * tanh(x / cap) */
void softcap(float *x, size_t size, float cap, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && size > FEW)
    for (size_t i = 0; i < size; i += LANES) {
        v16 y = load_up_to_16(x, i, FP32, size - i) / cap;
        i16 sign = (i16)y & INT32_MIN;
        v16 e = exp16(-2.0f * (v16)((i16)y ^ sign));
        v16 capped = cap * ((1.0f - e) / (1.0f + e));
        store_up_to_16(x, i, FP32, (v16)((i16)capped | sign), size - i);
    }
}

/* out[i] = e^(x[i] - max) / sum of e^(over - max): rows of x [num_rows][x_size], of over [num_rows][over_size]. */
void softmax(const float *x, size_t x_stride, size_t x_size, const float *over, size_t over_stride, size_t over_size,
             float *out, size_t num_rows) {
    for (size_t row = 0; row < num_rows; row++, x += x_stride, over += over_stride, out += x_size) {
        float most = over[0];
        for (size_t i = 1; i < over_size; i++) most = over[i] > most ? over[i] : most;
        v16 sums = {0};
        for (size_t i = 0; i < over_size; i += LANES) {
            v16 e = exp16(load_up_to_16(over, i, FP32, over_size - i) - most);
            for (size_t j = over_size - i; j < LANES; j++) e[j] = 0;
            sums += e;
        }
        v16 sum = all(sum16(sums));
        for (size_t i = 0; i < x_size; i += LANES)
            store_up_to_16(out, i, FP32, exp16(load_up_to_16(x, i, FP32, x_size - i) - most) / sum, x_size - i);
    }
}
