#include <cuda_runtime.h>

#include <cstdint>

#include "klineage.h"

namespace {

constexpr int kChunk = 64, kWarp = 32, kHeads = 4, kThreads = kHeads * kWarp;
constexpr unsigned kAllLanes = 0xffffffffu;
static_assert(kChunk == 2 * kWarp, "a lane holds two tokens of its chunk");

// A tensor [T,HV] with the strides of the call, in elements.
template <class Element>
struct View {
    Element *data;
    int64_t token, head;
    __host__ explicit View(const klineage_tensor &t) : data(static_cast<Element *>(t.data)), token(t.stride[0]), head(t.stride[1]) {}
    __device__ Element &at(int t, int h) const { return data[t * token + h * head]; }
};

// A warp scans one chunk of one head: lane l has tokens l and l + 32.
__global__ void __launch_bounds__(kThreads) cumsum(View<const float> g, View<float> gc, int tokens, int heads) {
    const int lane = threadIdx.x % kWarp, h = blockIdx.y * kHeads + threadIdx.x / kWarp;
    if (h >= heads) return;  // whole warps only: all lanes must reach the shuffles
    const int t0 = blockIdx.x * kChunk + lane, t1 = t0 + kWarp;
    float low = t0 < tokens ? g.at(t0, h) : 0.f;
    float high = t1 < tokens ? g.at(t1, h) : 0.f;
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) {
        const float low_before = __shfl_up_sync(kAllLanes, low, step);
        const float high_before = __shfl_up_sync(kAllLanes, high, step);
        if (lane >= step) {
            low += low_before;
            high += high_before;
        }
    }
    high += __shfl_sync(kAllLanes, low, kWarp - 1);
    if (t0 < tokens) gc.at(t0, h) = low;
    if (t1 < tokens) gc.at(t1, h) = high;
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
    const dim3 grid((tokens + kChunk - 1) / kChunk, (heads + kHeads - 1) / kHeads);
    cumsum<<<grid, kThreads, 0, stream>>>(View<const float>(g), View<float>(gc), tokens, heads);
    KLINEAGE_REQUIRE(call, cudaGetLastError() == cudaSuccess, "gdn_cumsum: the launch failed");
    return 0;
}
