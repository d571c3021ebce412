#include <cuda.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "klineage.h"

namespace {

constexpr int kC = 64, kF = 128, kDepth = kC * 9;                // K of the implicit GEMM
constexpr int kH = 28, kW = 28, kPlane = kH * kW;
constexpr int kTileH = 4, kTile = kTileH * kW;                   // output pixels of a block: 4 whole rows of one image
constexpr int kVectors = kW / 4;                                 // of 4 pixels, in a row
constexpr int kSlices = kC / 16;                                 // 16 channels each
// Weights as they lie: [filter][16 channels][9 taps] of a slice; three buffers.
constexpr int kFilterBytes = 16 * 9 * 2, kSliceBytes = kF * kFilterBytes, kRawBuffers = 3;
// x: blocks of 8 pixels by 16 channels, 16 bytes for each channel, and a pad for the banks. Block (r, v) holds pixels
// 4 v to 4 v + 3 of the tile's input rows r and r + 2, so that the next row lies kVectors whole blocks further.
constexpr int kPitch = 256 + 16, kCopyBytes = 4 * kVectors * kPitch;
constexpr int kImageAt = kRawBuffers * kSliceBytes, kBarriersAt = kImageAt + kSlices * 3 * kCopyBytes;
constexpr int kSharedBytes = 1024 + kBarriersAt + kSlices * 8;
constexpr int kStagePitch = kTile * 2 + 16;                      // epilogue: bytes of the pixels of a filter, and a pad
constexpr int kThreads = 256;
static_assert(kW % 4 == 0 && kVectors == 7 && kH % kTileH == 0 && kTile == 112, "the fill and wgmma's shape");
static_assert(kSharedBytes <= 232448 && kF * kStagePitch <= kSliceBytes && kBarriersAt % 8 == 0, "shared memory of one block");

__device__ __forceinline__ unsigned shared_address(const void *p) {
    return static_cast<unsigned>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ void barrier_init(unsigned bar, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
__device__ __forceinline__ void fence_barrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void fence_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
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
// 4 pixels, or zeros.
__device__ __forceinline__ uint2 load_vector(const __half *from, int inside) {
    uint2 v;
    asm volatile("{\n.reg .pred q;\nsetp.ne.b32 q, %3, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\n"
                 "@q ld.global.v2.b32 {%0, %1}, [%2];\n}"
                 : "=r"(v.x), "=r"(v.y) : "l"(__cvta_generic_to_global(from)), "r"(inside) : "memory");
    return v;
}
__device__ __forceinline__ void store_vector(unsigned to, unsigned a, unsigned b, unsigned c, unsigned d, int wanted) {
    asm volatile("{\n.reg .pred q;\nsetp.ne.b32 q, %5, 0;\n@q st.shared.v4.b32 [%0], {%1, %2, %3, %4};\n}"
                 ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d), "r"(wanted) : "memory");
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
// d[64 x 112] += a[64 x 16] b[16 x 112]: a in registers, b N-major in shared memory without swizzle.
__device__ __forceinline__ void wgmma(float (&d)[56], const unsigned (&a)[4], unsigned long long b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %61, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n112k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
        "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, "
        "%46, %47, %48, %49, %50, %51, %52, %53, %54, %55}, "
        "{%56, %57, %58, %59}, %60, p, 1, 1, 1;\n}"
        : D16(0), D16(16), D16(32), D4(48), D4(52)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory"); }

// D[filter][pixel] = W X. Each warp has 16 filters and all 112 pixels of the tile; x stays channel-first.
__global__ void __launch_bounds__(kThreads, 1)
conv_nchw(const __grid_constant__ CUtensorMap w_map, const __half *x, __half *y) {
    extern __shared__ unsigned char raw[];
    unsigned char *const smem = raw + (-shared_address(raw) & 1023);
    const unsigned base = shared_address(smem), image = base + kImageAt, full_bars = base + kBarriersAt;
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int n = blockIdx.x / (kH / kTileH), p0 = blockIdx.x % (kH / kTileH) * kTileH;  // image, first output row
    if (thread == 0) prefetch(&w_map);

    const auto request_slice = [&](int s) {
        barrier_expect(full_bars + s * 8, kSliceBytes);
        load_weights(base + s % kRawBuffers * kSliceBytes, &w_map, full_bars + s * 8, s * (kDepth / kSlices));
    };

    // For the fill a warp has channels warp and warp + 8 of a slice, 8 lanes a row of x (and the one two rows below), of
    // which the last lane holds zeros: the padding on both sides.
    const int r = lane / 8, column = lane % 8;
    const int upper = p0 - 1 + r, lower = upper + 2, busy = column < kVectors;
    const int upper_inside = busy && upper >= 0 && upper < kH, lower_inside = busy && lower >= 0 && lower < kH;
    const __half *const from = x + static_cast<long long>(n * kC + warp) * kPlane + upper * kW + column * 4;
    // Lane q of a quad owns channels 4 q to 4 q + 3 of a slice, which are its rows 2 q, 2 q + 1, 2 q + 8, 2 q + 9 of K;
    // channel c + 8 is 4 rows after channel c.
    const int k_row = warp / 2 % 2 * 8 + warp / 4 * 2 + warp % 2;
    const unsigned fill_to = image + (r * kVectors + column) * kPitch + k_row * 16;
    uint2 v[2][2][2];  // slice, channel, row
    const auto load = [&](int s, int i) {
        const __half *const at = from + (s * 16 + i * 8) * kPlane;
        v[s % 2][i][0] = load_vector(at, upper_inside);
        v[s % 2][i][1] = load_vector(at + 2 * kW, lower_inside);
    };
    const auto fill = [&](int s, int i) {
        const uint2 a = v[s % 2][i][0], b = v[s % 2][i][1];
        // the neighbours' pixels, of the upper row in the low half and of the lower row in the high half
        const unsigned left = __shfl_sync(0xffffffffu, __byte_perm(a.y, b.y, 0x7632), (lane + 7) & 7, 8);
        const unsigned right = __shfl_sync(0xffffffffu, __byte_perm(a.x, b.x, 0x5410), (lane + 1) & 7, 8);
        const unsigned a_middle = __byte_perm(a.x, a.y, 0x5432), b_middle = __byte_perm(b.x, b.y, 0x5432);
        const unsigned to = fill_to + s * 3 * kCopyBytes + i * 64;
        store_vector(to, __byte_perm(left, a.x, 0x5410), a_middle, __byte_perm(left, b.x, 0x5432), b_middle, busy);
        store_vector(to + kCopyBytes, a.x, a.y, b.x, b.y, busy);
        store_vector(to + 2 * kCopyBytes, a_middle, __byte_perm(a.y, right, 0x5432), b_middle, __byte_perm(b.y, right, 0x7632), busy);
        if (s + 2 < kSlices) load(s + 2, i);
    };

    unsigned a[2][9][4];  // the A operand of two slices: 16 filters by 16 channels for each tap
    const auto load_a = [&](int s, int half) {
        const uint2 *const words = reinterpret_cast<const uint2 *>(
            smem + s % kRawBuffers * kSliceBytes + (warp * 16 + half * 8 + lane / 4) * kFilterBytes + lane % 4 * 72);
        unsigned in[18];  // 4 channels of a filter
#pragma unroll
        for (int i = 0; i < 9; ++i) {
            const uint2 word = words[i];
            in[i * 2] = word.x, in[i * 2 + 1] = word.y;
        }
#pragma unroll
        for (int tap = 0; tap < 9; ++tap) {
#pragma unroll
            for (int c = 0; c < 4; c += 2) {
                const int e = c * 9 + tap;
                a[s % 2][tap][c + half] = __byte_perm(in[e / 2], in[(e + 9) / 2], tap % 2 ? 0x5432 : 0x7610);
            }
        }
    };

    load(0, 0), load(0, 1), load(1, 0), load(1, 1);
    if (thread == 0) {
        for (int s = 0; s < kSlices; ++s) barrier_init(full_bars + s * 8, 1);
        fence_barrier_init();
        request_slice(0), request_slice(1);
    }
    __syncthreads();
    fill(0, 0), fill(0, 1);
    fence_async();
    barrier_wait(full_bars);
    load_a(0, 0), load_a(0, 1);
    __syncthreads();
    if (thread == 0) request_slice(2), request_slice(3);  // the last one to where the first one was
    __syncwarp();

    float d[56];
#pragma unroll
    for (int s = 0; s < kSlices; ++s) {
        wgmma_fence();
#pragma unroll
        for (int tap = 0; tap < 9; ++tap) {
            // N-major, no swizzle: 8 channels are 128 bytes apart (K), blocks of 8 pixels kPitch (N)
            const unsigned long long b =
                (image + (s * 3 + tap % 3) * kCopyBytes + tap / 3 * (kVectors * kPitch)) >> 4 | 8ull << 16 |
                static_cast<unsigned long long>(kPitch >> 4) << 32;
            wgmma(d, a[s % 2][tap], b, s + tap > 0);
            if (s + 1 < kSlices) {
                if (tap < 2) fill(s + 1, tap);
                if (tap == 2) wgmma_commit();
                if (tap == 3) {
                    if (s > 0) wgmma_wait<1>();  // the products of slice s - 1: their A registers are free
                    barrier_wait(full_bars + (s + 1) * 8);
                }
                if (tap == 4) load_a(s + 1, 0);
                if (tap == 6) load_a(s + 1, 1);
            }
        }
        wgmma_commit();
        if (s + 1 < kSlices) {
            fence_async();
            __syncthreads();
        }
    }
    wgmma_wait<0>();

    // [16 filters][14 blocks of 8 pixels] for each warp, where the second slice of the weights was
    unsigned char *const stage = smem + kSliceBytes + warp * 16 * kStagePitch;
    const unsigned to = shared_address(stage) + lane % 16 * kStagePitch + lane / 16 * 16;
#pragma unroll
    for (int j = 0; j < 14; j += 2)
        stmatrix(to + j * 16, pack(d[j * 4], d[j * 4 + 1]), pack(d[j * 4 + 2], d[j * 4 + 3]),
                 pack(d[j * 4 + 4], d[j * 4 + 5]), pack(d[j * 4 + 6], d[j * 4 + 7]));
    __syncwarp();
    __half *const out = y + static_cast<long long>(n * kF + warp * 16) * kPlane + p0 * kW;
#pragma unroll
    for (int i = 0; i < 7; ++i) {
        // 8 pixels in the order of y: the first two rows are in the blocks' first halves, the other two in the second
        const int e = lane + i * 32, f = e / 14, u = e % 14;
        const unsigned char *const at = stage + f * kStagePitch + u % 7 * 32 + u / 7 * 8;
        const uint2 first = *reinterpret_cast<const uint2 *>(at), second = *reinterpret_cast<const uint2 *>(at + 16);
        *reinterpret_cast<uint4 *>(out + f * kPlane + u * 8) = make_uint4(first.x, first.y, second.x, second.y);
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

bool contiguous(const klineage_tensor &t) {
    int64_t expected = 1;
    for (int dim = 3; dim >= 0; --dim) {
        if (t.shape[dim] != 1 && t.stride[dim] != expected) return false;
        expected *= t.shape[dim];
    }
    return true;
}

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
    KLINEAGE_REQUIRE(call, x.shape[2] == kH && x.shape[3] == kW, "conv2d: images of 28x28 only");
    KLINEAGE_REQUIRE(call, n >= 1 && n * kPlane * kF < (1ll << 31), "conv2d: size out of range");
    KLINEAGE_REQUIRE(call, y.shape[0] == n && y.shape[1] == kF && y.shape[2] == kH && y.shape[3] == kW,
                     "conv2d: output shape differs from the input's");
    KLINEAGE_REQUIRE(call, contiguous(x) && contiguous(w) && contiguous(y), "conv2d: x, w and y must be contiguous (nchw)");
    KLINEAGE_REQUIRE(call, (reinterpret_cast<uintptr_t>(x.data) | reinterpret_cast<uintptr_t>(w.data) |
                            reinterpret_cast<uintptr_t>(y.data)) % 16 == 0, "conv2d: pointers must be 16-byte aligned");

    CUtensorMap w_map = {};
    const cuuint64_t w_shape[2] = {kDepth, kF}, w_stride[1] = {kDepth * 2};
    const cuuint32_t w_box[2] = {kDepth / kSlices, kF};
    KLINEAGE_REQUIRE(call, encode(&w_map, w.data, 2, w_shape, w_stride, w_box, CU_TENSOR_MAP_SWIZZLE_NONE),
                     "conv2d: no tensor map");

    static thread_local int prepared = -1;
    int device;
    cudaGetDevice(&device);
    if (device != prepared) {
        cudaFuncSetAttribute(conv_nchw, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
        prepared = device;
    }
    const auto stream = static_cast<cudaStream_t>(call->stream);
    const int tiles = static_cast<int>(n) * (kH / kTileH);
    conv_nchw<<<tiles, kThreads, kSharedBytes, stream>>>(w_map, static_cast<const __half *>(x.data), static_cast<__half *>(y.data));
    const cudaError_t status = cudaGetLastError();
    KLINEAGE_REQUIRE(call, status == cudaSuccess, cudaGetErrorString(status));
    return 0;
}
