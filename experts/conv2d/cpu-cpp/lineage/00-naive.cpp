// 2-d convolution y[N,F,P,Q] = x[N,C,H,W] * w[F,C,R,S] (cross-correlation, zero padding), fp32, layout nchw.
//
// Direct convolution.
//
// Preconditions: contiguous nchw tensors; any stride, padding, filter and tail.
#include "klineage.h"

#include <cstdint>

namespace {

struct Problem {
    int64_t N, C, H, W, F, R, S, P, Q, stride, pad;
    const float *x, *w;
    float *y;
};

// Element h, w of a plane of x; zero outside of it.
inline float at(const Problem &p, const float *x, int64_t h, int64_t w) {
    return h >= 0 && h < p.H && w >= 0 && w < p.W ? x[h * p.W + w] : 0.0f;
}

// One row of output of one filter.
void convolve_row(const Problem &p, int64_t n, int64_t f, int64_t row) {
    for (int64_t q = 0; q < p.Q; ++q) {
        const float *x = p.x + n * p.C * p.H * p.W, *w = p.w + f * p.C * p.R * p.S;
        float total = 0.0f;
        for (int64_t c = 0; c < p.C; ++c, x += p.H * p.W)
            for (int64_t r = 0; r < p.R; ++r)
                for (int64_t s = 0; s < p.S; ++s, ++w)
                    total += at(p, x, row * p.stride + r - p.pad, q * p.stride + s - p.pad) * *w;
        p.y[((n * p.F + f) * p.P + row) * p.Q + q] = total;
    }
}

bool is_contiguous(const klineage_tensor &t) {
    int64_t expected = 1;
    for (int d = t.num_dims - 1; d >= 0; expected *= t.shape[d--])
        if (t.shape[d] > 1 && t.stride[d] != expected) return false;
    return true;
}

}  // namespace

extern "C" int run(const klineage_call *call) {
    KLINEAGE_REQUIRE(call, call->num_inputs == 2 && call->num_outputs == 1, "conv2d: expects inputs x, w and output y");
    const klineage_tensor &x = call->inputs[0], &w = call->inputs[1], &y = call->outputs[0];
    KLINEAGE_REQUIRE(call, x.dtype == KLINEAGE_FLOAT32 && w.dtype == KLINEAGE_FLOAT32 && y.dtype == KLINEAGE_FLOAT32,
                     "conv2d: only fp32");
    KLINEAGE_REQUIRE(call, x.num_dims == 4 && w.num_dims == 4 && y.num_dims == 4, "conv2d: x, w and y must be 4-d");
    Problem p = {x.shape[0], x.shape[1], x.shape[2], x.shape[3], w.shape[0], w.shape[2], w.shape[3], y.shape[2], y.shape[3],
                 static_cast<int64_t>(klineage_scalar_value(call, "stride", 1)),
                 static_cast<int64_t>(klineage_scalar_value(call, "pad", 0)), static_cast<const float *>(x.data),
                 static_cast<const float *>(w.data), static_cast<float *>(y.data)};
    KLINEAGE_REQUIRE(call, p.stride >= 1 && p.pad >= 0, "conv2d: stride must be positive and pad non-negative");
    KLINEAGE_REQUIRE(call, w.shape[1] == p.C && y.shape[0] == p.N && y.shape[1] == p.F && p.H + 2 * p.pad >= p.R &&
                     p.W + 2 * p.pad >= p.S && p.P == (p.H + 2 * p.pad - p.R) / p.stride + 1 &&
                     p.Q == (p.W + 2 * p.pad - p.S) / p.stride + 1, "conv2d: shapes do not match");
    if (p.N * p.F * p.P * p.Q == 0) return 0;
    KLINEAGE_REQUIRE(call, is_contiguous(x) && is_contiguous(w) && is_contiguous(y),
                     "conv2d: only layout nchw (contiguous tensors)");

    for (int64_t n = 0; n < p.N; ++n)
        for (int64_t f = 0; f < p.F; ++f)
            for (int64_t row = 0; row < p.P; ++row) convolve_row(p, n, f, row);
    return 0;
}
