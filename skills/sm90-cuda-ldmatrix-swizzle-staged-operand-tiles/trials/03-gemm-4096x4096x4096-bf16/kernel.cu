#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "klineage.h"

namespace {

using bf16 = __nv_bfloat16;

constexpr int kTileM = 128, kTileN = 128, kTileK = 32, kThreads = 256;

static_assert(kTileK == 32, "two rows of tile_a make one line of 128 bytes");
static_assert(kTileN * sizeof(bf16) % 128 == 0, "a row of tile_b is a multiple of 128 bytes");

__device__ __forceinline__ void mma_16816(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ void ldsm4(uint32_t &r0, uint32_t &r1, uint32_t &r2, uint32_t &r3, uint32_t addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r0), "=r"(r1), "=r"(r2), "=r"(r3)
                 : "r"(addr)
                 : "memory");
}

__device__ __forceinline__ void ldsm4_trans(uint32_t &r0, uint32_t &r1, uint32_t &r2, uint32_t &r3, uint32_t addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r0), "=r"(r1), "=r"(r2), "=r"(r3)
                 : "r"(addr)
                 : "memory");
}

// Byte offset of a 16-byte chunk in a tile of unpadded lines, with the chunks of a line permuted.
template <int kLineBytes>
__device__ __forceinline__ int offset(int line, int chunk) {
    static_assert(kLineBytes % 128 == 0, "the permutation must stay inside its line");
    return line * kLineBytes + (chunk ^ (line % 8)) * 16;
}

// tile_a: rows of 4 chunks, two rows a line. Eight rows of one chunk fall into eight bank groups.
__device__ __forceinline__ int offset_a(int row, int chunk) { return offset<128>(row / 2, row % 2 * 4 + chunk); }

// tile_b: rows of 16 chunks, one row a line.
__device__ __forceinline__ int offset_b(int row, int chunk) { return offset<kTileN * 2>(row, chunk); }

// 8 warps in a 2x4 grid; each owns 64x32 of the tile as 4x4 mma tiles.
__global__ void __launch_bounds__(kThreads) gemm(const bf16 *a, const bf16 *b, bf16 *c, int n, int k) {
    __shared__ __align__(128) uint8_t tile_a[kTileM * kTileK * 2];
    __shared__ __align__(128) uint8_t tile_b[kTileK * kTileN * 2];
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
    const int m0 = blockIdx.y * kTileM, n0 = blockIdx.x * kTileN, row0 = warp / 4 * 64, col0 = warp % 4 * 32;

    // The lane's part of the addresses. 16 more rows of either tile are 8 or 16 more lines, which leaves the
    // permutation as it is: a constant is added to these.
    const uint32_t base_a = static_cast<uint32_t>(__cvta_generic_to_shared(tile_a));
    const uint32_t base_b = static_cast<uint32_t>(__cvta_generic_to_shared(tile_b));
    uint32_t addr_a[kTileK / 16], addr_b[2];
#pragma unroll
    for (int ks = 0; ks < kTileK / 16; ++ks) addr_a[ks] = base_a + offset_a(row0 + lane % 16, ks * 2 + lane / 16);
#pragma unroll
    for (int jp = 0; jp < 2; ++jp) addr_b[jp] = base_b + offset_b(lane % 16, col0 / 8 + jp * 2 + lane / 16);

    float sum[4][4][4] = {};
    for (int k0 = 0; k0 < k; k0 += kTileK) {
#pragma unroll
        for (int i = tid; i < kTileM * kTileK / 8; i += kThreads) {
            *reinterpret_cast<uint4 *>(tile_a + offset_a(i / 4, i % 4)) = *reinterpret_cast<const uint4 *>(a + size_t(m0 + i / 4) * k + k0 + i % 4 * 8);
            *reinterpret_cast<uint4 *>(tile_b + offset_b(i / 16, i % 16)) = *reinterpret_cast<const uint4 *>(b + size_t(k0 + i / 16) * n + n0 + i % 16 * 8);
        }
        __syncthreads();
#pragma unroll
        for (int ks = 0; ks < kTileK / 16; ++ks) {
            uint32_t fa[4][4], fb[4][2];
            // Stored [m][k]: lane groups address (m, k), (m + 8, k), (m, k + 8), (m + 8, k + 8).
#pragma unroll
            for (int i = 0; i < 4; ++i)
                ldsm4(fa[i][0], fa[i][1], fa[i][2], fa[i][3], addr_a[ks] + i * (16 * kTileK * 2));
            // Stored [k][n]: lane groups address (k, n), (k + 8, n), (k, n + 8), (k + 8, n + 8).
#pragma unroll
            for (int jp = 0; jp < 2; ++jp)
                ldsm4_trans(fb[jp * 2][0], fb[jp * 2][1], fb[jp * 2 + 1][0], fb[jp * 2 + 1][1], addr_b[jp] + ks * (16 * kTileN * 2));
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) mma_16816(sum[i][j], fa[i], fb[j]);
        }
        __syncthreads();
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
    gemm<<<dim3(n / kTileN, m / kTileM), kThreads, 0, stream>>>(a, b, c, n, k);
    KLINEAGE_REQUIRE(call, cudaGetLastError() == cudaSuccess, "gemm: the launch failed");
    return 0;
}
