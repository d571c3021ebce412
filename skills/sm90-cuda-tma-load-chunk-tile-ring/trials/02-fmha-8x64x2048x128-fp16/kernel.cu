#include <cuda.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "klineage.h"

namespace {

constexpr int kDim = 128;
constexpr int kRows = 128, kKeys = 128, kStages = 3;
constexpr int kConsumers = 256, kThreads = kConsumers + 32;  // two warpgroups compute, one lane of the last warp loads
constexpr int kHalfTile = 128 * 128, kTileBytes = 2 * kHalfTile;  // a tile: 128 rows, two blocks of 64 dimensions
constexpr int kBarrierBytes = 128;  // full_q, then full (K, V) of each stage, then empty (K, V) of each stage
constexpr int kSharedBytes = 1024 + (1 + 2 * kStages) * kTileBytes + kBarrierBytes;
static_assert(8 * (1 + 4 * kStages) <= kBarrierBytes, "barriers");
static_assert(kSharedBytes <= 232448, "shared memory");

__device__ __forceinline__ uint32_t smem_address(const void *p) { return uint32_t(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ void barrier_init(uint32_t bar, uint32_t count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}

__device__ __forceinline__ void barrier_expect(uint32_t bar, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

__device__ __forceinline__ void barrier_wait(uint32_t bar, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred P1;\n"
        "LAB_WAIT:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 P1, [%0], %1;\n"
        "@P1 bra DONE;\n"
        "bra LAB_WAIT;\n"
        "DONE:\n"
        "}" ::"r"(bar), "r"(parity) : "memory");
}

// One box of 64 dimensions into shared memory; rows past the end arrive as zeros and count as bytes.
__device__ __forceinline__ void tma_load(uint32_t dst, const CUtensorMap *map, uint32_t bar, int col, int row, int h, int b) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(dst),
        "l"(reinterpret_cast<uint64_t>(map)), "r"(bar), "r"(col), "r"(row), "r"(h), "r"(b)
        : "memory");
}

// One box of 64 dimensions out of shared memory; rows past the end are not written.
__device__ __forceinline__ void tma_store(const CUtensorMap *map, uint32_t src, int col, int row, int h, int b) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(reinterpret_cast<uint64_t>(map)),
                 "r"(src), "r"(col), "r"(row), "r"(h), "r"(b)
                 : "memory");
}

// The threads of one consumer warpgroup meet.
__device__ __forceinline__ void group_sync(int group) { asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory"); }

// Shared-memory matrix descriptor with 128-byte swizzle. Q and K (d contiguous): 8-row groups stride_bytes apart, `leading` unused.
// V (transposed by the instruction): blocks of 64 dimensions leading_bytes apart, groups of 8 keys stride_bytes apart.
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t address, uint32_t leading_bytes, uint32_t stride_bytes) {
    return uint64_t((address & 0x3ffff) >> 4) | uint64_t(leading_bytes >> 4) << 16 | uint64_t(stride_bytes >> 4) << 32 | uint64_t(1) << 62;
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory"); }

// Eight accumulators as operands.
#define ACC8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])

// d[64x128] (+)= Q[64x16] K[128x16]^T; both K-major in shared memory.
__device__ __forceinline__ void wgmma_scores(float (&d)[64], uint64_t a, uint64_t b, int accumulate) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "%64, %65, p, 1, 1, 0, 0; }"
        : ACC8(0), ACC8(8), ACC8(16), ACC8(24), ACC8(32), ACC8(40), ACC8(48), ACC8(56)
        : "l"(a), "l"(b), "r"(accumulate));
}

// d[64x128] (+)= P[64x16] V[16x128]; P in registers, V with its dimensions contiguous.
__device__ __forceinline__ void wgmma_values(float (&d)[64], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b, int accumulate) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "{%64, %65, %66, %67}, %68, p, 1, 1, 1; }"
        : ACC8(0), ACC8(8), ACC8(16), ACC8(24), ACC8(32), ACC8(40), ACC8(48), ACC8(56)
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(accumulate));
}

// Keeps the compiler from reading accumulators before the wait that completes them.
template <int kCount>
__device__ __forceinline__ void pin(float (&x)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

__device__ __forceinline__ uint32_t pack(float lo, float hi) {
    const half2 h = __floats2half2_rn(lo, hi);
    return *reinterpret_cast<const uint32_t *>(&h);
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// A thread's share of two score rows (lane / 4 and lane / 4 + 8): their reference maxima (base-2 units) and sums.
struct Softmax {
    float top[2] = {-INFINITY, -INFINITY}, total[2] = {0.f, 0.f}, shrink[2];

    // Raw scores in, probabilities out; true when earlier outputs must be multiplied by `shrink`.
    __device__ __forceinline__ bool step(float (&score)[kKeys / 2], float scale) {
        float raised[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float high = -INFINITY;
#pragma unroll
            for (int j = 0; j < kKeys / 8; ++j) high = fmaxf(high, fmaxf(score[4 * j + 2 * i], score[4 * j + 2 * i + 1]));
            high = fmaxf(high, __shfl_xor_sync(~0u, high, 1));
            raised[i] = fmaxf(top[i], fmaxf(high, __shfl_xor_sync(~0u, high, 2)) * scale);
        }
        const bool rescale = true;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            shrink[i] = exp2_fast(top[i] - raised[i]);
            top[i] = raised[i];
            total[i] *= shrink[i];
        }
#pragma unroll
        for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                score[4 * j + e] = exp2_fast(score[4 * j + e] * scale - top[e / 2]);
                total[e / 2] += score[4 * j + e];
            }
        return rescale;
    }

    __device__ __forceinline__ float inverse(int i) const {
        float sum = total[i] + __shfl_xor_sync(~0u, total[i], 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        return 1.f / sum;
    }
};

// Keys past the end of the sequence get no weight.
__device__ __forceinline__ void mask_tail(float (&score)[kKeys / 2], int keys, int lane) {
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i)
        if (i / 4 * 8 + lane % 4 * 2 + i % 2 >= keys) score[i] = -INFINITY;
}

__global__ void __launch_bounds__(kThreads, 1) fmha(const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k,
                                                    const __grid_constant__ CUtensorMap map_v, const __grid_constant__ CUtensorMap map_o,
                                                    int tokens, float scale) {
    extern __shared__ uint8_t smem[];
    const uint32_t tile_q = (smem_address(smem) + 1023) & ~1023u, ring = tile_q + kTileBytes;
    const uint32_t full_q = ring + 2 * kStages * kTileBytes, full = full_q + 8, empty = full + 16 * kStages;
    const int tid = threadIdx.x, group = tid / 128, warp = tid % 128 / 32, lane = tid % 32;
    const int q0 = blockIdx.x * kRows, h = blockIdx.y, b = blockIdx.z, blocks = (tokens + kKeys - 1) / kKeys;
    if (tid == 0) {
        barrier_init(full_q, 1);
        for (int i = 0; i < 2 * kStages; ++i) {
            barrier_init(full + 8 * i, 1);
            barrier_init(empty + 8 * i, kConsumers / 32);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();

    if (tid >= kConsumers) {
        if (tid == kConsumers) {
            barrier_expect(full_q, kTileBytes);
            tma_load(tile_q, &map_q, full_q, 0, q0, h, b);
            tma_load(tile_q + kHalfTile, &map_q, full_q, 64, q0, h, b);
            int s = 0;
            uint32_t phase = 0;
            for (int j = 0; j < blocks; ++j) {
                const uint32_t tile_k = ring + s * 2 * kTileBytes, tile_v = tile_k + kTileBytes;
                const uint32_t full_k = full + s * 16, full_v = full_k + 8, empty_k = empty + s * 16, empty_v = empty_k + 8;
                barrier_wait(empty_k, phase ^ 1);  // the first round passes
                barrier_expect(full_k, kTileBytes);
                tma_load(tile_k, &map_k, full_k, 0, j * kKeys, h, b);
                tma_load(tile_k + kHalfTile, &map_k, full_k, 64, j * kKeys, h, b);
                barrier_wait(empty_v, phase ^ 1);
                barrier_expect(full_v, kTileBytes);
                tma_load(tile_v, &map_v, full_v, 0, j * kKeys, h, b);
                tma_load(tile_v + kHalfTile, &map_v, full_v, 64, j * kKeys, h, b);
                if (++s == kStages) {
                    s = 0;
                    phase ^= 1;
                }
            }
        }
        return;
    }

    float score[kKeys / 2], out[kDim / 2];
    uint32_t p[kKeys / 4];
    Softmax softmax;
    int s = 0;
    uint32_t phase = 0;
    barrier_wait(full_q, 0);
    for (int j = 0; j < blocks; ++j) {
        const uint32_t tile_k = ring + s * 2 * kTileBytes, tile_v = tile_k + kTileBytes;
        const uint32_t full_k = full + s * 16, full_v = full_k + 8, empty_k = empty + s * 16, empty_v = empty_k + 8;
        const uint64_t desc_q = matrix_descriptor(tile_q + group * 64 * 128, 16, 1024), desc_k = matrix_descriptor(tile_k, 16, 1024);
        barrier_wait(full_k, phase);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kDim / 16; ++i) {
            const int step = i / 4 * (kHalfTile / 16) + i % 4 * 2;
            wgmma_scores(score, desc_q + step, desc_k + step, i);
        }
        wgmma_commit();
        wgmma_wait<0>();
        pin(score);
        __syncwarp();
        if (lane == 0) barrier_arrive(empty_k);  // this warp is done with the tile of K
        if (tokens - j * kKeys < kKeys) mask_tail(score, tokens - j * kKeys, lane);
        softmax.step(score, scale);
        if (j > 0) {
#pragma unroll
            for (int i = 0; i < 64; ++i) out[i] *= softmax.shrink[i / 2 % 2];
        }
#pragma unroll
        for (int i = 0; i < kKeys / 4; ++i) p[i] = pack(score[2 * i], score[2 * i + 1]);
        const uint64_t desc_v = matrix_descriptor(tile_v, kHalfTile, 1024);
        barrier_wait(full_v, phase);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kKeys / 16; ++i) wgmma_values(out, p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3], desc_v + i * 128, j | i);
        wgmma_commit();
        wgmma_wait<0>();
        pin(out);
        __syncwarp();
        if (lane == 0) barrier_arrive(empty_v);  // and with the tile of V
        if (++s == kStages) {
            s = 0;
            phase ^= 1;
        }
    }

    // The warpgroup's 64 rows of Q become its staging tile; nobody else reads them.
    group_sync(group);
    const int row = group * 64 + warp * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float inverse = softmax.inverse(i);
        const uint32_t line = tile_q + (row + i * 8) * 128 + lane % 4 * 4;
#pragma unroll
        for (int d = 0; d < kDim / 8; ++d) {
            const uint32_t pair = pack(out[4 * d + 2 * i] * inverse, out[4 * d + 2 * i + 1] * inverse);
            const uint32_t to = line + d / 8 * kHalfTile + ((d % 8) ^ (lane / 4)) * 16;
            asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(pair) : "memory");
        }
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    group_sync(group);
    if (tid % 128 == 0) {
        const uint32_t staging = tile_q + group * 64 * 128;
        tma_store(&map_o, staging, 0, q0 + group * 64, h, b);
        tma_store(&map_o, staging + kHalfTile, 64, q0 + group * 64, h, b);
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
}

// The tensor map of one tensor [B,H,S,128], innermost first: boxes of 64 dimensions and `rows` tokens of one head.
bool encode(CUtensorMap *map, const klineage_tensor &t, uint32_t rows) {
    const cuuint64_t dims[4] = {cuuint64_t(kDim), cuuint64_t(t.shape[2]), cuuint64_t(t.shape[1]), cuuint64_t(t.shape[0])};
    const cuuint64_t strides[3] = {cuuint64_t(t.stride[2]) * sizeof(half), cuuint64_t(t.stride[1]) * sizeof(half), cuuint64_t(t.stride[0]) * sizeof(half)};
    const cuuint32_t box[4] = {64, rows, 1, 1}, steps[4] = {1, 1, 1, 1};
    return cuTensorMapEncodeTiled(map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4, t.data, dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                  CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// Why this call is refused, or nullptr.
const char *refusal(const klineage_call *call) {
    if (call->num_inputs != 3 || call->num_outputs != 1) return "fmha reads q, k, v and writes o";
    for (const klineage_tensor *t : {&call->inputs[0], &call->inputs[1], &call->inputs[2], &call->outputs[0]}) {
        if (t->dtype != KLINEAGE_FLOAT16 || t->num_dims != 4 || t->shape[3] != kDim) return "fmha: fp16 [B,H,S,128] only";
        if (t->stride[3] != 1 || t->stride[0] % 8 || t->stride[1] % 8 || t->stride[2] % 8 || reinterpret_cast<uintptr_t>(t->data) % 16)
            return "fmha: rows must be contiguous and 16-byte aligned";
        if (t->stride[0] <= 0 || t->stride[1] <= 0 || t->stride[2] <= 0) return "fmha: strides must be positive";
        for (int i = 0; i < 4; ++i)
            if (t->shape[i] != call->inputs[0].shape[i]) return "fmha: q, k, v and o must have one shape";
    }
    const int64_t tokens = call->inputs[0].shape[2];
    if (tokens < 8 || tokens > 65536 || tokens % 8) return "fmha: 8 to 65536 tokens, a multiple of 8";
    if (klineage_scalar_value(call, "causal", 0) != 0) return "fmha: non-causal only";
    return nullptr;
}

}  // namespace

extern "C" int run(const klineage_call *call) {
    const char *why = refusal(call);
    KLINEAGE_REQUIRE(call, why == nullptr, why);
    const klineage_tensor &q = call->inputs[0];
    const int batch = int(q.shape[0]), heads = int(q.shape[1]), tokens = int(q.shape[2]);
    const float scale = float(klineage_scalar_value(call, "scale", 0.08838834764831845)) * 1.4426950408889634f;  // base-2 exponentials
    const auto stream = static_cast<cudaStream_t>(call->stream);
    cudaFuncSetAttribute(fmha, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
    CUtensorMap map_q, map_k, map_v, map_o;
    const bool encoded = encode(&map_q, q, kRows) && encode(&map_k, call->inputs[1], kKeys) && encode(&map_v, call->inputs[2], kKeys) &&
                         encode(&map_o, call->outputs[0], 64);
    KLINEAGE_REQUIRE(call, encoded, "fmha: a tensor map cannot be encoded");
    fmha<<<dim3((tokens + kRows - 1) / kRows, heads, batch), kThreads, kSharedBytes, stream>>>(map_q, map_k, map_v, map_o, tokens, scale);
    KLINEAGE_REQUIRE(call, cudaGetLastError() == cudaSuccess, "fmha: the launch failed");
    return 0;
}
