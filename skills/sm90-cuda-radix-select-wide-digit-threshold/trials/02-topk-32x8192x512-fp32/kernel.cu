#include <cuda_runtime.h>

#include "klineage.h"

namespace {

constexpr int kThreads = 1024, kBits = 12, kBins = 1 << kBits, kPer = kBins / kThreads;
constexpr unsigned kFull = 0xffffffffu;
static_assert(kBins % kThreads == 0 && kPer == 4, "a thread owns four bins, read as one int4");
static_assert(kThreads == 32 * 32, "one lane per warp in the reduction over the slices");

// Order-reversing bijection from floats to unsigned integers: a larger float has a smaller code.
__device__ __forceinline__ unsigned encode(float value) {
    const unsigned bits = __float_as_uint(value);
    return bits ^ (~static_cast<unsigned>(static_cast<int>(bits) >> 31) & 0x7fffffffu);
}
__device__ __forceinline__ float decode(unsigned code) {
    return __uint_as_float(code ^ (~static_cast<unsigned>(static_cast<int>(code) >> 31) & 0x7fffffffu));
}

struct Threshold {
    int bin, below, count;  // the bin that reaches the wanted rank, the keys in the bins before it, the keys in it
};

// Called by all threads after the barrier that ends the counting; 1 <= need <= number of counted keys.
__device__ __forceinline__ Threshold find_threshold(const int *histogram, int *warp_sum, Threshold *found, int need) {
    const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
    const int4 own = reinterpret_cast<const int4 *>(histogram)[thread];
    const int bins[kPer] = {own.x, own.y, own.z, own.w};
    int sum = 0;
#pragma unroll
    for (int i = 0; i < kPer; ++i) sum += bins[i];
    const int slice = __reduce_add_sync(kFull, sum);
    if (lane == 0) warp_sum[warp] = slice;
    __syncthreads();
    const int before = __reduce_add_sync(kFull, lane < warp ? warp_sum[lane] : 0);
    if (before < need && need <= before + slice) {  // one warp
        int running = sum;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(kFull, running, step);
            if (lane >= step) running += other;
        }
        running += before;
        if (running - sum < need && need <= running) {  // one lane
            Threshold t{thread * kPer, running - sum, bins[0]};
#pragma unroll
            for (int i = 1; i < kPer; ++i)
                if (t.below + t.count < need) {
                    t.below += t.count;
                    t.count = bins[i];
                    ++t.bin;
                }
            *found = t;
        }
    }
    __syncthreads();
    return *found;
}

// Fixes the next digit of the k-th code; true (in all threads) when the threshold bin is taken whole or no bits remain.
template <bool kFirst, int kKeys>
__device__ __forceinline__ bool next_digit(const unsigned (&code)[kKeys], unsigned valid, int *histogram, int *warp_sum,
                                           Threshold *found, unsigned &prefix, int &shift, int &need) {
    const int thread = threadIdx.x;
    const unsigned above = kFirst ? 0u : kFull << (kFirst ? 0 : shift);  // bits already fixed
    const int digit_shift = shift > kBits ? shift - kBits : 0;
    const unsigned mask = (1u << (shift - digit_shift)) - 1;  // the last digit is narrower
#pragma unroll
    for (int i = 0; i < kPer; ++i) histogram[i * kThreads + thread] = 0;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kKeys; ++i)
        if ((valid >> i & 1) && (kFirst || (code[i] & above) == prefix))
            atomicAdd(&histogram[code[i] >> digit_shift & mask], 1);
    __syncthreads();
    const Threshold t = find_threshold(histogram, warp_sum, found, need);
    need -= t.below;
    shift = digit_shift;
    prefix |= static_cast<unsigned>(t.bin) << digit_shift;
    return t.count == need || shift == 0;
}

// kVector: columns and x_stride are multiples of 4 and x is 16-byte aligned; keys are loaded four at a time.
template <int kKeys, bool kVector>
__global__ void __launch_bounds__(kThreads, 1) topk_kernel(const float *x, float *values, long long *indices, int columns,
                                                        int k, long long x_stride, long long values_stride,
                                                        long long indices_stride) {
    __shared__ __align__(16) int histogram[kBins];
    __shared__ int warp_sum[32];
    __shared__ Threshold found;
    __shared__ int wins, ties;
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
    int shift = 32, need = k;
    if (!next_digit<true>(code, valid, histogram, warp_sum, &found, prefix, shift, need))
        while (!next_digit<false>(code, valid, histogram, warp_sum, &found, prefix, shift, need)) {
        }
    const unsigned last = prefix | ((1u << shift) - 1);  // shift is at most 32 - kBits now

#pragma unroll
    for (int i = 0; i < kKeys; ++i) {  // prefix to last: the threshold bin, taken whole or a single code
        int at = k;
        if ((valid >> i & 1) && code[i] < prefix) at = atomicAdd(&wins, 1);
        if ((valid >> i & 1) && code[i] >= prefix && code[i] <= last) at = k - need + atomicAdd(&ties, 1);
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
