// Linear layers for sm_90a in bf16 and fp16, x[M,K] and w row-major with a row for each column: y = x w^T + bias (`linear`),
// and with h = x w^T + bias of 2 N columns y = silu(h[:, :N]) h[:, N:] (`gated_linear`). Sums, bias and gate are fp32.
#include "fused.cuh"
#include "plans.cuh"

namespace {
using gemm::Bias, gemm::Config, gemm::in_rows;

// The tiles of expert.cu for row-major operands, with the same times. The same multicast shares a row of K as a row of N there.
template <class T>
const char *run_linear(const gemm::Problem &p, const void *bias) {
    using E = Bias<false>;
    static constexpr gemm::Plan<E> plans[] = {
        gemm::plan<E, Config<T, 128, 256, 2, 1, 2, 1, 1, 0, 0>>(0.644f, 0.52f, 1.0f),
        gemm::plan<E, Config<T, 128, 224, 2, 1, 2, 1, 1, 0, 0>>(0.578f, 0.42f, 1.08f),
        gemm::plan<E, Config<T, 128, 192, 2, 1, 2, 1, 1, 0, 0>>(0.489f, 0.42f, 1.08f),
        gemm::plan<E, Config<T, 128, 160, 2, 1, 2, 1, 1, 0, 0>>(0.417f, 1.0f, 1.2f),
        gemm::plan<E, Config<T, 256, 128, 2, 1, 2, 1, 1, 0, 0>>(0.644f, 0.94f, 1.1f),
        gemm::plan<E, Config<T, 128, 192, 2, 2, 2, 1, 1, 0, 0>>(0.49f, 0.5f, 1.0f),
        gemm::plan<E, Config<T, 128, 128, 2, 2, 2, 1, 0, 0, 0>>(0.36f, 1.2f, 1.05f),
        gemm::plan<E, Config<T, 128, 128, 2, 1, 1, 1, 0, 0, 0>>(0.36f, 0.6f, 1.2f),
        gemm::plan<E, Config<T, 64, 128, 1, 1, 1, 1, 0, 0, 0>>(0.205f, 0.75f, 1.6f),
        gemm::plan<E, Config<T, 64, 64, 1, 1, 1, 1, 0, 0, 0, 2>>(0.24f, 0.42f, 1.6f),
        gemm::plan<E, Config<T, 64, 128, 1, 1, 1, 2, 0, 0, 0>>(0.312f, 1.85f, 1.1f),
        gemm::plan<E, Config<T, 64, 256, 1, 1, 1, 4, 0, 0, 0>>(0.563f, 3.67f, 1.3f),
#if GEMM_FEW_ROWS == 1  // see NOTES.md
        gemm::plan<E, Config<T, 64, 192, 1, 1, 1, 4, 0, 0, 0>>(0.55f, 3.4f, 1.3f),
#elif GEMM_FEW_ROWS == 2
        gemm::plan<E, Config<T, 64, 64, 1, 1, 1, 2, 0, 0, 0>>(0.26f, 1.6f, 1.1f),
#endif
    };
    return gemm::start_best(plans, p, bias);
}

// The tiles of gated products; each gives half as many columns of y.
template <class T>
const char *run_gated(const gemm::Problem &p, const void *bias) {
    using E = Bias<true>;
    constexpr int kParts = 2;
    using Wide = Config<T, 128, 256, 2, 1, 2, 1, 1, 0, 0>;
    using Square = Config<T, 128, 128, 2, 1, 1, 1, 0, 0, 0>;
    using Low = Config<T, 64, 128, 1, 1, 1, 1, 0, 0, 0>;
    static constexpr gemm::Tile<E> tiles[] = {
        gemm::tile<Wide, Config<T, 128, 256 / kParts, 2, 1, 2, 1, 1, 0, 0>, E>(0.644f, 0.52f),
        gemm::tile<Square, Config<T, 128, 128 / kParts, 2, 1, 1, 1, 0, 0, 0>, E>(0.36f, 0.6f),
        gemm::tile<Low, Config<T, 64, 128 / kParts, 1, 1, 1, 1, 0, 0, 0>, E>(0.205f, 0.75f),
    };
    return gemm::start_shortest(tiles, p, bias);
}

// Why this call is refused, or nullptr.
const char *refusal(const klineage_call *call, int parts) {
    if (call->num_inputs != 3 || call->num_outputs != 1) return "linear reads x, w and bias, and writes y";
    const klineage_tensor &x = call->inputs[0], &w = call->inputs[1], &bias = call->inputs[2], &y = call->outputs[0];
    for (const klineage_tensor *t : {&x, &w, &bias, &y})
        if (t->dtype != x.dtype || (t->dtype != KLINEAGE_BFLOAT16 && t->dtype != KLINEAGE_FLOAT16)) return "linear: bf16 or fp16 only";
    if (!in_rows(x, 2) || !in_rows(w, 2) || !in_rows(y, 2)) return "linear: rows of consecutive elements at multiples of 16 bytes";
    if (w.shape[1] != x.shape[1] || y.shape[0] != x.shape[0] || w.shape[0] != parts * y.shape[1]) return "linear: shapes do not match";
    if (bias.num_dims != 1 || bias.shape[0] != w.shape[0] || bias.stride[0] != 1 || reinterpret_cast<uintptr_t>(bias.data) % 4)
        return "linear: bias must have a number for each row of w, one after the other";
    if (y.shape[1] % 8) return "linear: N must be a multiple of 8";
    return nullptr;
}

template <bool kGated>
int run_layer(const klineage_call *call) {
    const char *why = refusal(call, kGated ? 2 : 1);
    KLINEAGE_REQUIRE(call, why == nullptr, why);
    const klineage_tensor &x = call->inputs[0], &w = call->inputs[1], &y = call->outputs[0];
    const gemm::Problem p = {x.data, w.data, y.data, int(y.shape[0]), int(y.shape[1]), int(x.shape[1]), x.stride[0],
                             w.stride[0], y.stride[0], static_cast<cudaStream_t>(call->stream)};
    const void *bias = call->inputs[2].data;
    if constexpr (kGated) why = x.dtype == KLINEAGE_FLOAT16 ? run_gated<__half>(p, bias) : run_gated<__nv_bfloat16>(p, bias);
    else why = x.dtype == KLINEAGE_FLOAT16 ? run_linear<__half>(p, bias) : run_linear<__nv_bfloat16>(p, bias);
    KLINEAGE_REQUIRE(call, why == nullptr, why);
    return 0;
}

}  // namespace

extern "C" int linear(const klineage_call *call) { return run_layer<false>(call); }
extern "C" int gated_linear(const klineage_call *call) { return run_layer<true>(call); }
