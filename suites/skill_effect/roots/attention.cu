// Naive: a warp owns one query row, four of its 128 dimensions a lane, and walks over the keys with the online softmax.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "klineage.h"

namespace {

constexpr int kDim = 128, kWarps = 4, kPerLane = kDim / 32;

// One tensor [B,H,S,128] with the strides of the call, in elements.
struct View {
    half *data;
    int64_t batch, head, token;
    __host__ explicit View(const klineage_tensor &t)
        : data(static_cast<half *>(t.data)), batch(t.stride[0]), head(t.stride[1]), token(t.stride[2]) {}
    __device__ half *row(int b, int h, int s) const { return data + b * batch + h * head + s * token; }
};

__global__ void attention(View q, View k, View v, View o, int tokens, int group, int window, float scale) {
    const int row = blockIdx.x * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32, h = blockIdx.y, b = blockIdx.z;
    if (row >= tokens) return;
    const int first = window > 0 && row >= window ? row - window + 1 : 0;
    float query[kPerLane], out[kPerLane] = {}, top = -INFINITY, total = 0.f;
    for (int d = 0; d < kPerLane; ++d) query[d] = __half2float(q.row(b, h, row)[lane * kPerLane + d]);
    for (int j = first; j <= row; ++j) {
        const half *key = k.row(b, h / group, j) + lane * kPerLane, *value = v.row(b, h / group, j) + lane * kPerLane;
        float score = 0.f;
        for (int d = 0; d < kPerLane; ++d) score += query[d] * __half2float(key[d]);
        for (int step = 16; step > 0; step /= 2) score += __shfl_xor_sync(~0u, score, step);
        score *= scale;
        const float raised = fmaxf(top, score), shrink = expf(top - raised), weight = expf(score - raised);
        top = raised;
        total = total * shrink + weight;
        for (int d = 0; d < kPerLane; ++d) out[d] = out[d] * shrink + weight * __half2float(value[d]);
    }
    for (int d = 0; d < kPerLane; ++d) o.row(b, h, row)[lane * kPerLane + d] = __float2half(out[d] / total);
}

}  // namespace

extern "C" int run(const klineage_call *call) {
    KLINEAGE_REQUIRE(call, call->num_inputs == 3 && call->num_outputs == 1, "fmha reads q, k and v and writes o");
    const klineage_tensor &q = call->inputs[0], &k = call->inputs[1], &v = call->inputs[2], &o = call->outputs[0];
    for (const klineage_tensor *t : {&q, &k, &v, &o})
        KLINEAGE_REQUIRE(call, t->dtype == KLINEAGE_FLOAT16 && t->shape[3] == kDim && t->stride[3] == 1,
                         "fmha: fp16 [B,H,S,128] with contiguous rows");
    KLINEAGE_REQUIRE(call, klineage_scalar_value(call, "causal", 0) == 1, "fmha: causal only");
    const int heads = int(q.shape[1]), tokens = int(q.shape[2]), window = int(klineage_scalar_value(call, "window", 0));
    const float scale = float(klineage_scalar_value(call, "scale", 0.08838834764831845));
    const dim3 grid((tokens + kWarps - 1) / kWarps, heads, int(q.shape[0]));
    attention<<<grid, 32 * kWarps, 0, static_cast<cudaStream_t>(call->stream)>>>(
        View(q), View(k), View(v), View(o), tokens, heads / int(k.shape[1]), window, scale);
    KLINEAGE_REQUIRE(call, cudaGetLastError() == cudaSuccess, "fmha: the launch failed");
    return 0;
}
