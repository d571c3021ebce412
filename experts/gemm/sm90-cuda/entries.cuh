// Entries beside the plain product: their kernel around the core, the tiles that are built for each, and the choice among them.
#pragma once

#include <cmath>

#include "klineage.h"
#include "kernel.cuh"
#include "launch.cuh"

namespace gemm {

// What a launch passes by value: the core's arguments, and what the entry reads beside a and b.
template <class E>
struct Fused : Arguments {
    typename E::Operands more;
};

// The kernel of an entry E, whose roles are its own. C: the configuration of the products; O: that of the tile of results.
template <class C, class O, class E>
__global__ void __launch_bounds__(C::kThreads, C::kCtasPerSm) entry_kernel(const __grid_constant__ Fused<E> x) {
    static_assert(C::kSplit == O::kSplit && O::kStaging <= C::kStaging, "results are staged where the core has room for it");
    extern __shared__ uint8_t shared[];
    const uint32_t base = (smem_address(shared) + 1023) & ~1023u, full = base + C::kStages * C::kStageBytes + C::kStaging;
    const uint32_t empty = full + 8 * C::kStages;
    const bool producer = __shfl_sync(~0u, threadIdx.x / 128, 0) == C::kWarpgroups;
    if (threadIdx.x == 0) {
        for (int s = 0; s < C::kStages; ++s) mbarrier_init(full + 8 * s, 1), mbarrier_init(empty + 8 * s, C::kWarpgroups * C::kShare);
        fence_mbarrier_init();
    }
    if (threadIdx.x == C::kWarpgroups * 128) prefetch_tensor_map(&x.a), prefetch_tensor_map(&x.b);
    const Schedule<O> my(x);
    if constexpr (C::kShare > 1) cluster_sync_relaxed();
    else __syncthreads();
    if (producer) {
        if constexpr (C::kWarpgroups > 1) registers_decrease<40>();
        if (threadIdx.x == C::kWarpgroups * 128) E::template produce<C, O>(x, my, base, full, empty);
        if constexpr (C::kSplit > 1) {
            __syncwarp();
            cluster_sync();  // the consumers' partial sums: see reduce_entry
        }
    } else {
        if constexpr (C::kWarpgroups > 1) registers_increase<232>();
        E::template consume<C, O>(x, my, base, full, empty);
    }
    __syncwarp();
    if constexpr (C::kCluster > 1) cluster_sync_relaxed();  // nobody leaves while a peer may still signal its barriers or read its sums
}

// How many clusters of an entry's kernel the device holds at once: 0 when that cannot be told.
template <class C, class O, class E>
int held_clusters() {
    static const int count = [] {
        cudaFuncSetAttribute(entry_kernel<C, O, E>, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSharedBytes);
        cudaLaunchAttribute cluster = {};
        cluster.id = cudaLaunchAttributeClusterDimension, cluster.val.clusterDim = {C::kCluster, 1, 1};
        cudaLaunchConfig_t config = {};
        config.gridDim = dim3(C::kCluster), config.blockDim = dim3(C::kThreads), config.dynamicSmemBytes = C::kSharedBytes;
        config.attrs = &cluster, config.numAttrs = 1;
        int clusters = 0;
        return cudaOccupancyMaxActiveClusters(&clusters, entry_kernel<C, O, E>, &config) == cudaSuccess ? clusters : 0;
    }();
    return count;
}

// Starts so many clusters.
template <class C, class O, class E>
const char *start_clusters(const Fused<E> &x, int64_t clusters, cudaStream_t stream) {
    return launch(entry_kernel<C, O, E>, {dim3(uint32_t(clusters) * C::kCluster), dim3(C::kThreads), C::kSharedBytes, stream, C::kCluster}, x);
}

// A tile that is built, with the times in microseconds of the plain product (expert.cu): a step of 64 k, and a tile's end.
template <class E>
struct Tile {
    int rows, columns, least_k;
    float step, end;
    int (*held)();
    const char *(*start)(const Problem &, const typename E::Operands &);
};

template <class C, class O, class E>
constexpr Tile<E> tile(float step, float end) {
    return {O::kM * O::kShareB, O::kN * O::kShareA, O::kDefer ? 2 * kTileK : 1, step, end, held_clusters<C, O, E>, E::template start<C, O>};
}

// Starts the tile whose waves take least by its times, for rows in `groups` of about equal size.
template <class E, int kCount>
const char *start_shortest(const Tile<E> (&tiles)[kCount], const Problem &p, const typename E::Operands &more, int groups = 1) {
    const int rows = (p.m + groups - 1) / groups;
    const Tile<E> *best = nullptr;
    float least = INFINITY;
    for (const Tile<E> &one : tiles) {
        const int held = p.k < one.least_k ? 0 : one.held();
        if (held < 1) continue;
        const int64_t clusters = int64_t(groups) * ((rows + one.rows - 1) / one.rows) * ((p.n + one.columns - 1) / one.columns);
        const float time = float((clusters + held - 1) / held) * (float((p.k + kTileK - 1) / kTileK) * one.step + one.end);
        if (time < least) best = &one, least = time;
    }
    return best ? best->start(p, more) : "gemm: the device holds no cluster of any size that is built";
}

// Whether a matrix has rows of consecutive elements that start at multiples of 16 bytes, and at most 2^24 of each.
inline bool in_rows(const klineage_tensor &t, int bytes) {
    return t.num_dims == 2 && t.stride[1] == 1 && t.stride[0] >= t.shape[1] && t.stride[0] * bytes % 16 == 0 &&
           reinterpret_cast<uintptr_t>(t.data) % 16 == 0 && t.shape[0] <= 1 << 24 && t.shape[1] <= 1 << 24;
}

}  // namespace gemm
