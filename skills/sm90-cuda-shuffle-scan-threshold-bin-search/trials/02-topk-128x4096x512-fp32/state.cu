#include <cuda_runtime.h>

#include "klineage.h"

namespace {

constexpr int kThreads = 1024;

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
    __shared__ __align__(16) unsigned histogram[256];
    __shared__ unsigned found_bin, found_below;
    __shared__ unsigned smaller_cursor, equal_cursor;
    x += blockIdx.x * x_stride;
    values += blockIdx.x * values_stride;
    indices += blockIdx.x * indices_stride;
    // Every thread reads back only the codes that it wrote itself, so the row needs no barrier of its own.
#pragma unroll 4
    for (int column = threadIdx.x; column < columns; column += kThreads) row[column] = encode(x[column]);

    // Radix select: after each digit, prefix holds the upper bits of the code of the k-th element and need says which
    // one it is (from 1) among the codes with this prefix.
    unsigned prefix = 0, need = static_cast<unsigned>(k);
#pragma unroll
    for (int shift = 24; shift >= 0; shift -= 8) {
        const unsigned higher = shift == 24 ? 0u : 0xffffffffu << ((shift + 8) & 31);
        if (threadIdx.x < 256) histogram[threadIdx.x] = 0;
        __syncthreads();
#pragma unroll 4
        for (int column = threadIdx.x; column < columns; column += kThreads) {
            const unsigned code = row[column];
            if ((code & higher) == prefix) atomicAdd(&histogram[(code >> shift) & 255u], 1u);
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            const uint4 *groups = reinterpret_cast<const uint4 *>(histogram);
            unsigned below = 0, bin = 0;
            for (; bin < 256; bin += 16) {
                const uint4 a = groups[bin / 4], b = groups[bin / 4 + 1];
                const uint4 c = groups[bin / 4 + 2], d = groups[bin / 4 + 3];
                const unsigned sum = ((a.x + a.y) + (a.z + a.w)) + ((b.x + b.y) + (b.z + b.w)) +
                                     (((c.x + c.y) + (c.z + c.w)) + ((d.x + d.y) + (d.z + d.w)));
                if (below + sum >= need) {
                    const unsigned counts[16] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w,
                                                 c.x, c.y, c.z, c.w, d.x, d.y, d.z, d.w};
                    unsigned running = below, within = 0;
#pragma unroll
                    for (int i = 0; i < 16; ++i) {
                        running += counts[i];
                        if (running < need) {
                            below = running;
                            ++within;
                        }
                    }
                    bin += within;
                    break;
                }
                below += sum;
            }
            found_bin = bin;
            found_below = below;
            if (shift == 0) {
                smaller_cursor = 0;
                equal_cursor = static_cast<unsigned>(k) - (need - below);
            }
        }
        __syncthreads();
        prefix |= found_bin << shift;
        need -= found_below;
    }

    // Collect: smaller codes from place 0, equal ones from place k - need until the outputs are full. One atomic per
    // warp and kind; the loop is uniform in a warp.
    const unsigned lane = threadIdx.x & 31u, lanes_before = (1u << lane) - 1u;
#pragma unroll 4
    for (int base = 0; base < columns; base += kThreads) {
        const int column = base + static_cast<int>(threadIdx.x);
        const bool inside = column < columns;
        const unsigned code = inside ? row[column] : 0xffffffffu;
        const bool smaller = inside && code < prefix, equal = inside && code == prefix;
        const unsigned smaller_lanes = __ballot_sync(0xffffffffu, smaller);
        const unsigned equal_lanes = __ballot_sync(0xffffffffu, equal);
        if ((smaller_lanes | equal_lanes) == 0) continue;
        // Lane 0 takes places for the smaller codes, lane 1 for the equal ones.
        unsigned start = 0;
        if (lane < 2) {
            const unsigned count = __popc(lane == 0 ? smaller_lanes : equal_lanes);
            if (count != 0) start = atomicAdd(lane == 0 ? &smaller_cursor : &equal_cursor, count);
        }
        const unsigned smaller_start = __shfl_sync(0xffffffffu, start, 0);
        const unsigned equal_start = __shfl_sync(0xffffffffu, start, 1);
        if (smaller || equal) {
            const unsigned place = smaller ? smaller_start + __popc(smaller_lanes & lanes_before)
                                           : equal_start + __popc(equal_lanes & lanes_before);
            if (place < static_cast<unsigned>(k)) {
                values[place] = decode(code);
                indices[place] = column;
            }
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
