// Host side of the GEMM expert for sm_90a: tensor maps of the operands, how many CTAs to start, and the launch.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernel.cuh"
#include "klineage/sm90/v1/tensor_map.cuh"

namespace gemm {

// The matrices, their leading dimensions in elements, and the stream.
struct Problem {
    const void *a, *b;
    void *c;
    int m, n, k;
    int64_t lda, ldb, ldc;
    cudaStream_t stream;
};

// How tiles are walked: see Arguments; ctas: at most so many at once, 0: evenly many in every wave. lag: by how many
// steps the second warpgroup starts a tile later, so that one multiplies while the other one stores.
struct Walk {
    int group = 8, alternate = 1, snake = 0, ctas = 0, lag = 0;
    CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
};

// The map of an operand with `extent` rows or columns; wide: blocks of columns as a third dimension.
template <class T, int kMajor, int kExtent, int kShare>
const char *operand_map(CUtensorMap *map, const void *data, int extent, int k, int64_t ld, CUtensorMapL2promotion promotion, int *wide) {
    const cuuint64_t bytes = cuuint64_t(ld) * sizeof(T), rows = extent, depth = k;
    constexpr int kColumns = block_columns(kExtent);
    constexpr CUtensorMapSwizzle kSwizzle = kColumns == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
    *wide = kMajor == 1 && kExtent % kColumns == 0 && extent % kColumns == 0;
    if (kMajor == 0) return encode_tiled<T, 2>(map, data, {depth, rows}, {bytes}, {64, kExtent / kShare}, CU_TENSOR_MAP_SWIZZLE_128B, promotion);
    if (!*wide) return encode_tiled<T, 2>(map, data, {rows, depth}, {bytes}, {kColumns, kTileK / kShare}, kSwizzle, promotion);
    return encode_tiled<T, 3>(map, data, {kColumns, depth, rows / kColumns}, {bytes, kColumns * sizeof(T)},
                              {kColumns, kTileK / kShare, blocks_of(kExtent)}, kSwizzle, promotion);
}

// The map of C: a warp's boxes of results, or a block of a turned tile (m and n are exchanged there).
template <class C>
const char *result_map(CUtensorMap *map, const Problem &p) {
    using T = typename C::T;
    const cuuint64_t bytes = cuuint64_t(p.ldc) * sizeof(T);
    if (C::kTurned) return encode_tiled<T, 2>(map, p.c, {cuuint64_t(p.m), cuuint64_t(p.n)}, {bytes}, {64, C::kN});
    return encode_tiled<T, 2>(map, p.c, {cuuint64_t(p.n), cuuint64_t(p.m)}, {bytes}, {C::kBoxN, 16},
                              C::kBoxN == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B);
}

// How many clusters of a configuration the device holds at once: 0 when that cannot be told. Clusters of four do not fill it.
template <class C>
int resident_clusters() {
    static const int count = [] {
        cudaFuncSetAttribute(kernel<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSharedBytes);
        cudaLaunchAttribute cluster = {};
        cluster.id = cudaLaunchAttributeClusterDimension, cluster.val.clusterDim = {C::kCluster, 1, 1};
        cudaLaunchConfig_t config = {};
        config.gridDim = dim3(C::kCluster), config.blockDim = dim3(C::kThreads), config.dynamicSmemBytes = C::kSharedBytes;
        config.attrs = &cluster, config.numAttrs = 1;
        int clusters = 0;
        return cudaOccupancyMaxActiveClusters(&clusters, kernel<C>, &config) == cudaSuccess ? clusters : 0;
    }();
    return count;
}

// Starts a configuration on a problem. Returns nullptr, or why it cannot.
template <class C>
const char *start(const Problem &given, const Walk &walk) {
    using T = typename C::T;
    Problem p = given;
    if (C::kTurned) p.a = given.b, p.b = given.a, p.m = given.n, p.n = given.m, p.lda = given.ldb, p.ldb = given.lda;
    Arguments x = {};
    x.out = p.c, x.m = p.m, x.n = p.n, x.k = p.k, x.ldc = int(p.ldc);
    x.group = walk.group, x.alternate = walk.alternate, x.snake = walk.snake;
    x.lag = p.k >= C::kStages * kTileK && C::kWarpgroups == 2 && C::kSplit == 1 ? min(walk.lag, C::kStages - 1) : 0;  // never twice ahead
    if (C::kDefer && p.k < (C::kDefer + 1) * kTileK) return "gemm: K is too small for a deferred epilogue";
    if (p.k <= (C::kSplit - 1) * kTileK) return "gemm: K is too small to be split";
    if (const char *why = operand_map<T, C::kMajorA, C::kM, C::kShareA>(&x.a, p.a, p.m, p.k, p.lda, walk.promotion, &x.wide_a)) return why;
    if (const char *why = operand_map<T, C::kMajorB, C::kN, C::kShareB>(&x.b, p.b, p.n, p.k, p.ldb, walk.promotion, &x.wide_b)) return why;
    if (const char *why = result_map<C>(&x.c, p)) return why;
    constexpr int kRows = C::kM * C::kShareB, kColumns = C::kN * C::kShareA;
    const int tiles = (p.m + kRows - 1) / kRows * ((p.n + kColumns - 1) / kColumns);
    const int held = resident_clusters<C>();
    if (held < 1) return "gemm: the device holds no cluster of this size";
    const int waves = (tiles + held - 1) / held, even = (tiles + waves - 1) / waves;  // no cluster without a tile in the last wave
    const int resident = C::kSplit > 1 ? tiles : walk.ctas ? min(min(tiles, held), walk.ctas * C::kCtasPerSm / C::kCluster) : even;
    return launch(kernel<C>, {dim3(resident * C::kCluster), dim3(C::kThreads), C::kSharedBytes, p.stream, C::kCluster}, x);
}

}  // namespace gemm
