/* Convolutions and recurrences over the tokens of rows, whose every output follows from its row's own tokens alone, by the
same operations however the row is cut into steps. */
#include "rows.h"

#define BLOCK 64 /* channels of one piece of work */
#define WIDEST 8 /* of a convolution */

typedef struct {
    const void *x; /* [tokens] of x_stride elements, channels first */
    const float *weight, *bias; /* [width][channels]; [channels], or none */
    void *slots, *recent, *out; /* [slots][width - 1][channels]; [rows][num_recent][channels]; [tokens][channels] */
    int64_t x_stride, channels, width, num_recent, type, silu; /* type: of x, slots, recent and out */
} Conv;

/* Where the input at `position` is, an element of type c->type: in the step, among recent inputs, or before the state. */
static const void *input(const Conv *c, const Row *w, int64_t position, size_t channel, size_t *at) {
    size_t channels = (size_t)c->channels;
    if (position >= w->start) {
        *at = (w->first + (size_t)(position - w->start)) * (size_t)c->x_stride + channel;
        return c->x;
    }
    if (position >= w->before) {
        *at = (w->row * (size_t)c->num_recent + (size_t)(position % c->num_recent)) * channels + channel;
        return c->recent;
    }
    *at = (w->row * (size_t)(c->width - 1) + (size_t)(position - w->before + c->width - 1)) * channels + channel;
    return c->slots;
}

static v16 input16(const Conv *c, const Row *w, int64_t position, size_t channel, size_t n) {
    if (position < 0) return (v16){0};
    size_t at;
    const void *p = input(c, w, position, channel, &at);
    return load_n(p, at, (int)c->type, n);
}

static void convolve(const Conv *c, const Row *w, size_t channel, size_t n) {
    int type = (int)c->type, before = (int)c->width - 1;
    size_t channels = (size_t)c->channels;
    v16 weight[WIDEST], window[WIDEST], kept[WIDEST];
    for (int i = 0; i <= before; i++) weight[i] = load_n(c->weight, (size_t)i * channels + channel, FP32, n);
    for (int i = 0; i < before; i++) window[i] = input16(c, w, w->start - before + i, channel, n);
    for (int i = 0; i < before && w->after > w->before; i++)
        kept[i] = input16(c, w, w->after - before + i, channel, n);
    v16 bias = c->bias ? load_n(c->bias, channel, FP32, n) : (v16){0};
    for (int64_t position = w->start; position < w->end; position++) {
        v16 y = bias;
        window[before] = input16(c, w, position, channel, n);
        for (int i = 0; i <= before; i++) y = weight[i] * window[i] + y;
        for (int i = 0; i < before; i++) window[i] = window[i + 1];
        if (c->silu) y = y / (1.0f + exp16(-y));
        store_n(c->out, (w->first + (size_t)(position - w->start)) * channels + channel, type, y, n);
    }
    for (int i = 0; i < before && w->after > w->before; i++)
        store_n(c->slots, (w->row * (size_t)before + (size_t)i) * channels + channel, type, kept[i], n);
    int64_t oldest = w->end - c->num_recent;
    for (int64_t position = oldest > w->start ? oldest : w->start; position < w->end; position++) {
        size_t at = (w->row * (size_t)c->num_recent + (size_t)(position % c->num_recent)) * channels + channel;
        store_n(c->recent, at, type, input16(c, w, position, channel, n), n);
    }
}

/* Each channel's weighted sum of its last `width` inputs, perhaps with silu. */
void causal_conv(const Rows *r, const Conv *c, int threads) {
    int64_t blocks = (c->channels + BLOCK - 1) / BLOCK;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t item = 0; item < r->num_rows * blocks; item++) {
        Row w = row_of(r, item / blocks);
        int64_t first = item % blocks * BLOCK, stop = first + BLOCK < c->channels ? first + BLOCK : c->channels;
        for (int64_t channel = first; channel < stop; channel += LANES) {
            size_t n = stop - channel < LANES ? (size_t)(stop - channel) : LANES;
            convolve(c, &w, (size_t)channel, n);
        }
    }
}
