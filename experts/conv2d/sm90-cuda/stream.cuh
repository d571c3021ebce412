// Convolution as a matrix product on sm_90a, for many tiles: a CTA computes one tile after the other. Loads run ahead of the
// products by a ring, through all tiles of a CTA, and results leave by TMA stores of whole lines while the next tile is computed.
//
// The weights of a CTA's filters may stay in shared memory (`resident`), if they fit: then only pixels go through the ring.
#ifndef CONV2D_STREAM_CUH
#define CONV2D_STREAM_CUH

#include "implicit_gemm.cuh"

namespace conv2d {

//                                rows of the product, its columns   y      x
//   kPixelRows                   pixels, filters                    NHWC   NHWC
//   kFilterRows                  filters, pixels                    NHWC   NHWC
//   kNchwDirect                  filters, pixels of one image       NCHW   NCHW; 1x1, stride 1; planes are multiples of 8
enum class Form { kPixelRows, kFilterRows, kNchwDirect };

// A tile's place: `first` is a pixel of all images, of kNchwDirect of image `image`.
template <Form kForm, int kPixels, int kFilters>
struct Place {
    int first, image, filter;
    DEVICE Place(const Params &g, int tile) {
        const int pixel_tile = g.by_filter_tiles(tile);
        image = kForm == Form::kNchwDirect ? g.by_tiles_of_image(pixel_tile) : 0;
        first = (pixel_tile - image * g.tiles_of_image) * kPixels;
        filter = (tile - pixel_tile * g.filter_tiles) * kFilters;
    }
};

struct StreamMemory {
    uint32_t weights, pixels, output, bars;
    DEVICE StreamMemory(const Params &g, uint32_t raw) {
        weights = (raw + 1023) & ~1023u;
        pixels = weights + (g.resident ? g.units : g.stages) * g.weight_bytes;
        output = weights + g.output_at, bars = weights + g.barriers_at;
    }
    DEVICE uint32_t full(uint32_t stage) const { return bars + stage * 16; }
    DEVICE uint32_t empty(uint32_t stage) const { return bars + stage * 16 + 8; }
};

// One thread: all loads of this CTA.
template <Form kForm, int kPixels, int kFilters>
DEVICE void stream_in(const Params &g, const StreamMemory &at, const CUtensorMap *x_map, const CUtensorMap *w_map) {
    Ring ring;
    bool bring_weights = true;
    LOOP for (int tile = blockIdx.x; tile < g.tiles; tile += gridDim.x, bring_weights = !g.resident) {
        const Place<kForm, kPixels, kFilters> place(g, tile);
        const int n = g.by_plane(place.first), inside = place.first - n * g.plane, p = g.by_q(inside), q = inside - p * g.q;
        LOOP for (int unit = 0, chunk = 0, tap = 0; unit < g.units; ++unit, ring.next(g.stages)) {
            const uint32_t bar = at.full(ring.stage), pixels = at.pixels + ring.stage * g.pixel_bytes;
            mbarrier_wait(at.empty(ring.stage), ring.phase ^ 1);
            mbarrier_arrive_expect(bar, kPixels * 128 + (bring_weights ? g.weight_bytes : 0));
            if constexpr (kForm == Form::kNchwDirect) {
                UNROLL for (int i = 0; i < kPixels / 64; ++i)
                    load_once_3d(pixels + i * 8192, x_map, bar, place.first + i * 64, chunk * kChunk, place.image);
            } else if (g.whole) {
                load_once_2d(pixels, x_map, bar, chunk * kChunk, place.first);
            } else {
                const int r = g.by_size(tap), s = tap - r * g.size;
                tma_load_im2col_4d(pixels, x_map, bar, chunk * kChunk, q * g.stride - g.pad, p * g.stride - g.pad, n, s, r);
            }
            if (bring_weights)
                tma_load_3d(at.weights + (g.resident ? unit : ring.stage) * g.weight_bytes, w_map, bar, chunk * kChunk, tap, place.filter);
            if (++tap == g.taps) tap = 0, ++chunk;
        }
    }
}

// The products of one tile.
template <class T, Form kForm, int kBlocks, int kN>
DEVICE void multiply(const Params &g, const StreamMemory &at, Ring &ring, int group, float (&d)[kBlocks][kN / 2]) {
    constexpr int kMajor = kForm == Form::kNchwDirect, kStep = kMajor ? 128 : 2;
    const bool leader = threadIdx.x % 32 == 0;
    uint32_t used = kMaxStages;
    LOOP for (int unit = 0; unit < g.units; ++unit, ring.next(g.stages)) {
        mbarrier_wait(at.full(ring.stage), ring.phase);
        const uint32_t pixels = at.pixels + ring.stage * g.pixel_bytes;
        const uint32_t weights = at.weights + (g.resident ? unit : ring.stage) * g.weight_bytes;
        const uint64_t a = matrix_descriptor((kForm == Form::kPixelRows ? pixels : weights) + group * kBlocks * 8192, 16, 1024);
        const uint64_t b = matrix_descriptor(kForm == Form::kPixelRows ? weights : pixels, kMajor ? 8192 : 16, 1024);
        wgmma_fence();
        UNROLL for (int k = 0; k < 4; ++k)
            UNROLL for (int block = 0; block < kBlocks; ++block)
                Wgmma<T, kN>::template ss<0, kMajor>(d[block], a + block * 512 + k * 2, b + k * kStep, unit | k);
        wgmma_commit();
        wgmma_wait<1>();
        if (leader && used < kMaxStages) mbarrier_arrive(at.empty(used));
        used = ring.stage;
    }
    wgmma_wait<0>();
    if (leader) mbarrier_arrive(at.empty(used));
    UNROLL for (int block = 0; block < kBlocks; ++block) pin(d[block]);
}

// 64 rows of the product to shared memory, as the copy engine reads boxes of 128 bytes a row with the 128-byte swizzle.
// kFilterRows: one box of kN pixels by 64 filters. Otherwise kN / 64 boxes of 64 rows by 64 columns.
template <class T, Form kForm, int kN>
DEVICE void stage_rows(uint32_t to, const float (&d)[kN / 2]) {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16;
    UNROLL for (int i = 0; i < kN / 2; i += 8) {
        const uint32_t v[4] = {pack<T>(d[i], d[i + 1]), pack<T>(d[i + 2], d[i + 3]), pack<T>(d[i + 4], d[i + 5]), pack<T>(d[i + 6], d[i + 7])};
        if constexpr (kForm == Form::kFilterRows)
            stmatrix_x4_trans(to + swizzle_128(i * 2 + lane / 16 * 8 + lane % 8, row * 2 + lane / 8 % 2 * 16), v[0], v[1], v[2], v[3]);
        else
            stmatrix_x4(to + i / 32 * 8192 + swizzle_128(row + lane % 16, i % 32 * 4 + lane / 16 * 16), v[0], v[1], v[2], v[3]);
    }
}

// One thread: 64 staged rows to y; what lies outside of it is not written.
template <Form kForm, int kN>
DEVICE void store_rows(const CUtensorMap *y_map, uint32_t from, int row, int first, int image, int filter) {
    UNROLL for (int i = 0; i < (kForm == Form::kFilterRows ? 1 : kN / 64); ++i, from += 8192) {
        if constexpr (kForm == Form::kFilterRows) {
            tma_store_2d(y_map, from, filter + row, first);
        } else if constexpr (kForm == Form::kPixelRows) {
            tma_store_2d(y_map, from, filter + i * 64, first + row);
        } else {
            tma_store_3d(y_map, from, first + i * 64, filter + row, image);
        }
    }
}

template <class T, int kM, int kN, int kGroups, int kPerSm, Form kForm>
__global__ void __launch_bounds__(kGroups * 128 + 32, kPerSm)
stream_gemm(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map, const __grid_constant__ CUtensorMap y_map,
            const __grid_constant__ Params g) {
    extern __shared__ unsigned char raw[];
    constexpr int kBlocks = kM / kGroups / 64, kPixels = kForm == Form::kPixelRows ? kM : kN, kFilters = kForm == Form::kPixelRows ? kN : kM;
    const StreamMemory at(g, smem_address(raw));
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), group = warp / 4;
    if (warp == kGroups * 4 && elect_one()) {
        prefetch_tensor_map(&x_map), prefetch_tensor_map(&w_map), prefetch_tensor_map(&y_map);
        LOOP for (int i = 0; i < g.stages; ++i) mbarrier_init(at.full(i), 1), mbarrier_init(at.empty(i), kGroups * 4);
        fence_mbarrier_init();
    }
    __syncthreads();
    if (warp == kGroups * 4) {
        grid_dependency_wait();
        if (elect_one()) stream_in<kForm, kPixels, kFilters>(g, at, &x_map, &w_map);
        return;
    }
    const bool storer = threadIdx.x % 128 == 0;
    const uint32_t output = at.output + group * kBlocks * kN * 128;
    Ring ring;
    LOOP for (int tile = blockIdx.x; tile < g.tiles; tile += gridDim.x) {
        float d[kBlocks][kN / 2];
        multiply<T, kForm, kBlocks, kN>(g, at, ring, group, d);
        if (storer) bulk_wait_read<0>();
        named_barrier_sync(1 + group, 128);
        UNROLL for (int block = 0; block < kBlocks; ++block) stage_rows<T, kForm, kN>(output + block * kN * 128, d[block]);
        fence_async_shared();
        named_barrier_sync(1 + group, 128);
        if (storer) {
            const Place<kForm, kPixels, kFilters> place(g, tile);
            UNROLL for (int block = 0; block < kBlocks; ++block)
                store_rows<kForm, kN>(&y_map, output + block * kN * 128, (group * kBlocks + block) * 64, place.first, place.image, place.filter);
            bulk_commit();
        }
        __syncwarp();
    }
    if (storer) bulk_wait_read<0>();
}

}  // namespace conv2d
#endif
