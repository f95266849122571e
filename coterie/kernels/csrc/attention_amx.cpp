#include "attention_amx.h"

#include "attention_tile.h"

#if CT_AMX
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

// Weights as bf16, to nearest even.
static void round_weights(const float* s, uint16_t* p) {
#if defined(__AVX512F__)
    for (int i = 0; i < TILE; i += 16) {  // weights are never NaN
        const __m512i bits = _mm512_castps_si512(_mm512_loadu_ps(s + i));
        const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + i), _mm512_cvtepi32_epi16(_mm512_srli_epi32(up, 16)));
    }
#else
    for (int i = 0; i < TILE; ++i) p[i] = float_to_bf16(s[i]);
#endif
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
    TileWork work{t.combos, t.dim, t.width, t.state, s, nullptr, t.limit, t.start, t.count};
    for (int first = 0; first < t.combos; first += COMBOS) {
        const int used = t.combos - first < COMBOS ? t.combos - first : COMBOS;
        if (t.limit[first + used - 1] <= t.start) continue;  // limits ascend: none of these sees anything here
        score_block(t, t.q + int64_t(first) * t.dim, across);
        for (int i = 0; i < t.count; i += 16) transpose16(across + i * COMBOS, s + i, TILE);
        if (used < COMBOS) memset(p, 0, sizeof(p));
        work.scores = s - int64_t(first) * TILE;
        for (int c = 0; c < used; ++c) {
            if (t.limit[first + c] <= t.start) {
                memset(p + c * TILE, 0, TILE * sizeof(uint16_t));
                continue;
            }
            soften(work, first + c);
            for (int i = int(round_up(t.count, 16)); i < TILE; ++i) s[c * TILE + i] = 0.0f;
            round_weights(s + c * TILE, p + c * TILE);
        }
        keep_stores(p);
        mix_block(t, first, p);
    }
}
#endif
