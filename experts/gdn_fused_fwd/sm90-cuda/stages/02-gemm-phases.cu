// Stage 02 adds: gemm_phase_decomposition. A chunk is five matrix products, one after another by all threads of a CTA, operands and results in shared memory.
// By chunk of 64 tokens, S the state before it, D = diag(exp(gc)): U = inverse diag(beta) (V - D K S); O = scale (D Q S + tril(Q K^T exp(gc_i - gc_j)) U);
// S <- exp(gc_C) S + (diag(exp(gc_C - gc)) K)^T U.   q, k [T,HQK,128], v, o [T,HV,128], inverse [T,HV,64] bf16; gc, beta [T,HV], states [HV,128,128] fp32.
//
// Preconditions: 64 tokens of keys, queries, values, the inverse, the scores and half a head's state fit 168 KB.   Risks here: a barrier between phases; the
// state is updated only after its readers are done; exponentials above the diagonal overflow and are masked, not multiplied by zero; tokens past the end must
// have zero keys, values and betas, and the last sum of gates.   Predicted: the scores of a chunk once per CTA instead of once per column, four multiply-adds
// for each two loads: 20x or more.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "klineage.h"

namespace {

constexpr int kDim = 128, kChunk = 64, kColumns = 64;           // kColumns: value columns of a CTA
constexpr int kThreads = 256, kSide = 16;                       // threads are 16x16
constexpr int kKeyPitch = kDim + 1, kPitch = kChunk + 1;        // floats between rows
constexpr int kFloats = 2 * kChunk * kKeyPitch + 4 * kChunk * kPitch + kDim * kColumns + 3 * kChunk;
constexpr int kBytes = kFloats * 4;

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

// A thread's part of a product: rows y + 16 i, columns x + 16 j, over `depth` terms; what lies where is up to `a` and `b`.
template <int kRows, class A, class B>
__device__ __forceinline__ void multiply(float (&sums)[kRows][4], int depth, A a, B b) {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[i][j] = 0.f;
    const int x = threadIdx.x % kSide, y = threadIdx.x / kSide;
#pragma unroll 4
    for (int n = 0; n < depth; ++n) {
        float rows[kRows], columns[4];
#pragma unroll
        for (int i = 0; i < kRows; ++i) rows[i] = a(y + kSide * i, n);
#pragma unroll
        for (int j = 0; j < 4; ++j) columns[j] = b(n, x + kSide * j);
#pragma unroll
        for (int i = 0; i < kRows; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) sums[i][j] += rows[i] * columns[j];
    }
}

// Runs f(row, column, element) for every element of a thread's part.
template <int kRows, class F>
__device__ __forceinline__ void each(float (&sums)[kRows][4], F f) {
    const int x = threadIdx.x % kSide, y = threadIdx.x / kSide;
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) f(y + kSide * i, x + kSide * j, sums[i][j]);
}

__global__ void __launch_bounds__(kThreads, 1) fused_fwd(Rows q, Rows k, Rows v, Rows inverse, Rows o, Gates gates, const float *state0, float *state, int tokens, int group, float scale) {
    extern __shared__ float smem[];
    float *const keys = smem, *const queries = keys + kChunk * kKeyPitch, *const solve = queries + kChunk * kKeyPitch, *const scores = solve + kChunk * kPitch;
    float *const w = scores + kChunk * kPitch, *const u = w + kChunk * kPitch, *const s = u + kChunk * kPitch;  // w holds V first; s is [128][64]
    float *const gamma = s + kDim * kColumns, *const decay = gamma + kChunk, *const beta = decay + kChunk;
    const int tid = threadIdx.x, h = blockIdx.x, first = blockIdx.y * kColumns;
    const int64_t corner = int64_t(h) * kDim * kDim + first;
    for (int i = tid; i < kDim * kColumns; i += kThreads) s[i] = state0 ? state0[corner + i / kColumns * kDim + i % kColumns] : 0.f;
    for (int t0 = 0; t0 < tokens; t0 += kChunk) {
        __syncthreads();
        for (int i = tid; i < kChunk * kDim; i += kThreads) {
            const int row = i / kDim, column = i % kDim, t = t0 + row;
            keys[row * kKeyPitch + column] = t < tokens ? __bfloat162float(k.at(t, h / group)[column]) : 0.f;
            queries[row * kKeyPitch + column] = t < tokens ? __bfloat162float(q.at(t, h / group)[column]) : 0.f;
        }
        for (int i = tid; i < kChunk * kChunk; i += kThreads) {
            const int row = i / kChunk, column = i % kChunk, t = t0 + row;
            solve[row * kPitch + column] = t < tokens ? __bfloat162float(inverse.at(t, h)[column]) : 0.f;
            w[row * kPitch + column] = t < tokens ? __bfloat162float(v.at(t, h)[first + column]) : 0.f;
        }
        if (tid < kChunk) {
            gamma[tid] = gates.sum(min(t0 + tid, tokens - 1), h);
            decay[tid] = expf(gamma[tid]);
            beta[tid] = t0 + tid < tokens ? gates.rate(t0 + tid, h) : 0.f;
        }
        __syncthreads();
        float part[4][4];
        multiply(part, kDim, [&](int i, int n) { return queries[i * kKeyPitch + n]; }, [&](int n, int j) { return keys[j * kKeyPitch + n]; });
        each(part, [&](int i, int j, float x) { scores[i * kPitch + j] = j <= i ? x * expf(gamma[i] - gamma[j]) : 0.f; });
        multiply(part, kDim, [&](int i, int n) { return keys[i * kKeyPitch + n]; }, [&](int n, int j) { return s[n * kColumns + j]; });
        each(part, [&](int i, int j, float x) { w[i * kPitch + j] = beta[i] * (w[i * kPitch + j] - decay[i] * x); });
        __syncthreads();
        multiply(part, kChunk, [&](int i, int n) { return solve[i * kPitch + n]; }, [&](int n, int j) { return w[n * kPitch + j]; });
        each(part, [&](int i, int j, float x) { u[i * kPitch + j] = x; });
        __syncthreads();
        float out[4][4];
        multiply(out, kDim, [&](int i, int n) { return queries[i * kKeyPitch + n]; }, [&](int n, int j) { return s[n * kColumns + j]; });
        multiply(part, kChunk, [&](int i, int n) { return scores[i * kPitch + n]; }, [&](int n, int j) { return u[n * kPitch + j]; });
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) out[i][j] = scale * (decay[tid / kSide + kSide * i] * out[i][j] + part[i][j]);
        each(out, [&](int i, int j, float x) {
            if (t0 + i < tokens) o.at(t0 + i, h)[first + j] = __float2bfloat16(x);
        });
        __syncthreads();  // everybody has read the state, and u as it was
        for (int i = tid; i < kChunk * kColumns; i += kThreads) u[i / kColumns * kPitch + i % kColumns] *= expf(gamma[kChunk - 1] - gamma[i / kColumns]);
        __syncthreads();
        float next[8][4];
        multiply(next, kChunk, [&](int i, int n) { return keys[n * kKeyPitch + i]; }, [&](int n, int j) { return u[n * kPitch + j]; });
        each(next, [&](int i, int j, float x) { s[i * kColumns + j] = decay[kChunk - 1] * s[i * kColumns + j] + x; });
    }
    __syncthreads();
    for (int i = tid; i < kDim * kColumns; i += kThreads) state[corner + i / kColumns * kDim + i % kColumns] = s[i];
}

// Why this call is refused, or nullptr.
const char *refusal(const klineage_call *call) {
    if ((call->num_inputs != 6 && call->num_inputs != 7) || call->num_outputs != 2) return "gdn_fused_fwd reads q, k, v, inverse, gc, beta [, state0] and writes o and state";
    if (klineage_scalar_value(call, "chunk", kChunk) != kChunk) return "gdn_fused_fwd: chunks must have 64 tokens";
    const klineage_tensor *in = call->inputs, &v = in[2], &inverse = in[3], &o = call->outputs[0], &state = call->outputs[1];
    for (const klineage_tensor *t : {&in[0], &in[1], &v, &inverse, &o})
        if (t->dtype != KLINEAGE_BFLOAT16 || t->num_dims != 3 || t->shape[0] != v.shape[0] || t->shape[2] != (t == &inverse ? kChunk : kDim))
            return "gdn_fused_fwd: q, k, v and o must be bf16 [T,H,128], inverse bf16 [T,HV,64]";
    for (const klineage_tensor *t : {&in[0], &in[1], &v, &inverse, &o})
        if (t->stride[2] != 1 || t->stride[0] <= 0 || t->stride[1] <= 0 || t->stride[0] % 8 || t->stride[1] % 8 || reinterpret_cast<uintptr_t>(t->data) % 16)
            return "gdn_fused_fwd: rows must be contiguous and 16-byte aligned";
    for (const klineage_tensor *t : {&in[4], &in[5]})
        if (t->dtype != KLINEAGE_FLOAT32 || t->num_dims != 2 || t->shape[0] != v.shape[0] || t->shape[1] != v.shape[1]) return "gdn_fused_fwd: gc and beta must be fp32 [T,HV]";
    for (const klineage_tensor *t : {&state, call->num_inputs == 7 ? &in[6] : &state})
        if (t->dtype != KLINEAGE_FLOAT32 || t->num_dims != 3 || t->shape[0] != v.shape[1] || t->shape[1] != kDim || t->shape[2] != kDim || t->stride[2] != 1 ||
            t->stride[1] != kDim || t->stride[0] != kDim * kDim)
            return "gdn_fused_fwd: state0 and state must be contiguous fp32 [HV,128,128]";
    if (in[0].shape[1] < 1 || in[1].shape[1] != in[0].shape[1] || v.shape[1] < 1 || v.shape[1] % in[0].shape[1] || o.shape[1] != v.shape[1] || inverse.shape[1] != v.shape[1])
        return "gdn_fused_fwd: HV must be a multiple of HQK";
    if (v.shape[0] < 1 || v.shape[0] > INT32_MAX / 2 || v.shape[1] > 65536) return "gdn_fused_fwd: 1 to 2^30 tokens, at most 65536 heads";
    return nullptr;
}

}  // namespace

extern "C" int run(const klineage_call *call) {
    const char *why = refusal(call);
    KLINEAGE_REQUIRE(call, why == nullptr, why);
    const klineage_tensor *in = call->inputs, &o = call->outputs[0];
    const int tokens = int(in[2].shape[0]), heads = int(in[2].shape[1]), group = heads / int(in[0].shape[1]);
    const float scale = float(klineage_scalar_value(call, "scale", 0.08838834764831845));
    const auto stream = static_cast<cudaStream_t>(call->stream);
    const Gates gates{static_cast<const float *>(in[4].data), static_cast<const float *>(in[5].data), in[4].stride[0], in[4].stride[1], in[5].stride[0], in[5].stride[1]};
    const float *const state0 = call->num_inputs == 7 ? static_cast<const float *>(in[6].data) : nullptr;
    float *const state = static_cast<float *>(call->outputs[1].data);
    cudaFuncSetAttribute(fused_fwd, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
    fused_fwd<<<dim3(heads, kDim / kColumns), kThreads, kBytes, stream>>>(Rows(in[0]), Rows(in[1]), Rows(in[2]), Rows(in[3]), Rows(o), gates, state0, state, tokens, group, scale);
    KLINEAGE_REQUIRE(call, cudaGetLastError() == cudaSuccess, "gdn_fused_fwd: the launch failed");
    return 0;
}
