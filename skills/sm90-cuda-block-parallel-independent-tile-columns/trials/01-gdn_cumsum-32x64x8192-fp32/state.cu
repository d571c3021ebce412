#include <cuda_runtime.h>

#include <cstdint>

#include "klineage.h"

namespace {

constexpr int kChunk = 64, kHeads = 64, kPitch = kHeads + 1, kThreads = 256;
constexpr int kCopies = kChunk * (kHeads / 4) / kThreads;  // quads of four heads per thread, at most
static_assert(kCopies * kThreads == kChunk * (kHeads / 4), "the threads must share a full tile evenly");

// A tensor [T,HV] with contiguous rows; the distance between rows in elements.
template <class Element>
struct Rows {
    Element *data;
    int64_t token;
    __host__ explicit Rows(const klineage_tensor &t) : data(static_cast<Element *>(t.data)), token(t.stride[0]) {}
    __device__ Element *at(int t, int h) const { return data + t * token + h; }
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

__global__ void __launch_bounds__(kThreads) cumsum(Rows<const float> g, Rows<float> gc, int tokens, int heads) {
    __shared__ float tile[kChunk * kPitch];
    const int t0 = blockIdx.x * kChunk, h0 = blockIdx.y * kHeads, count = min(kHeads, heads - h0), rows = min(kChunk, tokens - t0);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // i * reciprocal >> 16 is i / quads for 0 <= i < 1024 and 1 <= quads <= 16: reciprocal * quads is 65536 to 65552.
    const int quads = count / 4, reciprocal = int(__fdividef(65536.f, float(quads))) + 1;
    float4 quad[kCopies];
#pragma unroll
    for (int k = 0; k < kCopies; ++k) {
        const int i = int(threadIdx.x) + k * kThreads, row = i * reciprocal >> 16, column = 4 * (i - row * quads);
        quad[k] = make_float4(0.f, 0.f, 0.f, 0.f);
        if (row < rows) quad[k] = __ldg(reinterpret_cast<const float4 *>(g.at(t0 + row, h0 + column)));
    }
#pragma unroll
    for (int k = 0; k < kCopies; ++k) {
        const int i = int(threadIdx.x) + k * kThreads, row = i * reciprocal >> 16, column = 4 * (i - row * quads);
        if (row < kChunk) {
            float *to = tile + row * kPitch + column;
            to[0] = quad[k].x, to[1] = quad[k].y, to[2] = quad[k].z, to[3] = quad[k].w;
        }
    }
    __syncthreads();
    for (int h = warp; h < count; h += kThreads / 32) {
        float &low = tile[lane * kPitch + h], &high = tile[(lane + 32) * kPitch + h];
        float first = low, second = high;
        scan(first, second);
        low = first, high = second;
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kCopies; ++k) {
        const int i = int(threadIdx.x) + k * kThreads, row = i * reciprocal >> 16, column = 4 * (i - row * quads);
        if (row < rows) {
            const float *from = tile + row * kPitch + column;
            *reinterpret_cast<float4 *>(gc.at(t0 + row, h0 + column)) = make_float4(from[0], from[1], from[2], from[3]);
        }
    }
}

// Why this call is refused, or nullptr.
const char *refusal(const klineage_call *call) {
    if (call->num_inputs != 1 || call->num_outputs != 1) return "gdn_cumsum reads g and writes gc";
    if (klineage_scalar_value(call, "chunk", kChunk) != kChunk) return "gdn_cumsum: chunks must have 64 tokens";
    const klineage_tensor &g = call->inputs[0], &gc = call->outputs[0];
    for (const klineage_tensor *t : {&g, &gc})
        if (t->dtype != KLINEAGE_FLOAT32 || t->num_dims != 2 || t->shape[0] != g.shape[0] || t->shape[1] != g.shape[1]) return "gdn_cumsum: g and gc must be fp32 [T,HV]";
    for (const klineage_tensor *t : {&g, &gc})
        if (t->stride[1] != 1) return "gdn_cumsum: rows must be contiguous";
    if (g.shape[0] < 1 || g.shape[0] > INT32_MAX / 2 || g.shape[1] < 1 || g.shape[1] > 4096) return "gdn_cumsum: 1 to 2^30 tokens and 1 to 4096 heads";
    for (const klineage_tensor *t : {&g, &gc})
        if (t->shape[1] % 4 != 0 || t->stride[0] % 4 != 0 || reinterpret_cast<uintptr_t>(t->data) % 16 != 0) return "gdn_cumsum: heads and row strides must be multiples of 4, and addresses 16-byte aligned";
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
    cumsum<<<grid, kThreads, 0, stream>>>(Rows<const float>(g), Rows<float>(gc), tokens, heads);
    KLINEAGE_REQUIRE(call, cudaGetLastError() == cudaSuccess, "gdn_cumsum: the launch failed");
    return 0;
}
