// Naive: one thread computes one element of a matrix of c.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "klineage.h"

namespace {

using bf16 = __nv_bfloat16;

__global__ void product(const bf16 *a, const bf16 *b, bf16 *c, int rows, int depth, int columns) {
    const int column = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y * blockDim.y + threadIdx.y;
    if (row >= rows || column >= columns) return;
    a += size_t(blockIdx.z) * rows * depth, b += size_t(blockIdx.z) * depth * columns, c += size_t(blockIdx.z) * rows * columns;
    float sum = 0.f;
    for (int k = 0; k < depth; ++k)
        sum += __bfloat162float(a[size_t(row) * depth + k]) * __bfloat162float(b[size_t(k) * columns + column]);
    c[size_t(row) * columns + column] = __float2bfloat16(sum);
}

}  // namespace

extern "C" int run(const klineage_call *call) {
    KLINEAGE_REQUIRE(call, call->num_inputs == 2 && call->num_outputs == 1, "bmm reads a and b and writes c");
    const klineage_tensor &a = call->inputs[0], &b = call->inputs[1], &c = call->outputs[0];
    KLINEAGE_REQUIRE(call, a.dtype == KLINEAGE_BFLOAT16 && b.dtype == KLINEAGE_BFLOAT16, "bmm: bf16 matrices");
    const int rows = int(a.shape[1]), depth = int(a.shape[2]), columns = int(b.shape[2]);
    KLINEAGE_REQUIRE(call, a.stride[1] == depth && b.stride[1] == columns && c.stride[1] == columns,
                     "bmm: contiguous row-major matrices");
    const dim3 block(32, 8), grid((columns + 31) / 32, (rows + 7) / 8, unsigned(a.shape[0]));
    product<<<grid, block, 0, static_cast<cudaStream_t>(call->stream)>>>(
        static_cast<const bf16 *>(a.data), static_cast<const bf16 *>(b.data), static_cast<bf16 *>(c.data), rows, depth, columns);
    KLINEAGE_REQUIRE(call, cudaGetLastError() == cudaSuccess, "bmm: the launch failed");
    return 0;
}
