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

constexpr int kTokens = 32;              // staged at a time
constexpr int kParts = 4;                // lanes that share a column, and CTAs that share a head
constexpr int kColumns = kDim / kParts;  // of a CTA
constexpr int kKeys = kDim / kParts;     // of a lane
constexpr int kQuads = kKeys / 4;

// Four neighbouring bf16; kVector says that they are aligned to 8 bytes.
template <bool kVector>
__device__ __forceinline__ uint2 load4(const Bf16 *from) {
    if constexpr (kVector) {
        return *reinterpret_cast<const uint2 *>(from);
    } else {
        const unsigned short *x = reinterpret_cast<const unsigned short *>(from);
        return make_uint2(uint32_t(x[0]) | uint32_t(x[1]) << 16, uint32_t(x[2]) | uint32_t(x[3]) << 16);
    }
}

__device__ __forceinline__ float4 widen(uint2 x) {
    return make_float4(__uint_as_float(x.x << 16), __uint_as_float(x.x & 0xffff0000u), __uint_as_float(x.y << 16), __uint_as_float(x.y & 0xffff0000u));
}

// Lane `part` of a column holds the keys 16 (i / 4) + 4 part + i % 4.
template <bool kVector>
__global__ void __launch_bounds__(kDim) gdn(View<const Bf16> q, View<const Bf16> k, View<const Bf16> v, View<const float> g, View<const float> beta, const float *state0,
                    View<Bf16> o, float *state, int tokens, int group, float scale) {
    __shared__ float4 keys[kTokens + 1][kDim / 4];  // one row more: it is read ahead and not used
    __shared__ float4 queries[kTokens][kDim / 4], values[kTokens][kColumns / 4];
    __shared__ float2 gates[kTokens];  // exp(g), beta
    const int h = blockIdx.x, hq = h / group, thread = threadIdx.x;
    const int part = thread % kParts, local = thread / kParts, first = blockIdx.y * kColumns, column = first + local;
    const int64_t corner = int64_t(h) * kDim * kDim + 4 * part * kDim + column;
    float s[kKeys];
#pragma unroll
    for (int i = 0; i < kKeys; ++i) s[i] = state0 ? state0[corner + (16 * (i / 4) + i % 4) * kDim] : 0.f;

    constexpr int kRowThreads = kDim / 4, kRowStep = kDim / kRowThreads, kRowLoads = kTokens / kRowStep;
    constexpr int kValueThreads = kColumns / 4, kValueStep = kDim / kValueThreads, kValueLoads = kTokens / kValueStep;
    const int row = thread / kRowThreads, row_quad = thread % kRowThreads;
    const int value_row = thread / kValueThreads, value_quad = thread % kValueThreads;

    for (int t0 = 0; t0 < tokens; t0 += kTokens) {
        const int count = min(kTokens, tokens - t0);
        // All loads are in flight before the first is used.
        uint2 raw_k[kRowLoads], raw_q[kRowLoads], raw_v[kValueLoads];
        float2 raw_gate = make_float2(0.f, 0.f);
        const Bf16 *k_from = k.at(t0 + row, hq) + 4 * row_quad, *q_from = q.at(t0 + row, hq) + 4 * row_quad;
        const Bf16 *v_from = v.at(t0 + value_row, h) + first + 4 * value_quad;
#pragma unroll
        for (int n = 0; n < kRowLoads; ++n) {
            raw_k[n] = raw_q[n] = make_uint2(0, 0);
            if (row + n * kRowStep < count) {
                raw_k[n] = load4<kVector>(k_from + n * kRowStep * k.token);
                raw_q[n] = load4<kVector>(q_from + n * kRowStep * q.token);
            }
        }
#pragma unroll
        for (int n = 0; n < kValueLoads; ++n) {
            raw_v[n] = make_uint2(0, 0);
            if (value_row + n * kValueStep < count) raw_v[n] = load4<kVector>(v_from + n * kValueStep * v.token);
        }
        if (thread < count) raw_gate = make_float2(*g.at(t0 + thread, h), *beta.at(t0 + thread, h));
        __syncthreads();
#pragma unroll
        for (int n = 0; n < kRowLoads; ++n) {
            keys[row + n * kRowStep][row_quad] = widen(raw_k[n]);
            queries[row + n * kRowStep][row_quad] = widen(raw_q[n]);
        }
#pragma unroll
        for (int n = 0; n < kValueLoads; ++n) values[value_row + n * kValueStep][value_quad] = widen(raw_v[n]);
        if (thread < count) gates[thread] = make_float2(expf(raw_gate.x), raw_gate.y);
        __syncthreads();

        float4 key[kQuads];
#pragma unroll
        for (int i = 0; i < kQuads; ++i) key[i] = keys[0][4 * i + part];
        float pending = 0.f;                           // this lane's share of the output of the token before
        Bf16 *to = o.at(t0, h) + column - o.token;     // where that one goes
#pragma unroll 2
        for (int t = 0; t < count; ++t) {
            float4 next[kQuads], query[kQuads];
            const float2 gate = gates[t];
            const float value = reinterpret_cast<const float *>(values[t])[local];
            float read[4] = {}, out[4] = {};
#pragma unroll
            for (int i = 0; i < kQuads; ++i) {
                read[0] += s[4 * i] * key[i].x, read[1] += s[4 * i + 1] * key[i].y, read[2] += s[4 * i + 2] * key[i].z, read[3] += s[4 * i + 3] * key[i].w;
            }
#pragma unroll
            for (int i = 0; i < kQuads; ++i) query[i] = queries[t][4 * i + part];
#pragma unroll
            for (int i = 0; i < kQuads; ++i) next[i] = keys[t + 1][4 * i + part];
            float sum = read[0] + read[1] + (read[2] + read[3]);
            sum += __shfl_xor_sync(0xffffffffu, sum, 1);
            pending += __shfl_xor_sync(0xffffffffu, pending, 1);
            sum += __shfl_xor_sync(0xffffffffu, sum, 2);
            pending += __shfl_xor_sync(0xffffffffu, pending, 2);
            // Not on the chain: it fills the wait for the shuffles.
#pragma unroll
            for (int i = 0; i < kKeys; ++i) s[i] = __fmul_rn(gate.x, s[i]);
            if (part == 0 && t > 0) *to = __float2bfloat16(scale * pending);
            to += o.token;
            const float update = gate.y * (value - gate.x * sum);
#pragma unroll
            for (int i = 0; i < kQuads; ++i) {
                s[4 * i] = fmaf(key[i].x, update, s[4 * i]), s[4 * i + 1] = fmaf(key[i].y, update, s[4 * i + 1]);
                s[4 * i + 2] = fmaf(key[i].z, update, s[4 * i + 2]), s[4 * i + 3] = fmaf(key[i].w, update, s[4 * i + 3]);
                out[0] += s[4 * i] * query[i].x, out[1] += s[4 * i + 1] * query[i].y, out[2] += s[4 * i + 2] * query[i].z, out[3] += s[4 * i + 3] * query[i].w;
            }
            pending = out[0] + out[1] + (out[2] + out[3]);
#pragma unroll
            for (int i = 0; i < kQuads; ++i) key[i] = next[i];
        }
        pending += __shfl_xor_sync(0xffffffffu, pending, 1);
        pending += __shfl_xor_sync(0xffffffffu, pending, 2);
        if (part == 0) *to = __float2bfloat16(scale * pending);
    }
#pragma unroll
    for (int i = 0; i < kKeys; ++i) state[corner + (16 * (i / 4) + i % 4) * kDim] = s[i];
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
    bool aligned = true;  // four elements of q, k and v can be read at once
    for (int i = 0; i < 3; ++i) aligned = aligned && reinterpret_cast<uintptr_t>(in[i].data) % 8 == 0 && in[i].stride[0] % 4 == 0 && in[i].stride[1] % 4 == 0;
    auto *kernel = &gdn<true>;
    if (!aligned) kernel = &gdn<false>;
    kernel<<<dim3(heads, kParts), kDim, 0, static_cast<cudaStream_t>(call->stream)>>>(
        View<const Bf16>(in[0]), View<const Bf16>(in[1]), View<const Bf16>(in[2]), View<const float>(in[3]), View<const float>(in[4]),
        call->num_inputs == 6 ? static_cast<const float *>(in[5].data) : nullptr, View<Bf16>(out[0]), static_cast<float *>(out[1].data), tokens, group, scale);
    KLINEAGE_REQUIRE(call, cudaGetLastError() == cudaSuccess, "gdn: the launch failed");
    return 0;
}
