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

constexpr int kTokens = 32;                    // staged at a time
constexpr int kLanes = 8;                      // neighbouring lanes that share a column of the state
constexpr int kColumns = 16;                   // columns of a CTA
constexpr int kThreads = kLanes * kColumns;    // of a CTA
constexpr int kOwn = kDim / kLanes;            // rows of its column that a thread holds
constexpr int kVectors = kDim / 4;             // float4 of a key or query
constexpr int kStageVectors = kTokens * kVectors / kThreads;
constexpr int kStageValues = kTokens * kColumns / kThreads;

static_assert((kLanes & (kLanes - 1)) == 0 && kLanes <= 32, "the lanes of a column are an aligned group in a warp");
static_assert(kThreads % 32 == 0, "whole warps");
static_assert(kDim % (4 * kLanes) == 0 && kDim % kColumns == 0, "no tails");
static_assert(kTokens * kVectors % kThreads == 0 && kTokens * kColumns % kThreads == 0, "staging has no tails");

// Over the lanes of a column; every lane gets the sum, and every lane must call.
__device__ __forceinline__ float sum_of_lanes(float x) {
#pragma unroll
    for (int m = 1; m < kLanes; m *= 2) x += __shfl_xor_sync(0xffffffffu, x, m);
    return x;
}

// Four bf16 as floats.
__device__ __forceinline__ float4 widen(uint2 raw) {
    return make_float4(__uint_as_float(raw.x << 16), __uint_as_float(raw.x & 0xffff0000u), __uint_as_float(raw.y << 16), __uint_as_float(raw.y & 0xffff0000u));
}

// The row of the state that element i of a thread's slice is.
__device__ __forceinline__ int row_of(int i, int part) { return i / 4 * 4 * kLanes + 4 * part + i % 4; }

__global__ void __launch_bounds__(kThreads) gdn(View<const Bf16> q, View<const Bf16> k, View<const Bf16> v, View<const float> g, View<const float> beta, const float *state0,
                    View<Bf16> o, float *state, int tokens, int group, float scale) {
    __shared__ float4 keys[kTokens][kVectors], queries[kTokens][kVectors];
    __shared__ float values[kTokens][kColumns], decays[kTokens], betas[kTokens];
    const int h = blockIdx.x, shared_head = h / group, tid = threadIdx.x;
    const int part = tid % kLanes, local = tid / kLanes;
    const int first = blockIdx.y * kColumns, column = first + local;
    const int64_t corner = int64_t(h) * kDim * kDim + column;
    float s[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) s[i] = state0 ? state0[corner + row_of(i, part) * kDim] : 0.f;
    for (int t0 = 0; t0 < tokens; t0 += kTokens) {
        const int count = min(kTokens, tokens - t0);
        __syncthreads();  // the old tile has been read
        {
            // Rows past the last token repeat it; they are never used.
            uint2 raw_keys[kStageVectors], raw_queries[kStageVectors];
            Bf16 raw_values[kStageValues];
#pragma unroll
            for (int j = 0; j < kStageVectors; ++j) {
                const int index = tid + j * kThreads, t = t0 + min(index / kVectors, count - 1), c = index % kVectors;
                raw_keys[j] = *reinterpret_cast<const uint2 *>(k.at(t, shared_head) + 4 * c);
                raw_queries[j] = *reinterpret_cast<const uint2 *>(q.at(t, shared_head) + 4 * c);
            }
#pragma unroll
            for (int j = 0; j < kStageValues; ++j) {
                const int index = tid + j * kThreads, t = t0 + min(index / kColumns, count - 1), c = index % kColumns;
                raw_values[j] = v.at(t, h)[first + c];
            }
            for (int t = tid; t < count; t += kThreads) {
                decays[t] = expf(*g.at(t0 + t, h));
                betas[t] = *beta.at(t0 + t, h);
            }
#pragma unroll
            for (int j = 0; j < kStageVectors; ++j) {
                const int index = tid + j * kThreads;
                keys[index / kVectors][index % kVectors] = widen(raw_keys[j]);
                queries[index / kVectors][index % kVectors] = widen(raw_queries[j]);
            }
#pragma unroll
            for (int j = 0; j < kStageValues; ++j) {
                const int index = tid + j * kThreads;
                values[index / kColumns][index % kColumns] = __bfloat162float(raw_values[j]);
            }
        }
        __syncthreads();
        for (int t = 0; t < count; ++t) {
            const float decay = decays[t];
            float read[4] = {}, out[4] = {};
#pragma unroll
            for (int i = 0; i < kOwn / 4; ++i) {
                const float4 key = keys[t][kLanes * i + part];
                read[0] += s[4 * i] * key.x, read[1] += s[4 * i + 1] * key.y, read[2] += s[4 * i + 2] * key.z, read[3] += s[4 * i + 3] * key.w;
            }
            const float stored = decay * sum_of_lanes(read[0] + read[1] + (read[2] + read[3]));
            const float update = betas[t] * (values[t][local] - stored);
#pragma unroll
            for (int i = 0; i < kOwn / 4; ++i) {
                const float4 key = keys[t][kLanes * i + part], query = queries[t][kLanes * i + part];
                s[4 * i] = decay * s[4 * i] + key.x * update, s[4 * i + 1] = decay * s[4 * i + 1] + key.y * update;
                s[4 * i + 2] = decay * s[4 * i + 2] + key.z * update, s[4 * i + 3] = decay * s[4 * i + 3] + key.w * update;
                out[0] += s[4 * i] * query.x, out[1] += s[4 * i + 1] * query.y, out[2] += s[4 * i + 2] * query.z, out[3] += s[4 * i + 3] * query.w;
            }
            const float sum = sum_of_lanes(out[0] + out[1] + (out[2] + out[3]));  // by all lanes
            if (part == 0) o.at(t0 + t, h)[column] = __float2bfloat16(scale * sum);
        }
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) state[corner + row_of(i, part) * kDim] = s[i];
}

// Why this call is refused, or nullptr.
const char *refusal(const klineage_call *call) {
    if ((call->num_inputs != 5 && call->num_inputs != 6) || call->num_outputs != 2) return "gdn reads q, k, v, g, beta [, state0] and writes o and state";
    const klineage_tensor *in = call->inputs, &v = in[2], &o = call->outputs[0], &state = call->outputs[1];
    for (const klineage_tensor *t : {&in[0], &in[1], &v, &o})
        if (t->dtype != KLINEAGE_BFLOAT16 || t->num_dims != 3 || t->shape[2] != kDim || t->shape[0] != v.shape[0] || t->stride[2] != 1)
            return "gdn: q, k, v and o must be bf16 [T,H,128] with contiguous rows";
    for (const klineage_tensor *t : {&in[0], &in[1]})
        if (t->stride[0] % 4 || t->stride[1] % 4 || reinterpret_cast<uintptr_t>(t->data) % 8) return "gdn: the rows of q and k must be aligned to 8 bytes";
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
    gdn<<<dim3(heads, kDim / kColumns), kThreads, 0, static_cast<cudaStream_t>(call->stream)>>>(
        View<const Bf16>(in[0]), View<const Bf16>(in[1]), View<const Bf16>(in[2]), View<const float>(in[3]), View<const float>(in[4]),
        call->num_inputs == 6 ? static_cast<const float *>(in[5].data) : nullptr, View<Bf16>(out[0]), static_cast<float *>(out[1].data), tokens, group, scale);
    KLINEAGE_REQUIRE(call, cudaGetLastError() == cudaSuccess, "gdn: the launch failed");
    return 0;
}
