// Grouped-query attention over paged keys and values: AttentionOrder of isobit/order.py.
//
//     int isobit_attention(const float *q, float *out, const void *kv_layer, int kv_is_bf16,
//                          const int32_t *query_starts, const int32_t *start_positions, const int32_t *page_tables,
//                          int64_t num_requests, int64_t max_pages, int64_t num_pages, int num_heads,
//                          int num_kv_heads, int head_dim, float scale, int schedule, int num_threads)
//
// It does not know models or schedulers: decode, chunks and whole prompts are one formula. Query i of request b sits at
// position start_positions[b] + i and sees the keys at positions 0 .. its own. Layouts: q, out [queries][num_heads *
// head_dim]; kv_layer [2][num_pages][num_kv_heads][head_dim * 64] (keys of a page and head [head_dim][64], values
// [64][head_dim]); page_tables [num_requests][max_pages], physical ids by logical page. Even head_dim from 2 to 256.
// Returns 0, or -1 when there is no memory.
//
// Invariant: which thread computes what, and in which tile a row stands, cannot move a bit (attention_page.h).
#include "attention_page.h"
#include "pool.h"
#include "scratch.h"

// ATTENTION_TILES: a tile is one item. ATTENTION_PAGES: pages of a tile are items, for few tiles with long contexts;
// the sums of the pages are kept and added in page order afterwards. ATTENTION_AUTO chooses by load.
enum { ATTENTION_AUTO, ATTENTION_TILES, ATTENTION_PAGES };

#define PAGES_PER_ITEM 2
#define MIN_PARALLEL_WORK 1024  // in blocks of rows x pages x head_dim; less is not worth waking a thread

static int64_t round_up_16(int64_t count) { return (count + 15) / 16 * 16; }

static int64_t tile_work(const attention_tile *tile) {
    return (int64_t)tile->num_pages * ((tile->num_rows + BLOCK_ROWS - 1) / BLOCK_ROWS);
}

static int most_work_first(const void *left, const void *right) {
    int64_t a = tile_work(left), b = tile_work(right);
    return (a < b) - (a > b);
}

static int64_t num_rows_of(const attention_call *call, int64_t request) {
    return (int64_t)(call->query_starts[request + 1] - call->query_starts[request]) * call->group;
}

static void fill_tile(const attention_call *call, attention_tile *tile, int64_t request, int kv_head, int64_t first) {
    int64_t rows = num_rows_of(call, request) - first;
    tile->request = (int32_t)request;
    tile->kv_head = kv_head;
    tile->first_row = first;
    tile->num_rows = (int32_t)(rows < TILE_ROWS ? rows : TILE_ROWS);
    for (int row = 0; row < tile->num_rows; row++) {
        tile->num_keys[row] = call->start_positions[request] + (int32_t)((first + row) / call->group) + 1;
    }
    tile->num_pages = (tile->num_keys[tile->num_rows - 1] + PAGE_SIZE - 1) / PAGE_SIZE;
}

static bool build_tiles(attention_call *call, int64_t num_requests) {
    call->num_tiles = 0;
    for (int64_t request = 0; request < num_requests; request++) {
        call->num_tiles += (num_rows_of(call, request) + TILE_ROWS - 1) / TILE_ROWS * call->num_kv_heads;
    }
    call->tiles = scratch_reserve(SCRATCH_CALL, (size_t)call->num_tiles * sizeof(attention_tile));
    if (!call->tiles) {
        return false;
    }
    attention_tile *tile = call->tiles;
    for (int64_t request = 0; request < num_requests; request++) {
        for (int kv_head = 0; kv_head < call->num_kv_heads; kv_head++) {
            for (int64_t first = 0; first < num_rows_of(call, request); first += TILE_ROWS) {
                fill_tile(call, tile++, request, kv_head, first);
            }
        }
    }
    qsort(call->tiles, (size_t)call->num_tiles, sizeof(attention_tile), most_work_first);
    return true;
}

// ---- ATTENTION_TILES

static void attend_tile(int64_t item, void *arg) {
    attention_call *call = arg;
    const attention_tile *tile = &call->tiles[item];
    int64_t page_rows = (int64_t)tile->num_rows * PAGE_SIZE, sum_rows = tile->num_rows * call->width;
    float maxima[TILE_ROWS], page_maxima[TILE_ROWS], weight_totals[TILE_ROWS] = {0}, weight_sums[TILE_ROWS];
    float *q = scratch_reserve(SCRATCH_ITEM, (size_t)(3 * sum_rows + tile->num_pages * page_rows) * sizeof(float));
    if (!q) {
        atomic_store(&call->out_of_memory, true);
        return;
    }
    float *totals = q + sum_rows, *page_sums = totals + sum_rows, *scores = page_sums + sum_rows;
    load_queries(call, tile, q);
    for (int row = 0; row < tile->num_rows; row++) {
        maxima[row] = -INFINITY;
    }
    for (int64_t page = 0; page < tile->num_pages; page++) {
        score_page(call, tile, page, q, scores + page * page_rows, page_maxima, 1);
        for (int row = 0; row < tile->num_rows; row++) {
            maxima[row] = page_maxima[row] > maxima[row] ? page_maxima[row] : maxima[row];
        }
    }
    memset(totals, 0, (size_t)sum_rows * sizeof(float));
    for (int64_t page = 0; page < tile->num_pages; page++) {  // REDUCTION ORDER: see AttentionOrder
        weigh_page(tile, maxima, scores + page * page_rows, weight_sums);
        sum_page(call, tile, page, scores + page * page_rows, page_sums);
        add_page(call, tile, page, page_sums, weight_sums, totals, weight_totals);
    }
    store_rows(call, tile, totals, weight_totals);
}

// ---- ATTENTION_PAGES: scores of all pages; then, knowing the maxima, weights and sums of all pages; then the totals

// Moves the tiles into one buffer with what their items share. Returns the number of items, or -1 without memory.
static int64_t share_tiles(attention_call *call) {
    int64_t num_items = 0, size = 0;
    for (int64_t i = 0; i < call->num_tiles; i++) {
        attention_tile *tile = &call->tiles[i];
        tile->first_item = num_items;
        num_items += (tile->num_pages + PAGES_PER_ITEM - 1) / PAGES_PER_ITEM;
        size += tile->num_rows * (tile->num_pages * (PAGE_SIZE + call->width + 1) + round_up_16(tile->num_pages));
    }
    float *free_memory = scratch_reserve(SCRATCH_SHARED, (size_t)size * sizeof(float));
    if (!free_memory) {
        return -1;
    }
    for (int64_t i = 0; i < call->num_tiles; i++) {
        attention_tile *tile = &call->tiles[i];
        int64_t page_rows = (int64_t)tile->num_pages * tile->num_rows, stride = round_up_16(tile->num_pages);
        tile->scores = free_memory;
        tile->page_sums = tile->scores + page_rows * PAGE_SIZE;
        tile->maxima = tile->page_sums + page_rows * call->width;
        tile->weight_sums = tile->maxima + tile->num_rows * stride;
        free_memory = tile->weight_sums + page_rows;
        for (int64_t at = 0; at < tile->num_rows * stride; at++) {
            tile->maxima[at] = -INFINITY;
        }
    }
    return num_items;
}

// The tile of an item, and its pages [first, end).
static const attention_tile *pages_of_item(const attention_call *call, int64_t item, int64_t *first, int64_t *end) {
    const attention_tile *tile = call->tiles;
    while (tile + 1 < call->tiles + call->num_tiles && tile[1].first_item <= item) {
        tile++;
    }
    *first = (item - tile->first_item) * PAGES_PER_ITEM;
    *end = *first + PAGES_PER_ITEM < tile->num_pages ? *first + PAGES_PER_ITEM : tile->num_pages;
    return tile;
}

static void score_pages(int64_t item, void *arg) {
    const attention_call *call = arg;
    int64_t page, end;
    const attention_tile *tile = pages_of_item(call, item, &page, &end);
    float q[TILE_ROWS * MAX_HEAD_DIM];
    load_queries(call, tile, q);
    for (; page < end; page++) {
        score_page(call, tile, page, q, tile->scores + page * tile->num_rows * PAGE_SIZE, tile->maxima + page,
                   round_up_16(tile->num_pages));
    }
}

static void sum_pages(int64_t item, void *arg) {
    const attention_call *call = arg;
    int64_t page, end;
    const attention_tile *tile = pages_of_item(call, item, &page, &end);
    int64_t stride = round_up_16(tile->num_pages);
    float maxima[TILE_ROWS];
    for (int row = 0; row < tile->num_rows; row++) {
        maxima[row] = maximum(tile->maxima + row * stride, stride);
    }
    for (; page < end; page++) {
        int64_t row = page * tile->num_rows;
        weigh_page(tile, maxima, tile->scores + row * PAGE_SIZE, tile->weight_sums + row);
        sum_page(call, tile, page, tile->scores + row * PAGE_SIZE, tile->page_sums + row * call->width);
    }
}

static void add_pages(int64_t item, void *arg) {
    const attention_call *call = arg;
    const attention_tile *tile = &call->tiles[item];
    float totals[TILE_ROWS * MAX_HEAD_DIM] = {0}, weight_totals[TILE_ROWS] = {0};
    for (int64_t page = 0; page < tile->num_pages; page++) {  // REDUCTION ORDER: see AttentionOrder
        int64_t row = page * tile->num_rows;
        add_page(call, tile, page, tile->page_sums + row * call->width, tile->weight_sums + row, totals, weight_totals);
    }
    store_rows(call, tile, totals, weight_totals);
}

// ---- choice

// Whether threads would wait for each other if each tile went, most work first, to the thread with the least work.
static bool tiles_balance(const attention_call *call, int num_threads, int64_t work) {
    int64_t load[MAX_THREADS] = {0}, greatest = 0;
    if (call->num_tiles >= 8 * num_threads && call->tiles[0].num_pages * 8 < work / num_threads) {
        return true;
    }
    for (int64_t i = 0; i < call->num_tiles; i++) {
        int least = 0;
        for (int thread = 1; thread < num_threads; thread++) {
            least = load[thread] < load[least] ? thread : least;
        }
        load[least] += tile_work(&call->tiles[i]);
        greatest = load[least] > greatest ? load[least] : greatest;
    }
    return greatest * num_threads < work + work / 4;
}

int isobit_attention(const float *q, float *out, const void *kv_layer, int kv_is_bf16, const int32_t *query_starts,
                     const int32_t *start_positions, const int32_t *page_tables, int64_t num_requests,
                     int64_t max_pages, int64_t num_pages, int num_heads, int num_kv_heads, int head_dim, float scale,
                     int schedule, int num_threads) {
    int64_t layer_size = num_pages * num_kv_heads * head_dim * PAGE_SIZE * (kv_is_bf16 ? 2 : 4), work = 0, num_items;
    attention_call call = {
        .q = q, .out = out, .keys = kv_layer, .values = (const char *)kv_layer + layer_size, .bf16 = kv_is_bf16 != 0,
        .query_starts = query_starts, .start_positions = start_positions, .page_tables = page_tables,
        .max_pages = max_pages, .num_heads = num_heads, .num_kv_heads = num_kv_heads,
        .group = num_heads / num_kv_heads, .head_dim = head_dim, .width = round_up_16(head_dim), .scale = scale,
    };
    if (!build_tiles(&call, num_requests)) {
        return -1;
    }
    for (int64_t i = 0; i < call.num_tiles; i++) {
        work += tile_work(&call.tiles[i]);
    }
    if (schedule == ATTENTION_AUTO) {
        num_threads = work * head_dim < MIN_PARALLEL_WORK ? 1 : num_threads < MAX_THREADS ? num_threads : MAX_THREADS;
        bool balanced = num_threads <= 1 || tiles_balance(&call, num_threads, work);
        schedule = balanced ? ATTENTION_TILES : ATTENTION_PAGES;
    }
    if (schedule == ATTENTION_TILES) {
        parallel_for(num_threads, call.num_tiles, attend_tile, &call);
    } else if ((num_items = share_tiles(&call)) >= 0) {
        parallel_for(num_threads, num_items, score_pages, &call);
        parallel_for(num_threads, num_items, sum_pages, &call);
        parallel_for(num_threads, call.num_tiles, add_pages, &call);
    } else {
        return -1;
    }
    return atomic_load(&call.out_of_memory) ? -1 : 0;
}
