// 3x3 convolution, 64 -> 128 channels, stride 1, padding 1, fp16 with fp32 accumulation, for NVIDIA Hopper (sm_90a): x, w and y
// all channels_last (NHWC) or all contiguous (NCHW), any N, H and W. Written for N 8, 56 x 56.
//
// Floor: 3.70 GFLOP are 6,912 clocks of one SM's tensor cores for 192 x 128 outputs (3.5 us at 1.98 GHz, 4.7 us at the 790 TFLOP/s
// of a large product); 9.8 MB through 4.27 TB/s are 2.3 us. All weights and a tile of x for every SM are 25 MB out of the L2 cache.
//   tile_reuse: one wave of about 131 blocks; a block loads the input of its tile once.
//   wgmma with A in registers. NHWC: A is x, by ldmatrix from shifted pixels, so that a tile may start anywhere and cross into the
//     next image; B is the weights. NCHW (transposed_product): A is the weights, B is x as it lies in memory.
//   tma_load (NHWC): every 72 input pixels and every tap on a barrier of its own; the later taps are requested beside the products.
//   filter_order (NHWC): a 5-D tensor map permutes the filters, so that a lane's accumulators are 8 neighbours: 16-byte stores.
//   warp_private_weights (NCHW): each warp copies its own filters and waits for them alone.
//   reciprocal_division: no 64-bit shifts on the way to the first request (NCHW).
//   staggered_stores: a part of the output is stored beside the products of another part.
//   spread_requests: each warpgroup asks for its share (NHWC: of the later taps; NCHW: of the channels).
//   direct_requests. NHWC: no division before the first request, since the input of a tile is so many pixels in a row, whatever image
//     they are in; what lies beyond an edge is read from a line of zeros. NCHW: 48 threads compute once where blocks of 8 pixels are.
// Measured figures: see NOTES.md.
#include <cuda.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "klineage.h"

#define DEVICE __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define LOOP _Pragma("unroll 1")

namespace {

constexpr int kC = 64, kF = 128, kDepth = kC * 9;                // K of the implicit GEMM
constexpr int kTile = 192;                                       // output pixels of a block: 64 per warpgroup
constexpr int kWeightBytes = kF * kDepth * 2;
constexpr int kTapBytes = kWeightBytes / 9;                      // NHWC: one tap, 128 filters x 64 channels
constexpr int kChunk = 72, kMaxChunks = 9;                       // NHWC: input pixels of a copy, copies of a tile
constexpr int kImageAt = kWeightBytes, kZerosAt = kImageAt + kMaxChunks * kChunk * 128, kBarriersAt = kZerosAt + 128;
constexpr int kSpan = 192, kBlocks = kSpan / 8, kMaxBlocks = 46;  // NCHW: output pixels of a block; blocks of 8 input pixels
constexpr int kBlockPitch = 272;                                 // bytes of 8 pixels of 16 channels, and a pad for the banks
constexpr int kTable = kMaxBlocks + 2;                           // blocks with the ones before and after
constexpr int kCopyBytes = kTable * kBlockPitch;                 // 16 channels of an input tile; three of them, shifted by a pixel each
constexpr int kWarpBytes = 2 * 16 * 288;                         // twice 16 channels of the weights of 16 filters
constexpr int kStagePitch = 400;                                 // epilogue: bytes of kSpan pixels, and a pad for the banks
constexpr int kNchwImageAt = 8 * kWarpBytes + kBlockPitch;         // block 0; room for the block before it lies in front
constexpr int kNchwBarriersAt = 8 * kWarpBytes + 12 * kCopyBytes;
constexpr int kTableAt = kNchwBarriersAt + 4 * 8;                // NCHW: where each block of 8 input pixels comes from
constexpr int kNchwSharedBytes = 1024 + kTableAt + kTable * 4;
constexpr int kSharedBytes = 1024 + kBarriersAt + (kMaxChunks + 9) * 8;
constexpr int kEarlyTaps = 4;                                    // NHWC: taps requested together with x
constexpr int kLead = 4;                                         // NHWC: taps by which the first 64 filters are ahead at the end
static_assert(kEarlyTaps + 2 * 3 >= 9 && kEarlyTaps <= kMaxChunks, "two rounds of requests bring the other taps");
static_assert(kChunk % 8 == 0 && 3 * kChunk >= kTile + 2 && kMaxChunks == 9 && kTable == 6 * 8, "stretches, swizzle, blocks of a thread");
static_assert(kSharedBytes <= 232448 && kNchwSharedBytes <= 232448 && 16 * kStagePitch <= kWarpBytes, "shared memory of one block");

struct Divider {  // n / d for 0 <= n < 2^31: the high half of a product, and a shift
    unsigned multiplier = 0, shift = 0;
    Divider() = default;
    explicit Divider(int d) {
        while (1u << shift < static_cast<unsigned>(d)) ++shift;
        multiplier = static_cast<unsigned>(((1ull << (31 + shift)) + d - 1) / d);
    }
    DEVICE int operator()(int n) const { return static_cast<int>(__umulhi(2u * n, multiplier) >> shift); }
};

// NHWC. A tile is kTile consecutive pixels, whatever image they are in. Its input lies in shared memory as it does in memory, 128 bytes
// for each pixel: from the upper left neighbour of the first to the lower right neighbour of the last, or, when images are wide, only
// the three stretches of 3 kChunk pixels that hold the neighbours above, beside and below. Rows are `pitch` pixels apart there.
struct Pixels {
    const __half *weights;
    __half *y;
    int h, w, plane, total, wide, pitch, chunks;
    Divider by_plane, by_w;
};

// NCHW. A tile is kSpan consecutive positions, or pixels where planes are `exact` (kFlat), or a rectangle tile_h x tile_w of one image.
// Rows are counted through all images, h + 1 of them for each: row n * (h + 1) + h is the row of zeros below image n.
struct Geometry {
    const __half *x, *weights;
    __half *y;
    int n, h, w, plane, tile_h, tile_w, tiles_w, tiles, blocks_w, blocks, exact;
    Divider by_plane, by_w, by_rows, by_tiles_w, by_tiles;
};

struct Rectangle {
    int n, p, q;  // image, first output row, first output column

    DEVICE explicit Rectangle(const Geometry &g) {
        const int tile = blockIdx.x;
        n = g.by_tiles(tile);
        const int inside = tile - n * g.tiles, band = g.by_tiles_w(inside);
        p = band * g.tile_h, q = (inside - band * g.tiles_w) * g.tile_w;
    }
};

DEVICE unsigned shared_address(const void *p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }
DEVICE void barrier_init(unsigned bar, int count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory"); }
DEVICE void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void fence_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE void barrier_arrive(unsigned bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory"); }
DEVICE void barrier_expect(unsigned bar, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
DEVICE void barrier_wait(unsigned bar) {  // every barrier completes once
    asm volatile("{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0;\n@!done bra again;\n}" ::"r"(bar) : "memory");
}
DEVICE bool elect() {  // one lane of a warp
    unsigned yes;
    asm volatile("{\n.reg .pred one;\nelect.sync _|one, 0xffffffff;\nselp.u32 %0, 1, 0, one;\n}" : "=r"(yes));
    return yes;
}
DEVICE void prefetch(const void *from, unsigned bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
DEVICE void prefetch(const CUtensorMap *map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }
#define BULK_LOAD(dims) "cp.async.bulk.tensor." dims ".shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, "
DEVICE void load_chunk(unsigned to, const CUtensorMap *map, unsigned bar, int pixel) {
    asm volatile(BULK_LOAD("2d") "{%2, %3}], [%4];" ::"r"(to), "l"(map), "r"(0), "r"(pixel), "r"(bar) : "memory");
}
DEVICE void load_tap(unsigned to, const CUtensorMap *map, unsigned bar, int k) {
    asm volatile(BULK_LOAD("5d") "{%2, %3, %3, %3, %3}], [%4];" ::"r"(to), "l"(map), "r"(k), "r"(0), "r"(bar) : "memory");
}
DEVICE void copy_async(unsigned to, const void *from) {
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending> DEVICE void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory"); }
DEVICE void ldmatrix(unsigned (&a)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(address) : "memory");
}
DEVICE void stmatrix(unsigned address, unsigned a, unsigned b, unsigned c, unsigned d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
DEVICE uint4 load_pixels(const __half *p) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}
DEVICE unsigned pack(float low, float high) {
    const __half2 v = __floats2half2_rn(low, high);
    return reinterpret_cast<const unsigned &>(v);
}

#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D16(i) D4(i), D4(i + 4), D4(i + 8), D4(i + 12)
// d[64 x 128] += a[64 x 16] b[16 x 128], the first columns of d: a in registers, b N-major in shared memory without swizzle.
DEVICE void wgmma_first(float (&d)[96], const unsigned (&a)[4], unsigned long long b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
        "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, "
        "%46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "{%64, %65, %66, %67}, %68, p, 1, 1, 1;\n}"
        : D16(0), D16(16), D16(32), D16(48)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}
// d[64 x 64] += a[64 x 16] b[16 x 64], the columns of d whose accumulators start at kFirst; b K-major or N-major.
template <int kNMajor, int kFirst, int kSize>
DEVICE void wgmma_64(float (&d)[kSize], const unsigned (&a)[4], unsigned long long b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
        "%24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, %36, p, 1, 1, %38;\n}"
        : D16(kFirst), D16(kFirst + 16)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(kNMajor));
}

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending> DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory"); }
// After a wait that leaves other products under way: no use of these accumulators moves before it.
template <int kFrom, int kTo, int kSize> DEVICE void settle(float (&d)[kSize]) {
    UNROLL for (int i = kFrom; i < kTo; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
DEVICE void turn_wait() { asm volatile("bar.sync 1, 256;" ::: "memory"); }
DEVICE void turn_pass() { asm volatile("bar.arrive 1, 256;" ::: "memory"); }

template <int kValue> struct Constant { static constexpr int value = kValue; };

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

// NCHW: the product is transposed, y[filter][pixel] = w[filter][k] x[k][pixel], so that x stays [channel][pixel]: B is
// N-major, 8 pixels of a channel are 16 bytes. A shift by a row moves whole blocks of 8 pixels; a shift by a pixel does
// not, so each group of 16 channels lies there three times. The weights come [filter][channel][tap] and go to A
// registers: thread q of a quad takes channels 4 q to 4 q + 3, which the rows of B follow.
// Positions are pixels counted through all images with a row of zeros below each: (n (h + 1) + row) w + column.
template <bool kFlat>
__global__ void __launch_bounds__(256, 1)
conv_nchw(const __grid_constant__ Geometry g) {
    extern __shared__ unsigned char raw[];
    unsigned char *const smem = raw + (-shared_address(raw) & 1023);
    const unsigned base = shared_address(smem), image = base + kNchwImageAt, bars = base + kNchwBarriersAt;
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, filter = warp * 16;
    if (thread == 0) {
        for (int i = 0; i < 4; ++i) barrier_init(bars + i * 8, kFlat ? 4 : 8);
        fence_barrier_init();
    }
    const auto fetch = [&](int quarter) {  // 16 channels of this warp's filters: 18 chunks of 16 bytes for each
        const char *const from = reinterpret_cast<const char *>(g.weights + filter * kDepth) + quarter * 288;
        const unsigned to = base + warp * kWarpBytes + quarter % 2 * (kWarpBytes / 2);
        UNROLL for (int i = 0; i < 8; ++i)
            copy_async(to + (lane / 16 + 2 * i) * 288 + lane % 16 * 16, from + (lane / 16 + 2 * i) * kDepth * 2 + lane % 16 * 16);
        copy_async(to + lane / 2 * 288 + 256 + lane % 2 * 16, from + lane / 2 * kDepth * 2 + 256 + lane % 2 * 16);
        copy_commit();
    };
    // The position of the tile's output pixel o
    const auto position = [&](int o) { return kFlat && g.exact ? o + g.by_plane(o) * g.w : o; };

    if (g.plane > 0) fetch(0);  // a branch: without one the compiler computes all addresses first
    // Where blocks of 8 input pixels are in an image's first channel; negative: zeros. Bit 0: at the left edge; bit 1: at the right.
    int *const table = reinterpret_cast<int *>(smem + kTableAt);
    const int first_pixel = kFlat ? blockIdx.x * kSpan : 0, start = position(first_pixel);
    if (kFlat && thread < kTable) {
        const int q = start + (thread - 1) * 8 + g.w, r = g.by_w(q), column = q - r * g.w;  // two rows ahead
        const int n = g.by_rows(max(r - 2, 0)), h = r - 2 - n * (g.h + 1);
        const bool inside = r >= 2 && n < g.n && h < g.h && thread - 1 <= g.blocks;
        table[thread] = (inside ? n * kC * g.plane + h * g.w + column : -8) | (column == 0) | (column == g.w - 8) << 1;
    }
    __syncthreads();
    // A warpgroup brings every other group of 16 channels; this thread's channel of them, and its blocks first_block + 8 i.
    const int group = warp / 4, channel = thread % 128 / 8, first_block = thread % 8 - 1, blocks = g.blocks;
    const unsigned to = kNchwImageAt + first_block * kBlockPitch + (channel / 2 % 2 * 8 + channel / 4 * 2 + channel % 2) * 16;
    int source[6];
    UNROLL for (int i = 0; i < 6; ++i) source[i] = kFlat ? table[thread % 8 + 8 * i] : -8;
    uint4 v[6];
    const auto load = [&](int j) {
        UNROLL for (int i = 0; i < 6; ++i)
            v[i] = source[i] >= 0 ? load_pixels(g.x + (source[i] & ~7) + (j * 16 + channel) * g.plane) : make_uint4(0, 0, 0, 0);
    };
    const auto fill = [&](int j, int i) {
        const unsigned last = i > 0 && thread % 8 == 7 ? v[i > 0 ? i - 1 : 0].w : v[i].w;
        const unsigned next = i < 5 && thread % 8 == 0 ? v[i < 5 ? i + 1 : 5].x : v[i].x;
        unsigned before = __shfl_sync(~0u, last, thread - 1 & 7, 8), after = __shfl_sync(~0u, next, thread + 1 & 7, 8);
        before = source[i] & 1 ? 0 : before, after = source[i] & 2 ? 0 : after;
        const auto join = [](unsigned low, unsigned high) { return __byte_perm(low, high, 0x5432); };
        const unsigned xy = join(v[i].x, v[i].y), yz = join(v[i].y, v[i].z), zw = join(v[i].z, v[i].w);
        unsigned char *const at = smem + to + 8 * i * kBlockPitch + j * 3 * kCopyBytes;  // no branch: there is room for blocks that are not used
        *reinterpret_cast<uint4 *>(at) = make_uint4(join(before, v[i].x), xy, yz, zw);
        *reinterpret_cast<uint4 *>(at + kCopyBytes) = v[i];
        *reinterpret_cast<uint4 *>(at + 2 * kCopyBytes) = make_uint4(xy, yz, zw, join(v[i].w, after));
    };
    const auto filled = [&](int j) {
        fence_proxy(), __syncwarp();
        if (lane == 0) barrier_arrive(bars + j * 8);
        __syncwarp();
    };
    unsigned a[2][9][4];
    const auto load_a = [&](int j, int half) {  // of filters lane / 4 + 8 half
        unsigned in[18];  // 4 channels by 9 taps
        const uint2 *const from = reinterpret_cast<const uint2 *>(
            smem + warp * kWarpBytes + j % 2 * (kWarpBytes / 2) + (half * 8 + lane / 4) * 288 + lane % 4 * 72);
        UNROLL for (int i = 0; i < 9; ++i) in[2 * i] = from[i].x, in[2 * i + 1] = from[i].y;
        UNROLL for (int tap = 0; tap < 9; ++tap)
            UNROLL for (int c = 0; c < 4; c += 2)
                a[j % 2][tap][c + half] = __byte_perm(in[(c * 9 + tap) / 2], in[(c * 9 + 9 + tap) / 2], tap % 2 ? 0x5432 : 0x7610);
    };

    if constexpr (kFlat) load(group);
    if (g.plane > 0) fetch(1);  // a branch: without one the compiler moves it before the loads of x
    if constexpr (kFlat) {
        UNROLL for (int i = 0; i < 6; ++i) fill(group, i);
        filled(group);
        load(group + 2);
    } else {  // a rectangle, element by element
        const Rectangle tile(g);
        for (int e = thread; e < 12 * 16 * blocks; e += 256) {
            const int copy = e / (16 * blocks), c = e / blocks % 16, b = e % blocks, h = tile.p + b / 4 - 1;
            __half pixels[8];
            UNROLL for (int i = 0; i < 8; ++i) {
                const int w = tile.q - 1 + b % 4 * 8 + i + copy % 3;
                const bool inside = h >= 0 && h < g.h && w >= 0 && w < g.w;
                pixels[i] = inside ? g.x[static_cast<long long>(tile.n * kC + copy / 3 * 16 + c) * g.plane + h * g.w + w] : __half(0.0f);
            }
            __half2 *const at = reinterpret_cast<__half2 *>(smem + kNchwImageAt + copy * kCopyBytes + b * kBlockPitch +
                                                            (c / 2 % 2 * 8 + c / 4 * 2 + c % 2) * 16);
            UNROLL for (int i = 0; i < 4; ++i) at[i] = __halves2half2(pixels[2 * i], pixels[2 * i + 1]);
        }
        UNROLL for (int j = 0; j < 4; ++j) filled(j);
    }
    copy_wait<1>(), __syncwarp();
    load_a(0, 0), load_a(0, 1);
    barrier_wait(bars);

    float d[kSpan / 2];
    const unsigned row_bytes = g.blocks_w * kBlockPitch;
    // Where the columns 0 to 127 and 128 to 191 of the product are: a tile may cross into the next image after 64 or 128 pixels.
    const int second = position(first_pixel + 64) - start, third = position(first_pixel + 128) - start;
    const int first_part = second == 64 ? 0 : second, last_part = second == 64 ? third : 0;
    // N-major, no swizzle: blocks of 8 channels by 8 pixels lie 128 bytes apart in K and kBlockPitch apart in N
    const auto b_of = [&](int part, int j, int tap) {
        return (image + part / 8 * kBlockPitch + (j * 3 + tap % 3) * kCopyBytes + tap / 3 * row_bytes) >> 4 | 8ull << 16 |
               static_cast<unsigned long long>(kBlockPitch >> 4) << 32;
    };
    UNROLL for (int j = 0; j < 4; ++j) {
        if (j > 0) barrier_wait(bars + j * 8);
        if (j == 3 && warp >= 4) turn_wait();  // the first warpgroup stores beside the products of the second
        wgmma_fence();
        UNROLL for (int tap = 0; tap < 9; ++tap) {
            wgmma_first(d, a[j % 2][tap], b_of(first_part, j, tap), j + tap > 0);
            if (j < 3) wgmma_64<1, 64>(d, a[j % 2][tap], b_of(last_part, j, tap), j + tap > 0);
            if (j == 3) continue;
            if (tap < 6 && j == 1 && kFlat) fill(group + 2, tap);
            if (tap == 2) wgmma_commit();
            if (tap == 5 && j == 1 && kFlat) filled(group + 2);
            if (tap == 5) {
                if (j > 0) wgmma_wait<1>();  // the A registers of the group before
                copy_wait<0>(), __syncwarp();
                load_a(j + 1, 0);
                if (j < 2) fetch(j + 2);
            }
            if (tap == 7) load_a(j + 1, 1);
        }
        wgmma_commit();
    }
    // The last 16 channels of the columns 128 to 191, while the others are stored: a warp with three or four products under way waits
    // before it can start another, so the stores lie between them.
    const auto last_products = [&](int from_tap, int to_tap) {
        wgmma_fence();
        UNROLL for (int tap = 0; tap < 9; ++tap)
            if (tap >= from_tap && tap < to_tap) wgmma_64<1, 64>(d, a[1][tap], b_of(last_part, 3, tap), 1);
        wgmma_commit();
    };
    last_products(0, kFlat ? 4 : 9);

    unsigned char *const stage = smem + warp * kWarpBytes;  // [filter][pixel] of this warp, where its weights were
    const unsigned row = shared_address(stage) + lane % 16 * kStagePitch + lane / 16 * 16;
    const auto put = [&](int from, int to) {
        UNROLL for (int b = from; b < to; b += 2)
            stmatrix(row + b * 16, pack(d[b * 4], d[b * 4 + 1]), pack(d[b * 4 + 2], d[b * 4 + 3]), pack(d[b * 4 + 4], d[b * 4 + 5]),
                     pack(d[b * 4 + 6], d[b * 4 + 7]));
        __syncwarp();
    };
    if constexpr (kFlat) {
        // Where 8 pixels of the first filter of this warp go; -1: nowhere. A lane has 8 of the columns 0 to 127 of every other filter,
        // and 8 of the other columns of every fourth.
        const auto place_of = [&](int q) {
            const int r = g.by_w(q), n = g.by_rows(r), h = r - n * (g.h + 1);
            return n < g.n && h < g.h ? (n * kF + filter) * g.plane + h * g.w + q - r * g.w : -1;
        };
        const int place = place_of(start + first_part + lane % 16 * 8), last_place = place_of(start + last_part + lane % 8 * 8);
        const auto store = [&](auto filters, int at, int chunk, int from_filter, int to_filter) {
            const int own = lane * filters.value / 32;
            if (at >= 0)
                UNROLL for (int f = from_filter; f < to_filter; f += filters.value)
                    *reinterpret_cast<uint4 *>(g.y + at + (own + f) * g.plane) =
                        *reinterpret_cast<const uint4 *>(stage + (own + f) * kStagePitch + chunk * 16);
            __syncwarp();
        };
        wgmma_wait<1>(), settle<0, 64>(d);
        if (warp < 4) turn_pass();
        put(0, 16), last_products(4, 6);
        store(Constant<2>(), place, lane % 16, 0, 8), last_products(6, 9);
        store(Constant<2>(), place, lane % 16, 8, 16);
        wgmma_wait<0>(), settle<64, 96>(d);
        put(16, kBlocks), store(Constant<4>(), last_place, 16 + lane % 8, 0, 16);
    } else {
        wgmma_wait<0>(), settle<0, 96>(d);
        if (warp < 4) turn_pass();
        const Rectangle tile(g);
        put(0, kBlocks);
        if (lane >= kBlocks || tile.n >= g.n || tile.p + lane / 4 >= g.h) return;
        const int place = (tile.p + lane / 4) * g.w + tile.q + lane % 4 * 8, width = min(g.w - tile.q - lane % 4 * 8, 8);
        __half *const y = g.y + static_cast<long long>(tile.n * kF + filter) * g.plane + place;
        for (int f = 0; f < 16; ++f)
            for (int i = 0; i < width; ++i)
                y[f * g.plane + i] = *reinterpret_cast<const __half *>(stage + f * kStagePitch + lane * 16 + i * 2);
    }
}

// A tensor map of halves; strides in bytes, of every dimension but the first.
template <int kDims>
bool encode(CUtensorMap *map, const void *data, const cuuint64_t (&shape)[kDims], const cuuint64_t *strides,
            const cuuint32_t (&box)[kDims], CUtensorMapSwizzle swizzle) {
    static void *const entry = [] {
        void *found = nullptr;
        cudaDriverEntryPointQueryResult result;
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
        return found;
    }();
    const cuuint32_t step[5] = {1, 1, 1, 1, 1};
    return entry && reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry)(
        map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, kDims, const_cast<void *>(data), shape, strides, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
        swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

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

// Lets a kernel use that much shared memory; again when a thread's device changes.
template <typename Kernel>
cudaError_t prepare(Kernel kernel, int bytes, int &prepared) {
    int device = -1;
    cudaError_t status = cudaGetDevice(&device);
    if (status == cudaSuccess && device != prepared) {
        status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
        if (status == cudaSuccess) prepared = device;
    }
    return status;
}

int launch_nhwc(const klineage_call *call, int n, int h, int w) {
    Pixels g = {};
    g.weights = static_cast<const __half *>(call->inputs[1].data), g.y = static_cast<__half *>(call->outputs[0].data);
    g.h = h, g.w = w, g.plane = h * w, g.total = n * h * w;
    g.wide = kTile + 2 * w + 2 > kMaxChunks * kChunk;
    g.pitch = g.wide ? 3 * kChunk : w, g.chunks = g.wide ? kMaxChunks : divide_up(kTile + 2 * w + 2, kChunk);
    g.by_plane = Divider(g.plane), g.by_w = Divider(w);
    CUtensorMap x_map, w_map;
    constexpr cuuint64_t filter = kDepth * 2, pixel = kC * 2;
    // Filter 32 g + 8 t + 2 j + b goes to row 32 g + 8 j + 2 t + b, so that lane t of a quad holds 8 neighbours
    const cuuint64_t order[] = {filter, 8 * filter, 2 * filter, 32 * filter}, pixels = g.total;
    const bool made = encode<2>(&x_map, call->inputs[0].data, {kC, pixels}, &pixel, {kC, kChunk}, CU_TENSOR_MAP_SWIZZLE_128B) &&
                      encode<5>(&w_map, g.weights, {kDepth, 2, 4, 4, 4}, order, {kC, 2, 4, 4, 4}, CU_TENSOR_MAP_SWIZZLE_128B);
    KLINEAGE_REQUIRE(call, made, "conv2d: no tensor map");
    static thread_local int prepared = -1;
    cudaError_t status = prepare(conv_nhwc, kSharedBytes, prepared);
    KLINEAGE_REQUIRE(call, status == cudaSuccess, cudaGetErrorString(status));
    conv_nhwc<<<divide_up(g.total, kTile), 384, kSharedBytes, static_cast<cudaStream_t>(call->stream)>>>(x_map, w_map, g);
    status = cudaGetLastError();
    KLINEAGE_REQUIRE(call, status == cudaSuccess, cudaGetErrorString(status));
    return 0;
}

int launch_nchw(const klineage_call *call, int n, int h, int w) {
    Geometry g = {};
    g.x = static_cast<const __half *>(call->inputs[0].data), g.weights = static_cast<const __half *>(call->inputs[1].data);
    g.y = static_cast<__half *>(call->outputs[0].data);
    g.n = n, g.h = h, g.w = w, g.plane = h * w, g.blocks_w = w / 8;
    g.exact = g.plane % 64 == 0 && g.plane >= kSpan && kBlocks + 3 * g.blocks_w <= kMaxBlocks, g.blocks = kBlocks + (2 + g.exact) * g.blocks_w;
    g.by_plane = Divider(g.plane), g.by_w = Divider(w), g.by_rows = Divider(h + 1);
    static thread_local int prepared[2] = {-1, -1};
    const bool flat = w % 8 == 0 && g.blocks <= kMaxBlocks;
    int tiles = divide_up(g.exact ? n * g.plane : (n * (h + 1) - 1) * w, kSpan);
    if (!flat) {
        g.tile_h = 6, g.tile_w = 32, g.blocks_w = 4, g.blocks = kBlocks + 8, g.exact = 0;
        g.tiles_w = divide_up(w, g.tile_w), g.tiles = g.tiles_w * divide_up(h, g.tile_h), tiles = n * g.tiles;
        g.by_tiles_w = Divider(g.tiles_w), g.by_tiles = Divider(g.tiles);
    }
    const auto kernel = flat ? conv_nchw<true> : conv_nchw<false>;
    cudaError_t status = prepare(kernel, kNchwSharedBytes, prepared[flat]);
    KLINEAGE_REQUIRE(call, status == cudaSuccess, cudaGetErrorString(status));
    kernel<<<tiles, 256, kNchwSharedBytes, static_cast<cudaStream_t>(call->stream)>>>(g);
    status = cudaGetLastError();
    KLINEAGE_REQUIRE(call, status == cudaSuccess, cudaGetErrorString(status));
    return 0;
}

}  // namespace

extern "C" int run(const klineage_call *call) {
    KLINEAGE_REQUIRE(call, call->abi_version == KLINEAGE_ABI_VERSION && call->num_inputs == 2 && call->num_outputs == 1,
                     "conv2d: needs ABI version 1 and x, w -> y");
    const klineage_tensor &x = call->inputs[0], &w = call->inputs[1], &y = call->outputs[0];
    for (const klineage_tensor *t : {&x, &w, &y}) {
        KLINEAGE_REQUIRE(call, t->num_dims == 4 && t->dtype == KLINEAGE_FLOAT16, "conv2d: 4-D fp16 tensors only");
        KLINEAGE_REQUIRE(call, reinterpret_cast<uintptr_t>(t->data) % 16 == 0, "conv2d: pointers must be 16-byte aligned");
    }
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
    return nhwc ? launch_nhwc(call, n, h, width) : launch_nchw(call, n, h, width);
}
