// The AVX2 and AVX-512 halves of simd.h (included by it alone).
#pragma once

struct xq {  // four activations stay in memory: each is broadcast when used
    const float* at;
};
struct xb {  // 16 consecutive k of one activation plane
    const int8_t* at;
};
CT_INLINE xq xload(const float* x) { return {x}; }
CT_INLINE xb xbload(const int8_t* x) { return {x}; }
CT_INLINE int32_t four(const int8_t* p) {
    int32_t v;
    memcpy(&v, p, 4);
    return v;
}
CT_INLINE void cpu_relax() { _mm_pause(); }

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
// ---------------------------------------------------------------------------------- AVX-512
constexpr int VL = 16;
using vf = __m512;
using vi = __m512i;
CT_INLINE vf vload(const float* p) { return _mm512_loadu_ps(p); }
CT_INLINE void vstore(float* p, vf a) { _mm512_storeu_ps(p, a); }
CT_INLINE vf vset(float a) { return _mm512_set1_ps(a); }
CT_INLINE vf vadd(vf a, vf b) { return _mm512_add_ps(a, b); }
CT_INLINE vf vsub(vf a, vf b) { return _mm512_sub_ps(a, b); }
CT_INLINE vf vmul(vf a, vf b) { return _mm512_mul_ps(a, b); }
CT_INLINE vf vdiv(vf a, vf b) { return _mm512_div_ps(a, b); }
CT_INLINE vf vmax(vf a, vf b) { return _mm512_max_ps(a, b); }
CT_INLINE vf vmin(vf a, vf b) { return _mm512_min_ps(a, b); }
CT_INLINE vf vabs(vf a) { return _mm512_abs_ps(a); }
CT_INLINE vf vfma(vf acc, vf a, vf b) { return _mm512_fmadd_ps(a, b, acc); }
CT_INLINE vf vround(vf a) {
    return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
CT_INLINE vf vkeep(vf a, vf x, vf low) {  // a where x >= low, else 0
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, low, _CMP_GE_OQ), a);
}
CT_INLINE float vsum(vf a) { return _mm512_reduce_add_ps(a); }
CT_INLINE float vmaxall(vf a) { return _mm512_reduce_max_ps(a); }
CT_INLINE vf vscale2(vf p, vf n) {  // p * 2^n, n as the low bits of a float (see vexp)
    const __m512i up = _mm512_slli_epi32(_mm512_castps_si512(n), 23);
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p), up));
}
CT_INLINE __m128 fold4(vf a) {
    __m256 h = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    return _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
}
using vpair = __m512i;
CT_INLINE vpair vload_pair(const uint32_t* p) { return _mm512_loadu_si512(p); }
CT_INLINE vf vpair_even(vpair w) { return _mm512_castsi512_ps(_mm512_slli_epi32(w, 16)); }
CT_INLINE vf vpair_odd(vpair w) {
    return _mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32(int(0xffff0000u))));
}
CT_INLINE vf widen(const uint16_t* p) {
    __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(w), 16));
}
CT_INLINE vf vload_half(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
CT_INLINE vf vload_u8(const uint8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
CT_INLINE vf vload_s8(const uint8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
using vb = __m512i;
CT_INLINE vb vbload(const uint8_t* p) { return _mm512_loadu_si512(p); }
CT_INLINE vb vbload_low(const uint8_t* p) {
    return _mm512_and_si512(vbload(p), _mm512_set1_epi8(15));
}
CT_INLINE vb vbload_high(const uint8_t* p) {
    return _mm512_and_si512(_mm512_srli_epi16(vbload(p), 4), _mm512_set1_epi8(15));
}
// Every byte: base | (bits << LEFT & mask); a negative LEFT shifts right. Shifts move pairs of bytes:
// `mask` must leave out what comes from the neighbour.
template <int LEFT> CT_INLINE vb vbmerge(vb base, vb bits, uint8_t mask) {
    const vb moved = LEFT < 0 ? _mm512_srli_epi16(bits, LEFT < 0 ? -LEFT : 0) : _mm512_slli_epi16(bits, LEFT < 0 ? 0 : LEFT);
    return _mm512_or_si512(base, _mm512_and_si512(moved, _mm512_set1_epi8(char(mask))));
}
CT_INLINE void vbstore(uint8_t* p, vb a) { _mm512_storeu_si512(p, a); }
CT_INLINE vi viload(const int32_t* p) { return _mm512_loadu_si512(p); }
CT_INLINE vi vizero() { return _mm512_setzero_si512(); }
CT_INLINE vi vtimes128(vi a) { return _mm512_slli_epi32(a, 7); }
CT_INLINE vi vadd_int(vi a, vi b) { return _mm512_add_epi32(a, b); }
CT_INLINE vf vint_to_float(vi a, int32_t offset) {  // a - offset
    return _mm512_cvtepi32_ps(_mm512_sub_epi32(a, _mm512_set1_epi32(offset)));
}
#if defined(__AVX512VNNI__)
constexpr const char* ISA_NAME = "avx512+vnni";
constexpr int W_OFFSET = 128;  // unsigned x signed dot products
template <int L> CT_INLINE vi vdot(vi acc, vb w, xb x) {
    return _mm512_dpbusd_epi32(acc, w, _mm512_set1_epi32(four(x.at + 4 * L)));
}
#else
constexpr const char* ISA_NAME = "avx512";
constexpr int W_OFFSET = 0;
#define CT_WORDS 1
template <bool SIGNED> CT_INLINE void vwords(vb w, vb (&out)[2]) {
    out[0] = SIGNED ? _mm512_srai_epi16(_mm512_slli_epi16(w, 8), 8) : _mm512_and_si512(w, _mm512_set1_epi16(255));
    out[1] = SIGNED ? _mm512_srai_epi16(w, 8) : _mm512_srli_epi16(w, 8);
}
CT_INLINE vi vdot_words(vi acc, vb w, const int8_t* x) {
    return _mm512_add_epi32(acc, _mm512_madd_epi16(w, _mm512_set1_epi32(four(x))));
}
#endif
#else
// ------------------------------------------------------------------------------------- AVX2
constexpr int VL = 8;
using vf = __m256;
using vi = __m256i;
CT_INLINE vf vload(const float* p) { return _mm256_loadu_ps(p); }
CT_INLINE void vstore(float* p, vf a) { _mm256_storeu_ps(p, a); }
CT_INLINE vf vset(float a) { return _mm256_set1_ps(a); }
CT_INLINE vf vadd(vf a, vf b) { return _mm256_add_ps(a, b); }
CT_INLINE vf vsub(vf a, vf b) { return _mm256_sub_ps(a, b); }
CT_INLINE vf vmul(vf a, vf b) { return _mm256_mul_ps(a, b); }
CT_INLINE vf vdiv(vf a, vf b) { return _mm256_div_ps(a, b); }
CT_INLINE vf vmax(vf a, vf b) { return _mm256_max_ps(a, b); }
CT_INLINE vf vmin(vf a, vf b) { return _mm256_min_ps(a, b); }
CT_INLINE vf vabs(vf a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
CT_INLINE vf vfma(vf acc, vf a, vf b) { return _mm256_fmadd_ps(a, b, acc); }
CT_INLINE vf vround(vf a) {
    return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
CT_INLINE vf vkeep(vf a, vf x, vf low) {  // a where x >= low, else 0
    return _mm256_and_ps(a, _mm256_cmp_ps(x, low, _CMP_GE_OQ));
}
CT_INLINE __m128 fold4(vf a) {
    return _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
}
CT_INLINE float vsum(vf a) {
    __m128 s = fold4(a);
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
CT_INLINE float vmaxall(vf a) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
CT_INLINE vf vscale2(vf p, vf n) {  // p * 2^n, n as the low bits of a float (see vexp)
    const __m256i up = _mm256_slli_epi32(_mm256_castps_si256(n), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), up));
}
using vpair = __m256i;
CT_INLINE vpair vload_pair(const uint32_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
CT_INLINE vf vpair_even(vpair w) { return _mm256_castsi256_ps(_mm256_slli_epi32(w, 16)); }
CT_INLINE vf vpair_odd(vpair w) {
    return _mm256_castsi256_ps(_mm256_and_si256(w, _mm256_set1_epi32(int(0xffff0000u))));
}
CT_INLINE vf widen(const uint16_t* p) {
    __m128i w = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(w), 16));
}
CT_INLINE vf vload_half(const uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
CT_INLINE vf vload_u8(const uint8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
CT_INLINE vf vload_s8(const uint8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
using vb = __m256i;
CT_INLINE vb vbload(const uint8_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
CT_INLINE vb vbload_low(const uint8_t* p) {
    return _mm256_and_si256(vbload(p), _mm256_set1_epi8(15));
}
CT_INLINE vb vbload_high(const uint8_t* p) {
    return _mm256_and_si256(_mm256_srli_epi16(vbload(p), 4), _mm256_set1_epi8(15));
}
CT_INLINE void vbstore(uint8_t* p, vb a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a); }
// Every byte: base | (bits << LEFT & mask); a negative LEFT shifts right. Shifts move pairs of bytes:
// `mask` must leave out what comes from the neighbour.
template <int LEFT> CT_INLINE vb vbmerge(vb base, vb bits, uint8_t mask) {
    const vb moved = LEFT < 0 ? _mm256_srli_epi16(bits, LEFT < 0 ? -LEFT : 0) : _mm256_slli_epi16(bits, LEFT < 0 ? 0 : LEFT);
    return _mm256_or_si256(base, _mm256_and_si256(moved, _mm256_set1_epi8(char(mask))));
}
CT_INLINE vi vizero() { return _mm256_setzero_si256(); }
CT_INLINE vi vtimes128(vi a) { return _mm256_slli_epi32(a, 7); }
CT_INLINE vi vadd_int(vi a, vi b) { return _mm256_add_epi32(a, b); }
CT_INLINE vf vint_to_float(vi a, int32_t offset) {  // a - offset
    return _mm256_cvtepi32_ps(_mm256_sub_epi32(a, _mm256_set1_epi32(offset)));
}
#if defined(__AVXVNNI__)
constexpr const char* ISA_NAME = "avx2+vnni";
constexpr int W_OFFSET = 128;
template <int L> CT_INLINE vi vdot(vi acc, vb w, xb x) {
    return _mm256_dpbusd_avx_epi32(acc, w, _mm256_set1_epi32(four(x.at + 4 * L)));
}
#else
constexpr const char* ISA_NAME = "avx2";
constexpr int W_OFFSET = 0;
#define CT_WORDS 1
template <bool SIGNED> CT_INLINE void vwords(vb w, vb (&out)[2]) {
    out[0] = SIGNED ? _mm256_srai_epi16(_mm256_slli_epi16(w, 8), 8) : _mm256_and_si256(w, _mm256_set1_epi16(255));
    out[1] = SIGNED ? _mm256_srai_epi16(w, 8) : _mm256_srli_epi16(w, 8);
}
CT_INLINE vi vdot_words(vi acc, vb w, const int8_t* x) {
    return _mm256_add_epi32(acc, _mm256_madd_epi16(w, _mm256_set1_epi32(four(x))));
}
#endif
#endif

CT_INLINE vf vfma_acc(vf acc, vf a, vf b) { return vfma(acc, a, b); }
template <int L> CT_INLINE vf vfma_at(vf acc, vf w, xq x) { return vfma(acc, w, vset(x.at[L])); }
CT_INLINE void vload2(const float* p, vf& a, vf& b) { a = vload(p), b = vload(p + VL); }
CT_INLINE void vload2(const uint16_t* p, vf& a, vf& b) { a = widen(p), b = widen(p + VL); }
CT_INLINE void vsum4(float* out, vf a, vf b, vf c, vf d) {
    __m128 ab = _mm_hadd_ps(fold4(a), fold4(b)), cd = _mm_hadd_ps(fold4(c), fold4(d));
    _mm_storeu_ps(out, _mm_hadd_ps(ab, cd));
}
