#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "klineage.h"

namespace {

constexpr int kC = 64, kF = 128, kTaps = 9;
constexpr int kTM = 32, kTN = 16, kThreads = kTM * kTN;  // pixels x filters of a tile, one thread per output
constexpr int kPadA = 2;  // rows of 33 words: lanes on different pixels use different banks
constexpr int kPadB = 8;  // rows of 36 words: spreads the taps over the banks when the panel is filled
constexpr int kDepth = kC * kTaps;

static_assert(kF % kTN == 0, "whole filter tiles");
static_assert((kTM * kC) % kThreads == 0 && (kTN * kDepth) % kThreads == 0, "even fills");

struct Strides {
    int n, c, h, w;
};
struct Problem {
    const __half *x, *w;
    __half *y;
    int height, width, plane, pixels;  // pixels of all images
    Strides xs, ys;
};

template <bool kChannelsLast>
__global__ void __launch_bounds__(kThreads, 3) conv_kernel(const Problem g) {
    __shared__ int in[kTM], out[kTM], py[kTM], px[kTM];
    __shared__ __align__(16) __half a[kTM][kC + kPadA];
    __shared__ __align__(16) __half b[kTN][kTaps][kC + kPadB];

    const int t = threadIdx.x;
    const int m = kChannelsLast ? t / kTN : t % kTM, n = kChannelsLast ? t % kTN : t / kTM;
    const int f0 = static_cast<int>(blockIdx.y) * kTN;

    // The rows of the tile: divisions once per row.
    for (int i = t; i < kTM; i += kThreads) {
        const int row = static_cast<int>(blockIdx.x) * kTM + i;
        const int image = row / g.plane, pixel = row % g.plane;
        const int p = pixel / g.width, q = pixel % g.width;
        py[i] = p - 1;
        px[i] = q - 1;
        in[i] = image * g.xs.n + (p - 1) * g.xs.h + (q - 1) * g.xs.w;  // used only where inside
        out[i] = row < g.pixels ? image * g.ys.n + p * g.ys.h + q * g.ys.w : -1;
    }

    // The weights of the tile's filters for all taps: one contiguous range of w in either layout.
    const __half *weights = g.w + f0 * kDepth;
#pragma unroll 6
    for (int e = t; e < kTN * kDepth; e += kThreads) {
        const int j = e / kDepth, k = e % kDepth;
        const int c = kChannelsLast ? k % kC : k / kTaps, tap = kChannelsLast ? k / kC : k % kTaps;
        b[j][tap][c] = weights[e];
    }
    __syncthreads();  // table full

    float sum = 0;
#pragma unroll 1
    for (int tap = 0; tap < kTaps; ++tap) {
        const int r = tap / 3, s = tap % 3;
        const int shift = r * g.xs.h + s * g.xs.w;
#pragma unroll
        for (int e = t; e < kTM * kC; e += kThreads) {
            const int i = kChannelsLast ? e / kC : e % kTM, c = kChannelsLast ? e % kC : e / kTM;
            const bool inside = out[i] >= 0 && static_cast<unsigned>(py[i] + r) < static_cast<unsigned>(g.height) &&
                                static_cast<unsigned>(px[i] + s) < static_cast<unsigned>(g.width);
            a[i][c] = inside ? g.x[in[i] + shift + c * g.xs.c] : __float2half_rn(0.f);
        }
        __syncthreads();  // panels full

        const __half2 *row = reinterpret_cast<const __half2 *>(&a[m][0]);
        const __half2 *column = reinterpret_cast<const __half2 *>(&b[n][tap][0]);
#pragma unroll
        for (int k = 0; k < kC / 2; ++k) {
            const float2 u = __half22float2(row[k]), v = __half22float2(column[k]);
            sum += u.x * v.x;
            sum += u.y * v.y;
        }
        __syncthreads();  // before the refill
    }

    if (out[m] >= 0) g.y[out[m] + (f0 + n) * g.ys.c] = __float2half_rn(sum);
}

Strides strides_of(const klineage_tensor &t) {
    return {static_cast<int>(t.stride[0]), static_cast<int>(t.stride[1]), static_cast<int>(t.stride[2]), static_cast<int>(t.stride[3])};
}

// In either layout; the stride of a dimension of one element does not matter.
bool has_strides(const klineage_tensor &t, bool channels_last) {
    int64_t expected = 1;
    const int nchw[4] = {3, 2, 1, 0}, nhwc[4] = {1, 3, 2, 0};
    for (int i = 0; i < 4; ++i) {
        const int dim = channels_last ? nhwc[i] : nchw[i];
        if (t.shape[dim] != 1 && t.stride[dim] != expected) return false;
        expected *= t.shape[dim];
    }
    return true;
}

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
    const int64_t n = x.shape[0], h = x.shape[2], width = x.shape[3], pixels = n * h * width;
    KLINEAGE_REQUIRE(call, pixels >= 1 && pixels * kF < (1ll << 31), "conv2d: size out of range");
    KLINEAGE_REQUIRE(call, y.shape[0] == n && y.shape[1] == kF && y.shape[2] == h && y.shape[3] == width,
                     "conv2d: output shape differs from the input's");
    const bool nhwc = has_strides(x, true) && has_strides(w, true) && has_strides(y, true);
    KLINEAGE_REQUIRE(call, nhwc || (has_strides(x, false) && has_strides(w, false) && has_strides(y, false)),
                     "conv2d: x, w and y must all be contiguous or all channels_last");
    KLINEAGE_REQUIRE(call, (reinterpret_cast<uintptr_t>(x.data) | reinterpret_cast<uintptr_t>(w.data) |
                            reinterpret_cast<uintptr_t>(y.data)) % 16 == 0, "conv2d: pointers must be 16-byte aligned");

    const Problem g{static_cast<const __half *>(x.data), static_cast<const __half *>(w.data), static_cast<__half *>(y.data),
                    static_cast<int>(h), static_cast<int>(width), static_cast<int>(h * width), static_cast<int>(pixels),
                    strides_of(x), strides_of(y)};
    const dim3 grid((g.pixels + kTM - 1) / kTM, kF / kTN);
    const cudaStream_t stream = static_cast<cudaStream_t>(call->stream);
    if (nhwc)
        conv_kernel<true><<<grid, kThreads, 0, stream>>>(g);
    else
        conv_kernel<false><<<grid, kThreads, 0, stream>>>(g);
    const cudaError_t status = cudaGetLastError();
    KLINEAGE_REQUIRE(call, status == cudaSuccess, cudaGetErrorString(status));
    return 0;
}
