// The machinery that the kernels of expert.cu and stream.cuh share: codes, where keys are kept, counting, searching, ranking
// and selecting, by one block or by the blocks of a cluster.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "klineage/sm90/v1/cluster.cuh"

namespace {

namespace sm90 = klineage::sm90;

constexpr int64_t kMaxRows = (int64_t{1} << 31) / 16 - 1;  // blocks of a grid, 16 per row
constexpr int kMaxK = 2048, kMaxColumns = 262144, kMaxCluster = 16;
constexpr int kRankMax = 512;   // up to so many candidates are ranked by comparison instead of another digit
constexpr int kRankBits = 9;    // bits of a place among them
constexpr int kListMax = 1024;  // up to so many candidates of a cluster are collected by its first block
constexpr int kWinnerBits = 12;  // of a packed pair of counts: a block has up to kMaxK winners and 2^20 candidates
constexpr int kCoarse = 64;     // coarse bins that the blocks of a cluster exchange
constexpr unsigned kFull = 0xffffffffu;

// Order-reversing bijection from the bits of a float to unsigned integers: a larger float has a smaller code.
__device__ __forceinline__ unsigned encode32(unsigned bits) {
    return bits ^ (~static_cast<unsigned>(static_cast<int>(bits) >> 31) & 0x7fffffffu);
}
// Both halves of a word filled with their sign bits. PRMT's selector replicates a sign by its bit 3, which the intrinsic
// __byte_perm clears.
__device__ __forceinline__ unsigned signs16x2(unsigned bits) {
    unsigned signs;
    asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(signs) : "r"(bits));
    return signs;
}
// encode32 for two 16-bit floats at once. Both maps are their own inverses.
__device__ __forceinline__ unsigned encode16x2(unsigned bits) {
    return bits ^ (~signs16x2(bits) & 0x7fff7fffu);
}
template <int kBytes>
__device__ __forceinline__ unsigned encode(unsigned word) {
    return kBytes == 4 ? encode32(word) : encode16x2(word);
}

__device__ __forceinline__ uint32_t shared_address(const void *place) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(place));
}

__device__ __forceinline__ int warp_inclusive_scan(int value, int lane) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(kFull, value, step);
        if (lane >= step) value += other;
    }
    return value;
}

// The matrix and where the answer goes; strides are those of rows, in elements.
struct Problem {
    const unsigned char *x;
    unsigned char *values;
    long long *indices;
    int columns, k;
    int key_bytes;  // of shared memory for a block's keys
    int slice;      // of a streamed row: keys before the first selection
    long long x_stride, values_stride, indices_stride;
};

// The output of one row.
template <int kBytes>
struct Output {
    unsigned char *values;
    long long *indices;

    __device__ Output(const Problem &p, long long row)
        : values(p.values + row * p.values_stride * kBytes), indices(p.indices + row * p.indices_stride) {}

    __device__ __forceinline__ void write(int at, unsigned code, int column) const {
        const unsigned bits = encode<kBytes>(code);
        if constexpr (kBytes == 4)
            reinterpret_cast<unsigned *>(values)[at] = bits;
        else
            reinterpret_cast<unsigned short *>(values)[at] = static_cast<unsigned short>(bits);
        indices[at] = column;
    }
};

// Codes that may still be the k-th one: low <= code < low + 2^bits. Smaller codes are winners, k - need of them.
struct Interval {
    unsigned low;
    int bits;
    int need;
    int count;  // codes inside

    __device__ __forceinline__ unsigned span() const { return bits >= 32 ? kFull : (1u << bits) - 1; }
    __device__ __forceinline__ bool takes_all() const { return count == need || bits == 0; }
};

// A digit of a code inside an interval: (code - low) >> shift.
struct Digit {
    unsigned low, span;
    int shift;

    template <int kBits>
    static __device__ __forceinline__ Digit of(const Interval &interval) {
        return {interval.low, interval.span(), max(interval.bits - kBits, 0)};
    }
};

struct Bin {
    int index;
    int below;  // codes with a smaller digit
    int count;  // codes with this digit
};

__device__ __forceinline__ void narrow(Interval &interval, const Digit &digit, const Bin &bin) {
    interval.low += static_cast<unsigned>(bin.index) << digit.shift;
    interval.bits = digit.shift;
    interval.need -= bin.below;
    interval.count = bin.count;
}

// Where one thread's vectors of 16 bytes are kept: in registers, or where kVectors is 0, any number of them in shared
// memory, of which every thread reads only what it copied itself.
template <int kThreads, int kVectors>
struct Storage {
    uint4 held[kVectors];

    __device__ __forceinline__ explicit Storage(unsigned char *) {}
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) held[v] = make_uint4(0, 0, 0, 0);
    }
    __device__ __forceinline__ void load(int v, const void *from) { held[v] = __ldcs(static_cast<const uint4 *>(from)); }
    __device__ __forceinline__ void wait() {}
    __device__ __forceinline__ uint4 get(int v) const { return held[v]; }
    __device__ __forceinline__ void put(int v, const uint4 &vector) { held[v] = vector; }
    // Keeps the compiler from holding what it derived from the keys in one phase until the next: registers are few.
    __device__ __forceinline__ void start_phase() {
#pragma unroll
        for (int v = 0; v < kVectors; ++v)
            asm volatile("" : "+r"(held[v].x), "+r"(held[v].y), "+r"(held[v].z), "+r"(held[v].w));
    }
};
template <int kThreads>
struct Storage<kThreads, 0> {
    uint4 *mine;

    __device__ __forceinline__ explicit Storage(unsigned char *shared) : mine(reinterpret_cast<uint4 *>(shared) + threadIdx.x) {}
    __device__ __forceinline__ void clear() {}
    __device__ __forceinline__ void load(int v, const void *from) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(mine + v * kThreads)), "l"(from) : "memory");
    }
    __device__ __forceinline__ void wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }
    __device__ __forceinline__ uint4 get(int v) const { return mine[v * kThreads]; }
    __device__ __forceinline__ void put(int v, const uint4 &vector) { mine[v * kThreads] = vector; }
    __device__ __forceinline__ void start_phase() {}
};

// Codes of one vector.
template <int kBytes>
struct Codes {
    static constexpr int kCount = 16 / kBytes;
    unsigned word[4];

    __device__ __forceinline__ explicit Codes(const uint4 &v)
        : word{encode<kBytes>(v.x), encode<kBytes>(v.y), encode<kBytes>(v.z), encode<kBytes>(v.w)} {}
    __device__ __forceinline__ unsigned operator[](int e) const {
        if constexpr (kBytes == 4) return word[e];
        return e % 2 ? word[e / 2] >> 16 : word[e / 2] & 0xffffu;
    }
};

// Calls body(v) for every vector of a thread. Registers have no run-time index, so the loop over them has no run-time bound.
template <class Keys, class Body>
__device__ __forceinline__ void for_each_vector(const Keys &keys, const Body &body) {
    if constexpr (Keys::kRolled) {
#pragma unroll 2
        for (int v = 0; v < keys.steps; ++v) body(v);
    } else {
#pragma unroll
        for (int v = 0; v < Keys::kSteps; ++v)
            if (v < keys.steps) body(v);
    }
}

// Keys of one thread from a row of the matrix: vectors of 16 bytes, kThreads vectors apart. The first and the last vector
// of a row may be partial, for rows start and end anywhere.
template <int kBytes, int kThreads, int kVectors>
struct RowKeys {
    static constexpr int kPerVector = 16 / kBytes, kSteps = kVectors;
    static constexpr bool kRolled = kVectors == 0;
    static constexpr unsigned kWhole = (1u << kPerVector) - 1;

    Storage<kThreads, kVectors> storage;
    int columns, first, steps;  // columns of the row; column of key 0, negative before the row's start; own vectors

    // Vectors `begin` to `end` of a row, counted from the 16-byte boundary at or before its first element.
    __device__ __forceinline__ RowKeys(const unsigned char *row, int columns, int begin, int end, unsigned char *shared)
        : storage(shared), columns(columns) {
        const int head = static_cast<int>(reinterpret_cast<uintptr_t>(row) % 16) / kBytes;
        const int thread = static_cast<int>(threadIdx.x);
        first = (begin + thread) * kPerVector - head;
        steps = (max(end - begin - thread, 0) + kThreads - 1) / kThreads;
        storage.clear();
        for_each_vector(*this, [&](int v) {
            if (whole(v)) storage.load(v, row + static_cast<long long>(column(v)) * kBytes);
        });
        if (head != 0 || (head + columns) % kPerVector != 0)
            for_each_vector(*this, [&](int v) {
                if (!whole(v)) storage.put(v, partial(row, column(v)));
            });
        storage.wait();
    }

    __device__ __forceinline__ uint4 partial(const unsigned char *row, int at) const {
        unsigned part[4] = {0, 0, 0, 0};
#pragma unroll
        for (int e = 0; e < kPerVector; ++e)
            if (at + e >= 0 && at + e < columns) {
                if constexpr (kBytes == 4)
                    part[e] = reinterpret_cast<const unsigned *>(row)[at + e];
                else
                    part[e / 2] |= static_cast<unsigned>(reinterpret_cast<const unsigned short *>(row)[at + e]) << (e % 2 * 16);
            }
        return make_uint4(part[0], part[1], part[2], part[3]);
    }

    __device__ __forceinline__ void start_phase() { storage.start_phase(); }
    __device__ __forceinline__ Codes<kBytes> codes(int v) const { return Codes<kBytes>(storage.get(v)); }
    __device__ __forceinline__ int column(int v) const { return first + v * kThreads * kPerVector; }
    __device__ __forceinline__ bool whole(int v) const { return column(v) >= 0 && column(v) + kPerVector <= columns; }
    // Bit e: key e of vector v exists.
    __device__ __forceinline__ unsigned valid(int v) const {
        if (whole(v)) return kWhole;
        const int before = max(-column(v), 0), behind = max(column(v) + kPerVector - columns, 0);
        return (kWhole << before) & (kWhole >> behind);
    }
};

// Keys of one thread from a list of codes and columns in shared memory.
template <int kThreads>
struct ListKeys {
    static constexpr int kPerVector = 1, kSteps = kListMax / kThreads;
    static constexpr bool kRolled = true;
    struct One {
        unsigned code;
        __device__ __forceinline__ unsigned operator[](int) const { return code; }
    };

    const uint2 *list;
    int steps;

    __device__ __forceinline__ ListKeys(const uint2 *from, int length)
        : list(from + threadIdx.x), steps((max(length - static_cast<int>(threadIdx.x), 0) + kThreads - 1) / kThreads) {}
    __device__ __forceinline__ void start_phase() {}
    __device__ __forceinline__ One codes(int v) const { return {list[v * kThreads].x}; }
    __device__ __forceinline__ int column(int v) const { return static_cast<int>(list[v * kThreads].y); }
    __device__ __forceinline__ bool whole(int) const { return true; }
    __device__ __forceinline__ unsigned valid(int) const { return 1; }
};

struct Shared {
    int warp_sum[32];
    unsigned warp_low[32], warp_high[32];
    unsigned warp_found[32];  // winners in the low 12 bits, candidates above
    Bin bin;
    alignas(16) unsigned candidate_key[kRankMax + 4];  // the undecided bits of the code, then the place in this list
    uint2 candidate[kRankMax];                         // code and column
};

// Shared memory behind Shared: the bins, and when they have been searched, code and column of the winners.
union alignas(16) Scratch {
    int histogram[1];
    uint2 winner[1];
};

// What the blocks of a cluster read of each other.
struct ClusterShared {
    int coarse[kMaxCluster][kCoarse];  // by block
    uint2 range[kMaxCluster];          // least and greatest candidate, by block
    int winners_before, candidates_before;
    uint2 list[kListMax];
};

template <int kThreads, int kBits>
__device__ __forceinline__ void clear(int *histogram) {
#pragma unroll
    for (int i = threadIdx.x * 4; i < 1 << kBits; i += kThreads * 4)
        *reinterpret_cast<int4 *>(histogram + i) = make_int4(0, 0, 0, 0);
    __syncthreads();
}

// kCount consecutive bins, a power of two.
template <int kCount>
__device__ __forceinline__ void load_bins(int (&bins)[kCount], const int *from) {
    using Vector = std::conditional_t<(kCount >= 4), int4, std::conditional_t<kCount == 2, int2, int>>;
    constexpr int kEach = sizeof(Vector) / sizeof(int);
#pragma unroll
    for (int i = 0; i < kCount; i += kEach) {
        const Vector loaded = *reinterpret_cast<const Vector *>(from + i);
#pragma unroll
        for (int j = 0; j < kEach; ++j) bins[i + j] = reinterpret_cast<const int *>(&loaded)[j];
    }
}

// Count the codes of an interval by their digit. kAll: the interval holds every code.
template <bool kAll, class Keys>
__device__ __forceinline__ void count(Keys &keys, const Digit &digit, int *histogram) {
    keys.start_phase();
    const auto add = [&](unsigned code) {
        const unsigned offset = kAll ? code : code - digit.low;
        if (kAll || offset <= digit.span) atomicAdd(&histogram[offset >> digit.shift], 1);
    };
    for_each_vector(keys, [&](int v) {
        const auto codes = keys.codes(v);
        if (keys.whole(v)) {
#pragma unroll
            for (int e = 0; e < Keys::kPerVector; ++e) add(codes[e]);
        } else {
            const unsigned valid = keys.valid(v);
#pragma unroll
            for (int e = 0; e < Keys::kPerVector; ++e)
                if (valid >> e & 1) add(codes[e]);
        }
    });
}

// The bin in which the running count reaches `need`; the caller has synchronized after counting. Every warp sums its
// slice of the bins; the one warp whose slice holds the bin searches it.
template <int kThreads, int kBits>
__device__ __forceinline__ Bin find_bin(Shared &s, const int *histogram, int need) {
    constexpr int kWarps = kThreads / 32, kPerLane = (1 << kBits) / kThreads;
    static_assert(kPerLane >= 1 && kPerLane * kThreads == 1 << kBits, "bins must spread evenly over the threads");
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int bins[kPerLane], sum = 0;
    load_bins(bins, histogram + threadIdx.x * kPerLane);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) sum += bins[i];
    const int slice = __reduce_add_sync(kFull, sum);
    if (lane == 0) s.warp_sum[warp] = slice;
    __syncthreads();
    const int before_slice = __reduce_add_sync(kFull, lane < warp && lane < kWarps ? s.warp_sum[lane] : 0);
    if (before_slice < need && need <= before_slice + slice) {
        const int running = before_slice + warp_inclusive_scan(sum, lane);
        if (running - sum < need && need <= running) {
            Bin bin{static_cast<int>(threadIdx.x) * kPerLane, running - sum, bins[0]};
#pragma unroll
            for (int i = 1; i < kPerLane; ++i)
                if (bin.below + bin.count < need) {
                    bin.below += bin.count;
                    bin.count = bins[i];
                    ++bin.index;
                }
            s.bin = bin;
        }
    }
    __syncthreads();
    return s.bin;
}

// Of one vector, which keys are winners and which candidates; bit e: key e.
struct Hits {
    unsigned winners, candidates;
};
template <class Keys, class Codes>
__device__ __forceinline__ Hits hits(const Keys &keys, int v, const Codes &codes, const Interval &interval) {
    const unsigned span = interval.span(), valid = keys.valid(v);
    Hits found{0, 0};
#pragma unroll
    for (int e = 0; e < Keys::kPerVector; ++e) {
        if (codes[e] < interval.low) found.winners |= 1u << e;
        if (codes[e] - interval.low <= span) found.candidates |= 1u << e;
    }
    return {found.winners & valid, found.candidates & valid};
}

// Least and greatest code of this block's candidates, in all threads; (kFull, 0) when it has none.
template <int kThreads, class Keys>
__device__ __forceinline__ uint2 range_of(Shared &s, Keys &keys, const Interval &interval) {
    keys.start_phase();
    unsigned low = kFull, high = 0;
    for_each_vector(keys, [&](int v) {
        const auto codes = keys.codes(v);
        const unsigned candidates = hits(keys, v, codes, interval).candidates;
#pragma unroll
        for (int e = 0; e < Keys::kPerVector; ++e)
            if (candidates >> e & 1) low = min(low, codes[e]), high = max(high, codes[e]);
    });
    low = __reduce_min_sync(kFull, low), high = __reduce_max_sync(kFull, high);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane == 0) s.warp_low[warp] = low, s.warp_high[warp] = high;
    __syncthreads();
    const bool mine = lane < kThreads / 32;
    return make_uint2(__reduce_min_sync(kFull, mine ? s.warp_low[lane] : kFull),
                      __reduce_max_sync(kFull, mine ? s.warp_high[lane] : 0));
}

// The same candidates in the smallest interval that begins with the least one.
__device__ __forceinline__ void tighten(Interval &interval, uint2 range) {
    interval.low = range.x;
    interval.bits = 32 - __clz(range.y - range.x);
}

// How many winners and candidates a thread has, and where its first ones go among the block's.
struct Found {
    bool any;
    int winner_at, candidate_at;
};

template <int kThreads, class Keys>
__device__ __forceinline__ Found find_keys(Shared &s, Keys &keys, const Interval &interval) {
    keys.start_phase();
    unsigned mine = 0;  // winners in the low 12 bits, candidates above
    for_each_vector(keys, [&](int v) {
        const Hits found = hits(keys, v, keys.codes(v), interval);
        mine += __popc(found.winners) | __popc(found.candidates) << kWinnerBits;
    });
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const unsigned running = warp_inclusive_scan(mine, lane);
    if (lane == 31) s.warp_found[warp] = running;
    __syncthreads();
    const unsigned base = __reduce_add_sync(kFull, lane < warp ? s.warp_found[lane] : 0) + running - mine;
    return {mine != 0, static_cast<int>(base & ((1u << kWinnerBits) - 1)), static_cast<int>(base >> kWinnerBits)};
}

// Calls take(code, column, place, is_winner) for every winner and candidate of this thread.
template <class Keys, class Take>
__device__ __forceinline__ void visit(Keys &keys, const Interval &interval, Found found, const Take &take) {
    if (!found.any) return;
    keys.start_phase();
    for_each_vector(keys, [&](int v) {
        const auto codes = keys.codes(v);
        const Hits here = hits(keys, v, codes, interval);
        if ((here.winners | here.candidates) == 0) return;
#pragma unroll
        for (int e = 0; e < Keys::kPerVector; ++e) {
            if (here.winners >> e & 1)
                take(codes[e], keys.column(v) + e, found.winner_at++, true);
            else if (here.candidates >> e & 1)
                take(codes[e], keys.column(v) + e, found.candidate_at++, false);
        }
    });
}

// Write the `need` smallest of `length` candidates. Several lanes per candidate: its rank is the number of smaller keys.
template <int kThreads, class Out>
__device__ __forceinline__ void rank_candidates(const Shared &s, int length, int need, int first, const Out &out) {
    constexpr int kLanes = 4;
    for (int c = threadIdx.x / kLanes; c < (length + 31) / 32 * 32; c += kThreads / kLanes) {
        const unsigned key = s.candidate_key[min(c, length)];
        int before = 0;
#pragma unroll 1
        for (int j = threadIdx.x % kLanes * 4; j < length; j += kLanes * 4) {
            const uint4 other = *reinterpret_cast<const uint4 *>(s.candidate_key + j);
            before += (other.x < key) + (other.y < key) + (other.z < key) + (other.w < key);
        }
#pragma unroll
        for (int step = 1; step < kLanes; step *= 2) before += __shfl_xor_sync(kFull, before, step);
        if (threadIdx.x % kLanes == 0 && c < length && before < need)
            out.write(first + before, s.candidate[c].x, s.candidate[c].y);
    }
}

// Select the interval's `need` smallest keys and all below it, by one block, into out[first ...].
// kAll: the interval holds every key, and none has been counted yet.
template <int kThreads, int kBits, bool kAll, class Keys, class Out>
__device__ __forceinline__ void block_select(Shared &s, Scratch *scratch, Keys &keys, Interval interval, int first,
                                             const Out &out) {
    int *histogram = scratch->histogram;
    const int wanted = interval.need;
    if constexpr (kAll) {
        const Digit digit = Digit::of<kBits>(interval);
        clear<kThreads, kBits>(histogram);
        count<true>(keys, digit, histogram);
        __syncthreads();
        narrow(interval, digit, find_bin<kThreads, kBits>(s, histogram, interval.need));
    }
    // A place in the list of candidates needs kRankBits beside the undecided bits of the code.
    const auto too_wide = [&] { return !kAll && interval.bits > 32 - kRankBits; };
    while (!interval.takes_all() && (interval.count > kRankMax || too_wide())) {
        if (interval.bits > kBits) {
            tighten(interval, range_of<kThreads>(s, keys, interval));
            if (interval.bits == 0) break;
        }
        const Digit digit = Digit::of<kBits>(interval);
        clear<kThreads, kBits>(histogram);
        count<false>(keys, digit, histogram);
        __syncthreads();
        narrow(interval, digit, find_bin<kThreads, kBits>(s, histogram, interval.need));
    }

    const bool rank = !interval.takes_all();
    const int winners = wanted - interval.need;
    const Found found = find_keys<kThreads>(s, keys, interval);
    uint2 *winner = scratch->winner;  // the bins have been searched: find_keys synchronized
    visit(keys, interval, found, [&](unsigned code, int column, int at, bool is_winner) {
        if (is_winner) {
            winner[at] = make_uint2(code, column);
        } else if (rank) {
            s.candidate[at] = make_uint2(code, column);
            s.candidate_key[at] = (code - interval.low) << kRankBits | at;
        } else if (at < interval.need) {  // when not all candidates are needed, they are all equal
            winner[winners + at] = make_uint2(code, column);
        }
    });
    if (rank && threadIdx.x < 4) s.candidate_key[interval.count + threadIdx.x] = ~0u;  // pads the last vector
    __syncthreads();
#pragma unroll 1
    for (int at = threadIdx.x; at < (rank ? winners : wanted); at += kThreads)
        out.write(first + at, winner[at].x, winner[at].y);
    if (rank) rank_candidates<kThreads>(s, interval.count, interval.need, first + winners, out);
}

// Vectors of 16 bytes that a row touches.
template <int kBytes>
__device__ __forceinline__ int vectors_of(const unsigned char *row, int columns) {
    return (static_cast<int>(reinterpret_cast<uintptr_t>(row) % 16) + columns * kBytes + 15) / 16;
}

extern __shared__ __align__(16) unsigned char dynamic_shared[];

__device__ __forceinline__ void store_pair(uint32_t mapped, uint2 pair) {
    sm90::store_cluster(mapped, pair.x);
    sm90::store_cluster(mapped + 4, pair.y);
}

// Sums of this block's coarse bins, sent to every block of the cluster.
template <int kThreads, int kBits>
__device__ __forceinline__ void send_coarse(ClusterShared &c, const int *histogram, int blocks, int rank) {
    constexpr int kPerThread = (1 << kBits) / kThreads, kGroup = kThreads / kCoarse;
    static_assert(kGroup >= 2 && kGroup <= 32, "lanes of a warp must share a coarse bin");
    int bins[kPerThread], sum = 0;
    load_bins(bins, histogram + threadIdx.x * kPerThread);
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) sum += bins[i];
#pragma unroll
    for (int step = 1; step < kGroup; step *= 2) sum += __shfl_xor_sync(kFull, sum, step);
    for (int to = threadIdx.x % kGroup; to < blocks; to += kGroup)
        sm90::store_cluster(sm90::map_to_cta(shared_address(&c.coarse[rank][threadIdx.x / kGroup]), to), sum);
}

// Over the blocks of a cluster, counts of two neighbouring bins: of all blocks, and of those before this one.
struct Pair {
    int2 all = {0, 0}, before = {0, 0};

    __device__ __forceinline__ void add(int2 counts, bool is_before) {
        all.x += counts.x, all.y += counts.y;
        if (is_before) before.x += counts.x, before.y += counts.y;
    }
};

struct PairBin {
    Bin bin;
    int smaller_before;  // in the blocks before this one, counts of smaller bins
    int equal_before;    // and of this bin
};

// The bin of 64, two per lane, in which the running count reaches `need`; by one warp.
__device__ __forceinline__ PairBin search(const Pair &pair, int need) {
    const int lane = threadIdx.x % 32, sum = pair.all.x + pair.all.y;
    const int running = warp_inclusive_scan(sum, lane);
    const int owner = __ffs(__ballot_sync(kFull, need <= running)) - 1;
    const int below = __shfl_sync(kFull, running - sum, owner);
    const int2 all{__shfl_sync(kFull, pair.all.x, owner), __shfl_sync(kFull, pair.all.y, owner)};
    const int2 before{__shfl_sync(kFull, pair.before.x, owner), __shfl_sync(kFull, pair.before.y, owner)};
    const bool second = below + all.x < need;
    const int smaller = __reduce_add_sync(kFull, lane < owner ? pair.before.x + pair.before.y : 0);
    return {{owner * 2 + second, below + (second ? all.x : 0), second ? all.y : all.x},
            smaller + (second ? before.x : 0), second ? before.y : before.x};
}

// By one warp, after the cluster has synchronized: the bin in which the running count of all blocks reaches `need`, and
// what the blocks before this one have of smaller bins and of this one.
template <int kBits>
__device__ __forceinline__ void find_cluster_bin(Shared &s, ClusterShared &c, int *histogram, int need, int blocks, int rank) {
    static_assert((1 << kBits) == kCoarse * 64, "a coarse bin must hold two fine bins per lane");
    constexpr int kAhead = 4;  // loads in flight
    const int lane = threadIdx.x % 32;
    Pair coarse, fine;
    for (int b = 0; b < blocks; ++b) coarse.add(reinterpret_cast<const int2 *>(c.coarse[b])[lane], b < rank);
    const PairBin outer = search(coarse, need);
    for (int from = 0; from < blocks; from += kAhead) {
        int2 counts[kAhead];
#pragma unroll
        for (int b = 0; b < kAhead; ++b)
            if (from + b < blocks) {
                const uint32_t remote = sm90::map_to_cta(shared_address(histogram + outer.bin.index * 64 + lane * 2), from + b);
                counts[b].x = sm90::load_cluster(remote), counts[b].y = sm90::load_cluster(remote + 4);
            }
#pragma unroll
        for (int b = 0; b < kAhead; ++b)
            if (from + b < blocks) fine.add(counts[b], from + b < rank);
    }
    const PairBin inner = search(fine, need - outer.bin.below);
    if (lane == 0) {
        s.bin = {outer.bin.index * 64 + inner.bin.index, outer.bin.below + inner.bin.below, inner.bin.count};
        // Winners of earlier digits of the blocks before this one are added by the caller.
        c.winners_before = outer.smaller_before + inner.smaller_before;
        c.candidates_before = inner.equal_before;
    }
}

// Least and greatest candidate of the cluster.
template <int kThreads, class Keys>
__device__ __forceinline__ uint2 cluster_range(Shared &s, ClusterShared &c, Keys &keys, const Interval &interval,
                                               int blocks, int rank) {
    const uint2 mine = range_of<kThreads>(s, keys, interval);
    if (static_cast<int>(threadIdx.x) < blocks)
        store_pair(sm90::map_to_cta(shared_address(&c.range[rank]), threadIdx.x), mine);
    sm90::cluster_sync_unaligned();  // also: nobody reads the bins any longer
    const int lane = threadIdx.x % 32;
    const uint2 other = lane < blocks ? c.range[lane] : make_uint2(kFull, 0);
    return make_uint2(__reduce_min_sync(kFull, other.x), __reduce_max_sync(kFull, other.y));
}

// Select the `need` smallest keys of all blocks of a cluster, of which the interval holds every one; the caller has called
// cluster_arrive and nobody has waited yet.
template <int kThreads, int kBits, class Keys, class Out>
__device__ __forceinline__ void cluster_select(Shared &s, ClusterShared &c, Scratch *scratch, Keys &keys, Interval interval,
                                               int blocks, int rank, const Out &out) {
    int *histogram = scratch->histogram;
    const int wanted = interval.need;
    int winners_before = 0;
    const auto next_digit = [&](auto all) {
        const Digit digit = Digit::of<kBits>(interval);
        clear<kThreads, kBits>(histogram);
        count<decltype(all)::value>(keys, digit, histogram);
        __syncthreads();
        if constexpr (decltype(all)::value) sm90::cluster_wait();  // all blocks have started
        send_coarse<kThreads, kBits>(c, histogram, blocks, rank);
        sm90::cluster_sync_unaligned();
        if (threadIdx.x < 32) find_cluster_bin<kBits>(s, c, histogram, interval.need, blocks, rank);
        __syncthreads();
        winners_before += c.winners_before;
        narrow(interval, digit, s.bin);
    };
    next_digit(std::true_type{});
    while (!interval.takes_all() && interval.count > kListMax) {
        const uint2 range = cluster_range<kThreads>(s, c, keys, interval, blocks, rank);
        tighten(interval, range);
        if (interval.bits == 0) break;
        next_digit(std::false_type{});
    }

    const bool collect = !interval.takes_all();
    const int winners = wanted - interval.need;
    Found found = find_keys<kThreads>(s, keys, interval);
    found.winner_at += winners_before, found.candidate_at += c.candidates_before;
    const uint32_t list = sm90::map_to_cta(shared_address(c.list), 0);
    visit(keys, interval, found, [&](unsigned code, int column, int at, bool is_winner) {
        if (is_winner)
            out.write(at, code, column);
        else if (collect)
            store_pair(list + at * 8, make_uint2(code, column));
        else if (at < interval.need)
            out.write(winners + at, code, column);
    });
    sm90::cluster_sync_unaligned();
    if (!collect || rank > 0) return;
    ListKeys<kThreads> collected(c.list, interval.count);
    block_select<kThreads, kBits, false>(s, scratch, collected, interval, winners, out);
}

}  // namespace
