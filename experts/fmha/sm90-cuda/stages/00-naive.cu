// Stage 00, naive: two neighbouring lanes own one query row (64 of the 128 dimensions each) and walk all keys with the online-softmax recurrence; K and V come from global memory.
//
// Preconditions: head dimension 128 (half an output row lives in a thread's registers).   Risk: the running maximum must start at -infinity, the sum at 0.
// Predicted: 256 loads and 256 FMAs per key and query on the FMA pipe: about 5 TFLOP/s (200 ms).
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "klineage.h"

namespace {

constexpr int kDim = 128;
constexpr int kHalf = kDim / 2;  // dimensions of one thread

// One tensor [B,H,S,128] with the strides of the call, in elements.
struct View {
    half *data;
    int64_t batch, head, token;
    __host__ explicit View(const klineage_tensor &t)
        : data(static_cast<half *>(t.data)), batch(t.stride[0]), head(t.stride[1]), token(t.stride[2]) {}
    __device__ half *row(int b, int h, int s) const { return data + b * batch + h * head + s * token; }
};

__global__ void __launch_bounds__(128) fmha(View q, View k, View v, View o, int tokens, float scale) {
    const int row = blockIdx.x * 64 + threadIdx.x / 2, d0 = threadIdx.x % 2 * kHalf, h = blockIdx.y, b = blockIdx.z;
    const bool there = row < tokens;
    half2 query[kHalf / 2];
    float out[kHalf] = {}, top = -INFINITY, total = 0.f;
#pragma unroll
    for (int d = 0; d < kHalf / 2; ++d) query[d] = there ? reinterpret_cast<const half2 *>(q.row(b, h, row) + d0)[d] : half2{};
    for (int j = 0; j < tokens; ++j) {
        const half *key = k.row(b, h, j) + d0, *value = v.row(b, h, j) + d0;
        float score = 0.f;
#pragma unroll
        for (int d = 0; d < kHalf / 2; ++d) {
            const float2 x = __half22float2(query[d]);
            score += x.x * __half2float(key[2 * d]) + x.y * __half2float(key[2 * d + 1]);
        }
        score = (score + __shfl_xor_sync(~0u, score, 1)) * scale;
        const float raised = fmaxf(top, score), shrink = exp2f(top - raised), weight = exp2f(score - raised);
        top = raised;
        total = total * shrink + weight;
#pragma unroll
        for (int d = 0; d < kHalf; ++d) out[d] = out[d] * shrink + weight * __half2float(value[d]);
    }
    if (!there) return;
#pragma unroll
    for (int d = 0; d < kHalf; ++d) o.row(b, h, row)[d0 + d] = __float2half(out[d] / total);
}

// Why this call is refused, or nullptr.
const char *refusal(const klineage_call *call) {
    if (call->num_inputs != 3 || call->num_outputs != 1) return "fmha reads q, k, v and writes o";
    for (const klineage_tensor *t : {&call->inputs[0], &call->inputs[1], &call->inputs[2], &call->outputs[0]}) {
        if (t->dtype != KLINEAGE_FLOAT16 || t->num_dims != 4 || t->shape[3] != kDim) return "fmha: fp16 [B,H,S,128] only";
        if (t->stride[3] != 1 || t->stride[0] % 8 || t->stride[1] % 8 || t->stride[2] % 8 || reinterpret_cast<uintptr_t>(t->data) % 16)
            return "fmha: rows must be contiguous and 16-byte aligned";
        if (t->stride[0] <= 0 || t->stride[1] <= 0 || t->stride[2] <= 0) return "fmha: strides must be positive";
        for (int i = 0; i < 4; ++i)
            if (t->shape[i] != call->inputs[0].shape[i]) return "fmha: q, k, v and o must have one shape";
    }
    const int64_t tokens = call->inputs[0].shape[2];
    if (tokens < 8 || tokens > 65536 || tokens % 8) return "fmha: 8 to 65536 tokens, a multiple of 8";
    if (klineage_scalar_value(call, "causal", 0) != 0) return "fmha: non-causal only";
    return nullptr;
}

}  // namespace

extern "C" int run(const klineage_call *call) {
    const char *why = refusal(call);
    KLINEAGE_REQUIRE(call, why == nullptr, why);
    const klineage_tensor &q = call->inputs[0];
    const int batch = int(q.shape[0]), heads = int(q.shape[1]), tokens = int(q.shape[2]);
    const float scale = float(klineage_scalar_value(call, "scale", 0.08838834764831845)) * 1.4426950408889634f;  // base-2 exponentials
    const auto stream = static_cast<cudaStream_t>(call->stream);
    fmha<<<dim3((tokens + 63) / 64, heads, batch), 128, 0, stream>>>(View(q), View(call->inputs[1]), View(call->inputs[2]), View(call->outputs[0]), tokens, scale);
    KLINEAGE_REQUIRE(call, cudaGetLastError() == cudaSuccess, "fmha: the launch failed");
    return 0;
}
