#include <cuda.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "klineage.h"

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
constexpr int kRawBytes = 7 * 8192;
constexpr int kSharedBytes = 1024 + kBarriersAt + (kMaxRows + 9) * 8;
static_assert(kRawAt + kRawBytes <= kBarriersAt && kQuarterBytes <= kRawBytes && kRawAt % 1024 == 0, "NCHW");
constexpr int kStageBytes = kF * 128;  // NCHW: the output of a warpgroup, [filter][64 pixels], over the first two quarters
static_assert(3 * kStageBytes <= 2 * kQuarterBytes, "staged output");
constexpr int kEarlyTaps = 3;
static_assert(kSharedBytes <= 232448, "shared memory of one block");

struct Divider {  // n / d for 0 <= n < 2^31
    unsigned multiplier = 0, shift = 0;
    Divider() = default;
    explicit Divider(int d) {
        while ((1u << shift) < static_cast<unsigned>(d)) ++shift;
        shift += 31;
        multiplier = static_cast<unsigned>(((1ull << shift) + d - 1) / d);
    }
    __device__ __forceinline__ int operator()(int n) const {
        return static_cast<int>(static_cast<unsigned long long>(static_cast<unsigned>(n)) * multiplier >> shift);
    }
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

    __device__ __forceinline__ explicit Tile(const Geometry &g) : n(0), p(0), column(-1) {
        const int tile = blockIdx.x;
        if (g.tile_w == 0) {
            const int first = tile * kTile, last = min(first + kTile, g.total) - 1;
            const int first_n = g.by_plane(first), last_n = g.by_plane(last);
            first_row = first_n * (g.h + 1) + g.by_w(first - first_n * g.plane);
            rows = last_n * (g.h + 1) + g.by_w(last - last_n * g.plane) + 3 - first_row;
        } else {
            n = g.by_tiles(tile);
            const int inside = tile - n * g.tiles, band = g.by_tiles_w(inside);
            p = band * g.tile_h;
            column = (inside - band * g.tiles_w) * g.tile_w - 1;
            first_row = n * (g.h + 1) + p;
            rows = g.tile_h + 2;
        }
    }
    // Input row i of the tile; h = -1 or g.h is a row of zeros.
    __device__ __forceinline__ void row_of(const Geometry &g, int i, int &image, int &h) const {
        image = g.tile_w ? n : g.by_rows(first_row + i);
        h = first_row + i - image * (g.h + 1) - 1;
    }
    // Output pixel m of the tile: the slot of its upper left input pixel, its image and its place in that; false: none.
    __device__ __forceinline__ bool pixel_of(const Geometry &g, int m, int &row, int &slot, int &image, int &place) const {
        int q;
        bool valid;
        if (g.tile_w == 0) {
            const int pixel = min(static_cast<int>(blockIdx.x) * kTile + m, g.total - 1);
            valid = pixel == static_cast<int>(blockIdx.x) * kTile + m;
            image = g.by_plane(pixel);
            place = pixel - image * g.plane;
            const int r = g.by_w(place);
            q = place - r * g.w;
            row = image * (g.h + 1) + r - first_row;
        } else {
            row = g.by_tile_w(m);
            q = m - row * g.tile_w + column + 1;
            image = n;
            place = (p + row) * g.w + q;
            valid = p + row < g.h && q < g.w;
        }
        slot = row * g.pitch + q - column - 1;
        return valid;
    }
};

__device__ __forceinline__ unsigned shared_address(const void *p) {
    return static_cast<unsigned>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ void barrier_init(unsigned bar, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
__device__ __forceinline__ void fence_barrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(unsigned bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void barrier_expect(unsigned bar, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_wait(unsigned bar) {  // every barrier completes once
    asm volatile("{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0;\n"
                 "@!done bra again;\n}" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void load_row(unsigned to, const CUtensorMap *map, unsigned bar, int a, int b, int c, int d) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];"
                 ::"r"(to), "l"(map), "r"(a), "r"(b), "r"(c), "r"(d), "r"(bar) : "memory");
}
__device__ __forceinline__ void load_weights(unsigned to, const CUtensorMap *map, unsigned bar, int k) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                 ::"r"(to), "l"(map), "r"(k), "r"(0), "r"(bar) : "memory");
}
__device__ __forceinline__ void prefetch(const CUtensorMap *map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
__device__ __forceinline__ void ldmatrix(unsigned (&a)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ void stmatrix_transposed(unsigned address, unsigned a, unsigned b, unsigned c, unsigned d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
__device__ __forceinline__ unsigned pack(float low, float high) {
    const __half2 v = __floats2half2_rn(low, high);
    return reinterpret_cast<const unsigned &>(v);
}
#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D16(i) D4(i), D4(i + 4), D4(i + 8), D4(i + 12)
// d[64 x 128] += a[64 x 16] b[16 x 128]: a in registers, b K-major in shared memory with the 128-byte swizzle.
__device__ __forceinline__ void wgmma(float (&d)[64], const unsigned (&a)[4], unsigned long long b, int accumulate) {
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

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory"); }

// The 16-byte chunk of an input pixel that a lane addresses for ldmatrix: 16 channels of a row of the A operand.
__device__ __forceinline__ unsigned chunk_address(unsigned image, int slot, int lane) {
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
        load_weights(weights + tap * kTapBytes, &w_map, tap_bars + tap * 8, tap * kC);
    };
    if (lane == 0) {  // the rows of x and the first taps at once; a warp requests what it has made a barrier for
        for (int i = warp; i < tile.rows; i += 12) {
            barrier_init(row_bars + i * 8, 1);
            fence_barrier_init();
            int n, h;
            tile.row_of(g, i, n, h);
            barrier_expect(row_bars + i * 8, g.box_w * 128);
            load_row(image + i * g.pitch * 128, &x_map, row_bars + i * 8, 0, tile.column, h, n);
        }
        const int tap = 11 - warp;
        if (tap < 9) {
            barrier_init(tap_bars + tap * 8, 1);
            fence_barrier_init();
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
    tile.pixel_of(g, group * 64, ready, unused, n, place);
    tile.pixel_of(g, group * 64 + 63, last, unused, n, place);
    tile.pixel_of(g, m0 + lane % 16, row, slot, n, place);

    unsigned a[2][4][4];  // the A operand of two taps: 16 pixels by 64 channels for a warp
    const auto load_a = [&](unsigned (&to)[4][4], int tap) {
        for (; ready <= last + tap / 3; ++ready) barrier_wait(row_bars + ready * 8);
        const unsigned address = chunk_address(image, slot + tap / 3 * g.pitch + tap % 3, lane);
#pragma unroll
        for (int j = 0; j < 4; ++j) ldmatrix(to[j], address ^ j << 5);
    };
    float d[64];
    load_a(a[0], 0);
    if (threadIdx.x == 256)  // the other taps when the last rows are there, which they would delay
        for (int i = kEarlyTaps; i < 9; ++i) request_tap(i);
    __syncwarp();
#pragma unroll
    for (int tap = 0; tap < 9; ++tap) {
        barrier_wait(tap_bars + tap * 8);
        // K-major, 128-byte swizzle: groups of 8 filters lie 1,024 bytes apart
        const unsigned long long b = (weights + tap * kTapBytes) >> 4 | 1ull << 16 | 64ull << 32 | 1ull << 62;
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < 4; ++j) wgmma(d, a[tap % 2][j], b + 2 * j, tap + j > 0);
        wgmma_commit();
        if (tap < 8) {
            wgmma_wait<1>();
            load_a(a[(tap + 1) % 2], tap + 1);
        }
    }
    wgmma_wait<0>();

    // Rows lane / 4 and lane / 4 + 8 of the accumulators, columns 2 * (lane % 4) and the next
#pragma unroll
    for (int j = 0; j < 64; j += 2)
        if (offset[j / 2 % 2] >= 0)
            *reinterpret_cast<unsigned *>(g.y + offset[j / 2 % 2] + j / 4 * 8 + lane % 4 * 2) = pack(d[j], d[j + 1]);
}

// NCHW: the block converts its tile of x and the weights to channels-last in shared memory. Three warpgroups convert x
// and compute; the fourth regroups the weights [filter][channel][tap] into [tap][filter][channel], 16 channels at a time.
__global__ void __launch_bounds__(512, 1)
conv_nchw(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map, const __grid_constant__ Geometry g) {
    extern __shared__ unsigned char raw[];
    unsigned char *const smem = raw + (-shared_address(raw) & 1023);
    const unsigned base = shared_address(smem), image = base + kNchwImageAt;
    const unsigned raw_bars = base + kBarriersAt, ready_bars = raw_bars + 32, x_bar = ready_bars + 32;
    const unsigned free_bar = x_bar + 8;  // all warps are done with the first two quarters of the weights
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, group = warp / 4;
    const Tile tile(g);
    const auto quarter_at = [](int quarter) { return quarter < 3 ? quarter * kQuarterBytes : kRawAt; };
    const auto request_quarter = [&](int quarter) {
        barrier_expect(raw_bars + quarter * 8, kQuarterBytes);
        load_weights(base + quarter_at(quarter), &w_map, raw_bars + quarter * 8, quarter * (kDepth / 4));
    };
    if (thread == 0) {
        prefetch(&x_map);
        barrier_init(x_bar, 12);
        barrier_init(free_bar, 12);
        fence_barrier_init();
    }
    if (thread == 384) {
        prefetch(&w_map);
        for (int i = 0; i < 4; ++i) barrier_init(raw_bars + i * 8, 1), barrier_init(ready_bars + i * 8, 128);
        fence_barrier_init();
    }
    __syncthreads();
    if (group == 3) {
        if (thread == 384)
            request_quarter(0), request_quarter(1);
        for (int quarter = 0; quarter < 4; ++quarter) {
            barrier_wait(raw_bars + quarter * 8);
            unsigned char *const at = smem + quarter_at(quarter);
            unsigned in[2][36];  // 8 channels of 2 filters; a warp holds whole groups of 8 filters
#pragma unroll
            for (int u = 0; u < 2; ++u) {
                const int f = thread % 128 / 2 + u * 64, octet = thread % 2;
                const uint4 *const from = reinterpret_cast<const uint4 *>(at + f * (kQuarterBytes / kF) + octet * 144);
#pragma unroll
                for (int i = 0; i < 9; ++i) {
                    const uint4 v = from[i];
                    in[u][i * 4] = v.x, in[u][i * 4 + 1] = v.y, in[u][i * 4 + 2] = v.z, in[u][i * 4 + 3] = v.w;
                }
            }
            __syncwarp();
#pragma unroll
            for (int u = 0; u < 2; ++u) {
                const int f = thread % 128 / 2 + u * 64, octet = thread % 2;
#pragma unroll
                for (int tap = 0; tap < 9; ++tap) {
                    const auto pair = [&](int c) {
                        const int low = c * 9 + tap, high = low + 9;
                        return __byte_perm(in[u][low / 2], in[u][high / 2], low % 2 ? 0x5432 : 0x7610);
                    };
                    *reinterpret_cast<uint4 *>(at + f / 8 * kGroupBytes + tap * 256 + octet * 128 + f % 8 * 16) =
                        make_uint4(pair(0), pair(2), pair(4), pair(6));
                }
            }
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            barrier_arrive(ready_bars + quarter * 8);
            if (quarter == 0 && thread == 384) request_quarter(2);
        }
        return;
    }

    if (g.vector) {
        // Row by row as [channel][64 pixels] of 128 bytes, swizzled: chunk v of channel c is at v ^ c % 8. Rows of zeros
        // take no place; there is a multiple of h + 1 for each before row i.
        const int zeros = g.by_rows(tile.first_row + g.h);
        const auto row_at = [&](int i) { return kRawAt + (i - (g.by_rows(tile.first_row + i + g.h) - zeros)) * 8192; };
        if (lane == 0) {
            int bytes = 0;
            for (int i = warp, n, h; i < tile.rows; i += 12) {
                tile.row_of(g, i, n, h);
                if (h < 0 || n >= g.n) continue;
                load_row(base + row_at(i), &x_map, x_bar, 0, h, 0, n);
                bytes += 8192;
            }
            barrier_expect(x_bar, bytes);
        }
        __syncwarp();
        barrier_wait(x_bar);
        const int vectors = g.w / 8;
        for (int e = thread; e < tile.rows * vectors * 8; e += 384) {  // 8 channels by 8 pixels
            const int row = g.by_vectors(e / 8), v = e / 8 - row * vectors, octet = e % 8;
            int n, h;
            tile.row_of(g, row, n, h);
            const bool inside = h >= 0 && n < g.n;
            const unsigned char *const from = smem + row_at(row) + octet * 1024;
            uint4 in[8];  // of channel i ^ octet, so that the lanes read from different banks
#pragma unroll
            for (int i = 0; i < 8; ++i)
                in[i] = inside ? *reinterpret_cast<const uint4 *>(from + (i ^ octet) * 128 + ((v ^ i ^ octet) << 4)) : make_uint4(0, 0, 0, 0);
            const unsigned low = octet & 1 ? 0x1054 : 0x5410, high = octet & 1 ? 0x3276 : 0x7632;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int slot = row * g.pitch + 1 + v * 8 + i;
                const auto word = [&](int c) { return i / 2 == 0 ? in[c].x : i / 2 == 1 ? in[c].y : i / 2 == 2 ? in[c].z : in[c].w; };
                unsigned p[4];  // pair j ^ octet / 2
#pragma unroll
                for (int j = 0; j < 4; ++j) p[j] = __byte_perm(word(j * 2), word(j * 2 + 1), i % 2 ? high : low);
                const bool swap = octet & 2, cross = octet & 4;
                const unsigned a = swap ? p[1] : p[0], b = swap ? p[0] : p[1], c = swap ? p[3] : p[2], d = swap ? p[2] : p[3];
                *reinterpret_cast<uint4 *>(smem + kNchwImageAt + slot * 128 + ((octet ^ (slot & 7)) << 4)) =
                    cross ? make_uint4(c, d, a, b) : make_uint4(a, b, c, d);
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
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // the last quarter overwrites what was read here
    asm volatile("bar.sync 4, 384;" ::: "memory");
    if (thread == 0) request_quarter(3);

    const int m0 = warp * 16;
    int row, slot, n, place;
    tile.pixel_of(g, m0 + lane % 16, row, slot, n, place);
    unsigned a[2][3][4];  // the A operand of two rows of taps: 16 pixels by 16 channels for each tap
    const auto load_a = [&](unsigned (&to)[3][4], int step) {
#pragma unroll
        for (int j = 0; j < 3; ++j) ldmatrix(to[j], chunk_address(image, slot + step % 3 * g.pitch + j, lane) ^ step / 3 << 5);
    };
    float d[64];
    load_a(a[0], 0);
#pragma unroll
    for (int step = 0; step < 12; ++step) {  // quarter of the channels, row of taps
        if (step % 3 == 0) barrier_wait(ready_bars + step / 3 * 8);
        // K-major, no swizzle: blocks of 8 filters by 8 channels lie 128 bytes apart in K and kGroupBytes apart in N
        const unsigned long long b = (base + quarter_at(step / 3) + step % 3 * 3 * 256) >> 4 | 8ull << 16 |
                                     static_cast<unsigned long long>(kGroupBytes >> 4) << 32;
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < 3; ++j) wgmma(d, a[step % 2][j], b + 16 * j, step + j > 0);
        wgmma_commit();
        if (step < 11) {
            wgmma_wait<1>();
            if (step == 6) {  // steps 0 to 5, the first two quarters, are complete for this warp
                if (lane == 0) barrier_arrive(free_bar);
                __syncwarp();
            }
            load_a(a[(step + 1) % 2], step + 1);
        }
    }
    wgmma_wait<0>();

    if (g.vector) {
        // Staged as [filter][64 pixels] of 128 bytes, swizzled: 8 pixels v of filter f are at v ^ f % 8. A lane addresses
        // filter lane % 8 of matrix lane / 8: pixels 0 to 7 and 8 to 15 of the warp, of 8 filters and of the next 8.
        const unsigned to = base + group * kStageBytes + (lane / 16 * 8 + lane % 8) * 128 +
                            (((warp % 4 * 2 + (lane / 8 & 1)) ^ (lane % 8)) << 4);
        barrier_wait(free_bar);
        __syncwarp();
#pragma unroll
        for (int j = 0; j < 64; j += 8)
            stmatrix_transposed(to + j * 256, pack(d[j], d[j + 1]), pack(d[j + 2], d[j + 3]), pack(d[j + 4], d[j + 5]),
                                pack(d[j + 6], d[j + 7]));
        asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
        const int v = thread % 8, first = thread % 128 / 8;
        if (tile.pixel_of(g, group * 64 + v * 8, row, slot, n, place)) {  // 8 pixels of one image, or none
            const unsigned char *const from = smem + group * kStageBytes + first * 128 + ((v ^ (first % 8)) << 4);
            __half *const y = g.y + (static_cast<long long>(n) * kF + first) * g.plane + place;
#pragma unroll
            for (int i = 0; i < kF / 16; ++i)
                *reinterpret_cast<uint4 *>(y + i * 16 * g.plane) = *reinterpret_cast<const uint4 *>(from + i * 2048);
        }
        return;
    }

    // Rows lane / 4 and lane / 4 + 8 of the accumulators, columns 2 * (lane % 4) and the next
#pragma unroll
    for (int side = 0; side < 2; ++side)
        if (tile.pixel_of(g, m0 + lane / 4 + side * 8, row, slot, n, place)) {
            __half *const y = g.y + static_cast<long long>(n) * kF * g.plane + place;
#pragma unroll
            for (int j = 0; j < 64; ++j)
                if (j / 2 % 2 == side) y[(j / 4 * 8 + lane % 4 * 2 + j % 2) * g.plane] = __float2half_rn(d[j]);
        }
}

// Tensor maps, kept as long as pointer and shape stay the same: they describe memory, not its contents.
using Encode = CUresult (*)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                            const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                            CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

bool encode(CUtensorMap *map, const void *data, int dims, const cuuint64_t *shape, const cuuint32_t *box,
            CUtensorMapSwizzle swizzle) {
    static const Encode function = [] {
        void *entry = nullptr;
        cudaDriverEntryPointQueryResult found;
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
        return reinterpret_cast<Encode>(entry);
    }();
    if (!function) return false;
    cuuint64_t stride[4] = {shape[0] * 2};
    for (int i = 1; i < dims; ++i) stride[i] = stride[i - 1] * shape[i];
    const cuuint32_t step[4] = {1, 1, 1, 1};
    return function(map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, dims, const_cast<void *>(data), shape, stride, box, step,
                    CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                    CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

struct Maps {
    const void *x = nullptr, *w = nullptr;
    int64_t shape[3] = {};
    unsigned box_w = 0;
    CUtensorMap x_map, w_map;
};

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
    KLINEAGE_REQUIRE(call, call->abi_version == KLINEAGE_ABI_VERSION, "conv2d: unknown ABI version");
    KLINEAGE_REQUIRE(call, call->num_inputs == 2 && call->num_outputs == 1, "conv2d: needs x, w -> y");
    const klineage_tensor &x = call->inputs[0], &w = call->inputs[1], &y = call->outputs[0];
    KLINEAGE_REQUIRE(call, x.num_dims == 4 && w.num_dims == 4 && y.num_dims == 4, "conv2d: tensors are 4-D");
    KLINEAGE_REQUIRE(call, x.dtype == KLINEAGE_FLOAT16 && w.dtype == KLINEAGE_FLOAT16 && y.dtype == KLINEAGE_FLOAT16,
                     "conv2d: fp16 only");
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
    KLINEAGE_REQUIRE(call, (reinterpret_cast<uintptr_t>(x.data) | reinterpret_cast<uintptr_t>(w.data) |
                            reinterpret_cast<uintptr_t>(y.data)) % 16 == 0, "conv2d: pointers must be 16-byte aligned");

    Geometry g = {};
    g.x = static_cast<const __half *>(x.data), g.y = static_cast<__half *>(y.data);
    g.n = n, g.h = h, g.w = width, g.plane = h * width, g.total = n * h * width;
    const int rows = (g.w + kTile - 2) / g.w + 3 + (g.plane + kTile - 2) / g.plane;  // at most, when tiles are flat
    const int pitch = nhwc ? divide_up(g.w + 2, 8) * 8 : g.w + 2;
    int tiles;
    if (g.w <= 254 && rows <= kMaxRows && rows * pitch <= (nhwc ? kSlots : kNchwSlots)) {
        g.pitch = pitch, g.box_w = g.w + 2;
        g.vector = g.w % 8 == 0 && g.w <= 64 && rows <= 8;
        tiles = divide_up(g.total, kTile);
    } else {
        g.tile_h = 12, g.tile_w = 16, g.tiles_w = divide_up(g.w, 16), g.tiles = g.tiles_w * divide_up(g.h, 12);
        g.pitch = 24, g.box_w = 18;
        tiles = g.n * g.tiles;
        g.by_tile_w = Divider(g.tile_w), g.by_tiles_w = Divider(g.tiles_w), g.by_tiles = Divider(g.tiles);
    }
    g.by_plane = Divider(g.plane), g.by_w = Divider(g.w), g.by_rows = Divider(g.h + 1), g.by_vectors = Divider(g.w < 8 ? 1 : g.w / 8);
    static thread_local Maps cache[8];
    static thread_local unsigned turn = 0;
    Maps *maps = nullptr;
    for (Maps &entry : cache)
        if (entry.x == x.data && entry.w == w.data && entry.shape[0] == n && entry.shape[1] == h &&
            entry.shape[2] == (nhwc ? width : -width)) maps = &entry;
    if (!maps) {
        maps = &cache[turn++ % 8];
        maps->x = nullptr;
        const cuuint64_t w_shape[2] = {kDepth, kF};
        const cuuint32_t w_box[2] = {nhwc ? 64u : kDepth / 4u, kF};
        const cuuint64_t x_shape[4] = {kC, static_cast<cuuint64_t>(width), static_cast<cuuint64_t>(h), static_cast<cuuint64_t>(n)};
        const cuuint32_t x_box[4] = {kC, static_cast<cuuint32_t>(g.box_w), 1, 1};
        const cuuint64_t x_plane_shape[4] = {x_shape[1], x_shape[2], x_shape[0], x_shape[3]};
        const cuuint32_t x_plane_box[4] = {64, 1, kC, 1};
        const auto swizzle = CU_TENSOR_MAP_SWIZZLE_128B;
        const bool made = nhwc ? encode(&maps->w_map, w.data, 2, w_shape, w_box, swizzle) && encode(&maps->x_map, x.data, 4, x_shape, x_box, swizzle)
                               : encode(&maps->w_map, w.data, 2, w_shape, w_box, CU_TENSOR_MAP_SWIZZLE_NONE) &&
                                 (!g.vector || encode(&maps->x_map, x.data, 4, x_plane_shape, x_plane_box, swizzle));
        KLINEAGE_REQUIRE(call, made, "conv2d: no tensor map");
        maps->x = x.data, maps->w = w.data;
        maps->shape[0] = n, maps->shape[1] = h, maps->shape[2] = nhwc ? width : -width;
    }

    static thread_local int prepared = -1;
    int device;
    cudaGetDevice(&device);
    if (device != prepared) {
        cudaFuncSetAttribute(conv_nhwc, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
        cudaFuncSetAttribute(conv_nchw, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
        prepared = device;
    }
    const auto stream = static_cast<cudaStream_t>(call->stream);
    if (nhwc)
        conv_nhwc<<<tiles, 384, kSharedBytes, stream>>>(maps->x_map, maps->w_map, g);
    else
        conv_nchw<<<tiles, 512, kSharedBytes, stream>>>(maps->x_map, maps->w_map, g);
    const cudaError_t status = cudaGetLastError();
    KLINEAGE_REQUIRE(call, status == cudaSuccess, cudaGetErrorString(status));
    return 0;
}
