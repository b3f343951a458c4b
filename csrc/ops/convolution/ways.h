// The ways to compute a convolution: one table, of which the first row that applies is taken.
//
// A row rewrites the call, and the table is asked again, or computes it. Every way is a composition of PyTorch's
// operators, so that derivatives of any order, transforms and compilers need no more, but those of passes.h, which turn
// into a composition for these, or into opaque operators for compilers.
#pragma once

#include "ops/convolution/call.h"

namespace nhwc {

/// A row of the table.
struct Way {
  const char* name;
  /// Says whether a call goes this way, if no earlier row applies.
  bool (*applies)(const Call& call);
  at::Tensor (*compute)(const Call& call);
};

/// Returns the first way that applies. Only shapes, strides, dtypes, gradients to come and the machine are looked at.
const Way& way_of(const Call& call);

/// Returns whether a way without our kernels computes PyTorch's own passes.
bool is_pytorchs(const Way& way);

/// Returns the convolution, by its way.
at::Tensor convolution(const Call& call);

}  // namespace nhwc
