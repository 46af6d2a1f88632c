// Vectors of VL floats on every instruction set, under one set of names; all kernels are written once, on top of this.
//
// It does not know any kernel. Invariant: lane i of every operation below has the same bits on every instruction set
// (IEEE single precision, nearest even, FTZ + DAZ as set by pool.h; only NaN payloads may differ). VL divides 16, so a
// sum over 16 fixed lanes can be held in 16 / VL vectors everywhere. The build passes exactly one of ISOBIT_AVX512,
// ISOBIT_AVX2, ISOBIT_NEON, ISOBIT_SCALAR.
#ifndef ISOBIT_SIMD_H
#define ISOBIT_SIMD_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define UNROLL(count)  // clang unrolls constant loops early by itself; asked to, it does so too late to use registers
#else
#define UNROLL(count) PRAGMA(GCC unroll count)
#endif

INLINE float float_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE uint32_t bits_of_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

// V: VL floats. VI: VL 32-bit words. vfma(a, b, c) = a * b + c, rounded once.
// vmax(a, b) = a > b ? a : b, so a NaN in b comes through. vzero_below(x, limit, y) = x < limit ? +0 : y.
// vlo, vhi: the bf16 in the low, high half of each word, as floats.
#if defined(ISOBIT_AVX512)

#include <immintrin.h>
#define VL 16
typedef __m512 V;
typedef __m512i VI;
INLINE V vld(const float *p) { return _mm512_loadu_ps(p); }
INLINE void vst(float *p, V a) { _mm512_storeu_ps(p, a); }
INLINE V vset(float a) { return _mm512_set1_ps(a); }
INLINE V vfma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
INLINE V vadd(V a, V b) { return _mm512_add_ps(a, b); }
INLINE V vsub(V a, V b) { return _mm512_sub_ps(a, b); }
INLINE V vmul(V a, V b) { return _mm512_mul_ps(a, b); }
INLINE V vdiv(V a, V b) { return _mm512_div_ps(a, b); }
INLINE V vmax(V a, V b) { return _mm512_max_ps(a, b); }
INLINE V vzero_below(V x, V limit, V y) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, limit, _CMP_NLT_UQ), y);
}
INLINE VI vldi(const void *p) { return _mm512_loadu_si512(p); }
INLINE VI vseti(uint32_t a) { return _mm512_set1_epi32((int)a); }
INLINE V vlo(VI x) { return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)); }
INLINE V vhi(VI x) { return _mm512_castsi512_ps(_mm512_and_si512(x, vseti(0xffff0000u))); }
INLINE VI vbits(V a) { return _mm512_castps_si512(a); }
INLINE V vpow2_of_bits(VI bits) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(bits, vseti(127)), 23));
}
INLINE V vldbf(const uint16_t *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}

#elif defined(ISOBIT_AVX2)

#include <immintrin.h>
#define VL 8
typedef __m256 V;
typedef __m256i VI;
INLINE V vld(const float *p) { return _mm256_loadu_ps(p); }
INLINE void vst(float *p, V a) { _mm256_storeu_ps(p, a); }
INLINE V vset(float a) { return _mm256_set1_ps(a); }
INLINE V vfma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
INLINE V vadd(V a, V b) { return _mm256_add_ps(a, b); }
INLINE V vsub(V a, V b) { return _mm256_sub_ps(a, b); }
INLINE V vmul(V a, V b) { return _mm256_mul_ps(a, b); }
INLINE V vdiv(V a, V b) { return _mm256_div_ps(a, b); }
INLINE V vmax(V a, V b) { return _mm256_max_ps(a, b); }
INLINE V vzero_below(V x, V limit, V y) { return _mm256_andnot_ps(_mm256_cmp_ps(x, limit, _CMP_LT_OQ), y); }
INLINE VI vldi(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
INLINE VI vseti(uint32_t a) { return _mm256_set1_epi32((int)a); }
INLINE V vlo(VI x) { return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)); }
INLINE V vhi(VI x) { return _mm256_castsi256_ps(_mm256_and_si256(x, vseti(0xffff0000u))); }
INLINE VI vbits(V a) { return _mm256_castps_si256(a); }
INLINE V vpow2_of_bits(VI bits) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(bits, vseti(127)), 23));
}
INLINE V vldbf(const uint16_t *p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}

#elif defined(ISOBIT_NEON)

#include <arm_neon.h>
#define VL 4
typedef float32x4_t V;
typedef uint32x4_t VI;
INLINE V vld(const float *p) { return vld1q_f32(p); }
INLINE void vst(float *p, V a) { vst1q_f32(p, a); }
INLINE V vset(float a) { return vdupq_n_f32(a); }
INLINE V vfma(V a, V b, V c) { return vfmaq_f32(c, a, b); }
INLINE V vadd(V a, V b) { return vaddq_f32(a, b); }
INLINE V vsub(V a, V b) { return vsubq_f32(a, b); }
INLINE V vmul(V a, V b) { return vmulq_f32(a, b); }
INLINE V vdiv(V a, V b) { return vdivq_f32(a, b); }
INLINE V vmax(V a, V b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
INLINE V vzero_below(V x, V limit, V y) {
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(y), vcltq_f32(x, limit)));
}
INLINE VI vldi(const void *p) { return vld1q_u32((const uint32_t *)p); }
INLINE VI vseti(uint32_t a) { return vdupq_n_u32(a); }
INLINE V vlo(VI x) { return vreinterpretq_f32_u32(vshlq_n_u32(x, 16)); }
INLINE V vhi(VI x) { return vreinterpretq_f32_u32(vandq_u32(x, vseti(0xffff0000u))); }
INLINE VI vbits(V a) { return vreinterpretq_u32_f32(a); }
INLINE V vpow2_of_bits(VI bits) { return vreinterpretq_f32_u32(vshlq_n_u32(vaddq_u32(bits, vseti(127)), 23)); }
INLINE V vldbf(const uint16_t *p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }

#elif defined(ISOBIT_SCALAR)

#define VL 1
typedef float V;
typedef uint32_t VI;
INLINE V vld(const float *p) { return *p; }
INLINE void vst(float *p, V a) { *p = a; }
INLINE V vset(float a) { return a; }
INLINE V vfma(V a, V b, V c) { return fmaf(a, b, c); }
INLINE V vadd(V a, V b) { return a + b; }
INLINE V vsub(V a, V b) { return a - b; }
INLINE V vmul(V a, V b) { return a * b; }
INLINE V vdiv(V a, V b) { return a / b; }
INLINE V vmax(V a, V b) { return a > b ? a : b; }
INLINE V vzero_below(V x, V limit, V y) { return x < limit ? 0.0f : y; }
INLINE VI vldi(const void *p) {
    uint32_t word;
    memcpy(&word, p, sizeof word);
    return word;
}
INLINE VI vseti(uint32_t a) { return a; }
INLINE V vlo(VI x) { return float_of_bits(x << 16); }
INLINE V vhi(VI x) { return float_of_bits(x & 0xffff0000u); }
INLINE VI vbits(V a) { return bits_of_float(a); }
INLINE V vpow2_of_bits(VI bits) { return float_of_bits((bits + 127) << 23); }
INLINE V vldbf(const uint16_t *p) { return float_of_bits((uint32_t)*p << 16); }

#else
#error "define one of ISOBIT_AVX512, ISOBIT_AVX2, ISOBIT_NEON, ISOBIT_SCALAR"
#endif

// 2^n for integral n in [-126, 127]. Adding 1.5 * 2^23 leaves n in the low bits of the sum; the shift drops the rest.
INLINE V vpow2(V n) { return vpow2_of_bits(vbits(vadd(n, vset(12582912.0f)))); }

// The exp32 of every Order: 0 below -87.33, NaN for NaN; good for x <= 88. Every rounding below is part of the
// specification (kernels/reference/math.py): do not reassociate, do not fuse.
INLINE V vexp(V x) {
    const V lowest = vset(-87.33f), rounding = vset(12582912.0f);
    V clamped = vmax(lowest, x);
    V n = vsub(vadd(vmul(clamped, vset(1.44269504f)), rounding), rounding);
    V r = vfma(n, vset(-0.693359375f), clamped);
    r = vfma(n, vset(2.12194440e-4f), r);
    V p = vset(1.9875691500e-4f);
    p = vfma(p, r, vset(1.3981999507e-3f));
    p = vfma(p, r, vset(8.3334519073e-3f));
    p = vfma(p, r, vset(4.1665795894e-2f));
    p = vfma(p, r, vset(1.6666665459e-1f));
    p = vfma(p, r, vset(5.0000001201e-1f));
    p = vfma(p, vmul(r, r), vadd(r, vset(1.0f)));
    return vzero_below(x, lowest, vmul(p, vpow2(n)));
}

// Loads and stores of the first `count` <= VL lanes; lanes that are not loaded are +0.
INLINE V vld_part(const float *p, int64_t count) {
    float lanes[VL] = {0};
    memcpy(lanes, p, (size_t)count * sizeof(float));
    return vld(lanes);
}

INLINE void vst_part(float *p, V a, int64_t count) {
    float lanes[VL];
    vst(lanes, a);
    memcpy(p, lanes, (size_t)count * sizeof(float));
}

// The end of every 16-lane sum: halves are added, a[i] += a[i+8], a[i+4], a[i+2], a[i+1].
INLINE float add_halves(const float a[16]) {
    float b[8], c[4];
    for (int i = 0; i < 8; i++) {
        b[i] = a[i] + a[i + 8];
    }
    for (int i = 0; i < 4; i++) {
        c[i] = b[i] + b[i + 4];
    }
    return (c[0] + c[2]) + (c[1] + c[3]);
}

// bfloat16. Rounding is to nearest even; a subnormal float counts as a zero of its sign (DAZ), a NaN stays a NaN.
INLINE float float_of_bf16(uint16_t half) { return float_of_bits((uint32_t)half << 16); }

INLINE uint16_t bf16_of_float(float value) {
    uint32_t bits = bits_of_float(value);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) {
        return (uint16_t)((bits >> 16) | 0x40u);
    }
    return (uint16_t)(magnitude < 0x00800000u ? (bits >> 16) & 0x8000u : rounded);
}

// Rounds VL floats to bfloat16 and stores them. Written so that compilers turn the loop into vector code.
INLINE void vstbf(uint16_t *p, V a) {
    float lanes[VL];
    vst(lanes, a);
    for (int i = 0; i < VL; i++) {
        p[i] = bf16_of_float(lanes[i]);
    }
}

#endif
