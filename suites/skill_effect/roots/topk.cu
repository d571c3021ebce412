// Naive: a block per row takes the largest remaining element, k times. Elements are ordered by value, equal ones by
// column, so that a pass takes the first one after the last that was taken, and nothing has to be marked.
#include <cuda_runtime.h>

#include "klineage.h"

namespace {

constexpr int kThreads = 1024;
using Key = unsigned long long;

// A larger value has a smaller key; the column stands in the lower half.
__device__ Key key_of(float value, int column) {
    const unsigned bits = __float_as_uint(value);
    const unsigned ordered = bits & 0x80000000u ? bits : ~bits & 0x7fffffffu;
    return Key(ordered) << 32 | unsigned(column);
}

__global__ void __launch_bounds__(kThreads) topk(const float *x, float *values, long long *indices, int columns, int k) {
    __shared__ Key best[kThreads];
    const float *row = x + size_t(blockIdx.x) * columns;
    Key next = 0;
    for (int pass = 0; pass < k; ++pass) {
        Key mine = ~Key(0);
        for (int column = threadIdx.x; column < columns; column += kThreads) {
            const Key key = key_of(row[column], column);
            if (key >= next && key < mine) mine = key;
        }
        best[threadIdx.x] = mine;
        __syncthreads();
        for (int step = kThreads / 2; step > 0; step /= 2) {
            if (threadIdx.x < step && best[threadIdx.x + step] < best[threadIdx.x]) best[threadIdx.x] = best[threadIdx.x + step];
            __syncthreads();
        }
        const Key winner = best[0];
        if (threadIdx.x == 0) {
            const int column = int(winner & 0xffffffffu);
            values[size_t(blockIdx.x) * k + pass] = row[column];
            indices[size_t(blockIdx.x) * k + pass] = column;
        }
        next = winner + 1;
        __syncthreads();
    }
}

}  // namespace

extern "C" int run(const klineage_call *call) {
    KLINEAGE_REQUIRE(call, call->num_inputs == 1 && call->num_outputs == 2, "topk reads x and writes values and indices");
    const klineage_tensor &x = call->inputs[0], &values = call->outputs[0], &indices = call->outputs[1];
    KLINEAGE_REQUIRE(call, x.dtype == KLINEAGE_FLOAT32 && indices.dtype == KLINEAGE_INT64, "topk: fp32, 64-bit indices");
    const int rows = int(x.shape[0]), columns = int(x.shape[1]), k = int(values.shape[1]);
    KLINEAGE_REQUIRE(call, x.stride[0] == columns && values.stride[0] == k && indices.stride[0] == k, "topk: contiguous rows");
    topk<<<rows, kThreads, 0, static_cast<cudaStream_t>(call->stream)>>>(
        static_cast<const float *>(x.data), static_cast<float *>(values.data), static_cast<long long *>(indices.data), columns, k);
    KLINEAGE_REQUIRE(call, cudaGetLastError() == cudaSuccess, "topk: the launch failed");
    return 0;
}
