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

__global__ void over_rows(const bf16 *x, const bf16 *w, const bf16 *b, bf16 *y, int rows, int columns, float eps) {
    const int row = blockIdx.x * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    x += size_t(row) * columns, y += size_t(row) * columns;
    float sum = 0.f, squares = 0.f;
    for (int j = lane; j < columns; j += 32) sum += __bfloat162float(x[j]);
    const float mean = over_warp(sum) / columns;
    for (int j = lane; j < columns; j += 32) squares += (__bfloat162float(x[j]) - mean) * (__bfloat162float(x[j]) - mean);
    const float scale = rsqrtf(over_warp(squares) / columns + eps);
    for (int j = lane; j < columns; j += 32)
        y[j] = __float2bfloat16((__bfloat162float(x[j]) - mean) * scale * __bfloat162float(w[j]) + __bfloat162float(b[j]));
}

}  // namespace

extern "C" int run(const klineage_call *call) {
    KLINEAGE_REQUIRE(call, call->num_inputs == 3 && call->num_outputs == 1, "layer_norm: it reads x, w and b and writes y");
    const klineage_tensor &x = call->inputs[0];
    KLINEAGE_REQUIRE(call, x.dtype == KLINEAGE_BFLOAT16 && x.stride[0] == x.shape[1], "layer_norm: contiguous bf16 rows");
    const int rows = int(x.shape[0]), columns = int(x.shape[1]);
    over_rows<<<(rows + kWarps - 1) / kWarps, 32 * kWarps, 0, static_cast<cudaStream_t>(call->stream)>>>(
        static_cast<const bf16 *>(call->inputs[0].data), static_cast<const bf16 *>(call->inputs[1].data),
        static_cast<const bf16 *>(call->inputs[2].data), static_cast<bf16 *>(call->outputs[0].data), rows, columns, float(klineage_scalar_value(call, "eps", 1e-5)));
    KLINEAGE_REQUIRE(call, cudaGetLastError() == cudaSuccess, "layer_norm: the launch failed");
    return 0;
}
