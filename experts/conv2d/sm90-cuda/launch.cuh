// Host side of the general convolution: tensor maps, shared memory, and the launches of one plan.
#ifndef CONV2D_LAUNCH_CUH
#define CONV2D_LAUNCH_CUH

#include <klineage/sm90/v1/tensor_map.cuh>

#include <algorithm>

#include "implicit_gemm.cuh"
#include "reorder.cuh"
#include "stream.cuh"

namespace conv2d {

// A kernel with the size of its tiles. kIm2col and kHalo are of implicit_gemm.cuh, the others of stream.cuh.
enum class Kind { kIm2col, kHalo, kStream, kStreamDirect };

struct Instance {
    Kind kind;
    bool nchw, filter_rows;
    int pixels, filters, groups;
    int per_sm;  // CTAs of a multiprocessor that its registers are limited for
    const void *kernel;

    bool stream() const { return kind == Kind::kStream || kind == Kind::kStreamDirect; }
    bool turned() const { return filter_rows && !nchw && !stream(); }
};

// How a convolution is computed.
struct Plan {
    int instance;      // in the table of kernels
    int per_sm;        // CTAs of a multiprocessor that shared memory is divided among
    int pixel_stages;  // kHalo: 1 to 4
    int splits;        // kIm2col, kHalo: 1, 2, 4 or 8 CTAs share K
    int resident;      // kStream, kStreamDirect: weights stay in shared memory
};

constexpr int kSharedLimit = 232448;       // bytes of a CTA
constexpr int kSharedOfMultiprocessor = 233472, kSharedReserved = 1024;

inline int round_up(int a, int b) { return divide_up(a, b) * b; }
inline int vector_of(int plane) { return plane % 8 == 0 ? 8 : plane % 4 == 0 ? 4 : 1; }

// The convolution that is left after `reorder`, which keeps only the pixels that a filter of one tap reads.
inline Shape reordered(Shape s) {
    if (s.size == 1 && s.pad == 0) s.h = s.p, s.w = s.q, s.stride = 1;
    return s;
}

// Bytes of scratch memory that a convolution in NCHW needs: x in NHWC, then the weights.
inline size_t scratch_bytes_x(const Shape &s) {
    const Shape r = reordered(s);
    return (static_cast<size_t>(r.n) * r.h * r.w * r.c * 2 + 255) / 256 * 256;
}
inline size_t scratch_bytes(const Shape &s) { return scratch_bytes_x(s) + static_cast<size_t>(s.f) * s.taps() * s.c * 2; }

inline const char *launch_reorder(const Shape &s, const void *x, const void *w, void *scratch, cudaStream_t stream) {
    const Shape r = reordered(s);
    Reorder g = {};
    g.x = static_cast<const uint16_t *>(x), g.w = static_cast<const uint16_t *>(w);
    g.to_x = static_cast<uint16_t *>(scratch), g.to_w = g.to_x + scratch_bytes_x(s) / 2;
    g.c = s.c, g.plane = s.h * s.w, g.taps = s.taps(), g.kept = r.h * r.w, g.q = r.w, g.row = s.w;
    g.stride = r.stride == s.stride ? 1 : s.stride, g.vector = g.stride == 1 ? vector_of(g.plane) : 1;
    g.tiles_of_image = divide_up(g.kept, 64), g.chunks = s.chunks(), g.x_blocks = s.n * g.tiles_of_image * g.chunks;
    g.w_vectors = s.taps() > 1 ? s.f * s.taps() * (s.c / 8) : 0;
    g.by_chunks = Divider(g.chunks), g.by_tiles = Divider(g.tiles_of_image), g.by_taps = Divider(g.taps), g.by_c8 = Divider(s.c / 8);
    g.by_q = Divider(g.q);
    Launch how;
    how.grid = dim3(g.x_blocks + divide_up(g.w_vectors, 256)), how.block = dim3(256), how.stream = stream;
    return launch(reorder, how, g);
}

// The map of x; x is NHWC but for kStreamDirect.
template <class T>
const char *map_pixels(CUtensorMap *map, const Shape &s, const Params &g, const Instance &tile, const void *x) {
    const cuuint64_t n = s.n, c = s.c, h = s.h, w = s.w, plane = h * w;
    if (tile.kind == Kind::kStreamDirect)
        return encode_tiled<T, 3>(map, x, {plane, c, n}, {plane * 2, plane * c * 2}, {64, kChunk, 1});
    if (tile.kind == Kind::kHalo)
        return encode_tiled<T, 4>(map, x, {c, w, h, n}, {c * 2, w * c * 2, plane * c * 2}, {kChunk, cuuint32_t(g.pitch), 1, 1});
    if (g.whole) return encode_tiled<T, 2>(map, x, {c, n * plane}, {c * 2}, {kChunk, cuuint32_t(tile.pixels)});
    const int corner = s.pad - (s.size - 1);
    const cuuint32_t step = s.stride;
    return encode_im2col<T, 4>(map, x, {c, w, h, n}, {c * 2, w * c * 2, plane * c * 2}, {-s.pad, -s.pad}, {corner, corner}, kChunk,
                               tile.pixels, {1, step, step, 1});
}

// The map of y for TMA stores of 64 rows of a product.
template <class T>
const char *map_output(CUtensorMap *map, const Shape &s, const Instance &tile, const void *y) {
    const cuuint64_t n = s.n, f = s.f, plane = static_cast<cuuint64_t>(s.p) * s.q;
    if (tile.nchw) return encode_tiled<T, 3>(map, y, {plane, f, n}, {plane * 2, plane * f * 2}, {64, 64, 1});
    return encode_tiled<T, 2>(map, y, {f, n * plane}, {f * 2}, {64, tile.filter_rows ? cuuint32_t(tile.pixels) : 64u});
}

// Rows of a halo that a tile reads at most.
inline int halo_rows(const Shape &s, int pixels, int pitch) { return (pitch - 1 + pixels + s.size - 2) / pitch + s.size; }

inline int pixel_tiles(const Shape &s, const Params &g, const Instance &tile) {
    if (tile.kind == Kind::kStreamDirect) return s.n * g.tiles_of_image;
    if (tile.kind == Kind::kHalo) return divide_up(((s.n - 1) * g.rows_of_image + s.p) * g.pitch, tile.pixels);
    return divide_up(g.pixels, tile.pixels);
}

inline Params sizes_of(const Shape &s, const Plan &plan, const Instance &tile) {
    Params g = {};
    g.n = s.n, g.f = s.f, g.size = s.size, g.stride = s.stride, g.pad = s.pad, g.p = s.p, g.q = s.q;
    g.plane = s.p * s.q, g.taps = s.taps(), g.pixels = s.n * g.plane, g.splits = plan.splits, g.resident = plan.resident;
    g.units = s.chunks() * (tile.kind == Kind::kHalo ? 1 : g.taps);
    g.filter_tiles = divide_up(s.f, tile.filters), g.tiles_of_image = divide_up(g.plane, tile.pixels);
    g.pitch = s.w + s.pad, g.rows_of_image = s.h + s.pad, g.tiles = pixel_tiles(s, g, tile) * g.filter_tiles;
    g.vector = vector_of(g.plane), g.whole = s.pointwise();
    return g;
}

// Shared memory: rings (or the resident weights), of stream.cuh the output, barriers. In implicit_gemm.cuh the output takes the
// place of the rings. Returns the bytes with `stages` stages.
inline int place_shared(Params &g, const Shape &s, const Plan &plan, const Instance &tile, int stages) {
    const bool halo = tile.kind == Kind::kHalo;
    g.stages = stages, g.pixel_stages = halo ? plan.pixel_stages : stages, g.weight_bytes = tile.filters * kChunk * 2;
    g.pixel_bytes = halo ? round_up(halo_rows(s, tile.pixels, g.pitch) * g.pitch * 128, 1024) : tile.pixels * kChunk * 2;
    const int rings = (plan.resident ? g.units : stages) * g.weight_bytes + g.pixel_stages * g.pixel_bytes;
    const int output = tile.pixels * tile.filters * 2;
    if (tile.stream()) {
        g.output_at = rings, g.barriers_at = rings + output;
    } else {
        const int columns = tile.nchw ? tile.pixels : tile.filters;
        const int staged = tile.turned() ? tile.groups * tile.pixels * kTurnedPitch : tile.groups * 4 * 16 * (columns * 2 + 16);
        const int sums = plan.splits > 1 ? output * 2 : 0;
        g.barriers_at = round_up(std::max(rings, staged + sums), 16);
    }
    return 1024 + g.barriers_at + kBarrierBytes;
}

inline int multiprocessors() {
    int device = 0, count = 0;
    if (cudaGetDevice(&device) != cudaSuccess || cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) return 0;
    return count;
}

// CTAs of a grid. A CTA with resident weights has one tile of filters only.
inline int grid_of(const Params &g, const Plan &plan, const Instance &tile, int units) {
    if (!tile.stream()) return g.tiles * plan.splits;
    const int most = units * plan.per_sm;
    return g.tiles <= most ? g.tiles : plan.resident ? most / g.filter_tiles * g.filter_tiles : most;
}

// The most stages that fit, and are of use.
inline int stages_of(Params &g, const Shape &s, const Plan &plan, const Instance &tile, int grid) {
    const int limit = std::min(kSharedLimit, kSharedOfMultiprocessor / plan.per_sm - kSharedReserved);
    const int steps = s.chunks() * s.taps(), use = tile.stream() ? steps * divide_up(g.tiles, std::max(grid, 1)) : divide_up(g.units, plan.splits) * (steps / g.units);
    int stages = std::min(kMaxStages, use);
    while (stages > 0 && place_shared(g, s, plan, tile, stages) > limit) --stages;
    return stages;
}

inline void set_dividers(Params &g) {
    g.by_filter_tiles = Divider(g.filter_tiles), g.by_taps = Divider(g.taps), g.by_size = Divider(g.size), g.by_plane = Divider(g.plane);
    g.by_q = Divider(g.q), g.by_pitch = Divider(g.pitch), g.by_rows = Divider(g.rows_of_image), g.by_tiles_of_image = Divider(g.tiles_of_image);
}

// nullptr, or why the plan is not for the shape.
inline const char *refuse(const Shape &s, const Plan &plan, const Instance &tile) {
    const bool halo = tile.kind == Kind::kHalo, direct = tile.kind == Kind::kStreamDirect;
    if (halo && (s.stride != 1 || s.w + s.pad > 256)) return "conv2d: rows of a halo need stride 1 and a width up to 256";
    if (direct && (!s.pointwise() || s.h * s.w % 8 != 0)) return "conv2d: not a direct case";
    if (tile.stream() && plan.splits != 1) return "conv2d: tiles that follow each other do not share K";
    if (!tile.stream() && plan.resident) return "conv2d: resident weights are of many tiles";
    if (plan.per_sm < 1 || plan.per_sm > tile.per_sm || plan.pixel_stages < 1 || plan.pixel_stages > 4) return "conv2d: plan out of range";
    if (plan.splits > s.chunks() * (halo ? 1 : s.taps()) || (tile.filter_rows ? tile.pixels : tile.filters) / plan.splits % 16 != 0)
        return "conv2d: more splits than steps, or than columns";
    return nullptr;
}

// nullptr, or what is wrong. x and w are NHWC (w: [f][tap][c]) but for kStreamDirect; y is NCHW if the instance is.
template <class T>
const char *launch_plan(const Shape &s, const Plan &plan, const Instance &tile, const void *x, const void *w, void *y,
                        cudaStream_t stream, bool dependent) {
    if (const char *error = refuse(s, plan, tile)) return error;
    Params g = sizes_of(s, plan, tile);
    g.y = y;
    Launch how;
    how.grid = dim3(grid_of(g, plan, tile, multiprocessors())), how.block = dim3(tile.groups * 128 + 32);
    const int stages = stages_of(g, s, plan, tile, how.grid.x);
    if (how.grid.x == 0 || stages < std::min(2, s.chunks() * s.taps())) return "conv2d: the plan needs too much shared memory";
    how.shared_bytes = place_shared(g, s, plan, tile, stages);
    how.stream = stream, how.cluster = plan.splits, how.dependent = dependent;
    set_dividers(g);
    CUtensorMap x_map, w_map, y_map;
    const cuuint64_t c = s.c, taps = s.taps(), f = s.f;
    if (const char *error = map_pixels<T>(&x_map, s, g, tile, x)) return error;
    if (const char *error = encode_tiled<T, 3>(&w_map, w, {c, taps, f}, {c * 2, taps * c * 2}, {kChunk, 1, cuuint32_t(tile.filters)})) return error;
    void *const kernel = const_cast<void *>(tile.kernel);
    if (!tile.stream())
        return launch(reinterpret_cast<void (*)(const CUtensorMap, const CUtensorMap, const Params)>(kernel), how, x_map, w_map, g);
    if (const char *error = map_output<T>(&y_map, s, tile, y)) return error;
    return launch(reinterpret_cast<void (*)(const CUtensorMap, const CUtensorMap, const CUtensorMap, const Params)>(kernel), how, x_map, w_map,
                  y_map, g);
}

}  // namespace conv2d
#endif
