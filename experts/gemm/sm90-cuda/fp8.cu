// c[M,N] = scale_a scale_b a[M,K] b[N,K]^T for sm_90a: a and b in fp8 (e4m3), c in bf16, the scales one fp32 number each.
//
// The core moves two fp8 numbers as one 16-bit element: a row of 128 bytes is 128 k instead of 64, a step of wgmma 32 k
// instead of 16, and all addresses stay the same. The instruction keeps about 14 bits of its sums, so those of 128 k (four of
// its steps) are added up in fp32: see multiply_promoted.
#include "fused.cuh"
#include "plans.cuh"

namespace gemm {
// Two fp8 numbers of an operand, or a bf16 number of the result: what the tensor maps and the ring count.
struct Pair {
    uint16_t bits;
};
}  // namespace gemm

namespace klineage {
namespace sm90 {
template <>
struct TensorMapType<gemm::Pair> { static constexpr CUtensorMapDataType value = CU_TENSOR_MAP_DATA_TYPE_UINT16; };
template <int N>
struct Wgmma<gemm::Pair, N> : Wgmma<__nv_fp8_e4m3, N> {};
template <>
__device__ __forceinline__ uint32_t pack<gemm::Pair>(float low, float high) { return pack<__nv_bfloat16>(low, high); }
}  // namespace sm90
}  // namespace klineage

namespace {
using gemm::in_rows, gemm::Pair, gemm::Scaled;
using Wide = gemm::Config<Pair, 128, 256, 2, 1, 2, 1, 0, 0, 0>;
using Square = gemm::Config<Pair, 128, 128, 2, 1, 1, 1, 0, 0, 0>;
using Low = gemm::Config<Pair, 64, 128, 1, 1, 1, 1, 0, 0, 0>;

#if GEMM_FP8_PLANS  // not measured; see NOTES.md
template <int kM, int kN, int kWarpgroups, int kShareB, int kSplit>
constexpr gemm::Plan<Scaled> plan(float step, float end) {
    return gemm::plan<Scaled, gemm::Config<Pair, kM, kN, kWarpgroups, 1, kShareB, kSplit, 0, 0, 0>>(step, end, 1.2f);
}
constexpr gemm::Plan<Scaled> kPlans[] = {
    plan<128, 256, 2, 2, 1>(0.644f, 0.52f), plan<128, 128, 2, 1, 1>(0.36f, 0.6f), plan<64, 128, 1, 1, 1>(0.205f, 0.75f),
    plan<128, 64, 2, 2, 1>(0.19f, 0.7f),    plan<64, 128, 1, 1, 2>(0.205f, 1.85f), plan<64, 64, 1, 1, 2>(0.15f, 1.6f),
};
#else
constexpr gemm::Tile<Scaled> kTiles[] = {
    gemm::tile<Wide, Wide, Scaled>(0.644f, 0.52f),
    gemm::tile<Square, Square, Scaled>(0.36f, 0.6f),
    gemm::tile<Low, Low, Scaled>(0.205f, 0.75f),
};
#endif

// Why this call is refused, or nullptr.
const char *refusal(const klineage_call *call) {
    if (call->num_inputs != 4 || call->num_outputs != 1) return "fp8 gemm reads a, b and their scales, and writes c";
    const klineage_tensor &a = call->inputs[0], &b = call->inputs[1], &c = call->outputs[0];
    if (a.dtype != KLINEAGE_FLOAT8_E4M3 || b.dtype != KLINEAGE_FLOAT8_E4M3) return "fp8 gemm: a and b must be e4m3";
    if (c.dtype != KLINEAGE_BFLOAT16) return "fp8 gemm: c must be bf16";
    for (int i = 2; i < 4; ++i)
        if (call->inputs[i].dtype != KLINEAGE_FLOAT32 || call->inputs[i].num_dims > 1 || (call->inputs[i].num_dims == 1 && call->inputs[i].shape[0] != 1))
            return "fp8 gemm: a scale is one fp32 number";
    if (!in_rows(a, 1) || !in_rows(b, 1) || !in_rows(c, 2)) return "fp8 gemm: rows of consecutive elements at multiples of 16 bytes";
    if (a.shape[1] != b.shape[1] || a.shape[0] != c.shape[0] || b.shape[0] != c.shape[1]) return "fp8 gemm: shapes do not match";
    if (a.shape[1] % 16 || c.shape[1] % 8) return "fp8 gemm: K must be a multiple of 16, N of 8";
    return nullptr;
}

}  // namespace

extern "C" int run(const klineage_call *call) {
    const char *why = refusal(call);
    KLINEAGE_REQUIRE(call, why == nullptr, why);
    const klineage_tensor &a = call->inputs[0], &b = call->inputs[1], &c = call->outputs[0];
    const gemm::Problem p = {a.data, b.data, c.data, int(a.shape[0]), int(b.shape[0]), int(a.shape[1] / 2), a.stride[0] / 2,
                             b.stride[0] / 2, c.stride[0], static_cast<cudaStream_t>(call->stream)};
    const Scaled::Operands scales = {static_cast<const float *>(call->inputs[2].data), static_cast<const float *>(call->inputs[3].data)};
#if GEMM_FP8_PLANS
    why = gemm::start_best(kPlans, p, scales);
#else
    why = gemm::start_shortest(kTiles, p, scales);
#endif
    KLINEAGE_REQUIRE(call, why == nullptr, why);
    return 0;
}
