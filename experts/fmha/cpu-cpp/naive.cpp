// Naive attention o[B,H,S,D] = softmax(scale q k^T) v, fp32 (inner arithmetic in fp64), any strides: per query all
// scores, their maximum, the exponentials, the weighted sum of the values. With "causal" query i sees keys 0..i.
#include "klineage.h"
#include <algorithm>
#include <cmath>
#include <vector>

extern "C" int run(const klineage_call *call) {
    KLINEAGE_REQUIRE(call, call->num_inputs == 3 && call->num_outputs == 1, "fmha: expects inputs q, k, v and output o");
    const klineage_tensor &q = call->inputs[0], &k = call->inputs[1], &v = call->inputs[2], &o = call->outputs[0];
    for (const klineage_tensor *t : {&q, &k, &v, &o}) {
        KLINEAGE_REQUIRE(call, t->dtype == KLINEAGE_FLOAT32 && t->num_dims == 4, "fmha: only 4-d fp32 tensors");
        for (int d = 0; d < 4; ++d) KLINEAGE_REQUIRE(call, t->shape[d] == q.shape[d], "fmha: shapes do not match");
    }
    const int64_t B = q.shape[0], H = q.shape[1], S = q.shape[2], D = q.shape[3];
    const double scale = klineage_scalar_value(call, "scale", 1.0 / std::sqrt(static_cast<double>(D)));
    const bool causal = klineage_scalar_value(call, "causal", 0) != 0;
    auto row = [](const klineage_tensor &t, int64_t b, int64_t h, int64_t s) {
        return static_cast<float *>(t.data) + b * t.stride[0] + h * t.stride[1] + s * t.stride[2];
    };
    std::vector<double> p(S);

    for (int64_t b = 0; b < B; ++b)
        for (int64_t h = 0; h < H; ++h)
            for (int64_t i = 0; i < S; ++i) {
                const int64_t keys = causal ? i + 1 : S;
                double largest = -INFINITY, sum = 0.0;
                for (int64_t j = 0; j < keys; ++j) {
                    double dot = 0.0;
                    for (int64_t d = 0; d < D; ++d)
                        dot += static_cast<double>(row(q, b, h, i)[d * q.stride[3]]) * row(k, b, h, j)[d * k.stride[3]];
                    p[j] = scale * dot;
                    largest = std::max(largest, p[j]);
                }
                for (int64_t j = 0; j < keys; ++j) sum += p[j] = std::exp(p[j] - largest);
                for (int64_t d = 0; d < D; ++d) {
                    double acc = 0.0;
                    for (int64_t j = 0; j < keys; ++j) acc += p[j] * row(v, b, h, j)[d * v.stride[3]];
                    row(o, b, h, i)[d * o.stride[3]] = static_cast<float>(acc / sum);
                }
            }
    return 0;
}
