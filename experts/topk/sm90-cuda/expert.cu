// Exact top-k of every row of a matrix of fp32, fp16 or bf16, for NVIDIA Hopper (sm_90a): values of the input's type,
// indices int64, any order inside a row, any choice among equal values. Rows of 1 to 262,144 columns, k up to 2,048.
//
// Few and short rows are bound by latency (an almost empty kernel measures 3.5 us), many or long ones by memory. So: one
// launch, one read of the row, the keys stay in registers or shared memory (or only those that may win do, see 7), and a
// table chooses how many threads and blocks a row gets.
//   1. radix_select, wide_digit: the first 11 or 12 bits of the codes are counted in shared memory; every warp sums a
//      slice of the bins, and the warp whose slice holds the k-th code searches it with one shuffle scan.
//   2. range_narrowing: when the bin of the k-th code holds too many keys, the next digit spans the least to the greatest
//      of its codes, not the next bits: equal keys are recognized at once, clustered ones need one digit more.
//   3. block_scan: every key below that bin is a winner; places come from one scan over lanes and warps, without atomics.
//   4. staged_output: winners go to shared memory first and then to the output, by consecutive threads.
//   5. rank_select: the keys of the bin itself are ranked by comparing each with all.
//   6. cluster_reduce: a long row is spread over a cluster of up to 16 blocks. Each sends the sums of its 64 coarse bins
//      to all others; the bin of the k-th code then needs one reading of 64 fine bins per block. Every block writes its
//      winners; the first one collects the candidates through distributed shared memory and selects among them.
//   7. streamed_filter (stream.cuh): long rows in bulk are not held. Blocks read them in order with several loads in flight
//      and append the keys that beat the k-th best of those seen so far to a list in shared memory; a full list is cut to
//      its k best. One block per row, or a cluster whose lists are selected from as in 6.
// NaNs are ordered by their bits: above +inf when the sign is clear, below -inf otherwise.
// Measured on an H200 against flashinfer.top_k: see NOTES.md.
#include <cuda_runtime.h>

#include "klineage.h"
#include "select.cuh"
#include "stream.cuh"

namespace {

// One block per row.
template <int kBytes, int kThreads, int kVectors, int kBits, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks) block_kernel(const Problem p) {
    __shared__ Shared s;
    const long long row = blockIdx.x;
    const unsigned char *x = p.x + row * p.x_stride * kBytes;
    RowKeys<kBytes, kThreads, kVectors> keys(x, p.columns, 0, vectors_of<kBytes>(x, p.columns), dynamic_shared);
    block_select<kThreads, kBits, true>(s, reinterpret_cast<Scratch *>(dynamic_shared + p.key_bytes), keys,
                                        Interval{0, kBytes * 8, p.k, p.columns}, 0, Output<kBytes>(p, row));
}

// A cluster per row.
template <int kBytes, int kThreads, int kVectors, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks) cluster_kernel(const Problem p) {
    constexpr int kBits = 12;
    __shared__ Shared s;
    __shared__ ClusterShared c;
    Scratch *scratch = reinterpret_cast<Scratch *>(dynamic_shared + p.key_bytes);
    sm90::cluster_arrive();
    const int blocks = static_cast<int>(sm90::cluster_size()), rank = static_cast<int>(sm90::cluster_rank());
    const long long row = blockIdx.x / blocks;
    const unsigned char *x = p.x + row * p.x_stride * kBytes;
    const int vectors = vectors_of<kBytes>(x, p.columns), share = (vectors + blocks - 1) / blocks;
    RowKeys<kBytes, kThreads, kVectors> keys(x, p.columns, rank * share, min((rank + 1) * share, vectors),
                                                      dynamic_shared);
    cluster_select<kThreads, kBits>(s, c, scratch, keys, Interval{0, kBytes * 8, p.k, p.columns}, blocks, rank,
                                    Output<kBytes>(p, row));
}

// Few fp32 rows of up to 4,096 columns that start at 16-byte boundaries (stages/09-rank_select.cu): 1,024 threads of four
// keys each, 12 bits of the code per digit, k up to 1,024. Without partial vectors, other types and a narrowed digit it
// needs fewer instructions than block_kernel.
namespace short_rows {

constexpr int kThreads = 1024, kKeys = 4, kBits = 12, kBins = 1 << kBits;
constexpr int kMaxK = 1024, kMinColumns = 2049, kMaxColumns = kThreads * kKeys, kMaxRows = 132;

struct Threshold {
    int bin;    // the digit that holds the k-th smallest code
    int below;  // codes with a smaller digit
    int count;  // codes with this digit
};

struct Shared {
    int histogram[kBins];
    int warp_sum[32];
    Threshold threshold;
    int warp_found[32];                                // winners in the low half, candidates in the high half
    alignas(16) unsigned candidate_key[kRankMax + 4];  // the undecided bits of the code, then the place in this list
    uint2 found[1024 + kRankMax];                      // code and column of the winners, then of the candidates
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

// One block per row. kKeys keys per thread stay in registers.
__global__ void __launch_bounds__(kThreads, 1) kernel(const Problem p) {
    __shared__ Shared s;
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int columns = p.columns, k = p.k;
    const unsigned *x = reinterpret_cast<const unsigned *>(p.x) + blockIdx.x * p.x_stride;
    unsigned *values = reinterpret_cast<unsigned *>(p.values) + blockIdx.x * p.values_stride;
    long long *indices = p.indices + blockIdx.x * p.indices_stride;

    unsigned code[kKeys];
    unsigned valid = 0;  // bit i: key i exists
    const auto column_of = [&](int i) {
        return thread * 4 + i;
    };
    uint4 v = make_uint4(0, 0, 0, 0);
    if (column_of(0) < columns) {
        v = __ldcs(reinterpret_cast<const uint4 *>(x + column_of(0)));
        valid = 15u;
    }
    code[0] = encode32(v.x), code[1] = encode32(v.y), code[2] = encode32(v.z), code[3] = encode32(v.w);

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
            if (valid != 0 && (first || (code[i] & above) == prefix))
                atomicAdd(&s.histogram[code[i] >> digit_shift & digit_mask], 1);
        __syncthreads();
        t = find_threshold(s, need, warp, lane);
        need -= t.below;
        shift = digit_shift;
        prefix |= static_cast<unsigned>(t.bin) << shift;
        return t.count == need || t.count <= kRankMax || shift == 0;
    };
    if (!next_digit(true))
        while (!next_digit(false)) {}

    // Codes below the prefix win; those that share it are candidates for the last `need` places.
    const unsigned last = prefix | ((1u << shift) - 1);
    const bool take_all = t.count == need, rank = !take_all && shift > 0 && t.count <= kRankMax;
    unsigned my_wins = 0, my_ties = 0;  // bit i: key i
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
        if (code[i] < prefix) my_wins |= 1u << i;
        if (code[i] <= last) my_ties |= 1u << i;
    }
    my_wins = valid & (take_all ? my_ties : my_wins);
    my_ties &= valid & ~my_wins;
    const int found = __popc(my_wins) + (__popc(my_ties) << 16);  // winners in the low half, candidates in the high half
    const int running = warp_inclusive_scan(found, lane);
    if (lane == 31) s.warp_found[warp] = running;
    __syncthreads();
    const int base = __reduce_add_sync(kFull, lane < warp ? s.warp_found[lane] : 0) + running - found;
    const int winners = k - need;  // places for codes below the prefix
    int win_at = base & 0xffff, tie_at = winners + (base >> 16);
    const int capacity = rank ? 1024 + kRankMax : k;  // if not all candidates are needed, then they are all equal
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
        const bool win = my_wins >> i & 1, tie = my_ties >> i & 1;
        const int at = win ? win_at : tie_at;
        if ((win || tie) && at < capacity) s.found[at] = make_uint2(code[i], column_of(i));
        if (tie && rank) s.candidate_key[at - winners] = code[i] << (32 - shift) | (at - winners);
        win_at += win;
        tie_at += tie;
    }
    if (rank && thread < 4) s.candidate_key[t.count + thread] = ~0u;  // pads the last vector
    __syncthreads();
#pragma unroll 1
    for (int at = thread; at < (rank ? winners : k); at += kThreads) {
        const uint2 found = s.found[at];
        values[at] = encode32(found.x);
        indices[at] = found.y;
    }
    if (!rank) return;

    // kLanes lanes per candidate: its rank is the number of smaller keys, and its place in the output.
    constexpr int kLanes = 4;
    for (int c = thread / kLanes; c < (t.count + 31) / 32 * 32; c += kThreads / kLanes) {
        const unsigned key = s.candidate_key[min(c, t.count)];
        int before = 0;
#pragma unroll 1
        for (int j = thread % kLanes * 4; j < t.count; j += kLanes * 4) {
            const uint4 other = *reinterpret_cast<const uint4 *>(s.candidate_key + j);
            before += (other.x < key) + (other.y < key) + (other.z < key) + (other.w < key);
        }
#pragma unroll
        for (int step = 1; step < kLanes; step *= 2) before += __shfl_xor_sync(kFull, before, step);
        if (thread % kLanes == 0 && c < t.count && before < need) {
            const uint2 found = s.found[winners + c];
            values[winners + before] = encode32(found.x);
            indices[winners + before] = found.y;
        }
    }
}

bool takes(const Problem &p, int bytes, bool aligned, int64_t rows) {
    return bytes == 4 && aligned && p.columns % 4 == 0 && p.columns >= kMinColumns && p.columns <= kMaxColumns &&
           p.k <= kMaxK && rows <= kMaxRows;
}

cudaError_t launch(const Problem &problem, int64_t rows, cudaStream_t stream) {
    cudaLaunchConfig_t launch{};
    launch.gridDim = dim3(static_cast<unsigned>(rows));
    launch.blockDim = dim3(kThreads);
    launch.stream = stream;
    return cudaLaunchKernelEx(&launch, kernel, problem);
}

}  // namespace short_rows

using Kernel = void (*)(Problem);

// A kernel by the bytes of a key: [0] for 2, [1] for 4.
struct Config {
    Kernel kernel[2];
    int threads, vectors, bits;  // vectors of 16 bytes that a thread holds in registers; 0: they are in shared memory
    bool cluster;
    int capacity;  // of the list of a streamed row; 0: the whole row is held
};

template <int kThreads, int kVectors, int kBits, int kBlocks>
constexpr Config one_block() {
    return {{block_kernel<2, kThreads, kVectors, kBits, kBlocks>,
             block_kernel<4, kThreads, kVectors, kBits, kBlocks>},
            kThreads, kVectors, kBits, false, 0};
}
template <int kThreads, int kVectors, int kBlocks>
constexpr Config one_cluster() {
    return {{cluster_kernel<2, kThreads, kVectors, kBlocks>, cluster_kernel<4, kThreads, kVectors, kBlocks>},
            kThreads, kVectors, 12, true, 0};
}
template <int kThreads, int kBits, int kAhead, int kBlocks, int kCapacity>
constexpr Config one_stream() {
    return {{stream_kernel<2, kThreads, kBits, kAhead, kBlocks>, stream_kernel<4, kThreads, kBits, kAhead, kBlocks>},
            kThreads, 0, kBits, false, kCapacity};
}
template <int kThreads, int kAhead, int kBlocks, int kCapacity>
constexpr Config one_stream_cluster() {
    return {{stream_cluster_kernel<2, kThreads, kAhead, kBlocks>, stream_cluster_kernel<4, kThreads, kAhead, kBlocks>},
            kThreads, 0, 12, true, kCapacity};
}

constexpr Config kConfigs[] = {
    one_block<128, 4, 10, 8>(),
    one_block<256, 1, 11, 4>(),
    one_block<512, 1, 11, 2>(),
    one_block<512, 2, 12, 2>(),
    one_block<512, 0, 12, 2>(),
    one_block<1024, 1, 12, 1>(),
    one_block<1024, 2, 12, 1>(),
    one_block<1024, 4, 12, 1>(),
    one_cluster<512, 0, 2>(),
    one_cluster<1024, 1, 1>(),
    one_cluster<1024, 0, 1>(),
    // The capacities fill the shared memory of a multiprocessor at 4, 2, 1 and 2 blocks (the first at k up to 1,024).
    one_stream<256, 11, 4, 4, 5120>(),
    one_stream<512, 12, 4, 2, 11264>(),
    one_stream<1024, 12, 4, 1, 24576>(),
    one_stream_cluster<512, 4, 2, 9216>(),
};
// Places in kConfigs: threads, then vectors per thread.
enum : int {
    kBlock128x4, kBlock256x1, kBlock512x1, kBlock512x2, kBlock512Shared, kBlock1024x1, kBlock1024x2, kBlock1024x4,
    kCluster512Shared, kCluster1024x1, kCluster1024Shared,
    kStream256, kStream512, kStream1024, kStreamCluster512,
};
constexpr int kNumConfigs = sizeof(kConfigs) / sizeof(kConfigs[0]);

// How a matrix is selected from: a kernel, and how many blocks select from one row.
struct Plan {
    int config, blocks;

    // Vectors of 16 bytes that a thread has when a row touches `vectors` of them.
    int64_t steps(int64_t vectors) const {
        const int64_t threads = int64_t{kConfigs[config].threads} * blocks;
        return (vectors + threads - 1) / threads;
    }
};

constexpr int64_t kWave = 132;  // multiprocessors: so many blocks of 1,024 threads run at once

// Rows that one block holds best.
Plan choose_block(int64_t rows, int64_t vectors) {
    const bool few = rows <= kWave;
    if (vectors <= 256) return {kBlock256x1, 1};
    if (vectors <= 512) return {few ? kBlock512x1 : kBlock128x4, 1};
    if (vectors <= 1024) return {few ? kBlock1024x1 : kBlock512x2, 1};
    if (vectors <= 2048) return {few ? kBlock1024x2 : kBlock512Shared, 1};
    return {few ? kBlock1024x4 : kBlock512Shared, 1};
}

// Longer rows, or few of them: over a cluster.
Plan choose_cluster(int64_t rows, int64_t vectors) {
    if (vectors <= 4096) return {kCluster1024x1, 8};
    if (vectors <= 16384 && rows <= 8) return {kCluster1024x1, 16};
    if (vectors <= 8192) return {kCluster512Shared, 2};
    if (vectors <= 16384) return {kCluster512Shared, rows <= 32 ? 8 : rows <= kWave / 2 ? 2 : 4};
    if (rows <= 16) return {kCluster512Shared, 16};
    if (vectors <= 32768) return {kCluster512Shared, 8};
    return {kCluster1024Shared, 8};
}

// The plan that holds whole rows, from the measurements in NOTES.md.
Plan choose_resident(int64_t rows, int64_t vectors) {
    const bool block = vectors <= 2048 || (vectors <= 4096 && rows > 16);
    return block ? choose_block(rows, vectors) : choose_cluster(rows, vectors);
}

// Which matrices are streamed, and by which plan; the first line that fits counts. Fitted to bench.cu on an H200 (NOTES.md);
// between 34 and 63 rows, and for 16-bit rows of 4,096 vectors between 133 and 255 rows, nothing was measured.
struct StreamedRange {
    int64_t least_rows, least_vectors, most_k;
    Plan plan;
};
constexpr StreamedRange kStreamed[] = {
    {3 * kWave + 1, 4096, 512, {kStream256, 1}},
    {kWave + 1, 4096, 1024, {kStream512, 1}},
    {kWave + 1, 8192, kMaxK, {kStream512, 1}},
    {kWave / 2 + 1, 8192, kMaxK, {kStream1024, 1}},
    {kWave / 4 + 1, 16384, kMaxK, {kStreamCluster512, 2}},
};

// Lists want what a block of sm_90 may have, 227 KB of shared memory.
bool can_stream() {
    static const bool enough = [] {
        int device = 0, bytes = 0;
        cudaGetDevice(&device);
        return cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) == cudaSuccess && bytes >= 227 << 10;
    }();
    return enough;
}

Plan choose(int64_t rows, int64_t vectors, int64_t k) {
    if (!can_stream()) return choose_resident(rows, vectors);
    for (const StreamedRange &range : kStreamed)
        if (rows >= range.least_rows && vectors >= range.least_vectors && k <= range.most_k) return range.plan;
    return choose_resident(rows, vectors);
}

// Keys of a streamed row before the first selection. A larger slice makes a better threshold and a dearer selection.
int slice_of(int k, int capacity) {
    const int slice = 6 * k < 4096 ? 4096 : 6 * k;
    return slice < capacity ? slice : capacity;
}

cudaError_t launch(const Plan &plan, int bytes, int64_t rows, int64_t vectors, Problem problem, cudaStream_t stream) {
    const Config &config = kConfigs[plan.config];
    const Kernel kernel = config.kernel[bytes == 4];
    if (config.vectors > 0 && plan.steps(vectors) > config.vectors) return cudaErrorInvalidConfiguration;
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(plan.blocks), 1, 1};
    cudaLaunchConfig_t launch{};
    launch.gridDim = dim3(static_cast<unsigned>(rows * plan.blocks));
    launch.blockDim = dim3(config.threads);
    if (config.capacity > 0) {
        problem.key_bytes = config.capacity * static_cast<int>(sizeof(uint2));
        problem.slice = slice_of(problem.k, config.capacity);
    } else {
        problem.key_bytes = config.vectors > 0 ? 0 : static_cast<int>(plan.steps(vectors)) * config.threads * 16;
    }
    const size_t bins = sizeof(int) << config.bits, winners = sizeof(uint2) * problem.k;
    launch.dynamicSmemBytes = problem.key_bytes + (bins > winners ? bins : winners);
    launch.stream = stream;
    const int shared = static_cast<int>(launch.dynamicSmemBytes);
    cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    if (config.cluster && status == cudaSuccess) {
        launch.attrs = &attribute, launch.numAttrs = 1;
        status = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    }
    return status == cudaSuccess ? cudaLaunchKernelEx(&launch, kernel, problem) : status;
}

int run_plan(const klineage_call *call, const Plan *forced) {
    KLINEAGE_REQUIRE(call, call->abi_version == KLINEAGE_ABI_VERSION, "top-k: unknown ABI version");
    KLINEAGE_REQUIRE(call, call->num_inputs == 1 && call->num_outputs == 2, "top-k: needs x -> values, indices");
    const klineage_tensor &x = call->inputs[0], &values = call->outputs[0], &indices = call->outputs[1];
    KLINEAGE_REQUIRE(call, x.num_dims == 2 && values.num_dims == 2 && indices.num_dims == 2, "top-k: tensors are 2-D");
    const bool wide = x.dtype == KLINEAGE_FLOAT32, half = x.dtype == KLINEAGE_FLOAT16 || x.dtype == KLINEAGE_BFLOAT16;
    KLINEAGE_REQUIRE(call, (wide || half) && values.dtype == x.dtype && indices.dtype == KLINEAGE_INT64,
                     "top-k: fp32, fp16 or bf16, values of the input's type, int64 indices");
    const int64_t rows = x.shape[0], columns = x.shape[1], k = values.shape[1];
    KLINEAGE_REQUIRE(call, values.shape[0] == rows && indices.shape[0] == rows && indices.shape[1] == k,
                     "top-k: output shapes differ from the input's rows or from each other");
    KLINEAGE_REQUIRE(call, columns >= 1 && columns <= kMaxColumns, "top-k: supports rows of 1 to 262144 columns");
    KLINEAGE_REQUIRE(call, rows >= 1 && rows <= kMaxRows, "top-k: supports 1 to 134217727 rows");
    KLINEAGE_REQUIRE(call, k >= 1 && k <= kMaxK && k <= columns, "top-k: supports k from 1 to min(2048, columns)");
    KLINEAGE_REQUIRE(call, x.stride[1] == 1 && values.stride[1] == 1 && indices.stride[1] == 1,
                     "top-k: the last dimension must be contiguous");
    const int bytes = wide ? 4 : 2;
    const bool aligned = reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && x.stride[0] * bytes % 16 == 0;
    const int64_t vectors = (columns * bytes + 15) / 16 + !aligned;  // of 16 bytes, that a row touches at most
    const Problem problem{static_cast<const unsigned char *>(x.data), static_cast<unsigned char *>(values.data),
                          static_cast<long long *>(indices.data), static_cast<int>(columns), static_cast<int>(k), 0, 0,
                          x.stride[0], values.stride[0], indices.stride[0]};
    const auto stream = static_cast<cudaStream_t>(call->stream);
    const cudaError_t status = !forced && short_rows::takes(problem, bytes, aligned, rows)
                                   ? short_rows::launch(problem, rows, stream)
                                   : launch(forced ? *forced : choose(rows, vectors, k), bytes, rows, vectors, problem, stream);
    KLINEAGE_REQUIRE(call, status == cudaSuccess, cudaGetErrorString(status));
    return 0;
}

}  // namespace

extern "C" int run(const klineage_call *call) { return run_plan(call, nullptr); }
