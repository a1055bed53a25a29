/* Attention over paged keys and values whose bits follow from a token's own query, position and keys alone.

Keys are cut in chunks of CHUNK positions. Of each chunk that holds a key which a query sees there are the largest
score, the sum of weights and the weighted values; they merge in ascending order. What else is shared (a block of
queries, a panel of keys, registers) is only ever laid out here: no sum runs over it.

A line is one query head of one token. Lines of a block that see the same KV head share the loads of its keys; they
lie by KV head, then token, then query head. */
#include "exact.h"
#include <omp.h>

#define CHUNK 256
#define STRIP 32 /* keys whose values are at hand at once: with the lines' sums within the first cache */
#define TILE 4 /* lines that a load of a key or a value is for, at most */
enum { FP8 = 3 };
#define INLINE static inline __attribute__((always_inline))

typedef struct {
    const void *keys, *values; /* [pages, page_size, kv_heads, head_dim] of kv_type */
    const float *sinks; /* [kv_heads * group], or none */
    int64_t kv_type, type, kv_heads, group, head_dim, page_size;
    float scale, softcap, v_scale; /* softcap 0: none */
} Layer;

/* What a token sees: keys from first to before stop, but of those from masked on only the ones marked. */
typedef struct {
    int64_t first, stop, masked, marks;
} VisibleRange;

typedef struct {
    int64_t row, first, stop; /* tokens of one row */
} Block;

typedef struct {
    const int32_t *page_table;
    const VisibleRange *ranges; /* of each token */
    const uint8_t *marks;
    const Block *blocks;
    float *scratch; /* of scratch_floats for each thread */
    int64_t table_stride, num_blocks, most_tokens, most_lines, threads; /* most: of a block, of an item's lines */
} Step;

/* One thread's block at work. */
typedef struct {
    const Layer *layer;
    const VisibleRange *ranges; /* of the block's tokens */
    const uint8_t *marks;
    const int32_t *pages;
    size_t *places; /* of the chunk's keys: where the elements of `head` begin */
    int64_t tokens, head, heads; /* of the block, and KV heads from `head` on */
    int64_t of_head, lines, dim; /* lines of one KV head, and of all; head_dim, rounded up to whole vectors */
    float *queries, *scores, *chunk, *out; /* [lines, dim], but scores [lines, CHUNK] */
    float *panel, *strip; /* [dim, LANES], [STRIP, dim] */
    float *chunk_max, *chunk_sum, *max, *sum; /* [lines] */
} Work;

static int64_t whole(int64_t n) { return (n + LANES - 1) / LANES * LANES; }
static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

int64_t scratch_floats(int64_t lines, int64_t head_dim) {
    int64_t dim = whole(head_dim);
    return lines * (3 * dim + CHUNK) + (LANES + STRIP) * dim + 4 * whole(lines);
}

/* Of e4m3fn: where its bits stand in those of a float, the exponent is off by a factor. */
INLINE v16 load16_fp8(const void *p, size_t i) {
    typedef uint8_t b16 __attribute__((vector_size(16)));
    b16 b;
    memcpy(&b, (const uint8_t *)p + i, sizeof b);
    i16 wide = __builtin_convertvector(b, i16), low = wide & 0x7f;
    v16 x = (v16)(low << 20) * 0x1p120f;
    i16 is_nan = low == 0x7f;
    return (v16)((i16)x | ((wide & 0x80) << 24) | (is_nan & 0x7fc00000));
}

/* n elements of keys or values from p[i] on, zeros behind them. */
INLINE v16 load_kv(const void *p, size_t i, int type, size_t n) {
    if (n == LANES) return type == FP8 ? load16_fp8(p, i) : load16(p, i, type);
    if (type != FP8) return load_some(p, i, type, n);
    uint8_t some[LANES] = {0};
    memcpy(some, (const uint8_t *)p + i, n);
    return load16_fp8(some, 0);
}

/* Finds keys [from, to) of the chunk at `base`. */
static void find(const Work *w, int64_t base, int64_t from, int64_t to) {
    const Layer *l = w->layer;
    for (int64_t t = from; t < to;) {
        int64_t page = t / l->page_size, stop = least(to, (page + 1) * l->page_size);
        size_t first = (size_t)w->pages[page] * (size_t)l->page_size - (size_t)(page * l->page_size);
        for (; t < stop; t++)
            w->places[t - base] = ((first + (size_t)t) * (size_t)l->kv_heads + (size_t)w->head) * (size_t)l->head_dim;
    }
}

/* Swaps blocks of `width` lanes of x[i] and x[i + width]: four such turns transpose 16 vectors. */
INLINE void swap_blocks(v16 *x, int width) {
    i16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    i16 upper = (lane & width) != 0;
    i16 low = lane + (upper & (LANES - width)), high = low + width; /* of both, one after the other */
    for (int i = 0; i < LANES; i++) {
        if (i & width) continue;
        v16 a = x[i], b = x[i + width];
        x[i] = __builtin_shuffle(a, b, low);
        x[i + width] = __builtin_shuffle(a, b, high);
    }
}

/* The panel of the chunk's keys from its `at` on, a key a lane; those outside [from, to) are zeros, and not read. `head`
   counts from the item's first. */
static void fill_panel(const Work *w, int64_t head, int64_t at, int64_t from, int64_t to) {
    const Layer *l = w->layer;
    const size_t *places = w->places + at;
    for (int64_t d = 0; d < w->dim; d += LANES) {
        size_t n = (size_t)least(LANES, l->head_dim - d), column = (size_t)(head * l->head_dim + d);
        v16 x[LANES];
        for (int i = 0; i < LANES; i++)
            x[i] = at + i >= from && at + i < to ? load_kv(l->keys, places[i] + column, (int)l->kv_type, n) : (v16){0};
        swap_blocks(x, 8);
        swap_blocks(x, 4);
        swap_blocks(x, 2);
        swap_blocks(x, 1);
        memcpy(w->panel + d * LANES, x, sizeof x);
    }
}

/* Products of `rows` queries and a panel: of each lane of the queries a chain, and the chains added as sum16 does, the
   last two first, so that few are open at a time. */
INLINE void multiply(int rows, const float *q, int64_t dim, const float *panel, float *scores) {
    v16 open[5][TILE];
#pragma GCC unroll 16
    for (int n = 0; n < LANES; n++) {
        int lane = (n & 1) << 3 | (n & 2) << 1 | (n & 4) >> 1 | n >> 3;
        v16 x[TILE];
        for (int r = 0; r < rows; r++) x[r] = (v16){0};
        for (int64_t d = lane; d < dim; d += LANES) {
            v16 key = load16(panel, (size_t)(d * LANES), FP32);
            for (int r = 0; r < rows; r++) x[r] = q[r * dim + d] * key + x[r];
        }
        int level = 0;
        for (; n >> level & 1; level++)
            for (int r = 0; r < rows; r++) x[r] = open[level][r] + x[r];
        for (int r = 0; r < rows; r++) open[level][r] = x[r];
    }
    for (int r = 0; r < rows; r++) store16(scores, (size_t)(r * CHUNK), FP32, open[4][r]);
}

/* out[r] += the sum over keys of weights[r] * values, key by key; columns of `vectors` vectors. */
INLINE void weigh(int rows, int vectors, const float *weights, const float *const *values, int64_t keys, int64_t d,
                  float *out, int64_t dim) {
    v16 x[TILE][4];
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < vectors; i++) x[r][i] = load16(out, (size_t)(r * dim + d + i * LANES), FP32);
    for (int64_t t = 0; t < keys; t++) {
        v16 value[4];
        for (int i = 0; i < vectors; i++) value[i] = load16(values[t], (size_t)(d + i * LANES), FP32);
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < vectors; i++) x[r][i] = weights[r * CHUNK + t] * value[i] + x[r][i];
    }
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < vectors; i++) store16(out, (size_t)(r * dim + d + i * LANES), FP32, x[r][i]);
}

INLINE void weigh_columns(int rows, const float *weights, const float *const *values, int64_t keys, float *out,
                          int64_t dim) {
    int64_t d = 0;
    for (; d + 4 * LANES <= dim; d += 4 * LANES) weigh(rows, 4, weights, values, keys, d, out, dim);
    for (; d < dim; d += LANES) weigh(rows, 1, weights, values, keys, d, out, dim);
}

static void multiply_rows(int rows, const float *q, int64_t dim, const float *panel, float *scores) {
    if (rows == 4) multiply(4, q, dim, panel, scores);
    else if (rows == 3) multiply(3, q, dim, panel, scores);
    else if (rows == 2) multiply(2, q, dim, panel, scores);
    else multiply(1, q, dim, panel, scores);
}

static void weigh_rows(int rows, const float *weights, const float *const *values, int64_t keys, float *out,
                       int64_t dim) {
    if (rows == 4) weigh_columns(4, weights, values, keys, out, dim);
    else if (rows == 3) weigh_columns(3, weights, values, keys, out, dim);
    else if (rows == 2) weigh_columns(2, weights, values, keys, out, dim);
    else weigh_columns(1, weights, values, keys, out, dim);
}

static const VisibleRange *range_of(const Work *w, int64_t line) { return w->ranges + line % w->of_head / w->layer->group; }

/* Scores of the panel of keys [t, t + LANES) by the lines [line, end) of one KV head, before any factor. */
static void score_panel(const Work *w, int64_t base, int64_t t, int64_t line, int64_t end) {
    for (; line < end; line += TILE) {
        int rows = (int)least(TILE, end - line);
        int64_t first = INT64_MAX, stop = 0;
        for (int r = 0; r < rows; r++) {
            first = least(first, range_of(w, line + r)->first);
            stop = most(stop, range_of(w, line + r)->stop);
        }
        if (stop > t && first < t + LANES)
            multiply_rows(rows, w->queries + line * w->dim, w->dim, w->panel, w->scores + line * CHUNK + t - base);
    }
}

/* Has the elements of keys or values [from, to) of the chunk on their way: pages lie anywhere, which the processor does
   not guess. */
INLINE void fetch(const Work *w, const void *p, int64_t from, int64_t to) {
    size_t size = w->layer->kv_type == FP8 ? 1 : size_of((int)w->layer->kv_type);
    size_t bytes = (size_t)(w->heads * w->layer->head_dim) * size;
    for (int64_t t = from; t < to; t++)
        for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char *)p + w->places[t] * size + i);
}

/* Of a key all heads at once, as they lie side by side in memory. */
static void score_chunk(const Work *w, int64_t base, int64_t from, int64_t to) {
    for (int64_t t = from / LANES * LANES; t < to; t += LANES) {
        int64_t next = t + LANES - base;
        fetch(w, w->layer->keys, next, least(next + LANES, to - base));
        fetch(w, w->layer->values, most(t, from) - base, least(next, to - base));
        for (int64_t head = 0; head < w->heads; head++) {
            fill_panel(w, head, t - base, from - base, to - base);
            score_panel(w, base, t, head * w->of_head, (head + 1) * w->of_head);
        }
    }
}

/* tanh within a few ulp: near 0 its series, as the other form cancels. */
static v16 tanh16(v16 x) {
    v16 y = x * x, series = all(62.0f / 2835);
    series = series * y + -17.0f / 315;
    series = series * y + 2.0f / 15;
    series = series * y + -1.0f / 3;
    series = series * (y * x) + x;
    v16 other = 1.0f - 2.0f / (exp16(x + x) + 1.0f);
    i16 small = y < 0.0625f;
    return (v16)((small & (i16)series) | (~small & (i16)other));
}

INLINE i16 seen16(const Work *w, const VisibleRange *s, int64_t t) {
    i16 key = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    key += (int32_t)t;
    i16 seen = (key >= (int32_t)s->first) & (key < (int32_t)s->stop);
    for (int i = 0; i < LANES && t + LANES > s->masked; i++)
        if (t + i >= s->masked && t + i < s->stop && !w->marks[s->marks + t + i - s->masked]) seen[i] = 0;
    return seen;
}

/* Turns a line's scores of the chunk at `base` into weights, their sum 0 only where the line sees no key of it. */
static void weights_of(const Work *w, int64_t line, int64_t base) {
    const Layer *l = w->layer;
    const VisibleRange *s = range_of(w, line);
    float *scores = w->scores + line * CHUNK;
    int64_t from = most(base, s->first) / LANES * LANES, to = least(base + CHUNK, s->stop);
    v16 top = all(-INFINITY), sums = {0};
    i16 any = {0};
    for (int64_t t = from; t < to; t += LANES) {
        v16 x = load16(scores, (size_t)(t - base), FP32) * l->scale;
        if (l->softcap != 0) x = tanh16(x / l->softcap) * l->softcap;
        i16 seen = seen16(w, s, t);
        any |= seen;
        x = (v16)((seen & (i16)x) | (~seen & (i16)all(-INFINITY)));
        i16 larger = x > top;
        top = (v16)((larger & (i16)x) | (~larger & (i16)top));
        store16(scores, (size_t)(t - base), FP32, x);
    }
    float max = -INFINITY;
    int sees = 0;
    for (int i = 0; i < LANES; i++) {
        max = top[i] > max ? top[i] : max;
        sees |= any[i];
    }
    for (int64_t t = from; sees && t < to; t += LANES) {
        v16 x = exp16(load16(scores, (size_t)(t - base), FP32) - max);
        store16(scores, (size_t)(t - base), FP32, x);
        sums += x;
    }
    w->chunk_max[line] = max;
    w->chunk_sum[line] = sum16(sums);
}

/* Adds one line's weighted values of keys [from, to), of which it may not see all; values[0] is that of key `start`. */
static void weigh_alone(const Work *w, int64_t line, int64_t base, int64_t start, int64_t from, int64_t to,
                        const float *const *values) {
    const VisibleRange *s = range_of(w, line);
    from = most(from, s->first);
    to = least(to, s->stop);
    while (from < to) {
        int64_t stop = from < s->masked ? least(to, s->masked) : from;
        while (stop < to && stop >= s->masked && w->marks[s->marks + stop - s->masked]) stop++;
        if (stop > from)
            weigh_rows(1, w->scores + line * CHUNK + from - base, values + from - start, stop - from,
                       w->chunk + line * w->dim, w->dim);
        from = stop > from ? stop : from + 1;
    }
}

/* Adds the weighted values of keys [from, to), at most STRIP, to those of the lines [line, end) that see them. */
static void weigh_strip(const Work *w, int64_t base, int64_t from, int64_t to, const float *const *values, int64_t line,
                        int64_t end) {
    for (; line < end; line += TILE) {
        int rows = (int)least(TILE, end - line);
        int64_t first = from, stop = to; /* what all of them see */
        for (int r = 0; r < rows; r++) {
            const VisibleRange *s = range_of(w, line + r);
            first = most(first, s->first);
            stop = least(stop, least(s->stop, s->masked));
        }
        first = least(first, to);
        stop = most(stop, first);
        for (int r = 0; r < rows && first > from; r++) weigh_alone(w, line + r, base, from, from, first, values);
        if (stop > first)
            weigh_rows(rows, w->scores + line * CHUNK + first - base, values + first - from, stop - first,
                       w->chunk + line * w->dim, w->dim);
        for (int r = 0; r < rows && stop < to; r++) weigh_alone(w, line + r, base, from, stop, to, values);
    }
}

/* Has the values of keys [from, to) at hand: where they lie, if they may be read as they are, else as a copy. */
static void gather(const Work *w, int64_t head, int64_t base, int64_t from, int64_t to, const float **values) {
    const Layer *l = w->layer;
    for (int64_t t = from; t < to; t++) {
        size_t at = w->places[t - base] + (size_t)(head * l->head_dim);
        float *copy = w->strip + (t - from) * w->dim;
        int as_is = l->kv_type == FP32 && l->head_dim == w->dim;
        values[t - from] = as_is ? (const float *)l->values + at : copy;
        for (int64_t d = 0; !as_is && d < w->dim; d += LANES) {
            v16 x = load_kv(l->values, at + (size_t)d, (int)l->kv_type, (size_t)least(LANES, l->head_dim - d));
            store16(copy, (size_t)d, FP32, x);
        }
    }
}

static void weigh_chunk(const Work *w, int64_t base, int64_t from, int64_t to) {
    memset(w->chunk, 0, (size_t)(w->lines * w->dim) * sizeof(float));
    for (int64_t start = from; start < to; start += STRIP) {
        int64_t stop = least(start + STRIP, to);
        const float *values[STRIP];
        for (int64_t head = 0; head < w->heads; head++) {
            gather(w, head, base, start, stop, values);
            weigh_strip(w, base, start, stop, values, head * w->of_head, (head + 1) * w->of_head);
        }
    }
}

/* One of the two factors is 1: so a merge is one fused operation. */
static void merge(const Work *w, int64_t line, float max, float sum, const float *chunk) {
    float *out = w->out + line * w->dim;
    int larger = max > w->max[line];
    float factor = exp16(all(larger ? w->max[line] - max : max - w->max[line]))[0];
    for (int64_t d = 0; d < w->dim; d += LANES) {
        v16 x = load16(out, (size_t)d, FP32), y = load16(chunk, (size_t)d, FP32);
        store16(out, (size_t)d, FP32, larger ? x * factor + y : y * factor + x);
    }
    w->sum[line] = larger ? w->sum[line] * factor + sum : sum * factor + w->sum[line];
    if (larger) w->max[line] = max;
}

/* Where a line's elements are in [tokens, heads, head_dim], whose tokens lie `stride` elements apart. */
static size_t place_of(const Work *w, int64_t line, int64_t stride) {
    const Layer *l = w->layer;
    int64_t head = (w->head + line / w->of_head) * l->group + line % l->group;
    return (size_t)(line % w->of_head / l->group * stride + head * l->head_dim);
}

static void load_queries(const Work *w, const void *q, int64_t stride) {
    const Layer *l = w->layer;
    for (int64_t line = 0; line < w->lines; line++) {
        size_t at = place_of(w, line, stride);
        for (int64_t d = 0; d < w->dim; d += LANES) {
            size_t n = (size_t)least(LANES, l->head_dim - d);
            store16(w->queries + line * w->dim, (size_t)d, FP32, load_kv(q, at + (size_t)d, (int)l->type, n));
        }
        w->max[line] = -INFINITY;
        w->sum[line] = 0;
    }
    memset(w->out, 0, (size_t)(w->lines * w->dim) * sizeof(float));
}

/* Sinks, the division, and the rounding, into out [tokens, kv_heads * group * head_dim] from the block's first. */
static void finish(const Work *w, void *out) {
    const Layer *l = w->layer;
    if (l->sinks) memset(w->chunk, 0, (size_t)w->dim * sizeof(float));
    for (int64_t line = 0; line < w->lines; line++) {
        if (l->sinks) merge(w, line, l->sinks[place_of(w, line, 0) / (size_t)l->head_dim], 1, w->chunk);
        size_t at = place_of(w, line, l->kv_heads * l->group * l->head_dim);
        for (int64_t d = 0; d < w->dim; d += LANES) {
            v16 x = load16(w->out + line * w->dim, (size_t)d, FP32) / w->sum[line] * l->v_scale;
            store_some(out, at + (size_t)d, (int)l->type, x, (size_t)least(LANES, l->head_dim - d));
        }
    }
}

static void attend_item(const Work *w, const void *q, int64_t stride, void *out) {
    int64_t from = INT64_MAX, to = 0;
    for (int64_t i = 0; i < w->tokens; i++) {
        from = least(from, w->ranges[i].first);
        to = most(to, w->ranges[i].stop);
    }
    load_queries(w, q, stride);
    for (int64_t base = from / CHUNK * CHUNK; base < to; base += CHUNK) {
        int64_t first = most(from, base), stop = least(to, base + CHUNK);
        find(w, base, first, stop);
        score_chunk(w, base, first, stop);
        for (int64_t line = 0; line < w->lines; line++) weights_of(w, line, base);
        weigh_chunk(w, base, first, stop);
        for (int64_t line = 0; line < w->lines; line++)
            if (w->chunk_sum[line] != 0)
                merge(w, line, w->chunk_max[line], w->chunk_sum[line], w->chunk + line * w->dim);
    }
    finish(w, out);
}

static Work work_of(const Layer *l, const Step *step) {
    Work w = {.layer = l, .marks = step->marks, .dim = whole(l->head_dim)};
    float *p = step->scratch + omp_get_thread_num() * scratch_floats(step->most_lines, l->head_dim);
    int64_t lines = step->most_lines;
    w.queries = p, p += lines * w.dim;
    w.chunk = p, p += lines * w.dim;
    w.out = p, p += lines * w.dim;
    w.scores = p, p += lines * CHUNK;
    w.panel = p, p += LANES * w.dim;
    w.strip = p, p += STRIP * w.dim;
    w.chunk_max = p, p += whole(lines);
    w.chunk_sum = p, p += whole(lines);
    w.max = p, p += whole(lines);
    w.sum = p;
    return w;
}

/* KV heads of an item: as many as its lines have room for, and as leave an item for each thread. */
static int64_t heads_of(const Layer *l, const Step *step) {
    int64_t room = step->most_lines / (step->most_tokens * l->group);
    return most(1, least(least(room, l->kv_heads), step->num_blocks * l->kv_heads / step->threads));
}

/* Index scores (DSA) of a block with one token: out[key] = the sum over heads, in ascending order, of weight *
   relu(query . key). Those of keys that the token does not see are not written. */
static void score_item(const Work *w, const void *q, int64_t stride, const float *weights, float *out) {
    int64_t end = w->ranges[0].stop;
    load_queries(w, q, stride);
    for (int64_t base = 0; base < end; base += CHUNK) {
        int64_t stop = least(end, base + CHUNK);
        find(w, base, base, stop);
        score_chunk(w, base, base, stop);
        for (int64_t t = base; t < stop; t += LANES) {
            v16 sum = {0};
            for (int64_t head = 0; head < w->lines; head++) {
                v16 x = load16(w->scores + head * CHUNK, (size_t)(t - base), FP32);
                sum = weights[head] * (v16)((x > 0) & (i16)x) + sum;
            }
            store_some(out, (size_t)t, FP32, sum, (size_t)least(LANES, stop - t));
        }
    }
}

/* With `weights`: index scores, and `width` is the number of keys. Without: attention, and `width` is the elements of a
   token's output. */
static void for_blocks(const Layer *l, const Step *step, const void *q, int64_t stride, const float *weights, void *out,
                       int64_t width) {
    int64_t heads = heads_of(l, step), parts = (l->kv_heads + heads - 1) / heads, items = step->num_blocks * parts;
    size_t size = size_of((int)l->type);
#pragma omp parallel num_threads((int)least(step->threads, items))
    {
        size_t places[CHUNK];
        Work w = work_of(l, step);
        w.places = places;
#pragma omp for schedule(dynamic, 1)
        for (int64_t item = 0; item < items; item++) {
            /* The last first: of a prompt those take the longest. */
            const Block *b = step->blocks + step->num_blocks - 1 - item / parts;
            w.head = item % parts * heads;
            w.heads = least(heads, l->kv_heads - w.head);
            w.tokens = b->stop - b->first;
            w.of_head = w.tokens * l->group;
            w.lines = w.heads * w.of_head;
            w.ranges = step->ranges + b->first;
            w.pages = step->page_table + b->row * step->table_stride;
            const char *own = (const char *)q + (size_t)(b->first * stride) * size;
            if (weights) score_item(&w, own, stride, weights + b->first * l->group, (float *)out + b->first * width);
            else attend_item(&w, own, stride, (char *)out + (size_t)(b->first * width) * size);
        }
    }
}

/* q [tokens, heads, head_dim], its tokens `stride` elements apart; out the same, contiguous. */
void attend(const Layer *l, const Step *step, const void *q, int64_t stride, void *out) {
    for_blocks(l, step, q, stride, 0, out, l->kv_heads * l->group * l->head_dim);
}

/* q [tokens, group, head_dim], its tokens `stride` elements apart; weights [tokens, group]; out [tokens, width]. */
void index_scores(const Layer *l, const Step *step, const void *q, int64_t stride, const float *weights, float *out,
                  int64_t width) {
    for_blocks(l, step, q, stride, weights, out, width);
}
