#include <cuda_runtime.h>

#include <cstdint>

#include "klineage.h"

namespace {

constexpr int kChunk = 64, kWarp = 32, kHeads = 8, kThreads = 128;
constexpr int kVector = 4, kQuads = kHeads / kVector;  // float4 per row of the tile
constexpr int kWarps = kThreads / kWarp, kColumns = kHeads / kWarps;  // columns per warp
constexpr int kPitch = kHeads + 1;  // odd: a column is spread over the banks
constexpr unsigned kAllLanes = 0xffffffffu;
static_assert(kChunk == 2 * kWarp, "a lane holds two tokens of its chunk");
static_assert(kThreads == kChunk * kQuads, "a thread copies one float4 of the tile");
static_assert(kHeads % kVector == 0 && kHeads % kWarps == 0 && kPitch % 2 == 1, "the tile is divided evenly");

// A tensor [T,HV] with contiguous heads; the stride of the tokens in elements.
template <class Element>
struct View {
    Element *data;
    int64_t token;
    __host__ explicit View(const klineage_tensor &t) : data(static_cast<Element *>(t.data)), token(t.stride[0]) {}
    __device__ Element *at(int t, int h) const { return data + t * token + h; }
};

// A block owns one chunk of kHeads heads. Rows are copied as float4; a warp scans columns: lane l has tokens l and l + 32.
__global__ void __launch_bounds__(kThreads) cumsum(View<const float> g, View<float> gc, int tokens, int heads) {
    __shared__ float tile[kChunk * kPitch];

    const int row = threadIdx.x / kQuads, column = threadIdx.x % kQuads * kVector;
    const int t = blockIdx.x * kChunk + row, h = blockIdx.y * kHeads + column;
    const bool inside = t < tokens && h < heads;  // heads is a multiple of kVector
    float *own = tile + row * kPitch + column;    // odd pitch: scalar accesses

    float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
    if (inside) x = *reinterpret_cast<const float4 *>(g.at(t, h));
    own[0] = x.x;
    own[1] = x.y;
    own[2] = x.z;
    own[3] = x.w;
    __syncthreads();

    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    float low[kColumns], high[kColumns];
#pragma unroll
    for (int k = 0; k < kColumns; ++k) {
        low[k] = tile[lane * kPitch + warp + k * kWarps];
        high[k] = tile[(lane + kWarp) * kPitch + warp + k * kWarps];
    }
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) {
#pragma unroll
        for (int k = 0; k < kColumns; ++k) {
            const float low_before = __shfl_up_sync(kAllLanes, low[k], step);
            const float high_before = __shfl_up_sync(kAllLanes, high[k], step);
            if (lane >= step) {
                low[k] += low_before;
                high[k] += high_before;
            }
        }
    }
#pragma unroll
    for (int k = 0; k < kColumns; ++k) {
        high[k] += __shfl_sync(kAllLanes, low[k], kWarp - 1);
        tile[lane * kPitch + warp + k * kWarps] = low[k];
        tile[(lane + kWarp) * kPitch + warp + k * kWarps] = high[k];
    }
    __syncthreads();

    if (inside) *reinterpret_cast<float4 *>(gc.at(t, h)) = make_float4(own[0], own[1], own[2], own[3]);
}

// Why this call is refused, or nullptr.
const char *refusal(const klineage_call *call) {
    if (call->num_inputs != 1 || call->num_outputs != 1) return "gdn_cumsum reads g and writes gc";
    if (klineage_scalar_value(call, "chunk", kChunk) != kChunk) return "gdn_cumsum: chunks must have 64 tokens";
    const klineage_tensor &g = call->inputs[0], &gc = call->outputs[0];
    for (const klineage_tensor *t : {&g, &gc})
        if (t->dtype != KLINEAGE_FLOAT32 || t->num_dims != 2 || t->shape[0] != g.shape[0] || t->shape[1] != g.shape[1]) return "gdn_cumsum: g and gc must be fp32 [T,HV]";
    if (g.shape[0] < 1 || g.shape[0] > INT32_MAX / 2 || g.shape[1] < 1 || g.shape[1] > 4096) return "gdn_cumsum: 1 to 2^30 tokens and 1 to 4096 heads";
    if (g.shape[1] % kVector != 0) return "gdn_cumsum: the number of heads must be a multiple of 4";
    for (const klineage_tensor *t : {&g, &gc})
        if (t->stride[1] != 1 || t->stride[0] % kVector != 0 || reinterpret_cast<uintptr_t>(t->data) % sizeof(float4) != 0) return "gdn_cumsum: heads must be contiguous, rows and base aligned to 16 bytes";
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
