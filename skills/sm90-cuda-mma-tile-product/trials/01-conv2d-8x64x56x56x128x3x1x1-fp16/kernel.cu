#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "klineage.h"

namespace {

constexpr int kC = 64, kF = 128, kTileM = 64, kTileF = 64, kThreads = 256;
constexpr int kPitch = kC + 8;             // an odd multiple of 16 bytes: fragment loads without bank conflicts
constexpr int kWarpF = 16, kWarpM = 32;    // a warp owns 16 filters (rows) x 32 pixels (columns)
constexpr int kWarpsF = kTileF / kWarpF;   // warps along the filters
static_assert(kPitch * 2 % 32 == 16, "pitch must be an odd multiple of 16 bytes");
static_assert(kWarpF % 16 == 0 && kWarpM % 8 == 0 && kC % 16 == 0, "tiles must be multiples of the mma shape");
static_assert((kTileF / kWarpF) * (kTileM / kWarpM) * 32 == kThreads, "the warps must cover the tile");

struct Strides {
    int n, c, h, w;
};
struct Problem {
    const __half *x, *w;
    __half *y;
    int height, width, plane, pixels;  // pixels of all images
    Strides xs, ws, ys;
    bool channels_last;
};

// Where the pixels of the tile lie: the input element of their upper left tap, and the output element of filter 0.
struct PixelTable {
    int input[kTileM], output[kTileM], p[kTileM], q[kTileM];

    __device__ void fill(const Problem &g, int first) {
        for (int m = threadIdx.x; m < kTileM; m += blockDim.x) {
            const int pixel = first + m, n = pixel / g.plane, rest = pixel % g.plane;
            p[m] = rest / g.width, q[m] = rest % g.width;
            input[m] = n * g.xs.n + (p[m] - 1) * g.xs.h + (q[m] - 1) * g.xs.w;
            output[m] = pixel < g.pixels ? n * g.ys.n + p[m] * g.ys.h + q[m] * g.ys.w : -1;
        }
    }
    __device__ bool inside(const Problem &g, int m, int r, int s) const {
        const int h = p[m] + r - 1, w = q[m] + s - 1;
        return output[m] >= 0 && h >= 0 && h < g.height && w >= 0 && w < g.width;
    }
};

// d[16x8] += a[16x16] * b[16x8], fp16 operands, fp32 sums.
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Two neighbours in depth as one register.
__device__ __forceinline__ uint32_t u32(const __half *p) { return *reinterpret_cast<const uint32_t *>(p); }

__global__ void __launch_bounds__(kThreads) conv_kernel(const Problem g) {
    __shared__ PixelTable pixel;
    __shared__ __align__(16) __half a[kTileM][kPitch];
    __shared__ __align__(16) __half b[kTileF][kPitch];
    const int first_f = blockIdx.y * kTileF;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int group = lane / 4, quad = lane % 4 * 2;
    const int f0 = warp % kWarpsF * kWarpF, m0 = warp / kWarpsF * kWarpM;
    pixel.fill(g, blockIdx.x * kTileM);
    __syncthreads();
    float sum[kWarpF / 16][kWarpM / 8][4] = {};
    for (int tap = 0; tap < 9; ++tap) {
        const int r = tap / 3, s = tap % 3;
        for (int e = threadIdx.x; e < kTileM * kC; e += kThreads) {
            const int m = g.channels_last ? e / kC : e % kTileM, c = g.channels_last ? e % kC : e / kTileM;
            a[m][c] = pixel.inside(g, m, r, s) ? g.x[pixel.input[m] + r * g.xs.h + s * g.xs.w + c * g.xs.c] : __half(0.0f);
        }
        for (int e = threadIdx.x; e < kTileF * kC; e += kThreads)
            b[e / kC][e % kC] = g.w[(first_f + e / kC) * g.ws.n + e % kC * g.ws.c + r * g.ws.h + s * g.ws.w];
        __syncthreads();
#pragma unroll
        for (int kk = 0; kk < kC; kk += 16) {
            uint32_t filters[kWarpF / 16][4], pixels[kWarpM / 8][2];
#pragma unroll
            for (int i = 0; i < kWarpF / 16; ++i)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    filters[i][e] = u32(&b[f0 + i * 16 + group + e % 2 * 8][kk + quad + e / 2 * 8]);
#pragma unroll
            for (int j = 0; j < kWarpM / 8; ++j)
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    pixels[j][e] = u32(&a[m0 + j * 8 + group][kk + quad + e * 8]);
#pragma unroll
            for (int i = 0; i < kWarpF / 16; ++i)
#pragma unroll
                for (int j = 0; j < kWarpM / 8; ++j) mma(sum[i][j], filters[i], pixels[j]);
        }
        __syncthreads();
    }
    // sum[i][j][e]: filter f0 + i*16 + group + e/2*8, pixel m0 + j*8 + quad + e%2. In nchw with an even plane the two
    // pixels of a pair lie in one image, side by side and on 4 bytes, and both exist or neither does.
    const bool pairs = !g.channels_last && g.plane % 2 == 0;
#pragma unroll
    for (int i = 0; i < kWarpF / 16; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int offset = (first_f + f0 + i * 16 + group + half * 8) * g.ys.c;
#pragma unroll
            for (int j = 0; j < kWarpM / 8; ++j) {
                const int m = m0 + j * 8 + quad;
                const float low = sum[i][j][half * 2], high = sum[i][j][half * 2 + 1];
                const int out0 = pixel.output[m], out1 = pixel.output[m + 1];
                if (pairs) {
                    if (out0 >= 0) *reinterpret_cast<__half2 *>(g.y + out0 + offset) = __floats2half2_rn(low, high);
                } else {
                    if (out0 >= 0) g.y[out0 + offset] = __float2half_rn(low);
                    if (out1 >= 0) g.y[out1 + offset] = __float2half_rn(high);
                }
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

    const Problem g{static_cast<const __half *>(x.data), static_cast<const __half *>(w.data), static_cast<__half *>(y.data),
                    static_cast<int>(h), static_cast<int>(width), static_cast<int>(h * width), static_cast<int>(pixels),
                    strides_of(x), strides_of(w), strides_of(y), nhwc};
    conv_kernel<<<dim3((g.pixels + kTileM - 1) / kTileM, kF / kTileF), kThreads, 0, static_cast<cudaStream_t>(call->stream)>>>(g);
    const cudaError_t status = cudaGetLastError();
    KLINEAGE_REQUIRE(call, status == cudaSuccess, cudaGetErrorString(status));
    return 0;
}
