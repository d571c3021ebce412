// The sizes of one convolution, as the kernels of implicit_gemm.cuh read them, and division by constants of the call.
#ifndef CONV2D_GEOMETRY_CUH
#define CONV2D_GEOMETRY_CUH

#include <cstdint>

namespace conv2d {

#define DEVICE __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define LOOP _Pragma("unroll 1")

// Switches for what has not been measured yet (NOTES.md, "One wave"): 0 is what runs today.
#ifndef CONV_ONE_WAVE
#define CONV_ONE_WAVE 0  // NHWC halos with filters as rows of the product, wide tiles, and the cost model that chooses them
#endif
#ifndef CONV_STREAM_X
#define CONV_STREAM_X 0  // 1x1: x leaves the L2 cache first
#endif

// n / d for 0 <= n < 2^31: the high half of a product, and a shift.
struct Divider {
    unsigned multiplier = 0, shift = 0;
    Divider() = default;
    explicit Divider(int d) {
        while (1u << shift < static_cast<unsigned>(d)) ++shift;
        multiplier = static_cast<unsigned>(((1ull << (31 + shift)) + d - 1) / d);
    }
    DEVICE int operator()(int n) const { return static_cast<int>(__umulhi(2u * n, multiplier) >> shift); }
};

inline int divide_up(int a, int b) { return (a + b - 1) / b; }

constexpr int kChunk = 64;  // channels of one step along K: a row of 128 bytes

// How the pixels of a tile come to shared memory.
//   kIm2col  one im2col copy for each tap and chunk of channels; columns of the product are output pixels, through all images
//   kHalo    stride 1: one copy of all rows that the tile's taps read, for each chunk; columns are positions of a padded plane,
//            `pitch` to a row, h + pad rows to an image, and a tap is an offset in shared memory
enum class Source { kIm2col, kHalo };

struct Shape {
    int n, c, h, w, f, size, stride, pad, p, q;  // size: height and width of a filter; p, q: height and width of the output
    int taps() const { return size * size; }
    int chunks() const { return (c + kChunk - 1) / kChunk; }
    bool pointwise() const { return size == 1 && stride == 1 && pad == 0; }
};

struct Params {
    void *y;
    int n, f, size, stride, pad, p, q;
    int plane;                 // p * q
    int taps, units;           // units of K that a split counts: chunks (kHalo), or chunks times taps, the taps of a chunk one after the other
    int filter_tiles, tiles;   // tiles in all: of stream.cuh
    int tiles_of_image;        // stream.cuh, kNchwDirect
    int pixels;                // output pixels of all images
    int pitch, rows_of_image;  // kHalo: positions of a row, w + pad; rows of an image, h + pad
    int stages, pixel_stages, pixel_bytes, weight_bytes;
    int output_at, barriers_at;  // bytes behind the start of shared memory
    int splits;                // CTAs of a cluster, each with a part of K
    int vector;                // NCHW: output pixels of a store, 8, 4 or 1
    int whole;                 // taps is 1, stride 1, no padding: x is a plain matrix, the map is tiled
    int resident;              // stream.cuh: a CTA keeps the weights of its filters
    Divider by_filter_tiles, by_taps, by_size, by_plane, by_q, by_pitch, by_rows, by_tiles_of_image;
};

}  // namespace conv2d
#endif
