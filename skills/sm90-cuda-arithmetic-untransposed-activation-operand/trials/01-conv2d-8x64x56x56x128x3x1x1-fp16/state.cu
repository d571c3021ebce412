#include <cuda.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "klineage.h"

#define DEVICE __device__ __forceinline__
#define UNROLL _Pragma("unroll")

namespace {

constexpr int kC = 64, kF = 128, kDepth = kC * 9;                // K of the implicit GEMM
constexpr int kTile = 192;                                       // output pixels of a block: 64 per warpgroup
constexpr int kWeightBytes = kF * kDepth * 2;
constexpr int kTapBytes = kWeightBytes / 9;                      // NHWC: one tap, 128 filters x 64 channels
constexpr int kQuarterBytes = kWeightBytes / 4;                  // NCHW: 16 channels of all filters, all taps
constexpr int kGroupBytes = kQuarterBytes / 16;                  // of which 8 filters
constexpr int kSlots = 625, kMaxRows = 80;                       // NHWC: input pixels, input rows of a tile
constexpr int kImageAt = kWeightBytes, kBarriersAt = kImageAt + kSlots * 128;
constexpr int kNchwSlots = 464, kNchwImageAt = 3 * kQuarterBytes;  // NCHW: the last quarter of the weights comes to
constexpr int kRawAt = kNchwImageAt + kNchwSlots * 128;            // where the tile of x was before its conversion
constexpr int kRawBytes = 448 * kC * 2 + 128;
constexpr int kSharedBytes = 1024 + kBarriersAt + (kMaxRows + 9) * 8;
static_assert(kRawAt + kRawBytes <= kBarriersAt && kQuarterBytes <= kRawBytes && kRawAt % 1024 == 0, "NCHW");
constexpr int kEarlyTaps = 2;                                    // NHWC: taps requested together with x
constexpr int kStagePitch = 144;                                 // NCHW epilogue: bytes of 64 pixels, and a pad
static_assert(kSharedBytes <= 232448 && 3 * kF * kStagePitch <= 2 * kQuarterBytes, "shared memory of one block");

struct Divider {  // n / d for 0 <= n < 2^31
    unsigned multiplier = 0, shift = 0;
    Divider() = default;
    explicit Divider(int d) {
        for (shift = 31; 1u << (shift - 31) < static_cast<unsigned>(d);) ++shift;
        multiplier = static_cast<unsigned>(((1ull << shift) + d - 1) / d);
    }
    DEVICE int operator()(int n) const { return static_cast<int>(1ull * static_cast<unsigned>(n) * multiplier >> shift); }
};

// A tile is kTile consecutive output pixels (tile_w = 0), or a rectangle tile_h x tile_w of one image. Input rows lie
// `pitch` pixels of 128 bytes apart in shared memory. Rows are counted through all images, h + 1 of them for each:
// row n * (h + 1) is the row of zeros above image n, and below image n - 1.
struct Geometry {
    const __half *x;
    __half *y;
    int n, h, w, plane, total, tile_h, tile_w, tiles_w, tiles, pitch, box_w, vector;
    Divider by_plane, by_w, by_rows, by_tile_w, by_tiles_w, by_tiles, by_vectors;
};

struct Tile {
    int n, p, column;  // rectangle: image, first output row and the input column of slot 0; otherwise column = -1
    int first_row, rows;

    DEVICE explicit Tile(const Geometry &g) : n(0), p(0), column(-1) {
        const int tile = blockIdx.x;
        if (g.tile_w == 0) {
            const int first = tile * kTile, last = min(first + kTile, g.total) - 1;
            const int first_n = g.by_plane(first), last_n = g.by_plane(last);
            first_row = first_n * (g.h + 1) + g.by_w(first - first_n * g.plane);
            rows = last_n * (g.h + 1) + g.by_w(last - last_n * g.plane) + 3 - first_row;
        } else {
            n = g.by_tiles(tile);
            const int inside = tile - n * g.tiles, band = g.by_tiles_w(inside);
            p = band * g.tile_h, column = (inside - band * g.tiles_w) * g.tile_w - 1;
            first_row = n * (g.h + 1) + p, rows = g.tile_h + 2;
        }
    }
    // Input row i of the tile; h = -1 or g.h is a row of zeros.
    DEVICE void row_of(const Geometry &g, int i, int &image, int &h) const {
        image = g.tile_w ? n : g.by_rows(first_row + i);
        h = first_row + i - image * (g.h + 1) - 1;
    }
    // Output pixel m of the tile: the slot of its upper left input pixel, its image and its place in that; false: none.
    DEVICE bool pixel_of(const Geometry &g, int m, int &row, int &slot, int &image, int &place) const {
        int q;
        bool valid;
        if (g.tile_w == 0) {
            const int pixel = min(static_cast<int>(blockIdx.x) * kTile + m, g.total - 1);
            valid = pixel == static_cast<int>(blockIdx.x) * kTile + m;
            image = g.by_plane(pixel), place = pixel - image * g.plane;
            const int r = g.by_w(place);
            q = place - r * g.w, row = image * (g.h + 1) + r - first_row;
        } else {
            row = g.by_tile_w(m), q = m - row * g.tile_w + column + 1;
            image = n, place = (p + row) * g.w + q;
            valid = p + row < g.h && q < g.w;
        }
        slot = row * g.pitch + q - column - 1;
        return valid;
    }
};

DEVICE unsigned shared_address(const void *p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }
DEVICE void barrier_init(unsigned bar, int count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory"); }
DEVICE void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void fence_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE void barrier_arrive(unsigned bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory"); }
DEVICE void barrier_expect(unsigned bar, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
DEVICE void barrier_wait(unsigned bar) {  // every barrier completes once
    asm volatile("{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0;\n@!done bra again;\n}" ::"r"(bar) : "memory");
}
DEVICE void prefetch(const CUtensorMap *map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }
#define BULK_LOAD(dims) "cp.async.bulk.tensor." dims ".shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, "
DEVICE void load_row(unsigned to, const CUtensorMap *map, unsigned bar, int w, int h, int n) {
    asm volatile(BULK_LOAD("4d") "{%2, %3, %4, %5}], [%6];" ::"r"(to), "l"(map), "r"(0), "r"(w), "r"(h), "r"(n), "r"(bar) : "memory");
}
DEVICE void load_tap(unsigned to, const CUtensorMap *map, unsigned bar, int k) {
    asm volatile(BULK_LOAD("5d") "{%2, %3, %3, %3, %3}], [%4];" ::"r"(to), "l"(map), "r"(k), "r"(0), "r"(bar) : "memory");
}
DEVICE void load_quarter(unsigned to, const CUtensorMap *map, unsigned bar, int k) {
    asm volatile(BULK_LOAD("2d") "{%2, %3}], [%4];" ::"r"(to), "l"(map), "r"(k), "r"(0), "r"(bar) : "memory");
}
DEVICE void copy_bulk(unsigned to, const void *from, unsigned bytes, unsigned bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(bar) : "memory");
}
DEVICE void ldmatrix(unsigned (&a)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(address) : "memory");
}
DEVICE void stmatrix(unsigned address, unsigned a, unsigned b, unsigned c, unsigned d) {  // four 8x8 blocks, each transposed
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
DEVICE unsigned pack(float low, float high) {
    const __half2 v = __floats2half2_rn(low, high);
    return reinterpret_cast<const unsigned &>(v);
}

#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D16(i) D4(i), D4(i + 4), D4(i + 8), D4(i + 12)
// d[64 x 128] += a[64 x 16] b[16 x 128]: a in registers, b K-major in shared memory with the 128-byte swizzle.
DEVICE void wgmma(float (&d)[64], const unsigned (&a)[4], unsigned long long b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
        "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, "
        "%46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "{%64, %65, %66, %67}, %68, p, 1, 1, 0;\n}"
        : D16(0), D16(16), D16(32), D16(48)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending> DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory"); }

// The 16-byte chunk of an input pixel that a lane addresses for ldmatrix: 16 channels of a row of the A operand.
DEVICE unsigned chunk_address(unsigned image, int slot, int lane) {
    return image + slot * 128 + ((lane / 16 ^ (slot & 7)) << 4);
}

__global__ void __launch_bounds__(384, 1)
conv_nhwc(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map, const __grid_constant__ Geometry g) {
    extern __shared__ unsigned char raw[];
    const unsigned weights = (shared_address(raw) + 1023) & ~1023u, image = weights + kImageAt;
    const unsigned row_bars = weights + kBarriersAt, tap_bars = row_bars + kMaxRows * 8;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = warp / 4;
    if (threadIdx.x == 0) prefetch(&x_map);
    if (threadIdx.x == 352) prefetch(&w_map);
    const Tile tile(g);

    const auto request_tap = [&](int tap) {
        barrier_expect(tap_bars + tap * 8, kTapBytes);
        load_tap(weights + tap * kTapBytes, &w_map, tap_bars + tap * 8, tap * kC);
    };
    if (lane == 0) {  // the rows of x and the first taps at once; a warp requests what it has made a barrier for
        for (int i = warp; i < tile.rows; i += 12) {
            barrier_init(row_bars + i * 8, 1), fence_barrier_init();
            int n, h;
            tile.row_of(g, i, n, h);
            barrier_expect(row_bars + i * 8, g.box_w * 128);
            load_row(image + i * g.pitch * 128, &x_map, row_bars + i * 8, tile.column, h, n);
        }
        const int tap = 11 - warp;
        if (tap < 9) {
            barrier_init(tap_bars + tap * 8, 1), fence_barrier_init();
            if (tap < kEarlyTaps) request_tap(tap);
        }
    }
    __syncthreads();
    const int m0 = warp * 16;
    int row, slot, n, place, ready, last, unused;
    long long offset[2];  // of the two rows of the accumulators that this lane holds
    for (int i = 0; i < 2; ++i) {
        const bool valid = tile.pixel_of(g, m0 + lane / 4 + i * 8, row, slot, n, place);
        offset[i] = valid ? static_cast<long long>(n * g.plane + place) * kF : -1;
    }
    tile.pixel_of(g, group * 64, ready, unused, n, place), tile.pixel_of(g, group * 64 + 63, last, unused, n, place);
    tile.pixel_of(g, m0 + lane % 16, row, slot, n, place);

    unsigned a[2][4][4];  // the A operand of two taps: 16 pixels by 64 channels for a warp
    const auto load_a = [&](unsigned (&to)[4][4], int tap) {
        for (; ready <= last + tap / 3; ++ready) barrier_wait(row_bars + ready * 8);
        const unsigned address = chunk_address(image, slot + tap / 3 * g.pitch + tap % 3, lane);
        UNROLL for (int j = 0; j < 4; ++j) ldmatrix(to[j], address ^ j << 5);
    };
    float d[64];
    load_a(a[0], 0);
    if (threadIdx.x == 256)  // the other taps when the last rows are there, which they would delay
        for (int i = kEarlyTaps; i < 9; ++i) request_tap(i);
    __syncwarp();
    UNROLL for (int tap = 0; tap < 9; ++tap) {
        barrier_wait(tap_bars + tap * 8);
        // K-major, 128-byte swizzle: groups of 8 filters lie 1,024 bytes apart
        const unsigned long long b = (weights + tap * kTapBytes) >> 4 | 1ull << 16 | 64ull << 32 | 1ull << 62;
        wgmma_fence();
        UNROLL for (int j = 0; j < 4; ++j) wgmma(d, a[tap % 2][j], b + 2 * j, tap + j > 0);
        wgmma_commit();
        if (tap < 8) wgmma_wait<1>(), load_a(a[(tap + 1) % 2], tap + 1);
    }
    wgmma_wait<0>();

    // The filters lie in shared memory in such an order that a lane holds 8 neighbours: 16 bytes of the output.
    UNROLL for (int j = 0; j < 64; j += 16)
        UNROLL for (int i = 0; i < 4; i += 2)
            if (offset[i / 2] >= 0)
                *reinterpret_cast<uint4 *>(g.y + offset[i / 2] + j * 2 + lane % 4 * 8) =
                    make_uint4(pack(d[j + i], d[j + i + 1]), pack(d[j + i + 4], d[j + i + 5]),
                               pack(d[j + i + 8], d[j + i + 9]), pack(d[j + i + 12], d[j + i + 13]));
}

// NCHW: the block converts its tile of x and the weights to channels-last in shared memory. Three warpgroups convert x
// and compute; the fourth regroups the weights [filter][channel][tap] into [tap][filter][channel], 16 channels at a time.
__global__ void __launch_bounds__(512, 1)
conv_nchw(const __grid_constant__ CUtensorMap w_map, const __grid_constant__ Geometry g) {
    extern __shared__ unsigned char raw[];
    unsigned char *const smem = raw + (-shared_address(raw) & 1023);
    const unsigned base = shared_address(smem), image = base + kNchwImageAt;
    const unsigned raw_bars = base + kBarriersAt, ready_bars = raw_bars + 32, free_bar = ready_bars + 32, x_bar = free_bar + 8;
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, group = warp / 4;
    const Tile tile(g);
    const auto quarter_at = [](int quarter) { return quarter < 3 ? quarter * kQuarterBytes : kRawAt; };
    const auto request_quarter = [&](int quarter) {
        barrier_expect(raw_bars + quarter * 8, kQuarterBytes);
        load_quarter(base + quarter_at(quarter), &w_map, raw_bars + quarter * 8, quarter * (kDepth / 4));
    };
    // Rows of x that follow each other in memory from row i on; 0 when row i is zeros.
    const auto run_of = [&](int i, int &n, int &h) {
        tile.row_of(g, i, n, h);
        return h >= 0 && n < g.n ? min(tile.rows - i, g.h - h) : 0;
    };
    const int row_bytes = g.w * 2, channel_bytes = tile.rows * row_bytes;

    if (thread == 384) {
        for (int i = 0; i < 4; ++i) barrier_init(raw_bars + i * 8, 1), barrier_init(ready_bars + i * 8, 128);
        barrier_init(free_bar, 12), barrier_init(x_bar, 1), fence_barrier_init();
    }
    __syncthreads();
    if (group == 3) {
        if (thread == 384) request_quarter(0), request_quarter(1);
        for (int quarter = 0; quarter < 4; ++quarter) {
            barrier_wait(raw_bars + quarter * 8);
            unsigned char *const at = smem + quarter_at(quarter);
            unsigned in[2][36];  // 8 channels of 2 filters; a warp holds whole groups of 8 filters
            UNROLL for (int u = 0; u < 2; ++u) {
                const int f = thread % 128 / 2 + u * 64, octet = thread % 2;
                const uint4 *const from = reinterpret_cast<const uint4 *>(at + f * (kQuarterBytes / kF) + octet * 144);
                UNROLL for (int i = 0; i < 9; ++i) {
                    const uint4 v = from[i];
                    in[u][i * 4] = v.x, in[u][i * 4 + 1] = v.y, in[u][i * 4 + 2] = v.z, in[u][i * 4 + 3] = v.w;
                }
            }
            __syncwarp();
            UNROLL for (int u = 0; u < 2; ++u) {
                const int f = thread % 128 / 2 + u * 64, octet = thread % 2;
                UNROLL for (int tap = 0; tap < 9; ++tap) {
                    const auto pair = [&](int c) {
                        const int low = c * 9 + tap, high = low + 9;
                        return __byte_perm(in[u][low / 2], in[u][high / 2], low % 2 ? 0x5432 : 0x7610);
                    };
                    *reinterpret_cast<uint4 *>(at + f / 8 * kGroupBytes + tap * 256 + octet * 128 + f % 8 * 16) =
                        make_uint4(pair(0), pair(2), pair(4), pair(6));
                }
            }
            fence_proxy(), barrier_arrive(ready_bars + quarter * 8);
        }
        return;
    }

    if (g.vector) {
        if (lane == 0) {  // octets of channels lie 16 bytes further apart than their size, for the banks
            int bytes = 0;
            for (int i = 0, n, h; i < tile.rows;) {
                const int run = run_of(i, n, h);
                for (int c = warp; run && c < kC; c += 12)
                    copy_bulk(base + kRawAt + c * channel_bytes + c / 8 * 16 + i * row_bytes,
                              g.x + static_cast<long long>(n * kC + c) * g.plane + h * g.w, run * row_bytes, x_bar);
                bytes += run * row_bytes * kC;
                i += run ? run : 1;
            }
            if (warp == 0) barrier_expect(x_bar, bytes);
        }
        __syncwarp(), barrier_wait(x_bar);
        const int vectors = g.w / 8;
        for (int e = thread; e < tile.rows * vectors * 8; e += 384) {  // 8 channels by 8 pixels
            const int row = g.by_vectors(e / 8), v = e / 8 - row * vectors, octet = e % 8;
            int n, h;
            const bool inside = run_of(row, n, h);
            uint4 in[8];
            UNROLL for (int c = 0; c < 8; ++c) {
                in[c] = *reinterpret_cast<const uint4 *>(smem + kRawAt + (octet * 8 + c) * channel_bytes + octet * 16 + row * row_bytes + v * 16);
                if (!inside) in[c] = make_uint4(0, 0, 0, 0);
            }
            UNROLL for (int i = 0; i < 8; ++i) {
                const int slot = row * g.pitch + 1 + v * 8 + i;
                const auto word = [&](int c) { return i / 2 == 0 ? in[c].x : i / 2 == 1 ? in[c].y : i / 2 == 2 ? in[c].z : in[c].w; };
                const auto pair = [&](int c) { return __byte_perm(word(c), word(c + 1), i % 2 ? 0x7632 : 0x5410); };
                *reinterpret_cast<uint4 *>(smem + kNchwImageAt + slot * 128 + ((octet ^ (slot & 7)) << 4)) =
                    make_uint4(pair(0), pair(2), pair(4), pair(6));
            }
        }
        for (int e = thread; e < tile.rows * 16; e += 384)  // the padding left and right of each row
            *reinterpret_cast<uint4 *>(smem + kNchwImageAt + (e / 16 * g.pitch + (e & 8 ? g.w + 1 : 0)) * 128 + e % 8 * 16) =
                make_uint4(0, 0, 0, 0);
    } else {
        for (int e = thread; e < tile.rows * g.box_w * kC; e += 384) {
            const int c = e / (tile.rows * g.box_w), rest = e % (tile.rows * g.box_w), row = rest / g.box_w;
            const int slot = row * g.pitch + rest % g.box_w, w = tile.column + rest % g.box_w;
            int n, h;
            tile.row_of(g, row, n, h);
            const bool inside = n < g.n && h >= 0 && h < g.h && w >= 0 && w < g.w;
            *reinterpret_cast<__half *>(smem + kNchwImageAt + slot * 128 + ((c / 8 ^ (slot & 7)) << 4) + c % 8 * 2) =
                inside ? g.x[static_cast<long long>(n * kC + c) * g.plane + h * g.w + w] : __half(0.0f);
        }
    }
    fence_proxy();  // the last quarter overwrites what was read here
    asm volatile("bar.sync 4, 384;" ::: "memory");
    if (thread == 0) request_quarter(2), request_quarter(3);

    const int m0 = warp * 16;
    int row, slot, n, place;
    tile.pixel_of(g, m0 + lane % 16, row, slot, n, place);
    unsigned a[2][3][4];  // the A operand of two rows of taps: 16 pixels by 16 channels for each tap
    const auto load_a = [&](unsigned (&to)[3][4], int step) {
        UNROLL for (int j = 0; j < 3; ++j) ldmatrix(to[j], chunk_address(image, slot + step % 3 * g.pitch + j, lane) ^ step / 3 << 5);
    };
    float d[64];
    load_a(a[0], 0);
    UNROLL for (int step = 0; step < 12; ++step) {  // quarter of the channels, row of taps
        if (step % 3 == 0) barrier_wait(ready_bars + step / 3 * 8);
        // K-major, no swizzle: blocks of 8 filters by 8 channels lie 128 bytes apart in K and kGroupBytes apart in N
        const unsigned long long b = (base + quarter_at(step / 3) + step % 3 * 3 * 256) >> 4 | 8ull << 16 |
                                     static_cast<unsigned long long>(kGroupBytes >> 4) << 32;
        wgmma_fence();
        UNROLL for (int j = 0; j < 3; ++j) wgmma(d, a[step % 2][j], b + 16 * j, step + j > 0);
        wgmma_commit();
        if (step < 11) {
            wgmma_wait<1>();
            if (step == 6 && lane == 0) barrier_arrive(free_bar);  // this warp needs the first two quarters no more
            load_a(a[(step + 1) % 2], step + 1);
        }
    }
    wgmma_wait<0>();

    // [filter][64 pixels] for each warpgroup, where the first half of the weights was
    barrier_wait(free_bar);
    unsigned char *const stage = smem + group * kF * kStagePitch;
    const unsigned to = shared_address(stage) + (lane / 16 * 8 + lane % 8) * kStagePitch + (warp % 4 * 16 + lane / 8 % 2 * 8) * 2;
    UNROLL for (int j = 0; j < 64; j += 8)
        stmatrix(to + j * 2 * kStagePitch, pack(d[j], d[j + 1]), pack(d[j + 2], d[j + 3]), pack(d[j + 4], d[j + 5]), pack(d[j + 6], d[j + 7]));
    asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
    const int inside = thread % 128, width = g.vector ? 8 : 1, columns = 64 / width, m = inside % columns * width;
    const bool valid = tile.pixel_of(g, group * 64 + m, row, slot, n, place);
    __half *const y = g.y + static_cast<long long>(n) * kF * g.plane + place;
    if (!valid) return;
    if (g.vector) {
        UNROLL for (int f = inside / 8; f < kF; f += 16)
            *reinterpret_cast<uint4 *>(y + f * g.plane) = *reinterpret_cast<const uint4 *>(stage + f * kStagePitch + m * 2);
    } else {
        for (int f = inside / 64; f < kF; f += 2)
            y[f * g.plane] = *reinterpret_cast<const __half *>(stage + f * kStagePitch + m * 2);
    }
}

// A tensor map of halves; strides in bytes, of every dimension but the first.
template <int kDims>
bool encode(CUtensorMap *map, const void *data, const cuuint64_t (&shape)[kDims], const cuuint64_t *strides,
            const cuuint32_t (&box)[kDims], CUtensorMapSwizzle swizzle) {
    static void *const entry = [] {
        void *found = nullptr;
        cudaDriverEntryPointQueryResult result;
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
        return found;
    }();
    const cuuint32_t step[5] = {1, 1, 1, 1, 1};
    return entry && reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry)(
        map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, kDims, const_cast<void *>(data), shape, strides, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
        swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

bool has_strides(const klineage_tensor &t, bool channels_last) {
    int64_t expected = 1;
    const int nchw[4] = {3, 2, 1, 0}, nhwc[4] = {1, 3, 2, 0};
    for (int i = 0; i < 4; ++i) {
        const int dim = channels_last ? nhwc[i] : nchw[i];
        if (t.shape[dim] != 1 && t.stride[dim] != expected) return false;
        expected *= t.shape[dim];
    }
    return true;
}

int divide_up(int a, int b) { return (a + b - 1) / b; }

}  // namespace

extern "C" int run(const klineage_call *call) {
    KLINEAGE_REQUIRE(call, call->abi_version == KLINEAGE_ABI_VERSION && call->num_inputs == 2 && call->num_outputs == 1,
                     "conv2d: needs ABI version 1 and x, w -> y");
    const klineage_tensor &x = call->inputs[0], &w = call->inputs[1], &y = call->outputs[0];
    for (const klineage_tensor *t : {&x, &w, &y}) {
        KLINEAGE_REQUIRE(call, t->num_dims == 4 && t->dtype == KLINEAGE_FLOAT16, "conv2d: 4-D fp16 tensors only");
        KLINEAGE_REQUIRE(call, reinterpret_cast<uintptr_t>(t->data) % 16 == 0, "conv2d: pointers must be 16-byte aligned");
    }
    KLINEAGE_REQUIRE(call, klineage_scalar_value(call, "stride", 1) == 1 && klineage_scalar_value(call, "pad", 1) == 1,
                     "conv2d: stride 1 and padding 1 only");
    KLINEAGE_REQUIRE(call, x.shape[1] == kC && w.shape[1] == kC && w.shape[0] == kF && w.shape[2] == 3 && w.shape[3] == 3,
                     "conv2d: 64 input channels, 128 filters of 3x3 only");
    const int64_t n = x.shape[0], h = x.shape[2], width = x.shape[3];
    KLINEAGE_REQUIRE(call, n >= 1 && h >= 1 && width >= 1 && n * h * width * kF < (1ll << 31), "conv2d: size out of range");
    KLINEAGE_REQUIRE(call, y.shape[0] == n && y.shape[1] == kF && y.shape[2] == h && y.shape[3] == width,
                     "conv2d: output shape differs from the input's");
    const bool nhwc = has_strides(x, true) && has_strides(w, true) && has_strides(y, true);
    KLINEAGE_REQUIRE(call, nhwc || (has_strides(x, false) && has_strides(w, false) && has_strides(y, false)),
                     "conv2d: x, w and y must all be contiguous or all channels_last");
    Geometry g = {};
    g.x = static_cast<const __half *>(x.data), g.y = static_cast<__half *>(y.data);
    g.n = n, g.h = h, g.w = width, g.plane = h * width, g.total = n * h * width;
    const int rows = (g.w + kTile - 2) / g.w + 3 + (g.plane + kTile - 2) / g.plane;  // at most, when tiles are flat
    const int pitch = nhwc ? divide_up(g.w + 2, 8) * 8 : g.w + 2;
    int tiles;
    if (g.w <= 254 && rows <= kMaxRows && rows * pitch <= (nhwc ? kSlots : kNchwSlots)) {
        g.pitch = pitch, g.box_w = g.w + 2, g.vector = g.w % 8 == 0 && rows * g.w <= 448;
        tiles = divide_up(g.total, kTile);
    } else {
        g.tile_h = 12, g.tile_w = 16, g.tiles_w = divide_up(g.w, 16), g.tiles = g.tiles_w * divide_up(g.h, 12);
        g.pitch = 24, g.box_w = 18, tiles = g.n * g.tiles;
        g.by_tile_w = Divider(g.tile_w), g.by_tiles_w = Divider(g.tiles_w), g.by_tiles = Divider(g.tiles);
    }
    g.by_plane = Divider(g.plane), g.by_w = Divider(g.w), g.by_rows = Divider(g.h + 1), g.by_vectors = Divider(g.w < 8 ? 1 : g.w / 8);
    CUtensorMap x_map, w_map;
    constexpr cuuint64_t filter = kDepth * 2;
    const cuuint64_t pixel = kC * 2, w64 = width, h64 = h, n64 = n;
    const cuuint64_t x_strides[] = {pixel, pixel * w64, pixel * w64 * h64}, order[] = {filter, 8 * filter, 2 * filter, 32 * filter};
    // NHWC: filter 32 g + 8 t + 2 j + b goes to row 32 g + 8 j + 2 t + b, so that lane t of a quad holds 8 neighbours
    const bool made = nhwc ? encode<4>(&x_map, x.data, {kC, w64, h64, n64}, x_strides, {kC, g.box_w + 0u, 1, 1}, CU_TENSOR_MAP_SWIZZLE_128B) &&
                                 encode<5>(&w_map, w.data, {kDepth, 2, 4, 4, 4}, order, {kC, 2, 4, 4, 4}, CU_TENSOR_MAP_SWIZZLE_128B)
                           : encode<2>(&w_map, w.data, {kDepth, kF}, &filter, {kDepth / 4, kF}, CU_TENSOR_MAP_SWIZZLE_NONE);
    KLINEAGE_REQUIRE(call, made, "conv2d: no tensor map");

    static thread_local int prepared = -1;  // the device on which the kernels may use that much shared memory
    int device;
    if (cudaGetDevice(&device) == cudaSuccess && device != prepared) {
        cudaFuncSetAttribute(conv_nhwc, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
        cudaFuncSetAttribute(conv_nchw, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
        prepared = device;
    }
    const auto stream = static_cast<cudaStream_t>(call->stream);
    if (nhwc) conv_nhwc<<<tiles, 384, kSharedBytes, stream>>>(x_map, w_map, g);
    else conv_nchw<<<tiles, 512, kSharedBytes, stream>>>(w_map, g);
    const cudaError_t status = cudaGetLastError();
    KLINEAGE_REQUIRE(call, status == cudaSuccess, cudaGetErrorString(status));
    return 0;
}
