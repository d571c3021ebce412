// Stage 07 adds: wgmma m64n128k16. Two warpgroups each compute 64x128 from operands that the tensor cores read directly from
// 128-byte-swizzled shared memory; no fragments pass through registers.
//
// Preconditions: warpgroups of 4 warps starting at a multiple of 4; tiles in the hardware's swizzle (chunk ^ row % 8 on 128-byte rows,
// 1024-byte aligned); sm_90a.   Risks here: B is N-major (transpose bit, 64-column blocks 8 KB apart): swapped leading and stride offsets
// permute C; cp.async writes need fence.proxy.async before the tensor cores read them.
// Predicted: mma.sync reaches about 60 % of the wgmma rate: 1.5x.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "klineage.h"

namespace {

using bf16 = __nv_bfloat16;

constexpr int kTileM = 128, kTileN = 128, kTileK = 64, kThreads = 256, kStages = 4;
constexpr int kBytesA = kTileM * kTileK * 2, kBytesB = kTileK * kTileN * 2, kStageBytes = kBytesA + kBytesB;
constexpr int kBlockB = kTileK * 128;  // bytes of one block of 64 columns
constexpr int kSharedBytes = kStages * kStageBytes + 1024;

__device__ __forceinline__ uint32_t smem_address(const void *p) { return uint32_t(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ void cp_async_16(uint32_t dst, const void *src) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory");
}

// Shared-memory matrix descriptor with 128-byte swizzle. A (K-major): 8-row groups stride_bytes apart, `leading` unused.
// B (N-major, transposed by the instruction): 64-column blocks leading_bytes apart, 8-row groups of k stride_bytes apart.
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t address, uint32_t leading_bytes, uint32_t stride_bytes) {
    return uint64_t((address & 0x3ffff) >> 4) | uint64_t(leading_bytes >> 4) << 16 | uint64_t(stride_bytes >> 4) << 32 | uint64_t(1) << 62;
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory"); }

// Eight accumulators as operands.
#define ACC8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])

// d[64x128] (+)= A[64x16] B[16x128]; A K-major, B N-major, both in shared memory.
__device__ __forceinline__ void wgmma_64x128x16(float (&d)[64], uint64_t a, uint64_t b, int accumulate) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "%64, %65, p, 1, 1, 0, 1; }"
        : ACC8(0), ACC8(8), ACC8(16), ACC8(24), ACC8(32), ACC8(40), ACC8(48), ACC8(56)
        : "l"(a), "l"(b), "r"(accumulate));
}

// Keeps the compiler from reading accumulators before the wait that completes them.
template <int kCount>
__device__ __forceinline__ void pin(float (&x)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

__global__ void __launch_bounds__(kThreads, 1) gemm(const bf16 *a, const bf16 *b, bf16 *c, int n, int k) {
    extern __shared__ uint8_t smem[];
    const uint32_t base = (smem_address(smem) + 1023) & ~1023u;
    const int tid = threadIdx.x, group = tid / 128, warp = tid % 128 / 32, lane = tid % 32;
    const int m0 = blockIdx.y * kTileM, n0 = blockIdx.x * kTileN, steps = k / kTileK;
    auto load = [&](int stage, int k0) {
        const uint32_t to_a = base + stage * kStageBytes, to_b = to_a + kBytesA;
#pragma unroll
        for (int i = tid; i < kTileM * kTileK / 8; i += kThreads) {
            const int row = i / 8, chunk = i % 8;  // A: 128 rows of 64 k
            cp_async_16(to_a + row * 128 + (chunk ^ row % 8) * 16, a + size_t(m0 + row) * k + k0 + chunk * 8);
            const int kr = i / 16, block = i % 16 / 8;  // B: 64 rows of 2 x 64 columns
            cp_async_16(to_b + block * kBlockB + kr * 128 + (chunk ^ kr % 8) * 16, b + size_t(k0 + kr) * n + n0 + block * 64 + chunk * 8);
        }
    };
    for (int s = 0; s < kStages - 1; ++s) {
        if (s < steps) load(s, s * kTileK);
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
    float sum[64];
    for (int step = 0; step < steps; ++step) {
        asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2) : "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncthreads();
        if (step + kStages - 1 < steps) load((step + kStages - 1) % kStages, (step + kStages - 1) * kTileK);
        asm volatile("cp.async.commit_group;" ::: "memory");
        const uint32_t tile_a = base + step % kStages * kStageBytes + group * 64 * 128, tile_b = base + step % kStages * kStageBytes + kBytesA;
        const uint64_t desc_a = matrix_descriptor(tile_a, 16, 1024), desc_b = matrix_descriptor(tile_b, kBlockB, 1024);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kTileK / 16; ++i) wgmma_64x128x16(sum, desc_a + i * 2, desc_b + i * 128, step | i);
        wgmma_commit();
        wgmma_wait<0>();
        pin(sum);
    }
#pragma unroll
    for (int j = 0; j < kTileN / 8; ++j) {
        bf16 *out = c + size_t(m0 + group * 64 + warp * 16 + lane / 4) * n + n0 + j * 8 + lane % 4 * 2;
        *reinterpret_cast<__nv_bfloat162 *>(out) = __floats2bfloat162_rn(sum[4 * j], sum[4 * j + 1]);
        *reinterpret_cast<__nv_bfloat162 *>(out + size_t(8) * n) = __floats2bfloat162_rn(sum[4 * j + 2], sum[4 * j + 3]);
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
