/* Gated DeltaNet and Kimi Delta Attention: every output follows from its row's own tokens alone, by the same operations
however the row is cut into steps. */
#include "rows.h"
#include <omp.h>

/* A layer, as configs/delta_net.py and configs/kimi_delta.py have it. Sizes are this rank's; heads' sizes are whole
vectors. A value head has one decay for all channels of its key (decay_dim is 1), or one for each (it is key_dim). */
typedef struct {
    const void *qkv, *z, *b, *a; /* a token's q heads, k heads and v heads; its gates, by their strides */
    const float *a_log, *dt_bias, *norm; /* [value_heads], [value_heads][decay_dim], [value_dim] */
    float *slots, *decays; /* [slots][value_heads][key_dim][value_dim]; of recent tokens, as keys and values */
    void *keys, *values, *out; /* out: [tokens][value_heads][value_dim] */
    int64_t z_stride, b_stride, a_stride, key_heads, value_heads, key_dim, value_dim, decay_dim, sigmoid_gate;
    int64_t num_recent, type;
    float eps;
} Delta;

/* A row and a key head at work. Entry i is that of the token at `base` + i. */
typedef struct {
    const Delta *d;
    Row row;
    int64_t head, shared; /* value heads of the key head */
    float *keys, *query; /* [CHUNK][key_dim], [key_dim] */
    float *values, *decays; /* [shared][CHUNK][value_dim], [shared][CHUNK][decay_dim] */
    float *own; /* [shared][key_dim][value_dim]: states that moved in this step */
    float *left; /* [CHUNK][key_dim]: scratch of `add_token` and `advance` */
    float *read, *out; /* [value_dim] */
} Head;

/* x[i] = y[at + i] of `type` */
static void read(float *x, const void *y, size_t at, int type, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES) store16(x, (size_t)i, FP32, load16(y, at + (size_t)i, type));
}

/* y[at + i] of `type` = x[i] */
static void write(void *y, size_t at, int type, const float *x, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES) store16(y, at + (size_t)i, type, load16(x, (size_t)i, FP32));
}

static v16 rounded(v16 x, int type) {
    char some[64];
    store16(some, 0, type, x);
    return load16(some, 0, type);
}

/* n elements, scaled so that their length is `length`, and rounded to `type`. */
static void normalised(float *out, const void *x, size_t at, int type, int64_t n, float length) {
    read(out, x, at, type, n);
    float scale = 1.0f / sqrtf(dot(out, out, n) + 1e-6f) * length;
    for (int64_t i = 0; i < n; i += LANES)
        store16(out, (size_t)i, FP32, rounded(load16(out, (size_t)i, FP32) * scale, type));
}

static size_t recent(const Delta *d, const Row *w, int64_t position) {
    return w->row * (size_t)d->num_recent + (size_t)(position % d->num_recent);
}

/* left[k] = the share of channel k that the decays between two tokens leave, from the sums of decays up to each. */
static void left_between(const Delta *d, float *left, const float *now, const float *then) {
    int64_t keys = d->key_dim;
    for (int64_t k = 0; k < keys; k += LANES) {
        v16 decay = d->decay_dim == 1 ? all(now[0] - (then ? then[0] : 0.0f))
                                      : load16(now, (size_t)k, FP32) - (then ? load16(then, (size_t)k, FP32) : (v16){0});
        store16(left, (size_t)k, FP32, exp16(decay));
    }
}

/* The products of `key` and `query` with another key, each channel decayed from the sum of decays `then` to `now`. */
static void decayed_dots(
    const float *key, const float *query, const float *other, const float *now, const float *then, int64_t n, float *dots
) {
    v16 of_key = {0}, of_query = {0};
    for (size_t k = 0; k < (size_t)n; k += LANES) {
        v16 y = load16(other, k, FP32) * exp16(load16(now, k, FP32) - load16(then, k, FP32));
        of_key = load16(key, k, FP32) * y + of_key;
        of_query = load16(query, k, FP32) * y + of_query;
    }
    dots[0] = sum16(of_key);
    dots[1] = sum16(of_query);
}

/* out = norm(o) * silu(z), or norm(o) * sigmoid(z), o being rounded as the output is. */
static void gated_norm(const Delta *d, const float *o, size_t token, int64_t head) {
    int type = (int)d->type;
    int64_t n = d->value_dim;
    size_t to = (token * (size_t)d->value_heads + (size_t)head) * (size_t)n, from = token * (size_t)d->z_stride;
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
        store16(d->out, to + (size_t)i, type, y * ((d->sigmoid_gate ? all(1.0f) : z) / (1.0f + exp16(-z))));
    }
}

/* The token of entry i, a new one, for value head v of the key head: its value and its output. */
static void add_token(Head *h, int64_t v, int64_t i, size_t token, const float *state) {
    const Delta *d = h->d;
    int type = (int)d->type;
    int64_t head = h->head * h->shared + v, keys = d->key_dim, n = d->value_dim;
    int64_t channels = d->decay_dim;
    float *values = h->values + v * CHUNK * n, *decays = h->decays + v * CHUNK * channels, *now = decays + i * channels;
    float beta = 1.0f / (1.0f + exp1(-load1(d->b, token * (size_t)d->b_stride + (size_t)head, type)));
    float rate = (float)exp((double)d->a_log[head]);
    for (int64_t k = 0; k < channels; k++) {
        int64_t channel = head * channels + k;
        float step = softplus(load1(d->a, token * (size_t)d->a_stride + (size_t)channel, type) + d->dt_bias[channel]);
        now[k] = (i ? now[k - channels] : 0.0f) - rate * step;
    }
    const float *key = h->keys + i * keys;
    memset(h->read, 0, (size_t)n * 4);
    memset(h->out, 0, (size_t)n * 4);
    if (state) {
        left_between(d, h->left, now, NULL);
        for (int64_t k = 0; k < keys; k++) {
            add(h->read, state + k * n, key[k] * h->left[k], n);
            add(h->out, state + k * n, h->query[k] * h->left[k], n);
        }
    }
    for (int64_t j = 0; j < i; j++) {
        const float *other = h->keys + j * keys, *then = decays + j * channels;
        float dots[2];
        if (channels == 1) {
            float left = exp1(now[0] - then[0]);
            dots[0] = dot(key, other, keys) * left;
            dots[1] = dot(h->query, other, keys) * left;
        } else {
            decayed_dots(key, h->query, other, now, then, keys, dots);
        }
        add(h->read, values + j * n, dots[0], n);
        add(h->out, values + j * n, dots[1], n);
    }
    size_t value = (token * (size_t)(2 * d->key_heads * keys + d->value_heads * n)) +
                   (size_t)(2 * d->key_heads * keys + head * n);
    for (int64_t k = 0; k < n; k += LANES) {
        v16 new = beta * (load16(d->qkv, value + (size_t)k, type) - load16(h->read, (size_t)k, FP32));
        store16(values + i * n, (size_t)k, FP32, rounded(new, type));
    }
    add(h->out, values + i * n, dot(h->query, key, keys), n);
    gated_norm(d, h->out, token, head);
}

/* The state of value head v after a whole chunk. `state` may be the old one's place, or none. */
static void advance(Head *h, int64_t v, const float *state) {
    const Delta *d = h->d;
    int64_t keys = d->key_dim, n = d->value_dim;
    int64_t channels = d->decay_dim, last = (CHUNK - 1) * channels;
    const float *values = h->values + v * CHUNK * n, *decays = h->decays + v * CHUNK * channels;
    float *own = h->own + v * keys * n;
    left_between(d, h->left, decays + last, NULL);
    for (int64_t k = 0; k < keys; k++)
        for (int64_t i = 0; i < n; i++) own[k * n + i] = state ? state[k * n + i] * h->left[k] : 0.0f;
    for (int64_t j = 0; j < CHUNK; j++) {
        left_between(d, h->left + j * keys, decays + last, decays + j * channels);
        for (int64_t k = j * keys; k < (j + 1) * keys; k++) h->left[k] *= h->keys[k];
    }
    for (int64_t k = 0; k < keys; k++)
        for (int64_t j = 0; j < CHUNK; j++) add(own + k * n, values + j * n, h->left[j * keys + k], n);
}

static void run_head(Head *h) {
    const Delta *d = h->d;
    const Row *w = &h->row;
    int type = (int)d->type;
    int64_t keys = d->key_dim, n = d->value_dim, of_token = 2 * d->key_heads * keys + d->value_heads * n;
    size_t of_state = (size_t)(keys * n), of_decay = (size_t)d->decay_dim;
    float *slots = d->slots + (w->row * (size_t)d->value_heads + (size_t)(h->head * h->shared)) * of_state;
    for (int64_t base = w->before; base < w->end; base += CHUNK) {
        int64_t stop = base + CHUNK < w->end ? base + CHUNK : w->end;
        int is_first = base == w->before;
        for (int64_t position = base; position < stop; position++) {
            int64_t i = position - base;
            size_t at = recent(d, w, position), token = w->first + (size_t)(position - w->start);
            float *key = h->keys + i * keys;
            if (position < w->start) {
                read(key, d->keys, (at * (size_t)d->key_heads + (size_t)h->head) * (size_t)keys, type, keys);
            } else {
                size_t q = token * (size_t)of_token + (size_t)(h->head * keys);
                normalised(key, d->qkv, q + (size_t)(d->key_heads * keys), (int)d->type, keys, 1.0f);
                normalised(h->query, d->qkv, q, (int)d->type, keys, 1.0f / sqrtf((float)keys));
            }
            for (int64_t v = 0; v < h->shared; v++) {
                size_t entry = at * (size_t)d->value_heads + (size_t)(h->head * h->shared + v);
                float *value = h->values + (v * CHUNK + i) * n, *decay = h->decays + (v * CHUNK + i) * d->decay_dim;
                if (position < w->start) {
                    read(value, d->values, entry * (size_t)n, type, n);
                    memcpy(decay, d->decays + entry * of_decay, of_decay * 4);
                    continue;
                }
                const float *own = h->own + (size_t)v * of_state, *slot = slots + (size_t)v * of_state;
                add_token(h, v, i, token, !is_first ? own : w->before ? slot : NULL);
                if (position < w->after) continue;
                write(d->values, entry * (size_t)n, type, value, n);
                memcpy(d->decays + entry * of_decay, decay, of_decay * 4);
            }
            if (position >= w->start && position >= w->after)
                write(d->keys, (at * (size_t)d->key_heads + (size_t)h->head) * (size_t)keys, type, key, keys);
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
    return (2 * CHUNK + 1) * keys + shared * (CHUNK * (n + d->decay_dim) + keys * n) + 2 * n;
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
        h.left = h.decays + shared * CHUNK * d->decay_dim;
        h.read = h.left + CHUNK * keys;
        h.out = h.read + n;
        run_head(&h);
    }
}
