#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "klineage.h"

namespace {

constexpr int kDim = 128, kChunk = 64;
constexpr int kTile = 64 * 128;  // bytes of a swizzled 64x64 tile
constexpr float kLog2e = 1.4426950408889634f;
constexpr int kDiagonal = 16 * 16 + 4;  // floats between diagonal blocks of A
constexpr int kBlock = 16 * 32;         // bytes of a 16x16 block of fp16
constexpr int kLeft = 6;                // blocks left of the diagonal; the inverses of the four diagonal blocks follow them
// Bytes of shared memory: keys (later the output tile), fp16 blocks, fp32 diagonal blocks, gamma and beta.
constexpr int kBlocksAt = 2 * kTile, kDiagonalAt = kBlocksAt + (kLeft + 4) * kBlock, kGammaAt = kDiagonalAt + 4 * kDiagonal * 4, kBetaAt = kGammaAt + kChunk * 4, kShared = kBetaAt + kChunk * 4;

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

__device__ __forceinline__ void stmatrix_x4(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r0), "r"(r1), "r"(r2), "r"(r3) : "memory");
}

__device__ __forceinline__ void stmatrix_x4_trans(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r0), "r"(r1), "r"(r2), "r"(r3) : "memory");
}

__device__ __forceinline__ void mma_fp16(float *d, const uint32_t *a, uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint32_t pack_fp16(float x, float y) {
    const __half2 h = __floats2half2_rn(x, y);
    return reinterpret_cast<const uint32_t &>(h);
}

__device__ __forceinline__ uint32_t pack_bf16(float x, float y) {
    const __nv_bfloat162 h = __floats2bfloat162_rn(x, y);
    return reinterpret_cast<const uint32_t &>(h);
}

// Offset of 16-byte chunk `chunk` of row `row` in a 16x16 block of fp16.
__device__ __forceinline__ uint32_t in_block(int row, int chunk) { return row * 32 + (chunk ^ row / 4 % 2) * 16; }

// Where this lane's row of block (i, j) of the output tile is, for stmatrix of 8x8 matrices in the order of rows.
__device__ __forceinline__ uint32_t output_block(uint32_t tile, int i, int j) {
    const int lane = threadIdx.x % 32;
    return swizzled(tile, 16 * i + lane % 8 + lane / 16 * 8, 2 * j + lane / 8 % 2);
}

// Block column J of the inverse from the diagonal on, by one warp. Works on transposed blocks: T_ij^T = -(sum of T_mj^T A_im^T) T_ii^T,
// so that accumulators have the layout of the next left operand. Blocks A_im lie row by row, blocks T_ii column by column.
template <int J>
__device__ __forceinline__ void block_column(uint32_t blocks, uint32_t tile) {
    const int lane = threadIdx.x % 32;
    const uint32_t left = blocks + in_block(lane % 8 + lane / 16 * 8, lane / 8 % 2), diagonal = blocks + kLeft * kBlock + in_block(lane % 16, lane / 16);
    uint32_t t[4][4], result[4][4];
    ldmatrix_x4(t[J], diagonal + J * kBlock);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
        const float2 v = __half22float2(reinterpret_cast<const __half2 &>(t[J][r]));
        result[J][r] = pack_bf16(v.x, v.y);
    }
#pragma unroll
    for (int i = J + 1; i < 4; ++i) {
        float s[8] = {}, y[8] = {};
        uint32_t a[4], b[4];
#pragma unroll
        for (int m = J; m < i; ++m) {
            uint32_t l[4];
            ldmatrix_x4(l, left + (i * (i - 1) / 2 + m) * kBlock);
            mma_fp16(s, t[m], l[0], l[1]);
            mma_fp16(s + 4, t[m], l[2], l[3]);
        }
        ldmatrix_x4_trans(b, diagonal + i * kBlock);
#pragma unroll
        for (int r = 0; r < 4; ++r) a[r] = pack_fp16(-s[2 * r], -s[2 * r + 1]);
        mma_fp16(y, a, b[0], b[1]);
        mma_fp16(y + 4, a, b[2], b[3]);
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            t[i][r] = pack_fp16(y[2 * r], y[2 * r + 1]);
            result[i][r] = pack_bf16(y[2 * r], y[2 * r + 1]);
        }
    }
#pragma unroll
    for (int i = J; i < 4; ++i) stmatrix_x4_trans(output_block(tile, i, J), result[i][0], result[i][1], result[i][2], result[i][3]);
}

__global__ void __launch_bounds__(128, 8) kkt_solve(Rows k, Rows out, Gates gates, int tokens, int group) {
    extern __shared__ __align__(1024) uint8_t tiles[];
    float *const diagonal = reinterpret_cast<float *>(tiles + kDiagonalAt);
    float *const gamma = reinterpret_cast<float *>(tiles + kGammaAt), *const beta = reinterpret_cast<float *>(tiles + kBetaAt);
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, head = blockIdx.x, t0 = blockIdx.y * kChunk;
    const uint32_t tile_k = smem_address(tiles), blocks = tile_k + kBlocksAt;
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
    const int c = lane % 4 * 2, r = lane / 4;
    const float gamma_row[2] = {gamma[16 * warp + r], gamma[16 * warp + r + 8]}, beta_row[2] = {beta[16 * warp + r], beta[16 * warp + r + 8]};
    // Blocks of A up to the diagonal. What the diagonal block holds from its diagonal on is never used.
#pragma unroll
    for (int n = 0; n < 4; ++n) {
        if (n <= warp) {
            float v[8];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float2 g = *reinterpret_cast<const float2 *>(gamma + 16 * n + 8 * h + c);
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    v[4 * h + 2 * i] = kk[8 * n + 4 * h + 2 * i] * exp2_fast(gamma_row[i] - g.x) * beta_row[i];
                    v[4 * h + 2 * i + 1] = kk[8 * n + 4 * h + 2 * i + 1] * exp2_fast(gamma_row[i] - g.y) * beta_row[i];
                }
            }
            if (n < warp) {
                stmatrix_x4(blocks + (warp * (warp - 1) / 2 + n) * kBlock + in_block(lane % 8 + lane / 16 * 8, lane / 8 % 2), pack_fp16(v[0], v[1]), pack_fp16(v[4], v[5]),
                            pack_fp16(v[2], v[3]), pack_fp16(v[6], v[7]));
            } else {
#pragma unroll
                for (int h = 0; h < 2; ++h)
#pragma unroll
                    for (int i = 0; i < 2; ++i)
                        *reinterpret_cast<float2 *>(diagonal + warp * kDiagonal + (r + 8 * i) * 16 + 8 * h + c) = make_float2(v[4 * h + 2 * i], v[4 * h + 2 * i + 1]);
            }
        }
    }
    __syncthreads();
    if (warp < 2) {  // inverses of the diagonal blocks, a column per lane
        const int block = tid / 16, column = tid % 16;
        const float4 *a = reinterpret_cast<const float4 *>(diagonal + block * kDiagonal);
        float x[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            float sum = i == column ? 1.f : 0.f;
#pragma unroll
            for (int q = 0; 4 * q < i; ++q) {
                const float4 v = a[4 * i + q];
                sum -= v.x * x[4 * q];
                if (4 * q + 1 < i) sum -= v.y * x[4 * q + 1];
                if (4 * q + 2 < i) sum -= v.z * x[4 * q + 2];
                if (4 * q + 3 < i) sum -= v.w * x[4 * q + 3];
            }
            x[i] = sum;
        }
#pragma unroll
        for (int h = 0; h < 2; ++h)
            *reinterpret_cast<uint4 *>(tiles + kBlocksAt + (kLeft + block) * kBlock + in_block(column, h)) =
                make_uint4(pack_fp16(x[8 * h], x[8 * h + 1]), pack_fp16(x[8 * h + 2], x[8 * h + 3]), pack_fp16(x[8 * h + 4], x[8 * h + 5]), pack_fp16(x[8 * h + 6], x[8 * h + 7]));
    } else {  // zeros above the diagonal, three blocks per warp; the keys are no longer needed
#pragma unroll
        for (int i = 0; i < 3; ++i) stmatrix_x4_trans(output_block(tile_k, warp == 3 ? i : i / 2, warp == 3 ? 3 : 1 + (i + 1) / 2), 0, 0, 0, 0);
    }
    __syncthreads();
    if (warp == 0)
        block_column<0>(blocks, tile_k);
    else if (warp == 1)
        block_column<1>(blocks, tile_k);
    else if (warp == 2)
        block_column<2>(blocks, tile_k);
    else
        block_column<3>(blocks, tile_k);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int row = tid / 8 + 16 * i, chunk = tid % 8;
        if (t0 + row < tokens) *reinterpret_cast<uint4 *>(out.at(t0 + row, head) + chunk * 8) = *reinterpret_cast<const uint4 *>(tiles + row * 128 + (chunk ^ row % 8) * 16);
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
    kkt_solve<<<dim3(heads, chunks), 128, kShared, stream>>>(Rows(in[0]), Rows(out), gates, tokens, group);
    KLINEAGE_REQUIRE(call, cudaGetLastError() == cudaSuccess, "gdn_kkt_solve: the launch failed");
    return 0;
}
