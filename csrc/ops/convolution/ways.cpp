#include "ops/convolution/ways.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <iterator>

#include "layout/channels_last.h"
#include "ops/composition.h"
#include "ops/convolution/float32.h"
#include "ops/convolution/mended.h"
#include "ops/convolution/passes.h"
#include "ops/convolution/rewriting.h"
#include "ops/convolution/volumes.h"

namespace nhwc {
namespace {

// Calls that PyTorch computes or refuses by itself.

bool is_unfit(const Call& call) { return !is_composed(call.input) || !call.is_accepted(); }

/// Computes PyTorch's result, and restores the format of the input where PyTorch loses it.
at::Tensor by_pytorch_restored(const Call& call) {
  return changed(call, [](const Call& same) { return same.pytorchs(); });
}

// Inputs as they come.

bool is_one_sample(const Call& call) { return static_cast<size_t>(call.input.dim()) == call.axes() + 1; }

at::Tensor as_batch(const Call& call) {
  Call batch = call;
  batch.input = call.input.unsqueeze(0);
  return convolution(batch).squeeze(0);
}

/// Returns whether a contiguous volume meets a channels-last weight. Of 2D ones PyTorch itself takes the weight's
/// format, of volumes only where oneDNN computes.
bool is_volume_in_other_format(const Call& call) {
  if (call.axes() != 3 || is_channels_last(call.input) || !is_channels_last(call.weight)) return false;
  return !has_channels_last_strides(call.input);
}

at::Tensor formatted(const Call& call) {
  Call other = call;
  other.input = to_channels_last(call.input);
  return convolution(other);
}

/// Returns whether PyTorch's kernels may go by an odd stride, which weight gradients were wrong by.
bool is_odd(const Call& call) { return has_odd_strides(call.input); }

at::Tensor restrided(const Call& call) {
  Call other = call;
  other.input = with_canonical_strides(call.input);
  return convolution(other);
}

// What remains.

/// Returns whether PyTorch's result of a channels-last input is not.
bool loses_format(const Call& call) {
  if (!is_channels_last(call.input)) return false;
  const at::MemoryFormat format = call.axes() == 3 ? at::MemoryFormat::ChannelsLast3d : at::MemoryFormat::ChannelsLast;
  return call.input.is_complex() ||
         at::native::_determine_backend_memory_format(call.input, call.weight, call.backend()) != format;
}

bool always(const Call&) { return true; }

at::Tensor by_pytorch(const Call& call) { return call.pytorchs(); }

const Way ways[] = {
    {"unfit", is_unfit, by_pytorch_restored},
    {"batched", is_one_sample, as_batch},
    {"formatted", is_volume_in_other_format, formatted},
    {"restrided", is_odd, restrided},
    {"kernels", is_by_kernels, by_passes},
    {"narrowed", mended::is_column, mended::narrowed},
    {"trimmed", mended::has_depth_under_no_tap, mended::trimmed},
    {"padded", mended::is_small_input, mended::padded_before},
    {"sliced", mended::is_strided_tap, mended::sliced},
    {"widened", mended::is_transposed_column, mended::widened},
    {"extended", mended::is_extended_tap, mended::extended},
    {"cut", mended::is_small_output, mended::cut},
    {"linear", volumes::is_linear, volumes::linear},
    {"along_depth", volumes::has_one_tap_in_the_plane, volumes::along_depth},
    {"gathered", volumes::has_few_positions, volumes::gathered},
    {"slabs", volumes::gains_from_slabs, volumes::in_slabs},
    {"kernels_in_part", is_by_kernels_in_part, by_passes},
    {"float32", needs_float32, by_passes},
    {"restored", loses_format, by_pytorch_restored},
    {"pytorch", always, by_pytorch},
};

}  // namespace

const Way& way_of(const Call& call) {
  return *std::find_if(std::begin(ways), std::end(ways), [&](const Way& way) { return way.applies(call); });
}

bool is_pytorchs(const Way& way) {
  return way.compute == by_passes || way.compute == by_pytorch_restored || way.compute == by_pytorch;
}

at::Tensor convolution(const Call& call) { return way_of(call).compute(call); }

}  // namespace nhwc
