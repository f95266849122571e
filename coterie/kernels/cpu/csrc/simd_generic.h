// simd.h for all other CPUs: GCC vectors of 16 lanes, whatever they compile to. The tests also use it
// in place of AVX-512, to run the AMX code on other machines.
#pragma once

constexpr int VL = 16;
constexpr const char* ISA_NAME = "generic";
#if !defined(CT_W_OFFSET)
#define CT_W_OFFSET 0
#endif
constexpr int W_OFFSET = CT_W_OFFSET;
typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vpair __attribute__((vector_size(64)));
struct vb {  // 16 rows x 4 consecutive k
    uint8_t at[64];
};
struct xq {
    const float* at;
};
struct xb {
    const int8_t* at;
};

template <class V, class T> CT_INLINE V load_as(const T* p) {
    V v;
    memcpy(&v, p, sizeof(v));
    return v;
}
CT_INLINE vf vload(const float* p) { return load_as<vf>(p); }
CT_INLINE void vstore(float* p, vf a) { memcpy(p, &a, sizeof(a)); }
CT_INLINE vf vset(float a) { return vf{} + a; }
CT_INLINE vf vadd(vf a, vf b) { return a + b; }
CT_INLINE vf vsub(vf a, vf b) { return a - b; }
CT_INLINE vf vmul(vf a, vf b) { return a * b; }
CT_INLINE vf vdiv(vf a, vf b) { return a / b; }
CT_INLINE vf vmax(vf a, vf b) { return a > b ? a : b; }
CT_INLINE vf vmin(vf a, vf b) { return a < b ? a : b; }
CT_INLINE vf vabs(vf a) { return a < 0.0f ? -a : a; }
CT_INLINE vf vkeep(vf a, vf x, vf low) { return x >= low ? a : vf{}; }
CT_INLINE vf vfma(vf acc, vf a, vf b) {
    for (int i = 0; i < VL; ++i) acc[i] = __builtin_fmaf(a[i], b[i], acc[i]);
    return acc;
}
CT_INLINE vf vfma_acc(vf acc, vf a, vf b) { return vfma(acc, a, b); }
template <int L> CT_INLINE vf vfma_at(vf acc, vf w, xq x) { return vfma(acc, w, vset(x.at[L])); }
CT_INLINE vf vround(vf a) {
    for (int i = 0; i < VL; ++i) a[i] = __builtin_rintf(a[i]);
    return a;
}
CT_INLINE float vsum(vf a) {
    float sum = 0.0f;
    for (int i = 0; i < VL; ++i) sum += a[i];
    return sum;
}
CT_INLINE float vmaxall(vf a) {
    float top = a[0];
    for (int i = 1; i < VL; ++i) top = a[i] > top ? a[i] : top;
    return top;
}
CT_INLINE vf vscale2(vf p, vf n) { return (vf)((vi)p + (vi)((vpair)n << 23)); }
CT_INLINE void vsum4(float* out, vf a, vf b, vf c, vf d) {
    out[0] = vsum(a), out[1] = vsum(b), out[2] = vsum(c), out[3] = vsum(d);
}
CT_INLINE vpair vload_pair(const uint32_t* p) { return load_as<vpair>(p); }
CT_INLINE vf vpair_even(vpair w) { return (vf)(w << 16); }
CT_INLINE vf vpair_odd(vpair w) { return (vf)(w & 0xffff0000u); }
CT_INLINE void vload2(const float* p, vf& a, vf& b) { a = vload(p), b = vload(p + VL); }
CT_INLINE vf widen(const uint16_t* p) {
    vpair w = {};
    for (int i = 0; i < VL; ++i) w[i] = uint32_t(p[i]) << 16;
    return (vf)w;
}
CT_INLINE void vload2(const uint16_t* p, vf& a, vf& b) { a = widen(p), b = widen(p + VL); }
CT_INLINE vf vload_half(const uint16_t* p) {
    vf out = {};
    for (int i = 0; i < VL; ++i) out[i] = half_to_float(p[i]);
    return out;
}
CT_INLINE vf vload_u8(const uint8_t* p) {
    vf out = {};
    for (int i = 0; i < VL; ++i) out[i] = float(p[i]);
    return out;
}
CT_INLINE vf vload_s8(const uint8_t* p) {
    vf out = {};
    for (int i = 0; i < VL; ++i) out[i] = float(int8_t(p[i]));
    return out;
}
CT_INLINE xq xload(const float* x) { return {x}; }
CT_INLINE xb xbload(const int8_t* x) { return {x}; }
CT_INLINE vb vbload(const uint8_t* p) { return load_as<vb>(p); }
CT_INLINE void vbstore(uint8_t* p, vb a) { memcpy(p, a.at, 64); }
CT_INLINE vb vbload_low(const uint8_t* p) {
    vb out;
    for (int i = 0; i < 64; ++i) out.at[i] = p[i] & 15;
    return out;
}
CT_INLINE vb vbload_high(const uint8_t* p) {
    vb out;
    for (int i = 0; i < 64; ++i) out.at[i] = p[i] >> 4;
    return out;
}
template <int LEFT> CT_INLINE vb vbmerge(vb base, vb bits, uint8_t mask) {
    for (int i = 0; i < 64; ++i)
        base.at[i] |= (LEFT < 0 ? bits.at[i] >> (LEFT < 0 ? -LEFT : 0) : bits.at[i] << (LEFT < 0 ? 0 : LEFT)) & mask;
    return base;
}
#if defined(CT_WORDS)
template <bool SIGNED> CT_INLINE void vwords(vb w, vb (&out)[2]) {
    for (int i = 0; i < 32; ++i)
        for (int pair = 0; pair < 2; ++pair) {
            const int16_t wide = SIGNED ? int8_t(w.at[2 * i + pair]) : w.at[2 * i + pair];
            memcpy(out[pair].at + 2 * i, &wide, 2);
        }
}
CT_INLINE vi vdot_words(vi acc, vb w, const int8_t* x) {
    int16_t wide[2 * VL], two[2];
    memcpy(wide, w.at, 64), memcpy(two, x, 4);
    for (int r = 0; r < VL; ++r) acc[r] += wide[2 * r] * two[0] + wide[2 * r + 1] * two[1];
    return acc;
}
#endif
template <int L> CT_INLINE vi vdot(vi acc, vb w, xb x) {
    for (int r = 0; r < VL; ++r)
        for (int j = 0; j < 4; ++j) {
            const int weight = W_OFFSET ? int(w.at[r * 4 + j]) : int(int8_t(w.at[r * 4 + j]));
            acc[r] += weight * x.at[4 * L + j];
        }
    return acc;
}
CT_INLINE vi vizero() { return vi{}; }
CT_INLINE vi viload(const int32_t* p) { return load_as<vi>(p); }
CT_INLINE vi vtimes128(vi a) { return a * 128; }
CT_INLINE vi vadd_int(vi a, vi b) { return a + b; }
CT_INLINE vf vint_to_float(vi a, int32_t offset) { return __builtin_convertvector(a - offset, vf); }
CT_INLINE void cpu_relax() {}
