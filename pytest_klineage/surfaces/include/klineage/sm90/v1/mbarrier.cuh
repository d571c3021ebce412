// Barriers of sm_90: mbarriers in shared memory, named barriers of a CTA, and the proxy fence. Frozen: version 1.
//
// Addresses are 32-bit shared-memory addresses (smem_address). An mbarrier is 8 bytes, 8-byte aligned. A wait names the
// parity of the phase that it waits for: a fresh barrier is in phase 0, so wait(b, 0) blocks until the first phase is
// complete and wait(b, 1) returns at once (how a producer finds an empty ring).
#ifndef KLINEAGE_SM90_V1_MBARRIER_CUH
#define KLINEAGE_SM90_V1_MBARRIER_CUH

#include <cstdint>

namespace klineage {
namespace sm90 {
inline namespace v1 {

__device__ __forceinline__ uint32_t smem_address(const void *pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// One thread. `arrivals` of a phase: 1 to 2^20 - 1. Others may use it after fence_mbarrier_init and a CTA or cluster barrier.
__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// The thread that initialised: makes the barriers visible to the copy engine and to the other CTAs of the cluster.
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// One thread; nobody uses the barrier any more. Its memory may then hold something else.
__device__ __forceinline__ void mbarrier_invalidate(uint32_t barrier) {
    asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
// Any thread: one arrival at a barrier of its own CTA, with release semantics in the CTA.
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// One arrival that also announces `bytes` of asynchronous copies, before the copies are started: the phase is complete
// when all arrivals and all announced bytes are there. Bytes outside a tensor count: they are filled with zeros.
__device__ __forceinline__ void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Announces bytes without arriving.
__device__ __forceinline__ void mbarrier_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// One arrival at the barrier at the same address in CTA `cta` of the cluster. That CTA must not have ended. The default
// form: .release.cluster costs a fence for each arrival, and finished reads by wgmma or TMA need none.
__device__ __forceinline__ void mbarrier_arrive_at(uint32_t barrier, uint32_t cta) {
    asm volatile("{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [remote]; }" ::"r"(barrier), "r"(cta) : "memory");
}
// The same for an address that map_to_cta (cluster.cuh) has made: no mapa for each arrival.
__device__ __forceinline__ void mbarrier_arrive_mapped(uint32_t mapped_barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(mapped_barrier) : "memory");
}
// The same under a predicate, without a branch.
__device__ __forceinline__ void mbarrier_arrive_mapped_if(uint32_t mapped_barrier, uint32_t condition) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %1, 0;\n@p mbarrier.arrive.shared::cluster.b64 _, [%0]; }"
                 ::"r"(mapped_barrier), "r"(condition) : "memory");
}
// An arrival after writes to that CTA's shared memory by ordinary stores: releases them to the cluster.
__device__ __forceinline__ void mbarrier_arrive_mapped_release(uint32_t mapped_barrier) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(mapped_barrier) : "memory");
}
// Whether the phase of that parity is complete; may suspend the thread for a time that the hardware chooses.
__device__ __forceinline__ bool mbarrier_try_wait(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p; }"
                 : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    return done != 0;
}
// Every thread that reads what the phase brings in (or one, before a barrier that the others pass). Acquires in the CTA.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
    asm volatile("{ .reg .pred done;\n"
                 "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again; }" ::"r"(barrier), "r"(parity) : "memory");
}
// The same after arrivals of other CTAs that released ordinary stores: acquires in the cluster.
__device__ __forceinline__ void mbarrier_wait_cluster(uint32_t barrier, uint32_t parity) {
    asm volatile("{ .reg .pred done;\n"
                 "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again; }" ::"r"(barrier), "r"(parity) : "memory");
}

// Named barrier `id` (1 to 15; 0 is __syncthreads) of `threads` threads, a multiple of 32; whole warps.
__device__ __forceinline__ void named_barrier_sync(uint32_t id, uint32_t threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// Arrives without waiting; `threads` counts those that arrive and those that sync.
__device__ __forceinline__ void named_barrier_arrive(uint32_t id, uint32_t threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Each thread that wrote shared memory by ordinary stores (stmatrix, cp.async too) which wgmma or TMA reads next: before
// the barrier at which the reader learns of it.
__device__ __forceinline__ void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// The same for global memory that this thread wrote and that a TMA load reads, or the other way round.
__device__ __forceinline__ void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// One thread of a converged warp, the same one every time.
__device__ __forceinline__ bool elect_one() {
    uint32_t chosen;
    asm volatile("{ .reg .pred one; elect.sync _|one, 0xffffffff;\nselp.u32 %0, 1, 0, one; }" : "=r"(chosen));
    return chosen != 0;
}

}  // namespace v1
}  // namespace sm90
}  // namespace klineage
#endif
