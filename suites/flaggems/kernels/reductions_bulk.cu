// Row reductions for sm_90a in bf16 and fp16, as reductions.cu, with the copy engine between memory and the threads: one read, one write.
//
// A block stays on its multiprocessor: eight warps that compute and a ninth, one thread of which starts the copies. A tile is eight warps' worth
// of whole rows, kWarps warps to a row, and lies in one piece in memory. Stages of a ring in shared memory take a tile each:
//   full[stage]  the tile's bytes are there; the warps bring it to registers, reduce, and write the result over it, every thread its own vectors
//   done[stage]  all eight warps have written; the producer starts the store, and reloads the stage before this one, whose store has been read
// Every thread has kVectors vectors of eight elements of its row, vector i at position i * threads + thread; so it has of weights and bias, which
// stay in registers. Columns are a multiple of 8, up to 8 * kVectors * threads; vectors past the end are zero, or -inf for softmax.
// Copies leave L2 first (evict_first), so that what streams through need not push out dirty lines of others.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <klineage/sm90/v1/mbarrier.cuh>
#include <klineage/sm90/v1/tensor_map.cuh>
#include <klineage/sm90/v1/tma.cuh>

#include "klineage.h"

namespace {
using namespace klineage::sm90;

constexpr int kWide = 8;            // elements of a 16-byte vector
constexpr int kGroups = 8;          // warps that compute
constexpr int kRing = 200 * 1024;   // bytes of shared memory that stages may take
constexpr float kLog2E = 1.4426950408889634f;

__device__ float2 widen(__nv_bfloat162 pair) { return __bfloat1622float2(pair); }
__device__ float2 widen(__half2 pair) { return __half22float2(pair); }
__device__ void narrow(__nv_bfloat162 &pair, float2 value) { pair = __float22bfloat162_rn(value); }
__device__ void narrow(__half2 &pair, float2 value) { pair = __float22half2_rn(value); }
template <class T> struct PairOf;
template <> struct PairOf<__nv_bfloat16> { using type = __nv_bfloat162; };
template <> struct PairOf<__half> { using type = __half2; };

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

// bulk_load and bulk_store with an L2 policy.
__device__ __forceinline__ void bulk_load_hint(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier, uint64_t policy) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(policy) : "memory");
}
__device__ __forceinline__ void bulk_store_hint(void *to, uint32_t from, uint32_t bytes, uint64_t policy) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;"
                 ::"l"(to), "r"(from), "r"(bytes), "l"(policy) : "memory");
}

// Keeps the compiler from unpacking these bytes ahead of the loop that they are used in.
__device__ __forceinline__ void stay_packed(uint4 &bytes) { asm volatile("" : "+r"(bytes.x), "+r"(bytes.y), "+r"(bytes.z), "+r"(bytes.w)); }

struct Add {
    __device__ float operator()(float a, float b) const { return a + b; }
};
struct Larger {
    __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

enum Kind { kRms, kLayer, kAddRms, kSoftmax };

struct Rows {
    void *x, *residual, *y;
    const void *w, *b;
    int rows, columns;
    float eps;
};

// What follows from an instantiation. A part of a stage is one operand's tile; the residual norm has two, x and then the residual.
template <Kind kKind, int kWarps, int kVectors>
struct Shape {
    static constexpr int kRows = kGroups / kWarps, kThreads = 32 * kWarps;
    static constexpr int kParts = kKind == kAddRms ? 2 : 1;
    static constexpr int kPart = 32 * kGroups * kVectors;  // vectors
    static constexpr int kStages = kRing / (16 * kPart * kParts);
    static constexpr int kBytes = 16 * kPart * kParts * kStages;
    static_assert(kStages >= 3, "a stage loads, one is computed and one is stored");
};

// Which stage a tile has, and the parity of its barriers' phase: that of the ring's round.
template <int kStages>
struct Ring {
    int stage = 0;
    uint32_t phase = 0;
    __device__ int before() const { return stage ? stage - 1 : kStages - 1; }
    __device__ void advance() {
        if (++stage == kStages) stage = 0, phase ^= 1;
    }
};

// A value combined over the kWarps warps of a row; every thread of them gets it. Uses take the two rows of `slots` in turn: who writes a row again
// has passed the barrier of the use between, which all warps reach after they have read it.
template <int kWarps, class Combine>
__device__ float over_row(float value, float (&slots)[2][kGroups], int &turn, Combine combine) {
#pragma unroll
    for (int step = 16; step; step /= 2) value = combine(value, __shfl_xor_sync(0xffffffffu, value, step));
    if constexpr (kWarps > 1) {
        const int group = threadIdx.x / (32 * kWarps);
        float *const slot = slots[turn];
        turn ^= 1;
        if (threadIdx.x % 32 == 0) slot[threadIdx.x / 32] = value;
        named_barrier_sync(1 + group, 32 * kWarps);
        value = slot[group * kWarps];
#pragma unroll
        for (int warp = 1; warp < kWarps; ++warp) value = combine(value, slot[group * kWarps + warp]);
    }
    return value;
}

// What is left to do with a row in registers: its statistics, in place.
template <Kind kKind, int kWarps, int kVectors>
__device__ void normalise(float (&values)[kVectors][kWide], const Rows &p, int vectors_of_row, float (&slots)[2][kGroups], int &turn) {
    const int lane = threadIdx.x % (32 * kWarps);
    float first = kKind == kSoftmax ? -INFINITY : 0.0f;
    if constexpr (kKind == kSoftmax || kKind == kLayer) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v)
#pragma unroll
            for (int i = 0; i < kWide; ++i) first = kKind == kSoftmax ? fmaxf(first, values[v][i]) : first + values[v][i];
        if constexpr (kKind == kSoftmax) first = over_row<kWarps>(first, slots, turn, Larger());
        else first = over_row<kWarps>(first, slots, turn, Add()) / p.columns;
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
    second = over_row<kWarps>(second, slots, turn, Add());
    const float scale = kKind == kSoftmax ? 1.0f / second : rsqrtf(second / p.columns + p.eps);
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
#pragma unroll
        for (int i = 0; i < kWide; ++i) values[v][i] *= scale;
}

// A row of a stage to registers. Of the residual norm: the sum, which becomes the residual, rounded, and goes on in fp32.
template <class T, Kind kKind, int kWarps, int kVectors>
__device__ void read_row(float (&values)[kVectors][kWide], const uint4 *row, uint4 *residual, int vectors_of_row) {
    const int lane = threadIdx.x % (32 * kWarps);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
        const int at = v * 32 * kWarps + lane;
        const bool here = at < vectors_of_row;
        unpack<T>(here ? row[at] : make_uint4(0, 0, 0, 0), values[v]);
        if constexpr (kKind == kSoftmax) {
            if (!here)
#pragma unroll
                for (int i = 0; i < kWide; ++i) values[v][i] = -INFINITY;
        }
        if constexpr (kKind == kAddRms) {
            float more[kWide];
            unpack<T>(here ? residual[at] : make_uint4(0, 0, 0, 0), more);
#pragma unroll
            for (int i = 0; i < kWide; ++i) values[v][i] += more[i];
            if (here) residual[at] = pack<T>(values[v]);
        }
    }
}

// The one thread that starts copies. Its ring's phase is that of done; full has the same for its waiters.
template <Kind kKind, int kWarps, int kVectors>
__device__ void produce(const Rows &p, int tiles, uint32_t stages, uint32_t full, uint32_t done) {
    using S = Shape<kKind, kWarps, kVectors>;
    const uint64_t policy = l2_evict_first();
    const int64_t tile_bytes = int64_t(S::kRows) * p.columns * 2;
    const auto bytes_of = [&](int tile) { return uint32_t(min(S::kRows, p.rows - tile * S::kRows)) * uint32_t(p.columns) * 2; };
    const auto at = [&](void *matrix, int tile) { return static_cast<char *>(matrix) + tile * tile_bytes; };
    const auto load = [&](int tile, int stage) {
        const uint32_t to = stages + stage * S::kParts * S::kPart * 16, barrier = full + 8 * stage, bytes = bytes_of(tile);
        mbarrier_arrive_expect(barrier, bytes * S::kParts);
        bulk_load_hint(to, at(p.x, tile), bytes, barrier, policy);
        if constexpr (kKind == kAddRms) bulk_load_hint(to + S::kPart * 16, at(p.residual, tile), bytes, barrier, policy);
    };
#pragma unroll 1
    for (int stage = 0, tile = blockIdx.x; stage < S::kStages && tile < tiles; ++stage, tile += gridDim.x) load(tile, stage);
    Ring<S::kStages> ring;
#pragma unroll 1
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, ring.advance()) {
        const uint32_t from = stages + ring.stage * S::kParts * S::kPart * 16, bytes = bytes_of(tile);
        mbarrier_wait(done + 8 * ring.stage, ring.phase);
        bulk_store_hint(at(kKind == kAddRms ? p.x : p.y, tile), from, bytes, policy);
        if constexpr (kKind == kAddRms) bulk_store_hint(at(p.residual, tile), from + S::kPart * 16, bytes, policy);
        bulk_commit();
        const int ahead = tile + (S::kStages - 1) * int(gridDim.x);  // the tile that follows the one before this in its stage
        if (tile == int(blockIdx.x) || ahead >= tiles) continue;
        bulk_wait_read<1>();
        load(ahead, ring.before());
    }
    bulk_wait<0>();
}

template <class T, Kind kKind, int kWarps, int kVectors>
__device__ void consume(const Rows &p, int tiles, uint4 *stages, uint32_t full, uint32_t done, float (&slots)[2][kGroups]) {
    using S = Shape<kKind, kWarps, kVectors>;
    const int lane = threadIdx.x % S::kThreads, group = threadIdx.x / S::kThreads, vectors_of_row = p.columns / kWide;
    uint4 weight[kVectors], bias[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
        const int at = v * S::kThreads + lane;
        weight[v] = bias[v] = make_uint4(0, 0, 0, 0);
        if (kKind != kSoftmax && at < vectors_of_row) weight[v] = __ldg(static_cast<const uint4 *>(p.w) + at);
        if (kKind == kLayer && at < vectors_of_row) bias[v] = __ldg(static_cast<const uint4 *>(p.b) + at);
    }
    int turn = 0;
    Ring<S::kStages> ring;
#pragma unroll 1
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, ring.advance()) {
        uint4 *const row = stages + ring.stage * S::kParts * S::kPart + group * vectors_of_row;
        // Warps without a row wait too: an arrival before this would count in the phase of the tile that had the stage before.
        mbarrier_wait(full + 8 * ring.stage, ring.phase);
        if (tile * S::kRows + group < p.rows) {
            float values[kVectors][kWide];
            read_row<T, kKind, kWarps, kVectors>(values, row, row + S::kPart, vectors_of_row);
            normalise<kKind, kWarps, kVectors>(values, p, vectors_of_row, slots, turn);
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
                if constexpr (kKind != kSoftmax) {
                    float by[kWide], plus[kWide];
                    if constexpr (kKind == kLayer) stay_packed(weight[v]), stay_packed(bias[v]);  // nine warps have 168 registers a thread
                    unpack<T>(weight[v], by);
                    if constexpr (kKind == kLayer) unpack<T>(bias[v], plus);
#pragma unroll
                    for (int i = 0; i < kWide; ++i) {
                        if constexpr (kKind == kLayer) values[v][i] = values[v][i] * by[i] + plus[i];
                        else values[v][i] *= by[i];
                    }
                }
                const int at = v * S::kThreads + lane;
                if (at < vectors_of_row) row[at] = pack<T>(values[v]);
            }
        }
        fence_async_shared();
        __syncwarp();
        if (threadIdx.x % 32 == 0) mbarrier_arrive(done + 8 * ring.stage);
    }
}

template <class T, Kind kKind, int kWarps, int kVectors>
__global__ void __launch_bounds__(32 * (kGroups + 1), 1) over_rows(const Rows p, int tiles) {
    using S = Shape<kKind, kWarps, kVectors>;
    extern __shared__ __align__(128) uint4 stages[];
    __shared__ uint64_t barriers[2 * S::kStages];
    __shared__ float slots[2][kGroups];
    const uint32_t full = smem_address(barriers), done = full + 8 * S::kStages;
    if (threadIdx.x == 0) {
        for (int i = 0; i < S::kStages; ++i) mbarrier_init(full + 8 * i, 1), mbarrier_init(done + 8 * i, kGroups);
        fence_mbarrier_init();
    }
    __syncthreads();
    if (threadIdx.x >= 32 * kGroups) {
        if (elect_one()) produce<kKind, kWarps, kVectors>(p, tiles, smem_address(stages), full, done);
    } else {
        consume<T, kKind, kWarps, kVectors>(p, tiles, stages, full, done, slots);
    }
}

template <class T, Kind kKind, int kWarps, int kVectors>
const char *start(const Rows &p, cudaStream_t stream) {
    using S = Shape<kKind, kWarps, kVectors>;
    int device = 0, processors = 0;
    if (cudaGetDevice(&device) != cudaSuccess) return "reductions: no current device";
    if (cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess || processors < 1)
        return "reductions: the device does not tell its number of multiprocessors";
    const int tiles = (p.rows + S::kRows - 1) / S::kRows;
    Launch how;
    how.grid = dim3(tiles < processors ? tiles : processors), how.block = dim3(32 * (kGroups + 1));
    how.shared_bytes = S::kBytes, how.stream = stream;
    return launch(over_rows<T, kKind, kWarps, kVectors>, how, p, tiles);
}

// Warps of a row by its length: up to 64 numbers a thread, so that few rows need a barrier.
template <class T, Kind kKind>
const char *by_length(const Rows &p, cudaStream_t stream) {
    const int columns = p.columns;
    if (columns <= 1024) return start<T, kKind, 1, 4>(p, stream);
    if (columns <= 2048) return start<T, kKind, 1, 8>(p, stream);
    if (columns <= 4096) return start<T, kKind, 2, 8>(p, stream);
    if (columns <= 8192) return start<T, kKind, 4, 8>(p, stream);
    if (columns <= 16384) return start<T, kKind, 8, 8>(p, stream);
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
    if (p.rows == 0 || p.columns == 0) return 0;
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
