#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "klineage.h"

namespace {

constexpr int kDim = 128, kChunk = 64;
// kParts neighbouring lanes share a value column, with the keys part + kParts * i; kSlices CTAs share a head.
constexpr int kParts = 8, kKeys = kDim / kParts, kSlices = 8, kColumns = kDim / kSlices, kThreads = kColumns * kParts;
constexpr int kTokens = 4;  // tokens whose loads are in flight together
static_assert(kThreads == 128 && kKeys == 16 && kColumns == 16, "the split of a head");

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

// The sum over the lanes of a column; all lanes of the warp must call it.
__device__ __forceinline__ float column_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    x += __shfl_xor_sync(0xffffffffu, x, 2);
    x += __shfl_xor_sync(0xffffffffu, x, 4);
    return x;
}

__global__ void __launch_bounds__(kThreads, 3) fused_fwd(Rows q, Rows k, Rows v, Rows inverse, Rows o, Gates gates, const float *state0, float *state, int tokens, int group, float scale) {
    __shared__ float w[kChunk][kColumns], u[kChunk][kColumns];
    const int h = blockIdx.x, part = threadIdx.x % kParts, c = threadIdx.x / kParts, column = blockIdx.y * kColumns + c;
    const int head = h / group;
    const int64_t first = int64_t(h) * kDim * kDim + part * kDim + column;
    float s[kKeys];  // keys part + kParts * i of the column
#pragma unroll
    for (int i = 0; i < kKeys; ++i) s[i] = state0 ? state0[first + i * kParts * kDim] : 0.f;
    for (int t0 = 0; t0 < tokens; t0 += kChunk) {
        const int count = min(kChunk, tokens - t0);
        const __nv_bfloat16 *const keys = k.at(t0, head) + part;
        const float *const gc = gates.gc + t0 * gates.gc_token + h * gates.gc_head;

        // w = beta (v - exp(gamma) K S)
        for (int i0 = 0; i0 < count; i0 += kTokens) {
            float read[kTokens], value[kTokens], rate[kTokens], decay[kTokens];
#pragma unroll
            for (int r = 0; r < kTokens; ++r) {
                const int i = min(i0 + r, count - 1);
                const __nv_bfloat16 *const key = keys + i * k.token;
                value[r] = __bfloat162float(v.at(t0 + i, h)[column]);
                rate[r] = gates.rate(t0 + i, h);
                decay[r] = expf(gc[i * gates.gc_token]);
                float sum = 0.f;
#pragma unroll
                for (int d = 0; d < kKeys; ++d) sum += __bfloat162float(key[d * kParts]) * s[d];
                read[r] = sum;
            }
#pragma unroll
            for (int r = 0; r < kTokens; ++r) read[r] = column_sum(read[r]);
            if (part == 0) {
#pragma unroll
                for (int r = 0; r < kTokens; ++r)
                    if (i0 + r < count) w[i0 + r][c] = rate[r] * (value[r] - decay[r] * read[r]);
            }
        }
        __syncwarp();

        // u = inverse w, the row's entries j = part, part + 8, ... in this lane
        float mine[kChunk / kParts];
#pragma unroll
        for (int m = 0; m < kChunk / kParts; ++m) mine[m] = part + m * kParts < count ? w[part + m * kParts][c] : 0.f;
        for (int i0 = 0; i0 < count; i0 += kTokens) {
            float sums[kTokens];
#pragma unroll
            for (int r = 0; r < kTokens; ++r) {
                const int i = min(i0 + r, count - 1);
                const __nv_bfloat16 *const row = inverse.at(t0 + i, h) + part;
                float sum = 0.f;
#pragma unroll
                for (int m = 0; m < kChunk / kParts; ++m) {
                    const float entry = __bfloat162float(row[m * kParts]);
                    if (part + m * kParts <= i) sum += entry * mine[m];
                }
                sums[r] = sum;
            }
#pragma unroll
            for (int r = 0; r < kTokens; ++r) sums[r] = column_sum(sums[r]);
            if (part == 0) {
#pragma unroll
                for (int r = 0; r < kTokens; ++r)
                    if (i0 + r < count) u[i0 + r][c] = sums[r];
            }
        }
        __syncwarp();

        // o: every lane sums its keys' part of everything, one reduction per token
        for (int i = 0; i < count; ++i) {
            const __nv_bfloat16 *const row = q.at(t0 + i, head) + part;
            const float gamma = gc[i * gates.gc_token];
            float query[kKeys];
#pragma unroll
            for (int d = 0; d < kKeys; ++d) query[d] = __bfloat162float(row[d * kParts]);
            float out = 0.f;
#pragma unroll
            for (int d = 0; d < kKeys; ++d) out += query[d] * s[d];
            out *= expf(gamma);
            const __nv_bfloat16 *key = keys;
            const float *other = gc;
#pragma unroll 4
            for (int j = 0; j <= i; ++j) {
                float score = 0.f;
#pragma unroll
                for (int d = 0; d < kKeys; ++d) score += query[d] * __bfloat162float(key[d * kParts]);
                out += score * (expf(gamma - *other) * u[j][c]);
                key += k.token;
                other += gates.gc_token;
            }
            __syncwarp();
            out = column_sum(out);
            if (part == 0) o.at(t0 + i, h)[column] = __float2bfloat16(scale * out);
        }

        // The state after the chunk
        const float end = gc[(count - 1) * gates.gc_token], fade = expf(end);
#pragma unroll
        for (int d = 0; d < kKeys; ++d) s[d] *= fade;
        const __nv_bfloat16 *key = keys;
        const float *other = gc;
#pragma unroll 4
        for (int j = 0; j < count; ++j) {
            const float weight = expf(end - *other) * u[j][c];
#pragma unroll
            for (int d = 0; d < kKeys; ++d) s[d] += __bfloat162float(key[d * kParts]) * weight;
            key += k.token;
            other += gates.gc_token;
        }
        __syncwarp();
    }
#pragma unroll
    for (int i = 0; i < kKeys; ++i) state[first + i * kParts * kDim] = s[i];
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
    fused_fwd<<<dim3(heads, kSlices), kThreads, 0, stream>>>(Rows(in[0]), Rows(in[1]), Rows(in[2]), Rows(in[3]), Rows(o), gates, state0, state, tokens, group, scale);
    KLINEAGE_REQUIRE(call, cudaGetLastError() == cudaSuccess, "gdn_fused_fwd: the launch failed");
    return 0;
}
