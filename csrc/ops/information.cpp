// The operators that return information about the library.
#include <torch/library.h>

#include "cpu/dispatch.h"
#include "cuda/norms.h"
#include "in_place/sentences.h"

namespace nhwc {
namespace {

std::string sentence_kernel(c10::string_view reason) { return sentence_of(reason); }

}  // namespace

TORCH_LIBRARY_IMPL(nhwc, CompositeExplicitAutograd, m) {
  m.impl("cpu_capability", TORCH_FN(cpu::capability));
  m.impl("runs_cuda_norms", TORCH_FN(cuda::runs_norms));
  m.impl("set_cuda_norms", TORCH_FN(cuda::set_norms));
  m.impl("missing_cuda_image", TORCH_FN(cuda::missing_image));
  m.impl("sentence", TORCH_FN(sentence_kernel));
}

}  // namespace nhwc
