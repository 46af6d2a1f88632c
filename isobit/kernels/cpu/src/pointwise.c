// The small ops between linears: rms_norm, silu_mul, and q/k norm + rope + writing keys and values to the cache.
//
// NormOrder and PointwiseOrder of isobit/order.py. They do not know models. Invariant: a row is computed by one thread,
// by one formula; few rows stay on the calling thread, because waking another costs more than they do.
#include "pool.h"
#include "simd.h"

#define KV_PAGE 64
#define POINTWISE_GRAIN 16384  // elements one item of work should have at least
#define NORM_LANES 16

// ---- rows in groups that are worth a thread

typedef struct {
    void (*row)(int64_t row, const void *arg);
    const void *arg;
    int64_t num_rows, rows_per_item;
} row_job;

static void row_group(int64_t item, void *arg) {
    const row_job *job = arg;
    int64_t end = (item + 1) * job->rows_per_item;
    for (int64_t row = item * job->rows_per_item; row < end && row < job->num_rows; row++) {
        job->row(row, job->arg);
    }
}

static void for_rows(int num_threads, int64_t num_rows, int64_t width, void (*row)(int64_t, const void *),
                     const void *arg) {
    int64_t rows_per_item = POINTWISE_GRAIN / (width > 0 ? width : 1) + 1;
    row_job job = {row, arg, num_rows, rows_per_item};
    parallel_for(num_threads, (num_rows + rows_per_item - 1) / rows_per_item, row_group, &job);
}

// ---- rms_norm

// out may be x.
static void norm_row(const float *x, const float *weight, float *out, int64_t width, float eps) {
    V lanes[NORM_LANES / VL];
    float sums[NORM_LANES];
    for (int v = 0; v < NORM_LANES / VL; v++) {
        lanes[v] = vset(0.0f);
    }
    int64_t i = 0;
    for (; i + NORM_LANES <= width; i += NORM_LANES) {  // REDUCTION ORDER: see NormOrder
        for (int v = 0; v < NORM_LANES / VL; v++) {
            V a = vld(x + i + v * VL);
            lanes[v] = vfma(a, a, lanes[v]);
        }
    }
    for (int v = 0; v < NORM_LANES / VL; v++) {
        vst(sums + v * VL, lanes[v]);
    }
    for (int64_t lane = 0; i + lane < width; lane++) {  // REDUCTION ORDER: see NormOrder
        sums[lane] = fmaf(x[i + lane], x[i + lane], sums[lane]);
    }
    float scale = 1.0f / sqrtf(add_halves(sums) / (float)width + eps);
    for (i = 0; i < width; i++) {
        out[i] = (x[i] * scale) * weight[i];
    }
}

typedef struct {
    const float *x, *weight;
    float *out;
    int64_t width;
    float eps;
} norm_call;

static void norm_call_row(int64_t row, const void *arg) {
    const norm_call *call = arg;
    norm_row(call->x + row * call->width, call->weight, call->out + row * call->width, call->width, call->eps);
}

// x, out [m][width]
void isobit_rms_norm(const float *x, const float *weight, float *out, int64_t m, int64_t width, float eps,
                     int num_threads) {
    norm_call call = {x, weight, out, width, eps};
    for_rows(num_threads, m, width, norm_call_row, &call);
}

// ---- silu_mul

typedef struct {
    const float *gate_up;
    float *out;
    int64_t width;
} silu_call;

INLINE V silu_mul(V gate, V up) {
    V growth = vexp(vsub(vset(0.0f), vmax(vset(-87.0f), gate)));
    return vmul(vdiv(gate, vadd(vset(1.0f), growth)), up);
}

static void silu_row(int64_t row, const void *arg) {
    const silu_call *call = arg;
    const float *gate = call->gate_up + row * 2 * call->width, *up = gate + call->width;
    float *out = call->out + row * call->width;
    int64_t i = 0;
    for (; i + VL <= call->width; i += VL) {
        vst(out + i, silu_mul(vld(gate + i), vld(up + i)));
    }
    if (i < call->width) {
        int64_t rest = call->width - i;
        vst_part(out + i, silu_mul(vld_part(gate + i, rest), vld_part(up + i, rest)), rest);
    }
}

// gate_up [m][gate | up], out [m][width]
void isobit_silu_mul(const float *gate_up, float *out, int64_t m, int64_t width, int num_threads) {
    silu_call call = {gate_up, out, width};
    for_rows(num_threads, m, 4 * width, silu_row, &call);  // an exponential costs about as much as four moves
}

// ---- rope_and_cache

typedef struct {
    const float *qkv;
    const int32_t *positions, *slots;
    const float *cos, *sin;         // [positions][rotary_dim / 2]
    const float *q_norm, *k_norm;   // [head_dim], or NULL
    float *q_out;                   // [m][num_heads * head_dim]
    void *kv_layer;                 // [K, V][num_pages][num_kv_heads][head_dim * 64]
    int64_t num_pages;
    float eps;
    int num_heads, num_kv_heads, head_dim, rotary_dim, interleaved, kv_is_bf16;
} rope_call;

// One head: norm if there is a weight, then rotation of its first rotary_dim values. out may not be x.
static void rope_head(const rope_call *call, const float *x, const float *norm, int64_t position, float *out) {
    int half = call->rotary_dim / 2;
    const float *cos = call->cos + position * half, *sin = call->sin + position * half;
    float normed[256];
    if (norm) {
        norm_row(x, norm, normed, call->head_dim, call->eps);
        x = normed;
    }
    if (call->interleaved) {
        for (int i = 0; i < half; i++) {
            float x1 = x[2 * i], x2 = x[2 * i + 1];
            out[2 * i] = x1 * cos[i] - x2 * sin[i];
            out[2 * i + 1] = x2 * cos[i] + x1 * sin[i];
        }
    } else {
        for (int i = 0; i < half; i++) {
            out[i] = x[i] * cos[i] - x[half + i] * sin[i];
            out[half + i] = x[half + i] * cos[i] + x[i] * sin[i];
        }
    }
    memcpy(out + 2 * half, x + 2 * half, (size_t)(call->head_dim - 2 * half) * sizeof(float));
}

static void cache_write(const rope_call *call, int64_t to, float value) {
    if (call->kv_is_bf16) {
        ((uint16_t *)call->kv_layer)[to] = bf16_of_float(value);
    } else {
        ((float *)call->kv_layer)[to] = value;
    }
}

// Keys of a page and head lie [head_dim][64], values [64][head_dim].
static void rope_row(int64_t row, const void *arg) {
    const rope_call *call = arg;
    int64_t dim = call->head_dim, heads = call->num_heads, kv_heads = call->num_kv_heads;
    int64_t position = call->positions[row], slot = call->slots[row], page = slot / KV_PAGE, offset = slot % KV_PAGE;
    const float *q = call->qkv + row * (heads + 2 * kv_heads) * dim, *k = q + heads * dim, *v = k + kv_heads * dim;
    float key[256];
    for (int64_t head = 0; head < heads; head++) {
        rope_head(call, q + head * dim, call->q_norm, position, call->q_out + (row * heads + head) * dim);
    }
    for (int64_t head = 0; head < kv_heads; head++) {
        int64_t key_page = (page * kv_heads + head) * dim * KV_PAGE;
        int64_t value_page = key_page + call->num_pages * kv_heads * dim * KV_PAGE;
        rope_head(call, k + head * dim, call->k_norm, position, key);
        for (int64_t d = 0; d < dim; d++) {
            cache_write(call, key_page + d * KV_PAGE + offset, key[d]);
            cache_write(call, value_page + offset * dim + d, v[head * dim + d]);
        }
    }
}

// qkv [m][q heads | k heads | v heads]; head_dim <= 256. Row i goes to slot slots[i] = page * 64 + offset.
void isobit_rope_and_cache(const float *qkv, const int32_t *positions, const int32_t *slots,
                           const float *cos, const float *sin, const float *q_norm, const float *k_norm,
                           float *q_out, void *kv_layer, int64_t m, int64_t num_pages, float eps,
                           int num_heads, int num_kv_heads, int head_dim, int rotary_dim, int interleaved,
                           int kv_is_bf16, int num_threads) {
    rope_call call = {qkv, positions, slots, cos, sin, q_norm, k_norm, q_out, kv_layer, num_pages, eps,
                      num_heads, num_kv_heads, head_dim, rotary_dim, interleaved, kv_is_bf16};
    for_rows(num_threads, m, (int64_t)(num_heads + 2 * num_kv_heads) * head_dim * 2, rope_row, &call);
}
