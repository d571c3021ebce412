#include <cuda_runtime.h>

#include "klineage.h"

// c[M,N] = a[M,K] b[K,N], fp32, row-major; one thread per element of c.
static __global__ void gemm(const float *a, const float *b, float *c, int M, int N, int K) {
    const int row = blockIdx.y * blockDim.y + threadIdx.y, column = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= M || column >= N) return;
    float sum = 0.0f;
    for (int k = 0; k < K; ++k) sum += a[size_t(row) * K + k] * b[size_t(k) * N + column];
    c[size_t(row) * N + column] = sum;
}

extern "C" int run(const klineage_call *call) {
    const klineage_tensor &a = call->inputs[0], &b = call->inputs[1], &c = call->outputs[0];
    KLINEAGE_REQUIRE(call, a.dtype == KLINEAGE_FLOAT32, "fp32 only");
    const int M = int(a.shape[0]), N = int(b.shape[1]), K = int(a.shape[1]);
    const dim3 block(32, 8), grid((N + 31) / 32, (M + 7) / 8);
    gemm<<<grid, block, 0, static_cast<cudaStream_t>(call->stream)>>>(
        static_cast<const float *>(a.data), static_cast<const float *>(b.data), static_cast<float *>(c.data), M, N, K);
    const cudaError_t status = cudaGetLastError();
    KLINEAGE_REQUIRE(call, status == cudaSuccess, cudaGetErrorString(status));
    return 0;
}
