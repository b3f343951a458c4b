// Every schema of the library, with its tags. Kernels are registered next to their code.
#include <torch/library.h>

TORCH_LIBRARY(nhwc, m) {
  const std::vector<at::Tag> compliant = {at::Tag::pt2_compliant_tag};
  m.def("convert_weight(Tensor weight, MemoryFormat? memory_format=None, *, ScalarType? dtype=None) -> Tensor",
        compliant);
  m.def("convert_weights(Tensor[] weights, MemoryFormat? memory_format=None, *, ScalarType? dtype=None) -> Tensor[]",
        compliant);
  m.def("convert_weight_(Tensor(a!) weight, MemoryFormat? memory_format=None, *, str storage=\"auto\") -> int");
  m.def("convert_weights_(Tensor(a!)[] weights, MemoryFormat? memory_format=None, *, str storage=\"auto\") -> int[]");
  m.def("set_strides_(Tensor(a!)[] weights, int[] strides, *, str storage=\"auto\") -> int[]");
  m.def("copy_weight_(Tensor(a!) self, Tensor weight) -> ()", compliant);
  m.def("plan_weights(Tensor[] weights, MemoryFormat? memory_format=None, *, str storage=\"auto\") -> int[]");
  m.def("mismatched_layouts(Tensor[] weights, Tensor[] companions) -> int[]");

  // Layers on channels-last activations. Each computes what PyTorch's operator of the same name does, and calls it for
  // an activation that is not channels-last.
  m.def("group_norm(Tensor input, int num_groups, Tensor? weight=None, Tensor? bias=None, float eps=1e-05) -> Tensor",
        compliant);
  m.def(
      "instance_norm(Tensor input, Tensor(a!)? running_mean=None, Tensor(b!)? running_var=None, Tensor? weight=None, "
      "Tensor? bias=None, bool use_input_stats=True, float momentum=0.1, float eps=1e-05) -> Tensor");
  m.def(
      "batch_norm(Tensor input, Tensor(a!)? running_mean, Tensor(b!)? running_var, Tensor? weight=None, "
      "Tensor? bias=None, bool training=False, float momentum=0.1, float eps=1e-05) -> Tensor");
  // With more than PyTorch's function: factors and summands of the channels, and an activation, none or silu.
  m.def(
      "normalize(Tensor input, Tensor? weight=None, Tensor? bias=None, float scale=1., float eps=1e-12, "
      "str activation=\"none\", Tensor? input_bias=None) -> Tensor",
      compliant);
  m.def("gelu(Tensor input, *, str approximate=\"none\") -> Tensor", compliant);
  m.def("linear(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor", compliant);
  m.def("softmax(Tensor input, int dim, ScalarType? dtype=None) -> Tensor", compliant);
  m.def("log_softmax(Tensor input, int dim, ScalarType? dtype=None) -> Tensor", compliant);
  m.def(
      "avg_pool3d(Tensor input, int[3] kernel_size, int[3] stride=[], int[3] padding=0, bool ceil_mode=False, "
      "bool count_include_pad=True, int? divisor_override=None) -> Tensor",
      compliant);
  m.def("adaptive_avg_pool3d(Tensor input, SymInt[3] output_size) -> Tensor", compliant);
  m.def("adaptive_max_pool3d(Tensor input, int[3] output_size) -> (Tensor, Tensor)", compliant);
  m.def("max_unpool3d(Tensor input, Tensor indices, SymInt[3] output_size, int[3] stride, int[3] padding) -> Tensor",
        compliant);
  m.def("pad_circular(Tensor input, SymInt[] pad) -> Tensor", compliant);
  m.def("pad(Tensor input, SymInt[] pad, str mode) -> Tensor", compliant);
  m.def(
      "interpolate(Tensor input, SymInt[]? size, float[]? scale_factors, str mode, bool align_corners=False) "
      "-> Tensor",
      compliant);
  m.def(
      "conv2d(Tensor input, Tensor weight, Tensor? bias=None, SymInt[2] stride=1, SymInt[2] padding=0, "
      "SymInt[2] dilation=1, SymInt groups=1) -> Tensor",
      compliant);
  m.def(
      "conv2d.padding(Tensor input, Tensor weight, Tensor? bias=None, SymInt[2] stride=1, str padding=\"valid\", "
      "SymInt[2] dilation=1, SymInt groups=1) -> Tensor",
      compliant);
  m.def(
      "conv3d(Tensor input, Tensor weight, Tensor? bias=None, SymInt[3] stride=1, SymInt[3] padding=0, "
      "SymInt[3] dilation=1, SymInt groups=1) -> Tensor",
      compliant);
  m.def(
      "conv3d.padding(Tensor input, Tensor weight, Tensor? bias=None, SymInt[3] stride=1, str padding=\"valid\", "
      "SymInt[3] dilation=1, SymInt groups=1) -> Tensor",
      compliant);
  m.def(
      "conv_transpose2d(Tensor input, Tensor weight, Tensor? bias=None, SymInt[2] stride=1, SymInt[2] padding=0, "
      "SymInt[2] output_padding=0, SymInt groups=1, SymInt[2] dilation=1) -> Tensor",
      compliant);
  m.def(
      "conv_transpose3d(Tensor input, Tensor weight, Tensor? bias=None, SymInt[3] stride=1, SymInt[3] padding=0, "
      "SymInt[3] output_padding=0, SymInt groups=1, SymInt[3] dilation=1) -> Tensor",
      compliant);

  // Kernels of the layers above that PyTorch does not have.
  m.def(
      "native_group_norm(Tensor input, int num_groups, Tensor? weight, Tensor? bias, float eps) "
      "-> (Tensor, Tensor, Tensor)",
      compliant);
  m.def(
      "native_group_norm_backward(Tensor grad, Tensor input, Tensor mean, Tensor rstd, Tensor? weight, int num_groups, "
      "float eps, bool[3] output_mask) -> (Tensor, Tensor, Tensor)",
      compliant);
  m.def(
      "native_instance_norm(Tensor input, Tensor? weight, Tensor? bias, float eps) "
      "-> (Tensor, Tensor, Tensor, Tensor)",
      compliant);
  m.def(
      "native_batch_norm(Tensor input, Tensor(a!)? running_mean, Tensor(b!)? running_var, Tensor? weight, "
      "Tensor? bias, bool training, float momentum, float eps) -> (Tensor, Tensor, Tensor)",
      compliant);
  m.def(
      "native_batch_norm_backward(Tensor grad, Tensor input, Tensor mean, Tensor rstd, Tensor? weight, bool training, "
      "float eps, bool[3] output_mask) -> (Tensor, Tensor, Tensor)",
      compliant);
  // Norms in two steps, with an activation in the second one. Batch norm has no groups. Where a result cannot wait,
  // none is returned.
  m.def(
      "norm_activation(Tensor input, Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias, Tensor? residual, "
      "int groups, bool training, float eps, bool is_float, str activation, float parameter, Tensor? slope=None, "
      "Tensor? input_bias=None) -> Tensor",
      compliant);
  m.def(
      "norm_waiting(Tensor input, Tensor(a!)? running_mean, Tensor(b!)? running_var, Tensor? weight, Tensor? bias, "
      "int groups, bool training, float momentum, float eps, bool is_float, Tensor? input_bias=None) "
      "-> (Tensor mean, Tensor rstd, Tensor waiting)");
  m.def(
      "norm_waiting_sum(Tensor input, Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias, Tensor residual, "
      "int groups, bool training, float eps, bool is_float, Tensor? input_bias=None) -> Tensor");
  // The same of a convolution by oneDNN, where nothing is derived, and of the batch norm after it.
  m.def(
      "convolution_waiting(Tensor input, Tensor weight, Tensor? bias, int[] stride, int[] padding, int[] dilation, "
      "int groups) -> Tensor");
  m.def(
      "convolution_activation(Tensor input, Tensor weight, Tensor? bias, Tensor? running_mean, "
      "Tensor? running_var, Tensor? norm_weight, Tensor? norm_bias, Tensor? residual, int[] stride, int[] padding, "
      "int[] dilation, int groups, float eps, bool is_finite, str activation, float parameter) "
      "-> (Tensor, bool is_finite)");
  m.def(
      "normalize_waiting(Tensor input, Tensor? weight, Tensor? bias, float scale, float eps, Tensor? input_bias=None) "
      "-> Tensor");
  m.def("pad_waiting(Tensor input, int[] pad) -> Tensor");
  // The bias of a convolution on a GPU, which PyTorch adds in a pass of its own.
  m.def("bias_waiting(Tensor convolved, Tensor bias) -> Tensor");
  m.def(
      "bias_activation(Tensor input, Tensor bias, Tensor? residual, str activation, float parameter, "
      "Tensor? slope=None) -> Tensor",
      compliant);
  m.def("waiting_like(Tensor waiting) -> Tensor");
  m.def("waiting_become_(Tensor(a!) waiting, Tensor value) -> ()");
  m.def("records_inputs() -> bool");
  m.def("native_pad_circular(Tensor input, int[] pad) -> Tensor", compliant);
  m.def("native_pad_circular_backward(Tensor grad, int[] pad) -> Tensor", compliant);
  m.def("native_resample(Tensor input, str mode, int[] size, float[] parameters) -> Tensor", compliant);
  m.def("native_resample_backward(Tensor grad, str mode, int[] size, float[] parameters) -> Tensor", compliant);

  m.def(
      "convolution_way(Tensor input, Tensor weight, Tensor? bias, SymInt[] stride, SymInt[] padding, "
      "SymInt[] dilation, SymInt groups, SymInt[]? output_padding=None) -> (str name, str kind, bool in_graphs)",
      compliant);
  m.def(
      "convolution_way.padding(Tensor input, Tensor weight, Tensor? bias, SymInt[] stride, str padding, "
      "SymInt[] dilation, SymInt groups) -> (str name, str kind, bool in_graphs)",
      compliant);
  m.def(
      "compiled_convolution(Tensor input, Tensor weight, Tensor? bias, SymInt[] stride, SymInt[] padding, "
      "SymInt[] dilation, SymInt groups, SymInt[]? output_padding=None) -> Tensor",
      compliant);
  m.def(
      "compiled_convolution.padding(Tensor input, Tensor weight, Tensor? bias, SymInt[] stride, str padding, "
      "SymInt[] dilation, SymInt groups) -> Tensor",
      compliant);
  m.def(
      "convolution_by_kernels(Tensor input, Tensor weight, Tensor? bias, SymInt[] stride, SymInt[] padding, "
      "SymInt[] dilation, bool transposed, SymInt[] output_padding, SymInt groups) -> Tensor",
      compliant);
  m.def(
      "convolution_by_kernels_backward(Tensor grad, Tensor input, Tensor weight, SymInt[] stride, SymInt[] padding, "
      "SymInt[] dilation, bool transposed, SymInt[] output_padding, SymInt groups, bool[3] output_mask) "
      "-> (Tensor, Tensor, Tensor)",
      compliant);
  m.def("computes_in_float32(ScalarType dtype) -> bool", compliant);
  m.def("cpu_capability() -> str", compliant);
  m.def("runs_cuda_norms(Device device) -> bool", compliant);
  m.def("set_cuda_norms(Device device, int[] least_bytes) -> ()");
  m.def("missing_cuda_image(Device device) -> str", compliant);
  m.def("sentence(str reason) -> str", compliant);
}
