// y = x W^T + bias (+ addend) with the bits of LinearOrder: packing of weights, and two ways to walk the work.
//
// "stream" reads a few rows of x where they lie and runs through the weight once, as fast as memory gives it; "tile"
// packs x into tiles of a few rows, for many rows. "-dp" variants do the same with VDPBF16PS. Invariant: each output
// element is computed by one work item, k block by k block, so rows, threads and schedule cannot be seen in it.
#include "linear_blocks.h"
#include "pool.h"
#include "scratch.h"

#define CHUNK_ROWS 120  // rows of packed x that one item takes: one k block of them stays in the second-level cache
#define SMALL_LINEAR 100000  // products below which waking a second thread costs more than it saves

enum schedule { STREAM = 0, TILE = 1, DOT_STREAM = 2, DOT_TILE = 3 };

static int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
static int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }

// ---- packing the weight

// Packed weight: [panels][K][PANEL_WIDTH] floats, or [panels][(K + 1) / 2][PANEL_WIDTH] words holding the bfloat16 of
// (even k, odd k). Columns and the k past the end are +0. A word has the size of a float: a "step" is either.
static int64_t packed_steps(int64_t k, int is_bf16) { return is_bf16 ? (k + 1) / 2 : k; }

int64_t isobit_packed_bytes(int64_t n, int64_t k, int is_bf16) {
    return divide_up(n, PANEL_WIDTH) * packed_steps(k, is_bf16) * PANEL_WIDTH * 4;
}

typedef struct {
    const void *weight;
    uint32_t *packed;
    int64_t n, k;
    int is_bf16;
} pack_job;

static void pack_panel(int64_t panel, void *arg) {
    const pack_job *job = arg;
    int64_t steps = packed_steps(job->k, job->is_bf16), n0 = panel * PANEL_WIDTH;
    uint32_t *to = job->packed + panel * steps * PANEL_WIDTH;
    for (int64_t step0 = 0; step0 < steps; step0 += 16) {  // 16 steps at a time: whole lines of every row
        for (int64_t c = 0; c < PANEL_WIDTH; c++) {
            for (int64_t step = step0; step < min64(step0 + 16, steps); step++) {
                uint32_t word = 0;
                if (n0 + c < job->n && job->is_bf16) {
                    const uint16_t *row = (const uint16_t *)job->weight + (n0 + c) * job->k;
                    word = row[2 * step] | (2 * step + 1 < job->k ? (uint32_t)row[2 * step + 1] << 16 : 0);
                } else if (n0 + c < job->n) {
                    word = ((const uint32_t *)job->weight)[(n0 + c) * job->k + step];
                }
                to[step * PANEL_WIDTH + c] = word;
            }
        }
    }
}

void isobit_pack_linear(const void *weight, void *packed, int64_t n, int64_t k, int is_bf16,
                        int num_threads) {
    pack_job job = {weight, packed, n, k, is_bf16};
    parallel_for(num_threads, divide_up(n, PANEL_WIDTH), pack_panel, &job);
}

// ---- embedding: rows of the weight, read back from its packed form

typedef struct {
    const uint32_t *packed;
    const int32_t *ids;
    float *out;
    int64_t k;
    int is_bf16;
} embedding_job;

static void embedding_row(int64_t row, void *arg) {
    const embedding_job *job = arg;
    int64_t id = job->ids[row], steps = packed_steps(job->k, job->is_bf16);
    const uint32_t *from = job->packed + id / PANEL_WIDTH * steps * PANEL_WIDTH + id % PANEL_WIDTH;
    float *out = job->out + row * job->k;
    for (int64_t k = 0; k < job->k; k++) {
        uint32_t word = from[(job->is_bf16 ? k / 2 : k) * PANEL_WIDTH];
        out[k] = float_of_bits(!job->is_bf16 ? word : k % 2 ? word & 0xffff0000u : word << 16);
    }
}

// Returns -1, or the first row whose id is outside [0, n); nothing is written then.
int64_t isobit_embedding(const void *packed, const int32_t *ids, float *out, int64_t m, int64_t n, int64_t k,
                         int is_bf16, int num_threads) {
    for (int64_t row = 0; row < m; row++) {
        if (ids[row] < 0 || ids[row] >= n) {
            return row;
        }
    }
    embedding_job job = {packed, ids, out, k, is_bf16};
    parallel_for(num_threads, m, embedding_row, &job);
    return -1;
}

// ---- linear

typedef struct {
    const float *x, *bias, *addend;
    const uint32_t *packed;
    float *out;
    int64_t m, n, k;
    strip_kernel kernel;
    int64_t steps, k_step;  // steps of the packed weight, and of one k block
    int64_t x_steps;        // elements of prepared x per row: floats, or words of two bfloat16
    int64_t x_per_step;     // of these, how many belong to one step of the weight
    int64_t tile_rows;      // rows the kernel takes at once
    void *prepared;         // x as the kernel reads it; NULL when it reads x itself
    bool round_x, dot, tiled;
    int64_t chunk_rows, num_chunks;
} linear_job;

#define PREPARE_ELEMENTS 256  // elements of a row that are prepared at a time

// Elements [i0, i0 + count) of a prepared row: floats, possibly rounded to bfloat16, or words of two; +0 past the end.
static void prepare_elements(const linear_job *job, const float *row, int64_t i0, int64_t count, uint32_t *to) {
    int64_t whole = job->dot ? job->k / 2 : job->k;  // elements before the end of the row
    whole = whole < i0 ? 0 : min64(count, whole - i0);
    if (job->dot) {
        for (int64_t i = 0; i < whole; i++) {
            const float *pair = row + 2 * (i0 + i);
            to[i] = bf16_of_float(pair[0]) | (uint32_t)bf16_of_float(pair[1]) << 16;
        }
    } else if (job->round_x) {
        for (int64_t i = 0; i < whole; i++) {
            to[i] = (uint32_t)bf16_of_float(row[i0 + i]) << 16;
        }
    } else {
        memcpy(to, row + i0, (size_t)whole * sizeof(float));
    }
    for (int64_t i = whole; i < count; i++) {
        to[i] = job->dot && 2 * (i0 + i) < job->k ? bf16_of_float(row[2 * (i0 + i)]) : 0;
    }
}

INLINE void interleave_rows(uint32_t block[][PREPARE_ELEMENTS], int64_t count, int rows, uint32_t *to) {
    for (int64_t i = 0; i < count; i++) {
        UNROLL(8) for (int r = 0; r < rows; r++) { to[i * rows + r] = block[r][i]; }
    }
}

// A tile: element i of all its rows, then element i + 1; rows that are not there are +0.
static void prepare_tile(int64_t tile, void *arg) {
    const linear_job *job = arg;
    int64_t row0 = tile * job->tile_rows, rows = min64(job->tile_rows, job->m - row0);
    uint32_t *to = (uint32_t *)job->prepared + row0 * job->x_steps;
    uint32_t block[MAX_ROWS][PREPARE_ELEMENTS] = {{0}};
    for (int64_t i = 0; i < job->x_steps; i += PREPARE_ELEMENTS) {
        int64_t count = min64(PREPARE_ELEMENTS, job->x_steps - i);
        for (int64_t r = 0; r < rows; r++) {
            prepare_elements(job, job->x + (row0 + r) * job->k, i, count, block[r]);
        }
        if (job->tile_rows == FLOAT32_ROWS) {
            interleave_rows(block, count, FLOAT32_ROWS, to + i * FLOAT32_ROWS);
        } else {
            interleave_rows(block, count, BFLOAT16_ROWS, to + i * BFLOAT16_ROWS);
        }
    }
}

static void prepare_row(int64_t row, void *arg) {
    const linear_job *job = arg;
    uint32_t *to = (uint32_t *)job->prepared + row * job->x_steps;
    prepare_elements(job, job->x + row * job->k, 0, job->x_steps, to);
}

// sums + bias, then addend + that, for one row of a strip.
static void write_row(const linear_job *job, int64_t row, int64_t n0, const float *sums) {
    int64_t width = min64(STRIP_WIDTH, job->n - n0);
    float *out = job->out + row * job->n + n0;
    const float *addend = job->addend ? job->addend + row * job->n + n0 : NULL;
    const float *bias = job->bias ? job->bias + n0 : NULL;
    for (int64_t c = 0; c < width; c++) {
        float y = bias ? sums[c] + bias[c] : sums[c];
        out[c] = addend ? addend[c] + y : y;
    }
}

// One item: STRIP_WIDTH columns of a chunk of rows. k blocks are the outer loop, so that a block of x and of the weight
// is used for the whole chunk while it is in cache.
static void linear_strip(int64_t item, void *arg) {
    const linear_job *job = arg;
    int64_t n0 = item / job->num_chunks * STRIP_WIDTH, chunk = item % job->num_chunks;
    int64_t row0 = chunk * job->chunk_rows, row1 = min64(row0 + job->chunk_rows, job->m);
    int panels = (int)divide_up(min64(STRIP_WIDTH, job->n - n0), PANEL_WIDTH);
    const uint32_t *x = job->prepared ? job->prepared : (const uint32_t *)job->x;
    float sums[CHUNK_ROWS * STRIP_WIDTH] __attribute__((aligned(64)));
    for (int64_t step = 0; step < job->steps; step += job->k_step) {  // REDUCTION ORDER: see LinearOrder
        for (int64_t row = row0; row < row1; row += job->tile_rows) {
            int64_t first_x = step * job->x_per_step * (job->tiled ? job->tile_rows : 1);
            block_arguments arguments = {
                .a = x + row * job->x_steps + first_x,
                .b = job->packed + (n0 / PANEL_WIDTH * job->steps + step) * PANEL_WIDTH,
                .row_stride = job->x_steps,
                .panel_stride = job->steps * PANEL_WIDTH,
                .steps = min64(job->k_step, job->steps - step),
                .sums = sums + (row - row0) * STRIP_WIDTH,
                .first = step == 0,
            };
            job->kernel((int)min64(job->tile_rows, row1 - row), panels, arguments);
        }
    }
    for (int64_t row = row0; row < row1; row++) {
        write_row(job, row, n0, sums + (row - row0) * STRIP_WIDTH);
    }
}

static strip_kernel choose_kernel(int is_bf16, int schedule) {
    switch (schedule) {
        case STREAM: return is_bf16 ? stream_bf16 : stream_f32;
        case TILE: return is_bf16 ? tile_bf16 : tile_f32;
#if HAS_DOT_PRODUCT
        case DOT_STREAM: return stream_dot;
        case DOT_TILE: return tile_dot;
#endif
        default: return NULL;
    }
}

// x [m][k] float32, out [m][n] float32; out may be addend. Returns 0; -1 when memory ran out; -2 for a schedule this
// library does not have.
int isobit_linear(const float *x, const void *packed, const float *bias, const float *addend, float *out,
                  int64_t m, int64_t n, int64_t k, int is_bf16, int round_x, int schedule, int num_threads) {
    linear_job job = {x, bias, addend, packed, out, m, n, k, .kernel = choose_kernel(is_bf16, schedule)};
    if (!job.kernel || m < 1) {
        return job.kernel ? 0 : -2;
    }
    num_threads = m * n * k < SMALL_LINEAR ? 1 : num_threads;
    job.dot = schedule == DOT_STREAM || schedule == DOT_TILE;
    job.tiled = schedule == TILE || schedule == DOT_TILE;
    job.round_x = round_x;
    job.steps = packed_steps(k, is_bf16);
    job.k_step = is_bf16 ? BFLOAT16_K_BLOCK / 2 : FLOAT32_K_BLOCK;
    job.x_per_step = is_bf16 && !job.dot ? 2 : 1;
    job.x_steps = job.steps * job.x_per_step;
    job.tile_rows = is_bf16 ? BFLOAT16_ROWS : FLOAT32_ROWS;
    int64_t rows_per_tile = job.tiled ? job.tile_rows : 1, num_tiles = divide_up(m, rows_per_tile);
    if (job.tiled || job.dot || round_x || job.x_steps != k) {
        job.prepared = scratch_reserve(SCRATCH_CALL, (size_t)(num_tiles * rows_per_tile * job.x_steps) * 4);
        if (!job.prepared) {
            return -1;
        }
        parallel_for(m > job.tile_rows ? num_threads : 1, num_tiles, job.tiled ? prepare_tile : prepare_row,
                     &job);
    }
    job.num_chunks = divide_up(m, CHUNK_ROWS);
    job.chunk_rows = divide_up(divide_up(m, job.num_chunks), job.tile_rows) * job.tile_rows;
    job.num_chunks = divide_up(m, job.chunk_rows);
    parallel_for(num_threads, divide_up(n, STRIP_WIDTH) * job.num_chunks, linear_strip, &job);
    return 0;
}

// Bit i set: schedule i exists for this pair of dtypes.
int isobit_linear_schedules(int is_bf16, int round_x) {
    int dot = HAS_DOT_PRODUCT && is_bf16 && round_x;
    return 1 << STREAM | 1 << TILE | dot << DOT_STREAM | dot << DOT_TILE;
}
