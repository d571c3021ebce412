#include <cuda.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "klineage.h"

namespace {

constexpr int kC = 64, kF = 128, kH = 112, kW = 112, kPlane = kH * kW, kDepth = kC * 9;
constexpr int kThreads = 256;                                    // two warpgroups of 64 filters each
constexpr int kTile = 192;                                       // pixels of a block, zero rows between images included
constexpr int kSlices = 4;                                       // of 16 channels
constexpr int kRowBlocks = kW / 8;                               // blocks of 8 pixels in a row
constexpr int kTileBlocks = kTile / 8;
constexpr int kBlocks = kTileBlocks + 2 * kRowBlocks;            // with the rows above and below
constexpr int kFills = (kBlocks + 2 + 15) / 16;                  // vectors of a thread in a slice, halo included
constexpr int kPitch = 256 + 16;                                 // a block of 8 pixels by 16 channels, and a pad for the banks
constexpr int kCopy = kBlocks * kPitch;
constexpr int kSliceBytes = 3 * kCopy;                           // pixels p - 1, p, p + 1
constexpr int kBuffers = 3;                                      // slice 3 comes where slice 0 was
constexpr int kFilterBytes = 16 * 9 * 2;                         // raw weights: [filter][16 channels][9 taps]
constexpr int kRawBytes = kF * kFilterBytes;
constexpr int kImageAt = 2 * kRawBytes, kBarriersAt = kImageAt + kBuffers * kSliceBytes;
constexpr int kSharedBytes = 1024 + kBarriersAt + kSlices * 8;
constexpr int kStagePitch = kTile * 2 + 16;                      // epilogue: bytes of the pixels of a filter, and a pad
static_assert(kFills == 4 && kBarriersAt % 8 == 0 && kImageAt % 128 == 0 && kCopy % 16 == 0, "layout");
static_assert(kSharedBytes <= 232448 && kF * kStagePitch <= 2 * kRawBytes, "shared memory of one block");

__device__ __forceinline__ unsigned shared_address(const void *p) {
    return static_cast<unsigned>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ void barrier_init(unsigned bar, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
__device__ __forceinline__ void fence_barrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void fence_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void barrier_expect(unsigned bar, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_wait(unsigned bar) {  // every barrier completes once
    asm volatile("{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0;\n"
                 "@!done bra again;\n}" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void load_weights(unsigned to, const CUtensorMap *map, unsigned bar, int k) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                 ::"r"(to), "l"(map), "r"(k), "r"(0), "r"(bar) : "memory");
}
__device__ __forceinline__ void prefetch(const CUtensorMap *map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// Four 8x8 blocks of halves.
__device__ __forceinline__ void stmatrix(unsigned address, unsigned a, unsigned b, unsigned c, unsigned d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
__device__ __forceinline__ unsigned pack(float low, float high) {
    const __half2 v = __floats2half2_rn(low, high);
    return reinterpret_cast<const unsigned &>(v);
}

#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D16(i) D4(i), D4(i + 4), D4(i + 8), D4(i + 12)
// d[64 x 192] += a[64 x 16] b[16 x 192]: a in registers, b N-major in shared memory without swizzle.
__device__ __forceinline__ void wgmma(float (&d)[96], const unsigned (&a)[4], unsigned long long b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %101, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n192k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
        "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, "
        "%46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, "
        "%68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, "
        "%90, %91, %92, %93, %94, %95}, "
        "{%96, %97, %98, %99}, %100, p, 1, 1, 1;\n}"
        : D16(0), D16(16), D16(32), D16(48), D16(64), D16(80)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory"); }

// The vectors of x of a thread: one channel of the slice, blocks thread % 16 - 1 + 16 i; zeros outside of the images.
__device__ __forceinline__ void load_x(uint4 (&to)[kFills], const __half *x, const int (&offset)[kFills], int slice) {
#pragma unroll
    for (int i = 0; i < kFills; ++i) {
        uint4 v = make_uint4(0, 0, 0, 0);
        const __half *const from = x + offset[i] + slice * 16 * kPlane;
        asm volatile("{\n.reg .pred p;\nsetp.ge.s32 p, %5, 0;\n@p ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
                     : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
                     : "l"(__cvta_generic_to_global(from)), "r"(offset[i]));
        to[i] = v;
    }
}

__device__ __forceinline__ unsigned join(unsigned low, unsigned high) { return __byte_perm(low, high, 0x5432); }

// Stores vector i of a thread into the three copies. flags: bit i first of its row, 8 + i last of its row, 16 + i no halo.
__device__ __forceinline__ void fill(unsigned char *to, const uint4 (&v)[kFills], int i, unsigned flags, int place) {
    const uint4 u = v[i];
    const unsigned before = i > 0 ? v[i > 0 ? i - 1 : 0].w : 0u;
    const unsigned after = i + 1 < kFills ? v[i + 1 < kFills ? i + 1 : i].x : 0u;
    unsigned l = __shfl_sync(0xffffffffu, place == 15 ? before : u.w, (place - 1) & 15, 16);
    unsigned r = __shfl_sync(0xffffffffu, place == 0 ? after : u.x, (place + 1) & 15, 16);
    if (flags >> i & 1) l = 0;
    if (flags >> (8 + i) & 1) r = 0;
    if (flags >> (16 + i) & 1) {
        unsigned char *const at = to + i * 16 * kPitch;
        const unsigned xy = join(u.x, u.y), yz = join(u.y, u.z), zw = join(u.z, u.w);
        *reinterpret_cast<uint4 *>(at) = make_uint4(join(l, u.x), xy, yz, zw);
        *reinterpret_cast<uint4 *>(at + kCopy) = u;
        *reinterpret_cast<uint4 *>(at + 2 * kCopy) = make_uint4(xy, yz, zw, join(u.w, r));
    }
}

// The A operands of all taps for one of the two filters of a lane, 4 channels of it: from [4 channels][9 taps].
__device__ __forceinline__ void load_a(unsigned (&to)[9][4], const unsigned char *from, int half) {
    unsigned in[18];
#pragma unroll
    for (int i = 0; i < 9; ++i) {
        const uint2 v = reinterpret_cast<const uint2 *>(from + half * 8 * kFilterBytes)[i];
        in[i * 2] = v.x, in[i * 2 + 1] = v.y;
    }
#pragma unroll
    for (int tap = 0; tap < 9; ++tap)
#pragma unroll
        for (int c = 0; c < 4; c += 2) {
            const int e = c * 9 + tap;
            unsigned v = __byte_perm(in[e / 2], in[(e + 9) / 2], tap % 2 ? 0x5432 : 0x7610);
            asm volatile("" : "+r"(v));  // made here, not at the product that needs it
            to[tap][c + half] = v;
        }
}

// D[filter][pixel]. Pixels are counted through all images with a row of zeros after each: p = (n * (h + 1) + row) * w + col.
// Both warpgroups fill slices of 16 channels of x as they lie, in three copies shifted by a pixel, while they compute.
__global__ void __launch_bounds__(kThreads, 1)
conv_nchw(const __grid_constant__ CUtensorMap w_map, const __half *__restrict__ x, __half *__restrict__ y, int images) {
    extern __shared__ unsigned char raw[];
    unsigned char *const smem = raw + (-shared_address(raw) & 1023);
    const unsigned base = shared_address(smem), full = base + kBarriersAt;
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const auto request = [&](int slice) {
        barrier_expect(full + slice * 8, kRawBytes);
        load_weights(base + slice % 2 * kRawBytes, &w_map, full + slice * 8, slice * (kDepth / kSlices));
    };
    if (thread == 0) {
        prefetch(&w_map);
        for (int i = 0; i < kSlices; ++i) barrier_init(full + i * 8, 1);
        fence_barrier_init();
    }
    __syncwarp();

    const int place = thread % 16, channel = thread / 16;
    int offset[kFills];
    unsigned flags = 0;
#pragma unroll
    for (int i = 0; i < kFills; ++i) {
        const int b = place - 1 + 16 * i;
        const int at = static_cast<int>(blockIdx.x) * kTileBlocks + b + kRowBlocks;  // two rows further, never negative
        const int row = at / kRowBlocks - 2, column = at % kRowBlocks;
        const int n = row / (kH + 1), h = row - n * (kH + 1);
        const bool inside = row >= 0 && n < images && h < kH && b <= kBlocks;
        offset[i] = inside ? (n * kC + channel) * kPlane + h * kW + column * 8 : -1;
        if (column == 0) flags |= 1u << i;
        if (column == kRowBlocks - 1) flags |= 1u << (8 + i);
        if (b >= 0 && b < kBlocks) flags |= 1u << (16 + i);
    }
    // The quad lane q of A holds k = 2q, 2q + 1, 2q + 8, 2q + 9: these are channels 4q to 4q + 3.
    const int k_row = channel / 2 % 2 * 8 + channel / 4 * 2 + channel % 2;
    unsigned char *const fill_to = smem + kImageAt + (place - 1) * kPitch + k_row * 16;
    const unsigned char *const a_from = smem + (warp * 16 + lane / 4) * kFilterBytes + lane % 4 * 72;

    uint4 v[2][kFills];
    load_x(v[0], x, offset, 0);
    load_x(v[1], x, offset, 1);
    if (thread == 0) request(0), request(1);
    __syncthreads();  // the barriers are there

    unsigned a[2][9][4];
#pragma unroll
    for (int i = 0; i < kFills; ++i) fill(fill_to, v[0], i, flags, place);
    load_x(v[0], x, offset, 2);
    barrier_wait(full);
    load_a(a[0], a_from, 0);
    load_a(a[0], a_from, 1);
    fence_proxy();
    __syncthreads();
    if (thread == 0) request(2);
    __syncwarp();

    // N-major, no swizzle: blocks of 8 channels by 8 pixels lie 128 bytes apart in K and kPitch apart in N
    const unsigned long long first = static_cast<unsigned long long>((base + kImageAt) >> 4) | 8ull << 16 |
                                     static_cast<unsigned long long>(kPitch >> 4) << 32;
    float d[96];
#pragma unroll
    for (int s = 0; s < kSlices; ++s) {
        const bool more = s + 1 < kSlices;
        wgmma_fence();
#pragma unroll
        for (int tap = 0; tap < 9; ++tap) {
            if (more && tap == 3) {
                wgmma_commit();
                if (s > 0) wgmma_wait<1>();  // the products of slice s - 1 need their A registers and copies no more
                barrier_wait(full + (s + 1) * 8);
                wgmma_fence();
            }
            wgmma(d, a[s % 2][tap],
                  first + ((s % kBuffers * kSliceBytes + tap % 3 * kCopy + tap / 3 * kRowBlocks * kPitch) >> 4), s + tap > 0);
            if (more) {
                unsigned char *const to = fill_to + (s + 1) % kBuffers * kSliceBytes;
                if (tap < 3) fill(to, v[(s + 1) % 2], tap, flags, place);
                if (tap == 2) fill(to, v[(s + 1) % 2], 3, flags, place);
                if (tap == 4) load_a(a[(s + 1) % 2], a_from + (s + 1) % 2 * kRawBytes, 0);
                if (tap == 6) load_a(a[(s + 1) % 2], a_from + (s + 1) % 2 * kRawBytes, 1);
                if (tap == 7 && s + 3 < kSlices) load_x(v[(s + 1) % 2], x, offset, s + 3);
            }
        }
        wgmma_commit();
        if (more) {
            fence_proxy();
            __syncthreads();
            if (s + 3 < kSlices) {
                if (thread == 0) request(s + 3);
                __syncwarp();
            }
        }
    }
    wgmma_wait<0>();

    // [filter][pixel] of each warp, where the raw weights were: all have been read before the last block barrier
    unsigned char *const stage = smem + warp * 16 * kStagePitch;
    const unsigned to = shared_address(stage) + lane % 16 * kStagePitch + lane / 16 * 16;
#pragma unroll
    for (int j = 0; j < 96; j += 8)
        stmatrix(to + j * 4, pack(d[j], d[j + 1]), pack(d[j + 2], d[j + 3]), pack(d[j + 4], d[j + 5]), pack(d[j + 6], d[j + 7]));
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 3; ++i) {
        const int e = lane + 32 * i, f = e / kTileBlocks, b = e % kTileBlocks;  // 96 vectors are those of 4 filters
        const int at = static_cast<int>(blockIdx.x) * kTileBlocks + b;
        const int row = at / kRowBlocks, column = at % kRowBlocks;
        const int n = row / (kH + 1), h = row - n * (kH + 1);
        if (n < images && h < kH) {
            const unsigned char *const from = stage + f * kStagePitch + b * 16;
            __half *const out = y + static_cast<long long>(n * kF + warp * 16 + f) * kPlane + h * kW + column * 8;
#pragma unroll
            for (int j = 0; j < 4; ++j)
                *reinterpret_cast<uint4 *>(out + j * 4 * kPlane) = *reinterpret_cast<const uint4 *>(from + j * 4 * kStagePitch);
        }
    }
}

// Tensor maps are made anew in each call.
using Encode = CUresult (*)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                            const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                            CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// Strides are in bytes, of all dimensions but the first.
bool encode(CUtensorMap *map, const void *data, int dims, const cuuint64_t *shape, const cuuint64_t *stride,
            const cuuint32_t *box, CUtensorMapSwizzle swizzle) {
    static const Encode function = [] {
        void *entry = nullptr;
        cudaDriverEntryPointQueryResult found;
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
        return reinterpret_cast<Encode>(entry);
    }();
    if (!function) return false;
    const cuuint32_t step[5] = {1, 1, 1, 1, 1};
    return function(map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, dims, const_cast<void *>(data), shape, stride, box, step,
                    CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                    CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
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
    KLINEAGE_REQUIRE(call, call->abi_version == KLINEAGE_ABI_VERSION, "conv2d: unknown ABI version");
    KLINEAGE_REQUIRE(call, call->num_inputs == 2 && call->num_outputs == 1, "conv2d: needs x, w -> y");
    const klineage_tensor &x = call->inputs[0], &w = call->inputs[1], &y = call->outputs[0];
    KLINEAGE_REQUIRE(call, x.num_dims == 4 && w.num_dims == 4 && y.num_dims == 4, "conv2d: tensors are 4-D");
    KLINEAGE_REQUIRE(call, x.dtype == KLINEAGE_FLOAT16 && w.dtype == KLINEAGE_FLOAT16 && y.dtype == KLINEAGE_FLOAT16,
                     "conv2d: fp16 only");
    KLINEAGE_REQUIRE(call, klineage_scalar_value(call, "stride", 1) == 1 && klineage_scalar_value(call, "pad", 1) == 1,
                     "conv2d: stride 1 and padding 1 only");
    KLINEAGE_REQUIRE(call, x.shape[1] == kC && w.shape[1] == kC && w.shape[0] == kF && w.shape[2] == 3 && w.shape[3] == 3,
                     "conv2d: 64 input channels, 128 filters of 3x3 only");
    const int64_t n = x.shape[0];
    KLINEAGE_REQUIRE(call, x.shape[2] == kH && x.shape[3] == kW, "conv2d: images of 112x112 only");
    KLINEAGE_REQUIRE(call, n >= 1 && n * kPlane * kF < (1ll << 31), "conv2d: size out of range");
    KLINEAGE_REQUIRE(call, y.shape[0] == n && y.shape[1] == kF && y.shape[2] == kH && y.shape[3] == kW,
                     "conv2d: output shape differs from the input's");
    KLINEAGE_REQUIRE(call, is_contiguous(x) && is_contiguous(w) && is_contiguous(y), "conv2d: x, w and y must be contiguous");
    KLINEAGE_REQUIRE(call, (reinterpret_cast<uintptr_t>(x.data) | reinterpret_cast<uintptr_t>(w.data) |
                            reinterpret_cast<uintptr_t>(y.data)) % 16 == 0, "conv2d: pointers must be 16-byte aligned");

    CUtensorMap w_map = {};
    const cuuint64_t w_shape[2] = {kDepth, kF}, w_stride[1] = {kDepth * 2};
    const cuuint32_t w_box[2] = {kDepth / kSlices, kF};
    const bool made = encode(&w_map, w.data, 2, w_shape, w_stride, w_box, CU_TENSOR_MAP_SWIZZLE_NONE);
    KLINEAGE_REQUIRE(call, made, "conv2d: no tensor map");

    static thread_local int prepared = -1;
    int device;
    cudaGetDevice(&device);
    if (device != prepared) {
        cudaFuncSetAttribute(conv_nchw, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
        prepared = device;
    }
    const int images = static_cast<int>(n);
    const int tiles = divide_up((images * (kH + 1) - 1) * kW, kTile);
    conv_nchw<<<tiles, kThreads, kSharedBytes, static_cast<cudaStream_t>(call->stream)>>>(
        w_map, static_cast<const __half *>(x.data), static_cast<__half *>(y.data), images);
    const cudaError_t status = cudaGetLastError();
    KLINEAGE_REQUIRE(call, status == cudaSuccess, cudaGetErrorString(status));
    return 0;
}
