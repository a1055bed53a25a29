/* y = x @ weight.T by chains of fused multiply-adds, for a weight whose rows are the lanes of tiles of 64.

Each output is summed over ascending k by itself, in its own lane of its own register: how many rows, columns or
threads there are changes what is computed beside it, never its bits. */
#include "exact.h"

/* Outputs are made ROWS rows of a tile at a time, DEPTH inputs long: what is read again, DEPTH * TILE weights and
ROWS * DEPTH inputs, stays in a level-2 cache. */
enum { TILE = 64, VECTORS = TILE / LANES, ROWS = 48, DEPTH = 512 };
/* Below as many multiplications the threads take longer to wake than the product takes. */
enum { FEW = 1 << 15 };
#ifdef __AVX512F__
#define SIDE_BY_SIDE(rows) 4
#else /* Fewer or shorter registers, which the sums have to stay in. */
#define SIDE_BY_SIDE(rows) ((rows) == 1 ? 4 : (rows) == 2 ? 2 : 1)
#endif

typedef struct {
    const void *x, *packed, *bias;
    void *out;
    size_t x_stride; /* elements from a row to the next */
    size_t num_rows, num_columns, num_inputs;
    size_t leaf;          /* inputs a leaf */
    const size_t *nodes;  /* [num_nodes][2]: first leaf, end */
    size_t num_nodes;
    int type, bias_type, out_type; /* type: of x and the weight */
} Job;

/* Which outputs a function makes: rows [row, row + num_rows) of a tile of columns. */
typedef struct {
    size_t tile, row, num_rows;
} Part;

/* Two vectors of 16-bit weights, which need no shuffling when even columns become one vector and odd ones the other. */
static inline __attribute__((always_inline)) v16 upper_half(u16 bits, int type) {
    if (type == BF16) return (v16)(bits & 0xffff0000);
    /* The exponent's bias changes by a product, which is exact and gives numbers below the smallest normal one. */
    v16 x = (v16)((bits & 0x7fff0000) >> 3) * 0x1p112f;
    u16 not_finite = (u16)((bits & 0x7c000000) == 0x7c000000) & 0x7f800000;
    return (v16)((u16)x | not_finite | (bits & 0x80000000));
}

static inline __attribute__((always_inline)) void load_pair(const void *w, size_t i, int type, v16 *pair) {
    u16 bits;
    memcpy(&bits, (const uint16_t *)w + i, sizeof bits);
    pair[0] = upper_half(bits << 16, type);
    pair[1] = upper_half(bits, type);
}

/* Between the columns' order and even ones before odd ones. */
static inline __attribute__((always_inline)) void part_pair(v16 *pair) {
    v16 even = __builtin_shufflevector(pair[0], pair[1], 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    pair[1] = __builtin_shufflevector(pair[0], pair[1], 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    pair[0] = even;
}

static inline __attribute__((always_inline)) void join_pair(v16 *pair) {
    v16 low = __builtin_shufflevector(pair[0], pair[1], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    pair[1] = __builtin_shufflevector(pair[0], pair[1], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    pair[0] = low;
}

/* Continues the chains of R rows and a tile, kept in sums [R][TILE], over k in [0, depth). */
#define CHAINS(R, NAME, TYPE)                                                                                    \
    static void chains_##R##_##NAME(const float *x, size_t x_stride, const void *w, size_t depth, float *sums) { \
        enum { WIDTH = SIDE_BY_SIDE(R), PAIRS = TYPE != FP32 && WIDTH > 1 };                                     \
        for (size_t v = 0; v < VECTORS; v += WIDTH) {                                                            \
            v16 y[R][WIDTH];                                                                                     \
            for (int r = 0; r < R; r++) {                                                                        \
                for (int i = 0; i < WIDTH; i++) y[r][i] = load16(sums, r * TILE + (v + i) * LANES, FP32);        \
                for (int i = 0; PAIRS && i < WIDTH; i += 2) part_pair(y[r] + i);                                 \
            }                                                                                                    \
            for (size_t k = 0; k < depth; k++) {                                                                 \
                size_t from = k * TILE + v * LANES;                                                              \
                v16 weights[WIDTH];                                                                              \
                if (PAIRS)                                                                                       \
                    for (int i = 0; i < WIDTH; i += 2) load_pair(w, from + i * LANES, TYPE, weights + i);        \
                else                                                                                             \
                    for (int i = 0; i < WIDTH; i++) weights[i] = load16(w, from + i * LANES, TYPE);              \
                for (int r = 0; r < R; r++)                                                                      \
                    for (int i = 0; i < WIDTH; i++) y[r][i] = all(x[r * x_stride + k]) * weights[i] + y[r][i];   \
            }                                                                                                    \
            for (int r = 0; r < R; r++) {                                                                        \
                for (int i = 0; PAIRS && i < WIDTH; i += 2) join_pair(y[r] + i);                                 \
                for (int i = 0; i < WIDTH; i++) store16(sums, r * TILE + (v + i) * LANES, FP32, y[r][i]);        \
            }                                                                                                    \
        }                                                                                                        \
    }
#define CHAINS_OF(NAME, TYPE) CHAINS(1, NAME, TYPE) CHAINS(2, NAME, TYPE) CHAINS(4, NAME, TYPE) CHAINS(6, NAME, TYPE)
CHAINS_OF(fp32, FP32)
CHAINS_OF(bf16, BF16)
CHAINS_OF(fp16, FP16)

typedef void Chains(const float *, size_t, const void *, size_t, float *);
static Chains *const BY_TYPE[3][4] = {
    {chains_1_fp32, chains_2_fp32, chains_4_fp32, chains_6_fp32},
    {chains_1_bf16, chains_2_bf16, chains_4_bf16, chains_6_bf16},
    {chains_1_fp16, chains_2_fp16, chains_4_fp16, chains_6_fp16},
};

/* `count` elements from p[from] on as floats. */
static void widen(const void *p, size_t from, int type, size_t count, float *to) {
    size_t i = 0;
    for (; i + LANES <= count; i += LANES) store16(to, i, FP32, load16(p, from + i, type));
    for (; i < count; i++) to[i] = load1(p, from + i, type);
}

/* Continues the chains of a part over k in [from, end). */
static void chain(const Job *job, Part part, size_t from, size_t end, float *sums) {
    float wide[ROWS * DEPTH];
    for (size_t k = from; k < end; k += DEPTH) {
        size_t depth = end - k < DEPTH ? end - k : DEPTH, x_stride = job->x_stride;
        const char *w = (const char *)job->packed + (part.tile * job->num_inputs + k) * TILE * size_of(job->type);
        const float *x = (const float *)job->x + part.row * x_stride + k;
        if (job->type != FP32) {
            for (size_t r = 0; r < part.num_rows; r++)
                widen(job->x, (part.row + r) * x_stride + k, job->type, depth, wide + r * DEPTH);
            x = wide, x_stride = DEPTH;
        }
        for (size_t r = 0; r < part.num_rows;) {
            size_t left = part.num_rows - r;
            int size = left >= 6 ? 3 : left >= 4 ? 2 : left >= 2 ? 1 : 0;
            BY_TYPE[job->type][size](x + r * x_stride, x_stride, w, depth, sums + r * TILE);
            r += size ? 2 * size : 1;
        }
    }
}

/* The value of leaves [a, b) by the halving tree; `sums` holds what a single leaf's chains start from. */
static void subtree(const Job *job, Part part, size_t a, size_t b, float *sums) {
    if (b - a == 1) {
        size_t end = b * job->leaf;
        chain(job, part, a * job->leaf, end < job->num_inputs ? end : job->num_inputs, sums);
        return;
    }
    float right[ROWS * TILE];
    size_t middle = a + (b - a + 1) / 2, count = part.num_rows * TILE;
    memset(right, 0, count * sizeof(float));
    subtree(job, part, a, middle, sums);
    subtree(job, part, middle, b, right);
    for (size_t i = 0; i < count; i++) sums[i] += right[i];
}

/* Between `sums` [num_rows][TILE] and a node's outputs; the last tile may have fewer columns. */
static void fetch(const Job *job, Part part, size_t node, float *sums) {
    size_t column = part.tile * TILE, width = job->num_columns - column < TILE ? job->num_columns - column : TILE;
    for (size_t r = 0; r < part.num_rows; r++) {
        size_t from = (node * job->num_rows + part.row + r) * job->num_columns + column;
        memcpy(sums + r * TILE, (const float *)job->out + from, width * sizeof(float));
    }
}

static void finish(const Job *job, Part part, size_t node, const float *sums) {
    for (size_t r = 0; r < part.num_rows; r++)
        for (size_t i = 0; i < TILE; i += LANES) {
            size_t column = part.tile * TILE + i, to = (node * job->num_rows + part.row + r) * job->num_columns + column;
            if (column >= job->num_columns) break;
            size_t width = job->num_columns - column < LANES ? job->num_columns - column : LANES;
            v16 y = load16(sums, r * TILE + i, FP32);
            if (job->bias)
                y += width == LANES ? load16(job->bias, column, job->bias_type)
                                    : load_some(job->bias, column, job->bias_type, width);
            if (width == LANES) store16(job->out, to, job->out_type, y);
            else store_some(job->out, to, job->out_type, y, width);
        }
}

/* Every node of every output. With `accumulate` chains start from what out holds, otherwise from 0. */
void products(const Job *job, int accumulate, int threads) {
    size_t tiles = (job->num_columns + TILE - 1) / TILE, blocks = (job->num_rows + ROWS - 1) / ROWS;
    size_t work = job->num_rows * job->num_columns * job->num_inputs;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && work > FEW)
    for (size_t i = 0; i < tiles * blocks; i++) {
        /* Neighbours share the tile, so a thread reads it from its cache. */
        Part part = {.tile = i / blocks, .row = i % blocks * ROWS};
        part.num_rows = job->num_rows - part.row < ROWS ? job->num_rows - part.row : ROWS;
        for (size_t node = 0; node < job->num_nodes; node++) {
            float sums[ROWS * TILE];
            memset(sums, 0, part.num_rows * TILE * sizeof(float));
            if (accumulate) fetch(job, part, node, sums);
            subtree(job, part, job->nodes[2 * node], job->nodes[2 * node + 1], sums);
            finish(job, part, node, sums);
        }
    }
}
