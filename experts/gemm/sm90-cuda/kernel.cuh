// The core of the GEMM expert for sm_90a: C[M,N] = A[M,K] B[K,N] with fp32 sums, as a template over tiles and layouts.
//
// One producer thread brings slices of 64 k (128 bytes) by TMA into a ring of stages; one or two consumer warpgroups
// multiply with wgmma. CTAs are persistent: a banded raster gives them tiles, and every second wave walks K backwards,
// so that it starts with what is still in the L2 cache. A cluster shares operands by multicast (each CTA loads its part
// and sends it to all that need it), or its CTAs split K and add their sums through distributed shared memory.
// Results leave warp by warp through stmatrix and TMA stores; the last kDefer groups of them under the next tile's products.
// Tails need no code: TMA fills with zeros what lies outside and does not store it.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "klineage/sm90/v1/cluster.cuh"
#include "klineage/sm90/v1/ldmatrix.cuh"
#include "klineage/sm90/v1/mbarrier.cuh"
#include "klineage/sm90/v1/tma.cuh"
#include "klineage/sm90/v1/wgmma.cuh"

namespace gemm {
using namespace klineage::sm90;

constexpr int kRow = 128;            // bytes of a swizzle row: 64 elements
constexpr int kTileK = 64;           // k of a stage
constexpr int kMaxShared = 232448;   // bytes of shared memory that a CTA may have
constexpr int kBarrierBytes = 256;

#ifndef GEMM_NARROW_BLOCKS
#define GEMM_NARROW_BLOCKS 0  // off; see NOTES.md
#endif
// Columns of a block of an operand in rows of M or N, one swizzle row: 64 (128 bytes), or 32 (64 bytes) where the tile has half a block left over.
__host__ __device__ constexpr int block_columns(int extent) { return extent % 64 == 32 && extent <= GEMM_NARROW_BLOCKS ? 32 : 64; }
__host__ __device__ constexpr int blocks_of(int extent) { return (extent + block_columns(extent) - 1) / block_columns(extent); }

// A kernel. kShareA, kShareB: CTAs of a cluster that share A (neighbours along N) or B (along M); kSplit: CTAs that share
// one tile, each with its part of K. Major: 0 = rows of K, 1 = rows of M or N. kDefer: groups of results stored late.
template <class T_, int kM_, int kN_, int kWarpgroups_, int kShareA_ = 1, int kShareB_ = 1, int kSplit_ = 1, int kDefer_ = 0,
          int kMajorA_ = 0, int kMajorB_ = 1, int kCtasPerSm_ = 1>
struct Config {
    using T = T_;
    static constexpr int kM = kM_, kN = kN_, kWarpgroups = kWarpgroups_, kSplit = kSplit_, kDefer = kDefer_;
    static constexpr int kShareA = kShareA_, kShareB = kShareB_, kShare = kShareA * kShareB, kCluster = kShare * kSplit;
    static constexpr int kMajorA = kMajorA_, kMajorB = kMajorB_, kCtasPerSm = kCtasPerSm_;
    static constexpr bool kTurned = false;
    static constexpr int kThreads = kWarpgroups * 128 + (kWarpgroups == 1 ? 32 : 128);
    static constexpr int kBlocksM = kM / (64 * kWarpgroups);        // 64-row products of a warpgroup
    static constexpr int kBytesA = kM * kRow, kBytesB = (kMajorB ? blocks_of(kN) * block_columns(kN) : kN) * kRow;
    static constexpr int kStageBytes = kBytesA + kBytesB;
    static constexpr int kBoxN = kN % 64 ? 32 : 64, kBoxBytes = 16 * kBoxN * 2;  // a warp's output box: 16 rows
    static constexpr int kBoxes = kBlocksM * kN / kBoxN, kStaged = 4096 / kBoxBytes < kBoxes ? 4096 / kBoxBytes : kBoxes;
    static constexpr int kGroups = (kBoxes + kStaged - 1) / kStaged;
    static constexpr int kWarpStaging = kStaged * kBoxBytes, kStaging = kSplit > 1 ? 0 : kWarpgroups * 4 * kWarpStaging;
    static constexpr int kFits = (kMaxShared / kCtasPerSm - 1024 * kCtasPerSm - kBarrierBytes - kStaging) / kStageBytes;
    static constexpr int kStages = kFits > 8 ? 8 : kFits;
    static constexpr int kSharedBytes = 1024 + kStages * kStageBytes + kStaging + kBarrierBytes;
    static constexpr int kPitch = kN + 8;  // floats of a row of partial sums: no bank conflicts
    static_assert(kShare == 1 || kSplit == 1, "a cluster shares an operand or splits K");
    static_assert(kSplit == 1 || kM * kPitch * 4 <= kStages * kStageBytes, "partial sums fit the ring");
    static_assert(kDefer == 0 || kSplit == 1, "split tiles have no next tile");
    static_assert(kStages >= 2 && kDefer <= kGroups, "");
};

// A kernel of c^T = b^T a^T for row-major operands: wgmma's rows are columns of C, kM to a tile, and its columns are kN rows of C, which a's rows of K
// give in any multiple of 8. The kernel's A is b, its M is N, and the reverse. A tile is staged as a whole, as kN rows of 64 columns for each block.
template <class T, int kM, int kN, int kWarpgroups, int kShareB>
struct Turned : Config<T, kM, kN, kWarpgroups, 1, kShareB, 1, 0, 1, 0> {
    using Plain = Config<T, kM, kN, kWarpgroups, 1, kShareB, 1, 0, 1, 0>;
    static constexpr bool kTurned = true;
    static constexpr int kBlockBytes = kN * kRow, kStaging = kM / 64 * kBlockBytes;
    static constexpr int kFits = (kMaxShared - 1024 - kBarrierBytes - kStaging) / Plain::kStageBytes;
    static constexpr int kStages = kFits > 8 ? 8 : kFits;
    static constexpr int kSharedBytes = 1024 + kStages * Plain::kStageBytes + kStaging + kBarrierBytes;
    static_assert(kStages >= 2 && kN % 16 == 0 && kBlockBytes % 1024 == 0, "");
};

// What a launch passes by value. group: cluster rows of a raster band; alternate, snake: 0 or 1.
struct Arguments {
    CUtensorMap a, b, c;
    void *out;
    int m, n, k, ldc, group, alternate, snake, lag, wide_a, wide_b;
};

// Tiles in bands of `group` rows, column by column inside a band; with snake every second band backwards. A permutation.
__device__ __forceinline__ int2 tile_at(int index, int rows, int columns, int group, int snake) {
    const int band = index / (group * columns), inside = index % (group * columns), height = max(1, min(group, rows - band * group));
    const int column = inside / height;
    return make_int2(band * group + inside % height, snake && band % 2 ? columns - 1 - column : column);
}

// One operand's slice of a stage: kExtent rows of K, or k rows of kExtent in blocks of columns; with kShare > 1 this CTA
// brings only its `part` (of the rows, or of the k), for all CTAs of the mask.
template <int kMajor, int kExtent, int kShare>
__device__ __forceinline__ void load_operand(uint32_t to, const CUtensorMap *map, uint32_t full, int k, int at, int part, uint16_t ctas, bool wide) {
    if constexpr (kMajor == 0) {
        constexpr int kRows = kExtent / kShare;
        if constexpr (kShare == 1) tma_load_2d(to, map, full, k, at);
        else tma_load_2d_multicast(to + part * kRows * kRow, map, full, k, at + part * kRows, ctas);
    } else {
        constexpr int kColumns = block_columns(kExtent), kBlocks = blocks_of(kExtent), kDepth = kTileK / kShare;
        to += part * kBlocks * kDepth * kColumns * 2, k += part * kDepth;
        if (wide) {
            if constexpr (kShare == 1) tma_load_3d(to, map, full, 0, k, at / kColumns);
            else tma_load_3d_multicast(to, map, full, 0, k, at / kColumns, ctas);
            return;
        }
#pragma unroll
        for (int i = 0; i < kBlocks; ++i, to += kDepth * kColumns * 2)
            if constexpr (kShare == 1) tma_load_2d(to, map, full, at + kColumns * i, k);
            else tma_load_2d_multicast(to, map, full, at + kColumns * i, k, ctas);
    }
}

// Descriptor of an operand at the first stage, and what the products at k = 16 i add to it.
template <int kMajor, int kExtent, int kShare>
__device__ __forceinline__ uint64_t operand_descriptor(uint32_t base, int row) {
    constexpr int kDepth = kTileK / kShare;
    if (kMajor == 1 && block_columns(kExtent) == 32) return matrix_descriptor<Swizzle::k64>(base + row / 32 * kDepth * 64, kDepth * 64, 512);
    return kMajor == 0 ? matrix_descriptor(base + row * kRow, 16, 1024) : matrix_descriptor(base + row / 64 * kDepth * kRow, kDepth * kRow, 1024);
}
template <int kMajor, int kExtent, int kShare>
__host__ __device__ constexpr int descriptor_step(int i) {
    constexpr int kDepth = kTileK / kShare, kBlocks = blocks_of(kExtent), kSteps = kDepth / 16, kBytes = block_columns(kExtent) * 2;
    return kMajor == 0 ? i * 2 : (i / kSteps * kBlocks * kDepth * kBytes + i % kSteps * 16 * kBytes) / 16;
}

// The place in the ring, and the parity of its current round.
template <int kStages>
struct Ring {
    int stage = 0;
    uint32_t phase = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == kStages) stage = 0, phase ^= 1;
    }
    __device__ __forceinline__ int previous() const { return stage == 0 ? kStages - 1 : stage - 1; }
};

// What every role of a CTA knows: its tiles, and its part of K.
template <class C>
struct Schedule {
    int rows, columns, first, stride, tiles, rank, part_a, part_b, begin, steps, group, snake;
    __device__ __forceinline__ explicit Schedule(const Arguments &x) : group(x.group), snake(x.snake) {
        constexpr int kRows = C::kM * C::kShareB, kColumns = C::kN * C::kShareA;
        rows = (x.m + kRows - 1) / kRows, columns = (x.n + kColumns - 1) / kColumns, tiles = rows * columns;
        first = blockIdx.x / C::kCluster, stride = gridDim.x / C::kCluster, rank = blockIdx.x % C::kCluster;
        part_a = C::kShareA > 1 ? rank % C::kShareA : 0, part_b = C::kShareB > 1 ? rank / C::kShareA : 0;
        const int all = (x.k + kTileK - 1) / kTileK, part = C::kSplit > 1 ? rank : 0;
        begin = all * part / C::kSplit, steps = all * (part + 1) / C::kSplit - begin;
    }
    // Row and column of C where this CTA's tile begins.
    __device__ __forceinline__ int2 at(int t) const {
        const int2 tile = tile_at(t, rows, columns, group, snake);
        return make_int2((tile.x * C::kShareB + part_b) * C::kM, (tile.y * C::kShareA + part_a) * C::kN);
    }
    // The CTAs that have this one's slice of A, and of B: rank = kShareA (place along M) + place along N.
    __device__ __forceinline__ uint16_t same_a() const { return ((1 << C::kShareA) - 1) << (part_b * C::kShareA); }
    __device__ __forceinline__ uint16_t same_b() const { return ((1 << C::kShare) - 1) / ((1 << C::kShareA) - 1) << part_a; }
};

template <class C>
__device__ __forceinline__ void produce(const Arguments &x, const Schedule<C> &my, int2 at, uint32_t base, uint32_t full, uint32_t empty) {
    const uint16_t same_a = my.same_a(), same_b = my.same_b();
    Ring<C::kStages> ring;
    int backward = 0;
#pragma unroll 1
    for (int t = my.first; t < my.tiles; t += my.stride, backward ^= x.alternate, at = my.at(t)) {
#pragma unroll 1
        for (int step = 0; step < my.steps; ++step, ring.advance()) {
            const int k = (my.begin + (backward ? my.steps - 1 - step : step)) * kTileK;
            const uint32_t to = base + ring.stage * C::kStageBytes, barrier = full + 8 * ring.stage;
            mbarrier_wait(empty + 8 * ring.stage, ring.phase ^ 1);
            mbarrier_arrive_expect(barrier, C::kStageBytes);
            load_operand<C::kMajorA, C::kM, C::kShareA>(to, &x.a, barrier, k, at.x, my.part_a, same_a, x.wide_a);
            load_operand<C::kMajorB, C::kN, C::kShareB>(to + C::kBytesA, &x.b, barrier, k, at.y, my.part_b, same_b, x.wide_b);
        }
    }
}

// Sends the boxes of one group of a warp's results off. packed(box, i): register i of a box, two columns of a row.
template <class C, int kGroup, class F>
__device__ __forceinline__ void store_group(const Arguments &x, uint32_t staging, int row, int column, F packed) {
    const int lane = threadIdx.x % 32;
    if (lane == 0) bulk_wait_read<0>();  // the group before has left the buffers
    __syncwarp();
    const uint32_t chunk = C::kBoxN == 64 ? (lane & 7) ^ (lane >> 4) : (lane >> 1 & 3) ^ (lane >> 4);
    const uint32_t to = staging + (lane & 15) * C::kBoxN * 2;
#pragma unroll
    for (int b = 0; b < C::kStaged; ++b)
        if constexpr (true) {
            const int box = kGroup * C::kStaged + b;
            if (box >= C::kBoxes) break;
#pragma unroll
            for (int q = 0; q < C::kBoxN / 16; ++q)
                stmatrix_x4(to + b * C::kBoxBytes + ((chunk ^ (2 * q)) << 4), packed(box, 4 * q), packed(box, 4 * q + 1),
                            packed(box, 4 * q + 2), packed(box, 4 * q + 3));
        }
    fence_async_shared();
    __syncwarp();
    if (lane == 0) {
#pragma unroll
        for (int b = 0; b < C::kStaged; ++b) {
            const int box = kGroup * C::kStaged + b;
            if (box >= C::kBoxes) break;
            constexpr int kAcross = C::kN / C::kBoxN;
            tma_store_2d(&x.c, staging + b * C::kBoxBytes, column + box % kAcross * C::kBoxN, row + box / kAcross * 64);
        }
        bulk_commit();
    }
    __syncwarp();
}

// Registers of a box out of the sums.
template <class C>
__device__ __forceinline__ uint32_t packed_sum(const float (&sum)[C::kBlocksM][C::kN / 2], int box, int i) {
    constexpr int kAcross = C::kN / C::kBoxN;
    const float *d = &sum[box / kAcross][box % kAcross * C::kBoxN / 2 + 2 * i];
    return pack<typename C::T>(d[0], d[1]);
}

// The sums of one tile from the stages that the producer fills; `between` runs under the products of each step.
template <class C, class F>
__device__ __forceinline__ void multiply(float (&sum)[C::kBlocksM][C::kN / 2], int steps, Ring<C::kStages> &ring, uint64_t a, uint64_t b,
                                         uint32_t full, uint32_t empty_mapped, bool signals, F between) {
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        mbarrier_wait(full + 8 * ring.stage, ring.phase);
        const uint64_t offset = uint64_t(ring.stage * (C::kStageBytes / 16));
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kTileK / 16; ++i)
#pragma unroll
            for (int block = 0; block < C::kBlocksM; ++block) {
                constexpr int kNext = (C::kMajorA ? kTileK / C::kShareA : 64) * kRow / 16;  // the next 64 rows of A
                Wgmma<typename C::T, C::kN>::template ss<C::kMajorA, C::kMajorB>(
                    sum[block], a + offset + block * kNext + descriptor_step<C::kMajorA, C::kM, C::kShareA>(i),
                    b + offset + descriptor_step<C::kMajorB, C::kN, C::kShareB>(i), i ? 1 : step);
            }
        wgmma_commit();
        between(step);
        if (step) {
            wgmma_wait<1>();  // the previous step is complete; this one runs on
            mbarrier_arrive_mapped_if(empty_mapped + 8 * ring.previous(), signals);
        }
        ring.advance();
    }
    wgmma_wait<0>();
#pragma unroll
    for (int block = 0; block < C::kBlocksM; ++block) pin(sum[block]);
    mbarrier_arrive_mapped_if(empty_mapped + 8 * ring.previous(), signals);
}

// A CTA's part of a tile whose K is split: partial sums go to the ring's memory, each CTA adds and stores its rows.
template <class C>
__device__ __forceinline__ void reduce_split(const Arguments &x, const float (&sum)[C::kBlocksM][C::kN / 2], uint32_t base, int2 at) {
    const int lane = threadIdx.x % 32, top = threadIdx.x / 128 * C::kBlocksM * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4;
    named_barrier_sync(1, C::kWarpgroups * 128);  // nobody reads a stage any more
#pragma unroll
    for (int block = 0; block < C::kBlocksM; ++block)
#pragma unroll
        for (int i = 0; i < C::kN / 2; i += 2) {
            const int row = top + block * 64 + i % 4 * 4, column = i / 4 * 8 + lane % 4 * 2;
            asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(base + (row * C::kPitch + column) * 4), "f"(sum[block][i]), "f"(sum[block][i + 1]) : "memory");
        }
    cluster_sync();
    constexpr int kRows = C::kM / C::kSplit, kChunks = C::kN / 8;
    const int rank = blockIdx.x % C::kSplit;
#pragma unroll 2
    for (int i = threadIdx.x; i < kRows * kChunks; i += C::kWarpgroups * 128) {
        const int row = rank * kRows + i / kChunks, column = i % kChunks * 8;
        float total[8] = {};
#pragma unroll
        for (int part = 0; part < C::kSplit; ++part) {
            const uint32_t from = map_to_cta(base + (row * C::kPitch + column) * 4, part);
            const uint4 low = load_cluster_x4(from), high = load_cluster_x4(from + 16);
            const uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
            for (int j = 0; j < 8; ++j) total[j] += __uint_as_float(words[j]);
        }
        using T = typename C::T;
        if (at.x + row < x.m && at.y + column < x.n)
            *reinterpret_cast<uint4 *>(static_cast<T *>(x.out) + int64_t(at.x + row) * x.ldc + at.y + column) =
                make_uint4(pack<T>(total[0], total[1]), pack<T>(total[2], total[3]), pack<T>(total[4], total[5]), pack<T>(total[6], total[7]));
    }
}

// A warpgroup's blocks of a turned tile, from the column `at.x` and the row `at.y` of C on: transposed on their way to the staging, one store each.
template <class C>
__device__ __forceinline__ void store_turned(const Arguments &x, const float (&sum)[C::kBlocksM][C::kN / 2], uint32_t staging, int2 at) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, barrier = 3 + threadIdx.x / 128;
    if (threadIdx.x % 128 == 0) bulk_wait_read<0>();  // the tile before has left the staging
    __syncwarp();
    named_barrier_sync(barrier, 128);
    // Lane 8 i + r gives row r of matrix i of four: rows of C in i / 2, 16-byte chunks of 8 columns in i % 2.
    const uint32_t to = staging + (lane / 16 * 8 + lane % 8) * kRow + (((2 * warp + lane / 8 % 2) ^ lane % 8) << 4);
#pragma unroll
    for (int block = 0; block < C::kBlocksM; ++block)
#pragma unroll
        for (int q = 0; q < C::kN / 16; ++q) {
            using T = typename C::T;
            const float *d = &sum[block][8 * q];
            stmatrix_x4_trans(to + block * C::kBlockBytes + q * 16 * kRow, pack<T>(d[0], d[1]), pack<T>(d[2], d[3]), pack<T>(d[4], d[5]),
                              pack<T>(d[6], d[7]));
        }
    fence_async_shared();
    named_barrier_sync(barrier, 128);
    if (threadIdx.x % 128 == 0) {
#pragma unroll
        for (int block = 0; block < C::kBlocksM; ++block) tma_store_2d(&x.c, staging + block * C::kBlockBytes, at.x + block * 64, at.y);
        bulk_commit();
    }
    __syncwarp();
}

template <class C>
__device__ __forceinline__ void consume(const Arguments &x, const Schedule<C> &my, uint32_t base, uint32_t full, uint32_t empty) {
    const int group = threadIdx.x / 128, warp = threadIdx.x / 32;
    const uint32_t staging = base + C::kStages * C::kStageBytes + warp * C::kWarpStaging;
    const uint32_t target = threadIdx.x % 128, empty_mapped = map_to_cta(empty, C::kShare > 1 ? target % C::kShare : my.rank);
    const uint64_t a = operand_descriptor<C::kMajorA, C::kM, C::kShareA>(base, group * C::kBlocksM * 64);
    const uint64_t b = operand_descriptor<C::kMajorB, C::kN, C::kShareB>(base + C::kBytesA, 0);
    constexpr int kLate = C::kGroups - C::kDefer, kRegisters = C::kBoxN / 4;  // the first late group; registers of a box
    float sum[C::kBlocksM][C::kN / 2];
    uint32_t late[C::kDefer ? C::kDefer * C::kStaged * kRegisters : 1] = {};  // the last tile's results, on their way out
    int2 late_at = {};
    bool pending = false;
    auto from_late = [&](int box, int i) { return late[(box - kLate * C::kStaged) * kRegisters + i]; };
    auto from_sum = [&](int box, int i) { return packed_sum<C>(sum, box, i); };
    auto store_late = [&](int step) {
        if (!pending) return;
        if constexpr (C::kDefer >= 1)
            if (step == 1) store_group<C, kLate>(x, staging, late_at.x, late_at.y, from_late);
        if constexpr (C::kDefer >= 2)
            if (step == 2) store_group<C, kLate + 1>(x, staging, late_at.x, late_at.y, from_late);
    };
    Ring<C::kStages> ring;
#pragma unroll 1
    for (int t = my.first; t < my.tiles; t += my.stride) {
        int2 at;
        if (C::kWarpgroups == 2 && x.lag && group == 1) named_barrier_sync(2, 256);
        multiply<C>(sum, my.steps, ring, a, b, full, empty_mapped, target < C::kShare, [&](int step) {
            if (C::kWarpgroups == 2 && group == 0 && step == x.lag - 1) named_barrier_arrive(2, 256);
            if (step == 0) at = my.at(t);  // the divisions run under the products
            store_late(step);
        });
        if constexpr (C::kSplit > 1) {
            reduce_split<C>(x, sum, base, at);
            return;  // one tile for each cluster
        }
        if constexpr (C::kTurned) {
            const int first = group * C::kBlocksM;
            store_turned<C>(x, sum, base + C::kStages * C::kStageBytes + first * C::kBlockBytes, make_int2(at.x + first * 64, at.y));
            continue;
        }
        const int row = at.x + group * C::kBlocksM * 64 + warp % 4 * 16;
        if constexpr (kLate >= 1) store_group<C, 0>(x, staging, row, at.y, from_sum);
        if constexpr (kLate >= 2) store_group<C, 1>(x, staging, row, at.y, from_sum);
        static_assert(C::kGroups <= 2 || C::kTurned, "");
        if constexpr (C::kDefer > 0) {
#pragma unroll
            for (int box = kLate * C::kStaged; box < C::kBoxes; ++box)
#pragma unroll
                for (int i = 0; i < kRegisters; ++i) late[(box - kLate * C::kStaged) * kRegisters + i] = from_sum(box, i);
            late_at = make_int2(row, at.y), pending = true;
        }
    }
    store_late(1), store_late(2);
    if (threadIdx.x % 32 == 0) bulk_wait_read<0>();  // shared memory must outlive the stores
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kCtasPerSm) kernel(const __grid_constant__ Arguments x) {
    extern __shared__ uint8_t shared[];
    const uint32_t base = (smem_address(shared) + 1023) & ~1023u, full = base + C::kStages * C::kStageBytes + C::kStaging;
    const uint32_t empty = full + 8 * C::kStages;
    const bool producer = __shfl_sync(~0u, threadIdx.x / 128, 0) == C::kWarpgroups;
    if (threadIdx.x == 0) {
        for (int s = 0; s < C::kStages; ++s) mbarrier_init(full + 8 * s, 1), mbarrier_init(empty + 8 * s, C::kWarpgroups * C::kShare);
        fence_mbarrier_init();
    }
    if (threadIdx.x == C::kWarpgroups * 128) prefetch_tensor_map(&x.a), prefetch_tensor_map(&x.b);
    const Schedule<C> my(x);
    int2 at = my.at(my.first);  // before the barrier, where everyone waits anyway
    asm volatile("" : "+r"(at.x), "+r"(at.y));
    if constexpr (C::kShare > 1) cluster_sync_relaxed();
    else __syncthreads();
    if (producer) {
        if constexpr (C::kWarpgroups > 1) registers_decrease<40>();
        if (threadIdx.x == C::kWarpgroups * 128) produce<C>(x, my, at, base, full, empty);
        __syncwarp();
        if constexpr (C::kSplit > 1) cluster_sync();
    } else {
        if constexpr (C::kWarpgroups > 1) registers_increase<232>();
        consume<C>(x, my, base, full, empty);
        __syncwarp();
    }
    if constexpr (C::kCluster > 1) cluster_sync_relaxed();  // nobody leaves while a peer may still signal its barriers or read its sums
}

}  // namespace gemm
