#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "klineage.h"

namespace {


constexpr int kThreads = 256;

__global__ void gemm(const __nv_bfloat16 *a, const __nv_bfloat16 *b, __nv_bfloat16 *c, int n, int k) {
    const int tid = threadIdx.x;
    const int columns = n / kThreads;
    const int row = blockIdx.x / columns, col = blockIdx.x % columns * kThreads + tid;
    float sum = 0.0f;
    for (int depth = 0; depth < k; ++depth) {
        const float x = __bfloat162float(a[size_t(row) * k + depth]);
        const float y = __bfloat162float(b[size_t(depth) * n + col]);
        sum = fmaf(x, y, sum);
    }
    c[size_t(row) * n + col] = __float2bfloat16_rn(sum);
}

// Why this call is refused, or nullptr.
const char *refusal(const klineage_call *call) {
    if (call->num_inputs != 2 || call->num_outputs != 1) return "gemm reads a and b and writes c";
    const klineage_tensor &a = call->inputs[0], &b = call->inputs[1], &c = call->outputs[0];
    for (const klineage_tensor *t : {&a, &b, &c})
        if (t->dtype != KLINEAGE_BFLOAT16 || t->num_dims != 2 || t->stride[1] != 1 || t->stride[0] != t->shape[1])
            return "gemm: contiguous row-major bf16 matrices only";
    for (const klineage_tensor *t : {&a, &b, &c})
        if (reinterpret_cast<uintptr_t>(t->data) % 16) return "gemm: matrices must be 16-byte aligned";
    if (b.shape[0] != a.shape[1] || c.shape[0] != a.shape[0] || c.shape[1] != b.shape[1]) return "gemm: shapes do not match";
    if (a.shape[0] % 256 || b.shape[1] % 256 || a.shape[1] % 64) return "gemm: M and N must be multiples of 256, K of 64";
    return nullptr;
}

}  // namespace

extern "C" int run(const klineage_call *call) {
    const char *why = refusal(call);
    KLINEAGE_REQUIRE(call, why == nullptr, why);
    const int m = int(call->inputs[0].shape[0]), n = int(call->inputs[1].shape[1]), k = int(call->inputs[0].shape[1]);
    const auto stream = static_cast<cudaStream_t>(call->stream);
    const auto a = static_cast<const __nv_bfloat16 *>(call->inputs[0].data), b = static_cast<const __nv_bfloat16 *>(call->inputs[1].data);
    const auto c = static_cast<__nv_bfloat16 *>(call->outputs[0].data);
    gemm<<<m * (n / kThreads), kThreads, 0, stream>>>(a, b, c, n, k);
    KLINEAGE_REQUIRE(call, cudaGetLastError() == cudaSuccess, "gemm: the launch failed");
    return 0;
}
