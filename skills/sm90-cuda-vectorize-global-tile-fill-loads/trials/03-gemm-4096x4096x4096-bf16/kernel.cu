#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "klineage.h"

namespace {

using bf16 = __nv_bfloat16;

constexpr int kTileM = 128, kTileN = 128, kTileK = 16, kThreads = 256;
constexpr int kLanes = 16 / sizeof(bf16);                                   // elements per 16-byte chunk
constexpr int kChunksA = kTileK / kLanes, kChunksB = kTileN / kLanes;       // chunks per row of a tile
static_assert(kTileK % kLanes == 0 && kTileN % kLanes == 0, "tile rows are whole chunks");
static_assert(kTileM * kChunksA == kThreads && kTileK * kChunksB == kThreads, "one chunk per thread and tile");

__global__ void __launch_bounds__(kThreads) gemm(const bf16 *a, const bf16 *b, bf16 *c, int n, int k) {
    __shared__ __align__(16) float tile_a[kTileK][kTileM + 4];  // A transposed, so that a thread's rows are consecutive
    __shared__ __align__(16) float tile_b[kTileK][kTileN];
    const int tid = threadIdx.x, m0 = blockIdx.y * kTileM, n0 = blockIdx.x * kTileN;
    const int row = tid / 16 * 8, col = tid % 16 * 4;  // columns col..col+3 and col+64..col+67
    float sum[8][8] = {};
    for (int k0 = 0; k0 < k; k0 += kTileK) {
        const int row_a = tid / kChunksA, col_a = tid % kChunksA * kLanes;
        const int row_b = tid / kChunksB, col_b = tid % kChunksB * kLanes;
        const uint4 va = *reinterpret_cast<const uint4 *>(a + size_t(m0 + row_a) * k + k0 + col_a);
        const uint4 vb = *reinterpret_cast<const uint4 *>(b + size_t(k0 + row_b) * n + n0 + col_b);
        const bf16 *const ea = reinterpret_cast<const bf16 *>(&va);
        const bf16 *const eb = reinterpret_cast<const bf16 *>(&vb);
#pragma unroll
        for (int i = 0; i < kLanes; ++i) tile_a[col_a + i][row_a] = __bfloat162float(ea[i]);
#pragma unroll
        for (int i = 0; i < kLanes; i += 4)
            *reinterpret_cast<float4 *>(&tile_b[row_b][col_b + i]) =
                make_float4(__bfloat162float(eb[i]), __bfloat162float(eb[i + 1]), __bfloat162float(eb[i + 2]),
                            __bfloat162float(eb[i + 3]));
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kTileK; ++i) {
            float x[8], y[8];
#pragma unroll
            for (int j = 0; j < 8; ++j) x[j] = tile_a[i][row + j];
#pragma unroll
            for (int j = 0; j < 8; ++j) y[j] = tile_b[i][col + j % 4 + j / 4 * 64];
#pragma unroll
            for (int r = 0; r < 8; ++r)
#pragma unroll
                for (int s = 0; s < 8; ++s) sum[r][s] += x[r] * y[s];
        }
        __syncthreads();
    }
#pragma unroll
    for (int r = 0; r < 8; ++r)
#pragma unroll
        for (int s = 0; s < 8; ++s)
            c[size_t(m0 + row + r) * n + n0 + col + s % 4 + s / 4 * 64] = __float2bfloat16(sum[r][s]);
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
    if (a.shape[0] % kTileM || b.shape[1] % kTileN || a.shape[1] % kTileK) return "gemm: M and N must be multiples of 128, K of 16";
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
    gemm<<<dim3(n / kTileN, m / kTileM), kThreads, 0, stream>>>(a, b, c, n, k);
    KLINEAGE_REQUIRE(call, cudaGetLastError() == cudaSuccess, "gemm: the launch failed");
    return 0;
}
