// One persistent kernel for attention forward: any head dimension, type and tile of `Tile`, masks by run-time ranges of keys.
#pragma once
#include <type_traits>

#include "exponential.cuh"
#include "klineage/sm90/v1/ldmatrix.cuh"
#include "klineage/sm90/v1/mbarrier.cuh"
#include "klineage/sm90/v1/tma.cuh"
#include "klineage/sm90/v1/wgmma.cuh"

using namespace klineage::sm90;

// What is fixed when the kernel is compiled. Every group is a warpgroup of 64 query rows.
template <class Element_, int kDim_, int kGroups_, int kKeys_, bool kPingPong_, int kPoly_>
struct Tile {
    using Element = Element_;
    static constexpr bool kPingPong = kPingPong_, kBf16 = std::is_same_v<Element, __nv_bfloat16>;
    static constexpr int kDim = kDim_, kGroups = kGroups_, kKeys = kKeys_, kPoly = kPoly_;
    static constexpr int kRows = 64 * kGroups, kThreads = 128 * (kGroups + 1), kBoxes = kDim / 64;
    static constexpr int kStages = kDim == 64 && kKeys <= 128 ? 4 : 2, kQueryStages = kDim <= 128 ? 2 : 1;
    static constexpr int kQueryBox = kRows * 128, kKeyBox = kKeys * 128, kQueryBytes = kBoxes * kQueryBox, kKeyBytes = kBoxes * kKeyBox;
    static constexpr int kStoreBoxes = kBoxes < 2 ? kBoxes : 2;  // 64x64 boxes of a group that are staged at once
    static constexpr int kStagingBytes = kGroups * kStoreBoxes * 8192;
    static constexpr int kBarriers = 2 * kQueryStages + 4 * kStages;
    static constexpr int kSharedBytes = 1024 + kQueryStages * kQueryBytes + 2 * kStages * kKeyBytes + kStagingBytes + 8 * kBarriers;
    static_assert(kSharedBytes <= 232448);
    static constexpr float kLimit = kBf16 ? 2.8147498e14f : 32768.f;  // of one thread's weights in a row of a block: below fp16's 65504; 2^48
};

struct Problem {
    int heads, queries_per_key_head, query_tokens, key_tokens;
    int row_tiles, tiles, heads_of_all;
    int sections, section_heads;  // heads whose keys and values stay in the L2 together; no sections: one head after the other
    int window;   // keys that a query sees, itself included; 0: all
    bool causal;
    float scale;  // base-2 units
};

// A tile of query rows.
struct Place {
    int row, head;  // head: of all batch entries
};

// Tile of this CTA in a round. In sections the length of rows falls and rises in turns, so that it changes slowly from tile to tile and ends with
// the shortest; rounds go alternately up and down, so that no CTA has the longer tile of every round.
template <class T>
__device__ __forceinline__ bool find(const Problem &p, int round, Place &place) {
    const int cta = round & 1 ? int(gridDim.x) - 1 - int(blockIdx.x) : int(blockIdx.x), t = round * int(gridDim.x) + cta;
    if (t >= p.tiles) return false;
    int m;
    if (p.sections == 0) {
        place.head = t / p.row_tiles, m = t - place.head * p.row_tiles;
    } else {
        const int whole = p.section_heads * p.row_tiles, s = t / whole, u = t - s * whole;
        const int width = min(p.section_heads, p.heads_of_all - s * p.section_heads), turn = u / width;
        m = (p.sections - s) % 2 ? p.row_tiles - 1 - turn : turn, place.head = s * p.section_heads + u - turn * width;
    }
    place.row = m * T::kRows;
    return true;
}

// The blocks of one CTA in the order of their use: tile after tile, in each from the last block of keys to the first.
template <class T>
struct Walk {
    int round = 0, block = 0, lowest = 0;
    Place place = {0, 0};
    bool live, first = true;

    __device__ __forceinline__ explicit Walk(const Problem &p) { enter(p); }
    __device__ __forceinline__ void advance(const Problem &p) {
        if (block > lowest) {
            --block, first = false;
            return;
        }
        ++round, first = true;
        enter(p);
    }
    __device__ __forceinline__ bool last() const { return block == lowest; }
    __device__ __forceinline__ void enter(const Problem &p) {
        live = find<T>(p, round, place);
        const int end = p.causal ? min(p.key_tokens, place.row + T::kRows) : p.key_tokens;
        block = (end + T::kKeys - 1) / T::kKeys - 1;
        lowest = p.window > 0 ? max(0, place.row + 1 - p.window) / T::kKeys : 0;
    }
};

// Addresses of shared memory.
template <class T>
struct Shared {
    uint32_t query, key, value, staging, barriers;
    __device__ __forceinline__ explicit Shared(uint32_t base) {
        query = (base + 1023) & ~1023u, key = query + T::kQueryStages * T::kQueryBytes, value = key + T::kStages * T::kKeyBytes;
        staging = value + T::kStages * T::kKeyBytes, barriers = staging + T::kStagingBytes;
    }
    __device__ __forceinline__ uint32_t query_full(int s) const { return barriers + 8 * s; }
    __device__ __forceinline__ uint32_t query_empty(int s) const { return barriers + 8 * (T::kQueryStages + s); }
    __device__ __forceinline__ uint32_t key_full(int s) const { return barriers + 8 * (2 * T::kQueryStages + s); }
    __device__ __forceinline__ uint32_t key_empty(int s) const { return key_full(s) + 8 * T::kStages; }
    __device__ __forceinline__ uint32_t value_full(int s) const { return key_full(s) + 16 * T::kStages; }
    __device__ __forceinline__ uint32_t value_empty(int s) const { return key_full(s) + 24 * T::kStages; }
};

// Position n of a ring of kStages: where it is, and the parity of its phase.
template <int kStages>
__device__ __forceinline__ int stage_of(uint32_t n) { return n % kStages; }
template <int kStages>
__device__ __forceinline__ uint32_t phase_of(uint32_t n) { return n / kStages & 1; }

// Asks for kBoxes blocks of 64 dimensions; rows past the end are filled with zeros.
template <int kBoxes, int kBox>
__device__ __forceinline__ void load_tile(uint32_t tile, const CUtensorMap *map, uint32_t barrier, int token, int head, int batch) {
    mbarrier_arrive_expect(barrier, kBoxes * kBox);
#pragma unroll
    for (int i = 0; i < kBoxes; ++i) tma_load_4d(tile + i * kBox, map, barrier, i * 64, token, head, batch);
}

// The producer thread: Q of a tile, then K one block ahead of V, in the order of use and across tiles.
template <class T>
__device__ __forceinline__ void produce(const Shared<T> &shared, const CUtensorMap *q, const CUtensorMap *k, const CUtensorMap *v, const Problem &p) {
    constexpr int kStages = T::kStages, kQueryStages = T::kQueryStages;
    Walk<T> now(p);
    int value_token = 0, value_head = 0, value_batch = 0;
    uint32_t n = 0;
    auto put_values = [&] {  // of the block before
        const int s = stage_of<kStages>(n - 1);
        mbarrier_wait(shared.value_empty(s), phase_of<kStages>(n - 1) ^ 1);
        load_tile<T::kBoxes, T::kKeyBox>(shared.value + s * T::kKeyBytes, v, shared.value_full(s), value_token, value_head, value_batch);
    };
    for (; now.live; ++n) {
        const int b = now.place.head / p.heads, h = now.place.head - b * p.heads;
        if (now.first) {
            const int s = stage_of<kQueryStages>(now.round);
            mbarrier_wait(shared.query_empty(s), phase_of<kQueryStages>(now.round) ^ 1);
            load_tile<T::kBoxes, T::kQueryBox>(shared.query + s * T::kQueryBytes, q, shared.query_full(s), now.place.row, h, b);
        }
        const int s = stage_of<kStages>(n), token = now.block * T::kKeys, key_head = h / p.queries_per_key_head;
        mbarrier_wait(shared.key_empty(s), phase_of<kStages>(n) ^ 1);
        load_tile<T::kBoxes, T::kKeyBox>(shared.key + s * T::kKeyBytes, k, shared.key_full(s), token, key_head, b);
        if (n > 0) put_values();
        value_token = token, value_head = key_head, value_batch = b;
        now.advance(p);
    }
    put_values();
}

__device__ __forceinline__ half2 as_half2(uint32_t x) { return *reinterpret_cast<const half2 *>(&x); }

// A thread's share of two score rows (lane / 4 and lane / 4 + 8): their references (base-2 units) and sums.
template <class T>
struct Softmax {
    static constexpr int kScores = T::kKeys / 2;
    float top[2], total[2], shrink[2];

    __device__ __forceinline__ void reset() { top[0] = top[1] = -1e30f, total[0] = total[1] = 0.f; }

    // Packed weights against the present references. The sums are taken over the rounded weights (fp16: two at a time), so that the rounding of
    // a dominant key cancels in the division. False if some row grew so far that its weights may overflow.
    template <int kPoly>
    __device__ __forceinline__ bool weigh(const float (&score)[kScores], uint32_t (&p)[kScores / 8][4], float (&sum)[2], float scale) const {
        sum[0] = sum[1] = 0.f;
#pragma unroll
        for (int i = 0; i < kScores / 2; ++i) {
            const float x = __fmaf_rn(score[2 * i], scale, -top[i % 2]), y = __fmaf_rn(score[2 * i + 1], scale, -top[i % 2]);
            const bool by_polynomial = kPoly > 0 && i / 2 % (kPoly > 0 ? kPoly : 1) == 0;  // one of 2 kPoly weights
            p[i / 4][i % 4] = pack<typename T::Element>(exp2_fast(x), by_polynomial ? exp2_polynomial(y) : exp2_fast(y));
            if constexpr (T::kBf16) {
                sum[i % 2] += __uint_as_float(p[i / 4][i % 4] << 16) + __uint_as_float(p[i / 4][i % 4] & 0xffff0000u);
            } else if (i % 4 >= 2) {
                const half2 pair = __hadd2(as_half2(p[i / 4][i % 4]), as_half2(p[i / 4][i % 4 - 2]));
                const float2 added = __half22float2(pair);
                sum[i % 2] += added.x + added.y;
            }
        }
        return sum[0] <= T::kLimit && sum[1] <= T::kLimit;  // false for infinity and NaN too
    }

    // The row maxima, reduced over the quad of lanes that shares the rows.
    __device__ __forceinline__ void raise(const float (&score)[kScores], float scale) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float high = -INFINITY;
#pragma unroll
            for (int j = 0; j < kScores / 4; ++j) high = fmaxf(high, fmaxf(score[4 * j + 2 * i], score[4 * j + 2 * i + 1]));
            high = fmaxf(high, __shfl_xor_sync(~0u, high, 1));
            const float raised = fmaxf(top[i], fmaxf(high, __shfl_xor_sync(~0u, high, 2)) * scale);
            shrink[i] = exp2_fast(top[i] - raised);
            top[i] = raised;
            total[i] *= shrink[i];
        }
    }

    // One block. `exact` takes the maxima at once, else only when they must be raised. True when earlier outputs must shrink.
    __device__ __forceinline__ bool add(const float (&score)[kScores], uint32_t (&p)[kScores / 8][4], float scale, bool exact) {
        float sum[2];
        if (!exact) exact = __any_sync(~0u, !weigh<T::kPoly>(score, p, sum, scale));
        if (exact) {
            raise(score, scale);
            weigh<0>(score, p, sum, scale);
        }
        total[0] += sum[0], total[1] += sum[1];
        return exact;
    }

    // A row without any key gives zeros.
    __device__ __forceinline__ float inverse(int i) const {
        float sum = total[i] + __shfl_xor_sync(~0u, total[i], 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        return sum == 0.f ? 0.f : 1.f / sum;
    }
};

// Takes the keys that a query may not see out of a block: past the end, later than the query, before its window.
template <int kScores>
__device__ __forceinline__ void mask(float (&score)[kScores], const Problem &p, int row, int first_key) {
    int low[2], high[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int query = row + 8 * i;
        high[i] = (p.causal ? min(p.key_tokens, query + 1) : p.key_tokens) - first_key;
        low[i] = (p.window > 0 ? query + 1 - p.window : 0) - first_key;
    }
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
        const int key = i / 4 * 8 + i % 2;
        if (key >= high[i / 2 % 2] || key < low[i / 2 % 2]) score[i] = -INFINITY;
    }
}

// One warpgroup of 64 query rows. Block n uses stage n of both rings, a tile the query stage of its round.
template <class T>
struct Consumer {
    static constexpr int kScores = T::kKeys / 2, kStages = T::kStages, kQueryStages = T::kQueryStages;
    using Weights = uint32_t[T::kKeys / 16][4];  // operands of 16 keys each
    const Shared<T> &shared;
    const Problem &p;
    const int group, warp, lane;
    const bool leader;
    Walk<T> at;
    uint32_t n = 0;  // block `at`
    Softmax<T> softmax;
    float score[kScores], out[T::kDim / 2];

    __device__ __forceinline__ Consumer(const Shared<T> &s, const Problem &problem)
        : shared(s), p(problem), group(threadIdx.x / 128), warp(threadIdx.x % 128 / 32), lane(threadIdx.x % 32), leader(threadIdx.x % 128 == 0), at(problem) {}

    __device__ __forceinline__ void wait_turn() const {
        if constexpr (T::kPingPong) named_barrier_sync(1 + T::kGroups + group, 256);
    }
    __device__ __forceinline__ void pass_turn() const {
        if constexpr (T::kPingPong) named_barrier_arrive(1 + T::kGroups + (group + 1) % T::kGroups, 256);
    }

    // score = Q K^T of block n, asynchronously
    __device__ __forceinline__ void multiply_keys() {
        const int s = stage_of<kStages>(n), query = stage_of<kQueryStages>(at.round);
        if (at.first) mbarrier_wait(shared.query_full(query), phase_of<kQueryStages>(at.round));
        mbarrier_wait(shared.key_full(s), phase_of<kStages>(n));
        const uint64_t q = matrix_descriptor(shared.query + query * T::kQueryBytes + group * 64 * 128, 16, 1024);
        const uint64_t k = matrix_descriptor(shared.key + s * T::kKeyBytes, 16, 1024);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < T::kDim / 16; ++i)
            Wgmma<typename T::Element, T::kKeys>::template ss<0, 0>(score, q + i / 4 * (T::kQueryBox / 16) + i % 4 * 2,
                                                                   k + i / 4 * (T::kKeyBox / 16) + i % 4 * 2, i);
        wgmma_commit();
    }
    // out (+)= P V of block m, asynchronously
    __device__ __forceinline__ void multiply_values(uint32_t m, const Weights &weights, bool accumulate) {
        const int s = stage_of<kStages>(m);
        mbarrier_wait(shared.value_full(s), phase_of<kStages>(m));
        const uint64_t v = matrix_descriptor(shared.value + s * T::kKeyBytes, T::kKeyBox, 1024);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < T::kKeys / 16; ++i) Wgmma<typename T::Element, T::kDim>::template rs<1>(out, weights[i], v + i * 128, i || accumulate);
        wgmma_commit();
    }
    __device__ __forceinline__ void release_keys() {
        if (!leader) return;
        mbarrier_arrive(shared.key_empty(stage_of<kStages>(n)));
        if (at.last()) mbarrier_arrive(shared.query_empty(stage_of<kQueryStages>(at.round)));
    }
    // Weights of the block whose scores have arrived. True when earlier outputs of the same tile must shrink.
    __device__ __forceinline__ bool weigh(Weights &weights) {
        const int row = at.place.row + group * 64, first_key = at.block * T::kKeys, end = first_key + T::kKeys;
        const bool masked = end > p.key_tokens || (p.causal && end > row + 1) || (p.window > 0 && first_key < row + 64 - p.window);
        if (masked) mask(score, p, row + warp * 16 + lane / 4, first_key + lane % 4 * 2);
        return softmax.add(score, weights, p.scale, masked || at.first);
    }

    // Block n begins while block n - 1 ends.
    __device__ __forceinline__ void step(Weights &weights, Weights &fresh, bool accumulate, const CUtensorMap *map) {
        wait_turn();
        multiply_keys();
        multiply_values(n - 1, weights, accumulate);
        pass_turn();
        wgmma_wait<1>();  // the scores are there; the values of the block before are still being added
        pin(score);
        release_keys();
        float inverse[2];
        if (at.first) {
            inverse[0] = softmax.inverse(0), inverse[1] = softmax.inverse(1);
            softmax.reset();
        }
        const bool shrink = weigh(fresh);  // under the product of the block before
        wgmma_wait<0>();
        pin(out);
#pragma unroll
        for (int i = 0; i < T::kKeys / 16; ++i) pin(weights[i]);  // until here its registers were being read
        if (leader) mbarrier_arrive(shared.value_empty(stage_of<kStages>(n - 1)));
        if (at.first) {
            store(at.round - 1, inverse, map);
        } else if (shrink) {
#pragma unroll
            for (int i = 0; i < T::kDim / 2; ++i) out[i] *= softmax.shrink[i / 2 % 2];
        }
    }

    // Outputs through shared memory; rows past the end are not written.
    __device__ __forceinline__ void store(int round, const float (&inverse)[2], const CUtensorMap *map) const {
        const uint32_t buffer = shared.staging + group * T::kStoreBoxes * 8192, row = warp * 16 + lane % 16;
#pragma unroll
        for (int box = 0; box < T::kBoxes; box += T::kStoreBoxes) {
            if (leader) bulk_wait_read<0>();  // what was stored before has left the staging area
            named_barrier_sync(1 + group, 128);
#pragma unroll
            for (int i = 0; i < T::kStoreBoxes * 8; i += 2) {
                const float *x = out + box * 32 + 4 * i;
                stmatrix_x4(buffer + i / 8 * 8192 + row * 128 + ((i % 8 + lane / 16) ^ row % 8) * 16,
                            pack<typename T::Element>(x[0] * inverse[0], x[1] * inverse[0]), pack<typename T::Element>(x[2] * inverse[1], x[3] * inverse[1]),
                            pack<typename T::Element>(x[4] * inverse[0], x[5] * inverse[0]), pack<typename T::Element>(x[6] * inverse[1], x[7] * inverse[1]));
            }
            fence_async_shared();
            named_barrier_sync(1 + group, 128);
            if (!leader) continue;
            Place to;
            find<T>(p, round, to);
            const int b = to.head / p.heads, h = to.head - b * p.heads;
#pragma unroll
            for (int i = 0; i < T::kStoreBoxes; ++i) tma_store_4d(map, buffer + i * 8192, (box + i) * 64, to.row + group * 64, h, b);
            bulk_commit();
        }
    }

    __device__ __forceinline__ void run(const CUtensorMap *map) {
        Weights even, odd;
        if (T::kPingPong && group == T::kGroups - 1) pass_turn();
        wait_turn();
        multiply_keys();
        pass_turn();
        wgmma_wait<0>();
        pin(score);
        release_keys();
        softmax.reset();
        weigh(even);
        for (;;) {  // two blocks a turn, so that the weights change places without being copied
            bool accumulate = !at.first;
            ++n, at.advance(p);
            if (!at.live) return finish(even, accumulate, map);
            step(even, odd, accumulate, map);
            accumulate = !at.first;
            ++n, at.advance(p);
            if (!at.live) return finish(odd, accumulate, map);
            step(odd, even, accumulate, map);
        }
    }
    __device__ __forceinline__ void finish(const Weights &weights, bool accumulate, const CUtensorMap *map) {
        multiply_values(n - 1, weights, accumulate);
        const float inverse[2] = {softmax.inverse(0), softmax.inverse(1)};
        wgmma_wait<0>();
        pin(out);
        store(at.round - 1, inverse, map);
        bulk_wait<0>();
    }
};

template <class T>
__global__ void __launch_bounds__(T::kThreads, 1)
attention(const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k, const __grid_constant__ CUtensorMap map_v,
          const __grid_constant__ CUtensorMap map_o, const __grid_constant__ Problem problem) {
    extern __shared__ uint8_t smem[];
    const Shared<T> shared(smem_address(smem));
    if (threadIdx.x == 0) {
        for (int s = 0; s < T::kQueryStages; ++s) mbarrier_init(shared.query_full(s), 1), mbarrier_init(shared.query_empty(s), T::kGroups);
        for (int s = 0; s < T::kStages; ++s) {
            mbarrier_init(shared.key_full(s), 1), mbarrier_init(shared.value_full(s), 1);
            mbarrier_init(shared.key_empty(s), T::kGroups), mbarrier_init(shared.value_empty(s), T::kGroups);
        }
        fence_mbarrier_init();
    }
    __syncthreads();
    if (threadIdx.x >= 128 * T::kGroups) {
        if constexpr (T::kGroups == 2) registers_decrease<24>();
        else registers_decrease<32>();
        if (threadIdx.x == 128 * T::kGroups) produce<T>(shared, &map_q, &map_k, &map_v, problem);
    } else {
        if constexpr (T::kGroups == 2) registers_increase<240>();
        else registers_increase<160>();
        Consumer<T>(shared, problem).run(&map_o);
    }
}
