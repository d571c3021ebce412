#include <cuda_runtime.h>

#include <cstdint>

#include "klineage.h"

namespace {

constexpr int kChunk = 64;

// A tensor [T,HV] with contiguous rows; the distance between rows in elements.
template <class Element>
struct Rows {
    Element *data;
    int64_t token;
    __host__ explicit Rows(const klineage_tensor &t) : data(static_cast<Element *>(t.data)), token(t.stride[0]) {}
    __device__ Element *at(int t, int h) const { return data + t * token + h; }
};

__global__ void cumsum(Rows<const float> g, Rows<float> gc, int tokens, int heads) {
    for (int h = 0; h < heads; ++h) {
        for (int t0 = 0; t0 < tokens; t0 += kChunk) {
            const int rows = min(kChunk, tokens - t0);
            float sum = 0.f;
            for (int t = 0; t < rows; ++t) {
                sum += *g.at(t0 + t, h);
                *gc.at(t0 + t, h) = sum;
            }
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
        if (t->stride[1] != 1 || t->stride[0] % 4 || t->shape[1] % 4 || reinterpret_cast<uintptr_t>(t->data) % 16)
            return "gdn_cumsum: rows must be contiguous, of a multiple of 4 heads, and 16-byte aligned";
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
    cumsum<<<1, 1, 0, stream>>>(Rows<const float>(g), Rows<float>(gc), tokens, heads);
    KLINEAGE_REQUIRE(call, cudaGetLastError() == cudaSuccess, "gdn_cumsum: the launch failed");
    return 0;
}
