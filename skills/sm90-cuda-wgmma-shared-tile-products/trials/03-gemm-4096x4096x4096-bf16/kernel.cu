#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "klineage.h"

namespace {

using bf16 = __nv_bfloat16;

constexpr int kTileM = 128, kTileN = 128, kTileK = 64, kThreads = 256;
constexpr int kStages = 3, kBytesA = kTileM * kTileK * 2, kBytesB = kTileK * kTileN * 2, kStageBytes = kBytesA + kBytesB;
constexpr int kBlockB = kTileK * 128;                       // bytes of one block of 64 columns of B
constexpr int kSharedBytes = kStages * kStageBytes + 1024;  // the base is rounded up to 1024 bytes

__device__ __forceinline__ uint32_t smem_address(const void *p) { return uint32_t(__cvta_generic_to_shared(p)); }

// Descriptor of a tile in shared memory with the 128-byte swizzle.
__device__ __forceinline__ uint64_t make_desc(uint32_t address, uint32_t lead, uint32_t stride) {
    return uint64_t((address & 0x3ffff) >> 4) | uint64_t(lead >> 4) << 16 | uint64_t(stride >> 4) << 32 | uint64_t(1) << 62;
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_wait_all() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

#define ACC8(j) \
    "+f"(d[(j)]), "+f"(d[(j) + 1]), "+f"(d[(j) + 2]), "+f"(d[(j) + 3]), "+f"(d[(j) + 4]), "+f"(d[(j) + 5]), "+f"(d[(j) + 6]), "+f"(d[(j) + 7])

// d (64x128 of a warpgroup) = A (64x16, depth contiguous) * B (16x128, columns contiguous) + (keep ? d : 0)
__device__ __forceinline__ void product(float (&d)[64], uint64_t a, uint64_t b, int keep) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, "
        "%8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, "
        "%24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, "
        "%40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, "
        "%56, %57, %58, %59, %60, %61, %62, %63}, "
        "%64, %65, p, 1, 1, 0, 1;\n"
        "}\n"
        : ACC8(0), ACC8(8), ACC8(16), ACC8(24), ACC8(32), ACC8(40), ACC8(48), ACC8(56)
        : "l"(a), "l"(b), "r"(keep));
}

#undef ACC8

// Byte offset of 16-byte chunk `chunk` of a row: rows of 128 bytes, with the swizzle that the descriptors name.
__device__ __forceinline__ int offset_a(int row, int chunk) { return row * 128 + (chunk ^ row % 8) * 16; }
__device__ __forceinline__ int offset_b(int row, int chunk) {
    return chunk / 8 * kBlockB + row * 128 + ((chunk % 8) ^ (row % 8)) * 16;
}

__device__ __forceinline__ void cp_async_16(uint32_t dst, const void *src) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory");
}

// 2 warpgroups; each owns 64x128 of the tile.
__global__ void __launch_bounds__(kThreads, 2) gemm(const bf16 *a, const bf16 *b, bf16 *c, int n, int k) {
    extern __shared__ __align__(128) uint8_t smem[];
    const uint32_t base = (smem_address(smem) + 1023) & ~1023u;
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, group = warp / 4;
    const int m0 = blockIdx.y * kTileM, n0 = blockIdx.x * kTileN;
    float sum[64] = {};
    auto load = [&](int stage, int k0) {
        const uint32_t to_a = base + stage * kStageBytes, to_b = to_a + kBytesA;
#pragma unroll
        for (int i = tid; i < kTileM * kTileK / 8; i += kThreads) {
            cp_async_16(to_a + offset_a(i / 8, i % 8), a + size_t(m0 + i / 8) * k + k0 + i % 8 * 8);
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
        // The tiles were written by the generic proxy and are read by the asynchronous one.
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncthreads();
        if (step + kStages - 1 < steps) load((step + kStages - 1) % kStages, (step + kStages - 1) * kTileK);
        asm volatile("cp.async.commit_group;" ::: "memory");
        const uint32_t tile_a = base + step % kStages * kStageBytes, tile_b = tile_a + kBytesA;
        const uint64_t desc_a = make_desc(tile_a + group * 64 * 128, 16, 1024);
        const uint64_t desc_b = make_desc(tile_b, kBlockB, 1024);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kTileK / 16; ++i) product(sum, desc_a + i * 2, desc_b + i * 128, step | i);
        wgmma_commit();
        wgmma_wait_all();
#pragma unroll
        for (int j = 0; j < 64; ++j) asm volatile("" : "+f"(sum[j])::"memory");
    }
    bf16 *out = c + size_t(m0 + group * 64 + warp % 4 * 16 + lane / 4) * n + n0 + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < kTileN / 8; ++j) {
        *reinterpret_cast<__nv_bfloat162 *>(out + j * 8) = __floats2bfloat162_rn(sum[4 * j], sum[4 * j + 1]);
        *reinterpret_cast<__nv_bfloat162 *>(out + size_t(8) * n + j * 8) = __floats2bfloat162_rn(sum[4 * j + 2], sum[4 * j + 3]);
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
    if (a.shape[0] % kTileM || b.shape[1] % kTileN || a.shape[1] % kTileK) return "gemm: M and N must be multiples of 128, K of 64";
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
    cudaFuncSetAttribute(gemm, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
    gemm<<<dim3(n / kTileN, m / kTileM), kThreads, kSharedBytes, stream>>>(a, b, c, n, k);
    KLINEAGE_REQUIRE(call, cudaGetLastError() == cudaSuccess, "gemm: the launch failed");
    return 0;
}
