// simd.h for matrices whose rows are whole (device_rows.h): dot products of bytes lane by lane, and
// the scales of groups spread over the lanes that hold their sums.
#pragma once
#include "simd.h"

constexpr int VB = 4 * VL;  // bytes of a vector

CT_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }
CT_INLINE void prefetch_far(const void* p) { __builtin_prefetch(p, 0, 2); }  // not into the first cache

#if defined(__aarch64__) && !defined(CT_GENERIC)
// ------------------------------------------------------------------------------------- NEON
CT_INLINE vb vbytes(const void* p) { return vld1q_s8(static_cast<const int8_t*>(p)); }
#if defined(__ARM_FEATURE_DOTPROD)
CT_INLINE vi vdot_signed(vi acc, vb w, vb x) { return vdotq_s32(acc, w, x); }
#else
CT_INLINE vi vdot_signed(vi acc, vb w, vb x) {
    int16x8_t a = vmull_s8(vget_low_s8(w), vget_low_s8(x)), b = vmull_high_s8(w, x);
    return vaddq_s32(acc, vpaddq_s32(vpaddlq_s16(a), vpaddlq_s16(b)));
}
#endif
CT_INLINE vi vdot_nibbles(vi acc, vb w, vb x) { return vdot_signed(acc, w, x); }
// The scale of the group of every lane, for a vector of int8 weights whose group is at `scales`.
CT_INLINE vf vgroup_scales(const uint16_t* scales) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_dup_u16(scales)));
}
// For int4: of VL / 2 groups' scales, each followed by another value, those of vector `HALF` of two.
template <int HALF> CT_INLINE vf vspread_pairs(vf pairs) { return vdupq_laneq_f32(pairs, 2 * HALF); }
#elif defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && !defined(CT_GENERIC)
// ---------------------------------------------------------------------------------- AVX-512
CT_INLINE vb vbytes(const void* p) { return _mm512_loadu_si512(p); }
#if defined(__AVX512VNNI__)
CT_INLINE vi vdot_nibbles(vi acc, vb w, vb x) { return _mm512_dpbusd_epi32(acc, w, x); }
#else
CT_INLINE vi vdot_nibbles(vi acc, vb w, vb x) {
    return _mm512_add_epi32(acc, _mm512_madd_epi16(_mm512_maddubs_epi16(w, x), _mm512_set1_epi16(1)));
}
#endif
CT_INLINE vi vdot_signed(vi acc, vb w, vb x) {  // |x| <= 127: its sign can change
    const __m512i turned = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(w), _mm512_setzero_si512(), x);
    return vdot_nibbles(acc, _mm512_abs_epi8(w), turned);
}
CT_INLINE vf vgroup_scales(const uint16_t* scales) {  // two groups
    int32_t both;
    memcpy(&both, scales, 4);
    const __m256i order = _mm256_setr_epi32(0x01000100, 0x01000100, 0x01000100, 0x01000100,
                                            0x03020302, 0x03020302, 0x03020302, 0x03020302);
    return _mm512_cvtph_ps(_mm256_shuffle_epi8(_mm256_set1_epi32(both), order));
}
template <int HALF> CT_INLINE vf vspread_pairs(vf pairs) {
    const __m512i order = _mm512_setr_epi32(0, 0, 0, 0, 2, 2, 2, 2, 4, 4, 4, 4, 6, 6, 6, 6);
    return _mm512_permutexvar_ps(_mm512_add_epi32(order, _mm512_set1_epi32(8 * HALF)), pairs);
}
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__) && !defined(CT_GENERIC)
// ------------------------------------------------------------------------------------- AVX2
CT_INLINE vb vbytes(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
CT_INLINE vi vdot_nibbles(vi acc, vb w, vb x) {
    return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1)));
}
CT_INLINE vi vdot_signed(vi acc, vb w, vb x) {  // |x| <= 127: no saturation
    return vdot_nibbles(acc, _mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
}
CT_INLINE vf vgroup_scales(const uint16_t* scales) { return _mm256_cvtph_ps(_mm_set1_epi16(int16_t(*scales))); }
template <int HALF> CT_INLINE vf vspread_pairs(vf pairs) {
    constexpr int first = 4 * HALF;
    return _mm256_permutevar8x32_ps(pairs, _mm256_setr_epi32(first, first, first, first, first + 2, first + 2, first + 2, first + 2));
}
#else
// ---------------------------------------------------------------------------------- generic
#define CT_PLAIN_ROWS
CT_INLINE vb vbytes(const void* p) { return vbload(static_cast<const uint8_t*>(p)); }
CT_INLINE vi vdot_signed(vi acc, vb w, vb x) {
    int8_t a[VB], b[VB];
    memcpy(a, &w, VB), memcpy(b, &x, VB);
    for (int i = 0; i < VB; ++i) acc[i / 4] += int(a[i]) * b[i];
    return acc;
}
CT_INLINE vi vdot_nibbles(vi acc, vb w, vb x) { return vdot_signed(acc, w, x); }
CT_INLINE vf vgroup_scales(const uint16_t* scales) {
    vf out = vset(0.0f);
    for (int i = 0; i < VL; ++i) out[i] = half_to_float(scales[i / 8]);
    return out;
}
template <int HALF> CT_INLINE vf vspread_pairs(vf pairs) {
    vf out = vset(0.0f);
    for (int i = 0; i < VL; ++i) out[i] = pairs[HALF * VL / 2 + i / 4 * 2];
    return out;
}
#endif

#if defined(CT_PLAIN_ROWS)
constexpr bool VECTORS = false;
#else
constexpr bool VECTORS = true;
#endif
