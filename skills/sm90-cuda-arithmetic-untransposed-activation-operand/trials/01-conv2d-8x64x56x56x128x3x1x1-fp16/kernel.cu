#include <cuda.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "klineage.h"

#define DEVICE __device__ __forceinline__
#define UNROLL _Pragma("unroll")

namespace {

constexpr int kC = 64, kF = 128, kDepth = kC * 9;  // K of the implicit GEMM
constexpr int kH = 56, kW = 56, kPlane = kH * kW;
constexpr int kRowBlocks = kW / 8;                 // blocks of 8 pixels of a row
constexpr int kTileBlocks = 25, kTile = kTileBlocks * 8;  // output pixels of a block
constexpr int kBlocks = kTileBlocks + 2 * kRowBlocks;     // input blocks of a tile, from one row above to one below
constexpr int kSlices = kC / 16, kSliceK = kDepth / kSlices;  // 16 channels, all taps
constexpr int kThreads = 256;
constexpr int kRawPitch = kSliceK * 2;             // bytes of one filter in a slice of the weights
constexpr int kRawBytes = kF * kRawPitch;
constexpr int kPitch = 256 + 16;                   // 8 pixels by 16 channels, and a pad
constexpr int kCopyBytes = kBlocks * kPitch;
constexpr int kImageAt = 2 * kRawBytes;
constexpr int kBarriersAt = kImageAt + kSlices * 3 * kCopyBytes;
constexpr int kSharedBytes = 1024 + kBarriersAt + kSlices * 8;
constexpr int kStagePitch = kTile * 2;             // epilogue: an odd number of 16-byte units, for the banks
static_assert(kW % 8 == 0 && kBlocks <= 46, "three vectors for each thread");
static_assert(kSharedBytes <= 232448 && kF * kStagePitch <= 2 * kRawBytes && kBarriersAt % 8 == 0, "shared memory");

DEVICE unsigned shared_address(const void *p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }
DEVICE void barrier_init(unsigned bar, int count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory"); }
DEVICE void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void fence_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE void barrier_expect(unsigned bar, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
DEVICE void barrier_wait(unsigned bar) {  // every barrier completes once
    asm volatile("{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0;\n@!done bra again;\n}" ::"r"(bar) : "memory");
}
DEVICE void load_slice(unsigned to, const CUtensorMap *map, unsigned bar, int k) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                 ::"r"(to), "l"(map), "r"(k), "r"(0), "r"(bar) : "memory");
}
DEVICE uint4 load_vector(const __half *from, int offset) {  // zeros when offset < 0
    uint4 v = make_uint4(0, 0, 0, 0);
    asm volatile("{\n.reg .pred p;\nsetp.ge.s32 p, %5, 0;\n@p ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
                 : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w) : "l"(from), "r"(offset) : "memory");
    return v;
}
DEVICE void stmatrix4(unsigned address, unsigned a, unsigned b, unsigned c, unsigned d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
DEVICE void stmatrix2(unsigned address, unsigned a, unsigned b) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(a), "r"(b) : "memory");
}
DEVICE unsigned pack(float low, float high) {
    const __half2 v = __floats2half2_rn(low, high);
    return reinterpret_cast<const unsigned &>(v);
}

#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D20(i) D4(i), D4(i + 4), D4(i + 8), D4(i + 12), D4(i + 16)
// d[64 x 200] += a[64 x 16] b[16 x 200]: a in registers, b N-major in shared memory without swizzle.
DEVICE void wgmma(float (&d)[100], const unsigned (&a)[4], unsigned long long b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %105, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n200k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "
        "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, "
        "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, "
        "%60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99}, "
        "{%100, %101, %102, %103}, %104, p, 1, 1, 1;\n}"
        : D20(0), D20(20), D20(40), D20(60), D20(80)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate)
        : "memory");
}

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending> DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory"); }

// D[filter][pixel] = W X. Pixels are counted through all images, with a row of zeros after each: pixel
// (n * (kH + 1) + row) * kW + column. A block computes kTile consecutive ones for all filters, 16 filters a warp.
// A slice is 16 channels; of each, shared memory holds three copies of the tile of x, copy k with pixel p + k - 1 in
// the place of pixel p, as blocks of 8 pixels by 16 channels, 16 bytes for a channel: B as wgmma reads it N-major.
__global__ void __launch_bounds__(kThreads, 1)
conv_nchw(const __grid_constant__ CUtensorMap w_map, const __half *x, __half *y, int images) {
    extern __shared__ unsigned char raw[];
    unsigned char *const smem = raw + (-shared_address(raw) & 1023);
    const unsigned base = shared_address(smem), full = base + kBarriersAt;
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const auto request = [&](int s) {
        barrier_expect(full + s * 8, kRawBytes);
        load_slice(base + s % 2 * kRawBytes, &w_map, full + s * 8, s * kSliceK);
    };
    if (thread == 0) {
        for (int s = 0; s < kSlices; ++s) barrier_init(full + s * 8, 1);
        fence_barrier_init();
        request(0), request(1);
    }
    __syncwarp();

    // This thread fills one channel of a slice, blocks column - 1 + 16 i; blocks -1 and kBlocks only serve neighbours.
    const int channel = thread / 16, column = thread % 16;
    int offset[3];
    unsigned edges = 0;
    UNROLL for (int i = 0; i < 3; ++i) {
        const int b = column - 1 + 16 * i, at = static_cast<int>(blockIdx.x) * kTileBlocks - kRowBlocks + b;
        const int row = at / kRowBlocks, col = at - row * kRowBlocks, n = row / (kH + 1), h = row - n * (kH + 1);
        const bool inside = at >= 0 && b <= kBlocks && n < images && h < kH;
        offset[i] = inside ? ((n * kC + channel) * kH + h) * kW + col * 8 : -1;
        edges |= (col == 0 ? 1u : 0u) << i | (col == kRowBlocks - 1 ? 16u : 0u) << i;
    }
    uint4 vectors[2][3];
    const auto load_x = [&](int s) {
        UNROLL for (int i = 0; i < 3; ++i) vectors[s % 2][i] = load_vector(x + offset[i] + s * 16 * kPlane, offset[i]);
    };
    // The lane t of a quad owns the channels 4 t .. 4 t + 3 of a slice, in A and so in B.
    const int k_row = channel / 2 % 2 * 8 + channel / 4 * 2 + channel % 2;
    unsigned char *const fill_at = smem + kImageAt + (column - 1) * kPitch + k_row * 16;
    const auto fill = [&](int s, int i) {
        const uint4 v = vectors[s % 2][i];
        const unsigned before = vectors[s % 2][i > 0 ? i - 1 : 0].w, after = vectors[s % 2][i < 2 ? i + 1 : 2].x;
        unsigned l = __shfl_sync(0xffffffffu, column == 15 ? before : v.w, (thread - 1) & 15, 16);
        unsigned r = __shfl_sync(0xffffffffu, column == 0 ? after : v.x, (thread + 1) & 15, 16);
        if (edges >> i & 1) l = 0;
        if (edges >> i & 16) r = 0;
        const int b = column - 1 + 16 * i;
        if (b >= 0 && b < kBlocks) {
            const auto join = [](unsigned low, unsigned high) { return __byte_perm(low, high, 0x5432); };
            unsigned char *const to = fill_at + s * 3 * kCopyBytes + i * 16 * kPitch;
            const unsigned xy = join(v.x, v.y), yz = join(v.y, v.z), zw = join(v.z, v.w);
            *reinterpret_cast<uint4 *>(to) = make_uint4(join(l, v.x), xy, yz, zw);
            *reinterpret_cast<uint4 *>(to + kCopyBytes) = v;
            *reinterpret_cast<uint4 *>(to + 2 * kCopyBytes) = make_uint4(xy, yz, zw, join(v.w, r));
        }
    };
    unsigned a[2][9][4];  // the A operand of two slices: 16 filters by 16 channels for each tap
    const unsigned char *const a_from = smem + (warp * 16 + lane / 4) * kRawPitch + lane % 4 * 72;
    const auto load_a = [&](int s, int half) {
        const uint2 *const from = reinterpret_cast<const uint2 *>(a_from + s % 2 * kRawBytes + half * 8 * kRawPitch);
        unsigned in[18];  // 4 channels by 9 taps of one filter
        UNROLL for (int i = 0; i < 9; ++i) {
            const uint2 v = from[i];
            in[i * 2] = v.x, in[i * 2 + 1] = v.y;
        }
        UNROLL for (int tap = 0; tap < 9; ++tap)
            UNROLL for (int c = 0; c < 4; c += 2) {
                const int e = c * 9 + tap;
                unsigned value = __byte_perm(in[e / 2], in[(e + 9) / 2], tap % 2 ? 0x5432 : 0x7610);
                asm volatile("" : "+r"(value)::"memory");
                a[s % 2][tap][c + half] = value;
            }
    };

    load_x(0), load_x(1);
    __syncthreads();  // the barriers are there
    UNROLL for (int i = 0; i < 3; ++i) fill(0, i);
    load_x(2);
    barrier_wait(full);
    load_a(0, 0), load_a(0, 1);
    fence_proxy();
    __syncthreads();
    if (thread == 0) request(2);
    __syncwarp();

    // N-major, no swizzle: blocks of 8 channels by 8 pixels lie 128 bytes apart in K and kPitch apart in N
    const unsigned long long b0 = static_cast<unsigned long long>((base + kImageAt) >> 4) | static_cast<unsigned long long>(128 >> 4) << 16 |
                                  static_cast<unsigned long long>(kPitch >> 4) << 32;
    float d[100];
    UNROLL for (int s = 0; s < kSlices; ++s) {
        wgmma_fence();
        UNROLL for (int tap = 0; tap < 9; ++tap) {
            wgmma(d, a[s % 2][tap], b0 + (((s * 3 + tap % 3) * kCopyBytes + tap / 3 * kRowBlocks * kPitch) >> 4), s + tap > 0);
            if (s < kSlices - 1) {
                if (tap < 3) fill(s + 1, tap);
                if (tap == 2) {
                    wgmma_commit();
                    if (s + 3 < kSlices) load_x(s + 3);
                }
                if (tap == 3) {
                    if (s > 0) wgmma_wait<1>();  // the slice before this one is done with its A registers
                    barrier_wait(full + (s + 1) * 8);
                }
                if (tap == 4) load_a(s + 1, 0);
                if (tap == 6) load_a(s + 1, 1);
            }
        }
        wgmma_commit();
        if (s < kSlices - 1) {
            fence_proxy();
            __syncthreads();
            if (s + 3 < kSlices) {
                if (thread == 0) request(s + 3);
                __syncwarp();
            }
        }
    }
    wgmma_wait<0>();
    UNROLL for (int i = 0; i < 100; ++i) asm volatile("" : "+f"(d[i])::"memory");

    // [16 filters][pixels] for each warp, where the weights were
    unsigned char *const stage = smem + warp * 16 * kStagePitch;
    const unsigned to = shared_address(stage) + lane % 16 * kStagePitch + lane / 16 * 16;
    UNROLL for (int j = 0; j < kTileBlocks - 1; j += 2)
        stmatrix4(to + j * 16, pack(d[j * 4], d[j * 4 + 1]), pack(d[j * 4 + 2], d[j * 4 + 3]),
                  pack(d[j * 4 + 4], d[j * 4 + 5]), pack(d[j * 4 + 6], d[j * 4 + 7]));
    stmatrix2(to + (kTileBlocks - 1) * 16, pack(d[96], d[97]), pack(d[98], d[99]));
    __syncwarp();
    const int at = static_cast<int>(blockIdx.x) * kTileBlocks + lane;
    const int row = at / kRowBlocks, col = at - row * kRowBlocks, n = row / (kH + 1), h = row - n * (kH + 1);
    if (lane < kTileBlocks && n < images && h < kH) {
        __half *const out = y + static_cast<long long>(n * kF + warp * 16) * kPlane + h * kW + col * 8;
        UNROLL for (int f = 0; f < 16; ++f)
            *reinterpret_cast<uint4 *>(out + f * kPlane) = *reinterpret_cast<const uint4 *>(stage + f * kStagePitch + lane * 16);
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

bool is_contiguous(const klineage_tensor &t) {
    int64_t expected = 1;
    for (int dim = 3; dim >= 0; --dim) {
        if (t.shape[dim] != 1 && t.stride[dim] != expected) return false;
        expected *= t.shape[dim];
    }
    return true;
}

int divide_up(int a, int b) { return (a + b - 1) / b; }

}  // namespace

extern "C" int run(const klineage_call *call) {
    KLINEAGE_REQUIRE(call, call->abi_version == KLINEAGE_ABI_VERSION && call->num_inputs == 2 && call->num_outputs == 1,
                     "conv2d: needs ABI version 1 and x, w -> y");
    const klineage_tensor &x = call->inputs[0], &w = call->inputs[1], &y = call->outputs[0];
    for (const klineage_tensor *t : {&x, &w, &y}) {
        KLINEAGE_REQUIRE(call, t->num_dims == 4 && t->dtype == KLINEAGE_FLOAT16, "conv2d: 4-D fp16 tensors only");
        KLINEAGE_REQUIRE(call, reinterpret_cast<uintptr_t>(t->data) % 16 == 0, "conv2d: pointers must be 16-byte aligned");
        KLINEAGE_REQUIRE(call, is_contiguous(*t), "conv2d: x, w and y must all be contiguous");
    }
    KLINEAGE_REQUIRE(call, klineage_scalar_value(call, "stride", 1) == 1 && klineage_scalar_value(call, "pad", 1) == 1,
                     "conv2d: stride 1 and padding 1 only");
    KLINEAGE_REQUIRE(call, x.shape[1] == kC && w.shape[1] == kC && w.shape[0] == kF && w.shape[2] == 3 && w.shape[3] == 3,
                     "conv2d: 64 input channels, 128 filters of 3x3 only");
    const int64_t n = x.shape[0];
    KLINEAGE_REQUIRE(call, x.shape[2] == kH && x.shape[3] == kW, "conv2d: images of 56x56 only");
    KLINEAGE_REQUIRE(call, n >= 1 && n * kPlane * kF < (1ll << 31), "conv2d: size out of range");
    KLINEAGE_REQUIRE(call, y.shape[0] == n && y.shape[1] == kF && y.shape[2] == kH && y.shape[3] == kW,
                     "conv2d: output shape differs from the input's");
    const int images = static_cast<int>(n);
    const int tiles = divide_up((images * (kH + 1) - 1) * kW, kTile);
    CUtensorMap w_map;
    constexpr cuuint64_t filter = kDepth * 2;
    const bool made = encode<2>(&w_map, w.data, {kDepth, kF}, &filter, {kSliceK, kF}, CU_TENSOR_MAP_SWIZZLE_NONE);
    KLINEAGE_REQUIRE(call, made, "conv2d: no tensor map");

    static thread_local int prepared = -1;  // the device on which the kernel may use that much shared memory
    int device;
    if (cudaGetDevice(&device) == cudaSuccess && device != prepared) {
        cudaFuncSetAttribute(conv_nchw, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
        prepared = device;
    }
    const auto stream = static_cast<cudaStream_t>(call->stream);
    conv_nchw<<<tiles, kThreads, kSharedBytes, stream>>>(w_map, static_cast<const __half *>(x.data), static_cast<__half *>(y.data), images);
    const cudaError_t status = cudaGetLastError();
    KLINEAGE_REQUIRE(call, status == cudaSuccess, cudaGetErrorString(status));
    return 0;
}
