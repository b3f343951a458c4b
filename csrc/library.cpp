// Every schema of the library, with its tags. The kernels are registered beside their code.
#include <torch/library.h>

TORCH_LIBRARY(nhwc, m) {
  const std::vector<at::Tag> compliant = {at::Tag::pt2_compliant_tag};
  m.def("convert_weight(Tensor weight, MemoryFormat? memory_format=None, *, ScalarType? dtype=None) -> Tensor",
        compliant);
  m.def("convert_weights(Tensor[] weights, MemoryFormat? memory_format=None, *, ScalarType? dtype=None) -> Tensor[]",
        compliant);
  m.def("convert_weight_(Tensor(a!) weight, MemoryFormat? memory_format=None, *, str storage=\"auto\") -> int");
  m.def("convert_weights_(Tensor(a!)[] weights, MemoryFormat? memory_format=None, *, str storage=\"auto\") -> int[]");
  m.def("lay_out_weights_(Tensor(a!)[] weights, int[] strides, *, str storage=\"auto\") -> int[]");
  m.def("copy_weight_(Tensor(a!) self, Tensor weight) -> ()", compliant);
  m.def("plan_weights(Tensor[] weights, MemoryFormat? memory_format=None, *, str storage=\"auto\") -> int[]");
  m.def("cpu_capability() -> str", compliant);
  m.def("sentence(str reason) -> str", compliant);
}
