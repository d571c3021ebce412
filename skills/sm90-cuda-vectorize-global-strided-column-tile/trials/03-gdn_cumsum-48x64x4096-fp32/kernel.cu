#include <cuda_runtime.h>

#include <cstdint>

#include "klineage.h"

namespace {

constexpr int kChunk = 64, kWarps = 8, kThreads = 32 * kWarps;
constexpr int kHeads = 16;          // heads of a block's tile: 64 bytes of each row
constexpr int kQuads = kHeads / 4;  // float4 of a row of the tile
constexpr int kPitch = kHeads + 1;  // odd: a column spreads over the banks
static_assert(kChunk * kQuads == kThreads, "each thread copies one float4");
static_assert(kHeads % kWarps == 0, "each warp scans the same number of columns");

// A tensor [T,HV] with the token stride of the call, in elements; heads are contiguous.
template <class Element>
struct View {
    Element *data;
    int64_t token;
    __host__ explicit View(const klineage_tensor &t) : data(static_cast<Element *>(t.data)), token(t.stride[0]) {}
    __device__ Element *at(int t, int h) const { return data + (t * token + h); }
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

__global__ void __launch_bounds__(kThreads) cumsum(View<const float> g, View<float> gc, int tokens, int heads) {
    __shared__ float tile[kChunk * kPitch];

    // The float4 that this thread copies, in and out.
    const int row = threadIdx.x / kQuads, column = threadIdx.x % kQuads * 4;
    const int t = blockIdx.x * kChunk + row, h = blockIdx.y * kHeads + column;
    const bool exists = t < tokens && h < heads;  // heads % 4 == 0: a float4 exists as a whole or not at all
    float *const mine = tile + row * kPitch + column;

    float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
    if (exists) x = *reinterpret_cast<const float4 *>(g.at(t, h));
    mine[0] = x.x;
    mine[1] = x.y;
    mine[2] = x.z;
    mine[3] = x.w;
    __syncthreads();

    // Columns that do not exist hold zeros; their sums are not stored.
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int k = 0; k < kHeads / kWarps; ++k) {
        float *const top = tile + lane * kPitch + warp + k * kWarps;
        float first = top[0], second = top[32 * kPitch];
        scan(first, second);
        top[0] = first;
        top[32 * kPitch] = second;
    }
    __syncthreads();

    if (exists) *reinterpret_cast<float4 *>(gc.at(t, h)) = make_float4(mine[0], mine[1], mine[2], mine[3]);
}

// Why this call is refused, or nullptr.
const char *refusal(const klineage_call *call) {
    if (call->num_inputs != 1 || call->num_outputs != 1) return "gdn_cumsum reads g and writes gc";
    if (klineage_scalar_value(call, "chunk", kChunk) != kChunk) return "gdn_cumsum: chunks must have 64 tokens";
    const klineage_tensor &g = call->inputs[0], &gc = call->outputs[0];
    for (const klineage_tensor *t : {&g, &gc})
        if (t->dtype != KLINEAGE_FLOAT32 || t->num_dims != 2 || t->shape[0] != g.shape[0] || t->shape[1] != g.shape[1]) return "gdn_cumsum: g and gc must be fp32 [T,HV]";
    if (g.shape[0] < 1 || g.shape[0] > INT32_MAX / 2 || g.shape[1] < 1 || g.shape[1] > 4096) return "gdn_cumsum: 1 to 2^30 tokens and 1 to 4096 heads";
    if (g.shape[1] % 4 != 0) return "gdn_cumsum: the number of heads must be a multiple of 4";
    for (const klineage_tensor *t : {&g, &gc})
        if (t->stride[1] != 1 || t->stride[0] % 4 != 0 || reinterpret_cast<uintptr_t>(t->data) % 16 != 0) return "gdn_cumsum: heads must be contiguous, rows aligned to 16 bytes";
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
