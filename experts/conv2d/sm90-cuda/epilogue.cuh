// From a warp's 16 staged rows in shared memory to y, in either order of memory.
#ifndef CONV2D_EPILOGUE_CUH
#define CONV2D_EPILOGUE_CUH

#include <klineage/sm90/v1/ldmatrix.cuh>

#include "geometry.cuh"

namespace conv2d {

using namespace klineage::sm90;

// Which output pixel a column (of kHalo: a position) of a tile is. Pixels are counted through all images.
template <Source kSource>
struct Columns {
    const Params &g;
    int first;  // pixel of the tile's first column; of kHalo: its position
    DEVICE Columns(const Params &g, int first) : g(g), first(first) {}

    // The pixel, or -1.
    DEVICE int pixel(int column) const {
        if constexpr (kSource != Source::kHalo) return first + column < g.pixels ? first + column : -1;
        const int row = g.by_pitch(first + column), n = g.by_rows(row), p = row - n * g.rows_of_image, q = first + column - row * g.pitch;
        return n < g.n && p < g.p && q < g.q ? n * g.plane + p * g.q + q : -1;
    }
    // How many pixels lie before a column.
    DEVICE int pixels_before(int column) const {
        if constexpr (kSource != Source::kHalo) return min(first + column, g.pixels);
        const int row = g.by_pitch(first + column), n = g.by_rows(row), p = row - n * g.rows_of_image, q = first + column - row * g.pitch;
        return min(n * g.plane + (p < g.p ? p * g.q + min(q, g.q) : g.plane), g.pixels);
    }
    // The columns of kCount pixels, from pixel `inside` of image n on.
    template <int kCount>
    DEVICE void of_pixels(int (&column)[kCount], int n, int inside) const {
        if constexpr (kSource != Source::kHalo) {
            UNROLL for (int i = 0; i < kCount; ++i) column[i] = n * g.plane + inside + i - first;
        } else {
            const int p = g.by_q(inside);
            int q = inside - p * g.q, at = (n * g.rows_of_image + p) * g.pitch + q - first;
            UNROLL for (int i = 0; i < kCount; ++i, ++at, ++q) {
                if (q == g.q) q = 0, at += g.pitch - g.q;
                column[i] = at;
            }
        }
    }
};

// Rows are pixels (columns `row` to row + 15 of the tile), columns from..to are filters.
template <class T, Source kSource, int kPitch>
DEVICE void store_nhwc(const Params &g, const Columns<kSource> &columns, uint32_t stage, int row, int filter, int from, int to) {
    const int lane = threadIdx.x % 32, own = columns.pixel(row + lane % 16), vectors = (to - from) / 8;
    T *const y = static_cast<T *>(g.y);
    UNROLL for (int i = 0; i < kPitch / 32; ++i) {  // 16 rows of (kPitch - 16) / 16 vectors at most
        const int item = i * 32 + lane;
        if (i * 32 >= 16 * vectors) break;
        const int r = item / vectors, v = from / 8 + item - r * vectors, pixel = __shfl_sync(~0u, own, r);
        if (pixel >= 0 && filter + v * 8 < g.f)
            *reinterpret_cast<uint4 *>(y + static_cast<size_t>(pixel) * g.f + filter + v * 8) = load_shared_x4(stage + r * kPitch + v * 16);
    }
}

DEVICE uint16_t load_shared_16(uint32_t address) {
    uint16_t v;
    asm volatile("ld.shared.b16 %0, [%1];" : "=h"(v) : "r"(address) : "memory");
    return v;
}

// Rows are filters, columns from..to of the tile are pixels; kVector of them, which never cross into another image, are a store.
template <class T, Source kSource, int kPitch, int kVector>
DEVICE void store_vectors(const Params &g, const Columns<kSource> &columns, uint32_t stage, int filter, int from, int to) {
    constexpr int kLanes = kVector == 8 ? 16 : 32;
    const int lane = threadIdx.x % 32, begin = columns.pixels_before(from), end = columns.pixels_before(to);
    if (begin >= end) return;
    for (int at = (begin / kVector + lane % kLanes) * kVector; at < end; at += kLanes * kVector) {
        const int n = g.by_plane(at), inside = at - n * g.plane;
        int column[kVector];
        columns.of_pixels(column, n, inside);
        uint16_t *const y = static_cast<uint16_t *>(g.y) + (static_cast<size_t>(n) * g.f + filter) * g.plane + inside;
        const bool whole = at >= begin && at + kVector <= end;
        for (int row = lane / kLanes; row < min(16, g.f - filter); row += 32 / kLanes) {
            uint16_t v[kVector];
            uint16_t *const to_row = y + static_cast<size_t>(row) * g.plane;
            if (kVector == 8 && kSource != Source::kHalo && whole) {
                *reinterpret_cast<uint4 *>(to_row) = load_shared_x4(stage + row * kPitch + column[0] * 2);
                continue;
            }
            UNROLL for (int i = 0; i < kVector; ++i)
                v[i] = at + i >= begin && at + i < end ? load_shared_16(stage + row * kPitch + column[i] * 2) : 0;
            if (whole) {
                if constexpr (kVector == 8)
                    *reinterpret_cast<uint4 *>(to_row) = make_uint4(v[0] | v[1] << 16, v[2] | v[3] << 16, v[4] | v[5] << 16, v[6] | v[7] << 16);
                else if constexpr (kVector == 4)
                    *reinterpret_cast<uint2 *>(to_row) = make_uint2(v[0] | v[1] << 16, v[2] | v[3] << 16);
                else
                    to_row[0] = v[0];
            } else {
                UNROLL for (int i = 0; i < kVector; ++i)
                    if (at + i >= begin && at + i < end) to_row[i] = v[i];
            }
        }
    }
}

template <class T, Source kSource, int kPitch>
DEVICE void store_nchw(const Params &g, const Columns<kSource> &columns, uint32_t stage, int filter, int from, int to) {
    if (g.vector == 8)
        store_vectors<T, kSource, kPitch, 8>(g, columns, stage, filter, from, to);
    else if (g.vector == 4)
        store_vectors<T, kSource, kPitch, 4>(g, columns, stage, filter, from, to);
    else
        store_vectors<T, kSource, kPitch, 1>(g, columns, stage, filter, from, to);
}

}  // namespace conv2d
#endif
