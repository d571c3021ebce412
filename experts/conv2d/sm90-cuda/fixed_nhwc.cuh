// The NHWC kernel of fixed.cuh, and its launch.
#ifndef CONV2D_FIXED_NHWC_CUH
#define CONV2D_FIXED_NHWC_CUH

#include <klineage/sm90/v1/tensor_map.cuh>

#include "fixed.cuh"

namespace conv2d {
namespace fixed {

// NHWC. A tile is kTile consecutive pixels, whatever image they are in. Its input lies in shared memory as it does in memory, 128 bytes
// for each pixel: from the upper left neighbour of the first to the lower right neighbour of the last, or, when images are wide, only
// the three stretches of 3 kChunk pixels that hold the neighbours above, beside and below. Rows are `pitch` pixels apart there.
struct Pixels {
    const __half *weights;
    __half *y;
    int h, w, plane, total, wide, pitch, chunks;
    Divider by_plane, by_w;
};

__global__ void __launch_bounds__(384, 1)
conv_nhwc(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map, const __grid_constant__ Pixels g) {
    extern __shared__ unsigned char raw[];
    const unsigned weights = (shared_address(raw) + 1023) & ~1023u, image = weights + kImageAt, zeros = weights + kZerosAt;
    const unsigned chunk_bars = weights + kBarriersAt, tap_bars = chunk_bars + kMaxChunks * 8;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, group = warp / 4;
    const int first = static_cast<int>(blockIdx.x) * kTile;
    const auto request_chunk = [&](int k) {
        const int pixel = g.wide ? first - 1 + (k / 3 - 1) * g.w + k % 3 * kChunk : first - 1 - g.w + k * kChunk;  // beyond the tensor: zeros
        barrier_expect(chunk_bars + k * 8, kChunk * 128);
        load_chunk(image + k * kChunk * 128, &x_map, chunk_bars + k * 8, pixel);
    };
    const auto request_tap = [&](int tap) {
        barrier_expect(tap_bars + tap * 8, kTapBytes);
        load_tap(weights + tap * kTapBytes, &w_map, tap_bars + tap * 8, tap * kC);
    };
    if (warp == 0 && elect()) {  // in the order of need: the copy engine takes one after the other
        prefetch(&x_map);
        UNROLL for (int k = 0; k < kMaxChunks; ++k) barrier_init(chunk_bars + k * 8, 1);
        prefetch(&w_map);
        UNROLL for (int tap = 0; tap < 9; ++tap) barrier_init(tap_bars + tap * 8, 1);
        fence_barrier_init();
        UNROLL for (int k = 0; k < kMaxChunks; ++k) {
            if (k < g.chunks) request_chunk(k);
            if (k < kEarlyTaps) request_tap(k);
        }
    }
    // A 128th of the weights to the L2 cache, for everybody
    if (warp == 8 && blockIdx.x < 128 && elect()) prefetch(g.weights + blockIdx.x * (kF * kDepth / 128), kWeightBytes / 128);
    if (warp == 1 && lane < 8) asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(zeros + lane * 16), "r"(0) : "memory");
    __syncthreads();
    const int m0 = warp * 16, pixel = min(first + m0 + lane % 16, g.total - 1), place = pixel - g.by_plane(pixel) * g.plane;
    const int row = g.by_w(place), column = place - row * g.w;
    const bool at_left = column == 0, at_right = column == g.w - 1, at_top = row == 0, at_bottom = row == g.h - 1;
    int ready = group * 64 / kChunk;
    unsigned a[kLead][4][4];  // the A operand of some taps: 16 pixels by 64 channels for a warp
    const auto load_a = [&](unsigned (&to)[4][4], int tap) {
        const int dy = tap / 3, dx = tap % 3, last = (group * 64 + 65 + dy * g.pitch) / kChunk;
        if (dx == 0) LOOP for (; ready <= last; ++ready) barrier_wait(chunk_bars + ready * 8);
        const int slot = m0 + lane % 16 + dy * g.pitch + dx;
        const bool outside = (dy == 0 && at_top) || (dy == 2 && at_bottom) || (dx == 0 && at_left) || (dx == 2 && at_right);
        // The 16 bytes that this lane addresses: 8 of 16 channels of a row of the A operand
        const unsigned address = (outside ? zeros : image + slot * 128) + ((lane / 16 ^ (slot & 7)) << 4);
        UNROLL for (int j = 0; j < 4; ++j) ldmatrix(to[j], address ^ j << 5);
    };
    const int out = first + m0 + lane / 4;  // the pixel of this lane's first accumulators; the others are 8 pixels on
    float d[64];
    load_a(a[0], 0);
    // The other taps beside the products; one at a time by a thread of each warpgroup
    const auto request_next = [&](int round) {
        const int tap = kEarlyTaps + round * 3 + group;
        if (tap < 9 && warp % 4 == 0 && elect()) request_tap(tap);
        __syncwarp();
    };
    // K-major, 128-byte swizzle: groups of 8 filters lie 1,024 bytes apart
    const auto products = [&](auto half, int tap) {
        const unsigned long long b = (weights + tap * kTapBytes + half.value * 64 * 128) >> 4 | 1ull << 16 | 64ull << 32 | 1ull << 62;
        UNROLL for (int j = 0; j < 4; ++j) wgmma_64<0, half.value * 32>(d, a[tap % kLead][j], b + 2 * j, tap + j > 0);
    };
    // The filters lie in shared memory in such an order that a lane holds 8 neighbours: 16 bytes of the output.
    const auto store = [&](auto half) {
        settle<half.value * 32, half.value * 32 + 32>(d);
        UNROLL for (int j = half.value * 32; j < half.value * 32 + 32; j += 16)
            UNROLL for (int i = 0; i < 4; i += 2)
                if (out + i * 4 < g.total)
                    *reinterpret_cast<uint4 *>(g.y + static_cast<long long>(out + i * 4) * kF + j * 2 + lane % 4 * 8) =
                        make_uint4(pack(d[j + i], d[j + i + 1]), pack(d[j + i + 4], d[j + i + 5]),
                                   pack(d[j + i + 8], d[j + i + 9]), pack(d[j + i + 12], d[j + i + 13]));
        __syncwarp();
    };
    // The second 64 filters wait in the last kLead taps, so that the first are stored beside their products.
    UNROLL for (int tap = 0; tap < 9; ++tap) {
        barrier_wait(tap_bars + tap * 8);
        wgmma_fence();
        products(Constant<0>(), tap);
        if (tap < 9 - kLead) products(Constant<1>(), tap);
        wgmma_commit();
        if (tap < 2) request_next(tap);
        if (tap < 8) load_a(a[(tap + 1) % kLead], tap + 1);  // its last reader, tap - 3, is done
        wgmma_wait<1>();
    }
    wgmma_fence();
    UNROLL for (int tap = 9 - kLead; tap < 9; ++tap) products(Constant<1>(), tap);
    wgmma_commit();
    wgmma_wait<1>(), store(Constant<0>());
    wgmma_wait<0>(), store(Constant<1>());
}

// nullptr, or what is wrong.
inline const char *run_nhwc(const Shape &s, const void *x, const void *w, void *y, cudaStream_t stream) {
    Pixels g = {};
    g.weights = static_cast<const __half *>(w), g.y = static_cast<__half *>(y);
    g.h = s.h, g.w = s.w, g.plane = s.h * s.w, g.total = s.n * g.plane;
    g.wide = kTile + 2 * g.w + 2 > kMaxChunks * kChunk;
    g.pitch = g.wide ? 3 * kChunk : g.w, g.chunks = g.wide ? kMaxChunks : divide_up(kTile + 2 * g.w + 2, kChunk);
    g.by_plane = Divider(g.plane), g.by_w = Divider(g.w);
    CUtensorMap x_map, w_map;
    constexpr cuuint64_t filter = kDepth * 2, pixel = kC * 2;
    // Filter 32 g + 8 t + 2 j + b goes to row 32 g + 8 j + 2 t + b, so that lane t of a quad holds 8 neighbours
    if (const char *error = klineage::sm90::encode_tiled<__half, 2>(&x_map, x, {kC, cuuint64_t(g.total)}, {pixel}, {kC, kChunk})) return error;
    if (const char *error = klineage::sm90::encode_tiled<__half, 5>(&w_map, w, {kDepth, 2, 4, 4, 4}, {filter, 8 * filter, 2 * filter, 32 * filter}, {kC, 2, 4, 4, 4}))
        return error;
    klineage::sm90::Launch how;
    how.grid = dim3(divide_up(g.total, kTile)), how.block = dim3(384), how.shared_bytes = kSharedBytes, how.stream = stream;
    return klineage::sm90::launch(conv_nhwc, how, x_map, w_map, g);
}

}  // namespace fixed
}  // namespace conv2d
#endif
