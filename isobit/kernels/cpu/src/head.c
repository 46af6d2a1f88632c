// From logits to ids: greedy choice, log-probabilities (LogprobsOrder of isobit/order.py), best alternatives.
//
//     void isobit_argmax(const float *logits, int64_t num_rows, int64_t vocab_size, int32_t *ids, uint8_t *finite,
//                        int num_threads)
//     void isobit_logprobs(const float *logits, int64_t num_rows, int64_t vocab_size, float *maxima, double *lse,
//                          int num_threads)
//     int isobit_top_logits(const float *row, int64_t vocab_size, int64_t n, int32_t *ids)
//
// argmax: lowest id of the largest value; `finite` is 0 where the row holds a NaN or an infinity. logprobs: maximum and
// log of the sum of exponentials, NaN where that is not finite. top_logits: the first n <= vocab_size ids by (value
// descending, id ascending); returns 0, or -1 without memory. A NaN counts as less than -inf everywhere.
//
// It does not know penalties, temperatures or requests. Invariant: a row's result depends on the row alone.
#include "head_math.h"
#include "head_select.h"
#include "pool.h"
#include "scratch.h"
#include "simd.h"

#define LOGPROBS_BLOCK 4096        // part of LogprobsOrder
#define MIN_PARALLEL_LOGITS 65536  // fewer are not worth waking a thread

// ---- greedy choice and log-probabilities, a row an item

typedef struct {
    const float *logits;
    int64_t vocab_size;
    int32_t *ids;
    uint8_t *finite;
    float *maxima;
    double *lse;
} head_rows;

static int threads_for(int64_t num_rows, int64_t vocab_size, int num_threads) {
    return num_rows * vocab_size < MIN_PARALLEL_LOGITS ? 1 : num_threads;
}

static void argmax_row(int64_t item, void *arg) {
    const head_rows *call = arg;
    float greatest;
    bool finite;
    call->ids[item] = first_of_largest(call->logits + item * call->vocab_size, call->vocab_size, &greatest, &finite);
    call->finite[item] = finite;
}

void isobit_argmax(const float *logits, int64_t num_rows, int64_t vocab_size, int32_t *ids, uint8_t *finite,
                   int num_threads) {
    head_rows call = {.logits = logits, .vocab_size = vocab_size, .ids = ids, .finite = finite};
    parallel_for(threads_for(num_rows, vocab_size, num_threads), num_rows, argmax_row, &call);
}

// The maximum of a row whose sum is no number: NaN if the row holds one, else what it is (an infinity).
static float maximum_or_nan(const float *row, int64_t count, float greatest) {
    for (int64_t i = 0; i < count; i++) {
        if (row[i] != row[i]) {
            return NAN;
        }
    }
    return greatest;
}

static void logprobs_row(int64_t item, void *arg) {
    const head_rows *call = arg;
    const float *row = call->logits + item * call->vocab_size;
    float poison = 0.0f, total = 0.0f;
    float greatest = row_maximum(row, call->vocab_size, &poison) + 0.0f;
    V shift = vset(greatest);
    for (int64_t start = 0; start < call->vocab_size; start += LOGPROBS_BLOCK) {
        int64_t left = call->vocab_size - start, count = left < LOGPROBS_BLOCK ? left : LOGPROBS_BLOCK, i = 0;
        float lanes[16];
        V sums[16 / VL];
        for (int v = 0; v < 16 / VL; v++) {
            sums[v] = vset(0.0f);
        }
        for (; i + 16 <= count; i += 16) {  // REDUCTION ORDER: see LogprobsOrder
            UNROLL(16) for (int v = 0; v < 16 / VL; v++) {
                sums[v] = vadd(sums[v], vexp(vsub(vld(row + start + i + v * VL), shift)));
            }
        }
        for (int v = 0; v < 16 / VL; v++) {
            vst(lanes + v * VL, sums[v]);
        }
        for (int lane = 0; i < count; lane++, i++) {  // REDUCTION ORDER: see LogprobsOrder
            float weight[VL];
            vst(weight, vexp(vsub(vset(row[start + i]), shift)));
            lanes[lane] = lanes[lane] + weight[0];
        }
        total = total + add_halves(lanes);  // REDUCTION ORDER: see LogprobsOrder
    }
    call->maxima[item] = total == total ? greatest : maximum_or_nan(row, call->vocab_size, greatest);
    call->lse[item] = total >= 1.0f && total < INFINITY ? (double)greatest + log64((double)total) : (double)NAN;
}

void isobit_logprobs(const float *logits, int64_t num_rows, int64_t vocab_size, float *maxima, double *lse,
                     int num_threads) {
    head_rows call = {.logits = logits, .vocab_size = vocab_size, .maxima = maxima, .lse = lse};
    parallel_for(threads_for(num_rows, vocab_size, num_threads), num_rows, logprobs_row, &call);
}

// ---- best alternatives

typedef struct {
    const float *row;
    int64_t vocab_size, n;
    int32_t *ids;
    uint64_t *entries;  // 2 * (vocab_size + 1)
} head_top;

static void top_row(int64_t item, void *arg) {
    (void)item;
    const head_top *call = arg;
    const uint64_t *top =
        select_top(call->row, call->vocab_size, call->n, call->entries, call->entries + call->vocab_size + 1);
    for (int64_t i = 0; i < call->n; i++) {
        call->ids[i] = id_of_entry(top[i]);
    }
}

int isobit_top_logits(const float *row, int64_t vocab_size, int64_t n, int32_t *ids) {
    head_top call = {.row = row, .vocab_size = vocab_size, .n = n, .ids = ids};
    call.entries = scratch_reserve(SCRATCH_CALL, 2 * (size_t)(vocab_size + 1) * sizeof(uint64_t));
    if (!call.entries) {
        return -1;
    }
    parallel_for(1, 1, top_row, &call);
    return 0;
}
