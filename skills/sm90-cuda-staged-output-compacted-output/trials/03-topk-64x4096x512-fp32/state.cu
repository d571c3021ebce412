#include <cuda_runtime.h>

#include "klineage.h"

namespace {

constexpr int kThreads = 1024, kBits = 12, kBins = 1 << kBits;
constexpr unsigned kFull = 0xffffffffu;

// Order-reversing bijection from floats to unsigned integers: a larger float has a smaller code.
__device__ __forceinline__ unsigned encode(float value) {
    const unsigned bits = __float_as_uint(value);
    return bits ^ (~static_cast<unsigned>(static_cast<int>(bits) >> 31) & 0x7fffffffu);
}
__device__ __forceinline__ float decode(unsigned code) {
    return __uint_as_float(code ^ (~static_cast<unsigned>(static_cast<int>(code) >> 31) & 0x7fffffffu));
}

__device__ __forceinline__ int warp_inclusive_scan(int value, int lane) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(kFull, value, step);
        if (lane >= step) value += other;
    }
    return value;
}

struct Threshold {
    int bin;    // the digit that holds the k-th smallest code
    int below;  // codes with a smaller digit
    int count;  // codes with this digit
};

struct Shared {
    int histogram[kBins];
    int warp_sum[32];
    Threshold threshold;
    int wins, ties;
};

// The bin in which the running count reaches `need`; the caller has synchronized after counting. Every warp sums its
// slice of the bins; the one warp whose slice holds the threshold searches it.
__device__ __forceinline__ Threshold find_threshold(Shared &s, int need, int warp, int lane) {
    constexpr int kWarps = kThreads / 32, kBinsPerLane = kBins / kThreads;
    static_assert(kBinsPerLane >= 1 && kBinsPerLane * kThreads == kBins, "bins must spread evenly over the threads");
    int bins[kBinsPerLane], sum = 0;
#pragma unroll
    for (int i = 0; i < kBinsPerLane; ++i)
        sum += (bins[i] = s.histogram[(warp * 32 + lane) * kBinsPerLane + i]);
    const int slice = __reduce_add_sync(kFull, sum);
    if (lane == 0) s.warp_sum[warp] = slice;
    __syncthreads();
    const int before_slice = __reduce_add_sync(kFull, lane < warp && lane < kWarps ? s.warp_sum[lane] : 0);
    if (before_slice < need && need <= before_slice + slice) {
        const int running = before_slice + warp_inclusive_scan(sum, lane);
        if (running - sum < need && need <= running) {
            Threshold t{(warp * 32 + lane) * kBinsPerLane, running - sum, bins[0]};
#pragma unroll
            for (int i = 1; i < kBinsPerLane; ++i)
                if (t.below + t.count < need) {
                    t.below += t.count;
                    t.count = bins[i];
                    ++t.bin;
                }
            s.threshold = t;
        }
    }
    __syncthreads();
    return s.threshold;
}

template <int kKeys, bool kVector>
__global__ void __launch_bounds__(kThreads, 1) topk_kernel(const float *x, float *values, long long *indices, int columns,
                                                        int k, long long x_stride, long long values_stride,
                                                        long long indices_stride) {
    __shared__ Shared s;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
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
    if (thread == 0) s.wins = s.ties = 0;

    unsigned prefix = 0;  // the digits of the k-th code found so far
    int shift = 32, need = k;
    Threshold t{};
    const auto next_digit = [&](bool first) {
        const unsigned above = first ? 0 : kFull << shift;  // bits already fixed
        const int digit_shift = first ? 32 - kBits : max(shift - kBits, 0);
        const unsigned digit_mask = first ? kBins - 1 : (1u << (shift - digit_shift)) - 1;
#pragma unroll
        for (int i = 0; i < kBins / kThreads; ++i) s.histogram[i * kThreads + thread] = 0;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kKeys; ++i)
            if ((valid >> (kVector ? i / 4 * 4 : i) & 1) && (first || (code[i] & above) == prefix))
                atomicAdd(&s.histogram[code[i] >> digit_shift & digit_mask], 1);
        __syncthreads();
        t = find_threshold(s, need, warp, lane);
        need -= t.below;
        shift = digit_shift;
        prefix |= static_cast<unsigned>(t.bin) << shift;
        return t.count == need || shift == 0;
    };
    if (!next_digit(true))
        while (!next_digit(false)) {}

    // Codes below the prefix win, and so do those that share it, as far as there are places.
    const unsigned last = prefix | ((1u << shift) - 1);
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
        int at = k;
        if ((valid >> i & 1) && code[i] < prefix) at = atomicAdd(&s.wins, 1);
        if ((valid >> i & 1) && code[i] >= prefix && code[i] <= last) at = k - need + atomicAdd(&s.ties, 1);
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
