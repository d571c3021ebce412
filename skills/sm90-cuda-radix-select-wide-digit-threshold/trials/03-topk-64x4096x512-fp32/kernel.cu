#include <cuda_runtime.h>

#include "klineage.h"

namespace {

constexpr int kThreads = 1024, kBits = 12, kBins = 1 << kBits, kPer = kBins / kThreads, kKeyBits = 32;
constexpr unsigned kFull = 0xffffffffu;
static_assert(kBins % kThreads == 0, "threads own equally many bins");
static_assert(kThreads == 32 * 32, "one warp sum per lane");

// Order-reversing bijection from floats to unsigned integers: a larger float has a smaller code.
__device__ __forceinline__ unsigned encode(float value) {
    const unsigned bits = __float_as_uint(value);
    return bits ^ (~static_cast<unsigned>(static_cast<int>(bits) >> 31) & 0x7fffffffu);
}
__device__ __forceinline__ float decode(unsigned code) {
    return __uint_as_float(code ^ (~static_cast<unsigned>(static_cast<int>(code) >> 31) & 0x7fffffffu));
}

struct Threshold {
    int bin, below, count;  // the bin with the wanted rank, the keys in the bins before it, the keys in it
};

struct Shared {
    alignas(16) int histogram[kBins];
    int warp_sum[32];
    Threshold found;
    int wins, ties;
};

// The bin that reaches rank `need` (from one); called by all threads after the barrier that ends the counting.
__device__ __forceinline__ Threshold find_threshold(Shared &shared, int need) {
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    int bins[kPer], sum = 0;
#pragma unroll
    for (int i = 0; i < kPer; ++i) sum += (bins[i] = shared.histogram[thread * kPer + i]);
    const int slice = __reduce_add_sync(kFull, sum);
    if (lane == 0) shared.warp_sum[warp] = slice;
    __syncthreads();
    const int before = __reduce_add_sync(kFull, lane < warp ? shared.warp_sum[lane] : 0);
    if (before < need && need <= before + slice) {  // one warp, as a whole
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
            shared.found = t;
        }
    }
    __syncthreads();
    return shared.found;
}

// One digit; true when the selection is decided: the threshold bin is taken whole, or no bits are left.
template <bool kFirst, int kKeys>
__device__ __forceinline__ bool select_digit(Shared &shared, const unsigned (&code)[kKeys], unsigned valid,
                                             unsigned &prefix, int &shift, int &need) {
    const int thread = threadIdx.x;
    const unsigned above = kFirst ? 0u : kFull << shift;  // bits already fixed
    const int digit_shift = shift > kBits ? shift - kBits : 0;
    const unsigned mask = (1u << (shift - digit_shift)) - 1;  // the last digit is narrower
#pragma unroll
    for (int i = 0; i < kPer; ++i) shared.histogram[i * kThreads + thread] = 0;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kKeys; ++i)
        if ((valid >> i & 1) && (kFirst || (code[i] & above) == prefix))
            atomicAdd(&shared.histogram[code[i] >> digit_shift & mask], 1);
    __syncthreads();
    const Threshold t = find_threshold(shared, need);
    need -= t.below;
    shift = digit_shift;
    prefix |= static_cast<unsigned>(t.bin) << digit_shift;
    return t.count == need || shift == 0;  // the same in all threads
}

template <int kKeys, bool kVector>
__global__ void __launch_bounds__(kThreads, 1) topk_kernel(const float *x, float *values, long long *indices, int columns,
                                                        int k, long long x_stride, long long values_stride,
                                                        long long indices_stride) {
    __shared__ Shared shared;
    const int thread = threadIdx.x;
    x += blockIdx.x * x_stride;
    values += blockIdx.x * values_stride;
    indices += blockIdx.x * indices_stride;

    unsigned code[kKeys];
    unsigned valid = 0;  // bit i: key i exists
    const auto column_of = [&](int i) { return kVector ? (i / 4 * kThreads + thread) * 4 + i % 4 : i * kThreads + thread; };
    if constexpr (kVector) {
#pragma unroll
        for (int i = 0; i < kKeys; i += 4) {
            float4 v = make_float4(0, 0, 0, 0);
            if (column_of(i) < columns) {
                v = *reinterpret_cast<const float4 *>(x + column_of(i));
                valid |= 15u << i;
            }
            code[i] = encode(v.x), code[i + 1] = encode(v.y), code[i + 2] = encode(v.z), code[i + 3] = encode(v.w);
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
    if (thread == 0) shared.wins = shared.ties = 0;

    unsigned prefix = 0;  // the digits of the k-th code found so far
    int shift = kKeyBits, need = k;
    bool done = select_digit<true>(shared, code, valid, prefix, shift, need);
#pragma unroll 1
    while (!done) done = select_digit<false>(shared, code, valid, prefix, shift, need);
    const unsigned last = prefix | ((1u << shift) - 1);  // the end of the threshold bin; shift is below 32 here

#pragma unroll
    for (int i = 0; i < kKeys; ++i) {  // codes from prefix to last are in the threshold bin
        int at = k;
        if ((valid >> i & 1) && code[i] < prefix) at = atomicAdd(&shared.wins, 1);
        if ((valid >> i & 1) && code[i] >= prefix && code[i] <= last) at = k - need + atomicAdd(&shared.ties, 1);
        if (at < k) {
            values[at] = decode(code[i]);
            indices[at] = column_of(i);
        }
    }
}

template <int kKeys>
void launch(bool vector, int rows, int columns, int k, const klineage_tensor &x, const klineage_tensor &values,
            const klineage_tensor &indices, cudaStream_t stream) {
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

    const bool vector = columns % 4 == 0 && x.stride[0] % 4 == 0 && reinterpret_cast<uintptr_t>(x.data) % 16 == 0;
    const auto stream = static_cast<cudaStream_t>(call->stream);
    if (columns <= 4 * kThreads)
        launch<4>(vector, rows, columns, k, x, values, indices, stream);
    else if (columns <= 8 * kThreads)
        launch<8>(vector, rows, columns, k, x, values, indices, stream);
    else
        launch<16384 / kThreads>(vector, rows, columns, k, x, values, indices, stream);
    const cudaError_t status = cudaGetLastError();
    KLINEAGE_REQUIRE(call, status == cudaSuccess, cudaGetErrorString(status));
    return 0;
}
