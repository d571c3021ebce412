#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "klineage.h"

namespace {

constexpr int kDim = 128, kChunk = 64;
constexpr int kTile = 64 * 128;  // bytes of a swizzled 64x64 tile
constexpr float kLog2e = 1.4426950408889634f;
constexpr int kBlock = 512;             // bytes of a 16x16 fp16 block
constexpr int kDiagonal = 16 * 16 + 4;  // floats of a 16x16 fp32 block, padded
constexpr int kBatch = 1, kOutTiles = 2;  // heads of a CTA; tiles that K and then the results take
constexpr int kBytes = 1024 + kOutTiles * kTile + 10 * kBatch * kBlock + (4 * kBatch * kDiagonal + 2 * kBatch * kChunk) * 4;

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
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

__device__ __forceinline__ void mma_bf16(float *d, const uint32_t *a, uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma_fp16(float *d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint32_t pack(float lo, float hi) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(lo, hi);
    return *reinterpret_cast<const uint32_t *>(&pair);
}
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

// Where lane l of a warp finds its 16 bytes of a 16x16 fp16 block.
__device__ __forceinline__ uint32_t block_place(int row, int chunk) { return row * 32 + (chunk ^ (row >> 2 & 1)) * 16; }

struct Blocks {
    uint32_t tile, inverse, below;  // the result of one head; its inverted diagonal blocks; its blocks of A below the diagonal

    __device__ __forceinline__ void store(int i, int j, const float (&x)[8]) const {
        const int lane = threadIdx.x % 32, row = 16 * i + lane % 8 + lane / 16 * 8, chunk = 2 * j + lane / 8 % 2;
        stmatrix_x4_trans(tile + row * 128 + (chunk ^ row % 8) * 16, pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7]));
    }

    // Block column j of T = (I + A)^-1 by block substitution, T_ij = -T_ii (A_ij T_jj + ...), on transposed blocks: a product's accumulators
    // are the next product's left operand. Writes T as bf16.
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

// Writes a staged tile to the chunk's rows.
__device__ __forceinline__ void write_rows(uint32_t tile, const Rows &to, int head, int t0, int tokens) {
    for (int i = threadIdx.x; i < kChunk * 8; i += 128) {
        const int row = i / 8, t = t0 + row;
        uint4 chunk;
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(chunk.x), "=r"(chunk.y), "=r"(chunk.z), "=r"(chunk.w) : "r"(swizzled(tile, row, i % 8)) : "memory");
        if (t < tokens) *reinterpret_cast<uint4 *>(to.at(t, head) + i % 8 * 8) = chunk;
    }
}

// Splits this warp's 16 rows of A into its diagonal block, fp32, and the blocks left of it, fp16. What lies above the diagonal is never read.
__device__ __forceinline__ void split_rows(const float (&kk)[32], const float *gamma, const float *beta, uint32_t below, float *diagonal) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, r = lane / 4, c = lane % 4 * 2;
    const float row[2] = {gamma[16 * warp + r], gamma[16 * warp + r + 8]}, betas[2] = {beta[16 * warp + r], beta[16 * warp + r + 8]};
    const uint32_t left = below + warp * (warp - 1) / 2 * kBlock;
    float *const block = diagonal + warp * kDiagonal;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
        if (n > 2 * warp + 1) continue;
        const float2 column = *reinterpret_cast<const float2 *>(gamma + 8 * n + c);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float a0 = kk[4 * n + 2 * i] * exp2_fast(row[i] - column.x) * betas[i], a1 = kk[4 * n + 2 * i + 1] * exp2_fast(row[i] - column.y) * betas[i];
            if (n >= 2 * warp)
                *reinterpret_cast<float2 *>(block + (r + 8 * i) * 16 + 8 * (n - 2 * warp) + c) = make_float2(a0, a1);
            else
                asm volatile("st.shared.b32 [%0], %1;" ::"r"(left + n / 2 * kBlock + block_place(r + 8 * i, n % 2) + c * 2), "r"(pack_half(a0, a1)) : "memory");
        }
    }
}

__global__ void __launch_bounds__(128) kkt_solve(Rows k, Rows out, Gates gates, int tokens, int group) {
    extern __shared__ uint8_t smem[];
    const uint32_t start = smem_address(smem), base = (start + 1023) & ~1023u, tile_k = base, inverse = base + kOutTiles * kTile, below = inverse + 4 * kBatch * kBlock;
    float *const diagonal = reinterpret_cast<float *>(smem + (base - start) + kOutTiles * kTile + 10 * kBatch * kBlock);
    float *const gamma = diagonal + 4 * kBatch * kDiagonal, *const beta = gamma + kBatch * kChunk;
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, head = blockIdx.x, t0 = blockIdx.y * kChunk;
    constexpr int heads = kBatch;
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
    split_rows(kk, gamma, beta, below, diagonal);
    __syncthreads();
    for (int task = tid / 16; task < 4 * heads; task += 8) {  // (I + A_ii)^-1 by substitution, a column per lane
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
    __syncthreads();  // the first tile of K becomes that of the result
    const Blocks blocks{base, inverse, below};
    if (warp == 0) blocks.column<0>();
    if (warp == 1) blocks.column<1>();
    if (warp == 2) blocks.column<2>();
    if (warp == 3) blocks.column<3>();
    __syncthreads();
    write_rows(base, out, head, t0, tokens);
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
    cudaFuncSetAttribute(kkt_solve, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
    kkt_solve<<<dim3(heads, chunks), 128, kBytes, stream>>>(Rows(in[0]), Rows(out), gates, tokens, group);
    KLINEAGE_REQUIRE(call, cudaGetLastError() == cudaSuccess, "gdn_kkt_solve: the launch failed");
    return 0;
}
