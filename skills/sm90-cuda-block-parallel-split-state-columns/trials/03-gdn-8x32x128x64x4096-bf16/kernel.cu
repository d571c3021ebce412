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

constexpr int kVector = 4;                    // floats of a float4
constexpr int kLanes = 8;                     // neighbouring lanes that share a state column
constexpr int kColumns = 32;                  // state columns of a CTA
constexpr int kThreads = kLanes * kColumns;   // threads of a CTA
constexpr int kOwn = kDim / kLanes;           // rows of its column that a thread holds
constexpr int kQuads = kOwn / kVector;        // the same in float4
constexpr int kStage = 32;                    // tokens that are in shared memory

constexpr int kKeyRows = kThreads / kDim;         // tokens whose keys are loaded by the CTA at once
constexpr int kKeyLoads = kStage / kKeyRows;
constexpr int kValueRows = kThreads / kColumns;   // tokens whose values are loaded by the CTA at once
constexpr int kValueLoads = kStage / kValueRows;

static_assert(kDim % (kLanes * kVector) == 0 && kDim % kColumns == 0, "the row map and the columns have no tail");
static_assert(kLanes <= 32 && (kLanes & (kLanes - 1)) == 0 && kThreads % 32 == 0, "the lanes of a column are a group within a full warp");
static_assert(kThreads % kDim == 0 && kStage % kKeyRows == 0 && kStage % kValueRows == 0 && kStage <= kThreads, "staging has no tail");

// The sum over the lanes of a column, in each of them. Every lane of the warp must come here.
__device__ __forceinline__ float sum_of_lanes(float x) {
#pragma unroll
    for (int m = 1; m < kLanes; m *= 2) x += __shfl_xor_sync(0xffffffffu, x, m);
    return x;
}

// The row of the state that a thread holds as its element i: vectors of four rows are dealt out to the lanes in turn.
__device__ __forceinline__ int row_of(int i, int part) { return i / kVector * (kVector * kLanes) + kVector * part + i % kVector; }

__device__ __forceinline__ void advance(float &s, float key, float query, float decay, float update, float &out) {
    s = fmaf(key, update, decay * s);
    out = fmaf(s, query, out);
}

__global__ void __launch_bounds__(kThreads, 1) gdn(View<const Bf16> q, View<const Bf16> k, View<const Bf16> v, View<const float> g, View<const float> beta, const float *state0,
                    View<Bf16> o, float *state, int tokens, int group, float scale) {
    const int h = blockIdx.x, tid = threadIdx.x;
    const int part = tid % kLanes, local = tid / kLanes;
    const int first_column = blockIdx.y * kColumns, column = first_column + local;
    __shared__ __align__(16) float keys[kStage][kDim];
    __shared__ __align__(16) float queries[kStage][kDim];
    __shared__ float values[kStage][kColumns];
    __shared__ float decays[kStage];
    __shared__ float betas[kStage];

    const int64_t first = int64_t(h) * kDim * kDim + column;
    float s[kOwn];
    if (state0) {
#pragma unroll
        for (int i = 0; i < kOwn; ++i) s[i] = state0[first + row_of(i, part) * kDim];
    } else {
#pragma unroll
        for (int i = 0; i < kOwn; ++i) s[i] = 0.f;
    }

    // What this thread stages goes by tid, whatever column it computes.
    const int key_row = tid / kDim, key_element = tid % kDim;
    const int value_row = tid / kColumns, value_element = tid % kColumns;
    const Bf16 *key_in = k.at(key_row, h / group) + key_element, *query_in = q.at(key_row, h / group) + key_element;
    const Bf16 *v_in = v.at(value_row, h) + first_column + value_element;
    Bf16 *o_out = o.at(0, h) + column;

#pragma unroll 1
    for (int start = 0; start < tokens; start += kStage) {
        const int count = min(kStage, tokens - start);
        if (count == kStage) {
            Bf16 some_keys[kKeyLoads], some_queries[kKeyLoads], some_values[kValueLoads];
            float gate = 0.f, rate = 0.f;
            if (tid < kStage) {
                gate = *g.at(start + tid, h);
                rate = *beta.at(start + tid, h);
            }
#pragma unroll
            for (int j = 0; j < kKeyLoads; ++j) {
                some_keys[j] = *key_in;
                some_queries[j] = *query_in;
                key_in += k.token * kKeyRows;
                query_in += q.token * kKeyRows;
            }
#pragma unroll
            for (int j = 0; j < kValueLoads; ++j) {
                some_values[j] = *v_in;
                v_in += v.token * kValueRows;
            }
            __syncthreads();  // the old tile has been read
#pragma unroll
            for (int j = 0; j < kKeyLoads; ++j) {
                keys[key_row + j * kKeyRows][key_element] = __bfloat162float(some_keys[j]);
                queries[key_row + j * kKeyRows][key_element] = __bfloat162float(some_queries[j]);
            }
#pragma unroll
            for (int j = 0; j < kValueLoads; ++j) values[value_row + j * kValueRows][value_element] = __bfloat162float(some_values[j]);
            if (tid < kStage) {
                decays[tid] = expf(gate);
                betas[tid] = rate;
            }
        } else {
            __syncthreads();  // the old tile has been read
#pragma unroll 1
            for (int j = key_row; j < count; j += kKeyRows) {
                keys[j][key_element] = __bfloat162float(*key_in);
                queries[j][key_element] = __bfloat162float(*query_in);
                key_in += k.token * kKeyRows;
                query_in += q.token * kKeyRows;
            }
#pragma unroll 1
            for (int j = value_row; j < count; j += kValueRows) {
                values[j][value_element] = __bfloat162float(*v_in);
                v_in += v.token * kValueRows;
            }
            if (tid < count) {
                decays[tid] = expf(*g.at(start + tid, h));
                betas[tid] = *beta.at(start + tid, h);
            }
        }
        __syncthreads();

        for (int j = 0; j < count; ++j) {
            const float4 *const key = reinterpret_cast<const float4 *>(keys[j]) + part;
            const float4 *const query = reinterpret_cast<const float4 *>(queries[j]) + part;
            const float decay = decays[j], rate = betas[j], value = values[j][local];

            float4 kept[kQuads];
            float dot0 = 0.f, dot1 = 0.f, dot2 = 0.f, dot3 = 0.f;
#pragma unroll
            for (int i = 0; i < kQuads; ++i) {
                const float4 x = key[kLanes * i];
                kept[i] = x;
                dot0 = fmaf(s[4 * i], x.x, dot0);
                dot1 = fmaf(s[4 * i + 1], x.y, dot1);
                dot2 = fmaf(s[4 * i + 2], x.z, dot2);
                dot3 = fmaf(s[4 * i + 3], x.w, dot3);
            }
            const float read = decay * sum_of_lanes((dot0 + dot1) + (dot2 + dot3));
            const float update = rate * (value - read);

            float out0 = 0.f, out1 = 0.f, out2 = 0.f, out3 = 0.f;
#pragma unroll
            for (int i = 0; i < kQuads; ++i) {
                const float4 x = kept[i], y = query[kLanes * i];
                advance(s[4 * i], x.x, y.x, decay, update, out0);
                advance(s[4 * i + 1], x.y, y.y, decay, update, out1);
                advance(s[4 * i + 2], x.z, y.z, decay, update, out2);
                advance(s[4 * i + 3], x.w, y.w, decay, update, out3);
            }
            const float sum = sum_of_lanes((out0 + out1) + (out2 + out3));  // in all lanes, outside of the if
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
