// Draws a token from a row of logits: SamplingOrder of isobit/order.py.
//
//     int32_t isobit_sample(const float *row, int64_t vocab_size, double temperature, int64_t top_k, double top_p,
//                           double min_p, uint64_t seed, uint64_t position, int num_threads)
//     double isobit_gumbel_from_word(uint64_t word)
//
// temperature > 0. top_k <= 0, top_p >= 1 and min_p <= 0 filter nothing. NaN and -inf are never drawn; where nothing
// can be drawn (the maximum is not finite) the answer is the argmax. Returns the token, or -1 without memory.
//
// It does not know penalties, stop conditions or requests. Invariant: the noise of a token is a function of (seed,
// position, token id) alone, and the only floating-point sums are the two of top_p, in the order of selection.
#include <float.h>

#include "head_math.h"
#include "head_select.h"
#include "pool.h"
#include "scratch.h"
#include "simd.h"

#define GOLDEN 0x9e3779b97f4a7c15u
#define DRAW_CHUNK 8192  // tokens of one item of a draw
#define DRAW_BATCH 256   // tokens whose noise is made together

typedef struct {
    double value;
    int32_t id;
} drawn_token;

typedef struct {
    const float *row;
    int64_t vocab_size, top_k;
    double temperature, top_p, min_p, greatest;
    uint64_t key;
    drawn_token *drawn;   // the best of every chunk
    uint64_t *entries;    // 2 * (vocab_size + 1)
    float *weights;       // vocab_size + 16
    int32_t *candidates;  // vocab_size; used if `filtered`, else every token is a candidate
    int64_t num_candidates;
    bool filtered;
    int32_t only;  // the token, where there is no choice; else -1
} head_draw;

// The finaliser of splitmix64 (Steele, Lea, Flood 2014).
INLINE uint64_t mix64(uint64_t z) {
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

// Standard Gumbel noise of a 64-bit hash: u = (its upper 52 bits + 1/2) / 2^52 is exact and neither 0 nor 1.
INLINE double gumbel_of_word(uint64_t word) {
    uint64_t bits = word >> 12 | 0x4330000000000000u;
    double u;
    memcpy(&u, &bits, sizeof u);
    u = (u - 4503599627370496.0 + 0.5) * (1.0 / 4503599627370496.0);
    return -log64(-log64(u));
}

double isobit_gumbel_from_word(uint64_t word) { return gumbel_of_word(word); }

INLINE double scaled_logit(const head_draw *draw, float logit) {
    return ((double)logit - draw->greatest) / draw->temperature;
}

// weights[i] = exp32(float32((x - x_max) / T)) of candidate i.
static void weigh_candidates(head_draw *draw) {
    int64_t count = draw->num_candidates;
    for (int64_t i = 0; i < count; i++) {
        draw->weights[i] = (float)scaled_logit(draw, draw->row[draw->candidates[i]]);
    }
    memset(draw->weights + count, 0, 16 * sizeof(float));
    for (int64_t i = 0; i < count; i += VL) {
        vst(draw->weights + i, vexp(vld(draw->weights + i)));
    }
}

// Candidates in the order of selection; those that are never drawn (-inf, NaN) are at its end and are left out.
static void take_top(head_draw *draw, int64_t n) {
    uint64_t *spare = draw->entries + draw->vocab_size + 1;
    const uint64_t *top = select_top(draw->row, draw->vocab_size, n, draw->entries, spare);
    for (int64_t i = 0; i < n; i++) {
        draw->candidates[i] = id_of_entry(top[i]);
    }
    while (!(draw->row[draw->candidates[n - 1]] > -INFINITY)) {
        n--;
    }
    draw->num_candidates = n;
}

static void keep_top_p(head_draw *draw) {
    double total = 0.0, before = 0.0;
    int64_t kept = 0;
    for (int64_t i = 0; i < draw->num_candidates; i++) {  // REDUCTION ORDER: see SamplingOrder
        total = total + (double)draw->weights[i];
    }
    while (kept < draw->num_candidates && before < draw->top_p * total) {  // REDUCTION ORDER: see SamplingOrder
        before = before + (double)draw->weights[kept++];
    }
    draw->num_candidates = kept;
}

static void keep_min_p(head_draw *draw) {
    int64_t kept = 0;
    for (int64_t i = 0; i < draw->num_candidates; i++) {
        draw->candidates[kept] = draw->candidates[i];
        kept += (double)draw->weights[i] >= draw->min_p;
    }
    draw->num_candidates = kept;
}

static void filter_candidates(int64_t item, void *arg) {
    (void)item;
    head_draw *draw = arg;
    float greatest;
    bool finite, limited = draw->top_k > 0 && draw->top_k < draw->vocab_size, nucleus = draw->top_p < 1.0;
    int32_t best = first_of_largest(draw->row, draw->vocab_size, &greatest, &finite);
    bool choice = greatest - greatest == 0.0f;  // a finite maximum
    draw->only = choice ? -1 : best;
    draw->greatest = (double)greatest;
    draw->num_candidates = draw->vocab_size;
    draw->filtered = choice && (limited || nucleus || draw->min_p > 0.0);
    if (!draw->filtered) {
        return;
    }
    if (limited || nucleus) {
        take_top(draw, limited ? draw->top_k : draw->vocab_size);
    } else {
        for (int64_t id = 0; id < draw->vocab_size; id++) {
            draw->candidates[id] = (int32_t)id;
        }
    }
    weigh_candidates(draw);
    if (nucleus) {
        keep_top_p(draw);
    }
    if (draw->min_p > 0.0) {
        keep_min_p(draw);
    }
}

static void draw_chunk(int64_t item, void *arg) {
    const head_draw *draw = arg;
    int64_t start = item * DRAW_CHUNK, end = start + DRAW_CHUNK;
    drawn_token best = {-(double)INFINITY, INT32_MAX};
    end = end < draw->num_candidates ? end : draw->num_candidates;
    for (; start < end; start += DRAW_BATCH) {
        int count = (int)(end - start < DRAW_BATCH ? end - start : DRAW_BATCH);
        int32_t ids[DRAW_BATCH];
        double values[DRAW_BATCH];
        for (int i = 0; i < count; i++) {
            ids[i] = draw->filtered ? draw->candidates[start + i] : (int32_t)(start + i);
        }
        for (int i = 0; i < count; i++) {
            values[i] = gumbel_of_word(mix64(draw->key + ((uint64_t)ids[i] + 1) * GOLDEN));
        }
        for (int i = 0; i < count; i++) {
            values[i] = scaled_logit(draw, draw->row[ids[i]]) + values[i];
        }
        for (int i = 0; i < count; i++) {
            if (values[i] > best.value || (values[i] == best.value && ids[i] < best.id)) {
                best = (drawn_token){values[i], ids[i]};
            }
        }
    }
    draw->drawn[item] = best;
}

static bool reserve_draw(head_draw *draw) {
    size_t size = (size_t)draw->vocab_size, num_chunks = size / DRAW_CHUNK + 1;
    size_t entries = 2 * (size + 1) * sizeof(uint64_t), drawn = num_chunks * sizeof(drawn_token);
    size_t lists = (size + 16) * sizeof(float) + size * sizeof(int32_t);
    char *memory = scratch_reserve(SCRATCH_CALL, entries + drawn + lists);
    if (!memory) {
        return false;
    }
    draw->entries = (uint64_t *)memory;
    draw->drawn = (drawn_token *)(memory + entries);
    draw->weights = (float *)(memory + entries + drawn);
    draw->candidates = (int32_t *)(draw->weights + size + 16);
    return true;
}

int32_t isobit_sample(const float *row, int64_t vocab_size, double temperature, int64_t top_k, double top_p,
                      double min_p, uint64_t seed, uint64_t position, int num_threads) {
    head_draw draw = {
        .row = row, .vocab_size = vocab_size, .top_k = top_k, .top_p = top_p, .min_p = min_p,
        // A subnormal temperature would read as zero; so small a one has long become the greedy choice.
        .temperature = temperature < DBL_MIN ? DBL_MIN : temperature,
        .key = mix64(mix64(seed + GOLDEN) + position * GOLDEN),
    };
    if (!reserve_draw(&draw)) {
        return -1;
    }
    parallel_for(1, 1, filter_candidates, &draw);
    if (draw.only >= 0) {
        return draw.only;
    }
    int64_t num_chunks = (draw.num_candidates + DRAW_CHUNK - 1) / DRAW_CHUNK;
    parallel_for(num_chunks < 3 ? 1 : num_threads, num_chunks, draw_chunk, &draw);
    drawn_token best = draw.drawn[0];
    for (int64_t chunk = 1; chunk < num_chunks; chunk++) {
        drawn_token other = draw.drawn[chunk];
        best = other.value > best.value || (other.value == best.value && other.id < best.id) ? other : best;
    }
    return best.id;
}
