// Naive 2-d convolution (cross-correlation, zero padding), fp32 with sums in fp64, any strides: seven nested loops.
// y[n,f,p,q] = sum over c,r,s of x[n, c, p*stride + r - pad, q*stride + s - pad] * w[f,c,r,s]
#include "klineage.h"

extern "C" int run(const klineage_call *call) {
    KLINEAGE_REQUIRE(call, call->num_inputs == 2 && call->num_outputs == 1, "conv2d: expects inputs x, w and output y");
    const klineage_tensor &x = call->inputs[0], &w = call->inputs[1], &y = call->outputs[0];
    KLINEAGE_REQUIRE(call, x.dtype == KLINEAGE_FLOAT32 && w.dtype == KLINEAGE_FLOAT32 && y.dtype == KLINEAGE_FLOAT32,
                     "conv2d: only fp32");
    KLINEAGE_REQUIRE(call, x.num_dims == 4 && w.num_dims == 4 && y.num_dims == 4, "conv2d: x, w and y must be 4-d");
    const int64_t N = x.shape[0], C = x.shape[1], H = x.shape[2], W = x.shape[3];
    const int64_t F = w.shape[0], R = w.shape[2], S = w.shape[3], P = y.shape[2], Q = y.shape[3];
    const int64_t stride = static_cast<int64_t>(klineage_scalar_value(call, "stride", 1));
    const int64_t pad = static_cast<int64_t>(klineage_scalar_value(call, "pad", 0));
    KLINEAGE_REQUIRE(call, stride >= 1 && pad >= 0, "conv2d: stride must be positive and pad non-negative");
    KLINEAGE_REQUIRE(call, w.shape[1] == C && y.shape[0] == N && y.shape[1] == F && H + 2 * pad >= R && W + 2 * pad >= S &&
                     P == (H + 2 * pad - R) / stride + 1 && Q == (W + 2 * pad - S) / stride + 1,
                     "conv2d: shapes do not match");
    const float *xp = static_cast<const float *>(x.data), *wp = static_cast<const float *>(w.data);
    float *yp = static_cast<float *>(y.data);

    for (int64_t n = 0; n < N; ++n)
        for (int64_t f = 0; f < F; ++f)
            for (int64_t p = 0; p < P; ++p)
                for (int64_t q = 0; q < Q; ++q) {
                    double sum = 0.0;
                    for (int64_t c = 0; c < C; ++c)
                        for (int64_t r = 0; r < R; ++r)
                            for (int64_t s = 0; s < S; ++s) {
                                const int64_t h = p * stride + r - pad, i = q * stride + s - pad;
                                if (h < 0 || h >= H || i < 0 || i >= W) continue;
                                const int64_t from = n * x.stride[0] + c * x.stride[1] + h * x.stride[2] + i * x.stride[3];
                                sum += static_cast<double>(xp[from]) *
                                       wp[f * w.stride[0] + c * w.stride[1] + r * w.stride[2] + s * w.stride[3]];
                            }
                    yp[n * y.stride[0] + f * y.stride[1] + p * y.stride[2] + q * y.stride[3]] = static_cast<float>(sum);
                }
    return 0;
}
