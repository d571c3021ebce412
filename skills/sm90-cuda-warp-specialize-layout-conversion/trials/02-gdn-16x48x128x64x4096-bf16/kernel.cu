#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "klineage.h"

namespace {

constexpr int kDim = 128, kChunk = 64;
constexpr int kTile = 64 * 128;       // bytes of a swizzled 64x64 tile
constexpr int kVector = 2 * kChunk;   // floats per head and chunk: decay since the chunk's start, decay to its end
constexpr float kLog2e = 1.4426950408889634f;
constexpr int kBlock = 512;            // bytes of a 16x16 fp16 block
constexpr int kDiagonal = 16 * 16 + 4;  // floats of a 16x16 fp32 block, padded
constexpr int kBatch = 3;               // value heads that share one pass over a key head's chunk
constexpr int kPrepareBytes = 1024 + 4 * kTile + 6 * kBatch * kBlock + (4 * kBatch * kDiagonal + 2 * kBatch * kChunk) * 4 + 3 * 8;
constexpr int kPrepareCompute = 128, kPrepareThreads = kPrepareCompute + 128;  // the last warpgroup converts the gates
constexpr int kGateBox = 4;                        // heads of a raw box of gates: kBatch, rounded up to 16 bytes
constexpr int kGateFloats = kGateBox * kChunk;     // of a raw box, [64 tokens][4 heads]
constexpr int kGateBytes = kGateFloats * 4;
static_assert(kBatch <= kGateBox && 2 * kGateFloats <= 4 * kBatch * kDiagonal, "raw gates lie where the diagonal blocks go");
constexpr int kCluster = 2;
constexpr int kStages = 3, kStageTx = 7 * kTile + kVector * 4, kStageBytes = 7 * kTile + 1024;  // K, Q, V, T', P and decays of a chunk
constexpr int kChainThreads = 160;
constexpr int kChainBytes = 1024 + kStages * kStageBytes + kTile + 8 * 3 * kStages;

__device__ __forceinline__ uint32_t smem_address(const void *p) { return uint32_t(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive_at(uint32_t barrier, uint32_t cta) {
    asm volatile("{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [remote]; }" ::"r"(barrier), "r"(cta) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
    asm volatile("{ .reg .pred done;\n"
                 "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again; }" ::"r"(barrier), "r"(parity) : "memory");
}

__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// One box at (x, head, token).
__device__ __forceinline__ void tma_load(uint32_t dst, const CUtensorMap *map, uint32_t barrier, int x, int head, int token) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];"
                 ::"r"(dst), "l"(map), "r"(barrier), "r"(x), "r"(head), "r"(token) : "memory");
}

// One raw box of gates at (head, token).
__device__ __forceinline__ void tma_load_gates(uint32_t dst, const CUtensorMap *map, uint32_t barrier, int head, int token) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
                 ::"r"(dst), "l"(map), "r"(barrier), "r"(head), "r"(token) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Among the computing warps of `prepare`, when the converting ones have left.
__device__ __forceinline__ void sync_compute() { asm volatile("bar.sync 1, 128;" ::: "memory"); }
template <int kCount>
__device__ __forceinline__ void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount)); }
template <int kCount>
__device__ __forceinline__ void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount)); }

// The same box lands at the same shared address, and signals the same barrier, in both CTAs of the cluster.
__device__ __forceinline__ void tma_load_all(uint32_t dst, const CUtensorMap *map, uint32_t barrier, int x, int head, int token) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
                 " [%0], [%1, {%3, %4, %5}], [%2], %6;"
                 ::"r"(dst), "l"(map), "r"(barrier), "r"(x), "r"(head), "r"(token), "h"(uint16_t((1 << kCluster) - 1)) : "memory");
}
__device__ __forceinline__ void bulk_load(uint32_t dst, const void *src, uint32_t barrier, uint32_t bytes) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(dst), "l"(src), "r"(bytes), "r"(barrier) : "memory");
}
__device__ __forceinline__ void tma_store(const CUtensorMap *map, uint32_t src, int x, int head, int token) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];\ncp.async.bulk.commit_group;"
                 ::"l"(map), "r"(src), "r"(x), "r"(head), "r"(token) : "memory");
}

__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ void stmatrix_x4(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

__device__ __forceinline__ void mma_fp16(float *d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint32_t pack(float lo, float hi) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(lo, hi);
    return *reinterpret_cast<const uint32_t *>(&pair);
}
__device__ __forceinline__ float2 unpack(uint32_t x) { return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)); }
__device__ __forceinline__ uint32_t pack_half(float lo, float hi) {
    const half2 pair = __floats2half2_rn(lo, hi);
    return *reinterpret_cast<const uint32_t *>(&pair);
}
__device__ __forceinline__ float2 unpack_half(uint32_t x) { return __half22float2(*reinterpret_cast<const half2 *>(&x)); }
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Shared-memory matrix descriptor with 128-byte swizzle. Contiguous along k: 8-row groups 1024 bytes apart, `leading` unused. Transposed by
// the instruction: blocks of 64 columns `leading` bytes apart, groups of 8 k 1024 bytes apart.
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t address, uint32_t leading = 16) {
    return uint64_t((address & 0x3ffff) >> 4) | uint64_t(leading >> 4) << 16 | uint64_t(1024 >> 4) << 32 | uint64_t(1) << 62;
}

// Offset of 16 columns number i in a matrix of 64-column tiles, in descriptor units.
__device__ __forceinline__ constexpr int k_step(int i) { return i / 4 * (kTile / 16) + i % 4 * 2; }

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory"); }

// Eight accumulators as operands.
#define ACC8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define D32                                                              \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"

// d[64x64] (+)= A[64x16] B[64x16]^T, both in shared memory.
__device__ __forceinline__ void wgmma_64(float (&d)[32], uint64_t a, uint64_t b, int accumulate) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %34, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " D32 "}, %32, %33, p, 1, 1, 0, 0; }"
                 : ACC8(0), ACC8(8), ACC8(16), ACC8(24) : "l"(a), "l"(b), "r"(accumulate));
}
// The same with A in registers.
__device__ __forceinline__ void wgmma_64(float (&d)[32], const uint32_t *a, uint64_t b, int accumulate) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %37, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " D32 "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0; }"
                 : ACC8(0), ACC8(8), ACC8(16), ACC8(24) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}
// d[64x128] += A[64x16] B[16x128]; A in registers, B with its columns contiguous.
__device__ __forceinline__ void wgmma_128(float (&d)[64], const uint32_t *a, uint64_t b) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %69, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " D32 ", "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, {%64, %65, %66, %67}, %68, p, 1, 1, 1; }"
                 : ACC8(0), ACC8(8), ACC8(16), ACC8(24), ACC8(32), ACC8(40), ACC8(48), ACC8(56) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1));
}

// Keeps the compiler from moving accesses to registers across the wait that completes them.
template <int kCount>
__device__ __forceinline__ void pin(float (&x)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

// Sums of one head's gates from the start of a chunk, in units of log 2, and its betas; one warp. Also writes the decays: from the chunk's start to
// each token, and from each token to the chunk's end.
// Reads raw boxes in shared memory, from the head's column on; tokens beyond the last are zero there.
__device__ __forceinline__ void sum_gates(const float *raw_g, const float *raw_beta, float *gamma, float *beta, float *decays) {
    const int lane = threadIdx.x % 32;
    float sum[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        sum[i] = raw_g[(lane + 32 * i) * kGateBox];
        beta[lane + 32 * i] = raw_beta[(lane + 32 * i) * kGateBox];
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const float other0 = __shfl_up_sync(~0u, sum[0], step), other1 = __shfl_up_sync(~0u, sum[1], step);
        if (lane >= step) sum[0] += other0, sum[1] += other1;
    }
    sum[1] += __shfl_sync(~0u, sum[0], 31);
    const float total = __shfl_sync(~0u, sum[1], 31);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        gamma[lane + 32 * i] = sum[i] * kLog2e;
        decays[lane + 32 * i] = exp2_fast(sum[i] * kLog2e);
        decays[kChunk + lane + 32 * i] = exp2_fast((total - sum[i]) * kLog2e);
    }
}

// Where lane l of a warp finds its 16 bytes of a 16x16 fp16 block.
__device__ __forceinline__ uint32_t block_place(int row, int chunk) { return row * 32 + (chunk ^ (row >> 2 & 1)) * 16; }

struct Blocks {
    uint32_t tile, inverse, below;  // T' of one head; its inverted diagonal blocks; its blocks of L below the diagonal
    const float *beta;

    __device__ __forceinline__ void store(int i, int j, const float (&x)[8]) const {
        const int lane = threadIdx.x % 32, row = 16 * i + lane % 8 + lane / 16 * 8, chunk = 2 * j + lane / 8 % 2;
        const float b0 = beta[16 * j + lane / 4], b1 = beta[16 * j + 8 + lane / 4];
        stmatrix_x4_trans(tile + row * 128 + (chunk ^ row % 8) * 16, pack(x[0] * b0, x[1] * b0), pack(x[2] * b1, x[3] * b1),
                          pack(x[4] * b0, x[5] * b0), pack(x[6] * b1, x[7] * b1));
    }

    // Block column j of T = (I + L)^-1 by block substitution, T_ij = -T_ii (L_ij T_jj + ...), on transposed blocks: a product's accumulators
    // are the next product's left operand. Writes T diag(beta) as bf16.
    template <int j>
    __device__ __forceinline__ void column() const {
        const int lane = threadIdx.x % 32;
        const uint32_t place = block_place(lane % 8 + lane / 16 * 8, lane / 8 % 2);
        uint32_t x[4 - j][4], b[4];
        ldmatrix_x4_trans(x[0], inverse + j * kBlock + place);
        float done[8] = {};
#pragma unroll
        for (int i = 0; i < j; ++i) store(i, j, done);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float2 pair = unpack_half(x[0][e]);
            done[2 * e] = pair.x, done[2 * e + 1] = pair.y;
        }
        store(j, j, done);
#pragma unroll
        for (int i = j + 1; i < 4; ++i) {
            float sum[8] = {};
#pragma unroll
            for (int m = j; m < i; ++m) {
                ldmatrix_x4(b, below + (i * (i - 1) / 2 + m) * kBlock + place);
                mma_fp16(sum, x[m - j], b[0], b[1]);
                mma_fp16(sum + 4, x[m - j], b[2], b[3]);
            }
            uint32_t y[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) y[e] = pack_half(-sum[2 * e], -sum[2 * e + 1]), done[2 * e] = done[2 * e + 1] = 0.f;
            ldmatrix_x4(b, inverse + i * kBlock + place);
            mma_fp16(done, y, b[0], b[1]);
            mma_fp16(done + 4, y, b[2], b[3]);
#pragma unroll
            for (int e = 0; e < 4; ++e) x[i - j][e] = pack_half(done[2 * e], done[2 * e + 1]);
            store(i, j, done);
        }
    }
};

// A position in a ring; the phase flips each time the ring wraps.
struct Ring {
    int stage = 0;
    uint32_t phase = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == kStages) stage = 0, phase ^= 1;
    }
};

__device__ __forceinline__ float2 shared_pair(uint32_t address) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address) : "memory");
    return x;
}
__device__ __forceinline__ float shared_value(uint32_t address) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
    return x;
}

// For one chunk of one key head and up to three of its value heads: T' = (I + tril(beta K K^T o G, -1))^-1 diag(beta) and P = scale tril(Q K^T o G), both bf16 [64x64], side by side in
// the chunk's rows of o; and the decays, in state. G_ij = exp(gates between tokens j and i).
__global__ void __launch_bounds__(kPrepareThreads, 4)
prepare(const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k, const __grid_constant__ CUtensorMap map_o, const __grid_constant__ CUtensorMap map_g,
        const __grid_constant__ CUtensorMap map_beta, float *vectors, int group, float scale) {
    extern __shared__ uint8_t smem[];
    const uint32_t start = smem_address(smem), base = (start + 1023) & ~1023u, tile_k = base, tile_q = base + 2 * kTile;
    const uint32_t inverse = base + kBatch * kTile, below = base + 4 * kTile;
    float *const diagonal = reinterpret_cast<float *>(smem + (base - start) + 4 * kTile + 6 * kBatch * kBlock);
    float *const gamma = diagonal + 4 * kBatch * kDiagonal, *const beta = gamma + kBatch * kChunk;
    const uint32_t full = smem_address(beta + kBatch * kChunk), raw = full + 8, ready = full + 16;
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
    const int key_head = blockIdx.x, chunk = blockIdx.y, t0 = chunk * kChunk, heads = min(kBatch, group - int(blockIdx.z) * kBatch);
    const int head0 = key_head * group + blockIdx.z * kBatch;
    if (tid == 0) {
        barrier_init(full, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        barrier_expect(full, 4 * kTile);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            tma_load(tile_k + i * kTile, &map_k, full, i * 64, key_head, t0);
            tma_load(tile_q + i * kTile, &map_q, full, i * 64, key_head, t0);
        }
    }
    if (tid == kPrepareCompute) {
        barrier_init(raw, 1), barrier_init(ready, 32 * heads);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        barrier_expect(raw, 2 * kGateBytes);
        tma_load_gates(smem_address(diagonal), &map_g, raw, head0, t0);  // where the diagonal blocks go later
        tma_load_gates(smem_address(diagonal) + kGateBytes, &map_beta, raw, head0, t0);
    }
    __syncthreads();
    if (tid >= kPrepareCompute) {  // the converter: a warp per value head
        give_registers<24>();
        const int b = warp - kPrepareCompute / 32;
        if (b < heads) {
            barrier_wait(raw, 0);
            sum_gates(diagonal + b, diagonal + kGateFloats + b, gamma + b * kChunk, beta + b * kChunk, vectors + int64_t(head0 + b) * kDim * kDim + chunk * kVector);
            barrier_arrive(ready);
        }
        return;
    }
    take_registers<104>();
    barrier_wait(full, 0);
    float kk[32], qk[32];
    const uint64_t desc_k = matrix_descriptor(tile_k), desc_q = matrix_descriptor(tile_q);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 8; ++i) wgmma_64(kk, desc_k + k_step(i), desc_k + k_step(i), i);
#pragma unroll
    for (int i = 0; i < 8; ++i) wgmma_64(qk, desc_q + k_step(i), desc_k + k_step(i), i);
    wgmma_commit();
    wgmma_wait<0>();
    pin(kk), pin(qk);
    barrier_wait(ready, 0);  // gate sums and betas are there, and the raw gates have been read
    sync_compute();  // the tiles of K and Q become those of P
    const int r = lane / 4, c = lane % 4 * 2;
    for (int b = 0; b < heads; ++b) {
        const float *gb = gamma + b * kChunk, *bb = beta + b * kChunk + 16 * warp + r;
        const float row[2] = {gb[16 * warp + r], gb[16 * warp + r + 8]}, betas[2] = {bb[0], bb[8]};
        const uint32_t lower = below + (6 * b + warp * (warp - 1) / 2) * kBlock;
        float *const diag = diagonal + (4 * b + warp) * kDiagonal;
        uint32_t p[16];
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            p[2 * n] = p[2 * n + 1] = 0;
            if (n > 2 * warp + 1) continue;
            const float2 column = *reinterpret_cast<const float2 *>(gb + 8 * n + c);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float e0 = exp2_fast(row[i] - column.x), e1 = exp2_fast(row[i] - column.y);
                const float l0 = kk[4 * n + 2 * i] * e0 * betas[i], l1 = kk[4 * n + 2 * i + 1] * e1 * betas[i];
                float p0 = qk[4 * n + 2 * i] * e0 * scale, p1 = qk[4 * n + 2 * i + 1] * e1 * scale;
                if (n >= 2 * warp) {
                    const int behind = r + 8 * i - 8 * (n - 2 * warp) - c;  // row minus column
                    if (behind < 0) p0 = 0.f;
                    if (behind < 1) p1 = 0.f;
                    *reinterpret_cast<float2 *>(diag + (r + 8 * i) * 16 + 8 * (n - 2 * warp) + c) = make_float2(l0, l1);
                } else {
                    asm volatile("st.shared.b32 [%0], %1;" ::"r"(lower + n / 2 * kBlock + block_place(r + 8 * i, n % 2) + c * 2), "r"(pack_half(l0, l1)) : "memory");
                }
                p[2 * n + i] = pack(p0, p1);
            }
        }
        const int place = 16 * warp + lane % 16;
#pragma unroll
        for (int n = 0; n < 8; n += 2)
            stmatrix_x4(base + b * kTile + place * 128 + ((n + lane / 16) ^ place % 8) * 16, p[2 * n], p[2 * n + 1], p[2 * n + 2], p[2 * n + 3]);
    }
    fence_async();
    sync_compute();
    if (tid == 0)
        for (int b = 0; b < heads; ++b) tma_store(&map_o, base + b * kTile, 64, head0 + b, t0);
    for (int task = tid / 16; task < 4 * heads; task += 8) {  // (I + L_ii)^-1 by substitution, a column per lane
        const float *const block = diagonal + task * kDiagonal;
        const int j = tid % 16;
        float x[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            float sum = i == j ? 1.f : 0.f;
#pragma unroll
            for (int m = 0; m < i; m += 4) {
                const float4 l = *reinterpret_cast<const float4 *>(block + 16 * i + m);
                sum -= l.x * x[m];
                if (m + 1 < i) sum -= l.y * x[m + 1];
                if (m + 2 < i) sum -= l.z * x[m + 2];
                if (m + 3 < i) sum -= l.w * x[m + 3];
            }
            x[i] = sum;
            const half rounded = __float2half_rn(sum);
            asm volatile("st.shared.b16 [%0], %1;" ::"r"(inverse + task * kBlock + block_place(i, j / 8) + j % 8 * 2), "h"(*reinterpret_cast<const uint16_t *>(&rounded)) : "memory");
        }
    }
    if (tid == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    sync_compute();  // the tiles of P become those of T'
    if (warp < 3) {
        if (warp < heads) {
            const Blocks blocks{base + warp * kTile, inverse + 4 * warp * kBlock, below + 6 * warp * kBlock, beta + warp * kChunk};
            blocks.column<0>();
            blocks.column<2>();
            blocks.column<3>();
        }
    } else {
        for (int b = 0; b < heads; ++b) Blocks{base + b * kTile, inverse + 4 * b * kBlock, below + 6 * b * kBlock, beta + b * kChunk}.column<1>();
    }
    fence_async();
    sync_compute();
    if (tid == 0) {
        for (int b = 0; b < heads; ++b) tma_store(&map_o, base + b * kTile, 0, head0 + b, t0);
        asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
}

// What lies where in shared memory.
struct Layout {
    uint32_t base;
    __device__ __forceinline__ uint32_t k(int s) const { return base + s * kStageBytes; }
    __device__ __forceinline__ uint32_t q(int s) const { return k(s) + 2 * kTile; }
    __device__ __forceinline__ uint32_t v(int s) const { return k(s) + 4 * kTile; }
    __device__ __forceinline__ uint32_t solve(int s) const { return k(s) + 5 * kTile; }
    __device__ __forceinline__ uint32_t scores(int s) const { return k(s) + 6 * kTile; }
    __device__ __forceinline__ uint32_t vectors(int s) const { return k(s) + 7 * kTile; }
    __device__ __forceinline__ uint32_t staging() const { return base + kStages * kStageBytes; }
    __device__ __forceinline__ uint32_t full(int s) const { return staging() + kTile + 8 * s; }
    __device__ __forceinline__ uint32_t empty(int s) const { return full(kStages + s); }
    __device__ __forceinline__ uint32_t seen(int s) const { return full(2 * kStages + s); }
};

// The chain over the chunks of one head's 64 value columns, by one warpgroup. S^T [64 values x 128 keys] stays in the accumulators; every product has a
// transposed operand in registers: X = S^T K^T, N = (V^T - e^gamma X) T'^T, O^T = scale e^gamma (S^T Q^T) + N P^T, S^T = e^gamma_C S^T +
// (N e^(gamma_C - gamma)) K. The products of O fill the tensor cores while the others' results are being prepared as operands.
__device__ __forceinline__ void carry(const Layout &at, const CUtensorMap *map_o, int head, int half, const float *state0, float *state, int chunks, float scale, int rank) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, c = lane % 4 * 2, row = lane % 8 + lane / 16 * 8, column = 2 * warp + lane / 8 % 2;
    const int64_t corner = int64_t(c) * kDim + 16 * warp + lane / 4;  // this lane's first element of [128 keys][64 values]
    const bool leader = threadIdx.x == 0;
    float s[64], o[32];
#pragma unroll
    for (int i = 0; i < 64; ++i) s[i] = state0 ? state0[corner + (i / 4 * 8 + i % 2) * kDim + i / 2 % 2 * 8] : 0.f;
    uint32_t a[32];
    float x[32];
    Ring ring;
    // The first products of the chunk at `ring`: X, asynchronously.
    auto read_keys = [&] {
#pragma unroll
        for (int i = 0; i < 32; ++i) a[i] = pack(s[2 * i], s[2 * i + 1]);
        barrier_wait(at.full(ring.stage), ring.phase);
        if (leader) barrier_arrive_at(at.seen(ring.stage), rank ^ 1);
        const uint64_t desc_k = matrix_descriptor(at.k(ring.stage));
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 8; ++i) wgmma_64(x, a + 4 * i, desc_k + k_step(i), i);
        wgmma_commit();
    };
    // Half of S^T Q^T, asynchronously.
    auto read_queries = [&](int begin) {
        const uint64_t desc_q = matrix_descriptor(at.q(ring.stage));
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; ++i) wgmma_64(o, a + 4 * (begin + i), desc_q + k_step(begin + i), begin + i);
        wgmma_commit();
    };
    // Sends packed outputs off and releases the tiles of their chunk.
    auto send = [&](const uint32_t (&packed)[16], Ring from, int chunk) {
        if (leader) {
            asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");  // the outputs before have left the staging area
            barrier_wait(at.seen(from.stage), from.phase);  // the peer has T' and P, whose place the outputs take
        }
        asm volatile("bar.sync 1, 128;" ::: "memory");
#pragma unroll
        for (int i = 0; i < 4; ++i)
            stmatrix_x4_trans(at.staging() + (16 * i + row) * 128 + (column ^ row % 8) * 16, packed[4 * i], packed[4 * i + 1], packed[4 * i + 2], packed[4 * i + 3]);
        fence_async();
        asm volatile("bar.sync 1, 128;" ::: "memory");
        if (leader) tma_store(map_o, at.staging(), half * 64, head, chunk * kChunk);
        __syncwarp();
        if (lane < kCluster) barrier_arrive_at(at.empty(from.stage), lane);
    };
    uint32_t packed[16];  // the last chunk's outputs, on their way out
    auto pack_outputs = [&] {
#pragma unroll
        for (int i = 0; i < 16; ++i) packed[i] = pack(o[2 * i], o[2 * i + 1]);
    };
    read_keys();
    read_queries(0);
    for (int chunk = 0;; ++chunk) {
        const uint64_t desc_t = matrix_descriptor(at.solve(ring.stage)), desc_p = matrix_descriptor(at.scores(ring.stage)), desc_kt = matrix_descriptor(at.k(ring.stage), kTile);
        const uint32_t vectors = at.vectors(ring.stage);
        float v[32];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            uint32_t pairs[4];
            ldmatrix_x4_trans(pairs, at.v(ring.stage) + (16 * i + row) * 128 + (column ^ row % 8) * 16);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float2 pair = unpack(pairs[e]);
                v[8 * i + 2 * e] = pair.x, v[8 * i + 2 * e + 1] = pair.y;
            }
        }
        float2 decay[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) decay[i] = shared_pair(vectors + (8 * i + c) * 4);
        const float kept = shared_value(vectors + (kChunk - 1) * 4);
        wgmma_wait<1>();
        pin(x);
        uint32_t y[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) y[i] = pack(v[2 * i] - decay[i / 2].x * x[2 * i], v[2 * i + 1] - decay[i / 2].y * x[2 * i + 1]);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; ++i) wgmma_64(x, y + 4 * i, desc_t + k_step(i), i);
        wgmma_commit();
        read_queries(4);
        float2 rest[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) rest[i] = shared_pair(vectors + (kChunk + 8 * i + c) * 4);
#pragma unroll
        for (int i = 0; i < 64; ++i) s[i] *= kept;
        wgmma_wait<1>();
        pin(x);
        uint32_t u[16], w[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) w[i] = pack(x[2 * i] * rest[i / 2].x, x[2 * i + 1] * rest[i / 2].y);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; ++i) wgmma_128(s, w + 4 * i, desc_kt + i * 128);
        wgmma_commit();
#pragma unroll
        for (int i = 0; i < 16; ++i) u[i] = pack(x[2 * i], x[2 * i + 1]);
        wgmma_wait<1>();
        pin(o);
#pragma unroll
        for (int i = 0; i < 32; ++i) o[i] *= scale * (i % 2 ? decay[i / 4].y : decay[i / 4].x);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; ++i) wgmma_64(o, u + 4 * i, desc_p + k_step(i), 1);
        wgmma_commit();
        wgmma_wait<0>();
        pin(s), pin(o);
        pack_outputs();
        const Ring from = ring;
        ring.advance();
        if (chunk + 1 == chunks) {
            send(packed, from, chunk);
            break;
        }
        read_keys();
        read_queries(0);
        send(packed, from, chunk);
    }
    if (leader) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    __syncwarp();
    cluster_sync();  // the peer has read the decays, which lie where the state goes
#pragma unroll
    for (int i = 0; i < 64; ++i) state[corner + (i / 4 * 8 + i % 2) * kDim + i / 2 % 2 * 8] = s[i];
}

__global__ void __launch_bounds__(kChainThreads, 1)
chain(const __grid_constant__ CUtensorMap half_q, const __grid_constant__ CUtensorMap half_k, const __grid_constant__ CUtensorMap map_v,
      const __grid_constant__ CUtensorMap half_o, const __grid_constant__ CUtensorMap map_o, const float *vectors, const float *state0, float *state, int tokens,
      int group, float scale) {
    extern __shared__ uint8_t smem[];
    const Layout at{(smem_address(smem) + 1023) & ~1023u};
    const int tid = threadIdx.x, head = blockIdx.x / 2, half = blockIdx.x % 2, chunks = (tokens + kChunk - 1) / kChunk;
    if (tid == 0) {
        for (int s = 0; s < kStages; ++s) barrier_init(at.full(s), 1), barrier_init(at.empty(s), 4 * kCluster), barrier_init(at.seen(s), 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    cluster_sync();
    const int64_t corner = int64_t(head) * kDim * kDim + half * 64;
    if (tid < 128) {
        carry(at, &map_o, head, half, state0 ? state0 + corner : nullptr, state + corner, chunks, scale, half);
    } else {
        if (tid == 128) {
            constexpr int kRows = kChunk / kCluster;
            Ring ring;
            for (int chunk = 0; chunk < chunks; ++chunk, ring.advance()) {
                const int s = ring.stage, t0 = chunk * kChunk, t = t0 + half * kRows, part = half * kRows * 128;
                const uint32_t full = at.full(s);
                barrier_wait(at.empty(s), ring.phase ^ 1);
                barrier_expect(full, kStageTx);
                tma_load_all(at.k(s) + part, &half_k, full, 0, head / group, t);
                tma_load_all(at.k(s) + kTile + part, &half_k, full, 64, head / group, t);
                bulk_load(at.vectors(s), vectors + int64_t(head) * kDim * kDim + chunk * kVector, full, kVector * 4);
                tma_load(at.v(s), &map_v, full, half * 64, head, t0);
                tma_load_all(at.solve(s) + part, &half_o, full, 0, head, t);
                tma_load_all(at.q(s) + part, &half_q, full, 0, head / group, t);
                tma_load_all(at.q(s) + kTile + part, &half_q, full, 64, head / group, t);
                tma_load_all(at.scores(s) + part, &half_o, full, 64, head, t);
            }
        }
        __syncwarp();
        cluster_sync();
    }
}

bool rows_are_contiguous(const klineage_tensor &t) {
    return t.stride[2] == 1 && t.stride[0] > 0 && t.stride[1] > 0 && t.stride[0] % 8 == 0 && t.stride[1] % 8 == 0 && reinterpret_cast<uintptr_t>(t.data) % 16 == 0;
}

// Why this call is refused, or nullptr.
const char *refusal(const klineage_call *call) {
    if ((call->num_inputs != 5 && call->num_inputs != 6) || call->num_outputs != 2) return "gdn reads q, k, v, g, beta [, state0] and writes o and state";
    const klineage_tensor *in = call->inputs, &v = in[2], &o = call->outputs[0], &state = call->outputs[1];
    for (const klineage_tensor *t : {&in[0], &in[1], &v, &o})
        if (t->dtype != KLINEAGE_BFLOAT16 || t->num_dims != 3 || t->shape[2] != kDim || t->shape[0] != v.shape[0]) return "gdn: q, k, v and o must be bf16 [T,H,128]";
    for (const klineage_tensor *t : {&in[0], &in[1], &v, &o})
        if (!rows_are_contiguous(*t)) return "gdn: rows must be contiguous and 16-byte aligned";
    for (const klineage_tensor *t : {&in[3], &in[4]})
        if (t->dtype != KLINEAGE_FLOAT32 || t->num_dims != 2 || t->shape[0] != v.shape[0] || t->shape[1] != v.shape[1]) return "gdn: g and beta must be fp32 [T,HV]";
    for (const klineage_tensor *t : {&in[3], &in[4]})
        if (t->stride[1] != 1 || t->stride[0] <= 0 || t->stride[0] % 4 || reinterpret_cast<uintptr_t>(t->data) % 16)
            return "gdn: rows of g and beta must be contiguous and 16-byte aligned";
    for (const klineage_tensor *t : {&state, call->num_inputs == 6 ? &in[5] : &state})
        if (t->dtype != KLINEAGE_FLOAT32 || t->num_dims != 3 || t->shape[0] != v.shape[1] || t->shape[1] != kDim || t->shape[2] != kDim || t->stride[2] != 1 ||
            t->stride[1] != kDim || t->stride[0] != kDim * kDim || reinterpret_cast<uintptr_t>(t->data) % 16)
            return "gdn: state0 and state must be contiguous fp32 [HV,128,128]";
    if (in[0].shape[1] < 1 || in[1].shape[1] != in[0].shape[1] || v.shape[1] % in[0].shape[1] || o.shape[1] != v.shape[1]) return "gdn: HV must be a multiple of HQK";
    if (v.shape[0] < 1 || v.shape[0] > 8192) return "gdn: 1 to 8192 tokens";
    return nullptr;
}

// The driver's function that encodes tensor maps.
auto encoder() {
    static const auto encode = [] {
        void *entry = nullptr;
        cudaDriverEntryPointQueryResult found;
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
        return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry);
    }();
    return encode;
}

// A map of fp32 [T,HV] with the strides of the call; one box is kGateBox heads of a chunk's tokens, as they lie.
CUtensorMap gate_map(const klineage_tensor &t) {
    const auto encode = encoder();
    const cuuint64_t dims[2] = {cuuint64_t(t.shape[1]), cuuint64_t(t.shape[0])};
    const cuuint64_t strides[1] = {cuuint64_t(t.stride[0] * 4)};
    const cuuint32_t box[2] = {cuuint32_t(kGateBox), cuuint32_t(kChunk)}, steps[2] = {1, 1};
    CUtensorMap map;
    encode(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 2, t.data, dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
           CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return map;
}

// A map of [T,H,128] with the strides of the call; one box is 64 dimensions of `rows` tokens of one head.
CUtensorMap tensor_map(const klineage_tensor &t, uint32_t rows) {
    const auto encode = encoder();
    const cuuint64_t dims[3] = {cuuint64_t(t.shape[2]), cuuint64_t(t.shape[1]), cuuint64_t(t.shape[0])};
    const cuuint64_t strides[2] = {cuuint64_t(t.stride[1] * 2), cuuint64_t(t.stride[0] * 2)};
    const cuuint32_t box[3] = {64, 1, rows}, steps[3] = {1, 1, 1};
    CUtensorMap map;
    encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, t.data, dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
           CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return map;
}

}  // namespace

extern "C" int run(const klineage_call *call) {
    const char *why = refusal(call);
    KLINEAGE_REQUIRE(call, why == nullptr, why);
    const klineage_tensor *in = call->inputs, &o = call->outputs[0];
    const int tokens = int(in[2].shape[0]), key_heads = int(in[0].shape[1]), heads = int(in[2].shape[1]), group = heads / key_heads;
    const int chunks = (tokens + kChunk - 1) / kChunk;
    const float scale = float(klineage_scalar_value(call, "scale", 0.08838834764831845));
    const auto stream = static_cast<cudaStream_t>(call->stream);
    const float *const state0 = call->num_inputs == 6 ? static_cast<const float *>(in[5].data) : nullptr;
    float *const state = static_cast<float *>(call->outputs[1].data);
    cudaFuncSetAttribute(prepare, cudaFuncAttributeMaxDynamicSharedMemorySize, kPrepareBytes);
    cudaFuncSetAttribute(chain, cudaFuncAttributeMaxDynamicSharedMemorySize, kChainBytes);
    const CUtensorMap map_o = tensor_map(o, kChunk);
    prepare<<<dim3(key_heads, chunks, (group + kBatch - 1) / kBatch), kPrepareThreads, kPrepareBytes, stream>>>(tensor_map(in[0], kChunk), tensor_map(in[1], kChunk), map_o, gate_map(in[3]), gate_map(in[4]),
                                                                                                                state, group, scale);
    cudaLaunchAttribute cluster;
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {kCluster, 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(kCluster * heads);
    config.blockDim = dim3(kChainThreads);
    config.dynamicSmemBytes = kChainBytes;
    config.stream = stream;
    config.attrs = &cluster;
    config.numAttrs = 1;
    constexpr int kRows = kChunk / kCluster;  // of a shared tile that one CTA asks for
    cudaLaunchKernelEx(&config, chain, tensor_map(in[0], kRows), tensor_map(in[1], kRows), tensor_map(in[2], kChunk), tensor_map(o, kRows), map_o, static_cast<const float *>(state), state0,
                       state, tokens, group, scale);
    KLINEAGE_REQUIRE(call, cudaGetLastError() == cudaSuccess, "gdn: a launch failed");
    return 0;
}
