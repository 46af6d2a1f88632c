// The inner blocks of linear: a few rows times a few panels over one k block, sums held in registers.
//
// They know neither batch nor threads. Invariant: every sum is the chain of LinearOrder over the k of this block,
// started from +0 and, after the block, added to the sum of the blocks before it; vector lanes are different outputs,
// so no vector width, row count or panel count can be seen in a result.
#ifndef ISOBIT_LINEAR_BLOCKS_H
#define ISOBIT_LINEAR_BLOCKS_H

#include "simd.h"

#include <stdbool.h>

// A panel is PANEL_WIDTH columns of the weight, k by k. A strip is what one work item computes at a time: at most
// STRIP_ROWS rows times STRIP_WIDTH columns.
#define STRIP_WIDTH 64
#define MICRO_ROWS 6
#if defined(ISOBIT_AVX512)
#define PANEL_WIDTH 64
#define ACCUMULATORS 24  // registers a block may use for sums
#elif defined(ISOBIT_NEON)
#define PANEL_WIDTH 16
#define ACCUMULATORS 24
#elif defined(ISOBIT_AVX2)
#define PANEL_WIDTH 16
#define ACCUMULATORS 12
#else
#define PANEL_WIDTH 4
#define ACCUMULATORS 24
#endif
#define PANEL_VECTORS (PANEL_WIDTH / VL)
#define STRIP_PANELS (STRIP_WIDTH / PANEL_WIDTH)

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

typedef V block_sums[MICRO_ROWS][STRIP_WIDTH / VL];

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
            __asm__("" : "+r"(step));
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

// A kernel computes 1..MICRO_ROWS rows of one strip for one k block. Rows that lie in a packed tile are next to each
// other; rows of a plain matrix have k next to each other. Few rows take several panels at once, as many as the
// registers allow: independent sums hide the latency of FMA, and several streams keep the memory busy.
#define PANELS_AT_ONCE(rows)                                                                      \
    (ACCUMULATORS / ((rows) * PANEL_VECTORS) >= 4 && STRIP_PANELS % 4 == 0                        \
         ? 4                                                                                      \
         : ACCUMULATORS / ((rows) * PANEL_VECTORS) >= 2 && STRIP_PANELS % 2 == 0 ? 2 : 1)

#define STRIP_CASE(block, rows, row_stride, k_stride)                                     \
    case rows:                                                                            \
        for (; left >= PANELS_AT_ONCE(rows); left -= PANELS_AT_ONCE(rows)) {              \
            block(rows, PANELS_AT_ONCE(rows), &g, row_stride, k_stride);                  \
            g.b = (const char *)g.b + PANELS_AT_ONCE(rows) * g.panel_stride * sizeof(float); \
            g.sums += PANELS_AT_ONCE(rows) * PANEL_WIDTH;                                 \
        }                                                                                 \
        for (; left > 0; left--) {                                                        \
            block(rows, 1, &g, row_stride, k_stride);                                     \
            g.b = (const char *)g.b + g.panel_stride * sizeof(float);                     \
            g.sums += PANEL_WIDTH;                                                        \
        }                                                                                 \
        break;

#define STRIP_KERNEL(name, block, row_stride, k_stride)                \
    static void name(int rows, int left, block_arguments g) {          \
        switch (rows) {                                                \
            STRIP_CASE(block, 1, row_stride, k_stride)                 \
            STRIP_CASE(block, 2, row_stride, k_stride)                 \
            STRIP_CASE(block, 3, row_stride, k_stride)                 \
            STRIP_CASE(block, 4, row_stride, k_stride)                 \
            STRIP_CASE(block, 5, row_stride, k_stride)                 \
            STRIP_CASE(block, 6, row_stride, k_stride)                 \
        }                                                              \
    }

typedef void (*strip_kernel)(int rows, int panels, block_arguments arguments);

STRIP_KERNEL(stream_f32, block_f32, g.row_stride, 1)
STRIP_KERNEL(tile_f32, block_f32, 1, MICRO_ROWS)
STRIP_KERNEL(stream_bf16, block_bf16, g.row_stride, 1)
STRIP_KERNEL(tile_bf16, block_bf16, 1, MICRO_ROWS)
#if HAS_DOT_PRODUCT
STRIP_KERNEL(stream_dot, block_dot, g.row_stride, 1)
STRIP_KERNEL(tile_dot, block_dot, 1, MICRO_ROWS)
#endif

#endif
