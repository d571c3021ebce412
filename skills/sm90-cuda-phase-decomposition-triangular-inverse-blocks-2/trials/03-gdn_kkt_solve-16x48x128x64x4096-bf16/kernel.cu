#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "klineage.h"

namespace {

constexpr int kDim = 128, kChunk = 64;
constexpr int kTile = 64 * 128;  // bytes of a swizzled 64x64 tile
constexpr float kLog2e = 1.4426950408889634f;
constexpr int kBlock = 16, kBlocks = kChunk / kBlock;   // side of a block, blocks per side of a chunk
constexpr int kBlockBytes = kBlock * kBlock * 2;        // of a block of halves
constexpr int kDiagonalPitch = kBlock * kBlock + 4;     // floats between diagonal blocks
constexpr int kBelow = kBlocks * (kBlocks - 1) / 2;     // blocks below the diagonal

struct Gates {
    const float *gc, *beta;
    int64_t gc_token, gc_head, beta_token, beta_head;
    __device__ float sum(int t, int h) const { return gc[t * gc_token + h * gc_head]; }
    __device__ float rate(int t, int h) const { return beta[t * beta_token + h * beta_head]; }
};

// A bf16 tensor [T,H,...] with contiguous rows and the strides of the call, in elements.
struct Rows {
    __nv_bfloat16 *data;
    int64_t token, head;
    __host__ explicit Rows(const klineage_tensor &t) : data(static_cast<__nv_bfloat16 *>(t.data)), token(t.stride[0]), head(t.stride[1]) {}
    __device__ __nv_bfloat16 *at(int t, int h) const { return data + t * token + h * this->head; }
};

__device__ __forceinline__ uint32_t smem_address(const void *p) { return uint32_t(__cvta_generic_to_shared(p)); }

// Copies 16 bytes asynchronously, or writes zeros when the source row does not exist.
__device__ __forceinline__ void cp_async_16(uint32_t dst, const void *src, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(there ? 16 : 0) : "memory");
}

__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

__device__ __forceinline__ void mma_bf16(float *d, const uint32_t *a, uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Address of 16-byte chunk `chunk` of row `row` in swizzled tiles of 64 columns.
__device__ __forceinline__ uint32_t swizzled(uint32_t tile, int row, int chunk) { return tile + chunk / 8 * kTile + row * 128 + (chunk % 8 ^ row % 8) * 16; }

// Copies the keys of 64 tokens into swizzled tiles; tokens past the end become zeros.
__device__ __forceinline__ void load_keys(uint32_t tile, const Rows &k, int head, int t0, int tokens) {
    for (int i = threadIdx.x; i < kChunk * kDim / 8; i += 128) {
        const int row = i / (kDim / 8), chunk = i % (kDim / 8), t = t0 + row;
        cp_async_16(swizzled(tile, row, chunk), k.at(min(t, tokens - 1), head) + chunk * 8, t < tokens);
    }
}

// x[16 rows of this warp x 64] += A[16x16] B[64x16]^T with B's columns 16 step to 16 step + 15 of swizzled tiles.
__device__ __forceinline__ void multiply(float (&x)[32], const uint32_t *a, uint32_t tile, int step) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
        uint32_t b[4];
        ldmatrix_x4(b, swizzled(tile, 16 * n + lane % 8 + lane / 16 * 8, 2 * step + lane / 8 % 2));
        mma_bf16(x + 8 * n, a, b[0], b[1]);
        mma_bf16(x + 8 * n + 4, a, b[2], b[3]);
    }
}

// Summed gates of one head's chunk in units of log 2, and its betas; one warp. Tokens past the end have the last sum and no beta.
__device__ __forceinline__ void load_gates(const Gates &gates, int head, int t0, int tokens, float *gamma, float *beta) {
#pragma unroll
    for (int i = threadIdx.x % 32; i < kChunk; i += 32) {
        const int t = t0 + i;
        gamma[i] = gates.sum(min(t, tokens - 1), head) * kLog2e;
        beta[i] = t < tokens ? gates.rate(t, head) : 0.f;
    }
}

__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

__device__ __forceinline__ void stmatrix_x4_trans(uint32_t address, const uint32_t (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}

__device__ __forceinline__ void mma_half(float *d, const uint32_t *a, uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint32_t pack_half(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t *>(&pair);
}

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t *>(&pair);
}

// Offset of 16-byte chunk `chunk` of row `row` in a 16x16 block of halves.
__device__ __forceinline__ uint32_t block_at(int row, int chunk) { return uint32_t(row * 32 + (chunk ^ (row >> 2 & 1)) * 16); }

// Stores block (i, j) of the result, held transposed as bf16 pairs in the accumulators' layout, into the staged tile.
__device__ __forceinline__ void store_block(uint32_t tile, int i, int j, const uint32_t (&pairs)[4]) {
    const int lane = threadIdx.x % 32;
    stmatrix_x4_trans(swizzled(tile, 16 * i + lane % 8 + lane / 16 * 8, 2 * j + lane / 8 % 2), pairs);
}

// Block column J of the inverse, from the blocks of L below the diagonal and the inverses of the diagonal blocks; one warp.
template <int J>
__device__ __forceinline__ void solve_column(uint32_t below, uint32_t inverses, uint32_t tile) {
    const int lane = threadIdx.x % 32;
    const uint32_t place = block_at(lane % 8 + lane / 16 * 8, lane / 8 % 2);
    uint32_t x[kBlocks][4];  // blocks of the column, transposed, as left operands
    ldmatrix_x4_trans(x[J], inverses + J * kBlockBytes + place);
    {
        const uint32_t zero[4] = {0, 0, 0, 0};
#pragma unroll
        for (int i = 0; i < J; ++i) store_block(tile, i, J, zero);
        uint32_t pairs[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float2 value = __half22float2(*reinterpret_cast<const __half2 *>(&x[J][e]));
            pairs[e] = pack_bf16(value.x, value.y);
        }
        store_block(tile, J, J, pairs);
    }
#pragma unroll
    for (int i = J + 1; i < kBlocks; ++i) {
        float sum[8] = {}, d[8] = {};
        uint32_t b[4], y[4], pairs[4];
#pragma unroll
        for (int m = J; m < i; ++m) {
            ldmatrix_x4(b, below + (i * (i - 1) / 2 + m) * kBlockBytes + place);
            mma_half(sum, x[m], b[0], b[1]);
            mma_half(sum + 4, x[m], b[2], b[3]);
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) y[e] = pack_half(-sum[2 * e], -sum[2 * e + 1]);
        ldmatrix_x4(b, inverses + i * kBlockBytes + place);
        mma_half(d, y, b[0], b[1]);
        mma_half(d + 4, y, b[2], b[3]);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            x[i][e] = pack_half(d[2 * e], d[2 * e + 1]);
            pairs[e] = pack_bf16(d[2 * e], d[2 * e + 1]);
        }
        store_block(tile, i, J, pairs);
    }
}

__global__ void __launch_bounds__(128) kkt_solve(Rows k, Rows out, Gates gates, int tokens, int group) {
    __shared__ __align__(1024) uint8_t tiles[2 * kTile];
    __shared__ __align__(128) uint8_t below[kBelow * kBlockBytes];
    __shared__ __align__(128) uint8_t inverses[kBlocks * kBlockBytes];
    __shared__ __align__(16) float diagonal[kBlocks * kDiagonalPitch];
    __shared__ float gamma[kChunk], beta[kChunk];
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, head = blockIdx.x, t0 = blockIdx.y * kChunk;
    const uint32_t tile_k = smem_address(tiles);
    load_keys(tile_k, k, head / group, t0, tokens);
    if (warp == 0) load_gates(gates, head, t0, tokens, gamma, beta);
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
    float kk[32] = {};
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i) {
        uint32_t a[4];
        ldmatrix_x4(a, swizzled(tile_k, 16 * warp + lane % 16, 2 * i + lane / 16));
        multiply(kk, a, tile_k, i);
    }
    const int c = lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int r = lane / 4 + 8 * i, row = 16 * warp + r;
        const float gamma_row = gamma[row], beta_row = beta[row];
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            const int m = n / 2, column = 8 * n + c;
            if (m <= warp) {
                const float v0 = kk[4 * n + 2 * i] * exp2_fast(gamma_row - gamma[column]) * beta_row;
                const float v1 = kk[4 * n + 2 * i + 1] * exp2_fast(gamma_row - gamma[column + 1]) * beta_row;
                if (m < warp) {
                    *reinterpret_cast<uint32_t *>(below + (warp * (warp - 1) / 2 + m) * kBlockBytes + block_at(r, n % 2) + c * 2) = pack_half(v0, v1);
                } else {
                    *reinterpret_cast<float2 *>(diagonal + warp * kDiagonalPitch + r * kBlock + n % 2 * 8 + c) =
                        make_float2(column < row ? v0 : 0.f, column + 1 < row ? v1 : 0.f);
                }
            }
        }
    }
    __syncthreads();  // the blocks are there, and the keys' tile is free
    if (tid < kChunk) {
        const int block = tid / kBlock, column = tid % kBlock;
        const float *l_block = diagonal + block * kDiagonalPitch;
        uint8_t *inverse = inverses + block * kBlockBytes;
        float x[kBlock];  // column of the inverse of the diagonal block, row by row
#pragma unroll
        for (int i = 0; i < kBlock; ++i) {
            float sum = i == column ? 1.f : 0.f;
#pragma unroll
            for (int m = 0; m < i; m += 4) {
                const float4 v = *reinterpret_cast<const float4 *>(l_block + i * kBlock + m);
                const float l[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                for (int q = 0; q < 4; ++q)
                    if (m + q < i) sum -= l[q] * x[m + q];
            }
            x[i] = sum;
            *reinterpret_cast<__half *>(inverse + block_at(i, column / 8) + column % 8 * 2) = __float2half_rn(sum);
        }
    }
    __syncthreads();
    const uint32_t below_address = smem_address(below), inverses_address = smem_address(inverses);
    if (warp == 0)
        solve_column<0>(below_address, inverses_address, tile_k);
    else if (warp == 1)
        solve_column<1>(below_address, inverses_address, tile_k);
    else if (warp == 2)
        solve_column<2>(below_address, inverses_address, tile_k);
    else
        solve_column<3>(below_address, inverses_address, tile_k);
    __syncthreads();
#pragma unroll
    for (int i = tid; i < kChunk * kChunk / 8; i += 128) {
        const int row = i / 8, chunk = i % 8;
        if (t0 + row < tokens)
            *reinterpret_cast<uint4 *>(out.at(t0 + row, head) + chunk * 8) = *reinterpret_cast<const uint4 *>(tiles + row * 128 + (chunk ^ row % 8) * 16);
    }
}

// Why this call is refused, or nullptr.
const char *refusal(const klineage_call *call) {
    if (call->num_inputs != 3 || call->num_outputs != 1) return "gdn_kkt_solve reads k, gc and beta and writes inverse";
    if (klineage_scalar_value(call, "chunk", kChunk) != kChunk) return "gdn_kkt_solve: chunks must have 64 tokens";
    const klineage_tensor &k = call->inputs[0], &gc = call->inputs[1], &beta = call->inputs[2], &inverse = call->outputs[0];
    if (k.dtype != KLINEAGE_BFLOAT16 || k.num_dims != 3 || k.shape[2] != kDim) return "gdn_kkt_solve: k must be bf16 [T,HQK,128]";
    if (inverse.dtype != KLINEAGE_BFLOAT16 || inverse.num_dims != 3 || inverse.shape[2] != kChunk || inverse.shape[0] != k.shape[0])
        return "gdn_kkt_solve: inverse must be bf16 [T,HV,64]";
    for (const klineage_tensor *t : {&k, &inverse})
        if (t->stride[2] != 1 || t->stride[0] <= 0 || t->stride[1] <= 0 || t->stride[0] % 8 || t->stride[1] % 8 || reinterpret_cast<uintptr_t>(t->data) % 16)
            return "gdn_kkt_solve: rows must be contiguous and 16-byte aligned";
    for (const klineage_tensor *t : {&gc, &beta})
        if (t->dtype != KLINEAGE_FLOAT32 || t->num_dims != 2 || t->shape[0] != k.shape[0] || t->shape[1] != inverse.shape[1])
            return "gdn_kkt_solve: gc and beta must be fp32 [T,HV]";
    if (k.shape[1] < 1 || inverse.shape[1] < 1 || inverse.shape[1] % k.shape[1]) return "gdn_kkt_solve: HV must be a multiple of HQK";
    if (k.shape[0] < 1 || k.shape[0] > 65535 * kChunk) return "gdn_kkt_solve: 1 to 4194240 tokens";
    return nullptr;
}

}  // namespace

extern "C" int run(const klineage_call *call) {
    const char *why = refusal(call);
    KLINEAGE_REQUIRE(call, why == nullptr, why);
    const klineage_tensor *in = call->inputs, &out = call->outputs[0];
    const int tokens = int(in[0].shape[0]), key_heads = int(in[0].shape[1]), heads = int(out.shape[1]), group = heads / key_heads;
    const int chunks = (tokens + kChunk - 1) / kChunk;
    const auto stream = static_cast<cudaStream_t>(call->stream);
    const Gates gates{static_cast<const float *>(in[1].data), static_cast<const float *>(in[2].data), in[1].stride[0], in[1].stride[1], in[2].stride[0], in[2].stride[1]};
    kkt_solve<<<dim3(heads, chunks), 128, 0, stream>>>(Rows(in[0]), Rows(out), gates, tokens, group);
    KLINEAGE_REQUIRE(call, cudaGetLastError() == cudaSuccess, "gdn_kkt_solve: the launch failed");
    return 0;
}
