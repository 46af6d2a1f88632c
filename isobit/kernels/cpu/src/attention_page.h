// One page of one tile of attention: scores, weights, weighted sum of the values. AttentionOrder of isobit/order.py.
//
// It does not know threads, nor which tiles there are (attention.c). Invariant: the bits of a row depend on its query
// and on keys and values at its own and earlier positions. Whatever else lies in a page (later tokens, stale tails,
// NaN) is computed in lanes of its own and then dropped, and is never multiplied into a sum of values.
#ifndef ISOBIT_ATTENTION_PAGE_H
#define ISOBIT_ATTENTION_PAGE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "simd.h"

#define PAGE_SIZE 64     // keys of a page; part of the Order
#define BLOCK_ROWS 6     // rows the microkernel holds in registers
#define TILE_ROWS 48     // rows that share one walk over the pages
#define MAX_HEAD_DIM 256

typedef struct {
    const float *q;
    float *out;
    const char *keys, *values;  // of the layer
    const int32_t *query_starts, *start_positions, *page_tables;
    int64_t max_pages;
    int64_t width;  // head_dim rounded up to 16: row length of sums
    int num_heads, num_kv_heads, group, head_dim;
    float scale;
    bool bf16;                     // keys and values
    struct attention_tile *tiles;  // most work first
    int64_t num_tiles;
    atomic_bool out_of_memory;
} attention_call;

// Consecutive rows of one (request, kv head). Row r is query r / group of the request and head r % group of the group,
// so the number of keys never falls from row to row.
typedef struct attention_tile {
    int32_t request, kv_head, num_rows, num_pages;
    int64_t first_row;
    int32_t num_keys[TILE_ROWS];  // that a row sees: its position + 1
    // Only where the pages of a tile are items of their own (attention.c):
    int64_t first_item;
    float *scores;       // [num_pages][num_rows][64], turned into weights
    float *maxima;       // [num_rows][num_pages rounded up to 16]
    float *weight_sums;  // [num_pages][num_rows]
    float *page_sums;    // [num_pages][num_rows][width]
} attention_tile;

// ---- microkernel

// c[r][n] = fma(a[r][k], b[k][n], ...) over k ascending from +0, or from c[r][n] when `continues`;
// r < rows, n < vectors * VL, k < depth. `rows`, `vectors` and `bf16` (of b) are constants after inlining.
INLINE void multiply_block(const int rows, const int vectors, const bool bf16, const float *a, int64_t a_stride,
                           const void *b, int64_t b_stride, int64_t depth, float *c, int64_t c_stride,
                           bool continues) {
    V sum[BLOCK_ROWS][8];
    UNROLL(8) for (int r = 0; r < rows; r++) {
        UNROLL(8) for (int v = 0; v < vectors; v++) {
            sum[r][v] = continues ? vld(c + r * c_stride + v * VL) : vset(0.0f);
        }
    }
    UNROLL(2) for (int64_t k = 0; k < depth; k++) {  // REDUCTION ORDER: see AttentionOrder
        V right[8];
        UNROLL(8) for (int v = 0; v < vectors; v++) {
            int64_t at = k * b_stride + v * VL;
            right[v] = bf16 ? vldbf((const uint16_t *)b + at) : vld((const float *)b + at);
        }
        UNROLL(8) for (int r = 0; r < rows; r++) {
            V left = vset(a[r * a_stride + k]);
            UNROLL(8) for (int v = 0; v < vectors; v++) { sum[r][v] = vfma(left, right[v], sum[r][v]); }
        }
    }
    UNROLL(8) for (int r = 0; r < rows; r++) {
        UNROLL(8) for (int v = 0; v < vectors; v++) { vst(c + r * c_stride + v * VL, sum[r][v]); }
    }
}

// multiply_block over `num_vectors` vectors of columns, in panels as wide as the registers allow.
INLINE void multiply_columns(const int rows, const bool bf16, const float *a, int64_t a_stride, const void *b,
                             int64_t b_stride, int64_t num_vectors, int64_t depth, float *c, int64_t c_stride,
                             bool continues) {
    const int sums = VL == 16 || VL == 4 ? 24 : 12;  // AVX-512 and NEON have 32 vector registers, the others 16
    const char *columns = b;
    int64_t v = 0;
#define PANELS(VECTORS)                                                                                             \
    for (; rows * (VECTORS) <= sums && v + (VECTORS) <= num_vectors; v += (VECTORS)) {                              \
        multiply_block(rows, VECTORS, bf16, a, a_stride, columns + v * VL * (bf16 ? 2 : 4), b_stride, depth,        \
                       c + v * VL, c_stride, continues);                                                            \
    }
    PANELS(8)
    PANELS(4)
    PANELS(2)
    PANELS(1)
#undef PANELS
}

static void multiply(int rows, bool bf16, const float *a, int64_t a_stride, const void *b, int64_t b_stride,
                     int64_t num_vectors, int64_t depth, float *c, int64_t c_stride, bool continues) {
#define MULTIPLY(ROWS)                                                                                              \
    case ROWS:                                                                                                      \
        if (bf16) {                                                                                                 \
            multiply_columns(ROWS, true, a, a_stride, b, b_stride, num_vectors, depth, c, c_stride, continues);     \
        } else {                                                                                                    \
            multiply_columns(ROWS, false, a, a_stride, b, b_stride, num_vectors, depth, c, c_stride, continues);    \
        }                                                                                                           \
        break;
    switch (rows) {
        MULTIPLY(1)
        MULTIPLY(2)
        MULTIPLY(3)
        MULTIPLY(4)
        MULTIPLY(5)
        MULTIPLY(6)
    }
#undef MULTIPLY
}

// ---- one page of one tile

// Where the row lies in q and out.
static int64_t row_offset(const attention_call *call, const attention_tile *tile, int row) {
    int64_t query = call->query_starts[tile->request] + (tile->first_row + row) / call->group;
    int64_t head = (int64_t)tile->kv_head * call->group + (tile->first_row + row) % call->group;
    return (query * call->num_heads + head) * call->head_dim;
}

// How many keys of `page` the row sees: 0 .. 64.
static int keys_on_page(const attention_tile *tile, int row, int64_t page) {
    int64_t keys = tile->num_keys[row] - page * PAGE_SIZE;
    return (int)(keys < 0 ? 0 : keys > PAGE_SIZE ? PAGE_SIZE : keys);
}

static const char *page_of_head(const attention_call *call, const attention_tile *tile, const char *base,
                                int64_t page) {
    int64_t physical = call->page_tables[tile->request * call->max_pages + page];
    return base + (physical * call->num_kv_heads + tile->kv_head) * call->head_dim * PAGE_SIZE * (call->bf16 ? 2 : 4);
}

static void load_queries(const attention_call *call, const attention_tile *tile, float *q) {
    for (int row = 0; row < tile->num_rows; row++) {
        const float *source = call->q + row_offset(call, tile, row);
        for (int d = 0; d < call->head_dim; d++) {
            q[row * call->head_dim + d] = source[d] * call->scale;
        }
    }
}

// Maximum of `count` numbers, a multiple of 16. It has no order; where there is a NaN the row ends as NaN anyway.
static float maximum(const float *x, int64_t count) {
    float lanes[VL];
    V greatest = vld(x);
    for (int64_t i = VL; i < count; i += VL) {
        greatest = vmax(greatest, vld(x + i));
    }
    vst(lanes, greatest);
    for (int i = 1; i < VL; i++) {
        lanes[0] = lanes[i] > lanes[0] ? lanes[i] : lanes[0];
    }
    return lanes[0];
}

// Scores [num_rows][64] of the page, -inf where the row does not see the key; and every row's maximum.
static void score_page(const attention_call *call, const attention_tile *tile, int64_t page, const float *q,
                       float *scores, float *maxima, int64_t maxima_stride) {
    const void *keys = page_of_head(call, tile, call->keys, page);
    for (int first = 0; first < tile->num_rows; first += BLOCK_ROWS) {
        int end = first + BLOCK_ROWS < tile->num_rows ? first + BLOCK_ROWS : tile->num_rows;
        if (keys_on_page(tile, end - 1, page) > 0) {  // REDUCTION ORDER: see AttentionOrder
            multiply(end - first, call->bf16, q + first * call->head_dim, call->head_dim, keys, PAGE_SIZE,
                     PAGE_SIZE / VL, call->head_dim, scores + first * PAGE_SIZE, PAGE_SIZE, false);
        }
        for (int row = first; row < end; row++) {
            float *score = scores + row * PAGE_SIZE;
            for (int key = keys_on_page(tile, row, page); key < PAGE_SIZE; key++) {
                score[key] = -INFINITY;
            }
            maxima[row * maxima_stride] = maximum(score, PAGE_SIZE);
        }
    }
}

// Turns the scores of a page into weights exp32(score - row_maxima[row]), and sums them in the lane tree of the Order.
// The weight of a key that the row does not see is +0 (unless the whole row is NaN), and only this sum reads it.
static void weigh_page(const attention_tile *tile, const float *row_maxima, float *scores, float *weight_sums) {
    for (int row = 0; row < tile->num_rows; row++) {
        float *weight = scores + row * PAGE_SIZE, lanes[16];
        V shift = vset(row_maxima[row]);
        for (int i = 0; i < 16; i += VL) {  // REDUCTION ORDER: see AttentionOrder
            V quarter[4];
            UNROLL(4) for (int j = 0; j < 4; j++) {
                quarter[j] = vexp(vsub(vld(weight + 16 * j + i), shift));
                vst(weight + 16 * j + i, quarter[j]);
            }
            vst(lanes + i, vadd(vadd(quarter[0], quarter[1]), vadd(quarter[2], quarter[3])));
        }
        weight_sums[row] = add_halves(lanes);
    }
}

// sums [num_rows][width] = weights x values of the page. Rows advance together through the keys they all see; on the
// page of the diagonal, rows whose position is reached drop out and the others carry on with their chains.
static void sum_page(const attention_call *call, const attention_tile *tile, int64_t page, const float *weights,
                     float *sums) {
    const char *values = page_of_head(call, tile, call->values, page);
    int head_dim = call->head_dim, size = call->bf16 ? 2 : 4, num_vectors = head_dim / VL, left = head_dim % VL;
    float left_columns[PAGE_SIZE * VL];  // the last head_dim % VL columns, padded to a vector
    for (int key = 0; left > 0 && key < keys_on_page(tile, tile->num_rows - 1, page); key++) {
        for (int i = 0; i < VL; i++) {
            const char *at = values + (key * head_dim + head_dim - left + i) * size;
            left_columns[key * VL + i] =
                i >= left ? 0.0f : call->bf16 ? float_of_bf16(*(const uint16_t *)at) : *(const float *)at;
        }
    }
    for (int first = 0; first < tile->num_rows; first += BLOCK_ROWS) {
        int end = first + BLOCK_ROWS < tile->num_rows ? first + BLOCK_ROWS : tile->num_rows;
        for (int row = first, done = 0; row < end; row++) {
            int num_keys = keys_on_page(tile, row, page);
            if (num_keys == done) {
                continue;
            }
            const float *weight = weights + row * PAGE_SIZE + done;  // REDUCTION ORDER: see AttentionOrder
            float *sum = sums + row * call->width;
            multiply(end - row, call->bf16, weight, PAGE_SIZE, values + done * head_dim * size, head_dim, num_vectors,
                     num_keys - done, sum, call->width, done > 0);
            if (left > 0) {
                multiply(end - row, false, weight, PAGE_SIZE, left_columns + done * VL, VL, 1, num_keys - done,
                         sum + num_vectors * VL, call->width, done > 0);
            }
            done = num_keys;
        }
    }
}

// totals += page_sums and weight_totals += weight_sums, of the rows that see the page.
static void add_page(const attention_call *call, const attention_tile *tile, int64_t page, const float *page_sums,
                     const float *weight_sums, float *totals, float *weight_totals) {
    for (int row = 0; row < tile->num_rows; row++) {
        if (keys_on_page(tile, row, page) == 0) {
            continue;
        }
        weight_totals[row] = weight_totals[row] + weight_sums[row];  // REDUCTION ORDER: see AttentionOrder
        float *total = totals + row * call->width;
        const float *sum = page_sums + row * call->width;
        for (int d = 0; d < call->head_dim; d++) {
            total[d] = total[d] + sum[d];
        }
    }
}

static void store_rows(const attention_call *call, const attention_tile *tile, const float *totals,
                       const float *weight_totals) {
    for (int row = 0; row < tile->num_rows; row++) {
        float *out = call->out + row_offset(call, tile, row);
        float inverse = 1.0f / weight_totals[row];
        for (int d = 0; d < call->head_dim; d++) {
            out[d] = totals[row * call->width + d] * inverse + 0.0f;  // + 0: no negative zero
        }
    }
}

#endif
