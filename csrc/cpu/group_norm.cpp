#include "cpu/group_norm.h"

#include <ATen/Dispatch.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/dispatch.h"
#include "cpu/work/ranges.h"

namespace nhwc::cpu {
namespace {

/// Returns a parameter as doubles, or a default for all channels.
std::vector<double> doubles_of(const at::Tensor& parameter, int64_t channels, double otherwise) {
  std::vector<double> values(channels, otherwise);
  if (!parameter.defined()) return values;
  const int64_t step = parameter.stride(0);
  // Not by `to`, a call of the dispatcher that takes longer than a small norm.
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, parameter.scalar_type(), "nhwc::group_norm", [&] {
    const auto* from = parameter.const_data_ptr<scalar_t>();
    for (int64_t c = 0; c < channels; ++c) values[c] = static_cast<double>(from[c * step]);
  });
  return values;
}

/// Some or all rows of a sample.
struct Piece {
  int64_t sample, part, first_row, rows;
};

/// Splits samples so that all threads have some rows. It depends on the number of threads alone.
class Pieces {
 public:
  explicit Pieces(const GroupNormShape& shape) : shape_(shape) {
    const int64_t threads = at::in_parallel_region() ? 1 : at::get_num_threads();
    const int64_t per_sample = (threads + shape.samples - 1) / shape.samples;
    parts_ = std::max<int64_t>(1, std::min(per_sample, shape.rows * shape.channels / elements_worth_a_thread));
    part_rows_ = (shape.rows + parts_ - 1) / parts_;
    parts_ = (shape.rows + part_rows_ - 1) / part_rows_;
  }

  int64_t parts() const { return parts_; }
  int64_t rows_of(int64_t part) const { return std::min(part_rows_, shape_.rows - part * part_rows_); }

  /// Calls `work(piece)` for all pieces, in parallel where that is faster.
  template <typename Work>
  void for_each(const Work& work) const {
    const int64_t grain = std::max<int64_t>(1, elements_worth_a_thread / (part_rows_ * shape_.channels));
    at::parallel_for(0, shape_.samples * parts_, grain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t part = i % parts_;
        work({i / parts_, part, part * part_rows_, rows_of(part)});
      }
    });
  }

 private:
  GroupNormShape shape_;
  int64_t parts_ = 1, part_rows_ = 0;
};

/// Two numbers for each channel of each part of each sample.
class Sums {
 public:
  Sums(const GroupNormShape& shape, const Pieces& pieces)
      : channels_(shape.channels), parts_(pieces.parts()), values_(2 * channels_ * shape.samples * parts_) {}
  double* first(int64_t sample, int64_t part = 0) { return values_.data() + 2 * channels_ * (sample * parts_ + part); }
  double* second(int64_t sample, int64_t part = 0) { return first(sample, part) + channels_; }

 private:
  int64_t channels_, parts_;
  std::vector<double> values_;
};

/// Numbers of the channels, and these as the kernels take them.
class Parameters {
 public:
  Parameters(const NormKernels& kernels, int64_t channels)
      : kernels_(kernels), values_(channels), spread_(kernels.period(channels)) {}
  double& operator[](int64_t channel) { return values_[channel]; }
  const void* spread() {
    kernels_.spread(values_.data(), values_.size(), spread_.size(), spread_.data());
    return spread_.data();
  }

 private:
  const NormKernels& kernels_;
  std::vector<double> values_, spread_;  // the latter with room for floats or doubles
};

double get(const at::Tensor& statistics, int64_t index) {
  return statistics.scalar_type() == at::kDouble ? statistics.const_data_ptr<double>()[index]
                                                 : statistics.const_data_ptr<float>()[index];
}

void set(const at::Tensor& statistics, int64_t index, double value) {
  if (statistics.scalar_type() == at::kDouble) {
    statistics.mutable_data_ptr<double>()[index] = value;
  } else {
    statistics.mutable_data_ptr<float>()[index] = static_cast<float>(value);
  }
}

}  // namespace

void group_norm(const GroupNormShape& shape, const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                double eps, const at::Tensor& out, const at::Tensor& mean, const at::Tensor& rstd,
                const at::Tensor& variances) {
  const NormKernels& kernels = of_type(level_kernels().norm, input.scalar_type());
  const int64_t channels = shape.channels, of_group = channels / shape.groups, element = input.element_size();
  const std::vector<double> scale = doubles_of(weight, channels, 1), shift = doubles_of(bias, channels, 0);
  const Pieces pieces(shape);
  const auto* from = static_cast<const char*>(input.const_data_ptr());
  auto* to = static_cast<char*>(out.mutable_data_ptr());
  const auto offset = [&](const Piece& piece) {
    return (piece.sample * shape.rows + piece.first_row) * channels * element;
  };
  Sums moments(shape, pieces);  // the mean, and the sum of squared deviations

  const auto sum = [&](const Piece& piece) {
    std::vector<double> scratch(7 * kernels.period(channels));
    kernels.moments(from + offset(piece), piece.rows, channels, moments.first(piece.sample, piece.part),
                    moments.second(piece.sample, piece.part), scratch.data());
  };
  const auto normalise = [&](const Piece& piece) {
    const double *means = moments.first(piece.sample), *deviations = moments.second(piece.sample);
    Parameters m(kernels, channels), a(kernels, channels), b(kernels, channels);
    for (int64_t first = 0; first < channels; first += of_group) {
      double average = 0, squares = 0;
      for (int64_t c = first; c < first + of_group; ++c) average += means[c];
      average /= of_group;
      for (int64_t c = first; c < first + of_group; ++c) {
        squares += deviations[c] + shape.rows * (means[c] - average) * (means[c] - average);
      }
      // Rounding may make it negative; not-a-number stays.
      const double variance = (squares < 0 ? 0 : squares) / (of_group * shape.rows), r = 1 / std::sqrt(variance + eps);
      const double rounded = input.scalar_type() == at::kDouble ? average : static_cast<float>(average);
      for (int64_t c = first; c < first + of_group; ++c) {
        m[c] = average;
        a[c] = r * scale[c];
        b[c] = shift[c] + (rounded - average) * a[c];
      }
      if (piece.part == 0) {
        const int64_t group = piece.sample * shape.groups + first / of_group;
        set(mean, group, average);
        set(rstd, group, r);
        if (variances.defined()) set(variances, group, variance);
      }
    }
    kernels.normalise(from + offset(piece), to + offset(piece), piece.rows, channels, m.spread(), a.spread(),
                      b.spread());
  };

  if (pieces.parts() == 1) {
    pieces.for_each([&](const Piece& piece) {
      sum(piece);
      normalise(piece);
    });
    return;
  }
  pieces.for_each(sum);
  // Parts are merged like blocks, see `moments`.
  for (int64_t sample = 0; sample < shape.samples; ++sample) {
    double *means = moments.first(sample), *deviations = moments.second(sample);
    int64_t seen = pieces.rows_of(0);
    for (int64_t part = 1; part < pieces.parts(); seen += pieces.rows_of(part++)) {
      const double *part_means = moments.first(sample, part), *part_deviations = moments.second(sample, part);
      const auto rows = static_cast<double>(pieces.rows_of(part)), share = rows / (rows + seen);
      for (int64_t c = 0; c < channels; ++c) {
        const double difference = part_means[c] - means[c];
        // The difference to an infinite mean is infinite, and so would be its share.
        means[c] = std::isfinite(difference) ? means[c] + difference * share : means[c] + part_means[c];
        deviations[c] += part_deviations[c] + difference * difference * seen * share;
      }
    }
  }
  pieces.for_each(normalise);
}

void group_norm_backward(const GroupNormShape& shape, const at::Tensor& grad, const at::Tensor& input,
                         const at::Tensor& mean, const at::Tensor& rstd, const at::Tensor& weight,
                         const at::Tensor& grad_input, const at::Tensor& grad_weight, const at::Tensor& grad_bias,
                         bool is_of_input) {
  const NormKernels& kernels = of_type(level_kernels().norm, input.scalar_type());
  const int64_t channels = shape.channels, of_group = channels / shape.groups, element = input.element_size();
  const std::vector<double> scale = doubles_of(weight, channels, 1);
  const Pieces pieces(shape);
  const auto* from_grad = static_cast<const char*>(grad.const_data_ptr());
  const auto* from = static_cast<const char*>(input.const_data_ptr());
  auto* to = grad_input.defined() ? static_cast<char*>(grad_input.mutable_data_ptr()) : nullptr;
  const auto offset = [&](const Piece& piece) {
    return (piece.sample * shape.rows + piece.first_row) * channels * element;
  };
  const auto means_of = [&](const Piece& piece) {
    Parameters m(kernels, channels);
    for (int64_t c = 0; c < channels; ++c) m[c] = get(mean, piece.sample * shape.groups + c / of_group);
    return m;
  };
  Sums sums(shape, pieces);  // of the gradient, and of its products with the deviations from the mean

  const bool needs_sums = is_of_input || grad_weight.defined() || grad_bias.defined();
  const auto sum = [&](const Piece& piece) {
    if (!needs_sums) return;
    Parameters m = means_of(piece);
    std::vector<double> scratch(7 * kernels.period(channels));
    kernels.backward_sums(from_grad + offset(piece), from + offset(piece), piece.rows, channels, m.spread(),
                          sums.first(piece.sample, piece.part), sums.second(piece.sample, piece.part), scratch.data());
  };
  const auto write = [&](const Piece& piece) {
    const double *sum = sums.first(piece.sample), *product = sums.second(piece.sample);
    Parameters m = means_of(piece), a(kernels, channels), p(kernels, channels), b(kernels, channels);
    for (int64_t first = 0; first < channels; first += of_group) {
      const double r = get(rstd, piece.sample * shape.groups + first / of_group), elements = of_group * shape.rows;
      double weighted_sum = 0, weighted_product = 0;
      for (int64_t c = first; c < first + of_group; ++c) {
        weighted_sum += scale[c] * sum[c];
        weighted_product += scale[c] * product[c];
      }
      for (int64_t c = first; c < first + of_group; ++c) {
        a[c] = r * scale[c];
        p[c] = -r * r * r * weighted_product / elements;
        b[c] = -r * weighted_sum / elements;
      }
    }
    const int64_t at = offset(piece);
    if (!is_of_input) {  // the input takes no part, whatever is in it
      Parameters zero(kernels, channels);
      kernels.normalise(from_grad + at, to + at, piece.rows, channels, zero.spread(), a.spread(), zero.spread());
      return;
    }
    kernels.backward(from_grad + at, from + at, to + at, piece.rows, channels, m.spread(), a.spread(), p.spread(),
                     b.spread());
  };

  if (pieces.parts() == 1) {
    pieces.for_each([&](const Piece& piece) {
      sum(piece);
      if (to) write(piece);
    });
  } else {
    pieces.for_each(sum);
    for (int64_t sample = 0; sample < shape.samples; ++sample) {
      double* all = sums.first(sample);
      for (int64_t part = 1; part < pieces.parts(); ++part) {
        const double* own = sums.first(sample, part);
        for (int64_t i = 0; i < 2 * channels; ++i) all[i] += own[i];
      }
    }
    if (to) pieces.for_each(write);
  }
  // The gradients of the parameters are sums over the samples.
  double* of_weight = grad_weight.defined() ? grad_weight.mutable_data_ptr<double>() : nullptr;
  double* of_bias = grad_bias.defined() ? grad_bias.mutable_data_ptr<double>() : nullptr;
  if (of_weight) std::fill_n(of_weight, channels, 0.0);
  if (of_bias) std::fill_n(of_bias, channels, 0.0);
  for (int64_t sample = 0; sample < shape.samples; ++sample) {
    const double *sum = sums.first(sample), *product = sums.second(sample);
    for (int64_t group = 0; of_weight && group < shape.groups; ++group) {
      const double r = get(rstd, sample * shape.groups + group);
      for (int64_t c = group * of_group; c < (group + 1) * of_group; ++c) of_weight[c] += product[c] * r;
    }
    for (int64_t c = 0; of_bias && c < channels; ++c) of_bias[c] += sum[c];
  }
}

}  // namespace nhwc::cpu
