#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "klineage.h"

namespace {

constexpr int kDim = 128, kChunk = 64;
constexpr int kTileBytes = kChunk * 128;                    // a tile of K: 64 rows by 64 columns, 128 bytes per row
constexpr int kBlock = 16, kBlocks = kChunk / kBlock;       // the inverse is built from 4 by 4 blocks of 16 by 16
constexpr int kDiagPitch = kBlock * kBlock + 4;             // floats between diagonal blocks
constexpr int kBlockBytes = kBlock * 32;                    // an fp16 block: 16 rows of 32 bytes
constexpr int kBelow = kBlocks * (kBlocks - 1) / 2;         // blocks below the diagonal
constexpr float kLog2e = 1.4426950408889634f;

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

// Copies 16 bytes to shared memory, of which the first `bytes` come from source and the others are zero.
__device__ __forceinline__ void copy16(uint32_t target, const void *source, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(target), "l"(__cvta_generic_to_global(source)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_all;\n" ::: "memory"); }
__device__ __forceinline__ void ldmatrix4(uint32_t (&x)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address)
                 : "memory");
}
__device__ __forceinline__ void ldmatrix4_trans(uint32_t (&x)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address)
                 : "memory");
}
__device__ __forceinline__ void stmatrix4_trans(uint32_t address, uint32_t x0, uint32_t x1, uint32_t x2, uint32_t x3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(address), "r"(x0), "r"(x1), "r"(x2), "r"(x3)
                 : "memory");
}
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// c[0..3] += a (b[0], b[1]) and c[4..7] += a (b[2], b[3]) in fp16 with fp32 sums.
__device__ __forceinline__ void mma_half(float (&c)[8], const uint32_t (&a)[4], const uint32_t (&b)[4]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
                 : "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[2]), "r"(b[3]));
}
__device__ __forceinline__ float power2(float x) {
    float y;
    asm("ex2.approx.f32 %0, %1;\n" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ uint32_t half_pair(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t *>(&pair);
}
__device__ __forceinline__ uint32_t bf16_pair(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t *>(&pair);
}
__device__ __forceinline__ uint32_t half_to_bf16_pair(uint32_t bits) {
    const float2 f = __half22float2(*reinterpret_cast<const __half2 *>(&bits));
    return bf16_pair(f.x, f.y);
}
// Byte offset of the 16-byte chunk `chunk` (0 or 1) of a row of an fp16 block.
__device__ __forceinline__ int block_at(int row, int chunk) { return row * 32 + (chunk ^ ((row >> 2) & 1)) * 16; }

// One warp computes block column J of the inverse, every block transposed, and stages it as bf16 in tile.
template <int J>
__device__ __forceinline__ void solve_column(uint32_t below, uint32_t inverses, uint32_t tile, int lane) {
    const int row = lane % 8 + lane / 16 * 8, chunk = lane / 8 % 2;
    const uint32_t p = block_at(row, chunk);
    const uint32_t target = tile + row * 128 + ((2 * J + chunk) ^ (row % 8)) * 16;  // block i lies 2048 i bytes further
    uint32_t x[kBlocks][4];
    ldmatrix4_trans(x[J], inverses + J * kBlockBytes + p);
#pragma unroll
    for (int i = 0; i < J; ++i) stmatrix4_trans(target + i * 2048, 0u, 0u, 0u, 0u);
    stmatrix4_trans(target + J * 2048, half_to_bf16_pair(x[J][0]), half_to_bf16_pair(x[J][1]), half_to_bf16_pair(x[J][2]), half_to_bf16_pair(x[J][3]));
#pragma unroll
    for (int i = J + 1; i < kBlocks; ++i) {
        float sum[8] = {}, d[8] = {};
#pragma unroll
        for (int m = J; m < i; ++m) {
            uint32_t b[4];
            ldmatrix4(b, below + (i * (i - 1) / 2 + m) * kBlockBytes + p);
            mma_half(sum, x[m], b);
        }
        uint32_t y[4], b[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) y[e] = half_pair(-sum[2 * e], -sum[2 * e + 1]);
        ldmatrix4(b, inverses + i * kBlockBytes + p);
        mma_half(d, y, b);
#pragma unroll
        for (int e = 0; e < 4; ++e) x[i][e] = half_pair(d[2 * e], d[2 * e + 1]);
        stmatrix4_trans(target + i * 2048, bf16_pair(d[0], d[1]), bf16_pair(d[2], d[3]), bf16_pair(d[4], d[5]), bf16_pair(d[6], d[7]));
    }
}

__global__ void __launch_bounds__(128) kkt_solve(Rows k, Rows out, Gates gates, int tokens, int group) {
    // Two tiles of 64 columns; the 16-byte chunk `chunk` of a row lies at chunk ^ (row % 8). The first tile holds the
    // result in the end, in the same layout.
    __shared__ __align__(1024) unsigned char keys[2 * kTileBytes];
    __shared__ __align__(128) unsigned char below[kBelow * kBlockBytes];       // block (i, m) is number i (i - 1) / 2 + m
    __shared__ __align__(128) unsigned char inverses[kBlocks * kBlockBytes];   // of the diagonal blocks
    __shared__ __align__(128) float diag[kBlocks * kDiagPitch];
    __shared__ __align__(16) float gamma[kChunk];
    __shared__ __align__(16) float betas[kChunk];
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, head = blockIdx.x, t0 = blockIdx.y * kChunk;
    const uint32_t tiles = static_cast<uint32_t>(__cvta_generic_to_shared(keys));
    {
        const int row = tid / 16, chunk = tid % 16;  // this thread's rows are row + 8 i
        const uint32_t target = tiles + chunk / 8 * kTileBytes + row * 128 + ((chunk % 8) ^ row) * 16;
        const __nv_bfloat16 *source = k.at(t0 + row, head / group) + chunk * 8;
#pragma unroll
        for (int i = 0; i < kChunk / 8; ++i) {
            const bool inside = t0 + row + 8 * i < tokens;
            copy16(target + i * 1024, inside ? source + 8 * i * k.token : k.data, inside ? 16 : 0);
        }
    }
    if (warp == 0) {
#pragma unroll
        for (int i = 0; i < kChunk / 32; ++i) {
            const int row = lane + 32 * i;
            gamma[row] = gates.sum(min(t0 + row, tokens - 1), head) * kLog2e;
            betas[row] = t0 + row < tokens ? gates.rate(t0 + row, head) : 0.f;
        }
    }
    wait_copies();
    __syncthreads();
    // This warp's rows are 16 warp to 16 warp + 15; sums[j] holds columns 8 j to 8 j + 7.
    float sums[8][4] = {};
    const uint32_t a_base = tiles + (warp * 16 + lane % 16) * 128 + ((lane / 16) ^ (lane % 8)) * 16;
    const uint32_t b_base = tiles + (lane % 8 + lane / 16 * 8) * 128 + ((lane / 8 % 2) ^ (lane % 8)) * 16;
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) {
        const uint32_t tile = d / 4 * kTileBytes, flip = d % 4 * 32;
        uint32_t a[4];
        ldmatrix4(a, (a_base ^ flip) + tile);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            uint32_t b[4];
            ldmatrix4(b, (b_base ^ flip) + tile + j * 2048);
            mma(sums[2 * j], a, b[0], b[1]);
            mma(sums[2 * j + 1], a, b[2], b[3]);
        }
    }
    // Phase 1: this warp's block row; the diagonal block as fp32, those left of it as fp16, nothing right of it.
    {
        const int local = lane / 4, row0 = warp * 16 + local, row1 = row0 + 8;
        const float gamma0 = gamma[row0], gamma1 = gamma[row1], beta0 = betas[row0], beta1 = betas[row1];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            if (j / 2 <= warp) {
                const int column = 8 * j + lane % 4 * 2;
                const float2 g = *reinterpret_cast<const float2 *>(gamma + column);
                const float v00 = sums[j][0] * beta0 * power2(gamma0 - g.x), v01 = sums[j][1] * beta0 * power2(gamma0 - g.y);
                const float v10 = sums[j][2] * beta1 * power2(gamma1 - g.x), v11 = sums[j][3] * beta1 * power2(gamma1 - g.y);
                if (j / 2 < warp) {
                    unsigned char *target = below + (warp * (warp - 1) / 2 + j / 2) * kBlockBytes + block_at(local, j % 2) + lane % 4 * 4;
                    *reinterpret_cast<uint32_t *>(target) = half_pair(v00, v01);
                    *reinterpret_cast<uint32_t *>(target + 8 * 32) = half_pair(v10, v11);
                } else {
                    float *target = diag + warp * kDiagPitch + local * kBlock + 8 * (j % 2) + lane % 4 * 2;
                    *reinterpret_cast<float2 *>(target) = make_float2(column < row0 ? v00 : 0.f, column + 1 < row0 ? v01 : 0.f);
                    *reinterpret_cast<float2 *>(target + 8 * kBlock) = make_float2(column < row1 ? v10 : 0.f, column + 1 < row1 ? v11 : 0.f);
                }
            }
        }
    }
    __syncthreads();
    // Phase 2: 16 threads per diagonal block, each inverts one column by substitution.
    if (tid < kChunk) {
        const int block = tid / kBlock, c = tid % kBlock;
        const float *l = diag + block * kDiagPitch;
        unsigned char *target = inverses + block * kBlockBytes + c % 8 * 2;
        float x[kBlock];
#pragma unroll
        for (int i = 0; i < kBlock; ++i) {
            float s = i == c ? 1.f : 0.f;
#pragma unroll
            for (int m = 0; m < i; m += 4) {
                const float4 v = *reinterpret_cast<const float4 *>(l + i * kBlock + m);
                s -= v.x * x[m];
                if (m + 1 < i) s -= v.y * x[m + 1];
                if (m + 2 < i) s -= v.z * x[m + 2];
                if (m + 3 < i) s -= v.w * x[m + 3];
            }
            x[i] = s;
            *reinterpret_cast<__half *>(target + block_at(i, c / 8)) = __float2half_rn(s);
        }
    }
    __syncthreads();
    // Phase 3: a warp per block column.
    {
        const uint32_t below_base = static_cast<uint32_t>(__cvta_generic_to_shared(below));
        const uint32_t inverse_base = static_cast<uint32_t>(__cvta_generic_to_shared(inverses));
        switch (warp) {
            case 0: solve_column<0>(below_base, inverse_base, tiles, lane); break;
            case 1: solve_column<1>(below_base, inverse_base, tiles, lane); break;
            case 2: solve_column<2>(below_base, inverse_base, tiles, lane); break;
            default: solve_column<3>(below_base, inverse_base, tiles, lane); break;
        }
    }
    __syncthreads();
    // Phase 4: the staged tile goes out, 16 bytes per thread and step.
    {
        const int row = tid / 8, chunk = tid % 8;  // this thread's rows are row + 16 i
        const unsigned char *source = keys + row * 128 + (chunk ^ (row % 8)) * 16;
#pragma unroll
        for (int i = 0; i < kChunk / 16; ++i) {
            const int t = t0 + row + 16 * i;
            if (t < tokens) *reinterpret_cast<uint4 *>(out.at(t, head) + chunk * 8) = *reinterpret_cast<const uint4 *>(source + i * 2048);
        }
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
