#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "klineage.h"

namespace {

constexpr int kDim = 128, kChunk = 64, kPitch = kChunk + 1;  // kPitch: floats between rows of A
constexpr int kTileBytes = kChunk * 128;                    // a tile of K: 64 rows by 64 columns, 128 bytes per row
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
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(address));
}
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ float power2(float x) {
    float y;
    asm("ex2.approx.f32 %0, %1;\n" : "=f"(y) : "f"(x));
    return y;
}

__global__ void __launch_bounds__(128) kkt_solve(Rows k, Rows out, Gates gates, int tokens, int group) {
    // Two tiles of 64 columns; the 16-byte chunk `chunk` of a row lies at chunk ^ (row % 8).
    __shared__ __align__(1024) unsigned char keys[2 * kTileBytes];
    __shared__ __align__(16) float lower[kChunk * kPitch];
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
    {
        const int row0 = warp * 16 + lane / 4, row1 = row0 + 8;
        const float gamma0 = gamma[row0], gamma1 = gamma[row1], beta0 = betas[row0], beta1 = betas[row1];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const int column = 8 * j + lane % 4 * 2;
            const float2 g = *reinterpret_cast<const float2 *>(gamma + column);
            const float v00 = sums[j][0] * beta0 * power2(gamma0 - g.x), v01 = sums[j][1] * beta0 * power2(gamma0 - g.y);
            const float v10 = sums[j][2] * beta1 * power2(gamma1 - g.x), v11 = sums[j][3] * beta1 * power2(gamma1 - g.y);
            lower[row0 * kPitch + column] = column < row0 ? v00 : 0.f;
            lower[row0 * kPitch + column + 1] = column + 1 < row0 ? v01 : 0.f;
            lower[row1 * kPitch + column] = column < row1 ? v10 : 0.f;
            lower[row1 * kPitch + column + 1] = column + 1 < row1 ? v11 : 0.f;
        }
    }
    __syncthreads();
    if (tid >= kChunk) return;
    float x[kChunk];  // column tid of (I + A)^-1, row by row
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
        float sum = i == tid ? 1.f : 0.f;
#pragma unroll
        for (int m = 0; m < i; ++m) sum -= lower[i * kPitch + m] * x[m];
        x[i] = sum;
        if (t0 + i < tokens) out.at(t0 + i, head)[tid] = __float2bfloat16(sum);
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
