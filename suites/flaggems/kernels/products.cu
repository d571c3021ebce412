// Products of the suite that the GEMM expert's interface does not have, on its core (kernel.cuh, launch.cuh): addmm and bmm for sm_90a
// in bf16 and fp16, row-major, any M, N a multiple of 8. Tiles are 128 x 256, CTAs persistent, results leave under the next tile's products.
//
// The consumers are the expert's. What differs is which slices the producer brings:
// addmm  after K come 128 more steps of depth, the unit matrix times the bias's rows of the tile. The products with 1 are exact, and the
//        sums start from no other rounding: 2 of 66 slices at K = 4096, and no second epilogue.
// bmm    matrices are stacked along M; a tile's matrix is its band of the raster. Where M is no multiple of 128: a launch for each matrix.
#include <type_traits>

#include "klineage.h"
#include "launch.cuh"

namespace {
using namespace klineage::sm90;
using gemm::kRow;
using gemm::kTileK;

enum Op { kAdd, kBatch };

// What a launch needs beside the core's arguments. depth: of a and b, in whole slices.
struct Extra : gemm::Arguments {
    CUtensorMap bias, unit;
    int depth;
};

// A slice of b: 64 rows of k of one matrix, in blocks of 64 columns. What lies past K of the matrix is zero.
template <class C>
__device__ __forceinline__ void load_b(uint32_t to, const CUtensorMap *map, uint32_t full, int k, int column, int matrix, bool wide) {
    if (wide) {
        tma_load_4d(to, map, full, 0, k, column / 64, matrix);
        return;
    }
#pragma unroll
    for (int i = 0; i < C::kN / 64; ++i) tma_load_3d(to + i * kTileK * kRow, map, full, column + 64 * i, k, matrix);
}

template <class C, Op kOp>
__device__ __forceinline__ void produce(const Extra &x, const gemm::Schedule<C> &my, uint32_t base, uint32_t full, uint32_t empty) {
    gemm::Ring<C::kStages> ring;
    int backward = 0;
#pragma unroll 1
    for (int t = my.first; t < my.tiles; t += my.stride, backward ^= x.alternate) {
        const int2 at = my.at(t);
        const int matrix = kOp == kBatch ? at.x / (x.group * C::kM) : 0;
#pragma unroll 1
        for (int step = 0; step < my.steps; ++step, ring.advance()) {
            const int k = (backward ? my.steps - 1 - step : step) * kTileK;
            const uint32_t to = base + ring.stage * C::kStageBytes, barrier = full + 8 * ring.stage;
            mbarrier_wait(empty + 8 * ring.stage, ring.phase ^ 1);
            mbarrier_arrive_expect(barrier, C::kStageBytes);
            if (kOp == kAdd && k >= x.depth) {  // row r of the unit's slice is 1 at the bias's row r of the tile
                tma_load_2d(to, &x.unit, barrier, 0, x.depth - k);
                load_b<C>(to + C::kBytesA, &x.bias, barrier, at.x + k - x.depth, at.y, 0, x.wide_b);
            } else {
                tma_load_2d(to, &x.a, barrier, k, at.x);
                load_b<C>(to + C::kBytesA, &x.b, barrier, k, at.y, matrix, x.wide_b);
            }
        }
    }
}

template <class C, Op kOp>
__global__ void __launch_bounds__(C::kThreads, 1) product(const __grid_constant__ Extra x) {
    extern __shared__ uint8_t shared[];
    const uint32_t base = (smem_address(shared) + 1023) & ~1023u, full = base + C::kStages * C::kStageBytes + C::kStaging;
    const uint32_t empty = full + 8 * C::kStages;
    if (threadIdx.x == 0) {
        for (int s = 0; s < C::kStages; ++s) mbarrier_init(full + 8 * s, 1), mbarrier_init(empty + 8 * s, C::kWarpgroups);
        fence_mbarrier_init();
    }
    const gemm::Schedule<C> my(x);
    __syncthreads();
    if (__shfl_sync(~0u, threadIdx.x / 128, 0) == C::kWarpgroups) {
        registers_decrease<40>();
        if (threadIdx.x == C::kWarpgroups * 128) produce<C, kOp>(x, my, base, full, empty);
    } else {
        registers_increase<232>();
        gemm::consume<C>(x, my, base, full, empty);
    }
}

// The unit matrix of one slice; a box reads zeros beside it.
struct alignas(128) Unit {
    uint16_t at[kTileK * kTileK];
    constexpr explicit Unit(uint16_t one) : at() {
        for (int i = 0; i < kTileK; ++i) at[i * (kTileK + 1)] = one;
    }
};
__device__ const Unit kUnitBfloat16(0x3f80), kUnitFloat16(0x3c00);

template <class T>
const void *unit() {
    static const void *const at = [] {
        void *found = nullptr;
        const cudaError_t status = std::is_same_v<T, __half> ? cudaGetSymbolAddress(&found, kUnitFloat16) : cudaGetSymbolAddress(&found, kUnitBfloat16);
        return status == cudaSuccess ? found : nullptr;
    }();
    return at;
}

// Contiguous row-major a [m, k], b [matrices, k, n], c [m, n]. m: the rows of all matrices.
struct Problem {
    const void *a, *b, *bias;
    void *c;
    int m, n, k, matrices;
    cudaStream_t stream;
};

// The map of b, or of the bias as one matrix of m rows.
template <class C>
const char *map_b(CUtensorMap *map, const void *data, int n, int k, int matrices) {
    using T = typename C::T;
    const cuuint64_t columns = n, depth = k, count = matrices, row = columns * 2;
    if (n % 64) return encode_tiled<T, 3>(map, data, {columns, depth, count}, {row, row * depth}, {64, kTileK, 1});
    return encode_tiled<T, 4>(map, data, {64, depth, columns / 64, count}, {row, 128, row * depth}, {64, kTileK, C::kN / 64, 1});
}

template <class C, Op kOp>
const char *start(const Problem &p) {
    using T = typename C::T;
    Extra x = {};
    x.out = p.c, x.m = p.m, x.n = p.n, x.ldc = p.n, x.alternate = 1, x.wide_b = p.n % 64 == 0;
    x.depth = (p.k + kTileK - 1) / kTileK * kTileK, x.k = x.depth + (kOp == kAdd ? C::kM : 0);
    x.group = kOp == kBatch ? (p.m / p.matrices + C::kM - 1) / C::kM : 8;
    if (x.k < 2 * kTileK) return "products: K must be more than 64";  // the last tile's results leave at the second step
    const cuuint64_t rows = p.m, depth = p.k, columns = p.n;
    if (const char *why = encode_tiled<T, 2>(&x.a, p.a, {depth, rows}, {depth * 2}, {64, C::kM})) return why;
    if (const char *why = map_b<C>(&x.b, p.b, p.n, p.k, p.matrices)) return why;
    if (const char *why = encode_tiled<T, 2>(&x.c, p.c, {columns, rows}, {columns * 2}, {C::kBoxN, 16})) return why;
    if constexpr (kOp == kAdd) {
        if (unit<T>() == nullptr) return "products: the unit matrix is not on the device";
        if (const char *why = encode_tiled<T, 2>(&x.unit, unit<T>(), {kTileK, kTileK}, {kTileK * 2}, {64, C::kM})) return why;
        if (const char *why = map_b<C>(&x.bias, p.bias, p.n, p.m, 1)) return why;
    }
    int device = 0, count = 0;
    if (cudaGetDevice(&device) != cudaSuccess || cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess)
        return "products: the device cannot be asked";
    const int tiles = (p.m + C::kM - 1) / C::kM * ((p.n + C::kN - 1) / C::kN), waves = (tiles + count - 1) / count;
    return launch(product<C, kOp>, {dim3((tiles + waves - 1) / waves), dim3(C::kThreads), C::kSharedBytes, p.stream}, x);
}

template <class C>
const char *start_batch(Problem p) {
    const int matrices = p.matrices, rows = p.m / matrices;
    if (rows % C::kM == 0) return start<C, kBatch>(p);
    p.m = rows, p.matrices = 1;
    for (int i = 0; i < matrices; ++i) {
        if (const char *why = start<C, kBatch>(p)) return why;
        p.a = static_cast<const char *>(p.a) + int64_t(rows) * p.k * 2, p.b = static_cast<const char *>(p.b) + int64_t(p.k) * p.n * 2;
        p.c = static_cast<char *>(p.c) + int64_t(rows) * p.n * 2;
    }
    return nullptr;
}

template <Op kOp, class T>
const char *start_op(const Problem &p) {
    using C = gemm::Config<T, 128, 256, 2, 1, 1, 1, 1>;
    if constexpr (kOp == kBatch) return start_batch<C>(p);
    else return start<C, kOp>(p);
}

// Why a tensor is refused, or nullptr.
const char *refusal(const klineage_tensor &t, const klineage_tensor &first) {
    if (t.dtype != first.dtype || (t.dtype != KLINEAGE_BFLOAT16 && t.dtype != KLINEAGE_FLOAT16)) return "products: bf16 or fp16 only";
    int64_t stride = 1;
    for (int i = t.num_dims - 1; i >= 0; stride *= t.shape[i--])
        if (t.shape[i] < 1 || (t.shape[i] > 1 && t.stride[i] != stride)) return "products: contiguous tensors without an empty axis only";
    if (stride >= int64_t(1) << 40 || reinterpret_cast<uintptr_t>(t.data) % 16) return "products: tensors must be aligned to 16 bytes";
    return t.shape[t.num_dims - 1] % 8 ? "products: K and N must be multiples of 8" : nullptr;
}

// a: the index of the first factor; b stands after it.
template <Op kOp>
int run(const klineage_call *call, int a) {
    const int inputs = kOp == kBatch ? 2 : 3;
    KLINEAGE_REQUIRE(call, call->num_inputs == inputs && call->num_outputs == 1, "products: other tensors than the operator's");
    const klineage_tensor &x = call->inputs[a], &y = call->inputs[a + 1], &c = call->outputs[0];
    for (const klineage_tensor *t : {&x, &y, static_cast<const klineage_tensor *>(&c), &call->inputs[0]}) {
        const char *why = refusal(*t, x);
        KLINEAGE_REQUIRE(call, why == nullptr, why);
    }
    Problem p = {};
    p.matrices = kOp == kAdd ? 1 : int(y.shape[0]), p.a = x.data, p.b = y.data, p.c = c.data;
    p.k = int(x.shape[x.num_dims - 1]), p.n = int(y.shape[y.num_dims - 1]);
    const int64_t rows = kOp == kBatch ? x.shape[0] * x.shape[1] : x.shape[0];
    KLINEAGE_REQUIRE(call, rows <= 1 << 30 && p.n <= 1 << 24 && p.matrices < 65536, "products: too large");
    p.m = int(rows), p.stream = static_cast<cudaStream_t>(call->stream);
    if (kOp == kAdd) p.bias = call->inputs[0].data;
    const char *why = x.dtype == KLINEAGE_FLOAT16 ? start_op<kOp, __half>(p) : start_op<kOp, __nv_bfloat16>(p);
    KLINEAGE_REQUIRE(call, why == nullptr, why);
    return 0;
}

}  // namespace

extern "C" int addmm(const klineage_call *call) { return run<kAdd>(call, 1); }
extern "C" int bmm(const klineage_call *call) { return run<kBatch>(call, 0); }
