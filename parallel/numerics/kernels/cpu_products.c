/* y = x @ weight.T by chains of fused multiply-adds, for a weight whose rows are the lanes of tiles of 64.

Each output is summed over ascending k by itself, in its own lane of its own register: how many rows, columns or
threads there are changes what is computed beside it, never its bits. */
#include "exact.h"
#include <omp.h>

/* Outputs are made ROWS rows of a tile at a time, DEPTH inputs long: what is read again, DEPTH * TILE weights and
ROWS * DEPTH inputs, stays in a level-2 cache. */
enum { TILE = 64, ROWS = 48, DEPTH = 512 };
/* Below as many multiplications the threads take longer to wake than the product takes. */
enum { FEW = 1 << 15 };
/* Vectors of the processor's own length, and as many of them beside one another as leave all sums in registers. */
#ifdef __AVX512F__
enum { BYTES = 64 };
#define SIDE_BY_SIDE(rows) 4
#elif defined(__AVX__)
enum { BYTES = 32 };
#define SIDE_BY_SIDE(rows) ((rows) == 1 ? 8 : (rows) == 2 ? 4 : 2)
#else
enum { BYTES = 16 };
#define SIDE_BY_SIDE(rows) ((rows) == 1 ? 16 : (rows) == 2 ? 8 : 4)
#endif
enum { LENGTH = BYTES / sizeof(float) };
typedef float vec __attribute__((vector_size(BYTES)));
typedef int32_t ivec __attribute__((vector_size(BYTES)));
typedef uint32_t uvec __attribute__((vector_size(BYTES)));

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

/* 16-bit weights in the upper halves of `bits`. */
static inline vec widened(uvec bits, int type) {
    if (type == BF16) return (vec)(bits & 0xffff0000);
    /* The exponent's bias changes by a product, which is exact and gives numbers below the smallest normal one. */
    vec x = (vec)(((ivec)bits >> 3) & (int32_t)0x8fffe000) * 0x1p112f;
    return (vec)((ivec)x | ((((ivec)bits & 0x7c000000) == 0x7c000000) & 0x7f800000)); /* infinities and NaNs */
}

/* Two vectors of weights from w[i] on. 16-bit ones need no shuffling: even ones become one vector, odd ones the other. */
static inline void load_pair(const void *w, size_t i, int type, vec *pair) {
    if (type == FP32) {
        memcpy(pair, (const float *)w + i, BYTES);
        memcpy(pair + 1, (const float *)w + i + LENGTH, BYTES);
    } else {
        uvec bits;
        memcpy(&bits, (const uint16_t *)w + i, BYTES);
        pair[0] = widened(bits << 16, type);
        pair[1] = widened(bits, type);
    }
}

/* Where a tile's sum of a column lies: as `load_pair` has the weights. */
static inline size_t place(size_t column, int type) {
    size_t i = column % (2 * LENGTH);
    return type == FP32 ? column : column - i + i % 2 * LENGTH + i / 2;
}

/* Continues the chains of R rows and a tile, kept in sums [R][TILE], over k in [0, depth). */
#define CHAINS(R, NAME, TYPE)                                                                                    \
    static void chains_##R##_##NAME(const float *x, size_t x_stride, const void *w, size_t depth, float *sums) { \
        enum { WIDTH = SIDE_BY_SIDE(R) };                                                                        \
        for (size_t column = 0; column < TILE; column += WIDTH * LENGTH) {                                       \
            vec y[R][WIDTH];                                                                                     \
            for (int r = 0; r < R; r++)                                                                          \
                for (int i = 0; i < WIDTH; i++) memcpy(&y[r][i], sums + r * TILE + column + i * LENGTH, BYTES);  \
            for (size_t k = 0; k < depth; k++) {                                                                 \
                vec weights[WIDTH];                                                                              \
                /* The first part of every line of memory is far from the next line's: have them all come. */   \
                for (size_t i = 0; WIDTH * LENGTH < TILE && column == 0 && i < TILE * size_of(TYPE); i += 64)    \
                    __builtin_prefetch((const char *)w + (k + 16) * TILE * size_of(TYPE) + i);                   \
                for (int i = 0; i < WIDTH; i += 2)                                                               \
                    load_pair(w, k * TILE + column + i * LENGTH, TYPE, weights + i);                             \
                for (int r = 0; r < R; r++)                                                                      \
                    for (int i = 0; i < WIDTH; i++) y[r][i] = x[r * x_stride + k] * weights[i] + y[r][i];        \
            }                                                                                                    \
            for (int r = 0; r < R; r++)                                                                          \
                for (int i = 0; i < WIDTH; i++) memcpy(sums + r * TILE + column + i * LENGTH, &y[r][i], BYTES);  \
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

static void chain_of_leaf(const Job *job, Part part, size_t leaf, float *sums) {
    size_t end = (leaf + 1) * job->leaf;
    memset(sums, 0, part.num_rows * TILE * sizeof(float));
    chain(job, part, leaf * job->leaf, end < job->num_inputs ? end : job->num_inputs, sums);
}

static size_t middle_of(size_t a, size_t b) { return a + (b - a + 1) / 2; }

/* The value of leaves [a, b) by the halving tree. */
static void subtree(const Job *job, Part part, size_t a, size_t b, float *sums) {
    if (b - a == 1) {
        chain_of_leaf(job, part, a, sums);
        return;
    }
    float right[ROWS * TILE];
    size_t middle = middle_of(a, b), count = part.num_rows * TILE;
    subtree(job, part, a, middle, sums);
    subtree(job, part, middle, b, right);
    for (size_t i = 0; i < count; i++) sums[i] += right[i];
}

static size_t width_of(const Job *job, Part part) {
    size_t left = job->num_columns - part.tile * TILE;
    return left < TILE ? left : TILE;
}

/* Makes sums a node's outputs. */
static void finish(const Job *job, Part part, size_t node, const float *sums) {
    size_t column = part.tile * TILE, width = width_of(job, part);
    float bias[TILE] = {0}, y[TILE];
    if (job->bias) widen(job->bias, column, job->bias_type, width, bias);
    for (size_t r = 0; r < part.num_rows; r++) {
        size_t to = (node * job->num_rows + part.row + r) * job->num_columns + column, i = 0;
        const float *row = sums + r * TILE;
        if (job->type == FP32) memcpy(y, row, sizeof y);
        else
            for (size_t j = 0; j < TILE; j += 2 * LENGTH)
                for (size_t l = 0; l < LENGTH; l++) y[j + 2 * l] = row[j + l], y[j + 2 * l + 1] = row[j + LENGTH + l];
        if (job->bias)
            for (size_t j = 0; j < TILE; j++) y[j] += bias[j];
        for (; i + LANES <= width; i += LANES) store16(job->out, to + i, job->out_type, load16(y, i, FP32));
        if (i < width) store_some(job->out, to + i, job->out_type, load16(y, i, FP32), width - i);
    }
}

/* Every node of every output. */
void products(const Job *job, int threads) {
    size_t tiles = (job->num_columns + TILE - 1) / TILE, blocks = (job->num_rows + ROWS - 1) / ROWS;
    size_t work = job->num_rows * job->num_columns * job->num_inputs;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && work > FEW)
    for (size_t i = 0; i < tiles * blocks; i++) {
        /* Neighbours share the tile, so a thread reads it from its cache. */
        Part part = {.tile = i / blocks, .row = i % blocks * ROWS};
        part.num_rows = job->num_rows - part.row < ROWS ? job->num_rows - part.row : ROWS;
        for (size_t node = 0; node < job->num_nodes; node++) {
            float sums[ROWS * TILE];
            subtree(job, part, job->nodes[2 * node], job->nodes[2 * node + 1], sums);
            finish(job, part, node, sums);
        }
    }
}

/* Weights of one shape behind one another in `packed`, each multiplied with rows of its own, and where these add up. */
typedef struct {
    const int64_t *ends;  /* [num_weights]: weight e has the rows of x from ends[e - 1] to ends[e] */
    const int64_t *rows;  /* [ends of the last]: the row of out that a row of x adds to, one for each weight at most */
    const float *factors; /* [ends of the last]: times which it does */
    float *room;          /* [threads][depth][num_rows][TILE] */
    size_t num_weights, depth;
} Mixture;

/* The values of a leaf for all rows of out [num_rows][TILE]: one fused multiply-add for each weight, in their order. */
static void mixed_leaf(const Job *job, const Mixture *mixture, size_t tile, size_t leaf, float *sums) {
    size_t tiles = (job->num_columns + TILE - 1) / TILE, row = 0;
    memset(sums, 0, job->num_rows * TILE * sizeof(float));
    for (size_t e = 0; e < mixture->num_weights; e++)
        for (size_t end = mixture->ends[e]; row < end;) {
            float values[ROWS * TILE];
            Part part = {.tile = e * tiles + tile, .row = row, .num_rows = end - row < ROWS ? end - row : ROWS};
            chain_of_leaf(job, part, leaf, values);
            for (size_t r = 0; r < part.num_rows; r++, row++) {
                float *to = sums + mixture->rows[row] * TILE;
                for (size_t i = 0; i < TILE; i++) to[i] = mixture->factors[row] * values[r * TILE + i] + to[i];
            }
        }
}

/* As subtree, for all rows; what follows `sums` is room for right halves. */
static void mixed_subtree(const Job *job, const Mixture *mixture, size_t tile, size_t a, size_t b, float *sums) {
    if (b - a == 1) {
        mixed_leaf(job, mixture, tile, a, sums);
        return;
    }
    size_t middle = middle_of(a, b), count = job->num_rows * TILE;
    mixed_subtree(job, mixture, tile, a, middle, sums);
    mixed_subtree(job, mixture, tile, middle, b, sums + count);
    for (size_t i = 0; i < count; i++) sums[i] += sums[count + i];
}

/* Every node of every row of out. A tile takes all rows with it, so that each weight is read once. */
void mixed_products(const Job *job, const Mixture *mixture, int threads) {
    size_t tiles = (job->num_columns + TILE - 1) / TILE;
    size_t work = mixture->ends[mixture->num_weights - 1] * job->num_columns * job->num_inputs;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && work > FEW)
    for (size_t i = 0; i < tiles * job->num_nodes; i++) {
        size_t node = i % job->num_nodes;
        Part part = {.tile = i / job->num_nodes, .num_rows = job->num_rows};
        float *sums = mixture->room + omp_get_thread_num() * mixture->depth * job->num_rows * TILE;
        mixed_subtree(job, mixture, part.tile, job->nodes[2 * node], job->nodes[2 * node + 1], sums);
        finish(job, part, node, sums);
    }
}
