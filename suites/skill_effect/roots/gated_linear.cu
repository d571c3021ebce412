// Naive: one thread computes one element of y, from its gate and its value.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "klineage.h"

namespace {

using bf16 = __nv_bfloat16;

__global__ void gated(const bf16 *x, const bf16 *w, const bf16 *bias, bf16 *y, int rows, int depth, int columns) {
    const int column = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y * blockDim.y + threadIdx.y;
    if (row >= rows || column >= columns) return;
    const bf16 *from = x + size_t(row) * depth;
    const bf16 *gates = w + size_t(column) * depth, *values = w + size_t(columns + column) * depth;
    float gate = __bfloat162float(bias[column]), value = __bfloat162float(bias[columns + column]);
    for (int k = 0; k < depth; ++k) {
        gate += __bfloat162float(from[k]) * __bfloat162float(gates[k]);
        value += __bfloat162float(from[k]) * __bfloat162float(values[k]);
    }
    y[size_t(row) * columns + column] = __float2bfloat16(gate / (1.f + expf(-gate)) * value);
}

}  // namespace

extern "C" int run(const klineage_call *call) {
    KLINEAGE_REQUIRE(call, call->num_inputs == 3 && call->num_outputs == 1, "gated_linear reads x, w and bias and writes y");
    const klineage_tensor &x = call->inputs[0], &w = call->inputs[1], &bias = call->inputs[2], &y = call->outputs[0];
    for (const klineage_tensor *t : {&x, &w, &bias, &y})
        KLINEAGE_REQUIRE(call, t->dtype == KLINEAGE_BFLOAT16, "gated_linear: bf16 only");
    const int rows = int(x.shape[0]), depth = int(x.shape[1]), columns = int(y.shape[1]);
    KLINEAGE_REQUIRE(call, x.stride[0] == depth && w.stride[0] == depth && y.stride[0] == columns && w.shape[0] == 2 * columns,
                     "gated_linear: contiguous row-major matrices, w with two rows a column of y");
    const dim3 block(32, 8), grid((columns + 31) / 32, (rows + 7) / 8);
    gated<<<grid, block, 0, static_cast<cudaStream_t>(call->stream)>>>(
        static_cast<const bf16 *>(x.data), static_cast<const bf16 *>(w.data), static_cast<const bf16 *>(bias.data),
        static_cast<bf16 *>(y.data), rows, depth, columns);
    KLINEAGE_REQUIRE(call, cudaGetLastError() == cudaSuccess, "gated_linear: the launch failed");
    return 0;
}
