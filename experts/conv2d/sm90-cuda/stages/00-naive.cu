// Stage 00, naive: one thread per output element runs the loops over channels and taps, straight from global memory.
//
// Neighbouring threads own neighbouring elements of y in memory order, so stores coalesce in both layouts; every input element is
// read 9 * 128 times through the caches.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "klineage.h"

namespace {

constexpr int kC = 64, kF = 128, kThreads = 256;

struct Strides {
    long long n, c, h, w;
};

__global__ void __launch_bounds__(kThreads) conv_kernel(const __half *x, const __half *w, __half *y, int n_size, int height,
                                                        int width, Strides xs, Strides ws, Strides ys, bool channels_last) {
    const int index = blockIdx.x * kThreads + threadIdx.x, plane = height * width;
    if (index >= n_size * kF * plane) return;
    const int n = index / (kF * plane), rest = index % (kF * plane);
    const int f = channels_last ? rest % kF : rest / plane, pixel = channels_last ? rest / kF : rest % plane;
    const int p = pixel / width, q = pixel % width;
    float sum = 0;
    for (int r = 0; r < 3; ++r)
        for (int s = 0; s < 3; ++s) {
            const int h = p + r - 1, v = q + s - 1;
            if (h < 0 || h >= height || v < 0 || v >= width) continue;
            for (int c = 0; c < kC; ++c)
                sum += __half2float(x[n * xs.n + c * xs.c + h * xs.h + v * xs.w]) *
                       __half2float(w[f * ws.n + c * ws.c + r * ws.h + s * ws.w]);
        }
    y[n * ys.n + f * ys.c + p * ys.h + q * ys.w] = __float2half_rn(sum);
}

Strides strides_of(const klineage_tensor &t) { return {t.stride[0], t.stride[1], t.stride[2], t.stride[3]}; }

}  // namespace

extern "C" int run(const klineage_call *call) {
    KLINEAGE_REQUIRE(call, call->abi_version == KLINEAGE_ABI_VERSION, "conv2d: unknown ABI version");
    KLINEAGE_REQUIRE(call, call->num_inputs == 2 && call->num_outputs == 1, "conv2d: needs x, w -> y");
    const klineage_tensor &x = call->inputs[0], &w = call->inputs[1], &y = call->outputs[0];
    KLINEAGE_REQUIRE(call, x.num_dims == 4 && w.num_dims == 4 && y.num_dims == 4, "conv2d: tensors are 4-D");
    KLINEAGE_REQUIRE(call, x.dtype == KLINEAGE_FLOAT16 && w.dtype == KLINEAGE_FLOAT16 && y.dtype == KLINEAGE_FLOAT16,
                     "conv2d: fp16 only");
    KLINEAGE_REQUIRE(call, klineage_scalar_value(call, "stride", 1) == 1 && klineage_scalar_value(call, "pad", 1) == 1,
                     "conv2d: stride 1 and padding 1 only");
    KLINEAGE_REQUIRE(call, x.shape[1] == kC && w.shape[1] == kC && w.shape[0] == kF && w.shape[2] == 3 && w.shape[3] == 3,
                     "conv2d: 64 input channels, 128 filters of 3x3 only");
    const int64_t n = x.shape[0], h = x.shape[2], width = x.shape[3], size = n * h * width * kF;
    KLINEAGE_REQUIRE(call, size >= 1 && size < (1ll << 31), "conv2d: size out of range");
    KLINEAGE_REQUIRE(call, y.shape[0] == n && y.shape[1] == kF && y.shape[2] == h && y.shape[3] == width,
                     "conv2d: output shape differs from the input's");

    conv_kernel<<<(size + kThreads - 1) / kThreads, kThreads, 0, static_cast<cudaStream_t>(call->stream)>>>(
        static_cast<const __half *>(x.data), static_cast<const __half *>(w.data), static_cast<__half *>(y.data), n, h,
        width, strides_of(x), strides_of(w), strides_of(y), y.stride[1] == 1);
    const cudaError_t status = cudaGetLastError();
    KLINEAGE_REQUIRE(call, status == cudaSuccess, cudaGetErrorString(status));
    return 0;
}
