#include <cuda_runtime.h>

#include <cstdint>

#include "klineage.h"

namespace {

constexpr int kChunk = 64, kWarps = 4;

// A tensor [T,HV] with the strides of the call, in elements.
template <class Element>
struct View {
    Element *data;
    int64_t token, head;
    __host__ explicit View(const klineage_tensor &t) : data(static_cast<Element *>(t.data)), token(t.stride[0]), head(t.stride[1]) {}
    __device__ Element &at(int t, int h) const { return data[t * token + h * head]; }
};

// Inclusive sums over 64 tokens: lane l holds the values of tokens l and l + 32.
__device__ __forceinline__ void scan(float &first, float &second) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const float below = __shfl_up_sync(~0u, first, step), above = __shfl_up_sync(~0u, second, step);
        if (lane >= step) first += below, second += above;
    }
    second += __shfl_sync(~0u, first, 31);
}

__global__ void __launch_bounds__(32 * kWarps) cumsum(View<const float> g, View<float> gc, int tokens, int heads) {
    const int h = blockIdx.y * kWarps + threadIdx.x / 32, t = blockIdx.x * kChunk + threadIdx.x % 32;
    if (h >= heads) return;
    float first = t < tokens ? g.at(t, h) : 0.f, second = t + 32 < tokens ? g.at(t + 32, h) : 0.f;
    scan(first, second);
    if (t < tokens) gc.at(t, h) = first;
    if (t + 32 < tokens) gc.at(t + 32, h) = second;
}

// Why this call is refused, or nullptr.
const char *refusal(const klineage_call *call) {
    if (call->num_inputs != 1 || call->num_outputs != 1) return "gdn_cumsum reads g and writes gc";
    if (klineage_scalar_value(call, "chunk", kChunk) != kChunk) return "gdn_cumsum: chunks must have 64 tokens";
    const klineage_tensor &g = call->inputs[0], &gc = call->outputs[0];
    for (const klineage_tensor *t : {&g, &gc})
        if (t->dtype != KLINEAGE_FLOAT32 || t->num_dims != 2 || t->shape[0] != g.shape[0] || t->shape[1] != g.shape[1]) return "gdn_cumsum: g and gc must be fp32 [T,HV]";
    if (g.shape[0] < 1 || g.shape[0] > INT32_MAX / 2 || g.shape[1] < 1 || g.shape[1] > 4096) return "gdn_cumsum: 1 to 2^30 tokens and 1 to 4096 heads";
    return nullptr;
}

}  // namespace

extern "C" int run(const klineage_call *call) {
    const char *why = refusal(call);
    KLINEAGE_REQUIRE(call, why == nullptr, why);
    const klineage_tensor &g = call->inputs[0], &gc = call->outputs[0];
    const int tokens = int(g.shape[0]), heads = int(g.shape[1]);
    const auto stream = static_cast<cudaStream_t>(call->stream);
    const dim3 grid((tokens + kChunk - 1) / kChunk, (heads + kWarps - 1) / kWarps);
    cumsum<<<grid, 32 * kWarps, 0, stream>>>(View<const float>(g), View<float>(gc), tokens, heads);
    KLINEAGE_REQUIRE(call, cudaGetLastError() == cudaSuccess, "gdn_cumsum: the launch failed");
    return 0;
}
