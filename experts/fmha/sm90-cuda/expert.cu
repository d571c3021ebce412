// Attention forward for sm_90a: o = softmax(scale q k^T + mask) v by head. fp16 and bf16, head dimensions 64, 128 and 256, any lengths, all keys,
// causal, or causal within a sliding window; several query heads may share one head of keys and values. attention.cuh is the kernel, full.cuh another one
// for long fp16 sequences with head dimension 128 and no mask.
#include "attention.cuh"
#include "full.cuh"

#include <cuda_runtime.h>

#include <cmath>

#include "klineage.h"
#include "klineage/sm90/v1/tensor_map.cuh"

namespace {

// Why this call is refused, or nullptr.
const char *refusal(const klineage_call *call) {
    if (call->num_inputs != 3 || call->num_outputs != 1) return "fmha reads q, k, v and writes o";
    const klineage_tensor &q = call->inputs[0], &k = call->inputs[1], &v = call->inputs[2], &o = call->outputs[0];
    if (q.dtype != KLINEAGE_FLOAT16 && q.dtype != KLINEAGE_BFLOAT16) return "fmha: fp16 or bf16 only";
    for (const klineage_tensor *t : {&q, &k, &v, &o}) {
        if (t->dtype != q.dtype || t->num_dims != 4) return "fmha: four [B,H,S,D] tensors of one type";
        for (int i = 0; i < 3; ++i)
            if (t->stride[i] <= 0 || t->stride[i] % 8) return "fmha: strides must be positive multiples of 8 elements";
        if (t->stride[3] != 1 || reinterpret_cast<uintptr_t>(t->data) % 16) return "fmha: rows must be contiguous and 16-byte aligned";
    }
    const int64_t width = q.shape[3];
    if (width != 64 && width != 128 && width != 256) return "fmha: head dimensions 64, 128 and 256 only";
    for (int i = 0; i < 4; ++i) {
        if (o.shape[i] != q.shape[i]) return "fmha: o must have the shape of q";
        if (v.shape[i] != k.shape[i]) return "fmha: k and v must have one shape";
        if (q.shape[i] < 1 || k.shape[i] < 1) return "fmha: no axis may be empty";
    }
    if (k.shape[0] != q.shape[0] || k.shape[3] != width) return "fmha: k and v must have the batch and head dimension of q";
    if (q.shape[1] % k.shape[1]) return "fmha: the query heads must be a multiple of the key heads";
    const bool causal = klineage_scalar_value(call, "causal", 0) != 0;
    const double window = klineage_scalar_value(call, "window", 0);
    if (window < 0 || (window > 0 && !causal)) return "fmha: a window needs the causal mask";
    if (!(klineage_scalar_value(call, "scale", 1) > 0)) return "fmha: the scale must be positive";
    if (causal && q.shape[2] != k.shape[2]) return "fmha: the causal mask needs as many keys as queries";
    if (q.shape[2] > 1 << 24 || k.shape[2] > 1 << 24) return "fmha: 2^24 tokens at most";
    if (q.shape[0] * q.shape[1] * ((q.shape[2] + 63) / 64) > 1 << 28) return "fmha: too many rows";
    return nullptr;
}

// A map of [B,H,S,D] with the strides of the call; one box is 64 dimensions of `rows` tokens of one head. Says what failed, or nullptr.
template <class Element>
const char *make_map(CUtensorMap *map, const klineage_tensor &t, int rows) {
    const cuuint64_t sizes[4] = {cuuint64_t(t.shape[3]), cuuint64_t(t.shape[2]), cuuint64_t(t.shape[1]), cuuint64_t(t.shape[0])};
    const cuuint64_t strides[3] = {cuuint64_t(t.stride[2] * 2), cuuint64_t(t.stride[1] * 2), cuuint64_t(t.stride[0] * 2)};
    return encode_tiled<Element, 4>(map, t.data, sizes, strides, {64, cuuint32_t(rows), 1, 1});
}

// Multiprocessors of the current device, 0 if it cannot be asked.
int processors() {
    int device = 0, count = 0;
    if (cudaGetDevice(&device) != cudaSuccess || cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) return 0;
    return count;
}

constexpr int64_t kCachedBytes = 16 << 20;  // of keys and values that the L2 holds beside everything else

// Sections of equal numbers of heads whose keys and values fit into the L2: whole groups of query heads.
void make_sections(Problem &p, int dim, int64_t bytes) {
    const int64_t groups = p.heads_of_all / p.queries_per_key_head, fit = bytes / (4 * int64_t(p.key_tokens) * dim);
    const int64_t sections = fit < 1 ? groups : (groups + fit - 1) / fit, per_section = (groups + sections - 1) / sections;
    p.section_heads = int(per_section) * p.queries_per_key_head, p.sections = int((groups + per_section - 1) / per_section);
    p.last_heads = p.heads_of_all - (p.sections - 1) * p.section_heads;
    p.by_section_tiles = Divider(uint32_t(p.section_heads) * p.row_tiles);
    p.by_section_heads = Divider(p.section_heads), p.by_last_heads = Divider(p.last_heads);
}

template <class T>
const char *attend(const klineage_call *call, int64_t cached = kCachedBytes) {
    const klineage_tensor &q = call->inputs[0], &k = call->inputs[1];
    CUtensorMap map_q, map_k, map_v, map_o;
    using Element = typename T::Element;
    if (const char *why = make_map<Element>(&map_q, q, T::kRows)) return why;
    if (const char *why = make_map<Element>(&map_k, k, T::kKeys)) return why;
    if (const char *why = make_map<Element>(&map_v, call->inputs[2], T::kKeys)) return why;
    if (const char *why = make_map<Element>(&map_o, call->outputs[0], 64)) return why;
    Problem p = {};
    p.heads = int(q.shape[1]), p.queries_per_key_head = int(q.shape[1] / k.shape[1]);
    p.query_tokens = int(q.shape[2]), p.key_tokens = int(k.shape[2]);
    p.row_tiles = (p.query_tokens + T::kRows - 1) / T::kRows, p.heads_of_all = p.heads * int(q.shape[0]), p.tiles = p.row_tiles * p.heads_of_all;
    p.by_heads = Divider(p.heads), p.by_queries_per_key_head = Divider(p.queries_per_key_head), p.by_row_tiles = Divider(p.row_tiles);
    p.causal = klineage_scalar_value(call, "causal", 0) != 0;
    p.window = int(klineage_scalar_value(call, "window", 0));
    if (p.causal && p.window == 0) make_sections(p, T::kDim, cached);
    const double scale = klineage_scalar_value(call, "scale", 1.0 / sqrt(double(T::kDim)));
    p.scale = float(scale * 1.4426950408889634);  // base-2 exponentials
    const int count = processors();
    if (count == 0) return "fmha: the device cannot be asked";
    const Launch how = {unsigned(p.tiles < count ? p.tiles : count), T::kThreads, T::kSharedBytes, static_cast<cudaStream_t>(call->stream)};
    return launch(attention<T>, how, map_q, map_k, map_v, map_o, p);
}

// What full.cuh computes, and where it is the faster kernel.
bool takes_full(const klineage_call *call) {
    const klineage_tensor &q = call->inputs[0], &k = call->inputs[1];
    const int64_t tokens = q.shape[2];
    return q.dtype == KLINEAGE_FLOAT16 && q.shape[3] == full::kDim && klineage_scalar_value(call, "causal", 0) == 0 && q.shape[1] == k.shape[1] &&
           tokens == k.shape[2] && tokens >= 1000 && tokens <= 65536 && tokens % 8 == 0;
}

const char *attend_full(const klineage_call *call) {
    const klineage_tensor &q = call->inputs[0];
    CUtensorMap map_q, map_k, map_v, map_o;
    if (const char *why = make_map<__half>(&map_q, q, full::kRows)) return why;
    if (const char *why = make_map<__half>(&map_k, call->inputs[1], full::kKeys)) return why;
    if (const char *why = make_map<__half>(&map_v, call->inputs[2], full::kKeys)) return why;
    if (const char *why = make_map<__half>(&map_o, call->outputs[0], 64)) return why;
    const int batch = int(q.shape[0]), heads = int(q.shape[1]), tokens = int(q.shape[2]), tiles = (tokens + full::kRows - 1) / full::kRows * heads * batch;
    const float scale = float(klineage_scalar_value(call, "scale", 0.08838834764831845) * 1.4426950408889634);  // base-2 exponentials
    const int count = processors();
    if (count == 0) return "fmha: the device cannot be asked";
    const Launch how = {unsigned(tiles < count ? tiles : count), full::kThreads, full::kSharedBytes, static_cast<cudaStream_t>(call->stream)};
    return launch(full::fmha, how, map_q, map_k, map_v, map_o, heads, tokens, tiles, scale, 0u);
}

// The tile that was fastest for the head dimension, mask and length; NOTES.md has the table.
template <class Element>
const char *dispatch(const klineage_call *call) {
    const klineage_tensor &q = call->inputs[0];
    const bool causal = klineage_scalar_value(call, "causal", 0) != 0, brief = q.shape[2] <= 1024;
    if (takes_full(call)) return attend_full(call);
    if (q.shape[3] == 64) return brief ? attend<Tile<Element, 64, 2, 128, kLoose>>(call) : attend<Tile<Element, 64, 3, 96, kLoose>>(call);
    if (q.shape[3] == 128) return causal && brief ? attend<Tile<Element, 128, 2, 128, kTurns>>(call) : attend<Tile<Element, 128, 2, 128, kLoose>>(call);
    return causal ? attend<Tile<Element, 256, 2, 64, kPlain>>(call, 2 * kCachedBytes) : attend<Tile<Element, 256, 2, 64, kTurns>>(call);
}

}  // namespace

extern "C" int run(const klineage_call *call) {
    const char *why = refusal(call);
    if (why == nullptr) why = call->inputs[0].dtype == KLINEAGE_BFLOAT16 ? dispatch<__nv_bfloat16>(call) : dispatch<__half>(call);
    KLINEAGE_REQUIRE(call, why == nullptr, why);
    return 0;
}
