// Stage 01 adds: shared-memory staging. 64 query rows share each tile of 32 keys and values; 16-byte rows are loaded together.
//
// Preconditions: reuse across the block (each key serves 64 queries).
// Risks here: keys past the end must not enter the softmax; barriers must be reached by the threads whose query row does not exist.
// Predicted: global loads per key fall 64x; shared broadcasts of 16 bytes replace 2-byte loads: 2x.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "klineage.h"

namespace {

constexpr int kDim = 128;
constexpr int kKeys = 32, kHalf = kDim / 2;  // keys of a tile, dimensions of one thread

// One tensor [B,H,S,128] with the strides of the call, in elements.
struct View {
    half *data;
    int64_t batch, head, token;
    __host__ explicit View(const klineage_tensor &t)
        : data(static_cast<half *>(t.data)), batch(t.stride[0]), head(t.stride[1]), token(t.stride[2]) {}
    __device__ half *row(int b, int h, int s) const { return data + b * batch + h * head + s * token; }
};

__global__ void __launch_bounds__(128) fmha(View q, View k, View v, View o, int tokens, float scale) {
    __shared__ __align__(16) half tile_k[kKeys][kDim], tile_v[kKeys][kDim];
    const int tid = threadIdx.x, row = blockIdx.x * 64 + tid / 2, d0 = tid % 2 * kHalf, h = blockIdx.y, b = blockIdx.z;
    half2 query[kHalf / 2];
    float out[kHalf] = {}, top = -INFINITY, total = 0.f;
#pragma unroll
    for (int d = 0; d < kHalf / 2; ++d) query[d] = row < tokens ? reinterpret_cast<const half2 *>(q.row(b, h, row) + d0)[d] : half2{};
    for (int j0 = 0; j0 < tokens; j0 += kKeys) {
        const int keys = min(kKeys, tokens - j0);
        __syncthreads();
        for (int i = tid; i < keys * kDim / 8; i += 128) {
            *reinterpret_cast<uint4 *>(&tile_k[i / 16][i % 16 * 8]) = *reinterpret_cast<const uint4 *>(k.row(b, h, j0 + i / 16) + i % 16 * 8);
            *reinterpret_cast<uint4 *>(&tile_v[i / 16][i % 16 * 8]) = *reinterpret_cast<const uint4 *>(v.row(b, h, j0 + i / 16) + i % 16 * 8);
        }
        __syncthreads();
        for (int j = 0; j < keys; ++j) {
            const half2 *key = reinterpret_cast<const half2 *>(tile_k[j] + d0), *value = reinterpret_cast<const half2 *>(tile_v[j] + d0);
            float score = 0.f;
#pragma unroll
            for (int d = 0; d < kHalf / 2; ++d) {
                const float2 x = __half22float2(query[d]), y = __half22float2(key[d]);
                score += x.x * y.x + x.y * y.y;
            }
            score = (score + __shfl_xor_sync(~0u, score, 1)) * scale;
            const float raised = fmaxf(top, score), shrink = exp2f(top - raised), weight = exp2f(score - raised);
            top = raised;
            total = total * shrink + weight;
#pragma unroll
            for (int d = 0; d < kHalf / 2; ++d) {
                const float2 y = __half22float2(value[d]);
                out[2 * d] = out[2 * d] * shrink + weight * y.x;
                out[2 * d + 1] = out[2 * d + 1] * shrink + weight * y.y;
            }
        }
    }
    if (row >= tokens) return;
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
