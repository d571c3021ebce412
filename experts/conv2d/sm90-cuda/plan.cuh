// Which kernel, and how: the plan whose estimated time is the least.
#ifndef CONV2D_PLAN_CUH
#define CONV2D_PLAN_CUH

#include <cstring>

#include "instances.cuh"

namespace conv2d {

// Clocks of a multiprocessor. Those of implicit_gemm.cuh were fitted to times of its plans; `stores` and `reorder` are estimates, not fitted.
// The model ranks plans roughly.
struct Machine {
#if CONV_ONE_WAVE  // by hand, from one kernel time each of 14 layers: NOTES.md, "One wave"
    bool counts_all = true;  // also what TMA writes to shared memory, and resident weights once
    float l2 = 37, step = 40;
#else
    bool counts_all = false;
    float l2 = 55;            // bytes of a clock that TMA brings
    float step = 68;          // waiting in a step beyond the products and the copies, with one CTA alone
#endif
    float start = 2600;       // from the launch to the first product
    float epilogue = 2650;    // of 128 x 128 results, by implicit_gemm.cuh
    float stores = 1300;      // the same by stream.cuh
    float split = 1900;       // for each CTA that shares K
    float reorder = 9000, reorder_byte = 1.0f / 3000;  // NCHW to NHWC: beginning, and each byte of x
};

// Clocks of one tile of a CTA that computes `tiles`, when `together` CTAs share a multiprocessor. A step takes as long as the slowest
// of the tensor cores, of shared memory (128 bytes of a clock: each product reads both of its operands) and of TMA.
inline float tile_clocks(const Machine &m, const Shape &s, const Params &g, const Instance &tile, int together, int tiles) {
    const int columns = tile.filter_rows ? tile.pixels : tile.filters, rows = tile.filter_rows ? tile.filters : tile.pixels;
    const float products = rows / 64 * columns * 2.0f, reads = rows / 64 * (64 + columns * 1.0f);
    const float again = tile.kind == Kind::kHalo ? (1 + (s.size - 1.0f) * g.pitch / tile.pixels) / g.taps : 1;
    const float bytes = tile.filters * 128.0f * (!g.resident ? 1 : m.counts_all ? 1.0f / tiles : 0) + tile.pixels * 128 * again;
    const float shared = reads + (m.counts_all ? bytes / 128 : 0), steps = static_cast<float>(s.chunks() * g.taps) / g.splits;
    const float step = std::max(std::max(products, shared), bytes / m.l2);
    const float results = tile.pixels * tile.filters / 16384.0f * (0.5f + 0.5f * together);
    return steps * std::max(together * step, step + m.step) + results * (tile.stream() ? m.stores : m.epilogue) +
           (g.splits > 1 ? m.split * g.splits : 0);
}

// Clocks of a convolution on `units` multiprocessors; 0 if the plan is not for it.
inline float clocks_of(const Machine &m, const Shape &shape, const Plan &plan, const Instance &tile, int units) {
    const bool reorders = tile.nchw && tile.kind != Kind::kStreamDirect;
    const Shape s = reorders ? reordered(shape) : shape;
    if (refuse(s, plan, tile)) return 0;
    Params g = sizes_of(s, plan, tile);
    const int grid = grid_of(g, plan, tile, units);
    const int stages = grid > 0 ? stages_of(g, s, plan, tile, grid) : 0, steps = s.chunks() * s.taps();
    if (stages < std::min(2, steps)) return 0;
    const float before = reorders ? m.reorder + m.reorder_byte * shape.n * shape.c * shape.h * shape.w * 2 : 0;
    const int waves = divide_up(g.tiles, grid);
    if (tile.stream())
        return before + m.start + waves * tile_clocks(m, s, g, tile, divide_up(grid, units), waves);
    const int fit = std::min(tile.per_sm, kSharedOfMultiprocessor / (place_shared(g, s, plan, tile, stages) + kSharedReserved));
    const int wave = units * fit, rest = grid % wave;
    const auto one = [&](int together) { return m.start + tile_clocks(m, s, g, tile, together, 1); };
    return before + grid / wave * one(fit) + (rest ? one(divide_up(rest, units)) : 0);
}

// All plans of an instance, handed to `visit`.
template <class Visit>
void each_plan(const Shape &s, const Instances &all, bool nchw, const Visit &visit) {
    for (int i = 0; i < all.count; ++i) {
        const Instance &tile = all.list[i];
        if (tile.nchw != nchw) continue;
        for (int per_sm = 1; per_sm <= tile.per_sm; ++per_sm)
            for (int option = 0; option < (tile.stream() ? 2 : 4); ++option)
                visit(Plan{i, per_sm, tile.kind == Kind::kHalo && s.chunks() > 1 ? 2 : 1, tile.stream() ? 1 : 1 << option, tile.stream() ? option : 0});
    }
}

inline Plan best_plan(const Shape &s, const Instances &all, bool nchw, int units) {
    Plan best = {-1, 1, 1, 1, 0};
    float least = 0;
    each_plan(s, all, nchw, [&](const Plan &plan) {
        const float clocks = clocks_of(Machine(), s, plan, all.list[plan.instance], units);
        if (clocks > 0 && (best.instance < 0 || clocks < least)) best = plan, least = clocks;
    });
    return best;
}

// The same, remembered for the last shapes of a thread: a program calls few layers many times.
inline Plan plan_of(const Shape &s, const Instances &all, bool nchw, int units) {
    struct Known {
        Shape shape;
        const Instance *list;
        bool nchw;
        int units;
        Plan plan;
    };
    static thread_local Known known[64] = {};
    unsigned hash = 2166136261u;
    for (int v : {s.n, s.c, s.h, s.w, s.f, s.size, s.stride, s.pad, int(nchw)}) hash = (hash ^ static_cast<unsigned>(v)) * 16777619u;
    Known &k = known[hash >> 26];
    if (std::memcmp(&k.shape, &s, sizeof(Shape)) || k.list != all.list || k.nchw != nchw || k.units != units)
        k = {s, all.list, nchw, units, best_plan(s, all, nchw, units)};
    return k.plan;
}

}  // namespace conv2d
#endif
