// Gated delta rule, fp32, contiguous. Per value head with state S [D_key, D_value], per token:
//   S <- exp(g) S ; u = beta (v - S^T k) ; S <- S + k u^T ; o = scale S^T q
//
// Preconditions: contiguous tensors, gates <= 0.
#include "klineage.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace {

struct Problem {
    int64_t T, HQK, HV, D;
    float scale;
    const float *q, *k, *v, *g, *beta, *state0;  // state0 may be null
    float *o, *state;
};

// One value head: the tokens in order.
void run_head(const Problem &p, int64_t head, float *__restrict u) {
    const int64_t D = p.D, hq = head / (p.HV / p.HQK), at = head * D * D;
    float *__restrict S = p.state + at;
    if (p.state0) std::copy_n(p.state0 + at, D * D, S);
    else std::fill_n(S, D * D, 0.0f);
    for (int64_t t = 0; t < p.T; ++t) {
        const float *q = p.q + (t * p.HQK + hq) * D, *k = p.k + (t * p.HQK + hq) * D, *v = p.v + (t * p.HV + head) * D;
        const float gate = p.g[t * p.HV + head], beta = p.beta[t * p.HV + head];
        float *__restrict o = p.o + (t * p.HV + head) * D;
        // Next to g = 0 a factor exp(g) would carry its rounding error into every step; far from it S + S (exp(g) - 1) cancels.
        if (gate > -0.5f) {
            const float change = std::expm1(gate);
            for (int64_t i = 0; i < D * D; ++i) S[i] += change * S[i];
        } else {
            const float decay = std::exp(gate);
            for (int64_t i = 0; i < D * D; ++i) S[i] *= decay;
        }
        std::fill_n(u, D, 0.0f);
        for (int64_t i = 0; i < D; ++i)
            for (int64_t j = 0; j < D; ++j) u[j] += k[i] * S[i * D + j];
        for (int64_t j = 0; j < D; ++j) u[j] = beta * (v[j] - u[j]);
        for (int64_t i = 0; i < D; ++i)
            for (int64_t j = 0; j < D; ++j) S[i * D + j] += k[i] * u[j];
        std::fill_n(o, D, 0.0f);
        for (int64_t i = 0; i < D; ++i)
            for (int64_t j = 0; j < D; ++j) o[j] += q[i] * S[i * D + j];
        for (int64_t j = 0; j < D; ++j) o[j] *= p.scale;
    }
}

void run_heads(const Problem &p) {
    std::vector<float> u(p.D);
    for (int64_t h = 0; h < p.HV; ++h) run_head(p, h, u.data());
}

bool is_contiguous(const klineage_tensor &t) {
    int64_t expected = 1;
    for (int d = t.num_dims - 1; d >= 0; expected *= t.shape[d--])
        if (t.shape[d] > 1 && t.stride[d] != expected) return false;
    return true;
}

bool has_shape(const klineage_tensor &t, int64_t a, int64_t b, int64_t c = -1) {
    return t.num_dims == (c < 0 ? 2 : 3) && t.shape[0] == a && t.shape[1] == b && (c < 0 || t.shape[2] == c);
}

}  // namespace

extern "C" int run(const klineage_call *call) {
    KLINEAGE_REQUIRE(call, (call->num_inputs == 5 || call->num_inputs == 6) && call->num_outputs == 2,
                     "gdn: expects inputs q, k, v, g, beta [, state0] and outputs o, state");
    for (int i = 0; i < call->num_inputs + 2; ++i) {
        const klineage_tensor &t = i < 2 ? call->outputs[i] : call->inputs[i - 2];
        KLINEAGE_REQUIRE(call, t.dtype == KLINEAGE_FLOAT32, "gdn: only fp32 tensors");
        KLINEAGE_REQUIRE(call, is_contiguous(t), "gdn: tensors must be contiguous");
    }
    const klineage_tensor *in = call->inputs, *out = call->outputs;
    KLINEAGE_REQUIRE(call, in[0].num_dims == 3 && in[2].num_dims == 3, "gdn: q and v must be 3-d");
    const int64_t T = in[2].shape[0], HV = in[2].shape[1], D = in[2].shape[2], HQK = in[0].shape[1];
    KLINEAGE_REQUIRE(call, HQK >= 1 && HV % HQK == 0, "gdn: the value heads must be a multiple of the q/k heads");
    KLINEAGE_REQUIRE(call, has_shape(in[0], T, HQK, D) && has_shape(in[1], T, HQK, D) && has_shape(in[3], T, HV) &&
                     has_shape(in[4], T, HV) && (call->num_inputs == 5 || has_shape(in[5], HV, D, D)) &&
                     has_shape(out[0], T, HV, D) && has_shape(out[1], HV, D, D), "gdn: shapes do not match");
    if (HV == 0 || D == 0) return 0;
    auto data = [](const klineage_tensor &t) { return static_cast<float *>(t.data); };
    const double scale = klineage_scalar_value(call, "scale", 1.0 / std::sqrt(static_cast<double>(D)));
    const Problem p = {T, HQK, HV, D, static_cast<float>(scale),
                       data(in[0]), data(in[1]), data(in[2]), data(in[3]), data(in[4]),
                       call->num_inputs == 6 ? data(in[5]) : nullptr, data(out[0]), data(out[1])};
    run_heads(p);
    return 0;
}
