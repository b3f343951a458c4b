// What PyTorch's CPU convolutions compute wrong, and whether this machine and this PyTorch do.
#pragma once

namespace nhwc {

/// The instruction sets of oneDNN that its faults and its speed depend on. One with AMX has AVX-512, too.
enum class OnednnIsa { unknown, below_avx512, avx512, amx };

/// Returns the instruction set of oneDNN on this machine, which the environment may bound.
OnednnIsa onednn_isa();

/// The convolutions that oneDNN computes wrong. Where nothing was measured, all of them are expected.
struct ConvolutionFaults {
  /// Along some axis no output position sees the whole kernel: the weight's gradient is memory that nobody wrote, or
  /// the heap is damaged; more rarely another gradient, or the output.
  bool small_inputs;
  /// Filters of one channel, a strided width, and a result of width 1: outputs are memory that nobody wrote.
  bool strided_columns;
  /// 2D kernels of one tap with strides, on fewer than 16 channels in channels-last: the weight's gradient is wrong, or
  /// the heap is damaged. Of transposed ones those with an output padding.
  bool strided_taps;
  /// Half precision: many positions of the kernel in the padding, and dilated filters.
  bool halves;
  /// Half precision with AMX: the rules are in `float32.cpp`, and results of one column are wrong for any number of
  /// channels.
  bool halves_with_amx;
};

/// Returns the faults to be expected, by the PyTorch that the library was built for and by oneDNN's instruction set.
const ConvolutionFaults& convolution_faults();

}  // namespace nhwc
