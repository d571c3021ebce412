// streamed_filter: a row is read once, in order, and only keys that can still win are kept, as codes and columns in a list in
// shared memory. Warps run through the row on their own and meet only when the list is full: then its k best are selected
// exactly, and from there on only codes below the worst of them enter.
#pragma once

#include "select.cuh"

namespace {

struct StreamShared {
    int count;       // entries that have been asked for; above the limit when a warp found no place for its own
    int length;      // entries that are there, once a warp has found no place
    unsigned worst;  // code of the k-th best at the last selection
};

// Where the entries go that a selection keeps: to the front of the list.
struct Kept {
    uint2 *list;
    unsigned *worst;  // of this thread

    __device__ __forceinline__ void write(int at, unsigned code, int column) const {
        list[at] = make_uint2(code, column);
        *worst = max(*worst, code);
    }
};

// The least code of a vector.
template <int kBytes>
__device__ __forceinline__ unsigned least(const Codes<kBytes> &codes) {
    const unsigned(&w)[4] = codes.word;
    if constexpr (kBytes == 4) return min(min(w[0], w[1]), min(w[2], w[3]));
    const unsigned pair = __vminu2(__vminu2(w[0], w[1]), __vminu2(w[2], w[3]));
    return min(pair & 0xffffu, pair >> 16);
}

// An atomic addition in shared memory by one lane.
__device__ __forceinline__ int add_alone(uint32_t to, int value) {
    int before;
    asm volatile("atom.shared.add.u32 %0, [%1], %2;" : "=r"(before) : "r"(to), "r"(value) : "memory");
    return before;
}

// By a whole warp: append the keys of a vector per lane whose codes are at most `bound`. False: there was no place for
// them, and nothing was appended. `count` is the address of t.count.
template <int kBytes>
__device__ __forceinline__ bool append(StreamShared &t, uint32_t count, uint2 *list, int limit, const uint4 &vector, bool valid,
                                       unsigned bound, int column) {
    const Codes<kBytes> codes(vector);
    if (!__any_sync(kFull, valid && least(codes) <= bound)) return true;
    constexpr int kCount = Codes<kBytes>::kCount;
    const unsigned lane = threadIdx.x % 32, lower = (1u << lane) - 1;
    unsigned votes[kCount];
    int wanted = 0;
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
        votes[e] = __ballot_sync(kFull, valid && codes[e] <= bound);
        wanted += __popc(votes[e]);
    }
    int at = 0;
    if (lane == 0) at = add_alone(count, wanted);
    at = __shfl_sync(kFull, at, 0);
    if (at + wanted > limit) {
        if (at <= limit && lane == 0) t.length = at;  // one warp only: those behind it are told a larger place
        return false;
    }
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
        if (votes[e] >> lane & 1) list[at + __popc(votes[e] & lower)] = make_uint2(codes[e], column + e);
        at += __popc(votes[e]);
    }
    return true;
}

// Read share `rank` of `blocks` of a row and keep, in any order, every key that may be among the row's k best: the length
// of the list. The first selection comes after `slice` keys, the others when the list holds `capacity`.
template <int kBytes, int kThreads, int kBits, int kAhead>
__device__ __forceinline__ int stream_row(Shared &s, StreamShared &t, Scratch *scratch, uint2 *list, const Problem &p,
                                          const unsigned char *row, int blocks, int rank) {
    constexpr int kPerVector = 16 / kBytes, kStep = kThreads * kAhead;
    constexpr unsigned kAll = (1u << kAhead) - 1;
    const int thread = threadIdx.x;
    // Whole vectors from the first 16-byte boundary on; the loose keys before and behind them go to the first block.
    const int lead = min(static_cast<int>(-reinterpret_cast<uintptr_t>(row) % 16) / kBytes, p.columns);
    const int vectors = (p.columns - lead) / kPerVector, loose = p.columns - vectors * kPerVector;
    const int share = (vectors + blocks - 1) / blocks, first = min(rank * share, vectors);
    const int mine = min(share, vectors - first), first_column = lead + first * kPerVector;
    const uint4 *from = reinterpret_cast<const uint4 *>(row + static_cast<long long>(first_column) * kBytes) + thread;

    uint4 held[kAhead];
#pragma unroll
    for (int v = 0; v < kAhead; ++v) {
        held[v] = make_uint4(0, 0, 0, 0);
        if (v * kThreads + thread < mine) held[v] = __ldcs(from + v * kThreads);
    }
    if (rank == 0 && thread < loose) {
        const int column = thread < lead ? thread : p.columns - loose + thread;
        unsigned code;
        if constexpr (kBytes == 4)
            code = encode32(reinterpret_cast<const unsigned *>(row)[column]);
        else
            code = encode16x2(reinterpret_cast<const unsigned short *>(row)[column]) & 0xffffu;
        list[thread] = make_uint2(code, column);
    }
    if (thread == 0) t.count = rank == 0 ? loose : 0;
    __syncthreads();

    // The compiler surrounds an atomic addition to an address that it knows to be uniform with a reduction over the warp.
    const uint32_t count = __shfl_sync(kFull, shared_address(&t.count), thread % 32);
    int limit = p.slice;
    int steps = (mine + kStep - 1) / kStep;  // kAhead vectors per thread each
    int left = mine - thread;                // held[v] is a vector of the share when v * kThreads < left
    int column = first_column + thread * kPerVector;
    unsigned bound = kFull, pending = kAll;  // bit v: held[v] has neither been appended nor lost
    for (;;) {
        while (steps > 0) {
#pragma unroll
            for (int v = 0; v < kAhead; ++v)
                if (pending >> v & 1) {
                    if (append<kBytes>(t, count, list, limit, held[v], v * kThreads < left, bound,
                                       column + v * kThreads * kPerVector)) {
                        pending &= ~(1u << v);
                        if (kStep + v * kThreads < left) held[v] = __ldcs(from + kStep + v * kThreads);
                    }
                }
            if (pending != 0) break;
            pending = kAll;
            --steps, left -= kStep, column += kStep * kPerVector, from += kStep;
            if (__any_sync(kFull, *const_cast<volatile int *>(&t.count) > limit)) break;  // another warp waits for a selection
        }
        if (__syncthreads_and(steps == 0)) return t.count;

        const int length = t.length;
        if (thread == 0) t.worst = 0;
        unsigned worst = 0;
        ListKeys<kThreads> keys(list, length);
        block_select<kThreads, kBits, false>(s, scratch, keys, Interval{0, kBytes * 8, p.k, length}, 0, Kept{list, &worst});
        worst = __reduce_max_sync(kFull, worst);
        if (thread % 32 == 0) atomicMax(&t.worst, worst);
        if (thread == 0) t.count = p.k;
        __syncthreads();
        limit = p.key_bytes / static_cast<int>(sizeof(uint2));
        bound = t.worst - 1;
        if (t.worst == 0) steps = 0;  // no code is smaller
    }
}

// One block per row.
template <int kBytes, int kThreads, int kBits, int kAhead, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks) stream_kernel(const Problem p) {
    __shared__ Shared s;
    __shared__ StreamShared t;
    const long long row = blockIdx.x;
    uint2 *list = reinterpret_cast<uint2 *>(dynamic_shared);
    Scratch *scratch = reinterpret_cast<Scratch *>(dynamic_shared + p.key_bytes);
    const int length = stream_row<kBytes, kThreads, kBits, kAhead>(s, t, scratch, list, p, p.x + row * p.x_stride * kBytes, 1, 0);
    ListKeys<kThreads> keys(list, length);
    block_select<kThreads, kBits, false>(s, scratch, keys, Interval{0, kBytes * 8, p.k, length}, 0, Output<kBytes>(p, row));
}

// A cluster per row: every block filters its share, and the lists are selected from as if they were shares of a row.
template <int kBytes, int kThreads, int kAhead, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks) stream_cluster_kernel(const Problem p) {
    constexpr int kBits = 12;
    __shared__ Shared s;
    __shared__ ClusterShared c;
    __shared__ StreamShared t;
    sm90::cluster_arrive();
    const int blocks = static_cast<int>(sm90::cluster_size()), rank = static_cast<int>(sm90::cluster_rank());
    const long long row = blockIdx.x / blocks;
    uint2 *list = reinterpret_cast<uint2 *>(dynamic_shared);
    Scratch *scratch = reinterpret_cast<Scratch *>(dynamic_shared + p.key_bytes);
    const int length = stream_row<kBytes, kThreads, kBits, kAhead>(s, t, scratch, list, p, p.x + row * p.x_stride * kBytes,
                                                                   blocks, rank);
    ListKeys<kThreads> keys(list, length);
    cluster_select<kThreads, kBits>(s, c, scratch, keys, Interval{0, kBytes * 8, p.k, p.columns}, blocks, rank,
                                    Output<kBytes>(p, row));
}

}  // namespace
