#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "klineage.h"

namespace {

constexpr int kDim = 128;

// A tensor [T,H,...] with the strides of the call, in elements.
template <class Element>
struct View {
    Element *data;
    int64_t token, head;
    __host__ explicit View(const klineage_tensor &t) : data(static_cast<Element *>(t.data)), token(t.stride[0]), head(t.stride[1]) {}
    __device__ Element *at(int t, int h) const { return data + t * token + h * head; }
};

using Bf16 = __nv_bfloat16;

constexpr int kTokens = 32;             // staged at a time
constexpr int kLanes = 4, kColumns = 32;  // lanes per column, columns per CTA

__device__ __forceinline__ float sum_of_lanes(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

__global__ void __launch_bounds__(kDim) gdn(View<const Bf16> q, View<const Bf16> k, View<const Bf16> v, View<const float> g, View<const float> beta, const float *state0,
                    View<Bf16> o, float *state, int tokens, int group, float scale) {
    __shared__ float4 keys[kTokens][kDim / 4], queries[kTokens][kDim / 4];
    __shared__ float values[kTokens][kColumns], decays[kTokens], betas[kTokens];
    const int h = blockIdx.x, tid = threadIdx.x, part = tid % kLanes, local = tid / kLanes, column = blockIdx.y * kColumns + local;
    const int64_t corner = int64_t(h) * kDim * kDim + column;
    float s[32];  // keys 16 (i / 4) + 4 part + i % 4
#pragma unroll
    for (int i = 0; i < 32; ++i) s[i] = state0 ? state0[corner + (i / 4 * 16 + 4 * part + i % 4) * kDim] : 0.f;
    for (int t0 = 0; t0 < tokens; t0 += kTokens) {
        const int count = min(kTokens, tokens - t0);
        __syncthreads();
        for (int t = 0; t < count; ++t) {
            reinterpret_cast<float *>(keys[t])[tid] = __bfloat162float(k.at(t0 + t, h / group)[tid]);
            reinterpret_cast<float *>(queries[t])[tid] = __bfloat162float(q.at(t0 + t, h / group)[tid]);
        }
        for (int i = tid; i < count * kColumns; i += kDim)
            values[i / kColumns][i % kColumns] = __bfloat162float(v.at(t0 + i / kColumns, h)[blockIdx.y * kColumns + i % kColumns]);
        if (tid < count) decays[tid] = expf(*g.at(t0 + tid, h)), betas[tid] = *beta.at(t0 + tid, h);
        __syncthreads();
        for (int t = 0; t < count; ++t) {
            float read[4] = {}, out[4] = {};
            const float decay = decays[t];
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const float4 key = keys[t][4 * i + part];
                read[0] += s[4 * i] * key.x, read[1] += s[4 * i + 1] * key.y, read[2] += s[4 * i + 2] * key.z, read[3] += s[4 * i + 3] * key.w;
            }
            const float update = betas[t] * (values[t][local] - decay * sum_of_lanes(read[0] + read[1] + (read[2] + read[3])));
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const float4 key = keys[t][4 * i + part], query = queries[t][4 * i + part];
                s[4 * i] = decay * s[4 * i] + key.x * update, s[4 * i + 1] = decay * s[4 * i + 1] + key.y * update;
                s[4 * i + 2] = decay * s[4 * i + 2] + key.z * update, s[4 * i + 3] = decay * s[4 * i + 3] + key.w * update;
                out[0] += s[4 * i] * query.x, out[1] += s[4 * i + 1] * query.y, out[2] += s[4 * i + 2] * query.z, out[3] += s[4 * i + 3] * query.w;
            }
            const float sum = sum_of_lanes(out[0] + out[1] + (out[2] + out[3]));
            if (part == 0) o.at(t0 + t, h)[column] = __float2bfloat16(scale * sum);
        }
    }
#pragma unroll
    for (int i = 0; i < 32; ++i) state[corner + (i / 4 * 16 + 4 * part + i % 4) * kDim] = s[i];
}

// Why this call is refused, or nullptr.
const char *refusal(const klineage_call *call) {
    if ((call->num_inputs != 5 && call->num_inputs != 6) || call->num_outputs != 2) return "gdn reads q, k, v, g, beta [, state0] and writes o and state";
    const klineage_tensor *in = call->inputs, &v = in[2], &o = call->outputs[0], &state = call->outputs[1];
    for (const klineage_tensor *t : {&in[0], &in[1], &v, &o})
        if (t->dtype != KLINEAGE_BFLOAT16 || t->num_dims != 3 || t->shape[2] != kDim || t->shape[0] != v.shape[0] || t->stride[2] != 1)
            return "gdn: q, k, v and o must be bf16 [T,H,128] with contiguous rows";
    for (const klineage_tensor *t : {&in[3], &in[4]})
        if (t->dtype != KLINEAGE_FLOAT32 || t->num_dims != 2 || t->shape[0] != v.shape[0] || t->shape[1] != v.shape[1]) return "gdn: g and beta must be fp32 [T,HV]";
    for (const klineage_tensor *t : {&state, call->num_inputs == 6 ? &in[5] : &state})
        if (t->dtype != KLINEAGE_FLOAT32 || t->num_dims != 3 || t->shape[0] != v.shape[1] || t->shape[1] != kDim || t->shape[2] != kDim || t->stride[2] != 1 ||
            t->stride[1] != kDim || t->stride[0] != kDim * kDim)
            return "gdn: state0 and state must be contiguous fp32 [HV,128,128]";
    if (in[0].shape[1] < 1 || in[1].shape[1] != in[0].shape[1] || v.shape[1] % in[0].shape[1] || o.shape[1] != v.shape[1]) return "gdn: HV must be a multiple of HQK";
    return nullptr;
}

}  // namespace

extern "C" int run(const klineage_call *call) {
    const char *why = refusal(call);
    KLINEAGE_REQUIRE(call, why == nullptr, why);
    const klineage_tensor *in = call->inputs, *out = call->outputs;
    const int tokens = int(in[2].shape[0]), heads = int(in[2].shape[1]), group = heads / int(in[0].shape[1]);
    const float scale = float(klineage_scalar_value(call, "scale", 0.08838834764831845));
    gdn<<<dim3(heads, kDim / kColumns), kDim, 0, static_cast<cudaStream_t>(call->stream)>>>(
        View<const Bf16>(in[0]), View<const Bf16>(in[1]), View<const Bf16>(in[2]), View<const float>(in[3]), View<const float>(in[4]),
        call->num_inputs == 6 ? static_cast<const float *>(in[5].data) : nullptr, View<Bf16>(out[0]), static_cast<float *>(out[1].data), tokens, group, scale);
    KLINEAGE_REQUIRE(call, cudaGetLastError() == cudaSuccess, "gdn: the launch failed");
    return 0;
}
