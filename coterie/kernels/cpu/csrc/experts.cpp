// The C entry points that run only the experts of one layer, with the records that are in memory.
#include "experts.h"

extern "C" {

int32_t ct_experts(const ExpertCall* call) {
    return status_of([&] {
        static thread_local ExpertSpace s;
        group(s, *call);
        if (s.blocks.empty()) return;
        ExpertRun run(*call, s);
        run.reserve(int64_t(s.pairs.size()));
        run_team(int(call->threads), 3, run);
    });
}

// total[t] = sum over k, in its order, of weights[t][k] * out[t * top_k + k].
int32_t ct_combine(const float* out, const float* weights, int64_t tokens, int64_t top_k, int64_t width, float* total, int64_t threads) {
    return status_of([&] {
        auto body = [&](Team& team) {
            team.share(tokens, 1, [&](int64_t t, int64_t) {
                combine_row(out + t * top_k * width, weights + t * top_k, top_k, width, total + t * width);
            });
        };
        run_team(tokens * top_k * width < 65536 ? 1 : int(threads), 1, body);
    });
}

}  // extern "C"
