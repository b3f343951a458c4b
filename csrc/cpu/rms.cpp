#include "cpu/rms.h"

#include <ATen/ATen.h>

#include <vector>

#include "cpu/dispatch.h"
#include "cpu/rms_kernels.h"
#include "cpu/work/ranges.h"

namespace nhwc::cpu {
namespace {

/// The kernels of a norm, and its parameters as they read them.
class Passes {
 public:
  explicit Passes(const ChannelRms& rms)
      : type(rms.input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat),
        channels(rms.input.size(1)),
        rows(rms.input.numel() / channels),
        kernels(rms.has_silu ? of_type(level_kernels().rms, rms.input.scalar_type()).with_silu
                             : of_type(level_kernels().rms, rms.input.scalar_type()).alone),
        rms_(rms),
        weight_(rms.weight.to(type)),
        bias_(rms.bias.defined() ? rms.bias.to(type) : at::zeros({channels}, weight_.options())) {}

  RmsRows shape(int64_t count) const {
    return {count, channels, weight_.const_data_ptr(), bias_.const_data_ptr(), rms_.scale, rms_.eps};
  }
  int64_t bytes_of_row() const { return channels * rms_.input.element_size(); }

  const at::ScalarType type;  // of numbers
  const int64_t channels, rows;
  const RmsPasses& kernels;

 private:
  const ChannelRms& rms_;
  const at::Tensor weight_, bias_;
};

const char* read(const at::Tensor& tensor) { return static_cast<const char*>(tensor.const_data_ptr()); }
char* written(const at::Tensor& tensor) { return static_cast<char*>(tensor.mutable_data_ptr()); }

}  // namespace

bool can_run(const ChannelRms& rms) {
  switch (rms.input.scalar_type()) {
    case at::kFloat:
    case at::kHalf:
    case at::kBFloat16: return rms.input.is_cpu();
    case at::kDouble: return rms.input.is_cpu() && !rms.has_silu;
    default: return false;
  }
}

void channel_rms_norm(const ChannelRms& rms, const at::Tensor& out) {
  if (out.numel() == 0) return;
  const Passes passes(rms);
  const Parts parts(passes.rows, std::max<int64_t>(1, elements_worth_a_thread / passes.channels));
  const char* from = read(rms.input);
  char* to = written(out);
  for_each_task(parts.parts, parts.size * passes.channels * products_of_element, 0, [&](int64_t part, char*) {
    const int64_t at = parts.begin(part) * passes.bytes_of_row();
    passes.kernels.forward(passes.shape(parts.size_of(part)), from + at, to + at);
  });
}

void channel_rms_norm_backward(const ChannelRms& rms, const at::Tensor& grad, const at::Tensor& grad_input,
                               const at::Tensor& grad_weight, const at::Tensor& grad_bias) {
  const Passes passes(rms);
  const int64_t channels = passes.channels, bytes_of_number = passes.type == at::kDouble ? 8 : 4;
  // The sums of a block are in numbers, those of a part and of all in doubles: of weight and bias, one after the other.
  constexpr int64_t rows_of_block = 16;
  const Parts parts(passes.rows, divide_up(passes.rows, enough_tasks), rows_of_block);
  std::vector<double> sums(std::max<int64_t>(1, parts.parts) * 2 * channels);
  const char *from = grad.numel() == 0 ? nullptr : read(rms.input), *of_out = grad.numel() == 0 ? nullptr : read(grad);
  char* to = grad_input.defined() && grad.numel() != 0 ? written(grad_input) : nullptr;
  const auto add_block = [&](int64_t row, int64_t count, char* scratch, double* of_part) {
    std::fill_n(scratch, 2 * channels * bytes_of_number, 0);
    const int64_t at = row * passes.bytes_of_row();
    char* const of_bias = scratch + channels * bytes_of_number;
    passes.kernels.backward(passes.shape(count), of_out + at, from + at, to ? to + at : nullptr, scratch, of_bias,
                            of_bias + channels * bytes_of_number);
    for (int64_t k = 0; k < 2 * channels; ++k) {
      of_part[k] += passes.type == at::kDouble ? reinterpret_cast<const double*>(scratch)[k]
                                               : static_cast<double>(reinterpret_cast<const float*>(scratch)[k]);
    }
  };
  for_each_task(parts.parts, parts.size * channels * products_of_element, 3 * channels * bytes_of_number,
                [&](int64_t part, char* scratch) {
                  const auto [begin, end] = parts[part];
                  for (int64_t row = begin; row < end; row += rows_of_block) {
                    add_block(row, std::min(rows_of_block, end - row), scratch, sums.data() + part * 2 * channels);
                  }
                });
  add_up_parts<double>(sums.data(), parts.parts, 2 * channels);
  const at::Tensor total = at::from_blob(sums.data(), {2, channels}, at::kDouble);
  if (grad_weight.defined()) grad_weight.copy_(total[0]);
  if (grad_bias.defined()) grad_bias.copy_(total[1]);
}

}  // namespace nhwc::cpu
