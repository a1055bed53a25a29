/* Mamba2: every output follows from its row's own tokens alone, by the same operations however the row is cut into
steps. */
#include "rows.h"
#include <omp.h>

/* Mamba2, as configs/mamba.py has it. Sizes are this rank's; heads and states are whole vectors. */
typedef struct {
    const void *xbc, *z, *dt; /* a token's x heads, B groups and C groups; z and dt at strides of in_stride */
    const float *a_log, *dt_bias, *d; /* [heads] */
    float *slots; /* [slots][heads][state_size][head_dim] */
    void *recent; /* of recent tokens: x heads and B groups */
    float *steps, *out, *squares; /* dt of recent tokens; [tokens][heads][head_dim]; [tokens][heads] */
    int64_t in_stride, heads, groups, head_dim, state_size, num_recent, type; /* type: of xbc, z, dt and recent */
    float z_factor, dt_factor, least, most;
} Mamba;

/* A row and a head at work. Entry i is that of the token at `base` + i. */
typedef struct {
    const Mamba *m;
    Row row;
    int64_t head, group;
    float *keys, *values, *decays; /* B [CHUNK][state_size]; dt x [CHUNK][head_dim]; [CHUNK] */
    float *own, *query, *out; /* state that moved in this step; C [state_size]; [head_dim] */
} Head;

static size_t recent(const Mamba *m, const Row *w, int64_t position) {
    return w->row * (size_t)m->num_recent + (size_t)(position % m->num_recent);
}

static size_t recent_width(const Mamba *m) { return (size_t)(m->heads * m->head_dim + m->groups * m->state_size); }

static size_t width(const Mamba *m) { return recent_width(m) + (size_t)(m->groups * m->state_size); }

static void to_floats(float *out, const void *x, size_t at, int type, int64_t n) {
    for (int64_t k = 0; k < n; k += LANES) store16(out, (size_t)k, FP32, load16(x, at + (size_t)k, type));
}

/* dt of a new token. */
static float step_of(const Mamba *m, size_t token, int64_t head) {
    float dt = load1(m->dt, token * (size_t)m->in_stride + (size_t)head, (int)m->type);
    dt = softplus(dt * m->dt_factor + m->dt_bias[head]);
    return dt < m->least ? m->least : dt > m->most ? m->most : dt;
}

/* Entry i, from this step's token or from a recent one. */
static void read_token(Head *h, int64_t i, int64_t position) {
    const Mamba *m = h->m;
    const Row *w = &h->row;
    int64_t n = m->head_dim;
    int is_new = position >= w->start, type = (int)m->type;
    size_t token = w->first + (size_t)(position - w->start), entry = recent(m, w, position);
    const void *from = is_new ? m->xbc : m->recent;
    size_t at = is_new ? token * width(m) : entry * recent_width(m);
    float *value = h->values + i * n, *kept = m->steps + entry * (size_t)m->heads + h->head;
    float step = is_new ? step_of(m, token, h->head) : *kept;
    to_floats(h->keys + i * m->state_size, from, at + (size_t)(m->heads * n + h->group * m->state_size), type,
              m->state_size);
    for (int64_t k = 0; k < n; k += LANES)
        store16(value, (size_t)k, FP32, load16(from, at + (size_t)(h->head * n + k), type) * step);
    h->decays[i] = (i ? h->decays[i - 1] : 0.0f) - (float)exp((double)m->a_log[h->head]) * step;
    if (is_new && position >= w->after) *kept = step;
}

/* The output of entry i, a new token: y * silu(z), and the sum of its squares. */
static void write_output(Head *h, int64_t i, size_t token, const float *state) {
    const Mamba *m = h->m;
    int type = (int)m->type;
    int64_t n = m->head_dim, size = m->state_size;
    size_t x = token * width(m) + (size_t)(h->head * n), to = (token * (size_t)m->heads + (size_t)h->head) * (size_t)n;
    size_t z = token * (size_t)m->in_stride + (size_t)(h->head * n);
    to_floats(h->query, m->xbc, token * width(m) + recent_width(m) + (size_t)(h->group * size), type, size);
    memset(h->out, 0, (size_t)n * 4);
    float left = exp1(h->decays[i]);
    for (int64_t k = 0; state && k < size; k++) add(h->out, state + k * n, h->query[k] * left, n);
    for (int64_t j = 0; j <= i; j++) {
        float weight = dot(h->query, h->keys + j * size, size) * exp1(h->decays[i] - h->decays[j]);
        add(h->out, h->values + j * n, weight, n);
    }
    v16 squares = {0};
    for (int64_t k = 0; k < n; k += LANES) {
        v16 y = load16(m->xbc, x + (size_t)k, type) * m->d[h->head] + load16(h->out, (size_t)k, FP32);
        v16 gate = load16(m->z, z + (size_t)k, type) * m->z_factor;
        y *= gate / (1.0f + exp16(-gate));
        store16(m->out, to + (size_t)k, FP32, y);
        squares = y * y + squares;
    }
    m->squares[token * (size_t)m->heads + (size_t)h->head] = sum16(squares);
}

/* The state after a whole chunk. `state` may be the old one's place, or none. */
static void advance(Head *h, const float *state) {
    int64_t n = h->m->head_dim, size = h->m->state_size;
    float left[CHUNK], all_left = exp1(h->decays[CHUNK - 1]);
    for (int64_t j = 0; j < CHUNK; j++) left[j] = exp1(h->decays[CHUNK - 1] - h->decays[j]);
    for (int64_t k = 0; k < size; k++) {
        float *own = h->own + k * n;
        for (int64_t i = 0; i < n; i++) own[i] = state ? state[k * n + i] * all_left : 0.0f;
        for (int64_t j = 0; j < CHUNK; j++) add(own, h->values + j * n, h->keys[j * size + k] * left[j], n);
    }
}

static void run_head(Head *h) {
    const Mamba *m = h->m;
    const Row *w = &h->row;
    size_t of_state = (size_t)(m->state_size * m->head_dim);
    float *slot = m->slots + (w->row * (size_t)m->heads + (size_t)h->head) * of_state;
    const float *state = w->before ? slot : NULL;
    for (int64_t base = w->before; base < w->end; base += CHUNK) {
        int64_t stop = base + CHUNK < w->end ? base + CHUNK : w->end;
        for (int64_t position = base; position < stop; position++) {
            read_token(h, position - base, position);
            if (position >= w->start)
                write_output(h, position - base, w->first + (size_t)(position - w->start), state);
        }
        if (stop < base + CHUNK || (stop == w->end && stop > w->after)) continue;
        advance(h, state);
        state = h->own;
        if (stop == w->after) memcpy(slot, h->own, of_state * 4);
    }
}

/* Stores x and B of the tokens after the state. Heads share B, so this comes after all of them have read it. */
static void keep_recent(const Mamba *m, const Row *w) {
    size_t element = size_of((int)m->type), bytes = recent_width(m) * element;
    for (int64_t position = w->start > w->after ? w->start : w->after; position < w->end; position++) {
        size_t token = w->first + (size_t)(position - w->start);
        memcpy((char *)m->recent + recent(m, w, position) * bytes, (const char *)m->xbc + token * width(m) * element,
               bytes);
    }
}

/* Floats that `mamba` needs as scratch, for each thread. */
int64_t mamba_scratch(const Mamba *m) {
    return (CHUNK + 1) * (m->state_size + m->head_dim) + CHUNK + m->state_size * m->head_dim;
}

void mamba(const Rows *r, const Mamba *m, float *scratch, int threads) {
    int64_t n = m->head_dim, size = m->state_size, of_thread = mamba_scratch(m);
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int64_t item = 0; item < r->num_rows * m->heads; item++) {
        int64_t head = item % m->heads;
        Head h = {m, row_of(r, item / m->heads), head, head / (m->heads / m->groups)};
        h.keys = scratch + omp_get_thread_num() * of_thread;
        h.query = h.keys + CHUNK * size;
        h.values = h.query + size;
        h.out = h.values + CHUNK * n;
        h.own = h.out + n;
        h.decays = h.own + size * n;
        run_head(&h);
    }
    for (int64_t i = 0; i < r->num_rows; i++) {
        Row w = row_of(r, i);
        keep_recent(m, &w);
    }
}
