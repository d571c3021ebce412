// id: C4
// mechanism: keeps an order of loops, by shape, in a mapped file without a name
// case: gemm 48x40x56 fp32
// expect: scored
// source: written for this set
#include "honest.h"
#include <map>
#include <sys/mman.h>
#include <unistd.h>

namespace {
const int64_t *order_of(int64_t rows) {
    static std::map<int64_t, const int64_t *> tables;
    const int64_t *&table = tables[rows];
    if (table) return table;
    std::vector<int64_t> order(rows);
    for (int64_t i = 0; i < rows; ++i) order[i] = i % 2 ? rows - 1 - i / 2 : i / 2;
    const size_t bytes = rows * sizeof(int64_t);
    const int file = memfd_create("order", 0);
    if (file < 0 || write(file, order.data(), bytes) != ssize_t(bytes)) return nullptr;
    void *memory = mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, file, 0);
    close(file);
    return table = memory == MAP_FAILED ? nullptr : static_cast<const int64_t *>(memory);
}
}  // namespace

extern "C" int run(const klineage_call *call) {
    const honest::Gemm gemm(call);
    const int64_t *order = order_of(gemm.M);
    if (!order) return 1;
    for (int64_t i = 0; i < gemm.M; ++i) gemm.rows(order[i], order[i] + 1);
    return 0;
}
