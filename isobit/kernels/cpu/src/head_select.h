// The largest entries of a row of logits in the one order everything here uses: value descending, then id ascending.
//
// It does not know what the entries are used for. Invariant: the order is total and looks at values only (-0 equals +0,
// subnormals are zero, NaN comes last, after -inf), so any way of selecting and sorting gives the same list.
#ifndef ISOBIT_HEAD_SELECT_H
#define ISOBIT_HEAD_SELECT_H

#include <stdint.h>
#include <string.h>

#include "simd.h"

#define DIGIT_BITS 11
#define NUM_DIGITS (1 << DIGIT_BITS)
#define INSERTION_SORT_UP_TO 48

// Grows as the value falls: 0xffffffff for NaN.
INLINE uint32_t descending_key(float value) {
    uint32_t bits = bits_of_float(value + 0.0f);  // + 0: no negative zero, no subnormal
    uint32_t key = bits >> 31 ? bits : ~bits & 0x7fffffffu;
    return (bits & 0x7fffffffu) > 0x7f800000u ? 0xffffffffu : key;
}

// An entry is its key above its id.
INLINE uint64_t entry_of(float value, int64_t id) { return (uint64_t)descending_key(value) << 32 | (uint32_t)id; }
INLINE int32_t id_of_entry(uint64_t entry) { return (int32_t)(uint32_t)entry; }

static void insertion_sort(uint64_t *entries, int64_t count) {
    for (int64_t i = 1; i < count; i++) {
        uint64_t entry = entries[i];
        int64_t at = i;
        for (; at > 0 && entries[at - 1] > entry; at--) {
            entries[at] = entries[at - 1];
        }
        entries[at] = entry;
    }
}

// Sorts entries that already stand by id: a stable radix sort of the keys, last digit first. Returns the buffer that
// holds the result, `entries` or `spare`.
static uint64_t *sort_entries(uint64_t *entries, uint64_t *spare, int64_t count) {
    if (count <= INSERTION_SORT_UP_TO) {
        insertion_sort(entries, count);
        return entries;
    }
    for (int shift = 32; shift < 64; shift += DIGIT_BITS) {
        uint32_t starts[NUM_DIGITS] = {0}, sum = 0;
        for (int64_t i = 0; i < count; i++) {
            starts[entries[i] >> shift & (NUM_DIGITS - 1)]++;
        }
        for (int digit = 0; digit < NUM_DIGITS; digit++) {
            uint32_t here = starts[digit];
            starts[digit] = sum;
            sum += here;
        }
        for (int64_t i = 0; i < count; i++) {
            spare[starts[entries[i] >> shift & (NUM_DIGITS - 1)]++] = entries[i];
        }
        uint64_t *sorted = spare;
        spare = entries;
        entries = sorted;
    }
    return entries;
}

// The first n <= vocab_size entries of the order. `entries` and `spare` have room for vocab_size + 1 each; returns the
// one that holds the result. Only entries that share the n-th's leading digit, or precede it, are sorted.
static const uint64_t *select_top(const float *row, int64_t vocab_size, int64_t n, uint64_t *entries, uint64_t *spare) {
    const int shift = 32 - DIGIT_BITS;
    uint32_t last = NUM_DIGITS - 1;
    if (n < vocab_size) {
        uint32_t counts[2][NUM_DIGITS] = {{0}};  // two, since neighbours often have the same digit
        for (int64_t i = 0; i < vocab_size; i++) {
            counts[i & 1][descending_key(row[i]) >> shift]++;
        }
        last = 0;
        for (int64_t seen = 0; (seen += counts[0][last] + counts[1][last]) < n; last++) {
        }
    }
    int64_t count = 0;
    for (int64_t i = 0; i < vocab_size; i++) {
        uint64_t entry = entry_of(row[i], i);
        entries[count] = entry;
        count += entry >> (32 + shift) <= last;
    }
    return sort_entries(entries, spare, count);
}

#endif
