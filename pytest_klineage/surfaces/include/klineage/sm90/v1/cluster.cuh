// Clusters of sm_90: ranks, barriers, other CTAs' shared memory; and dependent launches. Frozen: version 1.
#ifndef KLINEAGE_SM90_V1_CLUSTER_CUH
#define KLINEAGE_SM90_V1_CLUSTER_CUH

#include <cstdint>

namespace klineage {
namespace sm90 {
inline namespace v1 {

// Rank of this CTA in its cluster, 0 to cluster_size() - 1.
__device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ __forceinline__ uint32_t cluster_size() {
    uint32_t size;
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    return size;
}

// Every thread of every CTA of the cluster. Releases and acquires ordinary stores, also to other CTAs' shared memory.
// Needed before the first access to another CTA (it may not run yet) and before the exit (nobody may access it after).
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// A barrier that orders no data, without the fence that a release costs: enough after fence_mbarrier_init at the start, and
// at the end when everything read from other CTAs has been used.
__device__ __forceinline__ void cluster_arrive_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_sync_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// cluster_sync for warps that have diverged.
__device__ __forceinline__ void cluster_sync_unaligned() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// The shared::cluster address of the same place in CTA `cta`.
__device__ __forceinline__ uint32_t map_to_cta(uint32_t address, uint32_t cta) {
    uint32_t mapped;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(cta));
    return mapped;
}
// Ordinary accesses at a mapped address, aligned to their size; ordered by cluster_sync or an mbarrier that releases.
__device__ __forceinline__ uint32_t load_cluster(uint32_t mapped) {
    uint32_t value;
    asm volatile("ld.shared::cluster.b32 %0, [%1];" : "=r"(value) : "r"(mapped) : "memory");
    return value;
}
__device__ __forceinline__ float load_cluster_float(uint32_t mapped) { return __uint_as_float(load_cluster(mapped)); }
__device__ __forceinline__ uint4 load_cluster_x4(uint32_t mapped) {
    uint4 value;
    asm volatile("ld.shared::cluster.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w) : "r"(mapped) : "memory");
    return value;
}
__device__ __forceinline__ void store_cluster(uint32_t mapped, uint32_t value) {
    asm volatile("st.shared::cluster.b32 [%0], %1;" ::"r"(mapped), "r"(value) : "memory");
}
__device__ __forceinline__ void store_cluster_x4(uint32_t mapped, uint4 value) {
    asm volatile("st.shared::cluster.v4.b32 [%0], {%1, %2, %3, %4};"
                 ::"r"(mapped), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w) : "memory");
}
// Atomic additions at a mapped address; the second returns the value before.
__device__ __forceinline__ void reduce_cluster_add(uint32_t mapped, uint32_t value) {
    asm volatile("red.relaxed.cluster.shared::cluster.add.u32 [%0], %1;" ::"r"(mapped), "r"(value) : "memory");
}
__device__ __forceinline__ uint32_t atomic_cluster_add(uint32_t mapped, uint32_t value) {
    uint32_t before;
    asm volatile("atom.relaxed.cluster.shared::cluster.add.u32 %0, [%1], %2;"
                 : "=r"(before) : "r"(mapped), "r"(value) : "memory");
    return before;
}
// Stores that count 4 or 16 bytes at an mbarrier of the CTA that they go to (both addresses mapped to it); that CTA has
// announced the bytes, and reads after its wait.
__device__ __forceinline__ void store_async(uint32_t mapped, uint32_t value, uint32_t mapped_barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];"
                 ::"r"(mapped), "r"(value), "r"(mapped_barrier) : "memory");
}
__device__ __forceinline__ void store_async_x4(uint32_t mapped, uint4 value, uint32_t mapped_barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];"
                 ::"r"(mapped), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(mapped_barrier) : "memory");
}

// A kernel launched with programmatic stream serialization: before its first read of what the kernel before it wrote.
__device__ __forceinline__ void grid_dependency_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// The kernel before it: from here on, once every CTA has said so or ended, the next kernel may start.
__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

}  // namespace v1
}  // namespace sm90
}  // namespace klineage
#endif
