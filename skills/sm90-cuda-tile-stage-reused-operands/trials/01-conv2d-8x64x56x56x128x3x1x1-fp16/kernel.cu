#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "klineage.h"

namespace {

constexpr int kC = 64, kF = 128, kTaps = 9;
constexpr int kTile = 8, kPixels = kTile * kTile;            // output pixels of a block
constexpr int kHalo = kTile + 2, kPositions = kHalo * kHalo;  // input pixels of a block
constexpr int kFilters = 8, kPasses = 4;                      // filters of a staged tile, tiles of a block
constexpr int kGroups = kF / (kFilters * kPasses);
constexpr int kThreads = kPixels * kFilters;
constexpr int kPitchX = kC + 8;  // halves; 8 neighbouring pixels fall into different banks
constexpr int kPitchW = kC + 4;  // floats; spreads the transposing writes over the banks

struct Strides {
    int n, c, h, w;
};
struct Problem {
    const __half *x, *w;
    __half *y;
    int height, width, tiles_h, tiles_w;
    Strides xs, ws, ys;
    bool channels_last;
};

__device__ __forceinline__ float2 pair_of(unsigned int bits) {
    return __half22float2(*reinterpret_cast<const __half2 *>(&bits));
}

__global__ void __launch_bounds__(kThreads, 3) conv_kernel(const Problem g) {
    __shared__ __align__(16) __half tile_x[kPositions][kPitchX];
    __shared__ __align__(16) float tile_w[kFilters][kTaps][kPitchW];

    const int tid = threadIdx.x;
    const int f0 = static_cast<int>(blockIdx.x % kGroups) * (kFilters * kPasses);
    int tile = static_cast<int>(blockIdx.x / kGroups);
    const int q0 = tile % g.tiles_w * kTile;
    tile /= g.tiles_w;
    const int p0 = tile % g.tiles_h * kTile;
    const int n = tile / g.tiles_h;

    // The input of all passes, channels innermost, two channels a write.
    const __half *image = g.x + n * g.xs.n;
    for (int i = tid; i < kPositions * (kC / 2); i += kThreads) {
        const int pos = g.channels_last ? i / (kC / 2) : i % kPositions;
        const int c = 2 * (g.channels_last ? i % (kC / 2) : i / kPositions);
        const int h = p0 + pos / kHalo - 1, w = q0 + pos % kHalo - 1;
        __half2 value = __float2half2_rn(0.0f);
        if (h >= 0 && h < g.height && w >= 0 && w < g.width) {
            const __half *src = image + c * g.xs.c + h * g.xs.h + w * g.xs.w;
            value = __halves2half2(src[0], src[g.xs.c]);
        }
        *reinterpret_cast<__half2 *>(&tile_x[pos][c]) = value;
    }

    const int fl = tid / kPixels, pixel = tid % kPixels;  // a warp has one filter
    const int ty = pixel / kTile, tx = pixel % kTile;
    const int p = p0 + ty, q = q0 + tx;
    const bool has_output = p < g.height && q < g.width;

    for (int pass = 0; pass < kPasses; ++pass) {
        const int fp = f0 + pass * kFilters;
        __syncthreads();  // old filters done
        for (int i = tid; i < kFilters * kTaps * kC; i += kThreads) {
            const int row = i / (kTaps * kC), e = i % (kTaps * kC);
            const int c = g.channels_last ? e % kC : e / kTaps;
            const int tap = g.channels_last ? e / kC : e % kTaps;
            tile_w[row][tap][c] =
                __half2float(g.w[(fp + row) * g.ws.n + c * g.ws.c + (tap / 3) * g.ws.h + (tap % 3) * g.ws.w]);
        }
        __syncthreads();  // input and new filters visible

        if (has_output) {
            float sum = 0;
#pragma unroll 1
            for (int r = 0; r < 3; ++r)
                for (int s = 0; s < 3; ++s) {
                    const int h = p + r - 1, w = q + s - 1;
                    if (h < 0 || h >= g.height || w < 0 || w >= g.width) continue;
                    const uint4 *xv = reinterpret_cast<const uint4 *>(&tile_x[(ty + r) * kHalo + tx + s][0]);
                    const float4 *wv = reinterpret_cast<const float4 *>(&tile_w[fl][r * 3 + s][0]);
#pragma unroll
                    for (int c = 0; c < kC / 8; ++c) {
                        const uint4 v = xv[c];
                        const float4 w0 = wv[2 * c], w1 = wv[2 * c + 1];
                        const float2 a0 = pair_of(v.x), a1 = pair_of(v.y), a2 = pair_of(v.z), a3 = pair_of(v.w);
                        sum += a0.x * w0.x;
                        sum += a0.y * w0.y;
                        sum += a1.x * w0.z;
                        sum += a1.y * w0.w;
                        sum += a2.x * w1.x;
                        sum += a2.y * w1.y;
                        sum += a3.x * w1.z;
                        sum += a3.y * w1.w;
                    }
                }
            g.y[n * g.ys.n + (fp + fl) * g.ys.c + p * g.ys.h + q * g.ys.w] = __float2half_rn(sum);
        }
    }
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

    const int tiles_h = static_cast<int>((h + kTile - 1) / kTile), tiles_w = static_cast<int>((width + kTile - 1) / kTile);
    const Problem g{static_cast<const __half *>(x.data), static_cast<const __half *>(w.data), static_cast<__half *>(y.data),
                    static_cast<int>(h), static_cast<int>(width), tiles_h, tiles_w,
                    strides_of(x), strides_of(w), strides_of(y), nhwc};
    const unsigned int blocks = static_cast<unsigned int>(n * tiles_h * tiles_w * kGroups);
    conv_kernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(call->stream)>>>(g);
    const cudaError_t status = cudaGetLastError();
    KLINEAGE_REQUIRE(call, status == cudaSuccess, cudaGetErrorString(status));
    return 0;
}
