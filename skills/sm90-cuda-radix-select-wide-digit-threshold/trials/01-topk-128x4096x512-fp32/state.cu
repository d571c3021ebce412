#include <cuda_runtime.h>

#include "klineage.h"

namespace {

constexpr int kThreads = 1024, kBins = 256;

// Order-reversing bijection from floats to unsigned integers: a larger float has a smaller code.
__device__ __forceinline__ unsigned encode(float value) {
    const unsigned bits = __float_as_uint(value);
    return bits ^ (~static_cast<unsigned>(static_cast<int>(bits) >> 31) & 0x7fffffffu);
}
__device__ __forceinline__ float decode(unsigned code) {
    return __uint_as_float(code ^ (~static_cast<unsigned>(static_cast<int>(code) >> 31) & 0x7fffffffu));
}

// kVector: columns and x_stride are multiples of 4 and x is 16-byte aligned; keys are loaded four at a time.
template <int kKeys, bool kVector>
__global__ void __launch_bounds__(kThreads, 1) topk_kernel(const float *x, float *values, long long *indices, int columns,
                                                        int k, long long x_stride, long long values_stride,
                                                        long long indices_stride) {
    __shared__ int histogram[kBins];
    __shared__ int threshold_bin, threshold_below, wins, ties;
    const int thread = threadIdx.x;
    x += blockIdx.x * x_stride;
    values += blockIdx.x * values_stride;
    indices += blockIdx.x * indices_stride;

    unsigned code[kKeys];
    unsigned valid = 0;  // bit i: key i exists
    static_assert(kKeys % 4 == 0, "keys are loaded in groups of 4");
    const auto column_of = [&](int i) {
        return kVector ? (i / 4 * kThreads + thread) * 4 + i % 4 : i * kThreads + thread;
    };
    if (kVector) {
#pragma unroll
        for (int g = 0; g < kKeys / 4; ++g) {
            float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            const int first = (g * kThreads + thread) * 4;
            if (first < columns) {  // columns is a multiple of 4: all four exist
                v = *reinterpret_cast<const float4 *>(x + first);
                valid |= 0xfu << (g * 4);
            }
            code[g * 4 + 0] = encode(v.x);
            code[g * 4 + 1] = encode(v.y);
            code[g * 4 + 2] = encode(v.z);
            code[g * 4 + 3] = encode(v.w);
        }
    } else {
#pragma unroll
        for (int i = 0; i < kKeys; ++i) {
            float v = 0;
            if (column_of(i) < columns) {
                v = x[column_of(i)];
                valid |= 1u << i;
            }
            code[i] = encode(v);
        }
    }
    if (thread == 0) wins = ties = 0;

    unsigned prefix = 0;  // the digits of the k-th code found so far
    int need = k;
    for (int shift = 24; shift >= 0; shift -= 8) {
        const unsigned above = shift < 24 ? ~0u << (shift + 8) : 0;  // bits already fixed
        if (thread < kBins) histogram[thread] = 0;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kKeys; ++i)
            if ((valid >> i & 1) && (code[i] & above) == prefix)
                atomicAdd(&histogram[code[i] >> shift & (kBins - 1)], 1);
        __syncthreads();
        if (thread < 32) {
            const int lane = thread;
            int bins[8], sum = 0;
#pragma unroll
            for (int i = 0; i < 8; ++i) sum += (bins[i] = histogram[lane * 8 + i]);
            int running = sum;
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                const int other = __shfl_up_sync(0xffffffffu, running, step);
                if (lane >= step) running += other;
            }
            if (running >= need && running - sum < need) {  // one lane
                int bin = lane * 8, below = running - sum;
#pragma unroll
                for (int i = 0; i < 7; ++i)
                    if (below + bins[i] < need && bin == lane * 8 + i) {
                        below += bins[i];
                        ++bin;
                    }
                threshold_bin = bin;
                threshold_below = below;
            }
        }
        __syncthreads();
        prefix |= static_cast<unsigned>(threshold_bin) << shift;
        need -= threshold_below;
    }

#pragma unroll
    for (int i = 0; i < kKeys; ++i) {  // prefix is the k-th code now
        int at = k;
        if ((valid >> i & 1) && code[i] < prefix) at = atomicAdd(&wins, 1);
        if ((valid >> i & 1) && code[i] == prefix) at = k - need + atomicAdd(&ties, 1);
        if (at < k) {
            values[at] = decode(code[i]);
            indices[at] = column_of(i);
        }
    }
}

template <int kKeys>
void launch(int rows, int columns, int k, const klineage_tensor &x, const klineage_tensor &values,
            const klineage_tensor &indices, bool vector, cudaStream_t stream) {
    const auto kernel = vector ? topk_kernel<kKeys, true> : topk_kernel<kKeys, false>;
    kernel<<<rows, kThreads, 0, stream>>>(
        static_cast<const float *>(x.data), static_cast<float *>(values.data), static_cast<long long *>(indices.data),
        columns, k, x.stride[0], values.stride[0], indices.stride[0]);
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

    const auto stream = static_cast<cudaStream_t>(call->stream);
    const bool vector =
        columns % 4 == 0 && x.stride[0] % 4 == 0 && reinterpret_cast<uintptr_t>(x.data) % 16 == 0;
    if (columns <= 4 * kThreads)
        launch<4>(rows, columns, k, x, values, indices, vector, stream);
    else if (columns <= 8 * kThreads)
        launch<8>(rows, columns, k, x, values, indices, vector, stream);
    else
        launch<16384 / kThreads>(rows, columns, k, x, values, indices, vector, stream);
    const cudaError_t status = cudaGetLastError();
    KLINEAGE_REQUIRE(call, status == cudaSuccess, cudaGetErrorString(status));
    return 0;
}
