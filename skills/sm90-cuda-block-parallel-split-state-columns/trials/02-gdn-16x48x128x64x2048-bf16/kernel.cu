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

constexpr int kLanes = 8;                    // neighbouring lanes that share a column of the state
constexpr int kColumns = 16;                 // columns per CTA
constexpr int kThreads = kLanes * kColumns;  // 128
constexpr int kTokens = 32;                  // tokens staged in shared memory
constexpr int kVector = 4;                   // floats of a float4
constexpr int kOwn = kDim / kLanes;          // state elements per thread
constexpr int kOwnVectors = kOwn / kVector;
constexpr int kQuads = kDim / kVector;       // float4 per key

constexpr int kRowStep = kThreads / kQuads;         // tokens of keys that all threads stage at once
constexpr int kRowLoads = kTokens / kRowStep;
constexpr int kValueStep = kThreads / kColumns;     // tokens of values that all threads stage at once
constexpr int kValueLoads = kTokens / kValueStep;

static_assert(32 % kLanes == 0 && (kLanes & (kLanes - 1)) == 0, "lanes of a column are an aligned group in a warp");
static_assert(kDim % (kLanes * kVector) == 0 && kDim % kColumns == 0, "the row map has no tail");
static_assert(kThreads % kQuads == 0 && kTokens % kRowStep == 0 && kTokens % kValueStep == 0 && kTokens <= kThreads, "staging has no tail");

__device__ __forceinline__ void advance(float &s, float key, float query, float decay, float update, float &out) {
    s = fmaf(key, update, decay * s);
    out = fmaf(s, query, out);
}

// Every lane of the warp must call it.
__device__ __forceinline__ float sum_of_lanes(float x) {
#pragma unroll
    for (int m = 1; m < kLanes; m *= 2) x += __shfl_xor_sync(0xffffffffu, x, m);
    return x;
}

// Four bf16 as floats.
__device__ __forceinline__ float4 widen(uint2 x) {
    return make_float4(__uint_as_float(x.x << 16), __uint_as_float(x.x & 0xffff0000u), __uint_as_float(x.y << 16), __uint_as_float(x.y & 0xffff0000u));
}

// The row of the state that is element i of the thread's slice.
__device__ __forceinline__ int row_of(int i, int part) { return i / kVector * kVector * kLanes + kVector * part + i % kVector; }

__global__ void __launch_bounds__(kThreads, 3) gdn(View<const Bf16> q, View<const Bf16> k, View<const Bf16> v, View<const float> g, View<const float> beta, const float *state0,
                    View<Bf16> o, float *state, int tokens, int group, float scale) {
    const int h = blockIdx.x, tid = threadIdx.x;
    const int part = tid % kLanes, local = tid / kLanes;
    const int first_column = blockIdx.y * kColumns, column = first_column + local;
    __shared__ float4 keys[kTokens][kQuads];
    __shared__ float4 queries[kTokens][kQuads];
    __shared__ float values[kTokens][kColumns];
    __shared__ float2 gates[kTokens];  // decay, beta

    const int64_t first = int64_t(h) * kDim * kDim + column;
    float s[kOwn];
    if (state0) {
#pragma unroll
        for (int i = 0; i < kOwn; ++i) s[i] = state0[first + row_of(i, part) * kDim];
    } else {
#pragma unroll
        for (int i = 0; i < kOwn; ++i) s[i] = 0.f;
    }

    const int stage_row = tid / kQuads, stage_quad = tid % kQuads;
    const int value_row = tid / kColumns, value_column = tid % kColumns;
    const Bf16 *const key_in = k.at(0, h / group) + kVector * stage_quad;
    const Bf16 *const query_in = q.at(0, h / group) + kVector * stage_quad;
    const Bf16 *const v_in = v.at(0, h) + first_column + value_column;
    Bf16 *o_out = o.at(0, h) + column;

#pragma unroll 1
    for (int start = 0; start < tokens; start += kTokens) {
        const int count = min(kTokens, tokens - start);

        // Rows behind the last token are clamped: they are staged, but nobody reads them.
        uint2 some_keys[kRowLoads], some_queries[kRowLoads];
        Bf16 some_values[kValueLoads];
        float gate = 0.f, rate = 0.f;
#pragma unroll
        for (int j = 0; j < kRowLoads; ++j) {
            const int64_t t = start + min(stage_row + j * kRowStep, count - 1);
            some_keys[j] = *reinterpret_cast<const uint2 *>(key_in + t * k.token);
            some_queries[j] = *reinterpret_cast<const uint2 *>(query_in + t * q.token);
        }
#pragma unroll
        for (int j = 0; j < kValueLoads; ++j) {
            const int64_t t = start + min(value_row + j * kValueStep, count - 1);
            some_values[j] = v_in[t * v.token];
        }
        if (tid < kTokens) {
            const int t = start + min(tid, count - 1);
            gate = *g.at(t, h);
            rate = *beta.at(t, h);
        }
        __syncthreads();  // the old tile has been read
#pragma unroll
        for (int j = 0; j < kRowLoads; ++j) {
            keys[stage_row + j * kRowStep][stage_quad] = widen(some_keys[j]);
            queries[stage_row + j * kRowStep][stage_quad] = widen(some_queries[j]);
        }
#pragma unroll
        for (int j = 0; j < kValueLoads; ++j) values[value_row + j * kValueStep][value_column] = __bfloat162float(some_values[j]);
        if (tid < kTokens) gates[tid] = make_float2(expf(gate), rate);
        __syncthreads();

#pragma unroll 2
        for (int j = 0; j < count; ++j) {
            const float2 decay_rate = gates[j];
            const float decay = decay_rate.x, value = values[j][local];

            float4 key[kOwnVectors];
            float dot0 = 0.f, dot1 = 0.f, dot2 = 0.f, dot3 = 0.f;
#pragma unroll
            for (int i = 0; i < kOwnVectors; ++i) {
                const float4 x = keys[j][kLanes * i + part];
                key[i] = x;
                dot0 = fmaf(s[4 * i], x.x, dot0);
                dot1 = fmaf(s[4 * i + 1], x.y, dot1);
                dot2 = fmaf(s[4 * i + 2], x.z, dot2);
                dot3 = fmaf(s[4 * i + 3], x.w, dot3);
            }
            const float read = decay * sum_of_lanes((dot0 + dot1) + (dot2 + dot3));
            const float update = decay_rate.y * (value - read);

            float out0 = 0.f, out1 = 0.f, out2 = 0.f, out3 = 0.f;
#pragma unroll
            for (int i = 0; i < kOwnVectors; ++i) {
                const float4 x = key[i], y = queries[j][kLanes * i + part];
                advance(s[4 * i], x.x, y.x, decay, update, out0);
                advance(s[4 * i + 1], x.y, y.y, decay, update, out1);
                advance(s[4 * i + 2], x.z, y.z, decay, update, out2);
                advance(s[4 * i + 3], x.w, y.w, decay, update, out3);
            }
            const float sum = sum_of_lanes((out0 + out1) + (out2 + out3));
            if (part == 0) *o_out = __float2bfloat16(scale * sum);
            o_out += o.token;
        }
    }

#pragma unroll
    for (int i = 0; i < kOwn; ++i) state[first + row_of(i, part) * kDim] = s[i];
}

// Why this call is refused, or nullptr.
const char *refusal(const klineage_call *call) {
    if ((call->num_inputs != 5 && call->num_inputs != 6) || call->num_outputs != 2) return "gdn reads q, k, v, g, beta [, state0] and writes o and state";
    const klineage_tensor *in = call->inputs, &v = in[2], &o = call->outputs[0], &state = call->outputs[1];
    for (const klineage_tensor *t : {&in[0], &in[1], &v, &o})
        if (t->dtype != KLINEAGE_BFLOAT16 || t->num_dims != 3 || t->shape[2] != kDim || t->shape[0] != v.shape[0] || t->stride[2] != 1)
            return "gdn: q, k, v and o must be bf16 [T,H,128] with contiguous rows";
    for (const klineage_tensor *t : {&in[0], &in[1]})
        if (t->stride[0] % kVector || t->stride[1] % kVector || reinterpret_cast<uintptr_t>(t->data) % sizeof(uint2))
            return "gdn: rows of q and k must be aligned to 8 bytes";
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
    // Room for the staged tiles of several CTAs per SM.
    static const cudaError_t carveout = cudaFuncSetAttribute(gdn, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
    KLINEAGE_REQUIRE(call, carveout == cudaSuccess, "gdn: the shared memory carveout was refused");
    gdn<<<dim3(heads, kDim / kColumns), kThreads, 0, static_cast<cudaStream_t>(call->stream)>>>(
        View<const Bf16>(in[0]), View<const Bf16>(in[1]), View<const Bf16>(in[2]), View<const float>(in[3]), View<const float>(in[4]),
        call->num_inputs == 6 ? static_cast<const float *>(in[5].data) : nullptr, View<Bf16>(out[0]), static_cast<float *>(out[1].data), tokens, group, scale);
    KLINEAGE_REQUIRE(call, cudaGetLastError() == cudaSuccess, "gdn: the launch failed");
    return 0;
}
