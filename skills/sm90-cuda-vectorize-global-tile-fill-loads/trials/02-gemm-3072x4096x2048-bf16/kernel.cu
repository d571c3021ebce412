#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "klineage.h"

namespace {

using bf16 = __nv_bfloat16;

constexpr int kTileM = 128, kTileN = 128, kTileK = 16;
constexpr int kThreads = 256;
constexpr int kPadA = 4;                                // keeps rows of tile_a 16-byte aligned, spreads its banks
constexpr int kRows = 8, kCols = 8;                     // of results per thread
constexpr int kLanes = 16 / int(sizeof(bf16));          // elements of a 16-byte chunk
constexpr int kChunksA = kTileK / kLanes;               // chunks per row of the tile of a
constexpr int kChunksB = kTileN / kLanes;               // chunks per row of the tile of b
constexpr int kPitchA = kTileM + kPadA;                 // words between two rows of tile_a
constexpr int kGapA = 16;                               // more words after each kLanes rows: no conflicts in the scatter
constexpr int kSizeA = kTileK * kPitchA + kChunksA * kGapA;
static_assert(kTileM * kChunksA == kThreads, "one chunk of a per thread and step");
static_assert(kTileK * kChunksB == kThreads, "one chunk of b per thread and step");
static_assert(kPitchA % 4 == 0 && kGapA % 4 == 0, "rows of tile_a are 16-byte aligned");

// The eight bf16 of a chunk as floats; exact.
__device__ __forceinline__ void unpack(const uint4 v, float (&f)[kLanes]) {
    f[0] = __uint_as_float(v.x << 16);
    f[1] = __uint_as_float(v.x & 0xffff0000u);
    f[2] = __uint_as_float(v.y << 16);
    f[3] = __uint_as_float(v.y & 0xffff0000u);
    f[4] = __uint_as_float(v.z << 16);
    f[5] = __uint_as_float(v.z & 0xffff0000u);
    f[6] = __uint_as_float(v.w << 16);
    f[7] = __uint_as_float(v.w & 0xffff0000u);
}

__global__ void __launch_bounds__(kThreads, 2) gemm(const bf16 *a, const bf16 *b, bf16 *c, int n, int k) {
    __shared__ __align__(16) float tile_a[kSizeA];  // transposed; row kk begins at kk * kPitchA + kk / kLanes * kGapA
    __shared__ __align__(16) float tile_b[kTileK][kTileN];
    const int t = threadIdx.x;
    const int row0 = blockIdx.y * kTileM, col0 = blockIdx.x * kTileN;
    const int my_row = t / 16 * kRows, my_col = t % 16 * 4;

    const int a_row = t / kChunksA, a_k = t % kChunksA * kLanes;
    const int b_k = t / kChunksB, b_col = t % kChunksB * kLanes;
    float *const fill_a = &tile_a[a_k * kPitchA + a_k / kLanes * kGapA + a_row];
    float4 *const fill_b = reinterpret_cast<float4 *>(&tile_b[b_k][b_col]);
    const bf16 *pa = a + size_t(row0 + a_row) * k + a_k;
    const bf16 *pb = b + size_t(b_k) * n + col0 + b_col;

    float sum[kRows][kCols];
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
        for (int j = 0; j < kCols; ++j) sum[i][j] = 0.f;

    for (int k0 = 0; k0 < k; k0 += kTileK) {
        const uint4 load_a = *reinterpret_cast<const uint4 *>(pa);
        const uint4 load_b = *reinterpret_cast<const uint4 *>(pb);
        pa += kTileK;
        pb += size_t(kTileK) * n;
        __syncthreads();  // the tiles of the step before are no longer read
        float fa[kLanes], fb[kLanes];
        unpack(load_a, fa);
        unpack(load_b, fb);
#pragma unroll
        for (int i = 0; i < kLanes; ++i) fill_a[i * kPitchA] = fa[i];
        fill_b[0] = make_float4(fb[0], fb[1], fb[2], fb[3]);
        fill_b[1] = make_float4(fb[4], fb[5], fb[6], fb[7]);
        __syncthreads();
#pragma unroll
        for (int kk = 0; kk < kTileK; ++kk) {
            const float *row_a = &tile_a[kk * kPitchA + kk / kLanes * kGapA + my_row];
            const float4 a0 = *reinterpret_cast<const float4 *>(row_a);
            const float4 a1 = *reinterpret_cast<const float4 *>(row_a + 4);
            const float4 b0 = *reinterpret_cast<const float4 *>(&tile_b[kk][my_col]);
            const float4 b1 = *reinterpret_cast<const float4 *>(&tile_b[kk][kTileN / 2 + my_col]);
            const float va[kRows] = {a0.x, a0.y, a0.z, a0.w, a1.x, a1.y, a1.z, a1.w};
            const float vb[kCols] = {b0.x, b0.y, b0.z, b0.w, b1.x, b1.y, b1.z, b1.w};
#pragma unroll
            for (int i = 0; i < kRows; ++i)
#pragma unroll
                for (int j = 0; j < kCols; ++j) sum[i][j] = fmaf(va[i], vb[j], sum[i][j]);
        }
    }

#pragma unroll
    for (int i = 0; i < kRows; ++i) {
        bf16 *out = c + size_t(row0 + my_row + i) * n + col0 + my_col;
#pragma unroll
        for (int g = 0; g < 2; ++g) {
            const __nv_bfloat162 lo = __floats2bfloat162_rn(sum[i][g * 4], sum[i][g * 4 + 1]);
            const __nv_bfloat162 hi = __floats2bfloat162_rn(sum[i][g * 4 + 2], sum[i][g * 4 + 3]);
            uint2 packed;
            packed.x = *reinterpret_cast<const unsigned int *>(&lo);
            packed.y = *reinterpret_cast<const unsigned int *>(&hi);
            *reinterpret_cast<uint2 *>(out + g * (kTileN / 2)) = packed;
        }
    }
}

// Why this call is refused, or nullptr.
const char *refusal(const klineage_call *call) {
    if (call->num_inputs != 2 || call->num_outputs != 1) return "gemm reads a and b and writes c";
    const klineage_tensor &a = call->inputs[0], &b = call->inputs[1], &c = call->outputs[0];
    for (const klineage_tensor *t : {&a, &b, &c})
        if (t->dtype != KLINEAGE_BFLOAT16 || t->num_dims != 2 || t->stride[1] != 1 || t->stride[0] != t->shape[1])
            return "gemm: contiguous row-major bf16 matrices only";
    for (const klineage_tensor *t : {&a, &b, &c})
        if (reinterpret_cast<uintptr_t>(t->data) % 16) return "gemm: matrices must be 16-byte aligned";
    if (b.shape[0] != a.shape[1] || c.shape[0] != a.shape[0] || c.shape[1] != b.shape[1]) return "gemm: shapes do not match";
    if (a.shape[0] % kTileM || b.shape[1] % kTileN || a.shape[1] % kTileK)
        return "gemm: M and N must be multiples of 128, K of 16";
    return nullptr;
}

}  // namespace

extern "C" int run(const klineage_call *call) {
    const char *why = refusal(call);
    KLINEAGE_REQUIRE(call, why == nullptr, why);
    const int m = int(call->inputs[0].shape[0]), n = int(call->inputs[1].shape[1]), k = int(call->inputs[0].shape[1]);
    const auto *a = static_cast<const bf16 *>(call->inputs[0].data), *b = static_cast<const bf16 *>(call->inputs[1].data);
    auto *c = static_cast<bf16 *>(call->outputs[0].data);
    const auto stream = static_cast<cudaStream_t>(call->stream);
    gemm<<<dim3(n / kTileN, m / kTileM), dim3(kThreads), 0, stream>>>(a, b, c, n, k);
    KLINEAGE_REQUIRE(call, cudaGetLastError() == cudaSuccess, "gemm: the launch failed");
    return 0;
}
