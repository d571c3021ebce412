// Convolution for NVIDIA Hopper (sm_90a), fp16 or bf16 with fp32 accumulation: x, w and y all channels_last (NHWC) or all contiguous
// (NCHW); channels and filters in multiples of 8, square filters up to 7x7, stride 1 or 2, zero padding.
//
//   fixed.cuh          3x3, 64 -> 128 channels, stride 1, padding 1, fp16: kernels of their own
//   stream.cuh         implicit GEMM of CTAs that compute tile after tile and store by TMA
//   implicit_gemm.cuh  implicit GEMM of a tile for each CTA or cluster, whose CTAs may share K; any plane of pixels
//   reorder.cuh        NCHW: x becomes NHWC in scratch memory first, but for 1x1 filters on planes of a multiple of 8 pixels
//   plan.cuh           which of them, with what tile
// Measured figures: see NOTES.md.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "fixed_nchw.cuh"
#include "fixed_nhwc.cuh"
#include "klineage.h"
#include "plan.cuh"
#include "scratch.cuh"

namespace conv2d {

static inline bool has_strides(const klineage_tensor &t, bool channels_last) {
    int64_t expected = 1;
    const int nchw[4] = {3, 2, 1, 0}, nhwc[4] = {1, 3, 2, 0};
    for (int i = 0; i < 4; ++i) {
        const int dim = channels_last ? nhwc[i] : nchw[i];
        if (t.shape[dim] != 1 && t.stride[dim] != expected) return false;
        expected *= t.shape[dim];
    }
    return true;
}

// NCHW by way of NHWC: the scratch memory is free again, in the stream's order, when the last kernel has ended.
template <class T>
const char *run_reordered(const Shape &s, const Plan &plan, const Instance &tile, const void *x, const void *w, void *y, cudaStream_t stream) {
    Scratch scratch(scratch_bytes(s), stream);
    if (scratch.data == nullptr) return "conv2d: no scratch memory";
    if (const char *error = launch_reorder(s, x, w, scratch.data, stream)) return error;
    if (s.taps() > 1) w = static_cast<char *>(scratch.data) + scratch_bytes_x(s);
    return launch_plan<T>(reordered(s), plan, tile, scratch.data, w, y, stream, true);
}

template <class T>
const char *run_general(const Shape &s, bool nchw, const void *x, const void *w, void *y, cudaStream_t stream) {
    const Instances all = instances<T>();
    const Plan plan = plan_of(s, all, nchw, multiprocessors());
    if (plan.instance < 0) return "conv2d: no kernel for this shape";
    const Instance &tile = all.list[plan.instance];
    if (nchw && tile.kind != Kind::kStreamDirect) return run_reordered<T>(s, plan, tile, x, w, y, stream);
    return launch_plan<T>(s, plan, tile, x, w, y, stream, false);
}

inline const char *run_shape(const Shape &s, bool nchw, bool bf16, const void *x, const void *w, void *y, cudaStream_t stream) {
    if (!bf16 && s.c == fixed::kC && s.f == fixed::kF && s.size == 3 && s.stride == 1 && s.pad == 1)
        return nchw ? fixed::run_nchw(s, x, w, y, stream) : fixed::run_nhwc(s, x, w, y, stream);
    return bf16 ? run_general<__nv_bfloat16>(s, nchw, x, w, y, stream) : run_general<__half>(s, nchw, x, w, y, stream);
}

}  // namespace conv2d

extern "C" int run(const klineage_call *call) {
    KLINEAGE_REQUIRE(call, call->abi_version == KLINEAGE_ABI_VERSION && call->num_inputs == 2 && call->num_outputs == 1,
                     "conv2d: needs ABI version 1 and x, w -> y");
    const klineage_tensor &x = call->inputs[0], &w = call->inputs[1], &y = call->outputs[0];
    for (const klineage_tensor *t : {&x, &w, &y}) {
        KLINEAGE_REQUIRE(call, t->num_dims == 4 && t->dtype == x.dtype && (t->dtype == KLINEAGE_FLOAT16 || t->dtype == KLINEAGE_BFLOAT16),
                         "conv2d: 4-D tensors of fp16, or of bf16, only");
        KLINEAGE_REQUIRE(call, reinterpret_cast<uintptr_t>(t->data) % 16 == 0, "conv2d: pointers must be 16-byte aligned");
    }
    const double stride = klineage_scalar_value(call, "stride", 1), pad = klineage_scalar_value(call, "pad", 1);
    const int64_t n = x.shape[0], c = x.shape[1], h = x.shape[2], width = x.shape[3], f = w.shape[0], size = w.shape[2];
    KLINEAGE_REQUIRE(call, w.shape[1] == c && w.shape[3] == size && size >= 1 && size <= 7, "conv2d: square filters up to 7x7 only");
    KLINEAGE_REQUIRE(call, c >= 8 && c % 8 == 0 && f >= 8 && f % 8 == 0, "conv2d: channels and filters must be multiples of 8");
    KLINEAGE_REQUIRE(call, (stride == 1 || stride == 2) && pad >= 0 && pad < size && pad == static_cast<int>(pad),
                     "conv2d: stride 1 or 2, and padding smaller than the filter only");
    const int64_t p = (h + 2 * static_cast<int>(pad) - size) / static_cast<int>(stride) + 1;
    const int64_t q = (width + 2 * static_cast<int>(pad) - size) / static_cast<int>(stride) + 1;
    KLINEAGE_REQUIRE(call, n >= 1 && h >= 1 && width >= 1 && h + 2 * pad >= size && width + 2 * pad >= size, "conv2d: the filter must fit");
    KLINEAGE_REQUIRE(call, n <= 65535 && h <= 65535 && width <= 65535 && c <= 65535 && f <= 65535 && n * h * width < (1ll << 31) / 8 &&
                               n * h * width * c < (1ll << 31) && n * p * q * f < (1ll << 31) && size * size * c * f < (1ll << 31),
                     "conv2d: size out of range");
    KLINEAGE_REQUIRE(call, y.shape[0] == n && y.shape[1] == f && y.shape[2] == p && y.shape[3] == q, "conv2d: the output has another shape");
    const bool nhwc = conv2d::has_strides(x, true) && conv2d::has_strides(w, true) && conv2d::has_strides(y, true);
    KLINEAGE_REQUIRE(call, nhwc || (conv2d::has_strides(x, false) && conv2d::has_strides(w, false) && conv2d::has_strides(y, false)),
                     "conv2d: x, w and y must all be contiguous or all channels_last");
    conv2d::Shape s = {};
    s.n = n, s.c = c, s.h = h, s.w = width, s.f = f, s.size = size, s.stride = stride, s.pad = pad, s.p = p, s.q = q;
    const char *const error = conv2d::run_shape(s, !nhwc, x.dtype == KLINEAGE_BFLOAT16, x.data, w.data, y.data,
                                                static_cast<cudaStream_t>(call->stream));
    KLINEAGE_REQUIRE(call, error == nullptr, error);
    return 0;
}
