// Host side of the general convolution: tensor maps, shared memory, and the launches of one plan.
#ifndef CONV2D_LAUNCH_CUH
#define CONV2D_LAUNCH_CUH

#include <klineage/sm90/v1/tensor_map.cuh>

#include <algorithm>

#include "implicit_gemm.cuh"
#include "reorder.cuh"

namespace conv2d {

// How a convolution is computed.
struct Plan {
    int tile;          // number in the table of tiles of its layout
    Source source;
    int stages;        // of the ring of weights and, but for kHalo, of pixels
    int pixel_stages;  // kHalo: 1 to 4
    int splits;        // 1, 2, 4 or 8: CTAs that share K
    int probe;
    int share;         // 1 or 2: CTAs that share weights; not with splits
};

struct Tile {
    int pixels, filters, groups;
    const void *kernels[3];  // by Source; all take (x_map, w_map, params)
};

using Kernel = void (*)(const CUtensorMap, const CUtensorMap, const Params);

inline int divide_up(int a, int b) { return (a + b - 1) / b; }
inline int vector_of(int plane) { return plane % 8 == 0 ? 8 : plane % 4 == 0 ? 4 : 1; }

// Bytes of scratch memory that a convolution needs: x in NHWC, then the weights.
inline size_t scratch_bytes_x(const Shape &s) { return (static_cast<size_t>(s.n) * s.h * s.w * s.c * 2 + 255) / 256 * 256; }
inline size_t scratch_bytes(const Shape &s) { return scratch_bytes_x(s) + static_cast<size_t>(s.f) * s.taps() * s.c * 2; }

inline const char *launch_reorder(const Shape &s, const void *x, const void *w, void *scratch, cudaStream_t stream) {
    Reorder g = {};
    g.x = static_cast<const uint16_t *>(x), g.w = static_cast<const uint16_t *>(w);
    g.to_x = static_cast<uint16_t *>(scratch), g.to_w = g.to_x + scratch_bytes_x(s) / 2;
    g.c = s.c, g.plane = s.h * s.w, g.taps = s.taps(), g.vector = vector_of(g.plane);
    g.tiles_of_image = divide_up(g.plane, 64), g.chunks = s.chunks(), g.x_blocks = s.n * g.tiles_of_image * g.chunks;
    g.w_vectors = s.taps() > 1 ? s.f * s.taps() * (s.c / 8) : 0;
    g.by_chunks = Divider(g.chunks), g.by_tiles = Divider(g.tiles_of_image), g.by_taps = Divider(g.taps), g.by_c8 = Divider(s.c / 8);
    Launch how;
    how.grid = dim3(g.x_blocks + divide_up(g.w_vectors, 256)), how.block = dim3(256), how.stream = stream;
    return launch(reorder, how, g);
}

// The map of x for a tile; x is NHWC but for kDirect.
template <class T>
const char *map_pixels(CUtensorMap *map, const Shape &s, const Params &g, Source source, int pixels, const void *x) {
    const cuuint64_t n = s.n, c = s.c, h = s.h, w = s.w, plane = h * w;
    if (source == Source::kDirect)
        return encode_tiled<T, 3>(map, x, {plane, c, n}, {plane * 2, plane * c * 2}, {64, kChunk, 1});
    if (source == Source::kHalo)
        return encode_tiled<T, 4>(map, x, {c, w, h, n}, {c * 2, w * c * 2, plane * c * 2}, {kChunk, cuuint32_t(g.pitch), 1, 1});
    if (g.whole) return encode_tiled<T, 2>(map, x, {c, n * plane}, {c * 2}, {kChunk, cuuint32_t(pixels)});
    const int corner = s.pad - (s.size - 1);
    const cuuint32_t step = s.stride;
    return encode_im2col<T, 4>(map, x, {c, w, h, n}, {c * 2, w * c * 2, plane * c * 2}, {-s.pad, -s.pad}, {corner, corner}, kChunk,
                               pixels, {1, step, step, 1});
}

// Rows of a halo that a tile reads at most.
inline int halo_rows(const Shape &s, int pixels, int pitch) {
    return (pitch - 1 + pixels + s.size - 2) / pitch + s.size;
}

inline Params params_of(const Shape &s, const Plan &plan, const Tile &tile, void *y) {
    Params g = {};
    g.y = y, g.n = s.n, g.h = s.h, g.w = s.w, g.f = s.f, g.size = s.size, g.stride = s.stride, g.pad = s.pad, g.p = s.p, g.q = s.q;
    g.plane = s.p * s.q, g.taps = s.taps(), g.units = s.chunks() * (plan.source == Source::kHalo ? 1 : g.taps);
    g.filter_tiles = divide_up(s.f, tile.filters), g.tiles_of_image = divide_up(g.plane, tile.pixels), g.pixels = s.n * g.plane;
    g.probe = plan.probe;
    g.pitch = plan.probe & 2 ? (s.w + s.pad + 7) / 8 * 8 : s.w + s.pad, g.rows_of_image = s.h + s.pad;
    g.stages = plan.stages, g.weight_bytes = tile.filters * kChunk * 2, g.splits = plan.splits, g.share = plan.share, g.vector = vector_of(g.plane);
    g.pixel_stages = plan.source == Source::kHalo ? plan.pixel_stages : plan.stages;
    g.pixel_bytes = plan.source == Source::kHalo ? divide_up(halo_rows(s, tile.pixels, g.pitch) * g.pitch * 128, 1024) * 1024 : tile.pixels * kChunk * 2;
    g.whole = g.taps == 1 && s.stride == 1 && s.pad == 0;
    g.by_filter_tiles = Divider(g.filter_tiles), g.by_taps = Divider(g.taps), g.by_size = Divider(g.size), g.by_plane = Divider(g.plane);
    g.by_q = Divider(g.q), g.by_pitch = Divider(g.pitch), g.by_rows = Divider(g.rows_of_image), g.by_tiles_of_image = Divider(g.tiles_of_image);
    return g;
}

inline int pixel_tiles(const Shape &s, const Params &g, Source source, int pixels) {
    if (source == Source::kDirect) return s.n * g.tiles_of_image;
    if (source == Source::kIm2col) return divide_up(g.pixels, pixels);
    return divide_up(((s.n - 1) * g.rows_of_image + s.p) * g.pitch, pixels);
}

// Bytes of shared memory of a CTA; the epilogue takes the place of the rings.
inline int shared_bytes(const Params &g, const Tile &tile, bool nchw) {
    const int rings = g.stages * g.weight_bytes + g.pixel_stages * g.pixel_bytes;
    const int rows = nchw ? tile.filters : tile.pixels, columns = nchw ? tile.pixels : tile.filters;
    const int staged = tile.groups * 4 * 16 * (columns * 2 + 16), sums = g.splits > 1 ? rows * columns * 4 : 0;
    const int barriers = g.stages * g.weight_bytes + g.pixel_stages * g.pixel_bytes;
    return 1024 + std::max(barriers + kBarrierBytes, std::max(rings, staged + sums));
}

// nullptr, or what is wrong. x and w are NHWC (w: [f][tap][c]) unless the source is kDirect; y is NCHW if `nchw`.
template <class T>
const char *launch_plan(const Shape &s, const Plan &plan, const Tile &tile, bool nchw, const void *x, const void *w, void *y,
                        cudaStream_t stream, bool dependent) {
    const auto kernel = reinterpret_cast<Kernel>(const_cast<void *>(tile.kernels[static_cast<int>(plan.source)]));
    if (kernel == nullptr) return "conv2d: no such kernel";
    if (plan.source == Source::kHalo && (s.stride != 1 || s.w + s.pad > 256)) return "conv2d: rows of a halo need stride 1 and a width up to 256";
    if (plan.source == Source::kDirect && (s.size != 1 || s.stride != 1 || s.pad != 0 || s.h * s.w % 8 != 0)) return "conv2d: not a direct case";
    const Params g = params_of(s, plan, tile, y);
    if (plan.splits > 1 && plan.share > 1) return "conv2d: a cluster shares K or weights";
    if (plan.splits > g.units) return "conv2d: more splits than steps";
    if (plan.stages == 1 && s.chunks() * s.taps() > 1) return "conv2d: one stage is for one step";
    if (plan.stages > kMaxStages || plan.pixel_stages > 4) return "conv2d: too many stages";
    Launch how;
    how.shared_bytes = shared_bytes(g, tile, nchw);
    if (how.shared_bytes > 232448) return "conv2d: the plan needs too much shared memory";
    CUtensorMap x_map, w_map;
    const cuuint64_t c = s.c, taps = s.taps(), f = s.f;
    if (const char *error = map_pixels<T>(&x_map, s, g, plan.source, tile.pixels, x)) return error;
    if (const char *error = encode_tiled<T, 3>(&w_map, w, {c, taps, f}, {c * 2, taps * c * 2}, {kChunk, 1, cuuint32_t(tile.filters / plan.share)}))
        return error;
    how.grid = dim3(divide_up(pixel_tiles(s, g, plan.source, tile.pixels), plan.share) * plan.share * g.filter_tiles * plan.splits), how.block = dim3(tile.groups * 128 + 32);
    how.stream = stream, how.cluster = plan.splits * plan.share, how.dependent = dependent;
    return launch(kernel, how, x_map, w_map, g);
}

}  // namespace conv2d
#endif
