#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "klineage.h"

namespace {

using bf16 = __nv_bfloat16;

constexpr int kTileM = 128, kTileN = 256, kTileK = 64, kThreads = 288, kStages = 4;
constexpr int kBytesA = kTileM * kTileK * 2, kBytesB = kTileK * kTileN * 2, kStageBytes = kBytesA + kBytesB;
constexpr int kBlockB = kTileK * 128;  // bytes of one block of 64 columns
constexpr int kBoxBytes = 64 * 128;  // staging box of the output: 64 rows of 64 columns, 128-byte swizzle
constexpr int kBoxes = 2;            // staging boxes of each consumer group
constexpr int kSharedBytes = 1024 + kStages * kStageBytes + 2 * kBoxes * kBoxBytes + kStages * 16;
static_assert(kSharedBytes <= 232448, "shared memory of a block");
static_assert(kTileN / 64 % kBoxes == 0, "a tile starts with box 0");

constexpr int kGroup = 16;  // rows of a raster band: 128 CTAs cover about 2048 x 2048 of C at a time

// Tiles in bands of kGroup rows, column by column inside a band: a permutation of all (rows x columns) tiles.
__device__ __forceinline__ int2 tile_at(int index, int rows, int columns) {
    const int band = index / (kGroup * columns), inside = index % (kGroup * columns), height = min(kGroup, rows - band * kGroup);
    return make_int2(band * kGroup + inside % height, inside / height);
}

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

__device__ __forceinline__ void tma_load_3d(uint32_t dst, const CUtensorMap *map, uint32_t barrier, int x, int y, int z) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];"
                 ::"r"(dst), "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z) : "memory");
}

__device__ __forceinline__ void tma_store_3d(const CUtensorMap *map, uint32_t src, int x, int y, int z) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];"
                 ::"l"(map), "r"(src), "r"(x), "r"(y), "r"(z) : "memory");
}
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until at most kPending of this thread's stores still read shared memory.
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory"); }
__device__ __forceinline__ void bulk_wait_all() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
__device__ __forceinline__ void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void group_sync(int id) { asm volatile("bar.sync %0, 128;" ::"r"(id) : "memory"); }

__device__ __forceinline__ uint32_t pack(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t *>(&pair);
}
__device__ __forceinline__ void stmatrix_x4(uint32_t address, uint32_t x0, uint32_t x1, uint32_t x2, uint32_t x3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(address), "r"(x0), "r"(x1), "r"(x2), "r"(x3) : "memory");
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

// d[64x256] (+)= A[64x16] B[16x256]; A K-major, B N-major, both in shared memory.
__device__ __forceinline__ void wgmma_64x256x16(float (&d)[128], uint64_t a, uint64_t b, int accumulate) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
        "%128, %129, p, 1, 1, 0, 1; }"
        : ACC8(0), ACC8(8), ACC8(16), ACC8(24), ACC8(32), ACC8(40), ACC8(48), ACC8(56),
          ACC8(64), ACC8(72), ACC8(80), ACC8(88), ACC8(96), ACC8(104), ACC8(112), ACC8(120)
        : "l"(a), "l"(b), "r"(accumulate));
}

// Keeps the compiler from reading accumulators before the wait that completes them.
template <int kCount>
__device__ __forceinline__ void pin(float (&x)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

__global__ void __launch_bounds__(kThreads, 1)
gemm(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b, const __grid_constant__ CUtensorMap map_c,
     int m, int n, int k) {
    extern __shared__ uint8_t smem[];
    const uint32_t base = (smem_address(smem) + 1023) & ~1023u, staging = base + kStages * kStageBytes;
    const uint32_t full = staging + 2 * kBoxes * kBoxBytes, empty = full + kStages * 8;
    const int tid = threadIdx.x, steps = k / kTileK;
    const int rows = m / kTileM, columns = n / kTileN;
    if (tid == 0) {
        for (int s = 0; s < kStages; ++s) barrier_init(full + 8 * s, 1), barrier_init(empty + 8 * s, 2);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    int s = 0;
    uint32_t phase = 0;  // flips each time the ring wraps; carried across tiles
    auto advance = [&] {
        if (++s == kStages) s = 0, phase ^= 1;
    };
    if (tid == 256) {
        for (int t = blockIdx.x; t < rows * columns; t += gridDim.x) {
            const int2 tile = tile_at(t, rows, columns);
            for (int step = 0; step < steps; ++step, advance()) {
                const uint32_t to_a = base + s * kStageBytes;
                barrier_wait(empty + 8 * s, phase ^ 1);
                barrier_expect(full + 8 * s, kStageBytes);
                tma_load_3d(to_a, &map_a, full + 8 * s, 0, tile.x * kTileM, step);
                tma_load_3d(to_a + kBytesA, &map_b, full + 8 * s, 0, step * kTileK, tile.y * (kTileN / 64));
            }
        }
    }
    const int group = tid / 128, warp = tid % 128 / 32, lane = tid % 32;
    const bool leader = tid % 128 == 0;  // issues its group's stores, and waits for them
    const uint32_t own_boxes = staging + group * kBoxes * kBoxBytes, own_row = (warp * 16 + lane % 16) * 128;
    float sum[kTileN / 2];
    if (tid < 256) for (int t = blockIdx.x; t < rows * columns; t += gridDim.x) {
        const int2 tile = tile_at(t, rows, columns);
        const int row0 = tile.x * kTileM + group * 64, col0 = tile.y * kTileN;
        for (int step = 0; step < steps; ++step, advance()) {
            barrier_wait(full + 8 * s, phase);
            const uint32_t tile_a = base + s * kStageBytes, tile_b = tile_a + kBytesA;
            const uint64_t desc_a = matrix_descriptor(tile_a + group * 64 * 128, 16, 1024), desc_b = matrix_descriptor(tile_b, kBlockB, 1024);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < kTileK / 16; ++i) wgmma_64x256x16(sum, desc_a + i * 2, desc_b + i * 128, step | i);
            wgmma_commit();
            if (step == 0) continue;
            wgmma_wait<1>();
            if (tid % 128 == 0) barrier_arrive(empty + 8 * ((s + kStages - 1) % kStages));
        }
        wgmma_wait<0>();
        pin(sum);
        if (tid % 128 == 0) barrier_arrive(empty + 8 * ((s + kStages - 1) % kStages));
#pragma unroll
        for (int block = 0; block < kTileN / 64; ++block) {
            const uint32_t box = own_boxes + block % kBoxes * kBoxBytes;
            // The buffer is free: at block 0 both are (stores of the previous tile), later the store two blocks back was read.
            if (block != 1) {
                if (leader) {
                    if (block == 0) bulk_wait_read<0>();
                    else bulk_wait_read<1>();
                }
                group_sync(1 + group);
            }
#pragma unroll
            for (int i = 0; i < 8; i += 2) {
                const int x = 4 * (block * 8 + i);
                stmatrix_x4(box + own_row + (((i + lane / 16) ^ (lane % 8)) * 16), pack(sum[x], sum[x + 1]), pack(sum[x + 2], sum[x + 3]),
                            pack(sum[x + 4], sum[x + 5]), pack(sum[x + 6], sum[x + 7]));
            }
            fence_async_shared();
            group_sync(1 + group);
            if (leader) {
                tma_store_3d(&map_c, box, 0, row0, col0 / 64 + block);
                bulk_commit();
            }
        }
    }
    if (tid < 256 && leader) bulk_wait_all();
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
    if (a.shape[0] % kTileM || b.shape[1] % kTileN || a.shape[1] % kTileK) return "gemm: M must be a multiple of 128, N of 256, K of 64";
    return nullptr;
}

// A map of a row-major bf16 matrix as [columns/64][rows][64], so that one box is a swizzled stack of 64-column blocks.
CUtensorMap tensor_map(const klineage_tensor &t, uint32_t box_rows, uint32_t box_blocks) {
    static const auto encode = [] {
        void *entry = nullptr;
        cudaDriverEntryPointQueryResult found;
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
        return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry);
    }();
    const cuuint64_t dims[3] = {64, cuuint64_t(t.shape[0]), cuuint64_t(t.shape[1] / 64)}, strides[2] = {cuuint64_t(t.stride[0] * 2), 128};
    const cuuint32_t box[3] = {64, box_rows, box_blocks}, steps[3] = {1, 1, 1};
    CUtensorMap map;
    encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, t.data, dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
           CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return map;
}

}  // namespace

extern "C" int run(const klineage_call *call) {
    const char *why = refusal(call);
    KLINEAGE_REQUIRE(call, why == nullptr, why);
    const int m = int(call->inputs[0].shape[0]), n = int(call->inputs[1].shape[1]), k = int(call->inputs[0].shape[1]);
    const CUtensorMap map_c = tensor_map(call->outputs[0], 64, 1);
    const auto stream = static_cast<cudaStream_t>(call->stream);
    const CUtensorMap map_a = tensor_map(call->inputs[0], kTileM, 1), map_b = tensor_map(call->inputs[1], kTileK, kTileN / 64);
    cudaFuncSetAttribute(gemm, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
    gemm<<<min(128, m / kTileM * (n / kTileN)), kThreads, kSharedBytes, stream>>>(map_a, map_b, map_c, m, n, k);
    KLINEAGE_REQUIRE(call, cudaGetLastError() == cudaSuccess, "gemm: the launch failed");
    return 0;
}
