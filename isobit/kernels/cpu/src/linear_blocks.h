// The inner blocks of linear: a few rows times a few panels over one k block, sums held in registers.
//
// They know neither batch nor threads. Invariant: every sum is the chain of LinearOrder over the k of this block,
// started from +0 and, after the block, added to the sum of the blocks before it; vector lanes are different outputs,
// so no vector width, row count or panel count can be seen in a result.
#ifndef ISOBIT_LINEAR_BLOCKS_H
#define ISOBIT_LINEAR_BLOCKS_H

#include "simd.h"

#include <stdbool.h>

// A panel is PANEL_WIDTH columns of the weight, k by k. A strip is STRIP_WIDTH columns, what a work item computes.
#define STRIP_WIDTH 64
#if defined(ISOBIT_AVX512)
#define PANEL_WIDTH 64
#define REGISTERS 32
#elif defined(ISOBIT_NEON)
#define PANEL_WIDTH 16
#define REGISTERS 32
#elif defined(ISOBIT_AVX2)
#define PANEL_WIDTH 16
#define REGISTERS 16
#else
#define PANEL_WIDTH 4
#define REGISTERS 32
#endif
#define PANEL_VECTORS (PANEL_WIDTH / VL)
#define STRIP_PANELS (STRIP_WIDTH / PANEL_WIDTH)

// How much of a strip a block holds in registers. What it needs beside its sums: for float32 an x, the weights of a
// panel; for bfloat16 a mask and words as well. A row more than fits costs a third of the speed (measured).
#define MAX_ROWS 6
#define FLOAT32_SPARE 4
#define BFLOAT16_SPARE 6
#define FITS(rows, panels, spare) ((rows) * (panels) * PANEL_VECTORS + (spare) <= REGISTERS)
#define ROWS_AT_ONCE(spare) (FITS(MAX_ROWS, 1, spare) ? MAX_ROWS : (REGISTERS - (spare)) / PANEL_VECTORS)
#define FLOAT32_ROWS ROWS_AT_ONCE(FLOAT32_SPARE)
#define BFLOAT16_ROWS ROWS_AT_ONCE(BFLOAT16_SPARE)

#define FLOAT32_K_BLOCK 256   // LinearOrder.k_block
#define BFLOAT16_K_BLOCK 512  // LinearOrder.k_block, 256 pairs

// Where a block reads and writes. `a`: element (row, k) is a[row * row_stride + k * k_stride]. `b`: the first panel at
// this block's first k; `panel_stride` counts elements of b. `sums`: row stride STRIP_WIDTH, panel after panel.
typedef struct {
    const void *a, *b;
    int64_t row_stride, k_stride, panel_stride, steps;
    float *sums;
    bool first;
} block_arguments;

typedef V block_sums[MAX_ROWS][STRIP_WIDTH / VL];

// `rows` and `panels` are constants in every call below, so that each of these becomes straight code.
INLINE void block_zero(int rows, int panels, block_sums sums) {
    UNROLL(8) for (int m = 0; m < rows; m++) {
        UNROLL(16) for (int v = 0; v < panels * PANEL_VECTORS; v++) { sums[m][v] = vset(0.0f); }
    }
}

INLINE void block_finish(int rows, int panels, block_sums sums, float *out, bool first) {
    UNROLL(8) for (int m = 0; m < rows; m++) {
        UNROLL(16) for (int v = 0; v < panels * PANEL_VECTORS; v++) {
            float *at = out + m * STRIP_WIDTH + v * VL;
            vst(at, first ? sums[m][v] : vadd(vld(at), sums[m][v]));
        }
    }
}

// The weight's line that is needed PREFETCH_STEPS later, once for every 16 words. Worth it where a block streams the
// weight and is not quick enough to keep the hardware's own prefetching ahead: several rows.
#define PREFETCH_STEPS 32
#define PREFETCH(rows, k_stride, v, step)                                        \
    if (VL > 1 && (rows) > 1 && (k_stride) == 1 && (v) * VL % 16 == 0) {         \
        __builtin_prefetch((step) + PREFETCH_STEPS * PANEL_WIDTH + (v) * VL % PANEL_WIDTH); \
    }

// float32 weights: k ascending.
INLINE void block_f32(int rows, int panels, const block_arguments *g, int64_t row_stride, int64_t k_stride) {
    const float *a = g->a, *b = g->b;
    int64_t panel_stride = g->panel_stride;
    block_sums sums;
    block_zero(rows, panels, sums);
    for (int64_t k = 0; k < g->steps; k++) {  // REDUCTION ORDER: see LinearOrder
        V w[STRIP_WIDTH / VL];
        UNROLL(16) for (int v = 0; v < panels * PANEL_VECTORS; v++) {
            const float *panel = b + v / PANEL_VECTORS * panel_stride + k * PANEL_WIDTH;
            PREFETCH(rows, k_stride, v, panel)
            w[v] = vld(panel + v % PANEL_VECTORS * VL);
        }
        UNROLL(8) for (int m = 0; m < rows; m++) {
            V x = vset(a[m * row_stride + k * k_stride]);
            UNROLL(16) for (int v = 0; v < panels * PANEL_VECTORS; v++) { sums[m][v] = vfma(x, w[v], sums[m][v]); }
        }
    }
    block_finish(rows, panels, sums, g->sums, g->first);
}

// bfloat16 weights, a step is a pair of k: the odd one, then the even one. The words are loaded for each of the two:
// kept in registers over both, they would push sums out (hence the asm, which makes the compiler forget them).
INLINE void block_bf16(int rows, int panels, const block_arguments *g, int64_t row_stride, int64_t k_stride) {
    const float *a = g->a;
    const uint32_t *b = g->b;
    int64_t panel_stride = g->panel_stride;
    block_sums sums;
    block_zero(rows, panels, sums);
    for (int64_t pair = 0; pair < g->steps; pair++) {  // REDUCTION ORDER: see LinearOrder
        UNROLL(2) for (int odd = 1; odd >= 0; odd--) {
            const uint32_t *step = b + pair * PANEL_WIDTH;
            __asm__ volatile("" : "+r"(step));
            V w[STRIP_WIDTH / VL];
            UNROLL(16) for (int v = 0; v < panels * PANEL_VECTORS; v++) {
                const uint32_t *panel = step + v / PANEL_VECTORS * panel_stride;
                if (odd) {
                    PREFETCH(rows, k_stride, v, panel)
                }
                VI words = vldi(panel + v % PANEL_VECTORS * VL);
                w[v] = odd ? vhi(words) : vlo(words);
            }
            UNROLL(8) for (int m = 0; m < rows; m++) {
                V x = vset(a[m * row_stride + (2 * pair + odd) * k_stride]);
                UNROLL(16) for (int v = 0; v < panels * PANEL_VECTORS; v++) { sums[m][v] = vfma(x, w[v], sums[m][v]); }
            }
        }
    }
    block_finish(rows, panels, sums, g->sums, g->first);
}

#if defined(ISOBIT_AVX512) && defined(__AVX512BF16__)
#define HAS_DOT_PRODUCT 1
// bfloat16 weights and activations, `a` holds words of (even, odd): VDPBF16PS adds the odd product, rounds, then the
// even one and rounds, with denormals as zero, which is exactly the pair above.
INLINE void block_dot(int rows, int panels, const block_arguments *g, int64_t row_stride, int64_t k_stride) {
    const uint32_t *a = g->a, *b = g->b;
    int64_t panel_stride = g->panel_stride;
    block_sums sums;
    block_zero(rows, panels, sums);
    for (int64_t pair = 0; pair < g->steps; pair++) {  // REDUCTION ORDER: see LinearOrder
        VI w[STRIP_WIDTH / VL];
        UNROLL(16) for (int v = 0; v < panels * PANEL_VECTORS; v++) {
            const uint32_t *panel = b + v / PANEL_VECTORS * panel_stride + pair * PANEL_WIDTH;
            PREFETCH(rows, k_stride, v, panel)
            w[v] = vldi(panel + v % PANEL_VECTORS * VL);
        }
        UNROLL(8) for (int m = 0; m < rows; m++) {
            VI x = vseti(a[m * row_stride + pair * k_stride]);
            UNROLL(16) for (int v = 0; v < panels * PANEL_VECTORS; v++) {
                sums[m][v] = _mm512_dpbf16_ps(sums[m][v], (__m512bh)x, (__m512bh)w[v]);
            }
        }
    }
    block_finish(rows, panels, sums, g->sums, g->first);
}
#else
#define HAS_DOT_PRODUCT 0
#endif

// A kernel computes 1..FLOAT32_ROWS or 1..BFLOAT16_ROWS rows of one strip for one k block. Rows that lie in a packed
// tile are next to each other; rows of a plain matrix have k next to each other. Few rows take several panels at once,
// as far as the registers go: independent sums hide the latency of FMA, and several streams keep the memory busy.
#define PANELS_AT_ONCE(rows, spare)                                \
    (STRIP_PANELS % 4 == 0 && FITS(rows, 4, spare)   ? 4           \
     : STRIP_PANELS % 2 == 0 && FITS(rows, 2, spare) ? 2           \
                                                     : 1)

INLINE void next_panels(block_arguments *g, int panels) {
    g->b = (const float *)g->b + panels * g->panel_stride;  // an element of b has the size of a float, or is one
    g->sums += panels * PANEL_WIDTH;
}

#define STRIP_CASE(block, spare, rows, row_stride, k_stride)               \
    case rows:                                                             \
        if (FITS(rows, 1, spare)) {                                        \
            int many = PANELS_AT_ONCE(rows, spare);                        \
            for (; left >= many; left -= many, next_panels(&g, many)) {    \
                block(rows, many, &g, row_stride, k_stride);               \
            }                                                              \
            for (; left > 0; left--, next_panels(&g, 1)) {                 \
                block(rows, 1, &g, row_stride, k_stride);                  \
            }                                                              \
        }                                                                  \
        break;

#define STRIP_KERNEL(name, block, spare, row_stride, k_stride)         \
    static void name(int rows, int left, block_arguments g) {          \
        switch (rows) {                                                \
            STRIP_CASE(block, spare, 1, row_stride, k_stride)          \
            STRIP_CASE(block, spare, 2, row_stride, k_stride)          \
            STRIP_CASE(block, spare, 3, row_stride, k_stride)          \
            STRIP_CASE(block, spare, 4, row_stride, k_stride)          \
            STRIP_CASE(block, spare, 5, row_stride, k_stride)          \
            STRIP_CASE(block, spare, 6, row_stride, k_stride)          \
        }                                                              \
    }

typedef void (*strip_kernel)(int rows, int panels, block_arguments arguments);

STRIP_KERNEL(stream_f32, block_f32, FLOAT32_SPARE, g.row_stride, 1)
STRIP_KERNEL(tile_f32, block_f32, FLOAT32_SPARE, 1, FLOAT32_ROWS)
STRIP_KERNEL(stream_bf16, block_bf16, BFLOAT16_SPARE, g.row_stride, 1)
STRIP_KERNEL(tile_bf16, block_bf16, BFLOAT16_SPARE, 1, BFLOAT16_ROWS)
#if HAS_DOT_PRODUCT
STRIP_KERNEL(stream_dot, block_dot, BFLOAT16_SPARE, g.row_stride, 1)
STRIP_KERNEL(tile_dot, block_dot, BFLOAT16_SPARE, 1, BFLOAT16_ROWS)
#endif

#endif
