// The copy engine of sm_90: tensor (TMA) and plain bulk copies, stores, reductions and prefetches. Frozen: version 1.
//
// One thread starts a copy. Shared-memory sides are 128-byte aligned (1024 with 128-byte swizzle), plain bulk copies
// 16-byte aligned and a multiple of 16 bytes. A load counts its bytes at an mbarrier that has announced them
// (mbarrier_arrive_expect); the address must be free: the last readers have passed a barrier. A store reads shared memory
// that every writer has fenced (fence_async_shared) before a barrier; it belongs to the bulk group that the same thread
// commits next. Coordinates are elements, innermost first, and may lie outside: loads fill zeros, stores write nothing.
// The map is a __grid_constant__ parameter, or in global or constant memory, 64-byte aligned.
#ifndef KLINEAGE_SM90_V1_TMA_CUH
#define KLINEAGE_SM90_V1_TMA_CUH

#include <cuda.h>

#include <cstdint>

namespace klineage {
namespace sm90 {
inline namespace v1 {

// For dimension D, with its coordinates as parameters X, as operands C, and as text from operand 2, 3 or 4 on:
//   tma_load_Dd            one box to this CTA (or to a mapped address with a mapped barrier)
//   tma_load_Dd_hint       with an L2 policy (l2_evict_first, l2_evict_last)
//   tma_load_Dd_multicast  the box lands at the same address, and counts at the same barrier, in every CTA of the mask
//   tma_store_Dd, tma_reduce_add_Dd   a box to global memory, or added to it (type of the map)
//   tma_prefetch_Dd        a box to the L2 cache
#define KLINEAGE_TMA(D, X, C, FROM_1, FROM_2, FROM_3, FROM_4)                                                              \
    __device__ __forceinline__ void tma_load_##D##d(uint32_t to, const CUtensorMap *map, uint32_t barrier, X) {            \
        asm volatile("cp.async.bulk.tensor." #D "d.shared::cluster.global.mbarrier::complete_tx::bytes"                    \
                     " [%0], [%1, {" FROM_3 "}], [%2];" ::"r"(to), "l"(map), "r"(barrier), C : "memory");                  \
    }                                                                                                                      \
    __device__ __forceinline__ void tma_load_##D##d_hint(uint32_t to, const CUtensorMap *map, uint32_t barrier, X,         \
                                                         uint64_t policy) {                                                \
        asm volatile("cp.async.bulk.tensor." #D "d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"     \
                     " [%0], [%1, {" FROM_4 "}], [%2], %3;" ::"r"(to), "l"(map), "r"(barrier), "l"(policy), C : "memory"); \
    }                                                                                                                      \
    __device__ __forceinline__ void tma_load_##D##d_multicast(uint32_t to, const CUtensorMap *map, uint32_t barrier, X,    \
                                                              uint16_t ctas) {                                             \
        asm volatile("cp.async.bulk.tensor." #D "d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster" \
                     " [%0], [%1, {" FROM_4 "}], [%2], %3;" ::"r"(to), "l"(map), "r"(barrier), "h"(ctas), C : "memory");   \
    }                                                                                                                      \
    __device__ __forceinline__ void tma_store_##D##d(const CUtensorMap *map, uint32_t from, X) {                           \
        asm volatile("cp.async.bulk.tensor." #D "d.global.shared::cta.bulk_group [%0, {" FROM_2 "}], [%1];"                \
                     ::"l"(map), "r"(from), C : "memory");                                                                 \
    }                                                                                                                      \
    __device__ __forceinline__ void tma_reduce_add_##D##d(const CUtensorMap *map, uint32_t from, X) {                      \
        asm volatile("cp.reduce.async.bulk.tensor." #D "d.global.shared::cta.add.tile.bulk_group [%0, {" FROM_2 "}], [%1];" \
                     ::"l"(map), "r"(from), C : "memory");                                                                 \
    }                                                                                                                      \
    __device__ __forceinline__ void tma_prefetch_##D##d(const CUtensorMap *map, X) {                                       \
        asm volatile("cp.async.bulk.prefetch.tensor." #D "d.L2.global.tile [%0, {" FROM_1 "}];" ::"l"(map), C : "memory"); \
    }
#define KLINEAGE_X1 int x
#define KLINEAGE_X2 int x, int y
#define KLINEAGE_X3 int x, int y, int z
#define KLINEAGE_X4 int x, int y, int z, int w
#define KLINEAGE_X5 int x, int y, int z, int w, int v
#define KLINEAGE_C1 "r"(x)
#define KLINEAGE_C2 "r"(x), "r"(y)
#define KLINEAGE_C3 "r"(x), "r"(y), "r"(z)
#define KLINEAGE_C4 "r"(x), "r"(y), "r"(z), "r"(w)
#define KLINEAGE_C5 "r"(x), "r"(y), "r"(z), "r"(w), "r"(v)
KLINEAGE_TMA(1, KLINEAGE_X1, KLINEAGE_C1, "%1", "%2", "%3", "%4")
KLINEAGE_TMA(2, KLINEAGE_X2, KLINEAGE_C2, "%1, %2", "%2, %3", "%3, %4", "%4, %5")
KLINEAGE_TMA(3, KLINEAGE_X3, KLINEAGE_C3, "%1, %2, %3", "%2, %3, %4", "%3, %4, %5", "%4, %5, %6")
KLINEAGE_TMA(4, KLINEAGE_X4, KLINEAGE_C4, "%1, %2, %3, %4", "%2, %3, %4, %5", "%3, %4, %5, %6", "%4, %5, %6, %7")
KLINEAGE_TMA(5, KLINEAGE_X5, KLINEAGE_C5, "%1, %2, %3, %4, %5", "%2, %3, %4, %5, %6", "%3, %4, %5, %6, %7", "%4, %5, %6, %7, %8")

// im2col loads of an NHWC tensor (map of encode_im2col): pixels from (w, h, n) on, in the bounding box's order, of channels c
// on; (offset_w, offset_h) is the filter tap. Bytes: channels per pixel times pixels per column.
__device__ __forceinline__ void tma_load_im2col_4d(uint32_t to, const CUtensorMap *map, uint32_t barrier, int c, int w, int h,
                                                   int n, uint16_t offset_w, uint16_t offset_h) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8};"
                 ::"r"(to), "l"(map), "r"(barrier), "r"(c), "r"(w), "r"(h), "r"(n), "h"(offset_w), "h"(offset_h) : "memory");
}
__device__ __forceinline__ void tma_load_im2col_4d_multicast(uint32_t to, const CUtensorMap *map, uint32_t barrier, int c,
                                                             int w, int h, int n, uint16_t offset_w, uint16_t offset_h,
                                                             uint16_t ctas) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes.multicast::cluster"
                 " [%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8}, %9;" ::"r"(to), "l"(map), "r"(barrier), "r"(c), "r"(w),
                 "r"(h), "r"(n), "h"(offset_w), "h"(offset_h), "h"(ctas) : "memory");
}
__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap *map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Plain bulk copies: global to shared, shared to global, shared to another CTA's shared memory (mapped; its barrier too).
__device__ __forceinline__ void bulk_load(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
__device__ __forceinline__ void bulk_load_multicast(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier,
                                                    uint16_t ctas) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "h"(ctas) : "memory");
}
__device__ __forceinline__ void bulk_store(void *to, uint32_t from, uint32_t bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void bulk_reduce_add_float(float *to, uint32_t from, uint32_t bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
                 ::"l"(to), "r"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void bulk_copy_cluster(uint32_t mapped_to, uint32_t from, uint32_t bytes, uint32_t mapped_barrier) {
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(mapped_to), "r"(from), "r"(bytes), "r"(mapped_barrier) : "memory");
}
__device__ __forceinline__ void bulk_prefetch_l2(const void *from, uint32_t bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

// The thread that started stores: closes a group of them.
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until at most kPending groups of this thread still read shared memory (then it may be overwritten; also before the exit).
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
// Until at most kPending groups of this thread are not complete (then their writes are visible to this thread).
template <int kPending>
__device__ __forceinline__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory"); }

// Policies for the _hint forms.
__device__ __forceinline__ uint64_t l2_evict_first() {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
__device__ __forceinline__ uint64_t l2_evict_last() {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

#undef KLINEAGE_TMA
#undef KLINEAGE_X1
#undef KLINEAGE_X2
#undef KLINEAGE_X3
#undef KLINEAGE_X4
#undef KLINEAGE_X5
#undef KLINEAGE_C1
#undef KLINEAGE_C2
#undef KLINEAGE_C3
#undef KLINEAGE_C4
#undef KLINEAGE_C5
}  // namespace v1
}  // namespace sm90
}  // namespace klineage
#endif
