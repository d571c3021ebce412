// Naive top-k of each row of x[R,C], fp32, any strides: k passes, each takes the largest element not taken before.
#include "klineage.h"
#include <vector>

extern "C" int run(const klineage_call *call) {
    KLINEAGE_REQUIRE(call, call->num_inputs == 1 && call->num_outputs == 2, "topk: expects input x, outputs values, indices");
    const klineage_tensor &x = call->inputs[0], &values = call->outputs[0], &indices = call->outputs[1];
    KLINEAGE_REQUIRE(call, x.dtype == KLINEAGE_FLOAT32 && values.dtype == KLINEAGE_FLOAT32 && indices.dtype == KLINEAGE_INT64,
                     "topk: x and values must be fp32, indices int64");
    KLINEAGE_REQUIRE(call, x.num_dims == 2 && values.num_dims == 2 && indices.num_dims == 2, "topk: tensors must be 2-d");
    const int64_t R = x.shape[0], C = x.shape[1], k = values.shape[1];
    KLINEAGE_REQUIRE(call, values.shape[0] == R && indices.shape[0] == R && indices.shape[1] == k && k <= C,
                     "topk: shapes do not match");
    const float *xp = static_cast<const float *>(x.data);
    float *vp = static_cast<float *>(values.data);
    int64_t *ip = static_cast<int64_t *>(indices.data);

    for (int64_t r = 0; r < R; ++r) {
        std::vector<bool> taken(C, false);
        for (int64_t j = 0; j < k; ++j) {
            int64_t best = -1;
            for (int64_t c = 0; c < C; ++c)
                if (!taken[c] && (best < 0 || xp[r * x.stride[0] + c * x.stride[1]] > xp[r * x.stride[0] + best * x.stride[1]]))
                    best = c;
            taken[best] = true;
            vp[r * values.stride[0] + j * values.stride[1]] = xp[r * x.stride[0] + best * x.stride[1]];
            ip[r * indices.stride[0] + j * indices.stride[1]] = best;
        }
    }
    return 0;
}
