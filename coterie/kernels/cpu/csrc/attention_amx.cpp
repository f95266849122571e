#include "attention_amx.h"

#include <limits>

#if CT_AMX
constexpr float NEVER = -std::numeric_limits<float>::infinity();
constexpr int FEW = 6;  // pairs that are softened one by one

void amx_pack_queries(const float* const* q, int combos, int dim, uint16_t* out) {
    for (int first = 0; first < combos; first += COMBOS, out += int64_t(dim) * COMBOS)
        for (int c = 0; c < COMBOS; ++c)
            for (int d = 0; d < dim; ++d)
                out[(d / 2 * COMBOS + c) * 2 + d % 2] = first + c < combos ? float_to_bf16(q[first + c][d]) : uint16_t(0);
}

void amx_pair_rows(const uint16_t* first, const uint16_t* second, int dim, uint16_t* out) {
#if defined(__AVX512BW__)
    alignas(64) static const uint16_t order[2][32] = {
        {0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47},
        {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55, 24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63}};
    const __m512i low = _mm512_load_si512(order[0]), high = _mm512_load_si512(order[1]);
    for (int d = 0; d < dim; d += 32) {
        const __m512i a = _mm512_loadu_si512(first + d), b = second ? _mm512_loadu_si512(second + d) : _mm512_setzero_si512();
        _mm512_storeu_si512(out + 2 * d, _mm512_permutex2var_epi16(a, low, b));
        _mm512_storeu_si512(out + 2 * d + 32, _mm512_permutex2var_epi16(a, high, b));
    }
#else
    for (int d = 0; d < dim; ++d) out[2 * d] = first[d], out[2 * d + 1] = second ? second[d] : uint16_t(0);
#endif
}

// s[position][pair] = key . query
static void score_block(const AmxTile& t, const uint16_t* q, float* s) {
    const int groups = (t.count + 15) / 16;
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    for (int step = 0; step < t.dim / 32; ++step) {
        _tile_loadd(6, q + step * 512, 64);
        _tile_loadd(4, t.keys[0] + step * 32, t.key_stride);
        _tile_dpbf16ps(0, 4, 6);
        if (groups < 2) continue;
        _tile_loadd(5, t.keys[1] + step * 32, t.key_stride);
        _tile_dpbf16ps(1, 5, 6);
        if (groups < 3) continue;
        _tile_loadd(4, t.keys[2] + step * 32, t.key_stride);
        _tile_dpbf16ps(2, 4, 6);
        if (groups < 4) continue;
        _tile_loadd(5, t.keys[3] + step * 32, t.key_stride);
        _tile_dpbf16ps(3, 5, 6);
    }
    _tile_stored(0, s, 64);
    _tile_stored(1, s + 256, 64);
    _tile_stored(2, s + 512, 64);
    _tile_stored(3, s + 768, 64);
}

// [16][16] words: rows become columns, `stride` words apart.
static void transpose16(const float* in, float* out, int stride) {
#if defined(__AVX512F__)
    __m512i r[16], t[16];
    for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(in + i * 16);
    for (int i = 0; i < 16; i += 2) t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]), t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]), r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]), r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88), t[i + 4] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 8] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd), t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; ++i) {
        _mm512_storeu_si512(out + i * stride, _mm512_shuffle_i32x4(t[i], t[i + 4], 0x88));
        _mm512_storeu_si512(out + (i + 8) * stride, _mm512_shuffle_i32x4(t[i], t[i + 4], 0xdd));
        _mm512_storeu_si512(out + (i + 4) * stride, _mm512_shuffle_i32x4(t[i + 8], t[i + 12], 0x88));
        _mm512_storeu_si512(out + (i + 12) * stride, _mm512_shuffle_i32x4(t[i + 8], t[i + 12], 0xdd));
    }
#else
    for (int i = 0; i < 16; ++i)
        for (int j = 0; j < 16; ++j) out[j * stride + i] = in[i * 16 + j];
#endif
}

#if defined(__AVX512F__)
// Bits of bf16 in the low halves, to nearest even; weights are never NaN.
CT_INLINE __m512i rounded(const float* from) {
    const __m512i bits = _mm512_castps_si512(_mm512_loadu_ps(from));
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    return _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
}
#endif

// Sixteen partial sums, added in the order that both ways of softening share.
CT_INLINE float tree_sum(float* parts) {
    for (int h = 8; h; h /= 2)
        for (int j = 0; j < h; ++j) parts[j] += parts[j + h];
    return parts[0];
}

// The new maximum and sum of a pair, and by how much what was mixed so far shrinks.
static float settle(const AmxTile& t, int pair, float top, float factor, float sum) {
    float* state = t.state + pair * t.width + t.dim;
    if (state[0] == top) factor = 1.0f;
    state[0] = top, state[1] = state[1] * factor + sum;
    return factor;
}

static void shrink(const AmxTile& t, int pair, float factor) {
    if (factor == 1.0f) return;
    float* at = t.state + pair * t.width;
    for (int d = 0; d < t.dim; d += VL) vstore(at + d, vmul(vload(at + d), vset(factor)));
}

static int seen_by(const AmxTile& t, int pair) {
    const int seen = t.limit[pair] - t.start;
    return seen < 0 ? 0 : seen < t.count ? seen : t.count;
}

// One pair's scores, position by position, to weights: for few pairs.
static void soften_row(const AmxTile& t, int pair, float* s, uint16_t* p) {
    constexpr int N = TILE / VL;
    const int seen = seen_by(t, pair);
    for (int i = seen; i < TILE; ++i) s[i] = NEVER;
    const float before = t.state[pair * t.width + t.dim];
    vf x[N], most = vset(before);
    each<N>([&](auto i) { x[i] = vload(s + i * VL), most = vmax(most, x[i]); });
    const float top = vmaxall(most);
    each<N>([&](auto i) { x[i] = vsub(x[i], vset(top)); });
    vexp<N>(x);
    alignas(64) float sums[16] = {}, factor[VL];
    each<N>([&](auto i) { vstore(s + i * VL, x[i]); });
    for (int i = 0; i < TILE; i += 16)
        for (int j = 0; j < 16; j += VL) vstore(sums + j, vadd(vload(sums + j), vload(s + i + j)));
    vstore(factor, vexp(vset(before - top)));
    shrink(t, pair, settle(t, pair, top, factor[0], tree_sum(sums)));
#if defined(__AVX512F__)
    for (int i = 0; i < TILE; i += 16)
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + i), _mm512_cvtepi32_epi16(rounded(s + i)));
#else
    for (int i = 0; i < TILE; ++i) p[i] = float_to_bf16(s[i]);
#endif
}

// Two positions' weights as pairs of bf16.
CT_INLINE void store_pair(const float* first, const float* second, float* out) {
#if defined(__AVX512F__)
    _mm512_storeu_si512(out, _mm512_or_si512(rounded(first), _mm512_slli_epi32(rounded(second), 16)));
#else
    for (int c = 0; c < COMBOS; ++c) {
        const uint32_t bits = float_to_bf16(first[c]) | uint32_t(float_to_bf16(second[c])) << 16;
        memcpy(out + c, &bits, 4);
    }
#endif
}

// Sixteen pairs side by side: the same numbers as soften_row, fewer instructions for many pairs.
static void soften_across(const AmxTile& t, int first, int used, float* s, float* p) {
    alignas(64) float top[COMBOS], factor[COMBOS], sums[16 * COMBOS], before[COMBOS], pairs[TILE / 2 * COMBOS];
    if (t.count < TILE || used < COMBOS || t.limit[first] - t.start < TILE)
        for (int c = 0; c < COMBOS; ++c)
            for (int i = c < used ? seen_by(t, first + c) : 0; i < TILE; ++i) s[i * COMBOS + c] = NEVER;
    for (int c = 0; c < COMBOS; ++c) before[c] = c < used ? t.state[(first + c) * t.width + t.dim] : 0.0f;
    vf most[PV];
    each<PV>([&](auto v) { most[v] = vload(before + v * VL); });
    for (int i = 0; i < TILE; ++i) each<PV>([&](auto v) { most[v] = vmax(most[v], vload(s + i * COMBOS + v * VL)); });
    each<PV>([&](auto v) {
        vstore(top + v * VL, most[v]);
        vstore(factor + v * VL, vexp(vsub(vload(before + v * VL), most[v])));
    });
    for (int c = 0; c < COMBOS; ++c) before[c] = top[c] == NEVER ? 0.0f : top[c];  // these see nothing yet
    each<PV>([&](auto v) { most[v] = vload(before + v * VL); });
    for (int j = 0; j < 16; ++j)
        for (int v = 0; v < PV; ++v) {
            vf x[4];
            each<4>([&](auto i) { x[i] = vsub(vload(s + (16 * i + j) * COMBOS + v * VL), most[v]); });
            vexp<4>(x);
            each<4>([&](auto i) { vstore(s + (16 * i + j) * COMBOS + v * VL, x[i]); });
            vstore(sums + j * COMBOS + v * VL, vadd(vadd(vadd(x[0], x[1]), x[2]), x[3]));
        }
    for (int h = 8; h; h /= 2)
        for (int j = 0; j < h * COMBOS; j += VL) vstore(sums + j, vadd(vload(sums + j), vload(sums + h * COMBOS + j)));
    for (int c = 0; c < used; ++c)
        if (t.limit[first + c] > t.start) shrink(t, first + c, settle(t, first + c, top[c], factor[c], sums[c]));
    for (int i = 0; i < TILE / 2; ++i) store_pair(s + 2 * i * COMBOS, s + (2 * i + 1) * COMBOS, pairs + i * COMBOS);
    transpose16(pairs, p, TILE / 2);
    transpose16(pairs + 256, p + 16, TILE / 2);
}

// mixed += weights x values, 64 dimensions at a time. `p`: [16 pairs][TILE] bf16.
static void mix_block(const AmxTile& t, int first, const uint16_t* p) {
    const int64_t stride = t.width * sizeof(float), across = int64_t(t.dim) * 4;
    const int steps = t.count > 32 ? 2 : 1;
    float* state = t.state + first * t.width;
    for (int d = 0; d < t.dim; d += 64) {
        const bool wide = d + 32 < t.dim;
        _tile_loadd(0, state + d, stride);
        _tile_loadd(1, state + d + 16, stride);
        if (wide) {
            _tile_loadd(2, state + d + 32, stride);
            _tile_loadd(3, state + d + 48, stride);
        }
        for (int step = 0; step < steps; ++step) {
            const uint16_t* v = t.values + (int64_t(step) * 16 * t.dim + d) * 2;
            _tile_loadd(4, p + step * 32, TILE * 2);
            _tile_loadd(6, v, across);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, v + 32, across);
            _tile_dpbf16ps(1, 4, 7);
            if (!wide) continue;
            _tile_loadd(6, v + 64, across);
            _tile_dpbf16ps(2, 4, 6);
            _tile_loadd(7, v + 96, across);
            _tile_dpbf16ps(3, 4, 7);
        }
        _tile_stored(0, state + d, stride);
        _tile_stored(1, state + d + 16, stride);
        if (wide) {
            _tile_stored(2, state + d + 32, stride);
            _tile_stored(3, state + d + 48, stride);
        }
    }
}

void amx_attend_tile(const AmxTile& t) {
    alignas(64) float across[TILE * COMBOS], s[COMBOS * TILE];
    alignas(64) uint16_t p[COMBOS * TILE];
    for (int first = 0; first < t.combos; first += COMBOS) {
        const int used = t.combos - first < COMBOS ? t.combos - first : COMBOS;
        if (t.limit[first + used - 1] <= t.start) continue;  // limits ascend: none of these sees anything here
        score_block(t, t.q + int64_t(first) * t.dim, across);
        if (used > FEW) {
            soften_across(t, first, used, across, reinterpret_cast<float*>(p));
        } else {
            for (int i = 0; i < TILE; i += 16) transpose16(across + i * COMBOS, s + i, TILE);
            memset(p, 0, sizeof(p));
            for (int c = 0; c < used; ++c)
                if (t.limit[first + c] > t.start) soften_row(t, first + c, s + c * TILE, p + c * TILE);
        }
        keep_stores(p);
        mix_block(t, first, p);
    }
}
#endif
