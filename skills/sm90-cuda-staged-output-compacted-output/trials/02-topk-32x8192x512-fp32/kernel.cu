#include <cuda_runtime.h>

#include "klineage.h"

namespace {

constexpr int kThreads = 1024, kWarps = kThreads / 32;
constexpr int kStaged = 1024;                 // the largest k
constexpr int kBins = 4096, kLastBins = 256;  // digits of 12, 12 and 8 bits; every thread owns 4 consecutive bins
static_assert(kBins == 4 * kThreads && kWarps == 32, "one group of four bins per thread, one slice per lane");

// Order-reversing bijection from floats to unsigned integers: a larger float has a smaller code.
__device__ __forceinline__ unsigned encode(float value) {
    const unsigned bits = __float_as_uint(value);
    return bits ^ (~static_cast<unsigned>(static_cast<int>(bits) >> 31) & 0x7fffffffu);
}
__device__ __forceinline__ float decode(unsigned code) {
    return __uint_as_float(code ^ (~static_cast<unsigned>(static_cast<int>(code) >> 31) & 0x7fffffffu));
}

template <int kKeys, bool kVector>
__global__ void __launch_bounds__(kThreads, 1) topk_kernel(const float *x, float *values, long long *indices, int columns,
                                                        int k, long long x_stride, long long values_stride,
                                                        long long indices_stride) {
    __shared__ __align__(16) int histogram[2 * kBins + kLastBins];  // one after another for the three digits
    __shared__ int slices[kWarps];
    __shared__ int4 threshold;  // bin, count below it, count in it
    __shared__ unsigned warp_kept[kWarps];  // per warp: wins in the low half, ties in the high half
    __shared__ uint2 staged[kStaged];       // code and column of the outputs, by place
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    x += blockIdx.x * x_stride;
    values += blockIdx.x * values_stride;
    indices += blockIdx.x * indices_stride;

    unsigned code[kKeys];
    unsigned valid = 0;  // bit i: key i exists (vector variants: bit i / 4 * 4 stands for the group of four)
    const auto exists = [&](int i) { return (valid >> (kVector ? i / 4 * 4 : i) & 1) != 0; };
    const auto column_of = [&](int i) { return kVector ? (i / 4 * kThreads + thread) * 4 + i % 4 : i * kThreads + thread; };
    if constexpr (kVector) {
#pragma unroll
        for (int i = 0; i < kKeys; i += 4) {
            float4 v = make_float4(0, 0, 0, 0);
            if (column_of(i) < columns) {
                v = *reinterpret_cast<const float4 *>(x + column_of(i));
                valid |= 1u << i;
            }
            code[i] = __float_as_uint(v.x), code[i + 1] = __float_as_uint(v.y);
            code[i + 2] = __float_as_uint(v.z), code[i + 3] = __float_as_uint(v.w);
        }
    } else {
#pragma unroll
        for (int i = 0; i < kKeys; ++i) {
            float v = 0;
            if (column_of(i) < columns) {
                v = x[column_of(i)];
                valid |= 1u << i;
            }
            code[i] = __float_as_uint(v);
        }
    }
    {  // clear the bins of all digits while the loads are in flight
        int4 *const own = reinterpret_cast<int4 *>(histogram) + thread;
        own[0] = make_int4(0, 0, 0, 0);
        own[kBins / 4] = make_int4(0, 0, 0, 0);
        if (thread < kLastBins / 4) own[2 * kBins / 4] = make_int4(0, 0, 0, 0);
    }
    __syncthreads();

    unsigned prefix = 0;  // the digits of the k-th code found so far
    unsigned decided;     // mask of the bits found so far
    int need = k, shift = 20;
    int *digit_bins = histogram;
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
        code[i] = encode(__uint_as_float(code[i]));
        if (exists(i)) atomicAdd(&histogram[code[i] >> 20], 1);
    }
#pragma unroll 1
    while (true) {
        __syncthreads();
        int4 bins = make_int4(0, 0, 0, 0);
        if (shift != 0 || thread < kLastBins / 4) bins = reinterpret_cast<const int4 *>(digit_bins)[thread];
        const int sum = (bins.x + bins.y) + (bins.z + bins.w);
        const int slice = __reduce_add_sync(0xffffffffu, sum);
        if (lane == 0) slices[warp] = slice;
        __syncthreads();
        const int before = __reduce_add_sync(0xffffffffu, lane < warp ? slices[lane] : 0);
        if (before < need && before + slice >= need) {  // one warp
            int running = sum;
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                const int other = __shfl_up_sync(0xffffffffu, running, step);
                if (lane >= step) running += other;
            }
            running += before;
            if (running >= need && running - sum < need) {  // one lane
                int bin = thread * 4, below = running - sum, count = bins.x;
                if (below + count < need) {
                    below += count, ++bin, count = bins.y;
                    if (below + count < need) {
                        below += count, ++bin, count = bins.z;
                        if (below + count < need) below += count, ++bin, count = bins.w;
                    }
                }
                threshold = make_int4(bin, below, count, 0);
            }
        }
        __syncthreads();
        const int4 found = threshold;
        prefix |= static_cast<unsigned>(found.x) << shift;
        need -= found.y;
        decided = ~0u << shift;
        if (found.z == need || shift == 0) break;  // the whole bin is taken, or no bits are left
        shift = shift == 20 ? 8 : 0;
        digit_bins += kBins;
        const unsigned mask = shift == 0 ? kLastBins - 1u : kBins - 1u;
#pragma unroll
        for (int i = 0; i < kKeys; ++i)
            if (exists(i) && (code[i] & decided) == prefix) atomicAdd(&digit_bins[code[i] >> shift & mask], 1);
    }

    const unsigned last = prefix | ~decided;  // the largest code that shares the decided bits
    const int first_tie = k - need;
    unsigned win_mask = 0, tie_mask = 0;  // bit i: key i
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {  // prefix holds the decided bits of the k-th code now
        const bool kept = exists(i) && code[i] <= last, win = code[i] < prefix;
        win_mask |= static_cast<unsigned>(kept && win) << i;
        tie_mask |= static_cast<unsigned>(kept && !win) << i;
    }
    // Both counts in one scan: a block has at most 16384 keys, so neither half overflows.
    const unsigned mine = static_cast<unsigned>(__popc(win_mask)) + (static_cast<unsigned>(__popc(tie_mask)) << 16);
    unsigned inclusive = mine;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const unsigned other = __shfl_up_sync(0xffffffffu, inclusive, step);
        if (lane >= step) inclusive += other;
    }
    if (lane == 31) warp_kept[warp] = inclusive;
    __syncthreads();
    const unsigned base = __reduce_add_sync(0xffffffffu, lane < warp ? warp_kept[lane] : 0u) + inclusive - mine;
    int win_at = static_cast<int>(base & 0xffffu), tie_at = first_tie + static_cast<int>(base >> 16);
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
        const int win = win_mask >> i & 1, tie = tie_mask >> i & 1;
        const int at = win ? win_at : tie_at;
        if ((win | tie) && at < k) staged[at] = make_uint2(code[i], static_cast<unsigned>(column_of(i)));
        win_at += win;
        tie_at += tie;
    }
    __syncthreads();
    for (int at = thread; at < k; at += kThreads) {  // the places 0 to k - 1 are all taken
        const uint2 entry = staged[at];
        values[at] = decode(entry.x);
        indices[at] = static_cast<long long>(entry.y);
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
    KLINEAGE_REQUIRE(call, k >= 1 && k <= kStaged && k <= columns, "top-k: supports k from 1 to min(1024, columns)");
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
