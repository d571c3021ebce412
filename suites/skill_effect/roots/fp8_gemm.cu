// Naive: one thread computes one element of c, the product of a row of a and a row of b.
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include "klineage.h"

namespace {

using fp8 = __nv_fp8_e4m3;

__global__ void product(const fp8 *a, const fp8 *b, __nv_bfloat16 *c, int rows, int depth, int columns) {
    const int column = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y * blockDim.y + threadIdx.y;
    if (row >= rows || column >= columns) return;
    const fp8 *left = a + size_t(row) * depth, *right = b + size_t(column) * depth;
    float sum = 0.f;
    for (int k = 0; k < depth; ++k) sum += float(left[k]) * float(right[k]);
    c[size_t(row) * columns + column] = __float2bfloat16(sum);
}

}  // namespace

extern "C" int run(const klineage_call *call) {
    KLINEAGE_REQUIRE(call, call->num_inputs == 2 && call->num_outputs == 1, "fp8_gemm reads a and b and writes c");
    const klineage_tensor &a = call->inputs[0], &b = call->inputs[1], &c = call->outputs[0];
    KLINEAGE_REQUIRE(call, a.dtype == KLINEAGE_FLOAT8_E4M3 && b.dtype == KLINEAGE_FLOAT8_E4M3 && c.dtype == KLINEAGE_BFLOAT16,
                     "fp8_gemm: e4m3 matrices and a bf16 product");
    const int rows = int(a.shape[0]), depth = int(a.shape[1]), columns = int(b.shape[0]);
    KLINEAGE_REQUIRE(call, a.stride[0] == depth && b.stride[0] == depth && c.stride[0] == columns,
                     "fp8_gemm: contiguous row-major matrices");
    const dim3 block(32, 8), grid((columns + 31) / 32, (rows + 7) / 8);
    product<<<grid, block, 0, static_cast<cudaStream_t>(call->stream)>>>(
        static_cast<const fp8 *>(a.data), static_cast<const fp8 *>(b.data), static_cast<__nv_bfloat16 *>(c.data), rows, depth,
        columns);
    KLINEAGE_REQUIRE(call, cudaGetLastError() == cudaSuccess, "fp8_gemm: the launch failed");
    return 0;
}
