#include <cuda.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "klineage.h"

namespace {

constexpr int kDim = 128;
constexpr int kRows = 128, kKeys = 128, kStages = 2, kThreads = 384;
constexpr int kHalfTile = 128 * 128, kTileBytes = 2 * kHalfTile;  // a tile: 128 rows, two blocks of 64 dimensions
constexpr int kSharedBytes = 1024 + (1 + 2 * kStages) * kTileBytes + 8 * (1 + 4 * kStages);

// One tensor [B,H,S,128] with the strides of the call, in elements.
struct View {
    half *data;
    int64_t batch, head, token;
    __host__ explicit View(const klineage_tensor &t)
        : data(static_cast<half *>(t.data)), batch(t.stride[0]), head(t.stride[1]), token(t.stride[2]) {}
    __device__ half *row(int b, int h, int s) const { return data + b * batch + h * head + s * token; }
};

__device__ __forceinline__ uint32_t smem_address(const void *p) { return uint32_t(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
    asm volatile("{ .reg .pred done;\n"
                 "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again; }" ::"r"(barrier), "r"(parity) : "memory");
}

__device__ __forceinline__ void tma_load_4d(uint32_t dst, const CUtensorMap *map, uint32_t barrier, int d, int token, int head, int batch) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];"
                 ::"r"(dst), "l"(map), "r"(barrier), "r"(d), "r"(token), "r"(head), "r"(batch) : "memory");
}

// Asks for one tile of 128 rows: two blocks of 64 dimensions, rows past the end filled with zeros.
__device__ __forceinline__ void load_tile(uint32_t tile, const CUtensorMap *map, uint32_t barrier, int token, int head, int batch) {
    barrier_expect(barrier, kTileBytes);
    tma_load_4d(tile, map, barrier, 0, token, head, batch);
    tma_load_4d(tile + kHalfTile, map, barrier, 64, token, head, batch);
}

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
                                                    const __grid_constant__ CUtensorMap map_v, View o, int tokens, float scale) {
    extern __shared__ uint8_t smem[];
    const uint32_t tile_q = (smem_address(smem) + 1023) & ~1023u, ring_k = tile_q + kTileBytes, ring_v = ring_k + kStages * kTileBytes;
    const uint32_t q_full = ring_v + kStages * kTileBytes, k_full = q_full + 8, v_full = k_full + 8 * kStages;
    const uint32_t k_empty = v_full + 8 * kStages, v_empty = k_empty + 8 * kStages;
    const int tid = threadIdx.x, q0 = blockIdx.x * kRows, h = blockIdx.y, b = blockIdx.z, blocks = (tokens + kKeys - 1) / kKeys;
    if (tid == 0) {
        barrier_init(q_full, 1);
        for (int s = 0; s < kStages; ++s) {
            barrier_init(k_full + 8 * s, 1), barrier_init(v_full + 8 * s, 1);
            barrier_init(k_empty + 8 * s, 2), barrier_init(v_empty + 8 * s, 2);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (tid >= 256) {  // the producer warpgroup: one thread works
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (tid > 256) return;
        load_tile(tile_q, &map_q, q_full, q0, h, b);
        for (int j = 0; j < blocks; ++j) {
            const int s = j % kStages;
            barrier_wait(k_empty + 8 * s, j / kStages % 2 ^ 1);
            load_tile(ring_k + s * kTileBytes, &map_k, k_full + 8 * s, j * kKeys, h, b);
            barrier_wait(v_empty + 8 * s, j / kStages % 2 ^ 1);
            load_tile(ring_v + s * kTileBytes, &map_v, v_full + 8 * s, j * kKeys, h, b);
        }
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    const int group = tid / 128, warp = tid % 128 / 32, lane = tid % 32;
    float score[kKeys / 2], out[kDim / 2];
    uint32_t p[kKeys / 4];
    Softmax softmax;
    barrier_wait(q_full, 0);
    auto scores = [&](int j) {
        barrier_wait(k_full + 8 * (j % kStages), j / kStages % 2);
        const uint64_t desc_q = matrix_descriptor(tile_q + group * 64 * 128, 16, 1024), desc_k = matrix_descriptor(ring_k + j % kStages * kTileBytes, 16, 1024);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kDim / 16; ++i) {
            const int step = i / 4 * (kHalfTile / 16) + i % 4 * 2;
            wgmma_scores(score, desc_q + step, desc_k + step, i);
        }
        wgmma_commit();
    };
    auto values = [&](int j) {
        barrier_wait(v_full + 8 * (j % kStages), j / kStages % 2);
        const uint64_t desc_v = matrix_descriptor(ring_v + j % kStages * kTileBytes, kHalfTile, 1024);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kKeys / 16; ++i) wgmma_values(out, p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3], desc_v + i * 128, j | i);
        wgmma_commit();
    };
    scores(0);
    wgmma_wait<0>();
    pin(score);
    if (tid % 128 == 0) barrier_arrive(k_empty);
    if (tokens < kKeys) mask_tail(score, tokens, lane);
    softmax.step(score, scale);
#pragma unroll
    for (int i = 0; i < kKeys / 4; ++i) p[i] = pack(score[2 * i], score[2 * i + 1]);
    for (int j = 1; j < blocks; ++j) {
        scores(j);
        values(j - 1);
        wgmma_wait<1>();  // the scores are there; the values of block j - 1 are still being added
        pin(score);
        if (tid % 128 == 0) barrier_arrive(k_empty + 8 * (j % kStages));
        if (tokens - j * kKeys < kKeys) mask_tail(score, tokens - j * kKeys, lane);
        softmax.step(score, scale);
        wgmma_wait<0>();
        pin(out);
        if (tid % 128 == 0) barrier_arrive(v_empty + 8 * ((j - 1) % kStages));
        if (true) {
#pragma unroll
            for (int i = 0; i < 64; ++i) out[i] *= softmax.shrink[i / 2 % 2];
        }
#pragma unroll
        for (int i = 0; i < kKeys / 4; ++i) p[i] = pack(score[2 * i], score[2 * i + 1]);
    }
    values(blocks - 1);
    wgmma_wait<0>();
    pin(out);
    const int row = q0 + group * 64 + warp * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float inverse = softmax.inverse(i);
        if (row + i * 8 >= tokens) continue;
#pragma unroll
        for (int d = 0; d < kDim / 8; ++d) {
            const uint32_t pair = pack(out[4 * d + 2 * i] * inverse, out[4 * d + 2 * i + 1] * inverse);
            *reinterpret_cast<uint32_t *>(o.row(b, h, row + i * 8) + d * 8 + lane % 4 * 2) = pair;
        }
    }
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

// A map of [B,H,S,128] with the strides of the call; one box is 64 dimensions of `rows` tokens of one head.
CUtensorMap tensor_map(const klineage_tensor &t, uint32_t rows) {
    static const auto encode = [] {
        void *entry = nullptr;
        cudaDriverEntryPointQueryResult found;
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
        return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry);
    }();
    const cuuint64_t dims[4] = {cuuint64_t(t.shape[3]), cuuint64_t(t.shape[2]), cuuint64_t(t.shape[1]), cuuint64_t(t.shape[0])};
    const cuuint64_t strides[3] = {cuuint64_t(t.stride[2] * 2), cuuint64_t(t.stride[1] * 2), cuuint64_t(t.stride[0] * 2)};
    const cuuint32_t box[4] = {64, rows, 1, 1}, steps[4] = {1, 1, 1, 1};
    CUtensorMap map;
    encode(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4, t.data, dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
           CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return map;
}

}  // namespace

extern "C" int run(const klineage_call *call) {
    const char *why = refusal(call);
    KLINEAGE_REQUIRE(call, why == nullptr, why);
    const klineage_tensor &q = call->inputs[0];
    const int batch = int(q.shape[0]), heads = int(q.shape[1]), tokens = int(q.shape[2]);
    const float scale = float(klineage_scalar_value(call, "scale", 0.08838834764831845)) * 1.4426950408889634f;  // base-2 exponentials
    const auto stream = static_cast<cudaStream_t>(call->stream);
    const CUtensorMap map_q = tensor_map(q, kRows), map_k = tensor_map(call->inputs[1], kKeys), map_v = tensor_map(call->inputs[2], kKeys);
    cudaFuncSetAttribute(fmha, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
    fmha<<<dim3((tokens + kRows - 1) / kRows, heads, batch), kThreads, kSharedBytes, stream>>>(map_q, map_k, map_v, View(call->outputs[0]), tokens, scale);
    KLINEAGE_REQUIRE(call, cudaGetLastError() == cudaSuccess, "fmha: the launch failed");
    return 0;
}
