#include "attention_amx.h"

#include <limits>

#if CT_AMX
constexpr float NEVER = -std::numeric_limits<float>::infinity();
constexpr int PAIRS = TILE / 2;

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

// Positions that a pair may not see weigh nothing; pairs past the last see nothing at all.
static void hide(const AmxTile& t, int first, float* s) {
    for (int c = 0; c < COMBOS; ++c) {
        int seen = first + c < t.combos ? t.limit[first + c] - t.start : 0;
        seen = seen < 0 ? 0 : seen < t.count ? seen : t.count;
        for (int p = seen; p < TILE; ++p) s[p * COMBOS + c] = NEVER;
    }
}

// Bits of two weights as bf16, the first below.
CT_INLINE void store_pair(const float* first, const float* second, uint32_t* out) {
#if defined(__AVX512F__)
    const auto rounded = [](const float* from) {  // to nearest even; weights are never NaN
        const __m512i bits = _mm512_castps_si512(_mm512_loadu_ps(from));
        const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        return _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    };
    _mm512_storeu_si512(out, _mm512_or_si512(rounded(first), _mm512_slli_epi32(rounded(second), 16)));
#else
    for (int c = 0; c < COMBOS; ++c) out[c] = float_to_bf16(first[c]) | uint32_t(float_to_bf16(second[c])) << 16;
#endif
}

// [16][16] words from rows `stride_in` apart to columns, rows `stride_out` apart.
static void transpose16(const uint32_t* in, uint32_t* out, int stride_out) {
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
        _mm512_storeu_si512(out + i * stride_out, _mm512_shuffle_i32x4(t[i], t[i + 4], 0x88));
        _mm512_storeu_si512(out + (i + 8) * stride_out, _mm512_shuffle_i32x4(t[i], t[i + 4], 0xdd));
        _mm512_storeu_si512(out + (i + 4) * stride_out, _mm512_shuffle_i32x4(t[i + 8], t[i + 12], 0x88));
        _mm512_storeu_si512(out + (i + 12) * stride_out, _mm512_shuffle_i32x4(t[i + 8], t[i + 12], 0xdd));
    }
#else
    for (int i = 0; i < 16; ++i)
        for (int j = 0; j < 16; ++j) out[j * stride_out + i] = in[i * 16 + j];
#endif
}

// s becomes the weights; factor: by how much what was mixed so far shrinks. Sums run down the
// positions in ascending order.
static void soften_block(const AmxTile& t, int first, float* s, float* factor) {
    alignas(64) float top[COMBOS], sum[COMBOS], before[COMBOS];
    for (int c = 0; c < COMBOS; ++c) before[c] = first + c < t.combos ? t.state[(first + c) * t.width + t.dim] : NEVER;
    vf most[PV], total[PV];
    each<PV>([&](auto v) { most[v] = vload(before + v * VL), total[v] = vset(0.0f); });
    for (int p = 0; p < TILE; ++p) each<PV>([&](auto v) { most[v] = vmax(most[v], vload(s + p * COMBOS + v * VL)); });
    each<PV>([&](auto v) { vstore(top + v * VL, most[v]); });
    for (int c = 0; c < COMBOS; ++c) factor[c] = top[c] == before[c] ? 0.0f : before[c] - top[c];  // of exp, below
    for (int c = 0; c < COMBOS; ++c) sum[c] = top[c] == NEVER ? 0.0f : top[c];
    each<PV>([&](auto v) { most[v] = vload(sum + v * VL); });
    for (int p = 0; p < TILE; ++p) {
        vf weight[PV];
        each<PV>([&](auto v) { weight[v] = vsub(vload(s + p * COMBOS + v * VL), most[v]); });
        vexp<PV>(weight);
        each<PV>([&](auto v) { vstore(s + p * COMBOS + v * VL, weight[v]), total[v] = vadd(total[v], weight[v]); });
    }
    each<PV>([&](auto v) {
        vstore(sum + v * VL, total[v]);
        vstore(factor + v * VL, vexp(vload(factor + v * VL)));
    });
    for (int c = 0; c < COMBOS && first + c < t.combos; ++c) {
        if (top[c] == before[c]) factor[c] = 1.0f;
        float* state = t.state + (first + c) * t.width + t.dim;
        state[0] = top[c], state[1] = state[1] * factor[c] + sum[c];
    }
}

// mixed += weights x values, 64 dimensions at a time. `p`: [16 pairs][TILE] bf16.
static void mix_block(const AmxTile& t, int first, const uint32_t* p) {
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
            _tile_loadd(4, p + step * 16, PAIRS * 4);
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
    alignas(64) float s[TILE * COMBOS], factor[COMBOS];
    alignas(64) uint32_t pairs[PAIRS * COMBOS], p[COMBOS * PAIRS];
    for (int first = 0; first < t.combos; first += COMBOS) {
        const int last = first + COMBOS < t.combos ? first + COMBOS - 1 : t.combos - 1;
        if (t.limit[last] <= t.start) continue;  // limits ascend: none of these sees anything here
        score_block(t, t.q + int64_t(first) * t.dim, s);
        if (t.count < TILE || t.limit[first] - t.start < TILE || last - first < COMBOS - 1) hide(t, first, s);
        soften_block(t, first, s, factor);
        for (int i = 0; i < PAIRS; ++i) store_pair(s + 2 * i * COMBOS, s + (2 * i + 1) * COMBOS, pairs + i * COMBOS);
        transpose16(pairs, p, PAIRS);
        transpose16(pairs + 256, p + 16, PAIRS);
        for (int c = 0; first + c <= last; ++c)
            if (factor[c] != 1.0f)
                for (int d = 0; d < t.dim; d += VL) {
                    float* at = t.state + (first + c) * t.width + d;
                    vstore(at, vmul(vload(at), vset(factor[c])));
                }
        keep_stores(p);
        mix_block(t, first, p);
    }
}
#endif
