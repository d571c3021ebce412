// id: P4
// mechanism: asks for the time, the processor, the environment and the number of threads, and prints it once
// case: gemm 48x40x56 fp32
// expect: scored
// source: written for this set
#include "honest.h"
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <sched.h>

extern "C" int run(const klineage_call *call) {
    static bool first = true;
    const auto start = std::chrono::steady_clock::now();
    honest::gemm(call);
    const double ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
    const char *threads = std::getenv("OMP_NUM_THREADS");
    if (first) std::printf("%.3f ms on processor %d, %s threads\n", ms, sched_getcpu(), threads ? threads : "all");
    first = false;
    return 0;
}
