#include "moe.h"

#include <limits>

// Probabilities in place: exp in vectors, the sum in ascending order.
static void softmax(float* scores, int64_t n, int64_t padded) {
    float top = scores[0], sum = 0.0f;
    for (int64_t i = 1; i < n; ++i) top = scores[i] > top ? scores[i] : top;
    for (int64_t i = n; i < padded; ++i) scores[i] = top;
    for (int64_t i = 0; i < padded; i += VL) vstore(scores + i, vexp(vsub(vload(scores + i), vset(top))));
    for (int64_t i = 0; i < n; ++i) sum += scores[i];
    for (int64_t i = 0; i < n; ++i) scores[i] /= sum;
}

// The best top_k, best first; of equals the one with the lower number.
static void pick(const Route& route, float* scores, int64_t n, int32_t* ids, float* weights) {
    float sum = 0.0f;
    for (int k = 0; k < route.top_k; ++k) {
        int64_t best = 0;
        for (int64_t i = 1; i < n; ++i) best = scores[i] > scores[best] ? i : best;
        ids[k] = int32_t(best), weights[k] = route.equal ? 1.0f : scores[best];
        sum += weights[k];
        scores[best] = -std::numeric_limits<float>::infinity();
    }
    for (int k = 0; k < route.top_k; ++k) {
        if (route.normalise && !route.equal) weights[k] /= sum;
        if (route.scale != 1.0f) weights[k] *= route.scale;
    }
}

static int64_t padded_experts(const Route& route) { return round_up(route.product->n, 16); }

void reserve_route(MoeSpace& space, const Route& route, int64_t rows) {
    space.input.reserve(*route.product, rows);
    space.logits.need<float>(rows * (route.product->n + padded_experts(route)));
}

void route_rows(Team& team, MoeSpace& space, const Route& route, const float* x, int64_t rows, int32_t* ids, float* weights) {
    const int64_t n = route.product->n, padded = padded_experts(route);
    float* logits = space.logits.at<float>();
    float* scores = logits + rows * n;
    plain_gemm(team, space.input, *route.product, x, rows, logits, STORE);
    team.share(rows, 1, [&](int64_t row, int64_t) {
        float* mine = scores + row * padded;
        for (int64_t i = 0; i < n; ++i) mine[i] = logits[row * n + i] + (route.bias ? route.bias[i] : 0.0f);
        softmax(mine, n, padded);
        if (route.penalty)
            for (int64_t i = 0; i < n; ++i) mine[i] += route.penalty[i];
        pick(route, mine, n, ids + row * route.top_k, weights + row * route.top_k);
    });
}

static ExpertCall call_of(const MoeSpace& space, const MoePart& part, int64_t rows, const int32_t* ids) {
    return {part.shape, space.normed.at<float>(), rows, ids, part.route.top_k, part.records, part.route.product->n,
            space.out.at<float>(), 0};
}

void reserve_moe(MoeSpace& space, const MoePart& part, int64_t rows) {
    const int64_t pairs = rows * part.route.top_k, hidden = part.shape.hidden;
    reserve_route(space, part.route, rows);
    space.normed.need<float>(rows * hidden);
    space.weights.need<float>(pairs);
    space.out.need<float>(pairs * hidden);
    const ExpertCall call = call_of(space, part, rows, nullptr);
    ExpertRun(call, space.experts).reserve(pairs);
}

void run_moe(Team& team, MoeSpace& space, const MoePart& part, float eps, int64_t rows, float* hidden, int32_t* ids) {
    const int64_t width = part.shape.hidden, top_k = part.route.top_k;
    float *normed = space.normed.at<float>(), *weights = space.weights.at<float>();
    const float* out = space.out.at<float>();
    team.share(rows, 1, [&](int64_t row, int64_t) {
        const float* x = hidden + row * width;
        scaled_product(x, part.norm, rms_factor(x, width, eps), width, normed + row * width);
    });
    route_rows(team, space, part.route, normed, rows, ids, weights);
    const ExpertCall call = call_of(space, part, rows, ids);
    team.share(1, 1, [&](int64_t, int64_t) { group(space.experts, call); });
    ExpertRun run(call, space.experts);
    run(team);
    team.share(rows, 1, [&](int64_t row, int64_t) {
        float* total = normed + row * width;  // not needed any more
        combine_row(out + row * top_k * width, weights + row * top_k, top_k, width, total);
        for (int64_t i = 0; i < width; ++i) hidden[row * width + i] += total[i];
    });
}

extern "C" int32_t ct_route(const Route* route, const float* x, int64_t rows, int32_t* ids, float* weights, int64_t threads) {
    return status_of([&] {
        static thread_local MoeSpace mine;
        MoeSpace& space = mine;  // all threads use the space of the calling thread
        reserve_route(space, *route, rows);
        auto body = [&](Team& team) { route_rows(team, space, *route, x, rows, ids, weights); };
        const int64_t work = rows * route->product->n * route->product->k;
        run_team(work < (1 << 18) ? 1 : int(threads), ROUTE_PHASES, body);
    });
}
