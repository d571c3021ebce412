#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "klineage.h"

namespace {

using bf16 = __nv_bfloat16;

constexpr int kTileM = 128, kTileN = 128, kTileK = 16, kThreads = 256;

__global__ void __launch_bounds__(kThreads) gemm(const bf16 *a, const bf16 *b, bf16 *c, int n, int k) {
    __shared__ float tile_a[kTileK][kTileM + 4], tile_b[kTileK][kTileN];  // A transposed, so that a thread's rows are consecutive
    const int tid = threadIdx.x, m0 = blockIdx.y * kTileM, n0 = blockIdx.x * kTileN;
    const int row = tid / 16 * 8, col = tid % 16 * 4;  // columns col..col+3 and col+64..col+67
    float sum[8][8] = {};
    for (int k0 = 0; k0 < k; k0 += kTileK) {
        const uint4 va = *reinterpret_cast<const uint4 *>(a + size_t(m0 + tid / 2) * k + k0 + tid % 2 * 8);
        const uint4 vb = *reinterpret_cast<const uint4 *>(b + size_t(k0 + tid / 16) * n + n0 + tid % 16 * 8);
        const bf16 *ea = reinterpret_cast<const bf16 *>(&va), *eb = reinterpret_cast<const bf16 *>(&vb);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            tile_a[tid % 2 * 8 + i][tid / 2] = __bfloat162float(ea[i]);
            tile_b[tid / 16][tid % 16 * 8 + i] = __bfloat162float(eb[i]);
        }
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
