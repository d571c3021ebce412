#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "klineage.h"

namespace {

constexpr int kDim = 128, kChunk = 64, kPitch = kChunk + 1;  // kPitch: floats between rows of A
constexpr int kWords = kDim / 8, kTilePitch = kWords + 1;    // 16-byte words in a row of k, and between rows of the tile

// sum + a . b over the two bf16 values that each 32-bit word holds, the lower one first.
__device__ __forceinline__ float dot2(float sum, uint32_t a, uint32_t b) {
    sum += __uint_as_float(a << 16) * __uint_as_float(b << 16);
    sum += __uint_as_float(a & 0xffff0000u) * __uint_as_float(b & 0xffff0000u);
    return sum;
}

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

__global__ void __launch_bounds__(kChunk) kkt_solve(Rows k, Rows out, Gates gates, int tokens, int group) {
    __shared__ float lower[kChunk * kPitch];
    __shared__ uint4 tile[kChunk * kTilePitch];  // the chunk's rows of k
    __shared__ float gammas[kChunk];
    const int tid = threadIdx.x, head = blockIdx.x, t0 = blockIdx.y * kChunk, t = min(t0 + tid, tokens - 1);
    const int key_head = head / group;
    const float beta = t0 + tid < tokens ? gates.rate(t, head) : 0.f, gamma = gates.sum(t, head);
    gammas[tid] = gamma;
#pragma unroll
    for (int n = 0; n < kWords; ++n) {
        const int i = n * kChunk + tid, r = i / kWords, c = i % kWords;
        uint4 word = make_uint4(0u, 0u, 0u, 0u);  // rows past the end are zero
        if (t0 + r < tokens) word = reinterpret_cast<const uint4 *>(k.at(t0 + r, key_head))[c];
        tile[r * kTilePitch + c] = word;
    }
    __syncthreads();
    uint4 own[kWords];
#pragma unroll
    for (int c = 0; c < kWords; ++c) own[c] = tile[tid * kTilePitch + c];
#pragma unroll 1
    for (int j = 0; j < kChunk; ++j) {
        float sum = 0.f;
        if (j < tid && t0 + j < tokens) {
            const uint4 *const column = tile + j * kTilePitch;
#pragma unroll
            for (int c = 0; c < kWords; ++c) {
                const uint4 other = column[c];
                sum = dot2(sum, own[c].x, other.x);
                sum = dot2(sum, own[c].y, other.y);
                sum = dot2(sum, own[c].z, other.z);
                sum = dot2(sum, own[c].w, other.w);
            }
            sum *= beta * expf(gamma - gammas[j]);
        }
        lower[tid * kPitch + j] = sum;
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
    kkt_solve<<<dim3(heads, chunks), kChunk, 0, stream>>>(Rows(in[0]), Rows(out), gates, tokens, group);
    KLINEAGE_REQUIRE(call, cudaGetLastError() == cudaSuccess, "gdn_kkt_solve: the launch failed");
    return 0;
}
