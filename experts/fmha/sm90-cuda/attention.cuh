// One persistent kernel for attention forward: any head dimension, type and tile of `Tile`, masks by run-time ranges of keys.
#pragma once
#include <type_traits>

#include "klineage/sm90/v1/mbarrier.cuh"
#include "klineage/sm90/v1/tma.cuh"
#include "softmax.cuh"

using namespace klineage::sm90;

// Warpgroups ask for products in turns; sums over weights before they are rounded.
constexpr int kPlain = 0, kTurns = 1, kLoose = 2;

// What is fixed when the kernel is compiled. Every group is a warpgroup of 64 query rows.
template <class Element_, int kDim_, int kGroups_, int kKeys_, int kOptions>
struct Tile {
    using Element = Element_;
    static constexpr bool kBf16 = std::is_same_v<Element, __nv_bfloat16>;
    static constexpr bool kPingPong = kOptions & kTurns, kLooseSums = kOptions & kLoose;
    static constexpr int kDim = kDim_, kGroups = kGroups_, kKeys = kKeys_;
    static constexpr int kRows = 64 * kGroups, kThreads = 128 * (kGroups + 1), kBoxes = kDim / 64;
    static constexpr int kStages = kDim > 64 ? 2 : kKeys <= 128 ? 4 : 3, kQueryStages = kDim <= 128 ? 2 : 1;
    static constexpr int kQueryBox = kRows * 128, kKeyBox = kKeys * 128, kQueryBytes = kBoxes * kQueryBox, kKeyBytes = kBoxes * kKeyBox;
    static constexpr int kStoreBoxes = kBoxes < 2 ? kBoxes : 2;  // 64x64 boxes of a group that are staged at once
    static constexpr int kStagingBytes = kGroups * kStoreBoxes * 8192;
    static constexpr int kBarriers = 2 * kQueryStages + 4 * kStages;
    static constexpr int kSharedBytes = 1024 + kQueryStages * kQueryBytes + 2 * kStages * kKeyBytes + kStagingBytes + 8 * kBarriers;
    static_assert(kSharedBytes <= 232448);
    static constexpr float kLimit = kBf16 ? 2.8147498e14f : 32768.f;  // of one thread's weights in a row of a block: below fp16's 65504; 2^48
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
    Walk<T::kRows, T::kKeys> now(p);
    int b = 0, key_head = 0, value_token = 0, value_head = 0, value_batch = 0;
    uint32_t n = 0;
    auto put_values = [&] {  // of the block before
        const int s = stage_of<kStages>(n - 1);
        mbarrier_wait(shared.value_empty(s), phase_of<kStages>(n - 1) ^ 1);
        load_tile<T::kBoxes, T::kKeyBox>(shared.value + s * T::kKeyBytes, v, shared.value_full(s), value_token, value_head, value_batch);
    };
    for (; now.live; ++n) {
        if (now.first) {
            b = p.by_heads(now.place.head);
            const int h = now.place.head - b * p.heads, s = stage_of<kQueryStages>(now.round);
            key_head = p.by_queries_per_key_head(h);
            mbarrier_wait(shared.query_empty(s), phase_of<kQueryStages>(now.round) ^ 1);
            load_tile<T::kBoxes, T::kQueryBox>(shared.query + s * T::kQueryBytes, q, shared.query_full(s), now.place.row, h, b);
        }
        const int s = stage_of<kStages>(n), token = now.first_key();
        mbarrier_wait(shared.key_empty(s), phase_of<kStages>(n) ^ 1);
        load_tile<T::kBoxes, T::kKeyBox>(shared.key + s * T::kKeyBytes, k, shared.key_full(s), token, key_head, b);
        if (n > 0) put_values();
        value_token = token, value_head = key_head, value_batch = b;
        now.advance(p);
    }
    put_values();
}

// A matrix descriptor (128-byte swizzle, groups of 8 rows 1024 bytes apart) that the compiler knows to be one of the warp: its steps are taken in
// uniform registers. Else every product waits for a copy between the register files, which products of 64 columns are too short to hide.
struct Operand {
    uint32_t low;

    __device__ __forceinline__ Operand(uint32_t address, uint32_t leading_bytes)
        : low(__shfl_sync(~0u, (address & 0x3ffff) >> 4 | leading_bytes >> 4 << 16, 0)) {}
    __device__ __forceinline__ uint64_t at(uint32_t bytes) const { return uint64_t(low + bytes / 16) | uint64_t(1024 >> 4 | 1 << 30) << 32; }
};

// After the wait for a product: until there its operands were being read.
template <int kCount>
__device__ __forceinline__ void pin_all(uint32_t (&weights)[kCount][4]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) pin(weights[i]);
}

// What a warpgroup of 64 query rows does with a block. Block n uses stage n of both rings, a tile the query stage of its round.
template <class T>
struct Consumer {
    static constexpr int kScores = T::kKeys / 2, kStages = T::kStages, kQueryStages = T::kQueryStages;
    using Scores = float[kScores];
    using Weights = uint32_t[T::kKeys / 16][4];  // operands of 16 keys each
    using Place = Walk<T::kRows, T::kKeys>;
    const Shared<T> &shared;
    const Problem &p;
    const CUtensorMap *const map_o;
    const int group, warp, lane;
    const bool leader;
    Softmax<T> softmax;
    float out[T::kDim / 2];

    __device__ __forceinline__ Consumer(const Shared<T> &s, const Problem &problem, const CUtensorMap *map)
        : shared(s), p(problem), map_o(map), group(threadIdx.x / 128), warp(threadIdx.x % 128 / 32), lane(threadIdx.x % 32), leader(threadIdx.x % 128 == 0) {}

    __device__ __forceinline__ int row(const Place &at) const { return at.place.row + group * 64; }  // the group's first
    // score = Q K^T of block n, asynchronously. Past the end it multiplies what lies there.
    __device__ __forceinline__ void multiply_keys(Scores &score, uint32_t n, const Place &at) const {
        const int s = stage_of<kStages>(n), query = stage_of<kQueryStages>(at.round);
        const Operand q(shared.query + query * T::kQueryBytes + group * 64 * 128, 16), k(shared.key + s * T::kKeyBytes, 16);
        if (at.live) {
            if (at.first) mbarrier_wait(shared.query_full(query), phase_of<kQueryStages>(at.round));
            mbarrier_wait(shared.key_full(s), phase_of<kStages>(n));
        }
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < T::kDim / 16; ++i)
            Wgmma<typename T::Element, T::kKeys>::template ss<0, 0>(score, q.at(i / 4 * T::kQueryBox + i % 4 * 32), k.at(i / 4 * T::kKeyBox + i % 4 * 32), i);
        wgmma_commit();
    }
    // out (+)= P V of block n, asynchronously
    __device__ __forceinline__ void multiply_values(uint32_t n, const Weights &weights, bool accumulate) {
        const int s = stage_of<kStages>(n);
        const Operand v(shared.value + s * T::kKeyBytes, T::kKeyBox);
        mbarrier_wait(shared.value_full(s), phase_of<kStages>(n));
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < T::kKeys / 16; ++i) Wgmma<typename T::Element, T::kDim>::template rs<1>(out, weights[i], v.at(i * 2048), i || accumulate);
        wgmma_commit();
    }
    __device__ __forceinline__ void release_keys(uint32_t n, const Place &at) const {
        if (!leader) return;
        mbarrier_arrive(shared.key_empty(stage_of<kStages>(n)));
        if (at.last()) mbarrier_arrive(shared.query_empty(stage_of<kQueryStages>(at.round)));
    }
    __device__ __forceinline__ void release_values(uint32_t n) const {
        if (leader) mbarrier_arrive(shared.value_empty(stage_of<kStages>(n)));
    }
    // Weights of a block whose scores have arrived. True when earlier outputs of the same tile must shrink.
    __device__ __forceinline__ bool weigh(Scores &score, Weights &weights, const Place &at) {
        const int end = at.first_key() + T::kKeys;
        const bool masked = end > p.key_tokens || (p.causal && end > row(at) + 1) || (p.window > 0 && at.first_key() < row(at) + 64 - p.window);
        if (masked) mask(score, p, row(at) + warp * 16 + lane / 4, at.first_key() + lane % 4 * 2);
        return softmax.add(score, weights, p.scale, masked || at.first);
    }
    __device__ __forceinline__ void shrink() {
#pragma unroll
        for (int i = 0; i < T::kDim / 2; ++i) out[i] *= softmax.shrink[i / 2 % 2];
    }
    // Outputs of a round's tile through shared memory; rows past the end are not written.
    __device__ __forceinline__ void store(int round, const float (&inverse)[2]) const {
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
            ::Place to;
            find<T::kRows>(p, round, to);
            const int b = p.by_heads(to.head), h = to.head - b * p.heads;
#pragma unroll
            for (int i = 0; i < T::kStoreBoxes; ++i) tma_store_4d(map_o, buffer + i * 8192, (box + i) * 64, to.row + group * 64, h, b);
            bulk_commit();
        }
    }
};

// Block n begins while block n - 1 ends: the softmax of n runs under the value product of n - 1.
template <class T>
struct Overlapped : Consumer<T> {
    using Base = Consumer<T>;
    using typename Base::Weights;
    using Base::group, Base::softmax, Base::p;
    Walk<T::kRows, T::kKeys> at;
    uint32_t n = 0;  // block `at`
    float score[T::kKeys / 2];

    __device__ __forceinline__ Overlapped(const Shared<T> &s, const Problem &problem, const CUtensorMap *map) : Base(s, problem, map), at(problem) {}

    __device__ __forceinline__ void wait_turn() const {
        if constexpr (T::kPingPong) named_barrier_sync(1 + T::kGroups + group, 256);
    }
    __device__ __forceinline__ void pass_turn() const {
        if constexpr (T::kPingPong) named_barrier_arrive(1 + T::kGroups + (group + 1) % T::kGroups, 256);
    }
    __device__ __forceinline__ void step(Weights &weights, Weights &fresh, bool accumulate) {
        wait_turn();
        this->multiply_keys(score, n, at);
        this->multiply_values(n - 1, weights, accumulate);
        pass_turn();
        wgmma_wait<1>();  // the scores are there; the values of the block before are still being added
        pin(score);
        this->release_keys(n, at);
        float inverse[2];
        if (at.first) {
            inverse[0] = softmax.inverse(0), inverse[1] = softmax.inverse(1);
            softmax.reset();
        }
        const bool shrink = this->weigh(score, fresh, at);
        wgmma_wait<0>();
        pin(this->out);
        pin_all(weights);
        this->release_values(n - 1);
        if (at.first) this->store(at.round - 1, inverse);
        else if (shrink) this->shrink();
    }
    __device__ __forceinline__ void run() {
        Weights even, odd;
        if (T::kPingPong && group == T::kGroups - 1) pass_turn();
        wait_turn();
        this->multiply_keys(score, n, at);
        pass_turn();
        wgmma_wait<0>();
        pin(score);
        this->release_keys(n, at);
        softmax.reset();
        this->weigh(score, even, at);
        for (;;) {  // two blocks a turn, so that the weights change places without being copied
            bool accumulate = !at.first;
            ++n, at.advance(p);
            if (!at.live) return finish(even, accumulate);
            step(even, odd, accumulate);
            accumulate = !at.first;
            ++n, at.advance(p);
            if (!at.live) return finish(odd, accumulate);
            step(odd, even, accumulate);
        }
    }
    __device__ __forceinline__ void finish(const Weights &weights, bool accumulate) {
        this->multiply_values(n - 1, weights, accumulate);
        const float inverse[2] = {softmax.inverse(0), softmax.inverse(1)};
        wgmma_wait<0>();
        pin(this->out);
        this->store(at.round - 1, inverse);
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
        Overlapped<T>(shared, problem, &map_o).run();
    }
}
