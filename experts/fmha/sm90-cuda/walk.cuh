// Which tiles of query rows and blocks of keys a CTA works on, and in which order.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

// Division of 0 <= n < 2^31 by a number that the host knows, 1 <= d < 2^31.
struct Divider {
    uint32_t factor = 0, shift = 0;  // no factor: 1

    Divider() = default;
    explicit Divider(uint32_t d) {
        if (d == 1) return;
        uint32_t bits = 1;
        while (d > 1u << bits) ++bits;
        factor = uint32_t(((uint64_t(1) << (31 + bits)) + d - 1) / d), shift = bits - 1;
    }
    __device__ __forceinline__ int operator()(int n) const { return factor == 0 ? n : int(__umulhi(uint32_t(n), factor) >> shift); }
};

struct Problem {
    int heads, queries_per_key_head, query_tokens, key_tokens;
    int row_tiles, tiles, heads_of_all;
    int sections, section_heads, last_heads;  // heads whose keys and values stay in the L2 together; no sections: one head after the other
    int window;                               // keys that a query sees, itself included; 0: all
    bool causal;
    float scale;  // base-2 units
    Divider by_heads, by_queries_per_key_head, by_row_tiles, by_section_tiles, by_section_heads, by_last_heads;
};

// A tile of query rows.
struct Place {
    int row, head;  // head: of all batch entries
};

// Tile of this CTA in a round. In sections the length of rows falls and rises in turns, so that it changes slowly from tile to tile and ends with
// the shortest; rounds go alternately up and down, so that no CTA has the longer tile of every round.
template <int kRows>
__device__ __forceinline__ bool find(const Problem &p, int round, Place &place) {
    const int cta = round & 1 ? int(gridDim.x) - 1 - int(blockIdx.x) : int(blockIdx.x), t = round * int(gridDim.x) + cta;
    if (t >= p.tiles) return false;
    int m;
    if (p.sections == 0) {
        place.head = p.by_row_tiles(t), m = t - place.head * p.row_tiles;
    } else {
        const int s = p.by_section_tiles(t), u = t - s * p.section_heads * p.row_tiles;
        const bool last = s == p.sections - 1;
        const int turn = last ? p.by_last_heads(u) : p.by_section_heads(u), width = last ? p.last_heads : p.section_heads;
        m = (p.sections - s) % 2 ? p.row_tiles - 1 - turn : turn, place.head = s * p.section_heads + u - turn * width;
    }
    place.row = m * kRows;
    return true;
}

// The blocks of one CTA in the order of their use: tile after tile, in each from the last block of keys to the first.
template <int kRows, int kKeys>
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
    __device__ __forceinline__ int first_key() const { return block * kKeys; }
    __device__ __forceinline__ void enter(const Problem &p) {
        live = find<kRows>(p, round, place);
        const int end = p.causal ? min(p.key_tokens, place.row + kRows) : p.key_tokens;
        block = (end + kKeys - 1) / kKeys - 1;
        lowest = p.window > 0 ? max(0, place.row + 1 - p.window) / kKeys : 0;
    }
};
