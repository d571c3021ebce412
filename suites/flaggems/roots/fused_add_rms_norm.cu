// Naive: a warp owns one row and walks over it once for each sum, and once more to write it.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "klineage.h"

namespace {

using bf16 = __nv_bfloat16;

constexpr int kWarps = 4;

__device__ float over_warp(float value) {
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
    return value;
}

__global__ void over_rows(bf16 *x, bf16 *residual, const bf16 *w, int rows, int columns, float eps) {
    const int row = blockIdx.x * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    x += size_t(row) * columns, residual += size_t(row) * columns;
    float squares = 0.f;
    for (int j = lane; j < columns; j += 32) {
        const float added = __bfloat162float(x[j]) + __bfloat162float(residual[j]);
        squares += added * added;
    }
    const float scale = rsqrtf(over_warp(squares) / columns + eps);
    for (int j = lane; j < columns; j += 32) {
        const float added = __bfloat162float(x[j]) + __bfloat162float(residual[j]);
        residual[j] = __float2bfloat16(added);
        x[j] = __float2bfloat16(added * scale * __bfloat162float(w[j]));
    }
}

}  // namespace

extern "C" int run(const klineage_call *call) {
    KLINEAGE_REQUIRE(call, call->num_inputs == 3 && call->num_outputs == 0, "fused_add_rms_norm: it changes x and residual and reads w");
    const klineage_tensor &x = call->inputs[0];
    KLINEAGE_REQUIRE(call, x.dtype == KLINEAGE_BFLOAT16 && x.stride[0] == x.shape[1], "fused_add_rms_norm: contiguous bf16 rows");
    const int rows = int(x.shape[0]), columns = int(x.shape[1]);
    over_rows<<<(rows + kWarps - 1) / kWarps, 32 * kWarps, 0, static_cast<cudaStream_t>(call->stream)>>>(
        static_cast<bf16 *>(call->inputs[0].data), static_cast<bf16 *>(call->inputs[1].data),
        static_cast<const bf16 *>(call->inputs[2].data), rows, columns, float(klineage_scalar_value(call, "eps", 1e-5)));
    KLINEAGE_REQUIRE(call, cudaGetLastError() == cudaSuccess, "fused_add_rms_norm: the launch failed");
    return 0;
}
