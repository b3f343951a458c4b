#include "ops/convolution/choice.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <optional>
#include <string_view>

#include "cpu/dispatch.h"
#include "cpu/pointwise_kernels.h"
#include "layout/channels_last.h"
#include "ops/composition.h"
#include "ops/convolution/faults.h"

namespace nhwc {
namespace {

/// What PyTorch computes a call by, asked at most once.
class Backends {
 public:
  explicit Backends(const Call& call) : call_(call) {}

  at::native::ConvBackend own() { return own_ ? *own_ : own_.emplace(call_.backend()); }

  /// Returns that of the same call in float32.
  at::native::ConvBackend in_float32() {
    if (!call_.is_half()) return own();
    if (wide_) return *wide_;
    Call wide = call_;
    wide.bias = {};
    for (at::Tensor* each : {&wide.input, &wide.weight}) *each = without_memory(*each, at::kFloat);
    return wide_.emplace(wide.backend());
  }

 private:
  const Call& call_;
  std::optional<at::native::ConvBackend> own_, wide_;
};

/// What the rules look at: of a transposed convolution, that from its output to its input.
struct Sizes {
  bool is_3d, is_strided = false, is_dilated = false;
  int64_t inputs, outputs;       // of a group
  int64_t taps = 1, shortest;    // of the kernel, and along its shortest axis
  int64_t positions;             // of the whole batch
  int64_t larger_positions = 1;  // of one sample, on the larger side

  explicit Sizes(const Call& call);
};

Sizes::Sizes(const Call& call)
    : is_3d(call.axes() == 3),
      inputs(call.weight.size(1)),
      outputs(call.weight.size(0) / call.groups.expect_int()),
      shortest(call.weight.size(-1)),
      positions(call.input.size(0)) {
  for (int64_t from_last = 1; from_last <= static_cast<int64_t>(call.axes()); ++from_last) {
    const Axis axis = call.axis(from_last);
    const int64_t kernel = call.weight.size(-from_last);
    is_strided = is_strided || axis.stride > 1;
    is_dilated = is_dilated || call.dilation[call.axes() - from_last] > 1;
    taps *= kernel;
    shortest = std::min(shortest, kernel);
    positions *= axis.positions.expect_int();
    larger_positions *= axis.size.expect_int();
  }
}

// Inputs as they come.

/// Returns whether cuDNN would compute a depthwise convolution of volumes on a GPU. In channels-last it takes many
/// times as long as PyTorch's own kernel, which is for contiguous tensors. Transposed ones, and those of several
/// channels in a group, were not measured.
bool is_slow_on_cuda(const Call& call) {
  return call.axes() == 3 && !call.is_transposed && call.input.is_cuda() && call.is_accepted() && call.is_depthwise() &&
         (call.has_channels_last_input() || call.has_channels_last_weight());
}

bool is_unfit(const Call& call) { return !call.is_on_cpu() || !call.is_accepted(); }

bool is_one_sample(const Call& call) { return static_cast<size_t>(call.input.dim()) == call.axes() + 1; }

/// Returns whether a contiguous volume meets a channels-last weight. Of 2D ones PyTorch itself takes the weight's
/// format, of volumes only where oneDNN computes.
bool is_volume_in_other_format(const Call& call) {
  if (call.axes() != 3 || call.has_channels_last_input() || !call.has_channels_last_weight()) return false;
  return !has_channels_last_strides(call.input);
}

/// Returns whether PyTorch's kernels may go by an odd stride, which weight gradients were wrong by.
bool is_odd(const Call& call) { return has_odd_strides(call.input); }

// Volumes.

/// Returns whether PyTorch's settings require the same precision of matrix products and of convolutions.
bool is_as_precise_as_products() {
  return onednn_precision(at::Float32Op::MATMUL) == onednn_precision(at::Float32Op::CONV);
}

/// Returns whether a kernel has one tap along an axis, which sees each position there.
bool has_plain_tap(const Call& call, size_t index) {
  return call.weight.sym_size(static_cast<int64_t>(index) + 2) == 1 && call.stride[index] == 1 &&
         call.padding[index] == 0 && call.output_padding[index] == 0;
}

/// Returns whether a kernel has one tap in the plane. Kernels with more, or a stride there, gain nothing.
bool has_one_tap_in_the_plane(const Call& call) {
  if (call.axes() != 3 || call.is_transposed || !call.has_channels_last_input()) return false;
  if (!has_plain_tap(call, 1) || !has_plain_tap(call, 2)) return false;
  // With groups, only these cases were faster when measured.
  const bool is_float = call.input.scalar_type() == at::kFloat;
  return call.has_one_dtype() && (call.groups == 1 || (call.weight.sym_size(2) == 1 && is_float));
}

/// Returns whether a convolution with one tap in the plane is one matrix product over all voxels, which is faster than
/// a convolution except for narrow types.
bool is_linear(const Call& call) {
  const bool is_wide = call.input.scalar_type() == at::kFloat || call.input.scalar_type() == at::kDouble;
  return is_wide && !call.is_composed && has_plain_tap(call, 0) && call.groups == 1 && is_as_precise_as_products();
}

/// Returns whether a convolution of images is one matrix product over all pixels, which PyTorch computes for each
/// sample alone, after it has written zeros, where it keeps it from oneDNN: on one thread. Gradients take 0.9 of its
/// time by one product (a grid of 300 shapes, Xeon, also held to AVX2; 0.5 to 1.07), a forward gains where the weight
/// of each sample's product is read for few pixels.
bool is_slow_product(const Call& call, Backends& backends, bool is_derived) {
  if (call.axes() != 2 || call.is_transposed || call.is_composed || call.has_symbolic_sizes() || call.groups != 1 ||
      call.input.scalar_type() != at::kFloat || !call.has_one_dtype() || !call.has_channels_last_input()) {
    return false;
  }
  if (!has_plain_tap(call, 0) || !has_plain_tap(call, 1)) return false;
  const int64_t samples = call.input.size(0), weights = call.weight.numel(), positions = Sizes(call).positions;
  const bool gains =
      is_derived ? positions * weights >= 4'000'000 : samples > 1 && positions <= 64 * samples && weights >= 120'000;
  return gains && is_as_precise_as_products() && !is_onednns(backends.own());
}

/// Returns whether a channels-last volume is one sample, and PyTorch would not give it to oneDNN, in float32 or in the
/// float32 that half precision is computed in. Its rule, `ConvParams::use_mkldnn` in
/// aten/src/ATen/native/Convolution.cpp, is made for the sizes of a 2D batch: of a 3D one it takes batch, channels,
/// depth and height. What it leaves is computed by matrix products over copies of the input, which are slower. With
/// groups, it leaves nothing. Graphs for any sizes have PyTorch's convolution: Inductor cannot order strides that are
/// symbols, which the views here have.
bool is_slow_sample(const Call& call, Backends& backends) {
  if (call.axes() != 3 || call.has_symbolic_sizes() || call.input.sym_size(0) != 1 || call.groups != 1 ||
      !call.has_channels_last_input() || !at::globalContext().userEnabledMkldnn() || is_onednns(backends.own())) {
    return false;
  }
  return (call.input.scalar_type() == at::kFloat || call.is_half()) && !is_onednns(backends.in_float32());
}

/// Returns whether a slow sample has one tap, with strides: the voxels under it are few, and their result a product.
bool has_strided_voxels(const Call& call) {
  const Sizes sizes(call);
  const bool is_padded = std::any_of(call.padding.begin(), call.padding.end(), [](auto& each) { return each != 0; });
  return !call.is_transposed && sizes.taps == 1 && sizes.is_strided && !is_padded;
}

/// Returns whether a slow sample can be cut into slabs, and gains: a convolution between any two positions, a
/// transposed one where the outputs of its positions do not overlap. Where there are few positions, oneDNN spends its
/// time on the weight.
bool gains_from_slabs(const Call& call) {
  const int64_t positions = Sizes(call).positions, from_last = rewrites::axis_of_slabs(call);
  const Axis axis = call.axis(from_last);
  if (axis.positions < rewrites::slabs || positions * call.weight.numel() < 2'000'000) return false;
  if (!call.is_transposed) return positions >= 64 && (positions > 128 || call.weight.numel() < 1'000'000);
  const bool is_apart = axis.reach + 1 == axis.stride && axis.padding == 0 && call.output_padding[3 - from_last] == 0;
  return from_last == 3 && is_apart && positions >= 512;
}

// What our kernels compute.

/// What PyTorch computes with.
enum class Arithmetic {
  below_avx512,  // always in float32
  avx512,        // in float32
  halves,        // in the half precision of AVX-512
};

// The rules. Their evidence is `bench_convolutions.py`, and grids of some 200 shapes around its layers: one thread of a
// Zen 4 and of a Xeon with AMX, as they are and held to AVX2. Where PyTorch is about as fast, it stays.

/// oneDNN's depthwise gradients reach a tenth of what its forward does, and each pass takes some 50 us more than its
/// products. Our kernels take their time for each channel of a sample, and for each phase of a stride. A transposed
/// convolution is the gradient of the input, and its own is a convolution.
KernelPasses of_depthwise(const Call& call, const Sizes& sizes, Arithmetic arithmetic) {
  const bool is_large = sizes.shortest > 3, is_half = arithmetic == Arithmetic::halves,
             has_avx512 = arithmetic != Arithmetic::below_avx512;
  const int64_t planes = call.input.size(0) * call.weight.size(0), elements = planes * sizes.larger_positions;
  const bool is_small =
      sizes.is_3d ? planes <= 512 && elements <= 65'000 : planes <= 1024 && elements <= (has_avx512 ? 130'000 : 80'000);
  const bool has_few_phases = !sizes.is_strided || (planes <= 256 && elements <= 50'000);
  const bool smaller = is_small || (is_large && !sizes.is_strided && !has_avx512);
  const bool larger =
      sizes.is_3d || (is_small && has_few_phases) || (is_half ? sizes.is_strided : is_large && !sizes.is_strided);
  const bool weight = sizes.is_3d || is_large || is_small;
  return call.is_transposed ? KernelPasses{larger, smaller, weight} : KernelPasses{smaller, larger, weight};
}

/// Of few channels in a group, oneDNN fills a part of its registers.
bool gains_grouped_weight_gradient(const Call& call, const Sizes& sizes, Arithmetic arithmetic) {
  if (call.is_transposed) return false;
  if (arithmetic == Arithmetic::halves) return sizes.inputs <= 4;
  const bool has_avx512 = arithmetic == Arithmetic::avx512;
  return sizes.is_strided ? !has_avx512 && sizes.inputs > 8 && sizes.inputs != 16
                          : sizes.inputs >= 4 && (sizes.inputs <= 8 || !has_avx512);
}

/// Below AVX-512 oneDNN's dense weight gradient reaches a half of its forward. With it, it is slow where it transposes
/// the weight for few positions, and where registers are not filled. What PyTorch keeps from oneDNN, small samples
/// alone, is fast as its own product, but for volumes.
bool gains_dense_weight_gradient(const Sizes& sizes, Arithmetic arithmetic, at::native::ConvBackend backend) {
  if (sizes.taps == 1) return false;  // one matrix product
  constexpr int64_t least_products = 1 << 20;
  const int64_t products = sizes.positions * sizes.taps * sizes.inputs * sizes.outputs;
  if (!is_onednns(backend) && (!sizes.is_3d || products < least_products)) return false;
  if (arithmetic == Arithmetic::below_avx512) return sizes.inputs >= (sizes.is_3d ? 8 : 4);
  const bool is_half = arithmetic == Arithmetic::halves;
  if (sizes.inputs < 16) return false;
  if (sizes.outputs <= (is_half ? 4 : 8)) return true;
  if (sizes.shortest < 3) return false;
  if (sizes.is_3d) return sizes.positions <= 128 && sizes.inputs >= (is_half ? 256 : 128);
  if (is_half) return false;
  return sizes.positions <= 512 || (sizes.is_strided && !sizes.is_dilated && sizes.inputs >= 32) ||
         (sizes.inputs < 64 && sizes.inputs % 16 != 0);
}

/// Returns the passes that take fewer multiplications, and less time.
KernelPasses passes_of_winograd(const Call& call) {
  KernelPasses found = {faster_winograd_tile(call, Pass::forward).has_value(),
                        faster_winograd_tile(call, Pass::input_gradient).has_value(),
                        faster_winograd_tile(call, Pass::weight_gradient).has_value()};
  found.by_winograd = found.forward || found.input_gradient || found.weight_gradient;
  return found;
}

/// Of one group: where few positions meet many weights, PyTorch and oneDNN spend their time on packing these, or on
/// gathering the strided pixels of all channels. What PyTorch keeps from oneDNN of volumes it computes by copies of
/// their windows.
bool gains_inner_products(const Call& call, const Sizes& sizes, Arithmetic arithmetic,
                          at::native::ConvBackend backend) {
  if (call.is_transposed || !call.has_channels_last_weight()) return false;
  const int64_t terms = sizes.taps * sizes.inputs, weights = terms * sizes.outputs;
  if (sizes.is_3d && sizes.taps > 1 && !is_onednns(backend)) return terms >= 400;
  // A Xeon's products by MKL are faster, where the weight fits into its second cache.
  const bool is_xeon = onednn_isa() == OnednnIsa::amx, is_beyond_cache = weights >= 600'000;
  if (sizes.positions < 2 || sizes.positions > 64 || weights < (is_xeon ? 300'000 : 130'000)) return false;
  if (sizes.taps > 1 || sizes.is_strided) return true;
  if (weights < 200'000 || (is_xeon && !is_beyond_cache)) return false;
  if (arithmetic == Arithmetic::below_avx512) return sizes.positions <= (is_beyond_cache ? 16 : 9);
  return sizes.positions <= (is_xeon || terms < 512 ? 25 : 64);
}

/// Returns whether the instruction sets are those that the rules were measured with.
bool is_measured() {
  static const bool is = onednn_isa() != OnednnIsa::unknown && cpu::capability().starts_with("avx");
  return is;
}

/// Returns the passes that our kernels compute, of tensors that they take.
KernelPasses passes_of_kernels(const Call& call, Backends& backends, bool in_float32, bool is_mended) {
  const at::ScalarType type = call.input.scalar_type();
  if ((type != at::kFloat && !call.is_half()) || !call.has_one_dtype()) return {};
  if (call.is_composed || call.has_symbolic_sizes() || !call.has_channels_last_input()) return {};
  // Our kernels need none of the ways around faults.
  if (call.is_depthwise() && (is_mended || in_float32)) return {true, true, true};
  if (!is_measured()) return {};
  const Arithmetic arithmetic = onednn_isa() == OnednnIsa::below_avx512 ? Arithmetic::below_avx512
                                : in_float32 || type == at::kFloat      ? Arithmetic::avx512
                                                                        : Arithmetic::halves;
  KernelPasses ours = arithmetic == Arithmetic::halves ? KernelPasses{} : passes_of_winograd(call);
  const Sizes sizes(call);
  const auto backend = [&] { return in_float32 ? backends.in_float32() : backends.own(); };
  if (arithmetic != Arithmetic::halves && !ours.forward && call.groups == 1) {
    ours.forward = gains_inner_products(call, sizes, arithmetic, backend());
  }
  if (is_mended) return ours;
  if (call.is_depthwise()) return of_depthwise(call, sizes, arithmetic);
  if (call.groups > 1) {
    ours.weight_gradient = ours.weight_gradient || gains_grouped_weight_gradient(call, sizes, arithmetic);
    return ours;
  }
  // For fewer positions calls take longer than products, and PyTorch is as fast where one channel meets few.
  const bool is_single = sizes.inputs == 1 || (sizes.outputs == 1 && sizes.inputs <= cpu::most_few);
  if (sizes.positions >= 1024 && !is_single && is_pointwise(call)) {
    const bool gains = arithmetic != Arithmetic::halves;
    return {gains, gains, true};
  }
  if (ours.weight_gradient) return ours;
  ours.weight_gradient = gains_dense_weight_gradient(sizes, arithmetic, backend());
  return ours;
}

/// Returns the passes that our kernels compute of a depthwise convolution of volumes on a GPU. Compiled graphs have
/// none.
KernelPasses passes_on_cuda(const Call& call) {
  if (call.is_composed || call.is_compiled || call.has_symbolic_sizes() || is_one_sample(call)) return {};
  if (!call.has_one_dtype() || !cuda::can_run(depthwise_on_cuda(call), call.input)) return {};
  const bool is_strided = std::any_of(call.stride.begin(), call.stride.end(), [](auto& each) { return each != 1; });
  return {true, !is_strided, true};
}

// What remains.

/// Returns whether PyTorch's result of a channels-last input is not.
bool loses_format(const Call& call, at::native::ConvBackend backend) {
  const at::MemoryFormat format = call.axes() == 3 ? at::MemoryFormat::ChannelsLast3d : at::MemoryFormat::ChannelsLast;
  return call.input.is_complex() ||
         at::native::_determine_backend_memory_format(call.input, call.weight, backend) != format;
}

// The table, in its order.

constexpr bool in_graphs = true, in_eager_mode = false;

const Way as_it_comes[] = {
    {"unfit", Kind::pytorchs, in_graphs, is_unfit, rewrites::restored},
    {"batched", Kind::faster, in_graphs, is_one_sample, rewrites::as_batch},
    {"formatted", Kind::faster, in_graphs, is_volume_in_other_format, rewrites::formatted},
    {"restrided", Kind::mended, in_graphs, is_odd, rewrites::restrided},
};
const Way contiguous_way = {"contiguous", Kind::faster, in_graphs, nullptr, rewrites::in_contiguous};
const Way kernels_way = {"kernels", Kind::ours, in_graphs};
const Way winograd_way = {"winograd", Kind::ours, in_graphs};
const Way mended[] = {
    {"narrowed", Kind::mended, in_graphs, faults::has_one_column, rewrites::narrowed},
    {"padded", Kind::mended, in_graphs, faults::has_small_input, rewrites::padded_before},
    // After what adds planes of zeros, the last of which may be under no tap.
    {"trimmed", Kind::mended, in_graphs, faults::has_depth_under_no_tap, rewrites::trimmed},
    {"sliced", Kind::mended, in_graphs, faults::has_strided_tap, rewrites::sliced},
    {"widened", Kind::mended, in_graphs, faults::has_one_transposed_column, rewrites::widened},
    {"extended", Kind::mended, in_graphs, faults::has_extended_tap, rewrites::extended},
    {"cut", Kind::mended, in_graphs, faults::has_small_output, rewrites::cut},
};
const Way linear_way = {"linear", Kind::faster, in_eager_mode};
const Way along_depth_way = {"along_depth", Kind::faster, in_eager_mode, nullptr, rewrites::along_depth};
const Way of_slow_samples[] = {
    {"sliced", Kind::faster, in_graphs, has_strided_voxels, rewrites::sliced},
    {"slabs", Kind::faster, in_graphs, gains_from_slabs, rewrites::in_slabs},
};
const Way kernels_in_part_way = {"kernels_in_part", Kind::ours, in_graphs};
const Way float32_way = {"float32", Kind::mended, in_graphs};
const Way restored_way = {"restored", Kind::pytorchs, in_eager_mode, nullptr, rewrites::restored};
const Way pytorch_way = {"pytorch", Kind::pytorchs, in_eager_mode, nullptr, rewrites::as_it_is};

template <size_t count>
const Way* first(const Way (&ways)[count], const Call& call) {
  const auto* found = std::find_if(ways, ways + count, [&](const Way& way) { return way.applies(call); });
  return found == ways + count ? nullptr : found;
}

}  // namespace

at::Float32Precision onednn_precision(at::Float32Op op) {
  const at::Float32Precision set = at::globalContext().float32Precision(at::Float32Backend::MKLDNN, op);
  return set == at::Float32Precision::NONE ? at::Float32Precision::IEEE : set;
}

Choice choose(const Call& call) {
  if (is_slow_on_cuda(call)) {
    const KernelPasses ours = passes_on_cuda(call);
    return ours.forward ? Choice{&kernels_way, ours, Others::pytorch_in_contiguous} : Choice{&contiguous_way};
  }
  if (const Way* way = first(as_it_comes, call)) return {way};
  Backends backends(call);
  // What oneDNN does not take in half precision PyTorch computes many times slower than in float32.
  const bool in_float32 = call.is_half() && call.has_one_dtype() &&
                          (!is_onednns(backends.own()) || faults::is_wrong_in_half_precision(call));
  const Others others = in_float32 ? Others::pytorch_in_float32 : Others::pytorch;
  const Way* mending = first(mended, call);
  const KernelPasses ours = passes_of_kernels(call, backends, in_float32, mending != nullptr);
  const bool of_input = call.may_derive_by_input(), of_weight = call.may_derive_by_weight();

  const bool are_all_ours = ours.forward && (ours.input_gradient || !of_input) && (ours.weight_gradient || !of_weight);
  if (are_all_ours) return {ours.by_winograd ? &winograd_way : &kernels_way, ours, others};
  if (mending) return {mending};
  if (has_one_tap_in_the_plane(call)) {
    return is_linear(call) ? Choice{&linear_way, {}, Others::products} : Choice{&along_depth_way};
  }
  if (is_slow_sample(call, backends)) {
    if (const Way* way = first(of_slow_samples, call)) return {way};
  }
  const bool is_one_ours = ours.forward || (ours.input_gradient && of_input) || (ours.weight_gradient && of_weight);
  if (is_one_ours) return {ours.by_winograd ? &winograd_way : &kernels_in_part_way, ours, others};
  if (is_slow_product(call, backends, of_input || of_weight)) return {&linear_way, {}, Others::products};
  if (in_float32) return {&float32_way, {}, others};
  if (call.has_channels_last_input() && loses_format(call, backends.own())) return {&restored_way};
  return {&pytorch_way};
}

const char* name_of(Kind kind) {
  switch (kind) {
    case Kind::pytorchs: return "pytorchs";
    case Kind::faster: return "faster";
    case Kind::mended: return "mended";
    default: return "ours";
  }
}

namespace {

/// For people who compare bits.
bool is_winograd_on() {
  static const bool is_on = [] {
    const char* set = std::getenv("TORCH_NHWC_WINOGRAD");
    return !set || std::string_view(set) != "0";
  }();
  return is_on;
}

/// oneDNN's kernels do not take groups of other channels.
bool has_odd_groups(const Call& call, const Sizes& sizes) {
  return call.groups > 1 && (sizes.inputs % 16 != 0 || sizes.outputs % 16 != 0);
}

/// Returns whether PyTorch computes a weight gradient of volumes by matrix products, which are more exact than oneDNN's
/// kernels: below AVX-512, and where those take neither the padding of the height nor the channels of a group.
bool is_by_exact_products(const Call& call, const Sizes& sizes) {
  return sizes.is_3d && (onednn_isa() == OnednnIsa::below_avx512 || has_odd_groups(call, sizes) || call.padding[1] > 1);
}

/// Returns whether a tile of four results along the width has at most twice the error of PyTorch's contiguous kernels,
/// as one of two has: `bench_errors.py`. In half precision the error is that of the result's rounding. oneDNN's is
/// larger below AVX-512, that of its weight gradients with it. Its results of transposed convolutions and of groups,
/// and PyTorch's own products of small samples, are more exact.
bool is_right_by_wide_tiles(const Call& call, Pass pass) {
  if (call.is_half()) return true;
  if (pass == Pass::input_gradient || !is_onednns(call.backend())) return false;
  const Sizes sizes(call);
  const bool is_below_avx512 = onednn_isa() == OnednnIsa::below_avx512;
  if (pass == Pass::forward) {
    const bool is_plain = !call.is_transposed && call.groups == 1;
    const bool is_large = sizes.is_3d ? sizes.inputs >= 32 || sizes.positions >= 4096 : sizes.inputs >= 64;
    return is_below_avx512 && is_plain && is_large;
  }
  return sizes.positions >= (sizes.is_3d ? 4096 : 1024) && !is_by_exact_products(call, sizes);
}

/// Returns how many terms of a sum keep the error within twice that of PyTorch's contiguous kernels: `bench_errors.py`.
/// PyTorch's own products are more exact than oneDNN's for gradients, which are zero in many places, and for results
/// that are added up tap by tap.
int64_t right_terms(const Call& call, Pass pass) {
  constexpr int64_t usual = 32, some = 16, few = 8;
  if (call.is_half() || (pass == Pass::forward && !call.is_transposed)) return usual;
  const Sizes sizes(call);
  const bool is_of_weight = pass == Pass::weight_gradient;
  if (is_of_weight && sizes.positions < 512) return few;
  const bool is_slab = sizes.is_3d && sizes.positions < 1728;  // perhaps, of a sample that PyTorch multiplies
  const bool is_by_products = is_slab || has_odd_groups(call, sizes) || !is_onednns(call.backend()) ||
                              (is_of_weight && is_by_exact_products(call, sizes));
  if (!is_by_products) return usual;
  return is_of_weight || sizes.outputs > 32 ? some : few;
}

}  // namespace

cuda::Depthwise depthwise_on_cuda(const Call& call) {
  const auto numbers = [](const at::SymDimVector& sizes) {
    return std::array{sizes[0].expect_int(), sizes[1].expect_int(), sizes[2].expect_int()};
  };
  return {call.weight.detach().contiguous(), numbers(call.stride), numbers(call.padding), numbers(call.dilation)};
}

bool is_computable(const Call& call, Pass pass) {
  if (pass == Pass::weight_gradient || call.is_depthwise() || is_pointwise(call)) return true;
  const bool is_to_smaller = (pass == Pass::forward) != call.is_transposed;
  if (is_to_smaller && call.groups == 1) return call.input.scalar_type() != at::kDouble;
  return winograd_tile(call, pass).has_value();
}

std::optional<cpu::WinogradTile> winograd_tile(const Call& call, Pass pass) {
  if (call.input.scalar_type() == at::kDouble) return {};
  cpu::WinogradTile tile = {{1, 1, 1}};
  const auto axes = static_cast<int64_t>(call.axes());
  bool has_three_taps = false;
  for (int64_t index = 0; index < axes; ++index) {
    const c10::SymInt &taps = call.weight.sym_size(index + 2), &padding = call.padding[index];
    if (call.stride[index] != 1 || call.dilation[index] != 1 || call.output_padding[index] != 0) return {};
    if ((taps != 1 || padding != 0) && (taps != 3 || padding > 2)) return {};
    if (taps == 3) tile.results[3 - axes + index] = 2, has_three_taps = true;
  }
  if (!has_three_taps) return {};
  if (call.has_symbolic_sizes()) return tile;
  if (tile.results[2] == 2 && is_right_by_wide_tiles(call, pass)) tile.results[2] = 4;
  tile.terms = right_terms(call, pass);
  return tile;
}

std::optional<cpu::WinogradTile> faster_winograd_tile(const Call& call, Pass pass) {
  if (!is_winograd_on() || call.weight.size(1) < 16) return {};
  const Sizes sizes(call);
  if (sizes.outputs < 16) return {};
  const bool is_of_weight = pass == Pass::weight_gradient;
  // For few positions, most of the time is the transform of the weight. AVX-512 has the registers for it.
  if (sizes.positions < (is_of_weight ? 128 : 64)) return {};
  const bool has_avx512 = onednn_isa() != OnednnIsa::below_avx512, is_quick = !sizes.is_3d && has_avx512;
  const int64_t most_weights = (is_quick ? 12'500 : 2'500) * sizes.positions;
  if (!is_of_weight && sizes.positions < 512 && call.weight.numel() > most_weights) return {};
  // The Xeon's own products of one small image are faster, and so are our inner products.
  const bool is_few = pass == Pass::forward && is_quick && call.groups == 1 && sizes.positions < 128;
  if (is_few && onednn_isa() == OnednnIsa::amx && !is_onednns(call.backend())) return {};
  const auto tile = winograd_tile(call, pass);
  if (!tile) return {};
  // A block of a dozen tiles, and of some results, takes at most 8 MB.
  constexpr int64_t tiles_of_block = 12, outputs_of_block = 128, most_floats = 1 << 21;
  const int64_t floats_of_tile = tile->points() * (std::max(sizes.inputs, sizes.outputs) + outputs_of_block);
  if (!is_of_weight && tiles_of_block * floats_of_tile > most_floats) return {};
  int64_t filtered = 0, tiles = call.input.size(0);
  for (int64_t from_last = 1; from_last <= static_cast<int64_t>(call.axes()); ++from_last) {
    const int64_t results = tile->results[3 - from_last];
    tiles *= (call.axis(from_last).positions.expect_int() + results - 1) / results;
    if (results > 1) ++filtered;
  }
  // One axis saves a third of the products, and transforms cost as much. Groups transform few channels at a time.
  const bool is_grouped = call.groups > 1;
  const int64_t least = filtered == 2 ? (is_grouped ? 64 : 32) : is_grouped && has_avx512 ? 24 : 16;
  if (filtered < 2 || std::min(sizes.inputs, sizes.outputs) < least) return {};
  // What lies beyond the edges of an array is multiplied as well.
  const double saved = static_cast<double>(sizes.positions * sizes.taps) / static_cast<double>(tiles * tile->points());
  if (saved < (is_of_weight ? 1.5 : 2)) return {};
  const bool is_exact = filtered < 3 || sizes.positions >= 1728 || !is_by_exact_products(call, sizes);
  return is_of_weight && !is_exact ? std::nullopt : tile;
}

bool is_pointwise(const Call& call) {
  if (call.groups != 1 || call.input.scalar_type() == at::kDouble) return false;
  for (size_t index = 0; index < call.axes(); ++index) {
    if (!has_plain_tap(call, index)) return false;
  }
  const c10::SymInt &outputs = call.weight.sym_size(0), &inputs = call.weight.sym_size(1);
  return outputs.min(inputs) <= cpu::most_few && outputs.max(inputs) <= cpu::most_pointwise_channels;
}

}  // namespace nhwc
