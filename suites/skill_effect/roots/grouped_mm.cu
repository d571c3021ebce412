// Naive: one thread computes one element of c; its group is found by walking over the ends.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "klineage.h"

namespace {

using bf16 = __nv_bfloat16;

__global__ void grouped(const bf16 *a, const bf16 *b, const int *ends, bf16 *c, int rows, int depth, int columns) {
    const int column = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y * blockDim.y + threadIdx.y;
    if (row >= rows || column >= columns) return;
    int group = 0;
    while (ends[group] <= row) ++group;
    const bf16 *weights = b + size_t(group) * depth * columns;
    float sum = 0.f;
    for (int k = 0; k < depth; ++k)
        sum += __bfloat162float(a[size_t(row) * depth + k]) * __bfloat162float(weights[size_t(k) * columns + column]);
    c[size_t(row) * columns + column] = __float2bfloat16(sum);
}

}  // namespace

extern "C" int run(const klineage_call *call) {
    KLINEAGE_REQUIRE(call, call->num_inputs == 3 && call->num_outputs == 1, "grouped_mm reads a, b and ends and writes c");
    const klineage_tensor &a = call->inputs[0], &b = call->inputs[1], &ends = call->inputs[2], &c = call->outputs[0];
    KLINEAGE_REQUIRE(call, a.dtype == KLINEAGE_BFLOAT16 && b.dtype == KLINEAGE_BFLOAT16 && ends.dtype == KLINEAGE_INT32,
                     "grouped_mm: bf16 matrices and 32-bit ends");
    const int rows = int(a.shape[0]), depth = int(a.shape[1]), columns = int(b.shape[2]);
    KLINEAGE_REQUIRE(call, a.stride[0] == depth && b.stride[1] == columns && c.stride[0] == columns,
                     "grouped_mm: contiguous row-major matrices");
    const dim3 block(32, 8), grid((columns + 31) / 32, (rows + 7) / 8);
    grouped<<<grid, block, 0, static_cast<cudaStream_t>(call->stream)>>>(
        static_cast<const bf16 *>(a.data), static_cast<const bf16 *>(b.data), static_cast<const int *>(ends.data),
        static_cast<bf16 *>(c.data), rows, depth, columns);
    KLINEAGE_REQUIRE(call, cudaGetLastError() == cudaSuccess, "grouped_mm: the launch failed");
    return 0;
}
