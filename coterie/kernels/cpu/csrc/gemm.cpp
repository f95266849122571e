// Shares one product among the team: tasks are blocks of rows x runs of panels.
#include "gemm.h"

void run_tile(int32_t kind, const TileJob& job) {
#if CT_AMX
    if (amx_ready()) {
        if (kind == KIND_BF16) return amx_bf16_tile(job);
        if (kind != KIND_F32 && job.rows >= 16) {
            const int done = amx_quant_tile(kind, job);
            return done < job.rows ? quant_tile(kind, job, done) : void();
        }
    }
#endif
    switch (kind) {
        case KIND_F32: return f32_tile(job);
        case KIND_BF16: return bf16_tile(job);
        default: return quant_tile(kind, job);
    }
}

struct Place {  // where a panel of the whole matrix lies
    const Part* part;
    int64_t panel;   // inside the part
    int64_t column;  // its first output column
};

static Place locate(const Matrix& matrix, int64_t panel) {
    const Part* part = matrix.parts;
    int64_t column = 0;
    for (int64_t have; panel >= (have = (part->rows + PANEL - 1) / PANEL); ++part) {
        panel -= have;
        column += part->rows;
    }
    return {part, panel, column + panel * PANEL};
}

static void emit(const TileJob& job, const Place& place, float* y, int64_t ldy, Epilogue epilogue) {
    for (int p = 0; p < job.panels; ++p) {
        const int64_t left = place.part->rows - (place.panel + p) * PANEL;
        const int width = left < PANEL ? int(left) : PANEL;
        for (int m = 0; m < job.rows; ++m) {
            const float* from = job.tile + (int64_t(p) * job.rows + m) * PANEL;
            float* to = y + (job.row + m) * ldy + place.column + p * PANEL;
            if (epilogue == ADD)
                for (int i = 0; i < width; ++i) to[i] += from[i];
            else
                for (int i = 0; i < width; ++i) to[i] = from[i];
        }
    }
}

constexpr int RUN_SIZES = 2;

// Where run `index` begins: each thread gets one long run (a half of all panels goes this way, since
// memory is read fastest in long stretches), then a shorter one that evens out the end.
static int64_t first_panel(int64_t panels, int64_t index, int64_t threads) {
    const int64_t level = index / threads;
    if (level >= RUN_SIZES) return panels;
    const int64_t left = panels >> level, size = level == RUN_SIZES - 1 ? left : left - (left >> 1);
    return panels - left + index % threads * size / threads;
}

void gemm(Team& team, const Matrix& matrix, const Input& in, int64_t rows, float* y, Epilogue epilogue) {
    const int64_t blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK;
    const int64_t block_rows = round_up((rows + blocks - 1) / blocks, 4);
    const int64_t runs = int64_t(team.size()) * RUN_SIZES;
    alignas(64) float tile[PANELS_AT_ONCE * ROW_BLOCK * PANEL];
    team.share(runs * blocks, 1, [&](int64_t task, int64_t) {
        const int64_t row = task / runs * block_rows;
        if (row >= rows) return;
        int64_t panel = first_panel(matrix.panels, task % runs, team.size());
        const int64_t end = first_panel(matrix.panels, task % runs + 1, team.size());
        while (panel < end) {
            const Place place = locate(matrix, panel);
            const int64_t bytes = panel_bytes(place.part->kind, matrix.k);
            int64_t count = (place.part->rows + PANEL - 1) / PANEL - place.panel;
            if (count > end - panel) count = end - panel;
            if (count > PANELS_AT_ONCE) count = PANELS_AT_ONCE;
            TileJob job{place.part->data + place.panel * bytes, bytes, int(count), &in, row,
                        int(rows - row < block_rows ? rows - row : block_rows), matrix.k, tile};
            run_tile(place.part->kind, job);
            emit(job, place, y, matrix.n, epilogue);
            panel += count;
        }
    });
}
