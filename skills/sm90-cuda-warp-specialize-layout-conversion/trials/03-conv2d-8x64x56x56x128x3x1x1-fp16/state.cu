#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "klineage.h"

namespace {

constexpr int kC = 64, kF = 128, kDepth = kC * 9;  // K of the implicit GEMM
constexpr int kTile = 192;                         // output pixels of a block: 64 per warpgroup
constexpr int kTapBytes = kF * kC * 2;             // one tap, 128 filters x 64 channels
constexpr int kSlots = 625, kMaxRows = 80;         // input pixels, input rows of a tile
constexpr int kImageAt = 9 * kTapBytes, kSharedBytes = 1024 + kImageAt + kSlots * 128;
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
    int n, h, w, plane, total, tile_h, tile_w, tiles_w, tiles, pitch, box_w;
    Divider by_plane, by_w, by_rows, by_tile_w, by_tiles_w, by_tiles;
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
__device__ __forceinline__ void ldmatrix(unsigned (&a)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(address) : "memory");
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

template <bool kNhwc>
__global__ void __launch_bounds__(384, 1) conv_tile(const __half *w, const __grid_constant__ Geometry g) {
    extern __shared__ unsigned char raw[];
    unsigned char *const smem = raw + (-shared_address(raw) & 1023);
    const unsigned weights = shared_address(smem), image = weights + kImageAt;
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const Tile tile(g);

    // The weights of all taps as [tap][filter][channel], and the input rows of the tile; rows of 64 channels, swizzled.
    const auto at = [](int row, int c) { return row * 128 + ((c / 8 ^ (row & 7)) << 4) + c % 8 * 2; };
    const auto row_pixel = [&](int row, int column, int &n, int &h, int &v) {
        tile.row_of(g, row, n, h);
        v = tile.column + column;
        return n < g.n && h >= 0 && h < g.h && v >= 0 && v < g.w;
    };
    if constexpr (kNhwc) {
        for (int e = thread; e < tile.rows * g.box_w * 8; e += 384) {
            const int pixel = e / 8, row = pixel / g.box_w, column = pixel % g.box_w, c = e % 8 * 8;
            int n, h, v;
            const bool inside = row_pixel(row, column, n, h, v);
            *reinterpret_cast<uint4 *>(smem + kImageAt + at(row * g.pitch + column, c)) =
                inside ? __ldg(reinterpret_cast<const uint4 *>(g.x + (static_cast<long long>(n) * g.plane + h * g.w + v) * kC + c))
                       : make_uint4(0, 0, 0, 0);
        }
        for (int e = thread; e < kF * 72; e += 384) {
            const int f = e / 72, tap = e % 72 / 8, c = e % 8 * 8;
            *reinterpret_cast<uint4 *>(smem + tap * kTapBytes + at(f, c)) = __ldg(reinterpret_cast<const uint4 *>(w) + e);
        }
    } else {
        for (int e = thread; e < tile.rows * g.box_w * kC; e += 384) {
            const int c = e / (tile.rows * g.box_w), rest = e % (tile.rows * g.box_w), row = rest / g.box_w, column = rest % g.box_w;
            int n, h, v;
            const bool inside = row_pixel(row, column, n, h, v);
            *reinterpret_cast<__half *>(smem + kImageAt + at(row * g.pitch + column, c)) =
                inside ? g.x[static_cast<long long>(n * kC + c) * g.plane + h * g.w + v] : __half(0.0f);
        }
        for (int e = thread; e < kF * kDepth; e += 384)
            *reinterpret_cast<__half *>(smem + e % 9 * kTapBytes + at(e / kDepth, e % kDepth / 9)) = w[e];
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();

    const int m0 = warp * 16;
    int row, slot, n, place;
    tile.pixel_of(g, m0 + lane % 16, row, slot, n, place);
    unsigned a[2][4][4];  // the A operand of two taps: 16 pixels by 64 channels for a warp
    const auto load_a = [&](unsigned (&to)[4][4], int tap) {
        const unsigned address = chunk_address(image, slot + tap / 3 * g.pitch + tap % 3, lane);
#pragma unroll
        for (int j = 0; j < 4; ++j) ldmatrix(to[j], address ^ j << 5);
    };
    float d[64];
    load_a(a[0], 0);
#pragma unroll
    for (int tap = 0; tap < 9; ++tap) {
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
    for (int side = 0; side < 2; ++side)
        if (tile.pixel_of(g, m0 + lane / 4 + side * 8, row, slot, n, place)) {
            __half *const y = g.y + static_cast<long long>(n) * kF * g.plane + (kNhwc ? place * kF : place);
#pragma unroll
            for (int j = 0; j < 64; j += 2)
                if (j / 2 % 2 == side) {
                    const int f = j / 4 * 8 + lane % 4 * 2;
                    if constexpr (kNhwc) {
                        *reinterpret_cast<unsigned *>(y + f) = pack(d[j], d[j + 1]);
                    } else {
                        y[f * g.plane] = __float2half_rn(d[j]);
                        y[(f + 1) * g.plane] = __float2half_rn(d[j + 1]);
                    }
                }
        }
}

int divide_up(int a, int b) { return (a + b - 1) / b; }

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
    const int pitch = g.w + 2;
    int tiles;
    if (g.w <= 254 && rows <= kMaxRows && rows * pitch <= kSlots) {
        g.pitch = pitch, g.box_w = g.w + 2;
        tiles = divide_up(g.total, kTile);
    } else {
        g.tile_h = 12, g.tile_w = 16, g.tiles_w = divide_up(g.w, 16), g.tiles = g.tiles_w * divide_up(g.h, 12);
        g.pitch = 24, g.box_w = 18;
        tiles = g.n * g.tiles;
        g.by_tile_w = Divider(g.tile_w), g.by_tiles_w = Divider(g.tiles_w), g.by_tiles = Divider(g.tiles);
    }
    g.by_plane = Divider(g.plane), g.by_w = Divider(g.w), g.by_rows = Divider(g.h + 1);
    static thread_local int prepared = -1;
    int device;
    cudaGetDevice(&device);
    if (device != prepared) {
        cudaFuncSetAttribute(conv_tile<true>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
        cudaFuncSetAttribute(conv_tile<false>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
        prepared = device;
    }
    const auto stream = static_cast<cudaStream_t>(call->stream);
    const auto kernel = nhwc ? conv_tile<true> : conv_tile<false>;
    kernel<<<tiles, 384, kSharedBytes, stream>>>(static_cast<const __half *>(w.data), g);
    const cudaError_t status = cudaGetLastError();
    KLINEAGE_REQUIRE(call, status == cudaSuccess, cudaGetErrorString(status));
    return 0;
}
