#include <cuda_runtime.h>

#include "klineage.h"

namespace {

constexpr int kThreads = 1024;
constexpr int kDigitBits = 8;
constexpr int kBins = 1 << kDigitBits;
static_assert(32 % kDigitBits == 0, "the digits must tile a code");

// Order-reversing bijection from floats to unsigned integers: a larger float has a smaller code.
__device__ __forceinline__ unsigned encode(float value) {
    const unsigned bits = __float_as_uint(value);
    return bits ^ (~static_cast<unsigned>(static_cast<int>(bits) >> 31) & 0x7fffffffu);
}
__device__ __forceinline__ float decode(unsigned code) {
    return __uint_as_float(code ^ (~static_cast<unsigned>(static_cast<int>(code) >> 31) & 0x7fffffffu));
}

__global__ void __launch_bounds__(kThreads, 1) topk_kernel(const float *x, float *values, long long *indices, int columns,
                                                        int k, long long x_stride, long long values_stride,
                                                        long long indices_stride) {
    extern __shared__ unsigned row[];
    __shared__ int histogram[kBins];
    __shared__ int cut_bin, cut_below, wins, ties;
    if (threadIdx.x == 0) {
        wins = 0;
        ties = 0;
    }
    x += blockIdx.x * x_stride;
    values += blockIdx.x * values_stride;
    indices += blockIdx.x * indices_stride;
    for (int column = threadIdx.x; column < columns; column += kThreads) row[column] = encode(x[column]);
    __syncthreads();

    // Radix select of the k-th smallest code; prefix, fixed and need are equal in all threads.
    unsigned prefix = 0;  // the digits of the k-th code that are known
    unsigned fixed = 0;   // mask of these digits
    int need = k;         // rank of the k-th code among the codes that share the prefix, from 1
    for (int shift = 32 - kDigitBits; shift >= 0; shift -= kDigitBits) {
        for (int bin = threadIdx.x; bin < kBins; bin += kThreads) histogram[bin] = 0;
        __syncthreads();
        for (int column = threadIdx.x; column < columns; column += kThreads) {
            const unsigned code = row[column];
            if ((code & fixed) == prefix) atomicAdd(&histogram[(code >> shift) & (kBins - 1)], 1);
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            int bin = 0, below = 0;
            while (bin < kBins - 1) {
                const int count = histogram[bin];
                if (below + count >= need) break;
                below += count;
                ++bin;
            }
            cut_bin = bin;
            cut_below = below;
        }
        __syncthreads();  // publishes the cut, and frees the histogram for the next digit
        prefix |= static_cast<unsigned>(cut_bin) << shift;
        need -= cut_below;
        fixed = ~0u << shift;
    }

    // prefix is the k-th code: k - need codes are smaller, and need of the codes equal to it are taken.
    const int first_tie = k - need;
    for (int column = threadIdx.x; column < columns; column += kThreads) {
        const unsigned code = row[column];
        int at = k;
        if (code < prefix)
            at = atomicAdd(&wins, 1);
        else if (code == prefix)
            at = first_tie + atomicAdd(&ties, 1);
        if (at < k) {
            values[at] = decode(code);
            indices[at] = column;
        }
    }
}

}  // namespace

extern "C" int run(const klineage_call *call) {
    KLINEAGE_REQUIRE(call, call->abi_version == KLINEAGE_ABI_VERSION, "top-k: unknown ABI version");
    KLINEAGE_REQUIRE(call, call->num_inputs == 1 && call->num_outputs == 2, "top-k: needs x -> values, indices");
    const klineage_tensor &x = call->inputs[0], &values = call->outputs[0], &indices = call->outputs[1];
    KLINEAGE_REQUIRE(call, x.num_dims == 2 && values.num_dims == 2 && indices.num_dims == 2, "top-k: tensors are 2-D");
    KLINEAGE_REQUIRE(call, x.dtype == KLINEAGE_FLOAT32 && values.dtype == KLINEAGE_FLOAT32 &&
                     indices.dtype == KLINEAGE_INT64, "top-k: fp32 input and values, int64 indices");
    const int64_t rows = x.shape[0], columns = x.shape[1], k = values.shape[1];
    KLINEAGE_REQUIRE(call, values.shape[0] == rows && indices.shape[0] == rows && indices.shape[1] == k,
                     "top-k: output shapes differ from the input's rows or from each other");
    KLINEAGE_REQUIRE(call, rows >= 1 && rows <= 65535 && columns >= 1 && columns <= 16384,
                     "top-k: supports 1 to 65535 rows of 1 to 16384 columns");
    KLINEAGE_REQUIRE(call, k >= 1 && k <= 1024 && k <= columns, "top-k: supports k from 1 to min(1024, columns)");
    KLINEAGE_REQUIRE(call, x.stride[1] == 1 && values.stride[1] == 1 && indices.stride[1] == 1,
                     "top-k: the last dimension must be contiguous");

    static thread_local int prepared = -1;
    int device;
    cudaGetDevice(&device);
    if (device != prepared) {
        cudaFuncSetAttribute(topk_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 16384 * 4);
        prepared = device;
    }
    topk_kernel<<<rows, kThreads, columns * 4, static_cast<cudaStream_t>(call->stream)>>>(
        static_cast<const float *>(x.data), static_cast<float *>(values.data), static_cast<long long *>(indices.data),
        columns, k, x.stride[0], values.stride[0], indices.stride[0]);
    const cudaError_t status = cudaGetLastError();
    KLINEAGE_REQUIRE(call, status == cudaSuccess, cudaGetErrorString(status));
    return 0;
}
