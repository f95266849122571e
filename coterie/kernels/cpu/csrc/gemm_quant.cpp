// Quantised panels against activations of 15 bits. The dot product of a part, which is a group or, where
// its halves have scales of their own, one half, is an exact integer; parts are added in ascending order
// in fp32.
#include "gemm.h"

// output vectors whose weights of one group fill the registers; each activation is read once for them
constexpr int VECS = VL == 8 || CT_WORDS ? 1 : 2;
constexpr int AT_ONCE = 4;  // rows whose sums run side by side
constexpr int QUANT_ROWS = 16;  // rows that share one unpacking: their integers stay in the L1 cache

template <class F> constexpr int HALVES = 3 - F::SCALES;  // of a group, in one part

// Output vectors beside each other, of one panel or of two: VL rows from row `row` of a panel on.
struct Vectors {
    const uint8_t* panel[VECS];
    int row[VECS];
    float* out[VECS];  // of the first row of activations
};

template <class F> struct Factors {  // of one group
    vf scale[F::SCALES][VECS], minimum[F::SCALES][VECS];
    CT_INLINE void load(Factors& f, const Vectors& from, int64_t offset, int group) {
        each<F::SCALES>(CT_EACH(part) {
            each<VECS>(CT_EACH(v) {
                const uint8_t* const block = from.panel[v] + offset;
                f.scale[part][v] = F::scale(block, group, part, from.row[v]);
                f.minimum[part][v] = F::minimum(block, group, part, from.row[v]);
            });
        });
    }
};

#if CT_WORDS
// Where no instruction multiplies bytes of any sign: weights widened to 16 bits, once for all rows.
template <class F> struct GroupWeights {
    vb w[8][VECS][2];
    Factors<F> factors;

    CT_INLINE void load(GroupWeights& g, const Vectors& from, int64_t offset, int group) {
        each<4>(CT_EACH(step) {
            each<VECS>(CT_EACH(v) {
                vb bytes[2];
                F::template weights<step>(from.panel[v] + offset, group, from.row[v] * 4, bytes[0], bytes[1]);
                each<2>(CT_EACH(half) { vwords<!F::MINIMUM>(bytes[half], g.w[4 * half + step][v]); });
            });
        });
        Factors<F>::load(g.factors, from, offset, group);
    }
    // One part of MR rows, whose groups lie `stride` apart.
    template <int PART, int MR>
    CT_INLINE void dot(const GroupWeights& g, const int8_t* group, int64_t stride, vi (&acc)[MR][VECS]) {
        each<8 / F::SCALES>(CT_EACH(nth) {
            constexpr int step = PART * 8 / F::SCALES + nth;
            each<2>(CT_EACH(pair) {
                each<MR>(CT_EACH(m) {
                    each<VECS>(CT_EACH(v) {
                        acc[m][v] = vdot_words(acc[m][v], g.w[step][v][pair], group + m * stride + 8 * step + 4 * pair);
                    });
                });
            });
        });
    }
};
#else
// x = 128 * high + low: two planes of bytes.
template <class F> struct GroupWeights {
    vb w[2][4][VECS];  // by half; four columns each
    Factors<F> factors;

    CT_INLINE void load(GroupWeights& g, const Vectors& from, int64_t offset, int group) {
        each<4>(CT_EACH(step) {
            each<VECS>(CT_EACH(v) {
                F::template weights<step>(from.panel[v] + offset, group, from.row[v] * 4, g.w[0][step][v], g.w[1][step][v]);
            });
        });
        Factors<F>::load(g.factors, from, offset, group);
    }
    template <int PART, int MR>
    CT_INLINE void dot_plane(const GroupWeights& g, const int8_t* plane, int64_t stride, vi (&acc)[MR][VECS]) {
        each<HALVES<F>>(CT_EACH(which) {
            constexpr int half = PART * HALVES<F> + which;
            xb x[MR];
            each<MR>(CT_EACH(m) { x[m] = xbload(plane + m * stride + half * 16); });
            each<4>(CT_EACH(step) {
                each<MR>(CT_EACH(m) {
                    each<VECS>(CT_EACH(v) { acc[m][v] = vdot<step>(acc[m][v], g.w[half][step][v], x[m]); });
                });
            });
        });
    }
    // One part of MR rows, whose groups lie `stride` apart.
    template <int PART, int MR>
    CT_INLINE void dot(const GroupWeights& g, const int8_t* group, int64_t stride, vi (&acc)[MR][VECS]) {
        GroupWeights::dot_plane<PART, MR>(g, group, stride, acc);
        if (PLANES == 1) return;
        each<MR>(CT_EACH(m) { each<VECS>(CT_EACH(v) { acc[m][v] = vtimes128(acc[m][v]); }); });
        GroupWeights::dot_plane<PART, MR>(g, group + GROUP, stride, acc);
    }
};
#endif

// tile += one group of MR rows; `at` indexes the first row's group in scale, sum and isum.
template <class F, int MR>
CT_INLINE void add_group(const GroupWeights<F>& g, const Input& in, int64_t at, vf (&sum)[MR][VECS]) {
    each<F::SCALES>(CT_EACH(part) {
        vi acc[MR][VECS];
        each<MR>(CT_EACH(m) { each<VECS>(CT_EACH(v) { acc[m][v] = vizero(); }); });
        GroupWeights<F>::template dot<part, MR>(g, in.planes + at * 2 * GROUP, in.ld_groups * 2 * GROUP, acc);
        each<MR>(CT_EACH(m) {
            each<VECS>(CT_EACH(v) {
                const vf scale = g.factors.scale[part][v], minimum = g.factors.minimum[part][v];
                sum[m][v] = add_dot<F>(sum[m][v], acc[m][v], scale, minimum, in, at + m * in.ld_groups, part);
            });
        });
    });
}

template <class F, int MR>
CT_INLINE void add_rows(const GroupWeights<F>& g, const Input& in, int64_t at, const Vectors& to, int m) {
    vf sum[MR][VECS];
    each<MR>(CT_EACH(i) { each<VECS>(CT_EACH(v) { sum[i][v] = vload(to.out[v] + (m + i) * PANEL); }); });
    add_group<F, MR>(g, in, at, sum);
    each<MR>(CT_EACH(i) { each<VECS>(CT_EACH(v) { vstore(to.out[v] + (m + i) * PANEL, sum[i][v]); }); });
}

#if CT_WORDS
template <class F>
CT_INLINE void dot_one(const uint8_t* block, int group, int vec, const int8_t* x, vi (&acc)[F::SCALES]) {
    vi sums[2][2];  // by half and pair of columns: a single sum waits for itself
    each<2>(CT_EACH(half) { sums[half][0] = sums[half][1] = vizero(); });
    each<4>(CT_EACH(step) {
        vb bytes[2], words[2];
        F::template weights<step>(block, group, vec * VL * 4, bytes[0], bytes[1]);
        each<2>(CT_EACH(half) {
            vwords<!F::MINIMUM>(bytes[half], words);
            each<2>(CT_EACH(pair) {
                sums[half][pair] = vdot_words(sums[half][pair], words[pair], x + 8 * (4 * half + step) + 4 * pair);
            });
        });
    });
    each<2>(CT_EACH(half) { sums[half][0] = vadd_int(sums[half][0], sums[half][1]); });
    each<F::SCALES>(CT_EACH(part) { acc[part] = F::SCALES == 2 ? sums[part][0] : vadd_int(sums[0][0], sums[1][0]); });
}
#else
// Both planes are summed side by side: a single sum waits for itself.
template <class F>
CT_INLINE void dot_one(const uint8_t* block, int group, int vec, const int8_t* x, vi (&acc)[F::SCALES]) {
    const xb high[2] = {xbload(x), xbload(x + 16)}, low[2] = {xbload(x + 32), xbload(x + 48)};
    vi sums[F::SCALES][2];
    each<F::SCALES>(CT_EACH(part) { sums[part][0] = sums[part][1] = vizero(); });
    each<4>(CT_EACH(step) {
        vb w[2];
        F::template weights<step>(block, group, vec * VL * 4, w[0], w[1]);
        each<2>(CT_EACH(half) {
            constexpr int part = half / HALVES<F>;
            sums[part][0] = vdot<step>(sums[part][0], w[half], high[half]);
            if (PLANES == 2) sums[part][1] = vdot<step>(sums[part][1], w[half], low[half]);
        });
    });
    each<F::SCALES>(CT_EACH(part) {
        acc[part] = PLANES == 2 ? vadd_int(vtimes128(sums[part][0]), sums[part][1]) : sums[part][0];
    });
}
#endif

// A single row is bound by latency; the integers are those of many rows.
template <class F> CT_FLAT static void one_row(const uint8_t* block, const Input& in, int64_t row, int64_t k, float* tile) {
    constexpr int GROUPS = F::SPAN / GROUP;
    vf sum[PV];
    each<PV>(CT_EACH(v) { sum[v] = vset(0.0f); });
    int64_t at = row * in.ld_groups;
    for (const int64_t end = at + k / GROUP; at < end; block += F::BYTES)
        for (int group = 0; group < GROUPS; ++group, ++at)
            each<PV>(CT_EACH(v) {
                vi acc[F::SCALES];
                dot_one<F>(block, group, v, in.planes + at * 2 * GROUP, acc);
                each<F::SCALES>(CT_EACH(part) {
                    sum[v] = add_dot<F>(sum[v], acc[part], F::scale(block, group, part, v * VL),
                                        F::minimum(block, group, part, v * VL), in, at, part);
                });
            });
    each<PV>(CT_EACH(v) { vstore(tile + v * VL, sum[v]); });
}

template <class F> CT_FLAT static void many_rows(const Vectors& vectors, const Input& in, int64_t row, int rows, int64_t k) {
    constexpr int GROUPS = F::SPAN / GROUP;
    const vf zero = vset(0.0f);
    for (int m = 0; m < rows; ++m) each<VECS>(CT_EACH(v) { vstore(vectors.out[v] + m * PANEL, zero); });
    for (int64_t g = 0; g < k / GROUP; ++g) {
        GroupWeights<F> weights;
        GroupWeights<F>::load(weights, vectors, g / GROUPS * F::BYTES, int(g % GROUPS));
        int m = 0;
        for (; m + AT_ONCE <= rows; m += AT_ONCE) add_rows<F, AT_ONCE>(weights, in, (row + m) * in.ld_groups + g, vectors, m);
        const int64_t at = (row + m) * in.ld_groups + g;
        switch (rows - m) {  // side by side too: a single sum waits for itself
            case 3: add_rows<F, 3>(weights, in, at, vectors, m); break;
            case 2: add_rows<F, 2>(weights, in, at, vectors, m); break;
            case 1: add_rows<F, 1>(weights, in, at, vectors, m);
        }
    }
}

template <class F> static void format_tile(const TileJob& job, int begin) {
    if (job.rows == 1) {
        for (int p = 0; p < job.panels; ++p) one_row<F>(job.panel + p * job.panel_stride, *job.in, job.row, job.k, job.tile + p * PANEL);
        return;
    }
    const int count = job.panels * PV;
    alignas(64) float nowhere[QUANT_ROWS * PANEL];
    for (int row = begin; row < job.rows; row += QUANT_ROWS) {
        const int rows = job.rows - row < QUANT_ROWS ? job.rows - row : QUANT_ROWS;
        for (int first = 0; first < count; first += VECS) {
            Vectors vectors;
            for (int v = 0; v < VECS; ++v) {
                // beside the last one of an odd number it is computed twice
                const bool is_there = first + v < count;
                const int vector = is_there ? first + v : first, panel = vector / PV, lane = vector % PV * VL;
                vectors.panel[v] = job.panel + panel * job.panel_stride;
                vectors.row[v] = lane;
                vectors.out[v] = is_there ? job.tile + (int64_t(panel) * job.rows + row) * PANEL + lane : nowhere;
            }
            many_rows<F>(vectors, *job.in, job.row + row, rows, job.k);
        }
    }
}

void quant_tile(int32_t kind, const TileJob& job, int first) {
    with_format(kind, CT_EACH(format) { format_tile<decltype(format)>(job, first); });
}
