// Naive matrix product c[M,N] = a[M,K] b[K,N], fp32 (sums in fp64), any strides: one dot product per output element.
#include "klineage.h"

extern "C" int run(const klineage_call *call) {
    KLINEAGE_REQUIRE(call, call->num_inputs == 2 && call->num_outputs == 1, "gemm: expects inputs a, b and output c");
    const klineage_tensor &a = call->inputs[0], &b = call->inputs[1], &c = call->outputs[0];
    KLINEAGE_REQUIRE(call, a.dtype == KLINEAGE_FLOAT32 && b.dtype == KLINEAGE_FLOAT32 && c.dtype == KLINEAGE_FLOAT32,
                     "gemm: only fp32");
    KLINEAGE_REQUIRE(call, a.num_dims == 2 && b.num_dims == 2 && c.num_dims == 2, "gemm: a, b and c must be matrices");
    const int64_t M = c.shape[0], N = c.shape[1], K = a.shape[1];
    KLINEAGE_REQUIRE(call, a.shape[0] == M && b.shape[0] == K && b.shape[1] == N, "gemm: shapes do not match");
    const float *ap = static_cast<const float *>(a.data), *bp = static_cast<const float *>(b.data);
    float *cp = static_cast<float *>(c.data);

    for (int64_t i = 0; i < M; ++i)
        for (int64_t j = 0; j < N; ++j) {
            double sum = 0.0;
            for (int64_t p = 0; p < K; ++p)
                sum += static_cast<double>(ap[i * a.stride[0] + p * a.stride[1]]) * bp[p * b.stride[0] + j * b.stride[1]];
            cp[i * c.stride[0] + j * c.stride[1]] = static_cast<float>(sum);
        }
    return 0;
}
