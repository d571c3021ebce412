// Products of the GEMM's core whose sums pass through an epilogue: scales, a bias, or a gate times a value.
//
// C is the configuration of the products, O that of the tile of results, E the epilogue. Most have C = O. Of a gated
// product the columns of C are kN / 2 gates and the kN / 2 values that belong to them, so that a thread's sums hold both.
// The walk, the ring and the stores are the core's (kernel.cuh).
#pragma once

#include <type_traits>

#include "entries.cuh"
#include "kernel.cuh"

namespace gemm {

// The producer of a gated product: O::kN rows of b from the tile's column on, and as many from row n + column on. Two CTAs
// that share B bring one of the two each.
template <class C, class O>
__device__ __forceinline__ void produce_gated(const Arguments &x, const Schedule<O> &my, int2 at, uint32_t base, uint32_t full, uint32_t empty) {
    static_assert(C::kShareB <= 2 && C::kMajorB == 0 && C::kN == 2 * O::kN, "a CTA brings the gates, the values, or both");
    const uint16_t same_a = my.same_a(), same_b = my.same_b();
    Ring<C::kStages> ring;
    int backward = 0;
#pragma unroll 1
    for (int t = my.first; t < my.tiles; t += my.stride, backward ^= x.alternate, at = my.at(t)) {
#pragma unroll 1
        for (int step = 0; step < my.steps; ++step, ring.advance()) {
            const int k = (backward ? my.steps - 1 - step : step) * kTileK;
            const uint32_t to = base + ring.stage * C::kStageBytes, barrier = full + 8 * ring.stage, to_b = to + C::kBytesA;
            mbarrier_wait(empty + 8 * ring.stage, ring.phase ^ 1);
            mbarrier_arrive_expect(barrier, C::kStageBytes);
            load_operand<C::kMajorA, C::kM, C::kShareA>(to, &x.a, barrier, k, at.x, my.part_a, same_a, x.wide_a);
            if constexpr (C::kShareB == 2) {
                tma_load_2d_multicast(to_b + my.part_b * O::kN * kRow, &x.b, barrier, k, at.y + my.part_b * x.n, same_b);
            } else {
                tma_load_2d(to_b, &x.b, barrier, k, at.y);
                tma_load_2d(to_b + O::kN * kRow, &x.b, barrier, k, at.y + x.n);
            }
        }
    }
}

// The core's multiply with the sums of each stage, 128 k of fp8, added to fp32 numbers outside of the instruction. Of a tile of 256 columns
// registers hold the instruction's sums of 128 at a time: the other warpgroup multiplies while this one adds. Else two stages take turns.
template <class C, class F>
__device__ __forceinline__ void multiply_promoted(float (&sum)[C::kBlocksM][C::kN / 2], int steps, Ring<C::kStages> &ring, uint64_t a, uint64_t b,
                                                  uint32_t full, uint32_t empty_mapped, bool signals, F first) {
    static_assert(C::kBlocksM == 1 && C::kMajorA == 0 && C::kMajorB == 0, "64 rows for each warpgroup, operands in rows of K");
    constexpr int kHalves = C::kN > 128 ? 2 : 1, kPart = C::kN / kHalves;
    auto issue = [&](float (&part)[kPart / 2], int half) {
        const uint64_t offset = uint64_t(ring.stage * (C::kStageBytes / 16)), columns = half * kPart * kRow / 16;
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kTileK / 16; ++i)
            Wgmma<typename C::T, kPart>::template ss<0, 0>(part, a + offset + descriptor_step<0, C::kM, C::kShareA>(i),
                                                           b + offset + columns + descriptor_step<0, C::kN, C::kShareB>(i), i ? 1 : 0);
        wgmma_commit();
    };
    auto add = [&](float (&part)[kPart / 2], int half) {
        pin(part);
#pragma unroll
        for (int i = 0; i < kPart / 2; ++i) sum[0][half * kPart / 2 + i] += part[i];
    };
#pragma unroll
    for (int i = 0; i < C::kN / 2; ++i) sum[0][i] = 0.0f;
    if constexpr (kHalves == 2) {
        float part[kPart / 2];
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
            mbarrier_wait(full + 8 * ring.stage, ring.phase);
            issue(part, 0);
            if (step == 0) first();
            wgmma_wait<0>();
            add(part, 0);
            issue(part, 1);
            wgmma_wait<0>();
            mbarrier_arrive_mapped_if(empty_mapped + 8 * ring.stage, signals);
            add(part, 1);
            ring.advance();
        }
    } else {
        float even[kPart / 2], odd[kPart / 2];
        mbarrier_wait(full + 8 * ring.stage, ring.phase);
        issue(even, 0);
        first();
        ring.advance();
        auto exchange = [&](float (&next)[kPart / 2], float (&last)[kPart / 2]) {
            mbarrier_wait(full + 8 * ring.stage, ring.phase);
            issue(next, 0);
            wgmma_wait<1>();  // the stage before is complete; this one runs on
            mbarrier_arrive_mapped_if(empty_mapped + 8 * ring.previous(), signals);
            add(last, 0);
            ring.advance();
        };
        int step = 1;
#pragma unroll 1
        for (; step + 1 < steps; step += 2) exchange(odd, even), exchange(even, odd);
        auto finish = [&](float (&last)[kPart / 2]) {
            wgmma_wait<0>();
            mbarrier_arrive_mapped_if(empty_mapped + 8 * ring.previous(), signals);
            add(last, 0);
        };
        if (step < steps) exchange(odd, even), finish(odd);
        else finish(even);
    }
}

// The core's reduce_split with the entry's epilogue: each CTA of a cluster adds the partial sums of its rows, finishes and stores them.
template <class C, class E>
__device__ __forceinline__ void reduce_entry(const Fused<E> &x, const float (&sum)[C::kBlocksM][C::kN / 2], uint32_t base, int2 at) {
    const int lane = threadIdx.x % 32, top = threadIdx.x / 128 * C::kBlocksM * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4;
    named_barrier_sync(1, C::kWarpgroups * 128);  // nobody reads a stage any more
#pragma unroll
    for (int block = 0; block < C::kBlocksM; ++block)
#pragma unroll
        for (int i = 0; i < C::kN / 2; i += 2) {
            const int row = top + block * 64 + i % 4 * 4, column = i / 4 * 8 + lane % 4 * 2;
            asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(base + (row * C::kPitch + column) * 4), "f"(sum[block][i]), "f"(sum[block][i + 1])
                         : "memory");
        }
    cluster_sync();
    constexpr int kRows = C::kM / C::kSplit, kChunks = C::kN / 8;
    const int rank = blockIdx.x % C::kSplit;
#pragma unroll 2
    for (int i = threadIdx.x; i < kRows * kChunks; i += C::kWarpgroups * 128) {
        const int row = rank * kRows + i / kChunks, column = i % kChunks * 8;
        if (at.x + row >= x.m || at.y + column >= x.n) continue;
        float total[8] = {};
#pragma unroll
        for (int part = 0; part < C::kSplit; ++part) {
            const uint32_t from = map_to_cta(base + (row * C::kPitch + column) * 4, part);
            const uint4 low = load_cluster_x4(from), high = load_cluster_x4(from + 16);
            const uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
            for (int j = 0; j < 8; ++j) total[j] += __uint_as_float(words[j]);
        }
        using T = typename C::T;
        E::template finish<T>(x.more, at.y + column, total);
        *reinterpret_cast<uint4 *>(static_cast<T *>(x.out) + int64_t(at.x + row) * x.ldc + at.y + column) =
            make_uint4(pack<T>(total[0], total[1]), pack<T>(total[2], total[3]), pack<T>(total[4], total[5]), pack<T>(total[6], total[7]));
    }
}

template <class C, class O, class E>
__device__ __forceinline__ void consume_fused(const Fused<E> &x, const Schedule<O> &my, uint32_t base, uint32_t full, uint32_t empty) {
    const int group = threadIdx.x / 128, warp = threadIdx.x / 32;
    const uint32_t staging = base + C::kStages * C::kStageBytes + warp * O::kWarpStaging;
    const uint32_t target = threadIdx.x % 128, empty_mapped = map_to_cta(empty, C::kShare > 1 ? target % C::kShare : my.rank);
    const uint64_t a = operand_descriptor<C::kMajorA, C::kM, C::kShareA>(base, group * C::kBlocksM * 64);
    const uint64_t b = operand_descriptor<C::kMajorB, C::kN, C::kShareB>(base + C::kBytesA, 0);
    constexpr int kLate = O::kGroups - O::kDefer, kRegisters = O::kBoxN / 4;  // the first late group; registers of a box
    float sum[C::kBlocksM][C::kN / 2];
    uint32_t late[O::kDefer ? O::kDefer * O::kStaged * kRegisters : 1] = {};
    int2 late_at = {};
    bool pending = false;
    E epilogue(x.more);
    auto from_late = [&](int box, int i) { return late[(box - kLate * O::kStaged) * kRegisters + i]; };
    auto from_sum = [&](int box, int i) { return epilogue.template packed<C, O>(sum, box, i); };
    auto store_late = [&](int step) {
        if constexpr (O::kDefer >= 1)
            if (pending && step == 1) store_group<O, kLate>(x, staging, late_at.x, late_at.y, from_late);
    };
    Ring<C::kStages> ring;
#pragma unroll 1
    for (int t = my.first; t < my.tiles; t += my.stride) {
        int2 at;
        if constexpr (E::kPromoted) {
            static_assert(O::kDefer == 0, "the registers of late results hold the instruction's sums");
            multiply_promoted<C>(sum, my.steps, ring, a, b, full, empty_mapped, target < C::kShare, [&] {
                at = my.at(t), epilogue.template tile<C, O>(x.more, at.y, x.n);
            });
        } else {
            multiply<C>(sum, my.steps, ring, a, b, full, empty_mapped, target < C::kShare, [&](int step) {
                if (step == 0) {
                    at = my.at(t);
                    if constexpr (C::kSplit == 1) epilogue.template tile<C, O>(x.more, at.y, x.n);
                }
                store_late(step);
            });
        }
        if constexpr (C::kSplit > 1) {
            reduce_entry<C, E>(x, sum, base, at);
            return;  // one tile for each cluster
        }
        const int row = at.x + group * C::kBlocksM * 64 + warp % 4 * 16;
        static_assert(O::kGroups <= 2 && O::kDefer <= 1, "at most one group of results is stored late");
        if constexpr (kLate >= 1) store_group<O, 0>(x, staging, row, at.y, from_sum);
        if constexpr (kLate >= 2) store_group<O, 1>(x, staging, row, at.y, from_sum);
        if constexpr (O::kDefer > 0) {
#pragma unroll
            for (int box = kLate * O::kStaged; box < O::kBoxes; ++box)
#pragma unroll
                for (int i = 0; i < kRegisters; ++i) late[(box - kLate * O::kStaged) * kRegisters + i] = from_sum(box, i);
            late_at = make_int2(row, at.y), pending = true;
        }
    }
    store_late(1);
    if (threadIdx.x % 32 == 0) bulk_wait_read<0>();  // shared memory must outlive the stores
}

// Starts one tile on a problem. Returns nullptr, or why it cannot.
template <class C, class O, class E>
const char *start_fused(const Problem &p, const typename E::Operands &more, CUtensorMapL2promotion promotion) {
    using T = typename C::T;
    Fused<E> x = {};
    x.more = more;
    x.out = p.c, x.m = p.m, x.n = p.n, x.k = p.k, x.ldc = int(p.ldc), x.group = 8, x.alternate = 1;
    constexpr int kRowsB = E::kGated ? O::kN : C::kN, kShareRows = E::kGated ? 1 : C::kShareB;  // of a box: see produce_gated
    if (const char *why = operand_map<T, C::kMajorA, C::kM, C::kShareA>(&x.a, p.a, p.m, p.k, p.lda, promotion, &x.wide_a)) return why;
    if (const char *why = operand_map<T, C::kMajorB, kRowsB, kShareRows>(&x.b, p.b, E::kGated ? 2 * p.n : p.n, p.k, p.ldb, promotion, &x.wide_b)) return why;
    if (const char *why = encode_tiled<T, 2>(&x.c, p.c, {cuuint64_t(p.n), cuuint64_t(p.m)}, {cuuint64_t(p.ldc) * 2}, {O::kBoxN, 16},
                                             O::kBoxN == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B))
        return why;
    constexpr int kRows = O::kM * O::kShareB, kColumns = O::kN * O::kShareA;
    const int tiles = (p.m + kRows - 1) / kRows * ((p.n + kColumns - 1) / kColumns), held = held_clusters<C, O, E>();
    if (held < 1) return "gemm: the device holds no cluster of this size";
    const int waves = (tiles + held - 1) / held, even = (tiles + waves - 1) / waves;  // no cluster without a tile in the last wave
    return start_clusters<C, O, E>(x, C::kSplit > 1 ? tiles : even, p.stream);
}

// The roles of an entry that differs from the plain product in its epilogue alone, or in that and its two parts of B.
template <class E, class Read>
struct Epilogue {
    using Operands = Read;
    template <class C, class O>
    static __device__ __forceinline__ void produce(const Fused<E> &x, const Schedule<O> &my, uint32_t base, uint32_t full, uint32_t empty) {
        if constexpr (E::kGated) produce_gated<C, O>(x, my, my.at(my.first), base, full, empty);
        else gemm::produce<C>(x, my, my.at(my.first), base, full, empty);
    }
    template <class C, class O>
    static __device__ __forceinline__ void consume(const Fused<E> &x, const Schedule<O> &my, uint32_t base, uint32_t full, uint32_t empty) {
        consume_fused<C, O, E>(x, my, base, full, empty);
    }
    template <class C, class O>
    static const char *start_with(const Problem &p, const Read &more, CUtensorMapL2promotion promotion) {
        return start_fused<C, O, E>(p, more, promotion);
    }
    template <class C, class O>
    static const char *start(const Problem &p, const Read &more) { return start_with<C, O>(p, more, CU_TENSOR_MAP_L2_PROMOTION_L2_256B); }
};

// Where the sums of register i of a box stand in a thread's: two columns of a row.
template <class O>
__device__ __forceinline__ constexpr int place_in_sum(int box, int i) {
    return box % (O::kN / O::kBoxN) * O::kBoxN / 2 + 2 * i;
}

// c = (scale of a) (scale of b) (the sums): one number of each operand, on the device.
struct Scales {
    const float *a, *b;
};
struct Scaled : Epilogue<Scaled, Scales> {
    static constexpr bool kGated = false, kPromoted = true;
    float factor;
    __device__ __forceinline__ explicit Scaled(const Scales &from) : factor(*from.a * *from.b) {}
    template <class C, class O>
    __device__ __forceinline__ void tile(const Scales &, int, int) {}
    template <class C, class O>
    __device__ __forceinline__ uint32_t packed(const float (&sum)[C::kBlocksM][C::kN / 2], int box, int i) const {
        const float *d = &sum[box / (O::kN / O::kBoxN)][place_in_sum<O>(box, i)];
        return pack<typename O::T>(d[0] * factor, d[1] * factor);
    }
    template <class T>
    static __device__ __forceinline__ void finish(const Scales &from, int, float (&total)[8]) {
        const float factor = *from.a * *from.b;
#pragma unroll
        for (int j = 0; j < 8; ++j) total[j] *= factor;
    }
};

template <class T>
__device__ __forceinline__ float2 unpacked(uint32_t two) {
    if constexpr (std::is_same_v<T, __half>) return __half22float2(*reinterpret_cast<const __half2 *>(&two));
    else return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162 *>(&two));
}

// A number for each column of the products. Lane l keeps the columns 32 (l / 4) + 8 q + 2 (l % 4) and the next, q < 4; the
// sums of its columns need those of all lanes with its l % 4, which shuffles bring. They are read under a tile's products.
template <bool kPaired>
struct Bias : Epilogue<Bias<kPaired>, const void *> {
    static constexpr bool kGated = kPaired, kPromoted = false;
    uint32_t held[4];
    __device__ __forceinline__ explicit Bias(const void *) : held{} {}
    template <class C, class O>
    __device__ __forceinline__ void tile(const void *bias, int column, int n) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            const int at = 32 * (lane / 4) + 8 * q + 2 * (lane % 4);
            const bool value = kGated && at >= O::kN;
            const int result = column + at - (value ? O::kN : 0);
            held[q] = at < C::kN && result < n
                          ? __ldg(static_cast<const uint32_t *>(bias) + (int64_t(value ? n : 0) + result) / 2) : 0u;
        }
    }
    // What belongs to element `e` of a row of the sums.
    template <class T>
    __device__ __forceinline__ float2 of(int e) const {
        const int eight = e / 4;
        return unpacked<T>(__shfl_sync(~0u, held[eight % 4], eight / 4 * 4 + threadIdx.x % 4));
    }
    template <class C, class O>
    __device__ __forceinline__ uint32_t packed(const float (&sum)[C::kBlocksM][C::kN / 2], int box, int i) const {
        using T = typename O::T;
        const int e = place_in_sum<O>(box, i);
        const float(&d)[C::kN / 2] = sum[box / (O::kN / O::kBoxN)];
        const float2 first = of<T>(e);
        if constexpr (kGated) {
            constexpr int kValues = O::kN / 2;
            const float2 second = of<T>(kValues + e);
            return pack<T>(gated(d[e] + first.x, d[kValues + e] + second.x), gated(d[e + 1] + first.y, d[kValues + e + 1] + second.y));
        } else {
            return pack<T>(d[e] + first.x, d[e + 1] + first.y);
        }
    }
    // Adds what belongs to eight columns from `column` on.
    template <class T>
    static __device__ __forceinline__ void finish(const void *bias, int column, float (&total)[8]) {
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
            const float2 two = unpacked<T>(__ldg(static_cast<const uint32_t *>(bias) + (column + j) / 2));
            total[j] += two.x, total[j + 1] += two.y;
        }
    }
    // silu(gate) value; a gate below -88 makes the denominator infinite and the result zero.
    static __device__ __forceinline__ float gated(float gate, float value) { return __fdividef(gate, 1.0f + __expf(-gate)) * value; }
};

}  // namespace gemm
