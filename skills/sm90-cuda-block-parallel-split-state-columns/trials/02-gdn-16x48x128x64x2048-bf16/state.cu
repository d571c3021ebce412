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

constexpr int kStage = 16;   // tokens whose keys and queries are in shared memory
constexpr int kReread = 56;  // leading elements of a key that the second pass reads again; the others stay in registers

// Four floats at an address of shared memory. Volatile, so that the compiler does not keep what the first pass read: the whole key
// and the state do not fit into the registers together.
__device__ __forceinline__ float4 read_again(uint32_t from) {
    float4 x;
    asm volatile("ld.volatile.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(from) : "memory");
    return x;
}

__device__ __forceinline__ void advance(float &s, float key, float query, float decay, float update, float &out) {
    s = fmaf(key, update, decay * s);
    out = fmaf(s, query, out);
}

__global__ void __launch_bounds__(kDim, 1) gdn(View<const Bf16> q, View<const Bf16> k, View<const Bf16> v, View<const float> g, View<const float> beta, const float *state0,
                    View<Bf16> o, float *state, int tokens, int group, float scale) {
    const int h = blockIdx.x, column = threadIdx.x;
    __shared__ __align__(16) float keys[kStage][kDim];
    __shared__ __align__(16) float queries[kStage][kDim];
    constexpr int kQuads = kDim / 4, kAgain = kReread / 4;

    const int64_t first = int64_t(h) * kDim * kDim + column;
    float s[kDim];
    if (state0) {
#pragma unroll
        for (int i = 0; i < kDim; ++i) s[i] = state0[first + i * kDim];
    } else {
#pragma unroll
        for (int i = 0; i < kDim; ++i) s[i] = 0.f;
    }

    const Bf16 *key_in = k.at(0, h / group) + column, *query_in = q.at(0, h / group) + column;
    const Bf16 *v_in = v.at(0, h) + column;
    const float *g_in = g.at(0, h), *beta_in = beta.at(0, h);
    Bf16 *o_out = o.at(0, h) + column;

#pragma unroll 1
    for (int start = 0; start < tokens; start += kStage) {
        const int count = min(kStage, tokens - start);
        if (count == kStage) {
            Bf16 some_keys[kStage], some_queries[kStage];
#pragma unroll
            for (int j = 0; j < kStage; ++j) {
                some_keys[j] = *key_in;
                some_queries[j] = *query_in;
                key_in += k.token;
                query_in += q.token;
            }
            __syncthreads();
#pragma unroll
            for (int j = 0; j < kStage; ++j) {
                keys[j][column] = __bfloat162float(some_keys[j]);
                queries[j][column] = __bfloat162float(some_queries[j]);
            }
        } else {
            __syncthreads();
#pragma unroll 1
            for (int j = 0; j < count; ++j) {
                keys[j][column] = __bfloat162float(*key_in);
                queries[j][column] = __bfloat162float(*query_in);
                key_in += k.token;
                query_in += q.token;
            }
        }
        __syncthreads();

#pragma unroll 1
        for (int j = 0; j < count; ++j) {
            const float gate = *g_in, rate = *beta_in;
            const Bf16 value = *v_in;
            g_in += g.token;
            beta_in += beta.token;
            v_in += v.token;
            const float4 *const key = reinterpret_cast<const float4 *>(keys[j]);
            const float4 *const query = reinterpret_cast<const float4 *>(queries[j]);
            const uint32_t key_address = static_cast<uint32_t>(__cvta_generic_to_shared(keys[j]));

            float4 kept[kQuads - kAgain];
            float dot0 = 0.f, dot1 = 0.f, dot2 = 0.f, dot3 = 0.f;
#pragma unroll
            for (int i = 0; i < kQuads; ++i) {
                const float4 x = key[i];
                if (i >= kAgain) kept[i >= kAgain ? i - kAgain : 0] = x;
                dot0 = fmaf(s[4 * i], x.x, dot0);
                dot1 = fmaf(s[4 * i + 1], x.y, dot1);
                dot2 = fmaf(s[4 * i + 2], x.z, dot2);
                dot3 = fmaf(s[4 * i + 3], x.w, dot3);
            }
            const float decay = expf(gate);
            const float read = decay * ((dot0 + dot1) + (dot2 + dot3));
            const float update = rate * (__bfloat162float(value) - read);

            float out0 = 0.f, out1 = 0.f, out2 = 0.f, out3 = 0.f;
            // First the part of the key that is in registers, which frees them for the reads of the other part.
#pragma unroll
            for (int i = kAgain; i < kQuads; ++i) {
                const float4 x = kept[i - kAgain], y = query[i];
                advance(s[4 * i], x.x, y.x, decay, update, out0);
                advance(s[4 * i + 1], x.y, y.y, decay, update, out1);
                advance(s[4 * i + 2], x.z, y.z, decay, update, out2);
                advance(s[4 * i + 3], x.w, y.w, decay, update, out3);
            }
#pragma unroll
            for (int i = 0; i < kAgain; ++i) {
                const float4 x = read_again(key_address + 16 * i), y = query[i];
                advance(s[4 * i], x.x, y.x, decay, update, out0);
                advance(s[4 * i + 1], x.y, y.y, decay, update, out1);
                advance(s[4 * i + 2], x.z, y.z, decay, update, out2);
                advance(s[4 * i + 3], x.w, y.w, decay, update, out3);
            }
            *o_out = __float2bfloat16(scale * ((out0 + out1) + (out2 + out3)));
            o_out += o.token;
        }
    }

#pragma unroll
    for (int i = 0; i < kDim; ++i) state[first + i * kDim] = s[i];
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
    gdn<<<heads, kDim, 0, static_cast<cudaStream_t>(call->stream)>>>(
        View<const Bf16>(in[0]), View<const Bf16>(in[1]), View<const Bf16>(in[2]), View<const float>(in[3]), View<const float>(in[4]),
        call->num_inputs == 6 ? static_cast<const float *>(in[5].data) : nullptr, View<Bf16>(out[0]), static_cast<float *>(out[1].data), tokens, group, scale);
    KLINEAGE_REQUIRE(call, cudaGetLastError() == cudaSuccess, "gdn: the launch failed");
    return 0;
}
