// NCHW to NHWC: x, and the weights where a filter has more than one tap, into scratch memory. One launch for both.
#ifndef CONV2D_REORDER_CUH
#define CONV2D_REORDER_CUH

#include <klineage/sm90/v1/cluster.cuh>

#include "geometry.cuh"

namespace conv2d {

using namespace klineage::sm90;

struct Reorder {
    const uint16_t *x, *w;
    uint16_t *to_x, *to_w;
    int c, plane, taps, vector;  // plane: h * w of x; vector: pixels of a load, 8, 4 or 1
    int kept, stride, q, row;    // pixels of an image that are kept: all, or every stride-th of every stride-th row; q of a row of `row`
    int tiles_of_image, chunks, x_blocks, w_vectors;
    Divider by_chunks, by_tiles, by_taps, by_c8, by_q;

    // Where a kept pixel lies in its plane of x.
    DEVICE int place(int pixel) const {
        if (stride == 1) return pixel;
        const int p = by_q(pixel);
        return (p * row + pixel - p * q) * stride;
    }
};

// 64 channels by 64 pixels of an image.
template <int kVector>
DEVICE void reorder_pixels(const Reorder &g, uint32_t (&words)[64][33]) {
    const int tile = g.by_chunks(blockIdx.x), n = g.by_tiles(tile), pixel0 = (tile - n * g.tiles_of_image) * 64;
    const int channel0 = (blockIdx.x - tile * g.chunks) * 64;
    const uint16_t *const from = g.x + (static_cast<size_t>(n) * g.c + channel0) * g.plane;
    UNROLL for (int item = 0; item < 8 / kVector; ++item) {
        const int i = item * 256 + threadIdx.x, pair = i / (64 / kVector), pixel = i % (64 / kVector) * kVector;
        uint16_t low[kVector] = {}, high[kVector] = {};
        if (channel0 + 2 * pair < g.c && pixel0 + pixel < g.kept) {
            const uint16_t *const at = from + static_cast<size_t>(2 * pair) * g.plane + g.place(pixel0 + pixel);
            if constexpr (kVector == 8) {
                *reinterpret_cast<uint4 *>(low) = __ldg(reinterpret_cast<const uint4 *>(at));
                *reinterpret_cast<uint4 *>(high) = __ldg(reinterpret_cast<const uint4 *>(at + g.plane));
            } else if constexpr (kVector == 4) {
                *reinterpret_cast<uint2 *>(low) = __ldg(reinterpret_cast<const uint2 *>(at));
                *reinterpret_cast<uint2 *>(high) = __ldg(reinterpret_cast<const uint2 *>(at + g.plane));
            } else {
                low[0] = __ldg(at), high[0] = __ldg(at + g.plane);
            }
        }
        UNROLL for (int k = 0; k < kVector; ++k) words[pixel + k][pair] = low[k] | static_cast<uint32_t>(high[k]) << 16;
    }
    __syncthreads();
    uint16_t *const to = g.to_x + (static_cast<size_t>(n) * g.kept + pixel0) * g.c + channel0;
    UNROLL for (int item = 0; item < 2; ++item) {
        const int i = item * 256 + threadIdx.x, pixel = i / 8, vector = i % 8;
        if (pixel0 + pixel < g.kept && channel0 + vector * 8 < g.c)
            *reinterpret_cast<uint4 *>(to + static_cast<size_t>(pixel) * g.c + vector * 8) =
                make_uint4(words[pixel][vector * 4], words[pixel][vector * 4 + 1], words[pixel][vector * 4 + 2], words[pixel][vector * 4 + 3]);
    }
}

// [f][c][tap] to [f][tap][c], eight channels by a thread.
DEVICE void reorder_weights(const Reorder &g) {
    const int i = (blockIdx.x - g.x_blocks) * 256 + threadIdx.x;
    if (i >= g.w_vectors) return;
    const int group = g.by_taps(i), tap = i - group * g.taps, f = g.by_c8(group), c = (group - f * (g.c / 8)) * 8;
    const uint16_t *const from = g.w + (static_cast<size_t>(f) * g.c + c) * g.taps + tap;
    uint32_t v[4];
    UNROLL for (int k = 0; k < 4; ++k) v[k] = __ldg(from + 2 * k * g.taps) | static_cast<uint32_t>(__ldg(from + (2 * k + 1) * g.taps)) << 16;
    *reinterpret_cast<uint4 *>(g.to_w + (static_cast<size_t>(f) * g.taps + tap) * g.c + c) = make_uint4(v[0], v[1], v[2], v[3]);
}

static __global__ void __launch_bounds__(256) reorder(const __grid_constant__ Reorder g) {
    __shared__ uint32_t words[64][33];
    launch_dependents();
    if (blockIdx.x >= g.x_blocks)
        reorder_weights(g);
    else if (g.vector == 8)
        reorder_pixels<8>(g, words);
    else if (g.vector == 4)
        reorder_pixels<4>(g, words);
    else
        reorder_pixels<1>(g, words);
}

}  // namespace conv2d
#endif
