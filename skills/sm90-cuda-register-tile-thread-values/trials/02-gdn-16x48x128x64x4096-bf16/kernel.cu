#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "klineage.h"

namespace {

constexpr int kDim = 128;
constexpr int kParts = 2;                 // neighbouring lanes that share a column of the state
constexpr int kItems = kDim / kParts;     // rows of that column in a thread's registers
constexpr int kVec = 8;                   // bf16 in 16 bytes
constexpr int kThreads = kDim * kParts;

// A tensor [T,H,...] with the strides of the call, in elements.
template <class Element>
struct View {
    Element *data;
    int64_t token, head;
    __host__ explicit View(const klineage_tensor &t) : data(static_cast<Element *>(t.data)), token(t.stride[0]), head(t.stride[1]) {}
    __device__ Element *at(int t, int h) const { return data + t * token + h * head; }
};

using Bf16 = __nv_bfloat16;

// The row of a thread's item i: vectors of kVec rows alternate between the parts.
__device__ __forceinline__ int item_row(int i, int part) { return (i / kVec * kParts + part) * kVec + i % kVec; }

// The items of a part of a bf16 row, as floats in registers.
__device__ __forceinline__ void load_items(float (&x)[kItems], const Bf16 *row, int part) {
#pragma unroll
    for (int j = 0; j < kItems / kVec; ++j) {
        const uint4 w = *reinterpret_cast<const uint4 *>(row + (j * kParts + part) * kVec);
        const uint32_t word[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
        for (int m = 0; m < 4; ++m) {
            x[j * kVec + 2 * m] = __uint_as_float(word[m] << 16);
            x[j * kVec + 2 * m + 1] = __uint_as_float(word[m] & 0xffff0000u);
        }
    }
}

// The sum over the lanes that share a column.
__device__ __forceinline__ float sum_parts(float x) {
#pragma unroll
    for (int lane = 1; lane < kParts; lane *= 2) x += __shfl_xor_sync(0xffffffffu, x, lane);
    return x;
}

__global__ void __launch_bounds__(kThreads, 1) gdn(View<const Bf16> q, View<const Bf16> k, View<const Bf16> v, View<const float> g, View<const float> beta, const float *state0,
                    View<Bf16> o, float *state, int tokens, int group, float scale) {
    const int h = blockIdx.x, column = threadIdx.x / kParts, part = threadIdx.x % kParts;
    const int key_head = h / group;
    const int64_t origin = int64_t(h) * kDim * kDim + column;
    float item[kItems];
#pragma unroll
    for (int i = 0; i < kItems; ++i) item[i] = state0 ? state0[origin + item_row(i, part) * kDim] : 0.f;
#pragma unroll 1
    for (int t = 0; t < tokens; ++t) {
        float key[kItems], query[kItems];
        load_items(key, k.at(t, key_head), part);
        load_items(query, q.at(t, key_head), part);
        const float value = __bfloat162float(v.at(t, h)[column]);
        const float rate = *beta.at(t, h);
        const float decay = expf(*g.at(t, h));
        float read = 0.f, out = 0.f;
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
            item[i] *= decay;
            read += item[i] * key[i];
        }
        read = sum_parts(read);
        const float update = rate * (value - read);
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
            item[i] += key[i] * update;
            out += item[i] * query[i];
        }
        out = sum_parts(out);
        if (part == 0) o.at(t, h)[column] = __float2bfloat16(scale * out);
    }
#pragma unroll
    for (int i = 0; i < kItems; ++i) state[origin + item_row(i, part) * kDim] = item[i];
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
    for (const klineage_tensor *t : {&in[0], &in[1]})
        if (reinterpret_cast<uintptr_t>(t->data) % 16 || t->stride[0] % kVec || t->stride[1] % kVec) return "gdn: the rows of q and k must be aligned to 16 bytes";
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
    gdn<<<heads, kThreads, 0, static_cast<cudaStream_t>(call->stream)>>>(
        View<const Bf16>(in[0]), View<const Bf16>(in[1]), View<const Bf16>(in[2]), View<const float>(in[3]), View<const float>(in[4]),
        call->num_inputs == 6 ? static_cast<const float *>(in[5].data) : nullptr, View<Bf16>(out[0]), static_cast<float *>(out[1].data), tokens, group, scale);
    KLINEAGE_REQUIRE(call, cudaGetLastError() == cudaSuccess, "gdn: the launch failed");
    return 0;
}
