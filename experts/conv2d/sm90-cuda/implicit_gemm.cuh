// Convolution as a matrix product on sm_90a: one producer warp with TMA, one to three consumer warpgroups with wgmma.
//
// NHWC: rows of the product are pixels, columns filters, or with kFilterRows the other way round. NCHW: rows are filters, columns
// pixels. Both operands lie in rings in shared memory, 64 channels (128 bytes, swizzled) to a row. With splits, the CTAs of a cluster
// share K and add their sums through shared memory in the order of their ranks. The epilogue turns sums to 16 bits in a part of the
// ring's memory of a warp, or with kFilterRows in NHWC of a warpgroup.
#ifndef CONV2D_IMPLICIT_GEMM_CUH
#define CONV2D_IMPLICIT_GEMM_CUH

#include <klineage/sm90/v1/cluster.cuh>
#include <klineage/sm90/v1/ldmatrix.cuh>
#include <klineage/sm90/v1/mbarrier.cuh>
#include <klineage/sm90/v1/tma.cuh>
#include <klineage/sm90/v1/wgmma.cuh>

#include "epilogue.cuh"
#include "geometry.cuh"

namespace conv2d {

using namespace klineage::sm90;

constexpr int kMaxStages = 12;

// Where a ring stands.
struct Ring {
    uint32_t stage = 0, phase = 0;
    DEVICE void next(int stages) {
        if (++stage == static_cast<uint32_t>(stages)) stage = 0, phase ^= 1;
    }
};

// The shared memory of a CTA.
struct Memory {
    uint32_t weights, pixels, bars;
    DEVICE Memory(const Params &g, uint32_t raw) {
        weights = (raw + 1023) & ~1023u;
        pixels = weights + g.stages * g.weight_bytes;
        bars = weights + g.barriers_at;  // behind all else that ordinary stores write
    }
    DEVICE uint32_t full(uint32_t stage) const { return bars + stage * 16; }  // of both operands, or with kHalo of the weights
    DEVICE uint32_t empty(uint32_t stage) const { return bars + stage * 16 + 8; }
    DEVICE uint32_t pixels_full(uint32_t stage) const { return bars + (kMaxStages + stage) * 16; }
    DEVICE uint32_t pixels_empty(uint32_t stage) const { return bars + (kMaxStages + stage) * 16 + 8; }
};
constexpr int kBarrierBytes = (kMaxStages + 4) * 16;
constexpr int kTurnedPitch = 64 * 2 + 16;  // bytes of 64 filters of a column, and a pad for the banks

// The part of K of this CTA.
struct Part {
    int begin, end;
    DEVICE Part(const Params &g, int rank) : begin(g.units * rank / g.splits), end(g.units * (rank + 1) / g.splits) {}
};

template <int kPixels>
DEVICE void load_halo(const Params &g, const CUtensorMap *x_map, uint32_t to, uint32_t bar, int first, int chunk, int lane) {
    const int top = g.by_pitch(first), rows = g.by_pitch(first - top * g.pitch + kPixels + g.size - 2) + g.size;
    if (lane == 0) mbarrier_arrive_expect(bar, rows * g.pitch * 128);
    __syncwarp();
    LOOP for (int i = lane; i < rows; i += 32) {
        const int n = g.by_rows(top + i), h = top + i - n * g.rows_of_image - g.pad;
        tma_load_4d(to + i * g.pitch * 128, x_map, bar, chunk * kChunk, -g.pad, h, n);
    }
}

// A box of x for a filter of one tap: the tiles that read it run at once, and nobody reads it after them.
DEVICE void load_once_2d(uint32_t to, const CUtensorMap *map, uint32_t bar, int channel, int pixel) {
#if CONV_STREAM_X
    tma_load_2d_hint(to, map, bar, channel, pixel, l2_evict_first());
#else
    tma_load_2d(to, map, bar, channel, pixel);
#endif
}
DEVICE void load_once_3d(uint32_t to, const CUtensorMap *map, uint32_t bar, int pixel, int channel, int image) {
#if CONV_STREAM_X
    tma_load_3d_hint(to, map, bar, pixel, channel, image, l2_evict_first());
#else
    tma_load_3d(to, map, bar, pixel, channel, image);
#endif
}

// One warp. `first` is the first column of the tile: pixel (kIm2col) or position (kHalo).
template <Source kSource, int kPixels>
DEVICE void produce(const Params &g, const Memory &at, const CUtensorMap *x_map, const CUtensorMap *w_map, Part part, int first,
                    int filter) {
    const int lane = threadIdx.x % 32;
    Ring ring, pixel_ring;
    if constexpr (kSource == Source::kHalo) {
        for (int chunk = part.begin; chunk < part.end; ++chunk) {
            mbarrier_wait(at.pixels_empty(pixel_ring.stage), pixel_ring.phase ^ 1);
            load_halo<kPixels>(g, x_map, at.pixels + pixel_ring.stage * g.pixel_bytes, at.pixels_full(pixel_ring.stage), first, chunk, lane);
            pixel_ring.next(g.pixel_stages);
            for (int tap = 0; tap < g.taps; ++tap, ring.next(g.stages)) {
                mbarrier_wait(at.empty(ring.stage), ring.phase ^ 1);
                if (lane == 0) {
                    mbarrier_arrive_expect(at.full(ring.stage), g.weight_bytes);
                    tma_load_3d(at.weights + ring.stage * g.weight_bytes, w_map, at.full(ring.stage), chunk * kChunk, tap, filter);
                }
                __syncwarp();
            }
        }
    } else if (lane == 0) {
        const int n = g.by_plane(first), p = g.by_q(first - n * g.plane), q = first - n * g.plane - p * g.q;
        int chunk = g.by_taps(part.begin), tap = part.begin - chunk * g.taps;
        for (int unit = part.begin; unit < part.end; ++unit, ring.next(g.stages)) {
            const uint32_t bar = at.full(ring.stage), pixels = at.pixels + ring.stage * g.pixel_bytes;
            mbarrier_wait(at.empty(ring.stage), ring.phase ^ 1);
            mbarrier_arrive_expect(bar, g.weight_bytes + kPixels * 128);
            if (g.whole) {
                load_once_2d(pixels, x_map, bar, chunk * kChunk, first);
            } else {
                const int r = g.by_size(tap), s = tap - r * g.size;
                tma_load_im2col_4d(pixels, x_map, bar, chunk * kChunk, q * g.stride - g.pad, p * g.stride - g.pad, n, s, r);
            }
            tma_load_3d(at.weights + ring.stage * g.weight_bytes, w_map, bar, chunk * kChunk, tap, filter);
            if (++tap == g.taps) tap = 0, ++chunk;
        }
    }
}

// d += A B over a part of K, for the kBlocks blocks of 64 rows of warpgroup `group`.
template <class T, Source kSource, bool kFilterRows, int kBlocks, int kN>
DEVICE void consume(const Params &g, const Memory &at, Part part, int first, int group, float (&d)[kBlocks][kN / 2]) {
    const bool leader = threadIdx.x % 32 == 0;
    const int slot = first - g.by_pitch(first) * g.pitch;  // kHalo: of the tile's first position in its first row
    Ring ring, pixel_ring;
    uint32_t used = kMaxStages, pixels_used = kMaxStages;  // stages that products under way may still read
    int accumulate = 0;
    for (int unit = part.begin; unit < part.end; ++unit) {
        if constexpr (kSource == Source::kHalo) mbarrier_wait(at.pixels_full(pixel_ring.stage), pixel_ring.phase);
        const int steps = kSource == Source::kHalo ? g.taps : 1;
        int r = 0, s = 0;
        LOOP for (int step = 0; step < steps; ++step) {
            mbarrier_wait(at.full(ring.stage), ring.phase);
            uint32_t pixels = at.pixels + (kSource == Source::kHalo ? pixel_ring.stage : ring.stage) * g.pixel_bytes;
            if constexpr (kSource == Source::kHalo) pixels += (slot + r * g.pitch + s) * 128;
            const uint32_t weights = at.weights + ring.stage * g.weight_bytes, a_at = kFilterRows ? weights : pixels;
            const uint64_t a = matrix_descriptor(a_at + group * kBlocks * 8192, 16, 1024);
            const uint64_t b = matrix_descriptor(kFilterRows ? pixels : weights, 16, 1024);
            wgmma_fence();
            UNROLL for (int k = 0; k < 4; ++k)
                UNROLL for (int block = 0; block < kBlocks; ++block)
                    Wgmma<T, kN>::template ss<0, 0>(d[block], a + block * 512 + k * 2, b + k * 2, accumulate | k);
            wgmma_commit();
            accumulate = 1;
            wgmma_wait<1>();
            if (leader && used < kMaxStages) mbarrier_arrive(at.empty(used));
            if (kSource == Source::kHalo && step == 0 && leader && pixels_used < kMaxStages) mbarrier_arrive(at.pixels_empty(pixels_used));
            used = ring.stage;
            ring.next(g.stages);
            if (++s == g.size) s = 0, ++r;
        }
        pixels_used = pixel_ring.stage;
        if (kSource == Source::kHalo && g.pixel_stages == 1) {  // the next chunk needs this stage
            wgmma_wait<0>();
            if (leader) mbarrier_arrive(at.pixels_empty(pixels_used));
            pixels_used = kMaxStages;
        }
        pixel_ring.next(g.pixel_stages);
    }
    wgmma_wait<0>();
    UNROLL for (int block = 0; block < kBlocks; ++block) pin(d[block]);
}

// NHWC where rows of the product are filters: 16 columns of a warp's 16 filters go to [column][64 filters of the warpgroup] in shared
// memory, then the warps store 16 columns at a time.
template <class T>
DEVICE void turn(uint32_t stage, int column, const float *v) {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    stmatrix_x4_trans(stage + (column + lane / 16 * 8 + lane % 8) * kTurnedPitch + warp * 32 + lane / 8 % 2 * 16, pack<T>(v[0], v[1]),
                      pack<T>(v[2], v[3]), pack<T>(v[4], v[5]), pack<T>(v[6], v[7]));
}
template <class T, Source kSource>
DEVICE void store_turned(const Params &g, const Columns<kSource> &columns, uint32_t stage, int filter, int from, int to) {
    named_barrier_sync(2 + threadIdx.x / 128, 128);
    LOOP for (int column = from + threadIdx.x / 32 % 4 * 16; column < to; column += 64)
        store_nhwc<T, kSource, kTurnedPitch>(g, columns, stage + column * kTurnedPitch, column, filter, 0, 64);
    __syncwarp();
}

template <class T, int kM, int kN, int kGroups, int kPerSm, bool kNchw, Source kSource, bool kFilterRows = kNchw>
__global__ void __launch_bounds__(kGroups * 128 + 32, kPerSm)
tiled_product(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map, const __grid_constant__ Params g) {
    extern __shared__ unsigned char raw[];
    constexpr int kBlocks = kM / kGroups / 64, kThreads = kGroups * 128, kPixels = kFilterRows ? kN : kM;
    constexpr int kFilters = kFilterRows ? kM : kN;
    const Memory at(g, smem_address(raw));
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (warp == kGroups * 4 && elect_one()) {
        prefetch_tensor_map(&x_map), prefetch_tensor_map(&w_map);
        LOOP for (int i = 0; i < g.stages; ++i) mbarrier_init(at.full(i), 1), mbarrier_init(at.empty(i), kGroups * 4);
        LOOP for (int i = 0; i < g.pixel_stages && kSource == Source::kHalo; ++i)
            mbarrier_init(at.pixels_full(i), 1), mbarrier_init(at.pixels_empty(i), kGroups * 4);
        fence_mbarrier_init();
    }
    const int rank = g.splits > 1 ? cluster_rank() : 0, cluster = blockIdx.x / g.splits;  // a cluster has one tile
    const int pixel_tile = g.by_filter_tiles(cluster), filter = (cluster - pixel_tile * g.filter_tiles) * kFilters;
    const int first = pixel_tile * kPixels;
    const Part part(g, rank);
    __syncthreads();
    if (warp == kGroups * 4) {
        grid_dependency_wait();
        produce<kSource, kPixels>(g, at, &x_map, &w_map, part, first, filter);
        __syncwarp();
        if (g.splits > 1) cluster_sync(), cluster_sync();
        return;
    }
    float d[kBlocks][kN / 2];
    consume<T, kSource, kFilterRows, kBlocks, kN>(g, at, part, first, warp / 4, d);
    named_barrier_sync(1, kThreads);  // the ring's memory is free
    const Columns<kSource> columns(g, first);
    const int lane = threadIdx.x % 32, row = warp / 4 * kBlocks * 64 + warp % 4 * 16;
    constexpr int kPitch = kN * 2 + 16;  // bytes of a staged row, and a pad for the banks
    constexpr bool kTurned = kFilterRows && !kNchw;
    static_assert(!kTurned || (kBlocks == 1 && kN % 16 == 0), "a warpgroup turns 64 filters, 16 columns at a time");
    const auto store = [&](uint32_t stage, int block, int from, int to) {
        __syncwarp();
        if constexpr (kNchw)
            store_nchw<T, kSource, kPitch>(g, columns, stage, filter + row + block * 64, from, to);
        else
            store_nhwc<T, kSource, kPitch>(g, columns, stage, row + block * 64, filter, from, to);
        __syncwarp();
    };
    if constexpr (kTurned) {
        if (g.splits == 1) {
            const uint32_t stage = at.weights + warp / 4 * kN * kTurnedPitch;
            UNROLL for (int i = 0; i < kN / 2; i += 8) turn<T>(stage, i * 2, d[0] + i);
            store_turned<T>(g, columns, stage, filter + warp / 4 * 64, 0, kN);
            return;
        }
    } else if (g.splits == 1) {
        const uint32_t stage = at.weights + warp * 16 * kPitch, own = stage + lane % 16 * kPitch + lane / 16 * 16;
        UNROLL for (int block = 0; block < kBlocks; ++block) {
            const float (&v)[kN / 2] = d[block];
            UNROLL for (int i = 0; i < kN / 2; i += 8)
                stmatrix_x4(own + i * 4, pack<T>(v[i], v[i + 1]), pack<T>(v[i + 2], v[i + 3]), pack<T>(v[i + 4], v[i + 5]),
                            pack<T>(v[i + 6], v[i + 7]));
            store(stage, block, 0, kN);
        }
        return;
    }
    const uint32_t sums = at.weights + threadIdx.x * 16;
    const uint32_t stage = at.weights + kM * kN * 4 + (kTurned ? warp / 4 * kN * kTurnedPitch : warp * 16 * kPitch);
    UNROLL for (int block = 0; block < kBlocks; ++block)
        UNROLL for (int i = 0; i < kN / 2; i += 4)
            store_shared_x4(sums + (block * kN / 8 + i / 4) * kThreads * 16,
                            make_uint4(__float_as_uint(d[block][i]), __float_as_uint(d[block][i + 1]), __float_as_uint(d[block][i + 2]),
                                       __float_as_uint(d[block][i + 3])));
    cluster_sync();
    const int from = kN / g.splits * rank, to = from + kN / g.splits;
    LOOP for (int block = 0; block < kBlocks; ++block) {
        LOOP for (int i = from / 8; i < to / 8; i += 2) {
            float v[8] = {};
            LOOP for (int other = 0; other < g.splits; ++other) {
                const uint32_t their = map_to_cta(sums + (block * kN / 8 + i) * kThreads * 16, other);
                const uint4 low = load_cluster_x4(their), high = load_cluster_x4(their + kThreads * 16);
                v[0] += __uint_as_float(low.x), v[1] += __uint_as_float(low.y), v[2] += __uint_as_float(low.z), v[3] += __uint_as_float(low.w);
                v[4] += __uint_as_float(high.x), v[5] += __uint_as_float(high.y), v[6] += __uint_as_float(high.z), v[7] += __uint_as_float(high.w);
            }
            if constexpr (kTurned)
                turn<T>(stage, i * 8, v);
            else
                stmatrix_x4(stage + lane % 16 * kPitch + lane / 16 * 16 + i * 16, pack<T>(v[0], v[1]), pack<T>(v[2], v[3]),
                            pack<T>(v[4], v[5]), pack<T>(v[6], v[7]));
        }
        if constexpr (kTurned)
            store_turned<T>(g, columns, stage, filter + warp / 4 * 64, from, to);
        else
            store(stage, block, from, to);
    }
    cluster_sync();  // nobody reads the sums of a CTA that has ended
}

}  // namespace conv2d
#endif
