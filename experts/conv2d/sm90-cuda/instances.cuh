// The kernels that plans choose from, for one type of elements.
#ifndef CONV2D_INSTANCES_CUH
#define CONV2D_INSTANCES_CUH

#include "launch.cuh"

namespace conv2d {

template <class T, Kind kKind, bool kNchw, int kPixels, int kFilters, int kGroups, int kPerSm>
Instance once() {
    constexpr int kM = kNchw ? kFilters : kPixels, kN = kNchw ? kPixels : kFilters;
    constexpr Source kSource = kKind == Kind::kHalo ? Source::kHalo : Source::kIm2col;
    return {kKind, kNchw, kNchw, kPixels, kFilters, kGroups, kPerSm,
            reinterpret_cast<const void *>(tiled_product<T, kM, kN, kGroups, kPerSm, kNchw, kSource>)};
}
template <class T, Form kForm, int kPixels, int kFilters, int kGroups, int kPerSm>
Instance stream() {
    constexpr bool kRows = kForm == Form::kPixelRows, kDirect = kForm == Form::kNchwDirect;
    constexpr int kM = kRows ? kPixels : kFilters, kN = kRows ? kFilters : kPixels;
    return {kDirect ? Kind::kStreamDirect : Kind::kStream, kDirect, !kRows, kPixels, kFilters, kGroups, kPerSm,
            reinterpret_cast<const void *>(stream_gemm<T, kM, kN, kGroups, kPerSm, kForm>)};
}

// NHWC with filters as rows of the product: one warpgroup for 64 filters, so that many pixels share their weights.
template <class T, int kPixels, int kFilters, int kPerSm>
Instance turned() {
    constexpr int kGroups = kFilters / 64;
    return {Kind::kHalo, false, true, kPixels, kFilters, kGroups, kPerSm,
            reinterpret_cast<const void *>(tiled_product<T, kFilters, kPixels, kGroups, kPerSm, false, Source::kHalo, true>)};
}

struct Instances {
    const Instance *list;
    int count;
};

// Pixels, filters, warpgroups, CTAs of a multiprocessor.
template <class T>
Instances instances() {
    constexpr Kind I = Kind::kIm2col, H = Kind::kHalo;
    constexpr Form P = Form::kPixelRows, F = Form::kFilterRows, D = Form::kNchwDirect;
    static const Instance list[] = {
        once<T, I, false, 128, 128, 2, 2>(), once<T, I, false, 128, 64, 2, 3>(), once<T, I, false, 192, 128, 3, 1>(),
        once<T, I, false, 64, 128, 1, 3>(),  once<T, I, false, 64, 64, 1, 4>(),  once<T, H, false, 128, 128, 2, 2>(),
        once<T, H, false, 128, 64, 2, 3>(),  once<T, H, false, 64, 128, 1, 3>(), once<T, H, false, 256, 64, 2, 2>(),
        once<T, H, false, 64, 64, 1, 4>(),

        once<T, I, true, 128, 128, 2, 2>(),  once<T, I, true, 128, 64, 1, 3>(),  once<T, I, true, 192, 128, 2, 1>(),
        once<T, I, true, 64, 128, 2, 3>(),   once<T, I, true, 64, 64, 1, 4>(),   once<T, I, true, 96, 128, 2, 2>(),
        once<T, I, true, 48, 128, 2, 3>(),   once<T, I, true, 96, 64, 1, 4>(),   once<T, H, true, 128, 128, 2, 2>(),
        once<T, H, true, 128, 64, 1, 3>(),   once<T, H, true, 96, 128, 2, 2>(),  once<T, H, true, 48, 128, 2, 3>(),
        once<T, H, true, 64, 64, 1, 4>(),

        stream<T, P, 128, 128, 2, 2>(),      stream<T, P, 128, 256, 2, 1>(),     stream<T, P, 64, 256, 1, 2>(),
        stream<T, P, 192, 128, 3, 1>(),      stream<T, P, 128, 64, 2, 3>(),      stream<T, P, 256, 128, 2, 1>(),
        stream<T, P, 64, 128, 1, 3>(),       stream<T, P, 64, 64, 1, 4>(),       stream<T, P, 256, 64, 2, 2>(),
        stream<T, F, 96, 128, 2, 2>(),       stream<T, F, 48, 128, 2, 3>(),      stream<T, F, 96, 64, 1, 3>(),
        stream<T, F, 192, 128, 2, 1>(),      stream<T, F, 96, 256, 2, 1>(),      stream<T, F, 48, 256, 2, 2>(),
        stream<T, F, 112, 128, 2, 2>(),

        stream<T, D, 128, 128, 2, 2>(),      stream<T, D, 128, 64, 1, 3>(),      stream<T, D, 64, 256, 2, 2>(),
        stream<T, D, 128, 256, 2, 1>(),      stream<T, D, 256, 128, 2, 1>(),     stream<T, D, 64, 128, 2, 3>(),
        stream<T, D, 64, 64, 1, 4>(),        stream<T, D, 256, 64, 1, 2>(),
#if CONV_ONE_WAVE
        turned<T, 112, 64, 3>(),             turned<T, 128, 64, 3>(),            turned<T, 144, 64, 3>(),
        turned<T, 160, 64, 2>(),             turned<T, 176, 64, 2>(),            turned<T, 192, 64, 2>(),
        turned<T, 208, 64, 2>(),             turned<T, 224, 64, 2>(),            turned<T, 240, 64, 2>(),
        turned<T, 256, 64, 2>(),             turned<T, 112, 128, 2>(),           turned<T, 128, 128, 2>(),
        turned<T, 208, 128, 1>(),            turned<T, 256, 128, 1>(),

        once<T, H, true, 160, 64, 1, 2>(),   once<T, H, true, 192, 64, 1, 2>(),  once<T, H, true, 208, 64, 1, 2>(),
        once<T, H, true, 224, 64, 1, 2>(),   once<T, H, true, 256, 64, 1, 2>(),  once<T, H, true, 112, 128, 2, 2>(),
        once<T, H, true, 208, 128, 2, 1>(),
#endif
    };
    return {list, static_cast<int>(sizeof(list) / sizeof(list[0]))};
}

}  // namespace conv2d
#endif
