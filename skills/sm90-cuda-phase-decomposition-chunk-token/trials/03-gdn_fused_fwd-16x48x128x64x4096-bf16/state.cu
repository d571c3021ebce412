#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "klineage.h"

namespace {

constexpr int kDim = 128, kChunk = 64;
constexpr int kLanes = 8, kColumns = 16, kKeys = kDim / kLanes;  // lanes per column, columns per CTA, keys per lane: part + 8 i

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

__device__ __forceinline__ float sum_of_lanes(float x) {
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
}

__global__ void __launch_bounds__(kLanes * kColumns) fused_fwd(Rows q, Rows k, Rows v, Rows inverse, Rows o, Gates gates, const float *state0, float *state, int tokens, int group, float scale) {
    __shared__ float w[kChunk][kColumns], u[kChunk][kColumns];
    const int h = blockIdx.x, part = threadIdx.x % kLanes, local = threadIdx.x / kLanes, column = blockIdx.y * kColumns + local;
    const int64_t corner = int64_t(h) * kDim * kDim + part * kDim + column;
    float s[kKeys];
#pragma unroll
    for (int d = 0; d < kKeys; ++d) s[d] = state0 ? state0[corner + d * kLanes * kDim] : 0.f;
    for (int t0 = 0; t0 < tokens; t0 += kChunk) {
        const int count = min(kChunk, tokens - t0);
        for (int i = 0; i < count; ++i) {
            const __nv_bfloat16 *const key = k.at(t0 + i, h / group) + part;
            float read = 0.f;
#pragma unroll
            for (int d = 0; d < kKeys; ++d) read += __bfloat162float(key[d * kLanes]) * s[d];
            read = sum_of_lanes(read);
            if (part == 0) w[i][local] = gates.rate(t0 + i, h) * (__bfloat162float(v.at(t0 + i, h)[column]) - expf(gates.sum(t0 + i, h)) * read);
        }
        __syncwarp();  // a column's lanes are in one warp
        for (int i = 0; i < count; ++i) {
            float sum = 0.f;
            for (int j = part; j <= i; j += kLanes) sum += __bfloat162float(inverse.at(t0 + i, h)[j]) * w[j][local];
            sum = sum_of_lanes(sum);
            if (part == 0) u[i][local] = sum;
        }
        __syncwarp();
        for (int i = 0; i < count; ++i) {
            const __nv_bfloat16 *const query = q.at(t0 + i, h / group) + part;
            float queries[kKeys], out = 0.f;
#pragma unroll
            for (int d = 0; d < kKeys; ++d) queries[d] = __bfloat162float(query[d * kLanes]), out += queries[d] * s[d];
            out *= expf(gates.sum(t0 + i, h));
            for (int j = 0; j <= i; ++j) {
                const __nv_bfloat16 *const key = k.at(t0 + j, h / group) + part;
                float score = 0.f;
#pragma unroll
                for (int d = 0; d < kKeys; ++d) score += queries[d] * __bfloat162float(key[d * kLanes]);
                out += score * expf(gates.sum(t0 + i, h) - gates.sum(t0 + j, h)) * u[j][local];
            }
            out = sum_of_lanes(out);
            if (part == 0) o.at(t0 + i, h)[column] = __float2bfloat16(scale * out);
        }
        const float end = gates.sum(t0 + count - 1, h), kept = expf(end);
#pragma unroll
        for (int d = 0; d < kKeys; ++d) s[d] *= kept;
        for (int j = 0; j < count; ++j) {
            const __nv_bfloat16 *const key = k.at(t0 + j, h / group) + part;
            const float update = expf(end - gates.sum(t0 + j, h)) * u[j][local];
#pragma unroll
            for (int d = 0; d < kKeys; ++d) s[d] += __bfloat162float(key[d * kLanes]) * update;
        }
        __syncwarp();
    }
#pragma unroll
    for (int d = 0; d < kKeys; ++d) state[corner + d * kLanes * kDim] = s[d];
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
    fused_fwd<<<dim3(heads, kDim / kColumns), kLanes * kColumns, 0, stream>>>(Rows(in[0]), Rows(in[1]), Rows(in[2]), Rows(in[3]), Rows(o), gates, state0, state, tokens, group, scale);
    KLINEAGE_REQUIRE(call, cudaGetLastError() == cudaSuccess, "gdn_fused_fwd: the launch failed");
    return 0;
}
