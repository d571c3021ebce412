// Gated delta rule for sm_90a, as in Gated DeltaNet's prefill: q, k [T,HQK,D], v [T,HV,D] bf16, D 64 or 128, log-space gates and betas fp32 [T,HV], one
// state [D keys x D values] per value head, fp32. Any number of tokens, in chunks of 64; HV a multiple of HQK.
//
// Floor at 16/48 heads of 128 and 4096 tokens: 139 MB are 33 us; 1024 clocks of products for each chunk on the chain's 96 SMs are 37 us.
//
// Techniques: a first kernel prepares, for all chunks at once, what does not depend on the state: T' = (I + tril(beta K K^T o G, -1))^-1 diag(beta) and
// P = scale tril(Q K^T o G), keys and queries multiplied once for three value heads, the inverse by 16x16 blocks. A second kernel, a cluster of D / 64 CTAs
// per head, walks over the chunks: one warpgroup carries the state in accumulators, every transposed operand comes out of a product's registers; a second
// one computes the outputs beside it; a thread keeps three chunks in flight by TMA, shared tiles by multicast.
// A long sequence is cut into segments. The state passes from one to the next in fp32; T', P and decays of two segments lie in scratch memory of the call.
// Each kernel starts under the one before it: SMs that have no head to walk over prepare the next segment meanwhile.
//
// Measured on an H200 against FlashInfer: NOTES.md has every step.
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <vector>

#include "klineage.h"
#include "klineage/sm90/v1/cluster.cuh"
#include "klineage/sm90/v1/ldmatrix.cuh"
#include "klineage/sm90/v1/mbarrier.cuh"
#include "klineage/sm90/v1/tensor_map.cuh"
#include "klineage/sm90/v1/tma.cuh"
#include "klineage/sm90/v1/wgmma.cuh"

namespace {

using namespace klineage::sm90;

constexpr int kChunk = 64, kBatch = 3;              // kBatch: value heads that share one pass over a key head's chunk
constexpr int kStages = 3;
constexpr int kTile = 64 * 128;                     // bytes of a swizzled 64x64 tile
constexpr int kBlock = 512;                         // bytes of a 16x16 fp16 block
constexpr int kDiagonal = 16 * 16 + 4;              // floats of a 16x16 fp32 block, padded
constexpr int kPrepareBytes = 1024 + 4 * kTile + 6 * kBatch * kBlock + 4 * kBatch * kDiagonal * 4 + 2 * kBatch * kChunk * 4 + 16;
constexpr int kVector = 2 * kChunk;                 // floats per head and chunk: decay since the chunk's start, decay to its end
constexpr int kRecord = 2 * kTile + kVector * 4;    // bytes of scratch per head and chunk: T' and P as swizzled tiles, the decays
constexpr int kChainThreads = 384;
constexpr int kSegment = 128;                       // chunks of a segment of a long sequence, at most
constexpr int kWalkers = 96;                        // with no more CTAs of the chain than this, SMs are left to prepare beside it
constexpr int kWorthwhile = 3072;                   // (chunk, value head) pairs from which that pays for a second pair of kernels
constexpr int64_t kMaxTokens = 1 << 24;
constexpr float kLog2e = 1.4426950408889634f;

struct Gates {
    const float *g, *beta;
    int64_t g_token, g_head, beta_token, beta_head;
};

// Chunks that one pair of kernels computes, and where their records are.
struct Segment {
    int first, chunks;  // chunks of the sequence
    uint8_t *records;   // [chunks][HV][kRecord]
};

using Product = Wgmma<__nv_bfloat16, 64>;  // 64x64

__device__ __forceinline__ void mma_fp16(float *d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    mma_16x8x16<__half>(*reinterpret_cast<float (*)[4]>(d), a, b0, b1);
}
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) { return pack<__nv_bfloat16>(low, high); }
__device__ __forceinline__ float2 unpack_bf16(uint32_t x) { return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)); }
__device__ __forceinline__ uint32_t pack_half(float low, float high) { return pack<__half>(low, high); }
__device__ __forceinline__ float2 unpack_half(uint32_t x) { return __half22float2(*reinterpret_cast<const half2 *>(&x)); }
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Tiles of 64 columns: rows as k, or (transposed by the product) columns as k.
__device__ __forceinline__ uint64_t rows(uint32_t address) { return matrix_descriptor(address, 16, 1024); }
__device__ __forceinline__ uint64_t columns(uint32_t address) { return matrix_descriptor(address, kTile, 1024); }
// Offset of 16 columns number i in a matrix of 64-column tiles, in descriptor units.
__device__ __forceinline__ constexpr int k_step(int i) { return i / 4 * (kTile / 16) + i % 4 * 2; }

// Where lane l of a warp finds its 16 bytes of a 16x16 fp16 block.
__device__ __forceinline__ uint32_t block_place(int row, int chunk) { return row * 32 + (chunk ^ (row >> 2 & 1)) * 16; }

struct Blocks {
    uint32_t tile, inverse, below;  // T' of one head; its inverted diagonal blocks; its blocks of L below the diagonal
    const float *beta;

    __device__ __forceinline__ void store(int i, int j, const float (&x)[8]) const {
        const int lane = threadIdx.x % 32, row = 16 * i + lane % 8 + lane / 16 * 8, chunk = 2 * j + lane / 8 % 2;
        const float b0 = beta[16 * j + lane / 4], b1 = beta[16 * j + 8 + lane / 4];
        stmatrix_x4_trans(tile + row * 128 + (chunk ^ row % 8) * 16, pack_bf16(x[0] * b0, x[1] * b0), pack_bf16(x[2] * b1, x[3] * b1),
                          pack_bf16(x[4] * b0, x[5] * b0), pack_bf16(x[6] * b1, x[7] * b1));
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

// For one chunk of one key head and up to three of its value heads: T' = (I + tril(beta K K^T o G, -1))^-1 diag(beta) and P = scale tril(Q K^T o G), both
// bf16 [64x64], and the decays: the chunk's record of each head. G_ij = exp(gates between tokens j and i). The kernel is complete only when the one before it is.
template <int kDim>
__global__ void __launch_bounds__(128, 4)
prepare(const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k, Gates gates, Segment segment, int tokens, int heads_in_all,
        int group, float scale) {
    constexpr int kTiles = kDim / 64, kSteps = kDim / 16;
    extern __shared__ uint8_t smem[];
    const uint32_t start = smem_address(smem), base = (start + 1023) & ~1023u, tile_k = base, tile_q = base + kTiles * kTile;
    const uint32_t inverse = base + kBatch * kTile, below = base + 4 * kTile;
    uint8_t *const rest = smem + (base - start) + 4 * kTile + 6 * kBatch * kBlock;
    float *const diagonal = reinterpret_cast<float *>(rest);
    float *const gamma = diagonal + 4 * kBatch * kDiagonal, *const beta = gamma + kBatch * kChunk;
    const uint32_t full = smem_address(beta + kBatch * kChunk);
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
    const int key_head = blockIdx.x, t0 = (segment.first + blockIdx.y) * kChunk, heads = min(kBatch, group - int(blockIdx.z) * kBatch);
    const int head0 = key_head * group + blockIdx.z * kBatch;
    uint8_t *const records = segment.records + (int64_t(blockIdx.y) * heads_in_all + head0) * kRecord;
    launch_dependents();  // the chain may come in where CTAs of this grid have left
    if (tid == 0) {
        mbarrier_init(full, 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect(full, 2 * kTiles * kTile);
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
            tma_load_3d(tile_k + i * kTile, &map_k, full, i * 64, key_head, t0);
            tma_load_3d(tile_q + i * kTile, &map_q, full, i * 64, key_head, t0);
        }
    }
    if (warp < heads) {  // sums of the gates, in units of log 2
        const int head = head0 + warp;
        float sum[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int t = t0 + lane + 32 * i;
            sum[i] = t < tokens ? gates.g[t * gates.g_token + head * gates.g_head] : 0.f;
            beta[warp * kChunk + lane + 32 * i] = t < tokens ? gates.beta[t * gates.beta_token + head * gates.beta_head] : 0.f;
        }
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const float other0 = __shfl_up_sync(~0u, sum[0], step), other1 = __shfl_up_sync(~0u, sum[1], step);
            if (lane >= step) sum[0] += other0, sum[1] += other1;
        }
        sum[1] += __shfl_sync(~0u, sum[0], 31);
        const float total = __shfl_sync(~0u, sum[1], 31);
        float *const to = reinterpret_cast<float *>(records + warp * kRecord + 2 * kTile);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            gamma[warp * kChunk + lane + 32 * i] = sum[i] * kLog2e;
            to[lane + 32 * i] = exp2_fast(sum[i] * kLog2e);
            to[kChunk + lane + 32 * i] = exp2_fast((total - sum[i]) * kLog2e);
        }
    }
    __syncthreads();
    mbarrier_wait(full, 0);
    float kk[32], qk[32];
    const uint64_t desc_k = rows(tile_k), desc_q = rows(tile_q);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) Product::ss<0, 0>(kk, desc_k + k_step(i), desc_k + k_step(i), i);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) Product::ss<0, 0>(qk, desc_q + k_step(i), desc_k + k_step(i), i);
    wgmma_commit();
    wgmma_wait<0>();
    pin(kk), pin(qk);
    __syncthreads();  // the tiles of K and Q become those of P
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
                p[2 * n + i] = pack_bf16(p0, p1);
            }
        }
        const int place = 16 * warp + lane % 16;
#pragma unroll
        for (int n = 0; n < 8; n += 2)
            stmatrix_x4(base + b * kTile + place * 128 + ((n + lane / 16) ^ place % 8) * 16, p[2 * n], p[2 * n + 1], p[2 * n + 2], p[2 * n + 3]);
    }
    fence_async_shared();
    __syncthreads();
    if (tid == 0) {
        for (int b = 0; b < heads; ++b) bulk_store(records + b * kRecord + kTile, base + b * kTile, kTile);
        bulk_commit();
    }
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
    if (tid == 0) bulk_wait_read<0>();
    __syncthreads();  // the tiles of P become those of T'
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
    fence_async_shared();
    __syncthreads();
    if (tid == 0) {
        for (int b = 0; b < heads; ++b) bulk_store(records + b * kRecord, base + b * kTile, kTile);
        bulk_commit();
        bulk_wait<0>();
    }
    if (blockIdx.x + 1 == gridDim.x && blockIdx.y + 1 == gridDim.y && blockIdx.z + 1 == gridDim.z) grid_dependency_wait();
}

// A position in a ring; the phase flips each time the ring wraps.
struct Ring {
    int stage = 0;
    uint32_t phase = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == kStages) stage = 0, phase ^= 1;
    }
};

// What lies where in shared memory of the chain.
template <int kDim>
struct Layout {
    static constexpr int kTiles = kDim / 64, kCluster = kTiles;  // tiles of K and Q; CTAs of a head, 64 value columns each
    static constexpr int kStageTiles = 2 * kTiles + 3, kStageBytes = kStageTiles * kTile + 1024;
    static constexpr int kBytes = 1024 + kStages * kStageBytes + (2 * kTiles + 2) * kTile + 256;
    uint32_t base;
    __device__ __forceinline__ uint32_t k(int s) const { return base + s * kStageBytes; }
    __device__ __forceinline__ uint32_t q(int s) const { return k(s) + kTiles * kTile; }
    __device__ __forceinline__ uint32_t v(int s) const { return k(s) + 2 * kTiles * kTile; }
    __device__ __forceinline__ uint32_t solve(int s) const { return v(s) + kTile; }
    __device__ __forceinline__ uint32_t scores(int s) const { return v(s) + 2 * kTile; }
    __device__ __forceinline__ uint32_t vectors(int s) const { return v(s) + 3 * kTile; }
    __device__ __forceinline__ uint32_t state(int i) const { return base + kStages * kStageBytes + i * kTiles * kTile; }
    __device__ __forceinline__ uint32_t update() const { return state(2); }
    __device__ __forceinline__ uint32_t staging() const { return state(2) + kTile; }
    __device__ __forceinline__ uint32_t barriers() const { return state(2) + 2 * kTile; }
    __device__ __forceinline__ uint32_t full(int s) const { return barriers() + 8 * s; }
    __device__ __forceinline__ uint32_t empty(int s) const { return full(kStages + s); }
    __device__ __forceinline__ uint32_t state_full(int i) const { return full(2 * kStages + i); }
    __device__ __forceinline__ uint32_t state_empty(int i) const { return full(2 * kStages + 2 + i); }
    __device__ __forceinline__ uint32_t update_full() const { return full(2 * kStages + 4); }
    __device__ __forceinline__ uint32_t update_empty() const { return full(2 * kStages + 5); }
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

// This warp has read the tiles of a stage; all CTAs of the head want to know.
template <int kDim>
__device__ __forceinline__ void release(const Layout<kDim> &at, Ring &ring) {
    __syncwarp();
    if (threadIdx.x % 32 < Layout<kDim>::kCluster) mbarrier_arrive_at(at.empty(ring.stage), threadIdx.x % 32);
    ring.advance();
}

// This warp's writes to shared memory are complete, for the tensor cores too.
__device__ __forceinline__ void publish(uint32_t barrier) {
    fence_async_shared();
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(barrier);
}

// The chain over the chunks of one head's 64 value columns, S^T [64 values x D keys] in accumulators: X = S^T K^T,
// N = (V^T - e^gamma X) T'^T, S^T = e^gamma_C S^T + (N e^(gamma_C - gamma)) K.
template <int kDim>
__device__ __forceinline__ void carry_state(const Layout<kDim> &at, const float *state0, float *state, int chunks) {
    constexpr int kSteps = kDim / 16;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, c = lane % 4 * 2, row = 16 * warp + lane % 16;
    const int64_t corner = int64_t(c) * kDim + 16 * warp + lane / 4;  // this lane's first element of [D keys][64 values]
    float s[kDim / 2];
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) s[i] = state0 ? state0[corner + (i / 4 * 8 + i % 2) * kDim + i / 2 % 2 * 8] : 0.f;
    Ring ring;
    for (int chunk = 0; chunk < chunks; ++chunk) {
        uint32_t a[kSteps][4];
        float x[32], v[32];
#pragma unroll
        for (int i = 0; i < kDim / 4; ++i) a[i / 4][i % 4] = pack_bf16(s[2 * i], s[2 * i + 1]);
        mbarrier_wait(at.full(ring.stage), ring.phase);
        const uint64_t desc_k = rows(at.k(ring.stage)), desc_t = rows(at.solve(ring.stage));
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kSteps; ++i) Product::rs<0>(x, a[i], desc_k + k_step(i), i);
        wgmma_commit();
        // Under that product: the state goes to the other warpgroup, V and the decays come in, the state decays.
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int token = 16 * i + lane % 8 + lane / 16 * 8;
            uint32_t pairs[4];
            ldmatrix_x4_trans(pairs, at.v(ring.stage) + token * 128 + ((2 * warp + lane / 8 % 2) ^ token % 8) * 16);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float2 pair = unpack_bf16(pairs[e]);
                v[8 * i + 2 * e] = pair.x, v[8 * i + 2 * e + 1] = pair.y;
            }
        }
        pin(v);
        float2 decay[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) decay[i] = shared_pair(at.vectors(ring.stage) + (8 * i + c) * 4);
        const float kept = shared_value(at.vectors(ring.stage) + (kChunk - 1) * 4);
        mbarrier_wait(at.state_empty(chunk % 2), chunk / 2 % 2 ^ 1);
#pragma unroll
        for (int i = 0; i < kSteps; ++i)
            stmatrix_x4(at.state(chunk % 2) + i / 4 * kTile + row * 128 + ((i % 4 * 2 + lane / 16) ^ row % 8) * 16, a[i][0], a[i][1], a[i][2], a[i][3]);
        publish(at.state_full(chunk % 2));
        wgmma_wait<0>();
        pin(x);
        uint32_t y[4][4];
#pragma unroll
        for (int i = 0; i < 16; ++i) y[i / 4][i % 4] = pack_bf16(v[2 * i] - decay[i / 2].x * x[2 * i], v[2 * i + 1] - decay[i / 2].y * x[2 * i + 1]);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; ++i) Product::rs<0>(x, y[i], desc_t + k_step(i), i);
        wgmma_commit();
#pragma unroll
        for (int i = 0; i < 8; ++i) decay[i] = shared_pair(at.vectors(ring.stage) + (kChunk + 8 * i + c) * 4);
#pragma unroll
        for (int i = 0; i < kDim / 2; ++i) s[i] *= kept;
        pin(s);
        wgmma_wait<0>();
        pin(x);
        uint32_t u[4][4];
#pragma unroll
        for (int i = 0; i < 16; ++i) u[i / 4][i % 4] = pack_bf16(x[2 * i] * decay[i / 2].x, x[2 * i + 1] * decay[i / 2].y);
        const uint64_t desc_kt = columns(at.k(ring.stage));
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; ++i) Wgmma<__nv_bfloat16, kDim>::template rs<1>(s, u[i], desc_kt + i * 128, 1);
        wgmma_commit();
        mbarrier_wait(at.update_empty(), chunk % 2 ^ 1);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            stmatrix_x4(at.update() + row * 128 + ((i * 2 + lane / 16) ^ row % 8) * 16, pack_bf16(x[8 * i], x[8 * i + 1]), pack_bf16(x[8 * i + 2], x[8 * i + 3]),
                        pack_bf16(x[8 * i + 4], x[8 * i + 5]), pack_bf16(x[8 * i + 6], x[8 * i + 7]));
        publish(at.update_full());
        wgmma_wait<0>();
        pin(s);
        release(at, ring);
    }
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) state[corner + (i / 4 * 8 + i % 2) * kDim + i / 2 % 2 * 8] = s[i];
}

// The outputs: O = scale e^gamma (Q S) + P N.
template <int kDim>
__device__ __forceinline__ void write_outputs(const Layout<kDim> &at, const CUtensorMap *map_o, int head, int half, const Segment &segment, float scale) {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, row = 16 * warp + lane % 16;
    const bool leader = threadIdx.x % 128 == 0;
    const uint64_t desc_n = rows(at.update());
    Ring ring;
    for (int chunk = 0; chunk < segment.chunks; ++chunk) {
        float x[32];
        mbarrier_wait(at.full(ring.stage), ring.phase);
        float decay[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) decay[i] = scale * shared_value(at.vectors(ring.stage) + (16 * warp + lane / 4 + 8 * i) * 4);
        const uint64_t desc_q = rows(at.q(ring.stage)), desc_p = rows(at.scores(ring.stage)), desc_s = rows(at.state(chunk % 2));
        mbarrier_wait(at.state_full(chunk % 2), chunk / 2 % 2);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kDim / 16; ++i) Product::ss<0, 0>(x, desc_q + k_step(i), desc_s + k_step(i), i);
        wgmma_commit();
        wgmma_wait<0>();
        pin(x);
        __syncwarp();
        if (lane == 0) mbarrier_arrive(at.state_empty(chunk % 2));
#pragma unroll
        for (int i = 0; i < 32; ++i) x[i] *= decay[i / 2 % 2];
        mbarrier_wait(at.update_full(), chunk % 2);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; ++i) Product::ss<0, 0>(x, desc_p + k_step(i), desc_n + k_step(i), 1);
        wgmma_commit();
        wgmma_wait<0>();
        pin(x);
        __syncwarp();
        if (lane == 0) mbarrier_arrive(at.update_empty());
        if (leader) bulk_wait_read<0>();  // the last outputs have left the staging area
        named_barrier_sync(1, 128);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            stmatrix_x4(at.staging() + row * 128 + ((i * 2 + lane / 16) ^ row % 8) * 16, pack_bf16(x[8 * i], x[8 * i + 1]), pack_bf16(x[8 * i + 2], x[8 * i + 3]),
                        pack_bf16(x[8 * i + 4], x[8 * i + 5]), pack_bf16(x[8 * i + 6], x[8 * i + 7]));
        fence_async_shared();
        named_barrier_sync(1, 128);
        if (leader) {
            tma_store_3d(map_o, at.staging(), half * 64, head, (segment.first + chunk) * kChunk);
            bulk_commit();
        }
        release(at, ring);
    }
    if (leader) bulk_wait<0>();
}

// Brings one chunk's tiles: each CTA of the head asks for its part of what all share.
template <int kDim>
__device__ __forceinline__ void load_chunk(const Layout<kDim> &at, int stage, const CUtensorMap *part_q, const CUtensorMap *part_k, const CUtensorMap *map_v,
                                           const uint8_t *record, int key_head, int head, int half, int t0) {
    using L = Layout<kDim>;
    constexpr int kRows = kChunk / L::kCluster, kPart = kRows * 128;
    constexpr uint16_t kAll = (1 << L::kCluster) - 1;
    const uint32_t full = at.full(stage);
    const int t = t0 + half * kRows, part = half * kPart;
    const auto tile = [&](uint32_t to, const CUtensorMap *map, int x) {
        if constexpr (L::kCluster > 1) tma_load_3d_multicast(to + part, map, full, x, key_head, t, kAll);
        else tma_load_3d(to, map, full, x, key_head, t);
    };
    const auto solved = [&](uint32_t to, const uint8_t *from) {
        if constexpr (L::kCluster > 1) bulk_load_multicast(to + part, from + part, kPart, full, kAll);
        else bulk_load(to, from, kPart, full);
    };
    mbarrier_arrive_expect(full, L::kStageTiles * kTile + kVector * 4);
#pragma unroll
    for (int i = 0; i < L::kTiles; ++i) tile(at.k(stage) + i * kTile, part_k, i * 64);
    bulk_load(at.vectors(stage), record + 2 * kTile, kVector * 4, full);
    tma_load_3d(at.v(stage), map_v, full, half * 64, head, t0);
    solved(at.solve(stage), record);
#pragma unroll
    for (int i = 0; i < L::kTiles; ++i) tile(at.q(stage) + i * kTile, part_q, i * 64);
    solved(at.scores(stage), record + kTile);
}

template <int kDim>
__global__ void __launch_bounds__(kChainThreads, 1)
chain(const __grid_constant__ CUtensorMap part_q, const __grid_constant__ CUtensorMap part_k, const __grid_constant__ CUtensorMap map_v,
      const __grid_constant__ CUtensorMap map_o, Segment segment, const float *state0, float *state, int heads, int group, float scale) {
    using L = Layout<kDim>;
    extern __shared__ uint8_t smem[];
    const L at{(smem_address(smem) + 1023) & ~1023u};
    const int tid = threadIdx.x, head = blockIdx.x / L::kCluster, half = blockIdx.x % L::kCluster;
    if (tid == 0) {
        for (int s = 0; s < kStages; ++s) mbarrier_init(at.full(s), 1), mbarrier_init(at.empty(s), 8 * L::kCluster);
        for (int i = 0; i < 2; ++i) mbarrier_init(at.state_full(i), 4), mbarrier_init(at.state_empty(i), 4);
        mbarrier_init(at.update_full(), 4), mbarrier_init(at.update_empty(), 4);
        fence_mbarrier_init();
    }
    __syncthreads();
    cluster_sync();
    grid_dependency_wait();  // the records are there, and the state of the segment before
    launch_dependents();     // the next segment's records go where those of the segment before were
    const int64_t corner = int64_t(head) * kDim * kDim + half * 64;
    if (tid < 128) {
        registers_increase<240>();
        carry_state<kDim>(at, state0 ? state0 + corner : nullptr, state + corner, segment.chunks);
    } else if (tid < 256) {
        registers_decrease<152>();
        write_outputs<kDim>(at, &map_o, head, half, segment, scale);
    } else {
        registers_decrease<40>();
        if (tid == 256) {
            fence_async_global();
            Ring ring;
            for (int chunk = 0; chunk < segment.chunks; ++chunk, ring.advance()) {
                mbarrier_wait(at.empty(ring.stage), ring.phase ^ 1);
                load_chunk<kDim>(at, ring.stage, &part_q, &part_k, &map_v, segment.records + (int64_t(chunk) * heads + head) * kRecord, head / group, head, half,
                                 (segment.first + chunk) * kChunk);
            }
        }
    }
    __syncwarp();
    cluster_sync();  // nobody exits while the peer may signal its barriers
}

bool rows_are_contiguous(const klineage_tensor &t) {
    return t.stride[2] == 1 && t.stride[0] > 0 && t.stride[1] > 0 && t.stride[0] % 8 == 0 && t.stride[1] % 8 == 0 && reinterpret_cast<uintptr_t>(t.data) % 16 == 0;
}

// Why this call is refused, or nullptr.
const char *refusal(const klineage_call *call) {
    if ((call->num_inputs != 5 && call->num_inputs != 6) || call->num_outputs != 2) return "gdn reads q, k, v, g, beta [, state0] and writes o and state";
    const klineage_tensor *in = call->inputs, &v = in[2], &o = call->outputs[0], &state = call->outputs[1];
    const int64_t dim = v.num_dims == 3 ? v.shape[2] : 0;
    if (dim != 64 && dim != 128) return "gdn: D must be 64 or 128";
    for (const klineage_tensor *t : {&in[0], &in[1], &v, &o})
        if (t->dtype != KLINEAGE_BFLOAT16 || t->num_dims != 3 || t->shape[2] != dim || t->shape[0] != v.shape[0]) return "gdn: q, k, v and o must be bf16 [T,H,D]";
    for (const klineage_tensor *t : {&in[0], &in[1], &v, &o})
        if (!rows_are_contiguous(*t)) return "gdn: rows must be contiguous and 16-byte aligned";
    for (const klineage_tensor *t : {&in[3], &in[4]})
        if (t->dtype != KLINEAGE_FLOAT32 || t->num_dims != 2 || t->shape[0] != v.shape[0] || t->shape[1] != v.shape[1]) return "gdn: g and beta must be fp32 [T,HV]";
    for (const klineage_tensor *t : {&state, call->num_inputs == 6 ? &in[5] : &state})
        if (t->dtype != KLINEAGE_FLOAT32 || t->num_dims != 3 || t->shape[0] != v.shape[1] || t->shape[1] != dim || t->shape[2] != dim || t->stride[2] != 1 ||
            t->stride[1] != dim || t->stride[0] != dim * dim || reinterpret_cast<uintptr_t>(t->data) % 16)
            return "gdn: state0 and state must be contiguous fp32 [HV,D,D]";
    if (in[0].shape[1] < 1 || in[1].shape[1] != in[0].shape[1] || v.shape[1] % in[0].shape[1] || o.shape[1] != v.shape[1]) return "gdn: HV must be a multiple of HQK";
    if (v.shape[0] < 1 || v.shape[0] > kMaxTokens) return "gdn: 1 to 16,777,216 tokens";
    return nullptr;
}

// A map of [T,H,D] with the strides of the call; one box is 64 dimensions of `tokens` tokens of one head.
const char *tensor_map(CUtensorMap *map, const klineage_tensor &t, uint32_t tokens) {
    return encode_tiled<__nv_bfloat16, 3>(map, t.data, {cuuint64_t(t.shape[2]), cuuint64_t(t.shape[1]), cuuint64_t(t.shape[0])},
                                          {cuuint64_t(t.stride[1] * 2), cuuint64_t(t.stride[0] * 2)}, {64, 1, tokens});
}

// Memory that later work of the stream may use until it is freed on it. It comes from a pool of the device that keeps what it had once, so that a later
// call waits for nothing; a graph under capture gets an allocation of its own.
const char *allocate(void **memory, size_t bytes, cudaStream_t stream) {
    constexpr int kDevices = 64;
    static std::mutex guard;
    static cudaMemPool_t pools[kDevices];
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    int device = 0;
    if (cudaStreamIsCapturing(stream, &capture) != cudaSuccess || cudaGetDevice(&device) != cudaSuccess) return "gdn: the stream does not answer";
    if (capture != cudaStreamCaptureStatusNone || device >= kDevices)
        return cudaMallocAsync(memory, bytes, stream) == cudaSuccess ? nullptr : "gdn: no memory for a segment's records";
    const std::lock_guard<std::mutex> locked(guard);
    if (pools[device] == nullptr) {
        cudaMemPoolProps properties = {};
        properties.allocType = cudaMemAllocationTypePinned;
        properties.location.type = cudaMemLocationTypeDevice;
        properties.location.id = device;
        uint64_t keep = UINT64_MAX;
        if (cudaMemPoolCreate(&pools[device], &properties) != cudaSuccess ||
            cudaMemPoolSetAttribute(pools[device], cudaMemPoolAttrReleaseThreshold, &keep) != cudaSuccess)
            return "gdn: no memory pool";
    }
    return cudaMallocFromPoolAsync(memory, bytes, pools[device], stream) == cudaSuccess ? nullptr : "gdn: no memory for a segment's records";
}

// The two kernels for each segment, of sizes[0], sizes[1], ... chunks. Each may start under the one before it, and prepare does not wait for it: it writes
// the records that the chain before that one has read.
template <int kDim>
const char *launch_segments(const klineage_call *call, const int *sizes, int count, uint8_t *scratch) {
    using L = Layout<kDim>;
    const klineage_tensor *in = call->inputs;
    const int tokens = int(in[2].shape[0]), key_heads = int(in[0].shape[1]), heads = int(in[2].shape[1]), group = heads / key_heads;
    const float scale = float(klineage_scalar_value(call, "scale", kDim == 128 ? 0.08838834764831845 : 0.125));
    const auto stream = static_cast<cudaStream_t>(call->stream);
    const Gates gates{static_cast<const float *>(in[3].data), static_cast<const float *>(in[4].data), in[3].stride[0], in[3].stride[1], in[4].stride[0], in[4].stride[1]};
    float *const state = static_cast<float *>(call->outputs[1].data);
    const float *state0 = call->num_inputs == 6 ? static_cast<const float *>(in[5].data) : nullptr;
    CUtensorMap whole_q, whole_k, part_q, part_k, map_v, map_o;
    constexpr int kRows = kChunk / L::kCluster;  // of a shared tile that one CTA asks for
    for (const char *why : {tensor_map(&whole_q, in[0], kChunk), tensor_map(&whole_k, in[1], kChunk), tensor_map(&part_q, in[0], kRows),
                            tensor_map(&part_k, in[1], kRows), tensor_map(&map_v, in[2], kChunk), tensor_map(&map_o, call->outputs[0], kChunk)})
        if (why) return why;
    const int64_t half = int64_t(*std::max_element(sizes, sizes + count)) * heads * kRecord;
    int first = 0;
    for (int i = 0; i < count; first += sizes[i++]) {
        const Segment segment{first, sizes[i], scratch + i % 2 * half};
        const Launch preparing{dim3(key_heads, sizes[i], (group + kBatch - 1) / kBatch), 128, kPrepareBytes, stream, 1, i > 0};
        if (const char *why = launch(prepare<kDim>, preparing, whole_q, whole_k, gates, segment, tokens, heads, group, scale)) return why;
        const Launch walking{dim3(L::kCluster * heads), kChainThreads, L::kBytes, stream, L::kCluster, true};
        if (const char *why = launch(chain<kDim>, walking, part_q, part_k, map_v, map_o, segment, state0, state, heads, group, scale)) return why;
        state0 = state;
    }
    return nullptr;
}

// Computes with segments of these sizes; nullptr, or what went wrong.
const char *run_segments(const klineage_call *call, const int *sizes, int count) {
    const auto stream = static_cast<cudaStream_t>(call->stream);
    const size_t bytes = size_t(*std::max_element(sizes, sizes + count)) * call->inputs[2].shape[1] * kRecord * std::min(count, 2);
    void *scratch = nullptr;
    if (const char *why = allocate(&scratch, bytes, stream)) return why;
    const auto segments = call->inputs[2].shape[2] == 128 ? launch_segments<128> : launch_segments<64>;
    const char *const why = segments(call, sizes, count, static_cast<uint8_t *>(scratch));
    if (cudaFreeAsync(scratch, stream) != cudaSuccess && why == nullptr) return "gdn: a segment's records were not freed";
    return why;
}

// Sizes of the segments of a sequence, which differ by one at most. NOTES.md has the measurements.
std::vector<int> plan(int chunks, int heads, int walkers) {
    int count = (chunks + kSegment - 1) / kSegment;
    if (count == 1 && walkers <= kWalkers && chunks * heads >= kWorthwhile) count = 2;
    std::vector<int> sizes(count, chunks / count);
    for (int i = 0; i < chunks % count; ++i) ++sizes[i];
    return sizes;
}

}  // namespace

extern "C" int run(const klineage_call *call) {
    const char *why = refusal(call);
    KLINEAGE_REQUIRE(call, why == nullptr, why);
    const klineage_tensor &v = call->inputs[2];
    const std::vector<int> sizes = plan(int((v.shape[0] + kChunk - 1) / kChunk), int(v.shape[1]), int(v.shape[1] * v.shape[2] / 64));
    why = run_segments(call, sizes.data(), int(sizes.size()));
    KLINEAGE_REQUIRE(call, why == nullptr, why);
    return 0;
}
