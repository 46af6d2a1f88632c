// What reading a row of logits needs: its maximum, where that stands, and the logarithm.
//
// It does not know what logits are used for. Invariant: a NaN counts as less than -inf, and a maximum has no order, so
// nothing here depends on the width of a vector.
#ifndef ISOBIT_HEAD_MATH_H
#define ISOBIT_HEAD_MATH_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "simd.h"

#define ARGMAX_BLOCK 1024  // entries between two looks at the best so far

// Largest entry, -inf if all are NaN. Adds a NaN to *poison if any entry is NaN or infinite, else 0.
static float row_maximum(const float *row, int64_t count, float *poison) {
    float lanes[VL], poison_lanes[VL], greatest = -INFINITY;
    V most = vset(-INFINITY), bad = vset(0.0f);
    int64_t i = 0;
    for (; i + VL <= count; i += VL) {
        V x = vld(row + i);
        most = vmax(x, most);  // keeps `most` where x is NaN
        bad = vadd(bad, vsub(x, x));
    }
    vst(lanes, most);
    vst(poison_lanes, bad);
    for (int lane = 0; lane < VL; lane++) {
        greatest = lanes[lane] > greatest ? lanes[lane] : greatest;
        *poison = *poison + poison_lanes[lane];
    }
    for (; i < count; i++) {
        greatest = row[i] > greatest ? row[i] : greatest;
        *poison = *poison + (row[i] - row[i]);
    }
    return greatest;
}

// Lowest id of the largest entry (0 if all are NaN).
static int32_t first_of_largest(const float *row, int64_t count, float *greatest, bool *finite) {
    float poison = 0.0f;
    int64_t block = 0;
    *greatest = -INFINITY;
    for (int64_t start = 0; start < count; start += ARGMAX_BLOCK) {
        int64_t left = count - start;
        float maximum_here = row_maximum(row + start, left < ARGMAX_BLOCK ? left : ARGMAX_BLOCK, &poison);
        if (maximum_here > *greatest) {
            *greatest = maximum_here;
            block = start;
        }
    }
    *finite = poison == 0.0f;
    for (int64_t id = block; id < count; id++) {
        if (row[id] == *greatest) {
            return (int32_t)id;
        }
    }
    return 0;
}

// The log64 of every Order, for x > 0. Every rounding below is part of the specification; no multiply-add is fused.
// Written without branches, so that compilers turn loops of it into vector code.
INLINE double log64(double x) {
    uint64_t bits, exponent_bits, mantissa_bits;
    double exponent, f;
    memcpy(&bits, &x, sizeof bits);
    exponent_bits = bits >> 52 | 0x4330000000000000u;  // 2^52 + biased exponent, as a double
    mantissa_bits = (bits & 0x000fffffffffffffu) | 0x3ff0000000000000u;
    memcpy(&exponent, &exponent_bits, sizeof exponent);
    memcpy(&f, &mantissa_bits, sizeof f);
    exponent = exponent - 4503599627371519.0;  // 2^52 + 1023
    double large = f >= 1.4142135623730951 ? 1.0 : 0.0;
    f = f * (1.0 - 0.5 * large);
    exponent = exponent + large;
    double s = (f - 1.0) / (f + 1.0), z = s * s, series = 1.0 / 21.0;
    UNROLL(10) for (int k = 9; k >= 0; k--) { series = series * z + 1.0 / (2 * k + 1); }
    return exponent * 0.6931471805599453 + (2.0 * s) * series;
}

#endif
