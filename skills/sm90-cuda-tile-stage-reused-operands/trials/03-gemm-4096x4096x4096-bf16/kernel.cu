#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "klineage.h"

namespace {

using bf16 = __nv_bfloat16;

constexpr int kTileM = 32, kTileN = 32, kTileK = 32;
// Each thread copies one element of either tile.
static_assert(kTileK == kTileN && kTileK == kTileM, "the tiles are filled by one element per thread");

__global__ void __launch_bounds__(kTileM * kTileN, 2)
gemm(const bf16 *__restrict__ a, const bf16 *__restrict__ b, bf16 *__restrict__ c, int n, int k) {
    __shared__ __align__(16) float tile_a[kTileM][kTileK];
    __shared__ __align__(16) float tile_b[kTileK][kTileN];
    const int x = threadIdx.x, y = threadIdx.y;
    const int col = blockIdx.x * kTileN + x, row = blockIdx.y * kTileM + y;
    const bf16 *from_a = a + size_t(row) * k + x;
    const bf16 *from_b = b + size_t(y) * n + col;
    float sum = 0.f;
    for (int k0 = 0; k0 < k; k0 += kTileK) {
        tile_a[y][x] = __bfloat162float(from_a[k0]);
        tile_b[y][x] = __bfloat162float(from_b[size_t(k0) * n]);
        __syncthreads();  // the new tiles are visible
#pragma unroll
        for (int i = 0; i < kTileK; ++i) sum += tile_a[y][i] * tile_b[i][x];
        __syncthreads();  // the tiles are done with
    }
    c[size_t(row) * n + col] = __float2bfloat16(sum);
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
    if (a.shape[0] % kTileM || b.shape[1] % kTileN || a.shape[1] % kTileK) return "gemm: M, N and K must be multiples of 32";
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
    gemm<<<dim3(n / kTileN, m / kTileM), dim3(kTileN, kTileM), 0, stream>>>(a, b, c, n, k);
    KLINEAGE_REQUIRE(call, cudaGetLastError() == cudaSuccess, "gemm: the launch failed");
    return 0;
}
