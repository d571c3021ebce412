#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "klineage.h"

namespace {

using bf16 = __nv_bfloat16;

constexpr int kTileM = 128, kTileN = 128, kTileK = 16, kThreads = 256;
constexpr int kVec = 8;  // bf16 elements in a 16-byte access

static_assert(kTileM * kTileK == kThreads * kVec && kTileK * kTileN == kThreads * kVec, "one vector of each operand per thread");
static_assert(kTileK == 2 * kVec, "two vectors in a row of A's tile");

// Eight bf16 values, widened exactly.
__device__ __forceinline__ void widen(const uint4 &v, float (&f)[kVec]) {
    f[0] = __uint_as_float(v.x << 16);
    f[1] = __uint_as_float(v.x & 0xffff0000u);
    f[2] = __uint_as_float(v.y << 16);
    f[3] = __uint_as_float(v.y & 0xffff0000u);
    f[4] = __uint_as_float(v.z << 16);
    f[5] = __uint_as_float(v.z & 0xffff0000u);
    f[6] = __uint_as_float(v.w << 16);
    f[7] = __uint_as_float(v.w & 0xffff0000u);
}

__global__ void __launch_bounds__(kThreads) gemm(const bf16 *a, const bf16 *b, bf16 *c, int n, int k) {
    // A transposed, so that a thread's rows are consecutive; in k-rows 8..15 the column index is xored with 16, so that
    // the two vectors of a row of A are stored to different banks.
    __shared__ alignas(16) float tile_a[kTileK][kTileM + 4];
    __shared__ alignas(16) float tile_b[kTileK][kTileN];
    const int tid = threadIdx.x, m0 = blockIdx.y * kTileM, n0 = blockIdx.x * kTileN;
    const int row = tid / 16 * 8, col = tid % 16 * 4;  // columns col..col+3 and col+64..col+67
    const int a_row = tid / 2, a_k = tid % 2 * kVec;   // two lanes read the 32 bytes of a row of A's tile
    const int a_to = a_row ^ (a_k * 2);
    const int b_k = tid / 16, b_col = tid % 16 * kVec;  // sixteen lanes read the 256 bytes of a row of B's tile
    const bf16 *from_a = a + size_t(m0 + a_row) * k + a_k;
    const bf16 *from_b = b + size_t(b_k) * n + n0 + b_col;
    float sum[8][8] = {};
    for (int k0 = 0; k0 < k; k0 += kTileK) {
        const uint4 va = *reinterpret_cast<const uint4 *>(from_a + k0);
        const uint4 vb = *reinterpret_cast<const uint4 *>(from_b + size_t(k0) * n);
        float f[kVec];
        widen(va, f);
#pragma unroll
        for (int j = 0; j < kVec; ++j) tile_a[a_k + j][a_to] = f[j];
        widen(vb, f);
        *reinterpret_cast<float4 *>(&tile_b[b_k][b_col]) = make_float4(f[0], f[1], f[2], f[3]);
        *reinterpret_cast<float4 *>(&tile_b[b_k][b_col + 4]) = make_float4(f[4], f[5], f[6], f[7]);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kTileK; ++i) {
            float x[8], y[8];
            const float4 *from = reinterpret_cast<const float4 *>(&tile_a[i][row ^ (i / kVec * 16)]);
            const float4 x0 = from[0], x1 = from[1];
            x[0] = x0.x; x[1] = x0.y; x[2] = x0.z; x[3] = x0.w;
            x[4] = x1.x; x[5] = x1.y; x[6] = x1.z; x[7] = x1.w;
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
        for (int h = 0; h < 2; ++h) {
            // Sixteen lanes write 128 contiguous bytes of a row of C.
            alignas(8) __nv_bfloat162 pair[2];
            pair[0] = __floats2bfloat162_rn(sum[r][h * 4 + 0], sum[r][h * 4 + 1]);
            pair[1] = __floats2bfloat162_rn(sum[r][h * 4 + 2], sum[r][h * 4 + 3]);
            *reinterpret_cast<uint2 *>(c + size_t(m0 + row + r) * n + n0 + col + h * 64) =
                *reinterpret_cast<const uint2 *>(pair);
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
