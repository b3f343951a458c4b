// How a convolution is computed: the table of ways, and the rules that choose one. Each rule is asked once a call.
//
// Only shapes, strides, dtypes, gradients to come and the machine are looked at, never the numbers.
#pragma once

#include <ATen/Context.h>

#include <optional>

#include "cpu/winograd_kernels.h"
#include "cuda/depthwise.h"
#include "ops/convolution/call.h"
#include "ops/convolution/rewrites.h"

namespace nhwc {

/// What a way is for.
enum class Kind {
  pytorchs,  // PyTorch's own result, at most in another format
  faster,    // PyTorch's result is as right, and slower or in another format
  mended,    // PyTorch's result or a gradient is wrong
  ours,      // our kernels compute a pass
};

const char* name_of(Kind kind);

/// A row of the table.
struct Way {
  const char* name;
  Kind kind;
  bool in_graphs;  // or PyTorch's convolution is in compiled graphs, where Inductor chooses layouts
  /// Says whether a call goes this way, if no earlier row applies. Null where `choose` itself says so.
  bool (*applies)(const Call& call) = nullptr;
  /// Changes the call and asks again. Null where the call is computed by its passes.
  at::Tensor (*rewrite)(const Call& call, Convolution convolution) = nullptr;
};

/// For each pass, whether our kernels compute it. The gradient of the bias comes with the weight's.
struct KernelPasses {
  bool forward = false, input_gradient = false, weight_gradient = false;
  bool by_winograd = false;  // those of dense convolutions, with fewer multiplications
};

/// Who computes the other passes.
enum class Others { pytorch, pytorch_in_float32, pytorch_in_contiguous, products };

/// How a call is computed.
struct Choice {
  const Way* way;
  KernelPasses kernels = {};
  Others others = Others::pytorch;
};

/// Returns the precision that PyTorch's settings require of oneDNN in float32.
at::Float32Precision onednn_precision(at::Float32Op op);

/// Returns the first way that applies.
Choice choose(const Call& call);

/// Returns a depthwise convolution of volumes as the kernels on a GPU take it.
cuda::Depthwise depthwise_on_cuda(const Call& call);

/// Returns whether our kernels compute a convolution with one tap and few inputs or outputs: products of pixels.
bool is_pointwise(const Call& call);

enum class Pass { forward, input_gradient, weight_gradient };

/// Returns whether our kernels can compute a pass of tensors that they take.
bool is_computable(const Call& call, Pass pass);

/// Returns the tile by which Winograd's filtering computes a pass of a dense convolution, if it can.
std::optional<cpu::WinogradTile> winograd_tile(const Call& call, Pass pass);

/// Returns the same if that is faster than all else.
std::optional<cpu::WinogradTile> faster_winograd_tile(const Call& call, Pass pass);

}  // namespace nhwc
