// What the two kernels for one layer share: 3x3, 64 -> 128 channels, stride 1, padding 1, fp16 with fp32 accumulation: x, w and y
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
#ifndef CONV2D_FIXED_CUH
#define CONV2D_FIXED_CUH

#include <cuda.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "geometry.cuh"

namespace conv2d {
namespace fixed {

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

}  // namespace fixed
}  // namespace conv2d
#endif
