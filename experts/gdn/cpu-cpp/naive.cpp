// Naive gated delta rule, fp32, any strides: the recurrence token by token, one value head after the other.
// S <- exp(g) S ; u = beta (v - S^T k) ; S <- S + k u^T ; o = scale S^T q       (S is [D_key, D_value])
#include "klineage.h"
#include <cmath>
#include <vector>

static float *at(const klineage_tensor &t, int64_t i, int64_t j, int64_t d = 0) {
    return static_cast<float *>(t.data) + i * t.stride[0] + j * t.stride[1] + (t.num_dims == 3 ? d * t.stride[2] : 0);
}

extern "C" int run(const klineage_call *call) {
    KLINEAGE_REQUIRE(call, (call->num_inputs == 5 || call->num_inputs == 6) && call->num_outputs == 2,
                     "gdn: expects inputs q, k, v, g, beta [, state0] and outputs o, state");
    for (int i = 0; i < call->num_inputs; ++i)
        KLINEAGE_REQUIRE(call, call->inputs[i].dtype == KLINEAGE_FLOAT32 &&
                         call->inputs[i].num_dims == (i == 3 || i == 4 ? 2 : 3),
                         "gdn: only fp32; g and beta are 2-d, all else 3-d");
    for (int i = 0; i < 2; ++i)
        KLINEAGE_REQUIRE(call, call->outputs[i].dtype == KLINEAGE_FLOAT32 && call->outputs[i].num_dims == 3,
                         "gdn: o and state must be 3-d fp32");
    const klineage_tensor &q = call->inputs[0], &k = call->inputs[1], &v = call->inputs[2], &g = call->inputs[3];
    const klineage_tensor &beta = call->inputs[4], &o = call->outputs[0], &state = call->outputs[1];
    const int64_t T = v.shape[0], HV = v.shape[1], D = v.shape[2], HQK = q.shape[1];
    KLINEAGE_REQUIRE(call, HQK >= 1 && HV % HQK == 0 && q.shape[2] == D && k.shape[1] == HQK && q.shape[0] == T,
                     "gdn: HV must be a multiple of HQK, and q, k, v agree in T and D");
    const float scale = static_cast<float>(klineage_scalar_value(call, "scale", 1.0 / std::sqrt(static_cast<double>(D))));
    std::vector<float> S(D * D), u(D);

    for (int64_t h = 0; h < HV; ++h) {
        const int64_t hq = h / (HV / HQK);
        for (int64_t i = 0; i < D; ++i)
            for (int64_t j = 0; j < D; ++j) S[i * D + j] = call->num_inputs == 6 ? *at(call->inputs[5], h, i, j) : 0.0f;
        for (int64_t t = 0; t < T; ++t) {
            const float decay = std::exp(*at(g, t, h));
            for (int64_t i = 0; i < D * D; ++i) S[i] *= decay;
            for (int64_t j = 0; j < D; ++j) {
                float dot = 0.0f;
                for (int64_t i = 0; i < D; ++i) dot += S[i * D + j] * *at(k, t, hq, i);
                u[j] = *at(beta, t, h) * (*at(v, t, h, j) - dot);
            }
            for (int64_t i = 0; i < D; ++i)
                for (int64_t j = 0; j < D; ++j) S[i * D + j] += *at(k, t, hq, i) * u[j];
            for (int64_t j = 0; j < D; ++j) {
                float dot = 0.0f;
                for (int64_t i = 0; i < D; ++i) dot += S[i * D + j] * *at(q, t, hq, i);
                *at(o, t, h, j) = scale * dot;
            }
        }
        for (int64_t i = 0; i < D; ++i)
            for (int64_t j = 0; j < D; ++j) *at(state, h, i, j) = S[i * D + j];
    }
    return 0;
}
