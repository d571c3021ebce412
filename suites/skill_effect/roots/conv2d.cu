// Naive: one thread computes one element of y with the loops over taps and channels; channels are last in memory.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "klineage.h"

namespace {

struct Problem {
    const half *x, *w;
    half *y;
    int channels, height, width, filters, size, stride, pad, out_height, out_width, elements;
};

__global__ void conv(const Problem g) {
    const int index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= g.elements) return;
    const int f = index % g.filters, q = index / g.filters % g.out_width;
    const int p = index / g.filters / g.out_width % g.out_height, n = index / g.filters / g.out_width / g.out_height;
    float sum = 0.f;
    for (int r = 0; r < g.size; ++r)
        for (int s = 0; s < g.size; ++s) {
            const int h = p * g.stride + r - g.pad, w = q * g.stride + s - g.pad;
            if (h < 0 || h >= g.height || w < 0 || w >= g.width) continue;
            const half *from = g.x + ((size_t(n) * g.height + h) * g.width + w) * g.channels;
            const half *taps = g.w + ((size_t(f) * g.size + r) * g.size + s) * g.channels;
            for (int c = 0; c < g.channels; ++c) sum += __half2float(from[c]) * __half2float(taps[c]);
        }
    g.y[index] = __float2half(sum);
}

bool is_channels_last(const klineage_tensor &t) {
    return t.stride[1] == 1 && t.stride[3] == t.shape[1] && t.stride[2] == t.shape[3] * t.shape[1];
}

}  // namespace

extern "C" int run(const klineage_call *call) {
    KLINEAGE_REQUIRE(call, call->num_inputs == 2 && call->num_outputs == 1, "conv2d reads x and w and writes y");
    const klineage_tensor &x = call->inputs[0], &w = call->inputs[1], &y = call->outputs[0];
    for (const klineage_tensor *t : {&x, &w, &y})
        KLINEAGE_REQUIRE(call, t->dtype == KLINEAGE_FLOAT16 && is_channels_last(*t), "conv2d: fp16, channels last");
    const Problem g{static_cast<const half *>(x.data), static_cast<const half *>(w.data), static_cast<half *>(y.data),
                    int(x.shape[1]), int(x.shape[2]), int(x.shape[3]), int(w.shape[0]), int(w.shape[2]),
                    int(klineage_scalar_value(call, "stride", 1)), int(klineage_scalar_value(call, "pad", 0)),
                    int(y.shape[2]), int(y.shape[3]), int(y.shape[0] * y.shape[1] * y.shape[2] * y.shape[3])};
    conv<<<(g.elements + 255) / 256, 256, 0, static_cast<cudaStream_t>(call->stream)>>>(g);
    KLINEAGE_REQUIRE(call, cudaGetLastError() == cudaSuccess, "conv2d: the launch failed");
    return 0;
}
