#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "klineage.h"

namespace {

using bf16 = __nv_bfloat16;

constexpr int kTileM = 128, kTileN = 128, kTileK = 32, kThreads = 256;
constexpr int kStages = 4, kBytesA = kTileM * kTileK * 2, kBytesB = kTileK * kTileN * 2, kStageBytes = kBytesA + kBytesB;

__device__ __forceinline__ void mma_16816(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ uint32_t smem_address(const void *p) { return uint32_t(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}

__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}

// Byte offset of 16-byte chunk `chunk` of a row; the XOR puts 8 consecutive rows of one chunk into 8 different bank groups.
__device__ __forceinline__ int offset_a(int row, int chunk) { return row * 64 + (chunk ^ row / 2 % 4) * 16; }
__device__ __forceinline__ int offset_b(int row, int chunk) { return row * 256 + (chunk ^ row % 8) * 16; }

__device__ __forceinline__ void cp_async_16(uint32_t dst, const void *src) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory");
}

// 8 warps in a 2x4 grid; each owns 64x32 of the tile as 4x4 mma tiles.
__global__ void __launch_bounds__(kThreads) gemm(const bf16 *a, const bf16 *b, bf16 *c, int n, int k) {
    extern __shared__ __align__(128) uint8_t smem[];
    const uint32_t base = smem_address(smem);
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
    const int m0 = blockIdx.y * kTileM, n0 = blockIdx.x * kTileN, row0 = warp / 4 * 64, col0 = warp % 4 * 32;
    float sum[4][4][4] = {};
    auto load = [&](int stage, int k0) {
        const uint32_t to_a = base + stage * kStageBytes, to_b = to_a + kBytesA;
#pragma unroll
        for (int i = tid; i < kTileM * kTileK / 8; i += kThreads) {
            cp_async_16(to_a + offset_a(i / 4, i % 4), a + size_t(m0 + i / 4) * k + k0 + i % 4 * 8);
            cp_async_16(to_b + offset_b(i / 16, i % 16), b + size_t(k0 + i / 16) * n + n0 + i % 16 * 8);
        }
    };
    const int steps = k / kTileK;
    for (int s = 0; s < kStages - 1; ++s) {
        if (s < steps) load(s, s * kTileK);
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
    for (int step = 0; step < steps; ++step) {
        asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2) : "memory");
        __syncthreads();
        if (step + kStages - 1 < steps) load((step + kStages - 1) % kStages, (step + kStages - 1) * kTileK);
        asm volatile("cp.async.commit_group;" ::: "memory");
        const uint32_t tile_a = base + step % kStages * kStageBytes, tile_b = tile_a + kBytesA;
#pragma unroll
        for (int kk = 0; kk < kTileK; kk += 16) {
            uint32_t fa[4][4], fb[4][2];
#pragma unroll
            for (int i = 0; i < 4; ++i) ldmatrix_x4(fa[i], tile_a + offset_a(row0 + i * 16 + lane % 16, kk / 8 + lane / 16));
#pragma unroll
            for (int j = 0; j < 4; j += 2) {
                uint32_t r[4];
                ldmatrix_x4_trans(r, tile_b + offset_b(kk + lane % 16, col0 / 8 + j + lane / 16));
                fb[j][0] = r[0], fb[j][1] = r[1], fb[j + 1][0] = r[2], fb[j + 1][1] = r[3];
            }
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) mma_16816(sum[i][j], fa[i], fb[j]);
        }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            bf16 *out = c + size_t(m0 + row0 + i * 16 + lane / 4) * n + n0 + col0 + j * 8 + lane % 4 * 2;
            *reinterpret_cast<__nv_bfloat162 *>(out) = __floats2bfloat162_rn(sum[i][j][0], sum[i][j][1]);
            *reinterpret_cast<__nv_bfloat162 *>(out + size_t(8) * n) = __floats2bfloat162_rn(sum[i][j][2], sum[i][j][3]);
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
    cudaFuncSetAttribute(gemm, cudaFuncAttributeMaxDynamicSharedMemorySize, kStages * kStageBytes);
    gemm<<<dim3(n / kTileN, m / kTileM), kThreads, kStages * kStageBytes, stream>>>(a, b, c, n, k);
    KLINEAGE_REQUIRE(call, cudaGetLastError() == cudaSuccess, "gemm: the launch failed");
    return 0;
}
