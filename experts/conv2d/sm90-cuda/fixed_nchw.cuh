// The NCHW kernel of fixed.cuh, and its launch.
#ifndef CONV2D_FIXED_NCHW_CUH
#define CONV2D_FIXED_NCHW_CUH

#include <klineage/sm90/v1/tensor_map.cuh>

#include "fixed.cuh"

namespace conv2d {
namespace fixed {

// NCHW. A tile is kSpan consecutive positions, or pixels where planes are `exact` (kFlat), or a rectangle tile_h x tile_w of one image.
// Rows are counted through all images, h + 1 of them for each: row n * (h + 1) + h is the row of zeros below image n.
struct Geometry {
    const __half *x, *weights;
    __half *y;
    int n, h, w, plane, tile_h, tile_w, tiles_w, tiles, blocks_w, blocks, exact;
    Divider by_plane, by_w, by_rows, by_tiles_w, by_tiles;
};

struct Rectangle {
    int n, p, q;  // image, first output row, first output column

    DEVICE explicit Rectangle(const Geometry &g) {
        const int tile = blockIdx.x;
        n = g.by_tiles(tile);
        const int inside = tile - n * g.tiles, band = g.by_tiles_w(inside);
        p = band * g.tile_h, q = (inside - band * g.tiles_w) * g.tile_w;
    }
};

// NCHW: the product is transposed, y[filter][pixel] = w[filter][k] x[k][pixel], so that x stays [channel][pixel]: B is
// N-major, 8 pixels of a channel are 16 bytes. A shift by a row moves whole blocks of 8 pixels; a shift by a pixel does
// not, so each group of 16 channels lies there three times. The weights come [filter][channel][tap] and go to A
// registers: thread q of a quad takes channels 4 q to 4 q + 3, which the rows of B follow.
// Positions are pixels counted through all images with a row of zeros below each: (n (h + 1) + row) w + column.
template <bool kFlat>
__global__ void __launch_bounds__(256, 1)
conv_nchw(const __grid_constant__ Geometry g) {
    extern __shared__ unsigned char raw[];
    unsigned char *const smem = raw + (-shared_address(raw) & 1023);
    const unsigned base = shared_address(smem), image = base + kNchwImageAt, bars = base + kNchwBarriersAt;
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, filter = warp * 16;
    if (thread == 0) {
        for (int i = 0; i < 4; ++i) barrier_init(bars + i * 8, kFlat ? 4 : 8);
        fence_barrier_init();
    }
    const auto fetch = [&](int quarter) {  // 16 channels of this warp's filters: 18 chunks of 16 bytes for each
        const char *const from = reinterpret_cast<const char *>(g.weights + filter * kDepth) + quarter * 288;
        const unsigned to = base + warp * kWarpBytes + quarter % 2 * (kWarpBytes / 2);
        UNROLL for (int i = 0; i < 8; ++i)
            copy_async(to + (lane / 16 + 2 * i) * 288 + lane % 16 * 16, from + (lane / 16 + 2 * i) * kDepth * 2 + lane % 16 * 16);
        copy_async(to + lane / 2 * 288 + 256 + lane % 2 * 16, from + lane / 2 * kDepth * 2 + 256 + lane % 2 * 16);
        copy_commit();
    };
    // The position of the tile's output pixel o
    const auto position = [&](int o) { return kFlat && g.exact ? o + g.by_plane(o) * g.w : o; };

    if (g.plane > 0) fetch(0);  // a branch: without one the compiler computes all addresses first
    // Where blocks of 8 input pixels are in an image's first channel; negative: zeros. Bit 0: at the left edge; bit 1: at the right.
    int *const table = reinterpret_cast<int *>(smem + kTableAt);
    const int first_pixel = kFlat ? blockIdx.x * kSpan : 0, start = position(first_pixel);
    if (kFlat && thread < kTable) {
        const int q = start + (thread - 1) * 8 + g.w, r = g.by_w(q), column = q - r * g.w;  // two rows ahead
        const int n = g.by_rows(max(r - 2, 0)), h = r - 2 - n * (g.h + 1);
        const bool inside = r >= 2 && n < g.n && h < g.h && thread - 1 <= g.blocks;
        table[thread] = (inside ? n * kC * g.plane + h * g.w + column : -8) | (column == 0) | (column == g.w - 8) << 1;
    }
    __syncthreads();
    // A warpgroup brings every other group of 16 channels; this thread's channel of them, and its blocks first_block + 8 i.
    const int group = warp / 4, channel = thread % 128 / 8, first_block = thread % 8 - 1, blocks = g.blocks;
    const unsigned to = kNchwImageAt + first_block * kBlockPitch + (channel / 2 % 2 * 8 + channel / 4 * 2 + channel % 2) * 16;
    int source[6];
    UNROLL for (int i = 0; i < 6; ++i) source[i] = kFlat ? table[thread % 8 + 8 * i] : -8;
    uint4 v[6];
    const auto load = [&](int j) {
        UNROLL for (int i = 0; i < 6; ++i)
            v[i] = source[i] >= 0 ? load_pixels(g.x + (source[i] & ~7) + (j * 16 + channel) * g.plane) : make_uint4(0, 0, 0, 0);
    };
    const auto fill = [&](int j, int i) {
        const unsigned last = i > 0 && thread % 8 == 7 ? v[i > 0 ? i - 1 : 0].w : v[i].w;
        const unsigned next = i < 5 && thread % 8 == 0 ? v[i < 5 ? i + 1 : 5].x : v[i].x;
        unsigned before = __shfl_sync(~0u, last, thread - 1 & 7, 8), after = __shfl_sync(~0u, next, thread + 1 & 7, 8);
        before = source[i] & 1 ? 0 : before, after = source[i] & 2 ? 0 : after;
        const auto join = [](unsigned low, unsigned high) { return __byte_perm(low, high, 0x5432); };
        const unsigned xy = join(v[i].x, v[i].y), yz = join(v[i].y, v[i].z), zw = join(v[i].z, v[i].w);
        unsigned char *const at = smem + to + 8 * i * kBlockPitch + j * 3 * kCopyBytes;  // no branch: there is room for blocks that are not used
        *reinterpret_cast<uint4 *>(at) = make_uint4(join(before, v[i].x), xy, yz, zw);
        *reinterpret_cast<uint4 *>(at + kCopyBytes) = v[i];
        *reinterpret_cast<uint4 *>(at + 2 * kCopyBytes) = make_uint4(xy, yz, zw, join(v[i].w, after));
    };
    const auto filled = [&](int j) {
        fence_proxy(), __syncwarp();
        if (lane == 0) barrier_arrive(bars + j * 8);
        __syncwarp();
    };
    unsigned a[2][9][4];
    const auto load_a = [&](int j, int half) {  // of filters lane / 4 + 8 half
        unsigned in[18];  // 4 channels by 9 taps
        const uint2 *const from = reinterpret_cast<const uint2 *>(
            smem + warp * kWarpBytes + j % 2 * (kWarpBytes / 2) + (half * 8 + lane / 4) * 288 + lane % 4 * 72);
        UNROLL for (int i = 0; i < 9; ++i) in[2 * i] = from[i].x, in[2 * i + 1] = from[i].y;
        UNROLL for (int tap = 0; tap < 9; ++tap)
            UNROLL for (int c = 0; c < 4; c += 2)
                a[j % 2][tap][c + half] = __byte_perm(in[(c * 9 + tap) / 2], in[(c * 9 + 9 + tap) / 2], tap % 2 ? 0x5432 : 0x7610);
    };

    if constexpr (kFlat) load(group);
    if (g.plane > 0) fetch(1);  // a branch: without one the compiler moves it before the loads of x
    if constexpr (kFlat) {
        UNROLL for (int i = 0; i < 6; ++i) fill(group, i);
        filled(group);
        load(group + 2);
    } else {  // a rectangle, element by element
        const Rectangle tile(g);
        for (int e = thread; e < 12 * 16 * blocks; e += 256) {
            const int copy = e / (16 * blocks), c = e / blocks % 16, b = e % blocks, h = tile.p + b / 4 - 1;
            __half pixels[8];
            UNROLL for (int i = 0; i < 8; ++i) {
                const int w = tile.q - 1 + b % 4 * 8 + i + copy % 3;
                const bool inside = h >= 0 && h < g.h && w >= 0 && w < g.w;
                pixels[i] = inside ? g.x[static_cast<long long>(tile.n * kC + copy / 3 * 16 + c) * g.plane + h * g.w + w] : __half(0.0f);
            }
            __half2 *const at = reinterpret_cast<__half2 *>(smem + kNchwImageAt + copy * kCopyBytes + b * kBlockPitch +
                                                            (c / 2 % 2 * 8 + c / 4 * 2 + c % 2) * 16);
            UNROLL for (int i = 0; i < 4; ++i) at[i] = __halves2half2(pixels[2 * i], pixels[2 * i + 1]);
        }
        UNROLL for (int j = 0; j < 4; ++j) filled(j);
    }
    copy_wait<1>(), __syncwarp();
    load_a(0, 0), load_a(0, 1);
    barrier_wait(bars);

    float d[kSpan / 2];
    const unsigned row_bytes = g.blocks_w * kBlockPitch;
    // Where the columns 0 to 127 and 128 to 191 of the product are: a tile may cross into the next image after 64 or 128 pixels.
    const int second = position(first_pixel + 64) - start, third = position(first_pixel + 128) - start;
    const int first_part = second == 64 ? 0 : second, last_part = second == 64 ? third : 0;
    // N-major, no swizzle: blocks of 8 channels by 8 pixels lie 128 bytes apart in K and kBlockPitch apart in N
    const auto b_of = [&](int part, int j, int tap) {
        return (image + part / 8 * kBlockPitch + (j * 3 + tap % 3) * kCopyBytes + tap / 3 * row_bytes) >> 4 | 8ull << 16 |
               static_cast<unsigned long long>(kBlockPitch >> 4) << 32;
    };
    UNROLL for (int j = 0; j < 4; ++j) {
        if (j > 0) barrier_wait(bars + j * 8);
        if (j == 3 && warp >= 4) turn_wait();  // the first warpgroup stores beside the products of the second
        wgmma_fence();
        UNROLL for (int tap = 0; tap < 9; ++tap) {
            wgmma_first(d, a[j % 2][tap], b_of(first_part, j, tap), j + tap > 0);
            if (j < 3) wgmma_64<1, 64>(d, a[j % 2][tap], b_of(last_part, j, tap), j + tap > 0);
            if (j == 3) continue;
            if (tap < 6 && j == 1 && kFlat) fill(group + 2, tap);
            if (tap == 2) wgmma_commit();
            if (tap == 5 && j == 1 && kFlat) filled(group + 2);
            if (tap == 5) {
                if (j > 0) wgmma_wait<1>();  // the A registers of the group before
                copy_wait<0>(), __syncwarp();
                load_a(j + 1, 0);
                if (j < 2) fetch(j + 2);
            }
            if (tap == 7) load_a(j + 1, 1);
        }
        wgmma_commit();
    }
    // The last 16 channels of the columns 128 to 191, while the others are stored: a warp with three or four products under way waits
    // before it can start another, so the stores lie between them.
    const auto last_products = [&](int from_tap, int to_tap) {
        wgmma_fence();
        UNROLL for (int tap = 0; tap < 9; ++tap)
            if (tap >= from_tap && tap < to_tap) wgmma_64<1, 64>(d, a[1][tap], b_of(last_part, 3, tap), 1);
        wgmma_commit();
    };
    last_products(0, kFlat ? 4 : 9);

    unsigned char *const stage = smem + warp * kWarpBytes;  // [filter][pixel] of this warp, where its weights were
    const unsigned row = shared_address(stage) + lane % 16 * kStagePitch + lane / 16 * 16;
    const auto put = [&](int from, int to) {
        UNROLL for (int b = from; b < to; b += 2)
            stmatrix(row + b * 16, pack(d[b * 4], d[b * 4 + 1]), pack(d[b * 4 + 2], d[b * 4 + 3]), pack(d[b * 4 + 4], d[b * 4 + 5]),
                     pack(d[b * 4 + 6], d[b * 4 + 7]));
        __syncwarp();
    };
    if constexpr (kFlat) {
        // Where 8 pixels of the first filter of this warp go; -1: nowhere. A lane has 8 of the columns 0 to 127 of every other filter,
        // and 8 of the other columns of every fourth.
        const auto place_of = [&](int q) {
            const int r = g.by_w(q), n = g.by_rows(r), h = r - n * (g.h + 1);
            return n < g.n && h < g.h ? (n * kF + filter) * g.plane + h * g.w + q - r * g.w : -1;
        };
        const int place = place_of(start + first_part + lane % 16 * 8), last_place = place_of(start + last_part + lane % 8 * 8);
        const auto store = [&](auto filters, int at, int chunk, int from_filter, int to_filter) {
            const int own = lane * filters.value / 32;
            if (at >= 0)
                UNROLL for (int f = from_filter; f < to_filter; f += filters.value)
                    *reinterpret_cast<uint4 *>(g.y + at + (own + f) * g.plane) =
                        *reinterpret_cast<const uint4 *>(stage + (own + f) * kStagePitch + chunk * 16);
            __syncwarp();
        };
        wgmma_wait<1>(), settle<0, 64>(d);
        if (warp < 4) turn_pass();
        put(0, 16), last_products(4, 6);
        store(Constant<2>(), place, lane % 16, 0, 8), last_products(6, 9);
        store(Constant<2>(), place, lane % 16, 8, 16);
        wgmma_wait<0>(), settle<64, 96>(d);
        put(16, kBlocks), store(Constant<4>(), last_place, 16 + lane % 8, 0, 16);
    } else {
        wgmma_wait<0>(), settle<0, 96>(d);
        if (warp < 4) turn_pass();
        const Rectangle tile(g);
        put(0, kBlocks);
        if (lane >= kBlocks || tile.n >= g.n || tile.p + lane / 4 >= g.h) return;
        const int place = (tile.p + lane / 4) * g.w + tile.q + lane % 4 * 8, width = min(g.w - tile.q - lane % 4 * 8, 8);
        __half *const y = g.y + static_cast<long long>(tile.n * kF + filter) * g.plane + place;
        for (int f = 0; f < 16; ++f)
            for (int i = 0; i < width; ++i)
                y[f * g.plane + i] = *reinterpret_cast<const __half *>(stage + f * kStagePitch + lane * 16 + i * 2);
    }
}

// nullptr, or what is wrong.
inline const char *run_nchw(const Shape &s, const void *x, const void *w, void *y, cudaStream_t stream) {
    Geometry g = {};
    g.x = static_cast<const __half *>(x), g.weights = static_cast<const __half *>(w), g.y = static_cast<__half *>(y);
    g.n = s.n, g.h = s.h, g.w = s.w, g.plane = s.h * s.w, g.blocks_w = s.w / 8;
    g.exact = g.plane % 64 == 0 && g.plane >= kSpan && kBlocks + 3 * g.blocks_w <= kMaxBlocks, g.blocks = kBlocks + (2 + g.exact) * g.blocks_w;
    g.by_plane = Divider(g.plane), g.by_w = Divider(g.w), g.by_rows = Divider(g.h + 1);
    const bool flat = g.w % 8 == 0 && g.blocks <= kMaxBlocks;
    int tiles = divide_up(g.exact ? g.n * g.plane : (g.n * (g.h + 1) - 1) * g.w, kSpan);
    if (!flat) {
        g.tile_h = 6, g.tile_w = 32, g.blocks_w = 4, g.blocks = kBlocks + 8, g.exact = 0;
        g.tiles_w = divide_up(g.w, g.tile_w), g.tiles = g.tiles_w * divide_up(g.h, g.tile_h), tiles = g.n * g.tiles;
        g.by_tiles_w = Divider(g.tiles_w), g.by_tiles = Divider(g.tiles);
    }
    klineage::sm90::Launch how;
    how.grid = dim3(tiles), how.block = dim3(256), how.shared_bytes = kNchwSharedBytes, how.stream = stream;
    return klineage::sm90::launch(flat ? conv_nchw<true> : conv_nchw<false>, how, g);
}

}  // namespace fixed
}  // namespace conv2d
#endif
