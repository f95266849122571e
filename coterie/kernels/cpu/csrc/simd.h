// A thin layer over NEON, AVX2 and AVX-512, chosen at compile time by -march=native.
// Everything above it sees `vf` (VL floats), `vi` (VL int32) and panels of 16 output rows.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#if defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__x86_64__)
#include <immintrin.h>
#endif

#define CT_INLINE static inline __attribute__((always_inline))
#define CT_FLAT __attribute__((flatten))  // everything a kernel calls is inlined into it

// f(0) .. f(N-1) with compile-time indices: arrays of vectors indexed by them live in registers,
// which GCC does not achieve through ordinary loops.
template <class F, int... I> CT_INLINE void each_of(F& f, std::integer_sequence<int, I...>) {
    (f(std::integral_constant<int, I>{}), ...);
}
template <int N, class F> CT_INLINE void each(F f) { each_of(f, std::make_integer_sequence<int, N>{}); }

// A body for `each` that the compiler may not keep as a function, with its vectors in memory; CT_FLAT
// alone is no promise where bodies lie in each other.
#define CT_EACH(i) [&](auto i) __attribute__((always_inline))

constexpr int PANEL = 16;  // output rows interleaved in one panel of packed weights
constexpr int GROUP = 32;  // elements along k that share one scale

typedef uint8_t bytes16 __attribute__((vector_size(16)));
typedef uint32_t words4 __attribute__((vector_size(16)));
#if defined(__clang__) || __GNUC__ >= 12
#define CT_SHUFFLE(type, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define CT_SHUFFLE(type, a, b, ...) __builtin_shuffle(a, b, type{__VA_ARGS__})
#endif

CT_INLINE float half_to_float(uint16_t h) {
    const uint32_t sign = uint32_t(h & 0x8000u) << 16;
    const uint32_t bits = uint32_t(h & 0x7fffu) << 13;
    float f;
    memcpy(&f, &bits, 4);
    f *= 5.192296858534828e33f;  // 2^112 moves the exponent's bias; subnormals come out right
    if ((h & 0x7c00u) == 0x7c00u) f = (h & 0x3ffu) ? NAN : INFINITY;
    uint32_t out;
    memcpy(&out, &f, 4);
    out |= sign;
    memcpy(&f, &out, 4);
    return f;
}

CT_INLINE uint16_t float_to_bf16(float f) {  // round to nearest even; NaN stays NaN
    uint32_t u;
    memcpy(&u, &f, 4);
    if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((u >> 16) | 0x40);
    return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}

#if defined(__aarch64__) && !defined(CT_GENERIC)
// ------------------------------------------------------------------------------------- NEON
constexpr int VL = 4;
constexpr const char* ISA_NAME = "neon"
#if defined(__ARM_FEATURE_DOTPROD)
    "+dotprod"
#endif
    ;
using vf = float32x4_t;
using vi = int32x4_t;
CT_INLINE vf vload(const float* p) { return vld1q_f32(p); }
CT_INLINE void vstore(float* p, vf a) { vst1q_f32(p, a); }
CT_INLINE vf vset(float a) { return vdupq_n_f32(a); }
CT_INLINE vf vadd(vf a, vf b) { return vaddq_f32(a, b); }
CT_INLINE vf vsub(vf a, vf b) { return vsubq_f32(a, b); }
CT_INLINE vf vmul(vf a, vf b) { return vmulq_f32(a, b); }
CT_INLINE vf vdiv(vf a, vf b) { return vdivq_f32(a, b); }
CT_INLINE vf vmax(vf a, vf b) { return vmaxq_f32(a, b); }
CT_INLINE vf vmin(vf a, vf b) { return vminq_f32(a, b); }
CT_INLINE vf vabs(vf a) { return vabsq_f32(a); }
CT_INLINE vf vfma(vf acc, vf a, vf b) { return vfmaq_f32(acc, a, b); }
CT_INLINE vf vfma_acc(vf acc, vf a, vf b) {  // for long-lived accumulators; see vfma_at
    asm("fmla %0.4s, %1.4s, %2.4s" : "+w"(acc) : "w"(a), "w"(b));
    return acc;
}
CT_INLINE vf vround(vf a) { return vrndnq_f32(a); }
CT_INLINE vf vkeep(vf a, vf x, vf low) {  // a where x >= low, else 0
    return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(a), vcgeq_f32(x, low)));
}
CT_INLINE float vsum(vf a) { return vaddvq_f32(a); }
CT_INLINE float vmaxall(vf a) { return vmaxvq_f32(a); }
CT_INLINE vf vscale2(vf p, vf n) {  // p * 2^n, n as the low bits of a float (see vexp)
    return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(p), vshlq_n_s32(vreinterpretq_s32_f32(n), 23)));
}
// Sums of four vectors as the four lanes of one.
CT_INLINE void vsum4(float* out, vf a, vf b, vf c, vf d) {
    vst1q_f32(out, vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)));
}
// Even and odd elements of bf16 pairs: the low half is the even k.
using vpair = uint32x4_t;
CT_INLINE vpair vload_pair(const uint32_t* p) { return vld1q_u32(p); }
CT_INLINE vf vpair_even(vpair w) { return vreinterpretq_f32_u32(vshlq_n_u32(w, 16)); }
CT_INLINE vf vpair_odd(vpair w) {
    return vreinterpretq_f32_u32(vandq_u32(w, vdupq_n_u32(0xffff0000u)));
}
CT_INLINE void vload2(const float* p, vf& a, vf& b) { a = vld1q_f32(p), b = vld1q_f32(p + 4); }
CT_INLINE void vload2(const uint16_t* p, vf& a, vf& b) {
    uint16x8_t w = vld1q_u16(p);
    a = vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(w), 16));
    b = vreinterpretq_f32_u32(vreinterpretq_u32_u16(vzip2q_u16(vdupq_n_u16(0), w)));
}
CT_INLINE vf vload_half(const uint16_t* p) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
}
CT_INLINE uint8x8_t four_bytes(const uint8_t* p) {
    uint32_t four;
    memcpy(&four, p, 4);
    return vreinterpret_u8_u32(vdup_n_u32(four));
}
CT_INLINE vf vload_u8(const uint8_t* p) {
    return vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(four_bytes(p)))));
}
CT_INLINE vf vload_s8(const uint8_t* p) {
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(four_bytes(p))))));
}
// Four activations at x; lane L multiplies one vector of weights.
using xq = float32x4_t;
CT_INLINE xq xload(const float* x) { return vld1q_f32(x); }
// Written in assembly: through the intrinsic, GCC moves accumulators between registers (15% slower).
template <int L> CT_INLINE vf vfma_at(vf acc, vf w, xq x) {
    asm("fmla %0.4s, %1.4s, %2.s[%3]" : "+w"(acc) : "w"(w), "w"(x), "i"(L));
    return acc;
}

using vb = int8x16_t;  // VL rows x 4 consecutive k
using xb = int8x16_t;  // 16 consecutive k of one activation plane
constexpr int W_OFFSET = 0;  // what packing adds to an int8 weight
CT_INLINE xb xbload(const int8_t* x) { return vld1q_s8(x); }
CT_INLINE vb vbload(const uint8_t* p) { return vreinterpretq_s8_u8(vld1q_u8(p)); }
CT_INLINE vb vbload_low(const uint8_t* p) {
    return vreinterpretq_s8_u8(vandq_u8(vld1q_u8(p), vdupq_n_u8(15)));
}
CT_INLINE vb vbload_high(const uint8_t* p) {
    return vreinterpretq_s8_u8(vshrq_n_u8(vld1q_u8(p), 4));
}
CT_INLINE void vbstore(uint8_t* p, vb a) { vst1q_u8(p, vreinterpretq_u8_s8(a)); }
// Every byte: base | (bits << LEFT & mask); a negative LEFT shifts right.
template <int LEFT> CT_INLINE vb vbmerge(vb base, vb bits, uint8_t mask) {
    const uint8x16_t moved = vshlq_u8(vreinterpretq_u8_s8(bits), vdupq_n_s8(LEFT));
    return vreinterpretq_s8_u8(vorrq_u8(vreinterpretq_u8_s8(base), vandq_u8(moved, vdupq_n_u8(mask))));
}
#if defined(__ARM_FEATURE_DOTPROD)
template <int L> CT_INLINE vi vdot(vi acc, vb w, xb x) {  // volatile keeps the chains interleaved
    asm volatile("sdot %0.4s, %1.16b, %2.4b[%3]" : "+w"(acc) : "w"(w), "w"(x), "i"(L));
    return acc;
}
#else
template <int L> CT_INLINE vi vdot(vi acc, vb w, xb x) {
    int8x16_t lane = vreinterpretq_s8_s32(vdupq_laneq_s32(vreinterpretq_s32_s8(x), L));
    int16x8_t a = vmull_s8(vget_low_s8(w), vget_low_s8(lane));
    int16x8_t b = vmull_s8(vget_high_s8(w), vget_high_s8(lane));
    return vaddq_s32(acc, vpaddq_s32(vpaddlq_s16(a), vpaddlq_s16(b)));
}
#endif
CT_INLINE vi vizero() { return vdupq_n_s32(0); }
CT_INLINE vi vtimes128(vi a) { return vshlq_n_s32(a, 7); }
CT_INLINE vi vadd_int(vi a, vi b) { return vaddq_s32(a, b); }
CT_INLINE vf vint_to_float(vi a, int32_t) { return vcvtq_f32_s32(a); }  // a - offset; none here
CT_INLINE void cpu_relax() { asm volatile("yield"); }
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__) && !defined(CT_GENERIC)
#include "simd_x86.h"
#else
#include "simd_generic.h"
#endif

// 1 where no instruction multiplies four pairs of bytes: integers of 15 bits are multiplied whole.
//   vwords: weights of four columns as pairs of 16 bits, of columns 0 and 2 and of 1 and 3
//   vdot_words: acc + the two products of every lane, for two activations at x
#if !defined(CT_WORDS)
#define CT_WORDS 0
#endif

constexpr int PV = PANEL / VL;  // vectors in a panel row

// exp of N vectors side by side (one alone is bound by latency): 2^n * p(r), relative error below
// 2e-7. Arguments below -87 give exactly 0; they must not exceed 88.
template <int N> CT_INLINE void vexp(vf (&x)[N]) {
    vf low[N], n[N], r[N], p[N];
    const vf shift = vset(12582912.0f);  // 1.5 * 2^23: adding it leaves round(x) in the low bits
    each<N>([&](auto i) { low[i] = x[i]; });
    each<N>([&](auto i) { n[i] = vfma(shift, x[i], vset(1.44269504088896341f)); });
    each<N>([&](auto i) { r[i] = vsub(n[i], shift); });
    each<N>([&](auto i) { x[i] = vfma(x[i], r[i], vset(-0.693359375f)); });
    each<N>([&](auto i) { r[i] = vfma(x[i], r[i], vset(2.12194440e-4f)); });
    each<N>([&](auto i) { p[i] = vfma(vset(1.3981999507e-3f), vset(1.9875691500e-4f), r[i]); });
    each<N>([&](auto i) { p[i] = vfma(vset(8.3334519073e-3f), p[i], r[i]); });
    each<N>([&](auto i) { p[i] = vfma(vset(4.1665795894e-2f), p[i], r[i]); });
    each<N>([&](auto i) { p[i] = vfma(vset(1.6666665459e-1f), p[i], r[i]); });
    each<N>([&](auto i) { p[i] = vfma(vset(5.0000001201e-1f), p[i], r[i]); });
    each<N>([&](auto i) { p[i] = vfma(vadd(r[i], vset(1.0f)), p[i], vmul(r[i], r[i])); });
    each<N>([&](auto i) { x[i] = vkeep(vscale2(p[i], n[i]), low[i], vset(-87.0f)); });
}
CT_INLINE vf vexp(vf x) {
    vf one[1] = {x};
    vexp<1>(one);
    return one[0];
}
