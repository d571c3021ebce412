#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "klineage.h"

namespace {

using bf16 = __nv_bfloat16;

constexpr int kTileM = 128, kTileN = 128, kTileK = 32, kThreads = 256;
constexpr int kPad = 8;                      // row pitches of 80 and 272 bytes: odd multiples of 16
constexpr int kWarpM = 64, kWarpN = 32;      // outputs of a warp; 2 x 4 warps
constexpr int kFragM = kWarpM / 16, kFragN = kWarpN / 8;
constexpr int kCopies = kTileM * kTileK / 8 / kThreads;  // 16-byte copies of a thread, for each tile
static_assert(kTileM == kTileN, "both tiles take the same number of copies");
static_assert(kTileM / kWarpM * (kTileN / kWarpN) * 32 == kThreads, "the warps cover the tile");

__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ uint32_t pack(bf16 low, bf16 high) {
    return uint32_t(__bfloat16_as_ushort(low)) | uint32_t(__bfloat16_as_ushort(high)) << 16;
}

__global__ void __launch_bounds__(kThreads) gemm(const bf16 *a, const bf16 *b, bf16 *c, int n, int k) {
    __shared__ __align__(16) bf16 tile_a[kTileM][kTileK + kPad];
    __shared__ __align__(16) bf16 tile_b[kTileK][kTileN + kPad];
    const int tid = threadIdx.x, m0 = blockIdx.y * kTileM, n0 = blockIdx.x * kTileN;
    const int warp = tid / 32, lane = tid % 32;
    const int g = lane / 4, q = lane % 4 * 2;
    const int row0 = warp / (kTileN / kWarpN) * kWarpM, col0 = warp % (kTileN / kWarpN) * kWarpN;
    float acc[kFragM][kFragN][4] = {};
    for (int k0 = 0; k0 < k; k0 += kTileK) {
        uint4 va[kCopies], vb[kCopies];
#pragma unroll
        for (int i = 0; i < kCopies; ++i) {
            const int at = tid + i * kThreads;
            va[i] = *reinterpret_cast<const uint4 *>(
                a + size_t(m0 + at / (kTileK / 8)) * k + k0 + at % (kTileK / 8) * 8);
            vb[i] = *reinterpret_cast<const uint4 *>(
                b + size_t(k0 + at / (kTileN / 8)) * n + n0 + at % (kTileN / 8) * 8);
        }
#pragma unroll
        for (int i = 0; i < kCopies; ++i) {
            const int at = tid + i * kThreads;
            *reinterpret_cast<uint4 *>(&tile_a[at / (kTileK / 8)][at % (kTileK / 8) * 8]) = va[i];
            *reinterpret_cast<uint4 *>(&tile_b[at / (kTileN / 8)][at % (kTileN / 8) * 8]) = vb[i];
        }
        __syncthreads();
#pragma unroll
        for (int kk = 0; kk < kTileK; kk += 16) {
            uint32_t fa[kFragM][4], fb[kFragN][2];
#pragma unroll
            for (int i = 0; i < kFragM; ++i)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    fa[i][e] = *reinterpret_cast<const uint32_t *>(
                        &tile_a[row0 + i * 16 + g + e % 2 * 8][kk + q + e / 2 * 8]);
#pragma unroll
            for (int j = 0; j < kFragN; ++j)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int depth = kk + q + e * 8, column = col0 + j * 8 + g;
                    fb[j][e] = pack(tile_b[depth][column], tile_b[depth + 1][column]);
                }
#pragma unroll
            for (int i = 0; i < kFragM; ++i)
#pragma unroll
                for (int j = 0; j < kFragN; ++j) mma(acc[i][j], fa[i], fb[j]);
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < kFragM; ++i)
#pragma unroll
        for (int j = 0; j < kFragN; ++j)
#pragma unroll
            for (int e = 0; e < 4; e += 2)
                *reinterpret_cast<__nv_bfloat162 *>(
                    c + size_t(m0 + row0 + i * 16 + g + e / 2 * 8) * n + n0 + col0 + j * 8 + q) =
                    __floats2bfloat162_rn(acc[i][j][e], acc[i][j][e + 1]);
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
    if (a.shape[0] % kTileM || b.shape[1] % kTileN || a.shape[1] % kTileK) return "gemm: M and N must be multiples of 128, K of 32";
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
