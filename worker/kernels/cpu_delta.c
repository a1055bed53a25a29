/* Gated DeltaNet: every output follows from its row's own tokens alone, by the same operations however the row is cut
into steps. */
#include "rows.h"
#include <omp.h>

/* Gated DeltaNet, as configs/delta_net.py has it. Sizes are this rank's; heads' sizes are whole vectors. */
typedef struct {
    const void *qkv, *z, *b, *a; /* a token's q heads, k heads and v heads; z and a start at strides of in_stride */
    const float *a_log, *dt_bias, *norm; /* [value_heads], [value_heads], [value_dim] */
    float *slots, *keys, *values, *decays; /* [slots][value_heads][key_dim][value_dim]; of recent tokens */
    void *out; /* [tokens][value_heads][value_dim] */
    int64_t in_stride, key_heads, value_heads, key_dim, value_dim, num_recent, type;
    float eps;
} Delta;

/* A row and a key head at work. Entry i is that of the token at `base` + i. */
typedef struct {
    const Delta *d;
    Row row;
    int64_t head, shared; /* value heads of the key head */
    float *keys, *query; /* [CHUNK][key_dim], [key_dim] */
    float *values, *decays; /* [shared][CHUNK][value_dim], [shared][CHUNK] */
    float *own; /* [shared][key_dim][value_dim]: states that moved in this step */
    float *read, *out; /* [value_dim] */
} Head;

/* n elements, scaled so that their length is `length`. */
static void normalised(float *out, const void *x, size_t at, int type, int64_t n, float length) {
    for (int64_t i = 0; i < n; i += LANES) store16(out, (size_t)i, FP32, load16(x, at + (size_t)i, type));
    float scale = 1.0f / sqrtf(dot(out, out, n) + 1e-6f) * length;
    for (int64_t i = 0; i < n; i++) out[i] *= scale;
}

static size_t recent(const Delta *d, const Row *w, int64_t position) {
    return w->row * (size_t)d->num_recent + (size_t)(position % d->num_recent);
}

/* out = norm(o) * silu(z), o being rounded as the output is. */
static void gated_norm(const Delta *d, const float *o, size_t token, int64_t head) {
    int type = (int)d->type;
    int64_t n = d->value_dim;
    size_t to = (token * (size_t)d->value_heads + (size_t)head) * (size_t)n, from = token * (size_t)d->in_stride;
    for (int64_t i = 0; i < n; i += LANES) store16(d->out, to + (size_t)i, type, load16(o, (size_t)i, FP32));
    v16 squares = {0};
    for (int64_t i = 0; i < n; i += LANES) {
        v16 y = load16(d->out, to + (size_t)i, type);
        squares = y * y + squares;
    }
    float scale = 1.0f / sqrtf(sum16(squares) / (float)n + d->eps);
    for (int64_t i = 0; i < n; i += LANES) {
        v16 z = load16(d->z, from + (size_t)(head * n + i), type);
        v16 y = load16(d->out, to + (size_t)i, type) * scale * load16(d->norm, (size_t)i, FP32);
        store16(d->out, to + (size_t)i, type, y * (z / (1.0f + exp16(-z))));
    }
}

/* The token of entry i, a new one, for value head v of the key head: its value and its output. */
static void add_token(Head *h, int64_t v, int64_t i, size_t token, const float *state) {
    const Delta *d = h->d;
    int type = (int)d->type;
    int64_t head = h->head * h->shared + v, keys = d->key_dim, n = d->value_dim;
    size_t from = token * (size_t)d->in_stride + (size_t)head;
    float *values = h->values + v * CHUNK * n, *decays = h->decays + v * CHUNK;
    float step = softplus(load1(d->a, from, type) + d->dt_bias[head]);
    float beta = 1.0f / (1.0f + exp1(-load1(d->b, from, type)));
    decays[i] = (i ? decays[i - 1] : 0.0f) - (float)exp((double)d->a_log[head]) * step;
    const float *key = h->keys + i * keys;
    memset(h->read, 0, (size_t)n * 4);
    memset(h->out, 0, (size_t)n * 4);
    if (state) {
        float left = exp1(decays[i]);
        for (int64_t k = 0; k < keys; k++) {
            add(h->read, state + k * n, key[k] * left, n);
            add(h->out, state + k * n, h->query[k] * left, n);
        }
    }
    for (int64_t j = 0; j < i; j++) {
        float left = exp1(decays[i] - decays[j]);
        add(h->read, values + j * n, dot(key, h->keys + j * keys, keys) * left, n);
        add(h->out, values + j * n, dot(h->query, h->keys + j * keys, keys) * left, n);
    }
    size_t value = (token * (size_t)(2 * d->key_heads * keys + d->value_heads * n)) +
                   (size_t)(2 * d->key_heads * keys + head * n);
    for (int64_t k = 0; k < n; k += LANES) {
        v16 new = beta * (load16(d->qkv, value + (size_t)k, type) - load16(h->read, (size_t)k, FP32));
        store16(values + i * n, (size_t)k, FP32, new);
    }
    add(h->out, values + i * n, dot(h->query, key, keys), n);
    gated_norm(d, h->out, token, head);
}

/* The state of value head v after a whole chunk. `state` may be the old one's place, or none. */
static void advance(Head *h, int64_t v, const float *state) {
    const Delta *d = h->d;
    int64_t keys = d->key_dim, n = d->value_dim;
    const float *values = h->values + v * CHUNK * n, *decays = h->decays + v * CHUNK;
    float left[CHUNK], *own = h->own + v * keys * n, all_left = exp1(decays[CHUNK - 1]);
    for (int64_t j = 0; j < CHUNK; j++) left[j] = exp1(decays[CHUNK - 1] - decays[j]);
    for (int64_t k = 0; k < keys; k++) {
        for (int64_t i = 0; i < n; i++) own[k * n + i] = state ? state[k * n + i] * all_left : 0.0f;
        for (int64_t j = 0; j < CHUNK; j++) add(own + k * n, values + j * n, h->keys[j * keys + k] * left[j], n);
    }
}

static void run_head(Head *h) {
    const Delta *d = h->d;
    const Row *w = &h->row;
    int64_t keys = d->key_dim, n = d->value_dim, of_token = 2 * d->key_heads * keys + d->value_heads * n;
    size_t of_state = (size_t)(keys * n);
    float *slots = d->slots + (w->row * (size_t)d->value_heads + (size_t)(h->head * h->shared)) * of_state;
    for (int64_t base = w->before; base < w->end; base += CHUNK) {
        int64_t stop = base + CHUNK < w->end ? base + CHUNK : w->end;
        int is_first = base == w->before;
        for (int64_t position = base; position < stop; position++) {
            int64_t i = position - base;
            size_t at = recent(d, w, position), token = w->first + (size_t)(position - w->start);
            float *key = h->keys + i * keys;
            if (position < w->start) {
                memcpy(key, d->keys + (at * (size_t)d->key_heads + (size_t)h->head) * (size_t)keys, (size_t)keys * 4);
            } else {
                size_t q = token * (size_t)of_token + (size_t)(h->head * keys);
                normalised(key, d->qkv, q + (size_t)(d->key_heads * keys), (int)d->type, keys, 1.0f);
                normalised(h->query, d->qkv, q, (int)d->type, keys, 1.0f / sqrtf((float)keys));
            }
            for (int64_t v = 0; v < h->shared; v++) {
                size_t entry = at * (size_t)d->value_heads + (size_t)(h->head * h->shared + v);
                float *value = h->values + (v * CHUNK + i) * n, *decay = h->decays + v * CHUNK + i;
                if (position < w->start) {
                    memcpy(value, d->values + entry * (size_t)n, (size_t)n * 4);
                    *decay = d->decays[entry];
                    continue;
                }
                const float *own = h->own + (size_t)v * of_state, *slot = slots + (size_t)v * of_state;
                add_token(h, v, i, token, !is_first ? own : w->before ? slot : NULL);
                if (position < w->after) continue;
                memcpy(d->values + entry * (size_t)n, value, (size_t)n * 4);
                d->decays[entry] = *decay;
            }
            if (position >= w->start && position >= w->after)
                memcpy(d->keys + (at * (size_t)d->key_heads + (size_t)h->head) * (size_t)keys, key, (size_t)keys * 4);
        }
        if (stop < base + CHUNK || (stop == w->end && stop > w->after)) continue;
        for (int64_t v = 0; v < h->shared; v++) {
            float *own = h->own + (size_t)v * of_state, *slot = slots + (size_t)v * of_state;
            advance(h, v, !is_first ? own : w->before ? slot : NULL);
            if (stop == w->after) memcpy(slot, own, of_state * 4);
        }
    }
}

/* Floats that `delta_net` needs as scratch, for each thread. */
int64_t delta_scratch(const Delta *d) {
    int64_t shared = d->value_heads / d->key_heads, keys = d->key_dim, n = d->value_dim;
    return (CHUNK + 1) * keys + shared * (CHUNK * (n + 1) + keys * n) + 2 * n;
}

void delta_net(const Rows *r, const Delta *d, float *scratch, int threads) {
    int64_t shared = d->value_heads / d->key_heads, keys = d->key_dim, n = d->value_dim, size = delta_scratch(d);
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int64_t item = 0; item < r->num_rows * d->key_heads; item++) {
        float *at = scratch + omp_get_thread_num() * size;
        Head h = {d, row_of(r, item / d->key_heads), item % d->key_heads, shared, at};
        h.query = h.keys + CHUNK * keys;
        h.values = h.query + keys;
        h.own = h.values + shared * CHUNK * n;
        h.decays = h.own + shared * keys * n;
        h.read = h.decays + shared * CHUNK;
        h.out = h.read + n;
        run_head(&h);
    }
}
