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
constexpr int kDiagonal = 256 + 4;    // floats between the diagonal 16x16 blocks of L
constexpr int kBlock = 512;           // bytes of a 16x16 fp16 block; 16-byte chunk i of row r is at i ^ r / 4 % 2
constexpr int kBatch = 2;             // value heads of one key head that a CTA of prepare handles
constexpr int kMember = 4 * kDiagonal * 4 + 6 * kBlock;  // bytes of one member's L: diagonal blocks (fp32), blocks below them (fp16)
constexpr int kPrepareBytes = 1024 + 4 * kTile + kBatch * 2 * kChunk * 4;
static_assert(kBatch * kMember <= 2 * kTile && kMember % 16 == 0, "L of all members takes the place of K");
static_assert(kBatch * kTile <= 2 * kTile, "P, then T' of all members takes the place of Q");
static_assert(kDiagonal * 4 >= kBlock && kDiagonal * 4 % 16 == 0, "an inverse takes the place of its diagonal block");
static_assert(kBatch * 4 * 16 == 128, "one thread per column of the diagonal blocks of all members");
constexpr int kChainBytes = 1024 + 8 * kTile + kVector * 4;

struct Gates {
    const float *g, *beta;
    int64_t g_token, g_head, beta_token, beta_head;
};

// A bf16 tensor [T,H,128] with the strides of the call, in elements.
struct Rows {
    __nv_bfloat16 *data;
    int64_t token, head;
    __host__ explicit Rows(const klineage_tensor &t) : data(static_cast<__nv_bfloat16 *>(t.data)), token(t.stride[0]), head(t.stride[1]) {}
    __device__ __nv_bfloat16 *at(int t, int h) const { return data + t * token + h * this->head; }
};

// Device memory that grows when a call needs more and is kept between calls: the decays of every chunk, then T' and P as [T,HV,128].
struct Scratch {
    uint8_t *data = nullptr;
    int64_t held = 0;
    bool reserve(int64_t bytes) {
        if (bytes <= held) return true;
        cudaFree(data);
        held = cudaMalloc(&data, bytes) == cudaSuccess ? bytes : 0;
        return held > 0;
    }
};

__device__ __forceinline__ uint32_t smem_address(const void *p) { return uint32_t(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Copies 16 bytes asynchronously, or writes zeros when the source row does not exist.
__device__ __forceinline__ void cp_async_16(uint32_t dst, const void *src, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(there ? 16 : 0) : "memory");
}

__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ void stmatrix_x4(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

__device__ __forceinline__ uint32_t pack(float lo, float hi) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(lo, hi);
    return *reinterpret_cast<const uint32_t *>(&pair);
}
__device__ __forceinline__ float2 unpack(uint32_t x) { return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)); }
__device__ __forceinline__ uint32_t pack_half(float lo, float hi) {
    const __half2 pair = __floats2half2_rn(lo, hi);
    return *reinterpret_cast<const uint32_t *>(&pair);
}
__device__ __forceinline__ float2 unpack_half(uint32_t x) { return __half22float2(*reinterpret_cast<const __half2 *>(&x)); }
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

// Address of 16-byte chunk `chunk` of row `row` in swizzled tiles of 64 columns.
__device__ __forceinline__ uint32_t swizzled(uint32_t tile, int row, int chunk) { return tile + chunk / 8 * kTile + row * 128 + (chunk % 8 ^ row % 8) * 16; }

// Copies `columns` columns of 64 tokens of one head into swizzled tiles; tokens past the end become zeros.
template <int kThreads>
__device__ __forceinline__ void load_rows(uint32_t tile, const Rows &from, int head, int column, int columns, int t0, int tokens) {
    for (int i = threadIdx.x; i < kChunk * columns / 8; i += kThreads) {
        const int row = i / (columns / 8), chunk = i % (columns / 8), t = t0 + row;
        cp_async_16(swizzled(tile, row, chunk), from.at(min(t, tokens - 1), head) + column + chunk * 8, t < tokens);
    }
}

// Copies a swizzled 64x64 tile to 64 columns of the rows of one head that exist, 16 bytes at a time.
template <int kThreads>
__device__ __forceinline__ void store_rows(uint32_t tile, const Rows &to, int head, int column, int t0, int tokens, int thread) {
    constexpr int kCount = kChunk * 8 / kThreads;
    uint4 x[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        const uint32_t address = swizzled(tile, i * (kThreads / 8) + thread / 8, thread % 8);
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(x[i].x), "=r"(x[i].y), "=r"(x[i].z), "=r"(x[i].w) : "r"(address) : "memory");
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        const int t = t0 + i * (kThreads / 8) + thread / 8;
        if (t < tokens) *reinterpret_cast<uint4 *>(to.at(t, head) + column + thread % 8 * 8) = x[i];
    }
}

// d[16x8] += A[16x16] B[16x8], fp16 products with fp32 sums.
__device__ __forceinline__ void mma_half(float *d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Sums of one head's gates from the start of a chunk, in units of log 2, and its betas; one warp. Also writes the decays: from the chunk's start to
// each token, and from each token to the chunk's end.
__device__ __forceinline__ void sum_gates(const Gates &gates, int head, int t0, int tokens, float *gamma, float *beta, float *decays) {
    const int lane = threadIdx.x % 32;
    float sum[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int t = t0 + lane + 32 * i;
        sum[i] = t < tokens ? gates.g[t * gates.g_token + head * gates.g_head] : 0.f;
        beta[lane + 32 * i] = t < tokens ? gates.beta[t * gates.beta_token + head * gates.beta_head] : 0.f;
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

// For one chunk of one value head: T' = (I + tril(beta K K^T o G, -1))^-1 diag(beta) and P = scale tril(Q K^T o G), both bf16 [64x64], side by side in
// the scratch rows of the chunk; and the decays. G_ij = exp(gates between tokens j and i). The inverse is taken by 16x16 blocks: the diagonal ones by
// substitution, those below by products, a block column per warp: T_ij = -T_ii (L_ij T_jj + ...).
// A CTA does this for up to kBatch value heads of one key head, which share the products K K^T and Q K^T in registers.
__global__ void __launch_bounds__(128, 5)
prepare(Rows q, Rows k, Rows scratch, Gates gates, float *vectors, int tokens, int group, float scale) {
    extern __shared__ uint8_t smem[];
    const uint32_t start = smem_address(smem), base = (start + 1023) & ~1023u, tile_k = base, tile_q = base + 2 * kTile;
    // After the products, in the place of K for every member: diagonal blocks of L (fp32), later their transposed inverses (fp16), and the blocks of L
    // below them. In the place of Q, a tile per member: P, and once that is written out, T'.
    uint8_t *const members_data = smem + (base - start);
    float *const factors = reinterpret_cast<float *>(smem + (base - start) + 4 * kTile);  // gamma and beta of every member
    const int tid = threadIdx.x, warp = __shfl_sync(~0u, tid / 32, 0), lane = tid % 32, chunk = blockIdx.y, t0 = chunk * kChunk;
    const int batches = (group + kBatch - 1) / kBatch, key_head = blockIdx.x / batches, offset = blockIdx.x % batches * kBatch;
    const int members = min(kBatch, group - offset), head0 = key_head * group + offset;
    load_rows<128>(tile_k, k, key_head, 0, kDim, t0, tokens);
    load_rows<128>(tile_q, q, key_head, 0, kDim, t0, tokens);
    if (warp < members) {
        const int heads = int(gridDim.x) / batches * group;
        float *const gamma = factors + warp * 2 * kChunk;
        sum_gates(gates, head0 + warp, t0, tokens, gamma, gamma + kChunk, vectors + (int64_t(chunk) * heads + head0 + warp) * kVector);
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    fence_async();
    __syncthreads();
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
    __syncthreads();  // everybody's products have read the tiles
    const int c = lane % 4 * 2;
    const uint32_t fragment = lane % 16 * 32 + (lane / 16 ^ lane / 4 % 2) * 16;  // this lane's row of four 8x8 matrices in an fp16 block
#pragma unroll 1
    for (int member = 0; member < members; ++member) {  // the products are only read
    float *const diagonal = reinterpret_cast<float *>(members_data + member * kMember);
    const uint32_t below = base + member * kMember + 4 * kDiagonal * 4, tile_p = tile_q + member * kTile;
    const float *const gamma = factors + member * 2 * kChunk, *const beta = gamma + kChunk;
    const float gamma0 = gamma[16 * warp + lane / 4], gamma1 = gamma[16 * warp + lane / 4 + 8];
    const float beta0 = beta[16 * warp + lane / 4], beta1 = beta[16 * warp + lane / 4 + 8];
#pragma unroll
    for (int m = 0; m < 4; ++m) {  // block columns
        uint32_t p[4] = {0, 0, 0, 0};
        if (m <= warp) {
            uint32_t l[4] = {0, 0, 0, 0};
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const float2 other = *reinterpret_cast<const float2 *>(gamma + 16 * m + 8 * n + c);
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int at = 8 * m + 4 * n + 2 * i, row = lane / 4 + 8 * i, column = 8 * n + c;
                    const float own = i ? gamma1 : gamma0, factor = i ? beta1 : beta0;
                    const float e0 = exp2_fast(own - other.x), e1 = exp2_fast(own - other.y);  // above the diagonal maybe infinite
                    const float l0 = kk[at] * e0 * factor, l1 = kk[at + 1] * e1 * factor;
                    float p0 = qk[at] * e0 * scale, p1 = qk[at + 1] * e1 * scale;
                    if (m == warp) {  // what stands on and above the diagonal of L is never used
                        *reinterpret_cast<float2 *>(diagonal + warp * kDiagonal + row * 16 + column) = make_float2(l0, l1);
                        p0 = column <= row ? p0 : 0.f, p1 = column + 1 <= row ? p1 : 0.f;
                    } else {
                        l[2 * n + i] = pack_half(l0, l1);
                    }
                    p[2 * n + i] = pack(p0, p1);
                }
            }
            if (m < warp) stmatrix_x4(below + (warp * (warp - 1) / 2 + m) * kBlock + fragment, l[0], l[1], l[2], l[3]);
        }
        stmatrix_x4(swizzled(tile_p, 16 * warp + lane % 16, 2 * m + lane / 16), p[0], p[1], p[2], p[3]);
    }
    }
    __syncthreads();
#pragma unroll 1
    for (int member = 0; member < members; ++member) store_rows<128>(tile_q + member * kTile, scratch, head0 + member, kChunk, t0, tokens, tid);
    if (tid / 16 < 4 * members) {  // the same for a whole warp
        const int task = tid / 16, column = tid % 16;
        uint8_t *const block_data = members_data + task / 4 * kMember + task % 4 * (kDiagonal * 4);
        const float *const l = reinterpret_cast<const float *>(block_data);
        float x[16];  // a column of the inverse of a diagonal block, row by row
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            float sum = i == column ? 1.f : 0.f;
#pragma unroll
            for (int m = 0; m < i; m += 4) {
                const float4 four = *reinterpret_cast<const float4 *>(l + i * 16 + m);
                sum -= four.x * x[m];
                if (m + 1 < i) sum -= four.y * x[m + 1];
                if (m + 2 < i) sum -= four.z * x[m + 2];
                if (m + 3 < i) sum -= four.w * x[m + 3];
            }
            x[i] = sum;
        }
        __syncwarp();  // all 16 readers of the diagonal block are in this warp: the inverse takes its place
        uint8_t *const to = block_data + column * 32;  // a row of the transposed block
        const int swap = column / 4 % 2;
        *reinterpret_cast<uint4 *>(to + swap * 16) = make_uint4(pack_half(x[0], x[1]), pack_half(x[2], x[3]), pack_half(x[4], x[5]), pack_half(x[6], x[7]));
        *reinterpret_cast<uint4 *>(to + (swap ^ 1) * 16) =
            make_uint4(pack_half(x[8], x[9]), pack_half(x[10], x[11]), pack_half(x[12], x[13]), pack_half(x[14], x[15]));
    }
    __syncthreads();  // the inverses are there, and P is written out: its tiles become those of T'
    // Block column number `warp`, every block transposed: T_ij^T = -(T_jj^T L_ij^T + ...) T_ii^T.
    // Odd members take the columns in reverse order, so that the warps have equal work.
#pragma unroll 1
    for (int member = 0; member < members; ++member) {
    const int own = member % 2 ? 3 - warp : warp;  // the block column
    const uint32_t inverse = base + member * kMember, below = inverse + 4 * kDiagonal * 4, tile_t = tile_q + member * kTile;
    const float *const beta = factors + member * 2 * kChunk + kChunk;
    const float beta0 = beta[16 * own + lane / 4], beta1 = beta[16 * own + lane / 4 + 8];
    const int t_row = lane % 8 + lane / 16 * 8, t_chunk = 2 * own + lane / 8 % 2;
    uint32_t columns[4][4];
    ldmatrix_x4(columns[0], inverse + own * (kDiagonal * 4) + fragment);
    {
        const float2 v0 = unpack_half(columns[0][0]), v1 = unpack_half(columns[0][1]), v2 = unpack_half(columns[0][2]), v3 = unpack_half(columns[0][3]);
        stmatrix_x4_trans(swizzled(tile_t, 16 * own + t_row, t_chunk), pack(v0.x * beta0, v0.y * beta0), pack(v1.x * beta1, v1.y * beta1),
                          pack(v2.x * beta0, v2.y * beta0), pack(v3.x * beta1, v3.y * beta1));
    }
#pragma unroll
    for (int d = 1; d < 4; ++d) {
        if (own + d < 4) {
            const int i = own + d;
            uint32_t last[4];
            ldmatrix_x4_trans(last, inverse + i * (kDiagonal * 4) + fragment);
            float sum[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
#pragma unroll
            for (int e = 0; e < d; ++e) {
                uint32_t b[4];
                ldmatrix_x4(b, below + (i * (i - 1) / 2 + own + e) * kBlock + fragment);
                mma_half(sum, columns[e], b[0], b[2]);
                mma_half(sum + 4, columns[e], b[1], b[3]);
            }
            const uint32_t s[4] = {pack_half(-sum[0], -sum[1]), pack_half(-sum[2], -sum[3]), pack_half(-sum[4], -sum[5]), pack_half(-sum[6], -sum[7])};
            float y[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
            mma_half(y, s, last[0], last[1]);
            mma_half(y + 4, s, last[2], last[3]);
#pragma unroll
            for (int e = 0; e < 4; ++e) columns[d][e] = pack_half(y[2 * e], y[2 * e + 1]);
            stmatrix_x4_trans(swizzled(tile_t, 16 * i + t_row, t_chunk), pack(y[0] * beta0, y[1] * beta0), pack(y[2] * beta1, y[3] * beta1),
                              pack(y[4] * beta0, y[5] * beta0), pack(y[6] * beta1, y[7] * beta1));
        }
    }
#pragma unroll
    for (int i = 0; i < 3; ++i)
        if (i < own) stmatrix_x4_trans(swizzled(tile_t, 16 * i + t_row, t_chunk), 0, 0, 0, 0);
    }
    __syncthreads();
#pragma unroll 1
    for (int member = 0; member < members; ++member) store_rows<128>(tile_q + member * kTile, scratch, head0 + member, 0, t0, tokens, tid);
}

// The chain over the chunks of one head's 64 value columns. S^T [64 values x 128 keys] stays in the accumulators; every product has a transposed
// operand in registers: X = S^T K^T, N = (V^T - e^gamma X) T'^T, O^T = scale e^gamma (S^T Q^T) + N P^T, S^T = e^gamma_C S^T + (N e^(gamma_C - gamma)) K.
__global__ void __launch_bounds__(128, 1)
chain(Rows q, Rows k, Rows v, Rows scratch, Rows o, const float *vectors, const float *state0, float *state, int tokens, int group, float scale) {
    extern __shared__ uint8_t smem[];
    const uint32_t start = smem_address(smem), base = (start + 1023) & ~1023u, tile_k = base, tile_q = base + 2 * kTile, tile_v = base + 4 * kTile;
    const uint32_t tile_t = base + 5 * kTile, tile_p = base + 6 * kTile, staging = base + 7 * kTile;
    float *const decays = reinterpret_cast<float *>(smem + (base - start) + 8 * kTile);
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, c = lane % 4 * 2, head = blockIdx.x / 2, half = blockIdx.x % 2;
    const int64_t corner = int64_t(head) * kDim * kDim + c * kDim + half * 64 + 16 * warp + lane / 4;  // this lane's first element of [128 keys][128 values]
    float s[64];
#pragma unroll
    for (int i = 0; i < 64; ++i) s[i] = state0 ? state0[corner + (i / 4 * 8 + i % 2) * kDim + i / 2 % 2 * 8] : 0.f;
    for (int t0 = 0; t0 < tokens; t0 += kChunk) {
        load_rows<128>(tile_k, k, head / group, 0, kDim, t0, tokens);
        load_rows<128>(tile_q, q, head / group, 0, kDim, t0, tokens);
        load_rows<128>(tile_v, v, head, half * 64, 64, t0, tokens);
        load_rows<128>(tile_t, scratch, head, 0, kDim, t0, tokens);  // T' and P
        decays[tid] = vectors[(int64_t(t0 / kChunk) * (gridDim.x / 2) + head) * kVector + tid];
        uint32_t a[32];
#pragma unroll
        for (int i = 0; i < 32; ++i) a[i] = pack(s[2 * i], s[2 * i + 1]);
        asm volatile("cp.async.wait_all;" ::: "memory");
        fence_async();
        __syncthreads();
        float x[32], out[32];
        const uint64_t desc_k = matrix_descriptor(tile_k), desc_q = matrix_descriptor(tile_q), desc_t = matrix_descriptor(tile_t);
        const uint64_t desc_p = matrix_descriptor(tile_p), desc_kt = matrix_descriptor(tile_k, kTile);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 8; ++i) wgmma_64(x, a + 4 * i, desc_k + k_step(i), i);
        wgmma_commit();
#pragma unroll
        for (int i = 0; i < 8; ++i) wgmma_64(out, a + 4 * i, desc_q + k_step(i), i);
        wgmma_commit();
        wgmma_wait<1>();
        pin(x);
        uint32_t y[16];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            uint32_t pairs[4];
            ldmatrix_x4_trans(pairs, swizzled(tile_v, 16 * i + lane % 8 + lane / 16 * 8, 2 * warp + lane / 8 % 2));
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float2 value = unpack(pairs[e]);
                const int j = 4 * i + e, token = j / 2 * 8 + c;
                y[j] = pack(value.x - decays[token] * x[2 * j], value.y - decays[token + 1] * x[2 * j + 1]);
            }
        }
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; ++i) wgmma_64(x, y + 4 * i, desc_t + k_step(i), i);
        wgmma_commit();
        wgmma_wait<0>();
        pin(x), pin(out);
        uint32_t u[16], w[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const int token = i / 2 * 8 + c;
            u[i] = pack(x[2 * i], x[2 * i + 1]);
            w[i] = pack(x[2 * i] * decays[kChunk + token], x[2 * i + 1] * decays[kChunk + token + 1]);
            out[2 * i] *= scale * decays[token], out[2 * i + 1] *= scale * decays[token + 1];
        }
        const float kept = decays[kChunk - 1];
#pragma unroll
        for (int i = 0; i < 64; ++i) s[i] *= kept;
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; ++i) wgmma_128(s, w + 4 * i, desc_kt + i * 128);
#pragma unroll
        for (int i = 0; i < 4; ++i) wgmma_64(out, u + 4 * i, desc_p + k_step(i), 1);
        wgmma_commit();
        wgmma_wait<0>();
        pin(s), pin(out);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            stmatrix_x4_trans(swizzled(staging, 16 * i + lane % 8 + lane / 16 * 8, 2 * warp + lane / 8 % 2), pack(out[8 * i], out[8 * i + 1]),
                              pack(out[8 * i + 2], out[8 * i + 3]), pack(out[8 * i + 4], out[8 * i + 5]), pack(out[8 * i + 6], out[8 * i + 7]));
        __syncthreads();  // the outputs are staged, and everybody has read the tiles
        for (int i = tid; i < kChunk * 8; i += 128) {
            const int row = i / 8, t = t0 + row;
            uint4 chunk;
            asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(chunk.x), "=r"(chunk.y), "=r"(chunk.z), "=r"(chunk.w) : "r"(swizzled(staging, row, i % 8)) : "memory");
            if (t < tokens) *reinterpret_cast<uint4 *>(o.at(t, head) + half * 64 + i % 8 * 8) = chunk;
        }
    }
#pragma unroll
    for (int i = 0; i < 64; ++i) state[corner + (i / 4 * 8 + i % 2) * kDim + i / 2 % 2 * 8] = s[i];
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
    for (const klineage_tensor *t : {&state, call->num_inputs == 6 ? &in[5] : &state})
        if (t->dtype != KLINEAGE_FLOAT32 || t->num_dims != 3 || t->shape[0] != v.shape[1] || t->shape[1] != kDim || t->shape[2] != kDim || t->stride[2] != 1 ||
            t->stride[1] != kDim || t->stride[0] != kDim * kDim || reinterpret_cast<uintptr_t>(t->data) % 16)
            return "gdn: state0 and state must be contiguous fp32 [HV,128,128]";
    if (in[0].shape[1] < 1 || in[1].shape[1] != in[0].shape[1] || v.shape[1] % in[0].shape[1] || o.shape[1] != v.shape[1]) return "gdn: HV must be a multiple of HQK";
    if (v.shape[0] < 1 || v.shape[0] > 8192) return "gdn: 1 to 8192 tokens";
    return nullptr;
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
    const Gates gates{static_cast<const float *>(in[3].data), static_cast<const float *>(in[4].data), in[3].stride[0], in[3].stride[1], in[4].stride[0], in[4].stride[1]};
    const float *const state0 = call->num_inputs == 6 ? static_cast<const float *>(in[5].data) : nullptr;
    float *const state = static_cast<float *>(call->outputs[1].data);
    static Scratch memory;
    const int64_t vector_bytes = int64_t(chunks) * heads * kVector * 4;
    KLINEAGE_REQUIRE(call, memory.reserve(vector_bytes + int64_t(tokens) * heads * kDim * 2), "gdn: out of memory for scratch");
    float *const vectors = reinterpret_cast<float *>(memory.data);
    klineage_tensor scratch = o;
    scratch.data = memory.data + vector_bytes, scratch.stride[0] = heads * kDim, scratch.stride[1] = kDim;
    cudaFuncSetAttribute(prepare, cudaFuncAttributeMaxDynamicSharedMemorySize, kPrepareBytes);
    cudaFuncSetAttribute(chain, cudaFuncAttributeMaxDynamicSharedMemorySize, kChainBytes);
    const int batches = (group + kBatch - 1) / kBatch;
    prepare<<<dim3(key_heads * batches, chunks), 128, kPrepareBytes, stream>>>(Rows(in[0]), Rows(in[1]), Rows(scratch), gates, vectors, tokens, group, scale);
    chain<<<2 * heads, 128, kChainBytes, stream>>>(Rows(in[0]), Rows(in[1]), Rows(in[2]), Rows(scratch), Rows(o), vectors, state0, state, tokens, group, scale);
    KLINEAGE_REQUIRE(call, cudaGetLastError() == cudaSuccess, "gdn: a launch failed");
    return 0;
}
