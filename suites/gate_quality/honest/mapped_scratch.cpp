// id: C2
// mechanism: maps scratch memory in every call, asks for huge pages, and unmaps it
// case: gemm 48x40x56 fp32
// expect: scored
// source: written for this set
#include "honest.h"
#include <sys/mman.h>

extern "C" int run(const klineage_call *call) {
    const honest::Gemm gemm(call);
    constexpr size_t kBytes = 8 << 20;
    void *memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return 1;
    madvise(memory, kBytes, MADV_HUGEPAGE);
    float *packed = static_cast<float *>(memory);

    for (int64_t i = 0; i < gemm.K * gemm.N; ++i) packed[i] = gemm.b[i];
    honest::Gemm other = gemm;
    other.b = packed;
    other.all();
    return munmap(memory, kBytes);
}
