// Row reductions for sm_90a in bf16 and fp16: one read, one write, the row in registers between them, 16-byte accesses.
//
// A group of threads (a warp, or a block of several warps) holds a whole row: every thread has kVectors vectors of eight elements, vector i
// at position i * threads + thread, so that neighbours read neighbouring 16 bytes. Sums go through shuffles, and through shared memory once per
// value where the row has more than a warp. Columns are a multiple of 8, up to 8 * kVectors * threads; vectors past the end are zero.
// Operands that are used once bypass L1 and leave L2 first (ld.global.nc with no_allocate, st.global.cs). Two things are chosen when it is
// built: -DEARLY_WEIGHTS=1 asks for weights before the row, so that their latency lies beside the row's and not behind the sums, at more
// registers; -DPLAIN_STORES=1 writes results as other data.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "klineage.h"

namespace {

#ifndef EARLY_WEIGHTS
#define EARLY_WEIGHTS 0
#endif
#ifndef PLAIN_STORES
#define PLAIN_STORES 0
#endif

constexpr bool kEarlyWeights = EARLY_WEIGHTS, kPlainStores = PLAIN_STORES;
constexpr int kWide = 8;  // elements of a 16-byte vector
constexpr float kLog2E = 1.4426950408889634f;

__device__ float2 widen(__nv_bfloat162 pair) { return __bfloat1622float2(pair); }
__device__ float2 widen(__half2 pair) { return __half22float2(pair); }
__device__ void narrow(__nv_bfloat162 &pair, float2 value) { pair = __float22bfloat162_rn(value); }
__device__ void narrow(__half2 &pair, float2 value) { pair = __float22half2_rn(value); }
template <class T> struct PairOf;
template <> struct PairOf<__nv_bfloat16> { using type = __nv_bfloat162; };
template <> struct PairOf<__half> { using type = __half2; };

// 16 bytes that are read once. Not for data that this kernel writes.
__device__ uint4 load_once(const void *from) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
    return v;
}

__device__ void store(uint4 *to, const uint4 &bytes) {
    if constexpr (kPlainStores) *to = bytes;
    else __stcs(to, bytes);
}

template <class T>
__device__ void unpack(const uint4 &bytes, float (&to)[kWide]) {
    const auto *pairs = reinterpret_cast<const typename PairOf<T>::type *>(&bytes);
#pragma unroll
    for (int i = 0; i < kWide / 2; ++i) {
        const float2 both = widen(pairs[i]);
        to[2 * i] = both.x, to[2 * i + 1] = both.y;
    }
}

template <class T>
__device__ uint4 pack(const float (&from)[kWide]) {
    uint4 bytes;
    auto *pairs = reinterpret_cast<typename PairOf<T>::type *>(&bytes);
#pragma unroll
    for (int i = 0; i < kWide / 2; ++i) narrow(pairs[i], make_float2(from[2 * i], from[2 * i + 1]));
    return bytes;
}

struct Add {
    __device__ float operator()(float a, float b) const { return a + b; }
};
struct Larger {
    __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

// A value combined over the kWarps warps of a row; every thread gets it. `slot` is shared memory of kWarps floats, another one for each use.
template <int kWarps, class Combine>
__device__ float over_row(float value, float *slot, Combine combine) {
#pragma unroll
    for (int step = 16; step; step /= 2) value = combine(value, __shfl_xor_sync(0xffffffffu, value, step));
    if constexpr (kWarps > 1) {
        if (threadIdx.x % 32 == 0) slot[threadIdx.x / 32] = value;
        __syncthreads();
        value = slot[0];
#pragma unroll
        for (int warp = 1; warp < kWarps; ++warp) value = combine(value, slot[warp]);
    }
    return value;
}

enum Kind { kRms, kLayer, kAddRms, kSoftmax };

struct Rows {
    void *x, *residual, *y;
    const void *w, *b;
    int rows, columns;
    float eps;
};

// What is left to do with a row in registers: its statistics, in place.
template <Kind kKind, int kWarps, int kVectors>
__device__ void normalise(float (&values)[kVectors][kWide], const Rows &p, int vectors_of_row, float *slots) {
    const int lane = threadIdx.x % (32 * kWarps);
    float first = kKind == kSoftmax ? -INFINITY : 0.0f;
    if constexpr (kKind == kSoftmax || kKind == kLayer) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v)
#pragma unroll
            for (int i = 0; i < kWide; ++i) first = kKind == kSoftmax ? fmaxf(first, values[v][i]) : first + values[v][i];
        if constexpr (kKind == kSoftmax) first = over_row<kWarps>(first, slots, Larger());
        else first = over_row<kWarps>(first, slots, Add()) / p.columns;
    }
    float second = 0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
        const bool here = v * 32 * kWarps + lane < vectors_of_row;
#pragma unroll
        for (int i = 0; i < kWide; ++i) {
            float &value = values[v][i];
            if constexpr (kKind == kSoftmax) second += value = exp2f((value - first) * kLog2E);
            else {
                if constexpr (kKind == kLayer) value = here ? value - first : 0.0f;
                second += value * value;
            }
        }
    }
    second = over_row<kWarps>(second, slots + kWarps, Add());
    const float scale = kKind == kSoftmax ? 1.0f / second : rsqrtf(second / p.columns + p.eps);
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
#pragma unroll
        for (int i = 0; i < kWide; ++i) values[v][i] *= scale;
}

// Reads a row; what lies past its end is zero, or -inf for softmax. Of the residual norm: the sum, which becomes the residual.
template <class T, Kind kKind, int kWarps, int kVectors>
__device__ void read_row(float (&values)[kVectors][kWide], const Rows &p, int64_t row, int vectors_of_row) {
    const int lane = threadIdx.x % (32 * kWarps);
    const uint4 nothing = make_uint4(0, 0, 0, 0);
    uint4 raw[kVectors], other[kVectors];
    const uint4 *x = static_cast<const uint4 *>(p.x) + row * vectors_of_row;
    uint4 *residual = static_cast<uint4 *>(p.residual) + row * vectors_of_row;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
        const int at = v * 32 * kWarps + lane;
        // In place, the non-coherent path would be wrong by the language's rules: this kernel writes there.
        if constexpr (kKind == kAddRms) {
            raw[v] = at < vectors_of_row ? __ldcs(x + at) : nothing;
            other[v] = at < vectors_of_row ? __ldcs(residual + at) : nothing;
        } else {
            raw[v] = at < vectors_of_row ? load_once(x + at) : nothing;
        }
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
        const int at = v * 32 * kWarps + lane;
        unpack<T>(raw[v], values[v]);
        if constexpr (kKind == kSoftmax) {
            if (at >= vectors_of_row)
#pragma unroll
                for (int i = 0; i < kWide; ++i) values[v][i] = -INFINITY;
        }
        if constexpr (kKind == kAddRms) {
            float more[kWide];
            unpack<T>(other[v], more);
#pragma unroll
            for (int i = 0; i < kWide; ++i) values[v][i] += more[i];
            if (at < vectors_of_row) store(residual + at, pack<T>(values[v]));
        }
    }
}

// What a column is multiplied by, and what is added to it.
template <int kVectors>
struct Weights {
    uint4 w[kVectors], b[kVectors];
};

template <Kind kKind, int kWarps, int kVectors>
__device__ void read_weights(Weights<kVectors> &weights, const Rows &p, int vectors_of_row) {
    const int lane = threadIdx.x % (32 * kWarps);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
        const int at = v * 32 * kWarps + lane;
        if (at >= vectors_of_row) continue;
        if constexpr (kKind != kSoftmax) weights.w[v] = __ldg(static_cast<const uint4 *>(p.w) + at);
        if constexpr (kKind == kLayer) weights.b[v] = __ldg(static_cast<const uint4 *>(p.b) + at);
    }
}

template <class T, Kind kKind, int kWarps, int kVectors>
__device__ void write_row(
    float (&values)[kVectors][kWide], const Weights<kVectors> &weights, const Rows &p, int64_t row, int vectors_of_row
) {
    const int lane = threadIdx.x % (32 * kWarps);
    uint4 *y = static_cast<uint4 *>(kKind == kAddRms ? p.x : p.y) + row * vectors_of_row;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
        const int at = v * 32 * kWarps + lane;
        if (at >= vectors_of_row) continue;
        if constexpr (kKind != kSoftmax) {
            float weight[kWide], bias[kWide] = {};
            unpack<T>(weights.w[v], weight);
            if constexpr (kKind == kLayer) unpack<T>(weights.b[v], bias);
#pragma unroll
            for (int i = 0; i < kWide; ++i) values[v][i] = values[v][i] * weight[i] + bias[i];
        }
        store(y + at, pack<T>(values[v]));
    }
}

// A block has kRows rows of kWarps warps each; with more than one row each row has one warp, so that no barrier is needed.
template <class T, Kind kKind, int kWarps, int kRows, int kVectors>
__global__ void __launch_bounds__(32 * kWarps * kRows) over_rows(const Rows p) {
    static_assert(kWarps == 1 || kRows == 1, "rows of several warps meet at the block's barrier");
    __shared__ float slots[2 * kWarps];
    const int64_t row = int64_t(blockIdx.x) * kRows + threadIdx.x / (32 * kWarps);
    if (row >= p.rows) return;
    const int vectors_of_row = p.columns / kWide;
    float values[kVectors][kWide];
    Weights<kVectors> weights;
    if constexpr (kEarlyWeights) read_weights<kKind, kWarps>(weights, p, vectors_of_row);
    read_row<T, kKind, kWarps, kVectors>(values, p, row, vectors_of_row);
    normalise<kKind, kWarps, kVectors>(values, p, vectors_of_row, slots);
    if constexpr (!kEarlyWeights) read_weights<kKind, kWarps>(weights, p, vectors_of_row);
    write_row<T, kKind, kWarps>(values, weights, p, row, vectors_of_row);
}

template <class T, Kind kKind, int kWarps, int kRows, int kVectors>
const char *start(const Rows &p, cudaStream_t stream) {
    over_rows<T, kKind, kWarps, kRows, kVectors><<<(p.rows + kRows - 1) / kRows, 32 * kWarps * kRows, 0, stream>>>(p);
    return cudaGetLastError() == cudaSuccess ? nullptr : "the launch failed";
}

// Threads and vectors by length: four vectors of a thread are in flight, eight where that lets a warp hold the row and saves the barriers.
template <class T, Kind kKind>
const char *by_length(const Rows &p, cudaStream_t stream) {
    const int columns = p.columns;
    if (columns <= 1024) return start<T, kKind, 1, 8, 4>(p, stream);
    if (columns <= 2048) return start<T, kKind, 1, 4, 8>(p, stream);
    if (columns <= 4096) return start<T, kKind, 4, 1, 4>(p, stream);
    if (columns <= 8192) return start<T, kKind, 8, 1, 4>(p, stream);
    if (columns <= 16384) return start<T, kKind, 16, 1, 4>(p, stream);
    return "reductions: at most 16384 columns";
}

// Why a call is refused, or nullptr.
const char *refusal(const klineage_call *call, int inputs, int outputs, int matrices) {
    if (call->num_inputs != inputs || call->num_outputs != outputs) return "reductions: other tensors than the operator's";
    const klineage_tensor &x = call->inputs[0];
    if (x.num_dims != 2 || x.shape[0] > 1 << 30) return "reductions: a matrix of at most 2^30 rows";
    if (x.shape[1] % kWide) return "reductions: columns must be a multiple of 8";
    for (int i = 0; i < inputs + outputs; ++i) {
        const klineage_tensor &t = i < inputs ? call->inputs[i] : call->outputs[i - inputs];
        const bool matrix = i < matrices || i >= inputs;
        if (t.dtype != x.dtype || (t.dtype != KLINEAGE_BFLOAT16 && t.dtype != KLINEAGE_FLOAT16)) return "reductions: bf16 or fp16 only";
        if (t.stride[t.num_dims - 1] != 1 || (matrix && t.stride[0] != x.shape[1])) return "reductions: contiguous tensors only";
        if (reinterpret_cast<uintptr_t>(t.data) % 16) return "reductions: tensors must be aligned to 16 bytes";
    }
    return nullptr;
}

template <Kind kKind>
int run(const klineage_call *call, int inputs, int outputs, int matrices) {
    const char *why = refusal(call, inputs, outputs, matrices);
    KLINEAGE_REQUIRE(call, why == nullptr, why);
    const klineage_tensor &x = call->inputs[0];
    Rows p = {};
    p.x = x.data, p.rows = int(x.shape[0]), p.columns = int(x.shape[1]), p.eps = float(klineage_scalar_value(call, "eps", 1e-5));
    if (p.rows == 0) return 0;
    if (outputs) p.y = call->outputs[0].data;
    if (matrices > 1) p.residual = call->inputs[1].data;
    if (inputs > matrices) p.w = call->inputs[matrices].data;
    if (inputs > matrices + 1) p.b = call->inputs[matrices + 1].data;
    const auto stream = static_cast<cudaStream_t>(call->stream);
    why = x.dtype == KLINEAGE_FLOAT16 ? by_length<__half, kKind>(p, stream) : by_length<__nv_bfloat16, kKind>(p, stream);
    KLINEAGE_REQUIRE(call, why == nullptr, why);
    return 0;
}

}  // namespace

extern "C" int rms_norm(const klineage_call *call) { return run<kRms>(call, 2, 1, 1); }
extern "C" int layer_norm(const klineage_call *call) { return run<kLayer>(call, 3, 1, 1); }
extern "C" int fused_add_rms_norm(const klineage_call *call) { return run<kAddRms>(call, 3, 0, 2); }
extern "C" int softmax(const klineage_call *call) { return run<kSoftmax>(call, 1, 1, 1); }
