// Grouped product for sm_90a in bf16 and fp16: rows of a[M,K] up to ends[0] times b[0], from there to ends[1] times b[1], and
// so on; b[G,K,N] row-major, ends on the device. The loops are the core's; tiles never cross an end.
//
// Two CTAs that share b take two tiles of rows. The last tile of a group with an odd number of them is shared along N
// instead (a strip): there both have the same rows of a, and columns of b of their own.
//
// Every CTA walks the groups itself, so no kernel runs before this one. A tile reads rows beyond its end like all others,
// but stores only its own: boxes of 16 rows that lie before the end by TMA, the one that the end divides by its warp.
#include "entries.cuh"
#include "kernel.cuh"

namespace {
using namespace gemm;

struct Grouped {
    struct Operands {
        const int *ends;
        int count;
        int64_t matrix;  // elements from a matrix of b to the next
    };
    template <class C, class O>
    static __device__ __forceinline__ void produce(const Fused<Grouped> &x, const Schedule<C> &my, uint32_t base, uint32_t full, uint32_t empty);
    template <class C, class O>
    static __device__ __forceinline__ void consume(const Fused<Grouped> &x, const Schedule<C> &my, uint32_t base, uint32_t full, uint32_t empty);
    template <class C, class O>
    static const char *start(const Problem &p, const Operands &more);
};
using Call = Fused<Grouped>;

// Where a CTA is in the tiles of all groups, which follow each other.
template <class C>
struct Groups {
    static constexpr bool kStrips = C::kShareB == 2;
    int group = -1, first = 0, tiles = 0, begin = 0, end = 0;  // the group's first tile, how many it has, and its rows
    int full = 0;                                              // rows of tiles that a cluster fills
    bool strip = false;                                        // whether the tile found last is a pair along N
    // The CTA's part of tile t, false past the last one. Tiles are asked for in rising order.
    __device__ __forceinline__ bool find(const Call &x, const Schedule<C> &my, int t, int2 &at) {
        constexpr int kRows = C::kM * C::kShareB;
        while (t - first >= tiles) {
            if (++group >= x.more.count) return false;
            first += tiles, begin = end;
            end = max(begin, min(__ldg(x.more.ends + group), x.m));
            full = (end - begin + (kStrips ? C::kM : kRows) - 1) / kRows;
            tiles = full * my.columns + (begin + full * kRows < end ? (my.columns + 1) / 2 : 0);
        }
        strip = kStrips && t - first >= full * my.columns;
        if (strip) {
            at = make_int2(begin + full * kRows, (2 * (t - first - full * my.columns) + my.part_b) * C::kN);
            return true;
        }
        const int2 tile = tile_at(t - first, full, my.columns, x.group, 0);
        at = make_int2(begin + (tile.x * C::kShareB + my.part_b) * C::kM, tile.y * C::kN);
        return true;
    }
};

template <class C, class O>
__device__ __forceinline__ void Grouped::produce(const Call &x, const Schedule<C> &my, uint32_t base, uint32_t full, uint32_t empty) {
    constexpr int kBlocks = C::kN / 64, kDepth = kTileK / C::kShareB;
    const uint16_t same_b = my.same_b();
    Groups<C> groups;
    Ring<C::kStages> ring;
    int backward = 0;
    int2 at;
#pragma unroll 1
    for (int t = my.first; groups.find(x, my, t, at); t += my.stride, backward ^= x.alternate) {
#pragma unroll 1
        for (int step = 0; step < my.steps; ++step, ring.advance()) {
            const int k = (backward ? my.steps - 1 - step : step) * kTileK;
            const uint32_t to = base + ring.stage * C::kStageBytes, barrier = full + 8 * ring.stage;
            mbarrier_wait(empty + 8 * ring.stage, ring.phase ^ 1);
            mbarrier_arrive_expect(barrier, C::kStageBytes);
            if constexpr (Groups<C>::kStrips) {
                constexpr int kHalf = C::kM / 2;
                if (groups.strip) {
                    tma_load_2d_multicast(to + my.part_b * kHalf * kRow, &x.a, barrier, k, at.x + my.part_b * kHalf, same_b);
#pragma unroll
                    for (int i = 0; i < 2 * kBlocks; ++i)
                        tma_load_3d(to + C::kBytesA + i * kDepth * kRow, &x.b, barrier, at.y + i % kBlocks * 64, k + i / kBlocks * kDepth, groups.group);
                    continue;
                }
                tma_load_2d(to, &x.a, barrier, k, at.x);
                tma_load_2d(to + kHalf * kRow, &x.a, barrier, k, at.x + kHalf);
            } else {
                tma_load_2d(to, &x.a, barrier, k, at.x);
            }
            uint32_t to_b = to + C::kBytesA + my.part_b * kBlocks * kDepth * kRow;
#pragma unroll
            for (int i = 0; i < kBlocks; ++i, to_b += kDepth * kRow)
                if constexpr (C::kShareB == 1) tma_load_3d(to_b, &x.b, barrier, at.y + 64 * i, k, groups.group);
                else tma_load_3d_multicast(to_b, &x.b, barrier, at.y + 64 * i, k + my.part_b * kDepth, groups.group, same_b);
        }
    }
}

__device__ __forceinline__ uint4 load_shared(uint32_t from) {
    uint4 value;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w) : "r"(from) : "memory");
    return value;
}

// store_group of a box that has `rows` rows, 1 to 15, of this tile: each lane copies 16 bytes of every fourth row.
template <class C, int kGroup, class F>
__device__ __forceinline__ void store_rows(const Call &x, uint32_t staging, int row, int column, int rows, F packed) {
    using T = typename C::T;
    const int lane = threadIdx.x % 32, chunk = lane % 8;
    if (lane == 0) bulk_wait_read<0>();
    __syncwarp();
#pragma unroll
    for (int b = 0; b < C::kStaged; ++b)
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            const int box = kGroup * C::kStaged + b;
            stmatrix_x4(staging + (lane & 15) * kRow + b * C::kBoxBytes + ((((lane & 7) ^ (lane >> 4)) ^ (2 * q)) << 4), packed(box, 4 * q),
                        packed(box, 4 * q + 1), packed(box, 4 * q + 2), packed(box, 4 * q + 3));
        }
    __syncwarp();
#pragma unroll
    for (int b = 0; b < C::kStaged; ++b) {
        const int at = column + (kGroup * C::kStaged + b) * 64 + chunk * 8;
#pragma unroll
        for (int r = lane / 8; r < 16; r += 4)
            if (r < rows && at < x.n)
                *reinterpret_cast<uint4 *>(static_cast<T *>(x.out) + int64_t(row + r) * x.ldc + at) =
                    load_shared(staging + b * C::kBoxBytes + r * kRow + ((chunk ^ (r & 7)) << 4));
    }
    __syncwarp();
}

// A warp's results of one group of boxes, of which `end` is the first row that is not this tile's.
template <class C, int kGroup, class F>
__device__ __forceinline__ void store_before(const Call &x, uint32_t staging, int row, int column, int end, F packed) {
    if (row + 16 <= end) store_group<C, kGroup>(x, staging, row, column, packed);
    else if (row < end) store_rows<C, kGroup>(x, staging, row, column, end - row, packed);
}

template <class C, class O>
__device__ __forceinline__ void Grouped::consume(const Call &x, const Schedule<C> &my, uint32_t base, uint32_t full, uint32_t empty) {
    static_assert(C::kShareB <= 2, "a strip has two CTAs, and the box of a is a part of its tile for each");
    static_assert(C::kShareA == 1 && C::kMajorA == 0 && C::kMajorB == 1, "row-major operands, of which b is shared");
    static_assert(C::kBlocksM == 1 && C::kBoxN == 64 && C::kGroups * C::kStaged == C::kBoxes, "a warp has one row of whole boxes");
    const int part = threadIdx.x / 128, warp = threadIdx.x / 32;
    const uint32_t staging = base + C::kStages * C::kStageBytes + warp * C::kWarpStaging;
    const uint32_t target = threadIdx.x % 128, empty_mapped = map_to_cta(empty, C::kShare > 1 ? target % C::kShare : my.rank);
    const uint64_t a = operand_descriptor<0, C::kM, 1>(base, part * 64), b = operand_descriptor<1, C::kN, C::kShareB>(base + C::kBytesA, 0);
    constexpr int kLate = C::kGroups - C::kDefer, kRegisters = C::kBoxN / 4;
    float sum[1][C::kN / 2];
    uint32_t late[C::kDefer ? C::kStaged * kRegisters : 1] = {};
    int2 late_at = {};
    int late_end = 0;  // before the first tile no row is stored late
    auto from_late = [&](int box, int i) { return late[(box - kLate * C::kStaged) * kRegisters + i]; };
    auto from_sum = [&](int box, int i) { return packed_sum<C>(sum, box, i); };
    auto store_late = [&](int step) {
        if constexpr (C::kDefer == 1)
            if (step == 1) store_before<C, kLate>(x, staging, late_at.x, late_at.y, late_end, from_late);
    };
    Groups<C> groups;
    Ring<C::kStages> ring;
    int2 next;
    int t = my.first;
    bool found = groups.find(x, my, t, next);
#pragma unroll 1
    while (found) {
        const int row = next.x + part * 64 + warp % 4 * 16, column = next.y, end = groups.end;
        t += my.stride;
        multiply<C>(sum, my.steps, ring, a, b, full, empty_mapped, target < C::kShare, [&](int step) {
            if (step == 0) found = groups.find(x, my, t, next);  // the divisions run under the products
            store_late(step);
        });
        static_assert(C::kGroups <= 2 && C::kDefer <= 1, "at most one group of results is stored late");
        if constexpr (kLate >= 1) store_before<C, 0>(x, staging, row, column, end, from_sum);
        if constexpr (kLate >= 2) store_before<C, 1>(x, staging, row, column, end, from_sum);
        if constexpr (C::kDefer > 0) {
#pragma unroll
            for (int box = kLate * C::kStaged; box < C::kBoxes; ++box)
#pragma unroll
                for (int i = 0; i < kRegisters; ++i) late[(box - kLate * C::kStaged) * kRegisters + i] = from_sum(box, i);
            late_at = make_int2(row, column), late_end = end;
        }
    }
    store_late(1);
    if (threadIdx.x % 32 == 0) bulk_wait_read<0>();  // shared memory must outlive the stores
}

template <class C, class O>
const char *Grouped::start(const Problem &p, const Operands &more) {
    using T = typename C::T;
    Call x = {};
    x.more = more;
    x.out = p.c, x.m = p.m, x.n = p.n, x.k = p.k, x.ldc = int(p.ldc), x.group = 8, x.alternate = 1;
    const cuuint64_t n = p.n, depth = p.k, count = more.count;
    if (const char *why = operand_map<T, 0, C::kM, C::kShareB>(&x.a, p.a, p.m, p.k, p.lda, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, &x.wide_a)) return why;
    // Matrices are a dimension of their own, so that a tail of K reads zeros and not the next matrix.
    if (const char *why = encode_tiled<T, 3>(&x.b, p.b, {n, depth, count}, {cuuint64_t(p.ldb) * 2, cuuint64_t(more.matrix) * 2}, {64, kTileK / C::kShareB, 1}))
        return why;
    if (const char *why = encode_tiled<T, 2>(&x.c, p.c, {n, cuuint64_t(p.m)}, {cuuint64_t(p.ldc) * 2}, {64, 16})) return why;
    constexpr int kRows = C::kM * C::kShareB;
    const int64_t most = int64_t(p.m / kRows + more.count) * ((p.n + C::kN - 1) / C::kN);  // tiles: every group may have a part of one
    const int held = held_clusters<C, C, Grouped>();
    if (held < 1) return "gemm: the device holds no cluster of this size";
    return start_clusters<C, C, Grouped>(x, most < held ? most : held, p.stream);
}

template <class T>
const char *run_best(const Problem &p, const Grouped::Operands &more) {
    using Wide = Config<T, 128, 256, 2, 1, 2, 1, 1>;
    using Square = Config<T, 128, 128, 2, 1, 1, 1, 0>;
    using Low = Config<T, 64, 128, 1, 1, 1, 1, 0>;
    static constexpr Tile<Grouped> tiles[] = {
        tile<Wide, Wide, Grouped>(0.644f, 0.52f),
        tile<Square, Square, Grouped>(0.36f, 0.6f),
        tile<Low, Low, Grouped>(0.205f, 0.75f),
    };
    return start_shortest(tiles, p, more, more.count);
}

// Why this call is refused, or nullptr.
const char *refusal(const klineage_call *call) {
    if (call->num_inputs != 3 || call->num_outputs != 1) return "grouped gemm reads a, b and ends, and writes c";
    const klineage_tensor &a = call->inputs[0], &b = call->inputs[1], &ends = call->inputs[2], &c = call->outputs[0];
    for (const klineage_tensor *t : {&a, &b, &c})
        if (t->dtype != a.dtype || (t->dtype != KLINEAGE_BFLOAT16 && t->dtype != KLINEAGE_FLOAT16)) return "grouped gemm: bf16 or fp16 matrices only";
    if (ends.dtype != KLINEAGE_INT32 || ends.num_dims != 1 || ends.stride[0] != 1) return "grouped gemm: ends must be int32, one after the other";
    if (b.num_dims != 3 || b.stride[2] != 1 || b.stride[1] < b.shape[2] || b.stride[1] % 8 || b.stride[0] < b.stride[1] * b.shape[1] ||
        b.stride[0] % 8 || reinterpret_cast<uintptr_t>(b.data) % 16 || b.shape[0] > 1 << 16 || b.shape[1] > 1 << 24 || b.shape[2] > 1 << 24)
        return "grouped gemm: b must be at most 2^16 row-major matrices, rows at multiples of 16 bytes";
    if (!in_rows(a, 2) || !in_rows(c, 2)) return "grouped gemm: rows of consecutive elements at multiples of 16 bytes";
    if (b.shape[1] != a.shape[1] || c.shape[0] != a.shape[0] || c.shape[1] != b.shape[2] || ends.shape[0] != b.shape[0])
        return "grouped gemm: shapes do not match";
    if (c.shape[1] % 8 || b.shape[0] < 1) return "grouped gemm: N must be a multiple of 8, and one group at least";
    return nullptr;
}

}  // namespace

extern "C" int run(const klineage_call *call) {
    const char *why = refusal(call);
    KLINEAGE_REQUIRE(call, why == nullptr, why);
    const klineage_tensor &a = call->inputs[0], &b = call->inputs[1], &c = call->outputs[0];
    const Problem p = {a.data, b.data, c.data, int(a.shape[0]), int(b.shape[2]), int(a.shape[1]), a.stride[0], b.stride[1], c.stride[0],
                       static_cast<cudaStream_t>(call->stream)};
    const Grouped::Operands more = {static_cast<const int *>(call->inputs[2].data), int(b.shape[0]), b.stride[0]};
    why = a.dtype == KLINEAGE_FLOAT16 ? run_best<__half>(p, more) : run_best<__nv_bfloat16>(p, more);
    KLINEAGE_REQUIRE(call, why == nullptr, why);
    return 0;
}
