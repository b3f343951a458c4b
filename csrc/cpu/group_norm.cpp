#include "cpu/group_norm.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/caches.h"
#include "cpu/dispatch.h"

namespace nhwc::cpu {
namespace {

constexpr int64_t elements_worth_a_thread = 1 << 15;

const NormKernels& kernels_of(at::ScalarType type) {
  const NormKernelsByType& kernels = norm_kernels();
  switch (type) {
    case at::kDouble: return kernels.of_double;
    case at::kFloat: return kernels.of_float;
    case at::kHalf: return kernels.of_half;
    default: TORCH_INTERNAL_ASSERT(type == at::kBFloat16, "a kernel for ", type); return kernels.of_bfloat16;
  }
}

/// A parameter as doubles, the same for all channels where there is none.
std::vector<double> doubles_of(const at::Tensor& parameter, int64_t channels, double otherwise) {
  std::vector<double> values(channels, otherwise);
  if (parameter.defined()) {
    const at::Tensor dense = parameter.to(at::kDouble).contiguous();
    std::copy_n(dense.const_data_ptr<double>(), channels, values.begin());
  }
  return values;
}

/// A part of a sample: some of its rows, or some of its groups of channels, or all.
struct Piece {
  int64_t sample, part, first_row, rows, first_channel, channels;
};

/// How samples are taken apart: by channels, so that a pass finds in cache what the pass before it has read, where that
/// can be had; otherwise by rows, so that all threads have some. The same for the same number of threads.
class Pieces {
 public:
  /// `sample_bytes` are those that a pass reads of a sample.
  Pieces(const GroupNormShape& shape, const NormKernels& kernels, int64_t sample_bytes, int64_t element_bytes)
      : shape_(shape) {
    const int64_t cache = second_level_cache_bytes();
    constexpr int64_t worthwhile_bytes = 128;  // whole lines of cache, and their neighbours
    for (int64_t slices = 2; sample_bytes > 2 * cache && slices <= shape.groups; ++slices) {
      const int64_t channels = shape.channels / slices;
      if (channels * element_bytes < worthwhile_bytes) break;
      if (shape.groups % slices != 0 || kernels.period(channels) != channels) continue;
      slices_ = slices;
      if (sample_bytes / slices <= cache / 4 * 3) break;
    }
    if (sample_bytes / slices_ > cache) slices_ = 1;
    const int64_t threads = at::in_parallel_region() ? 1 : at::get_num_threads();
    const int64_t wanted = (threads + shape.samples - 1) / shape.samples;
    if (slices_ == 1 && wanted > 1) {
      parts_ = std::max<int64_t>(1, std::min(wanted, shape.rows * shape.channels / elements_worth_a_thread));
    }
    part_rows_ = (shape.rows + parts_ - 1) / parts_;
    parts_ = (shape.rows + part_rows_ - 1) / part_rows_;
  }

  int64_t parts() const { return parts_; }
  int64_t rows_of(int64_t part) const { return std::min(part_rows_, shape_.rows - part * part_rows_); }

  /// Calls `work(piece)` for all of them, in parallel where that is worth it.
  template <typename Work>
  void for_each(const Work& work) const {
    const int64_t of_sample = slices_ * parts_, channels = shape_.channels / slices_;
    const int64_t grain = std::max<int64_t>(1, elements_worth_a_thread / (part_rows_ * channels));
    at::parallel_for(0, shape_.samples * of_sample, grain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t part = i % of_sample / slices_, slice = i % slices_;
        work({i / of_sample, part, part * part_rows_, rows_of(part), slice * channels, channels});
      }
    });
  }

 private:
  GroupNormShape shape_;
  int64_t slices_ = 1, parts_ = 1, part_rows_ = 0;
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

/// Numbers of a piece's channels, and these as the kernels take them.
class Parameters {
 public:
  Parameters(const NormKernels& kernels, const Piece& piece)
      : kernels_(kernels), values_(piece.channels), spread_(kernels.period(piece.channels)) {}
  double& operator[](int64_t channel) { return values_[channel]; }
  const void* spread() {
    kernels_.spread(values_.data(), values_.size(), spread_.size(), spread_.data());
    return spread_.data();
  }

 private:
  const NormKernels& kernels_;
  std::vector<double> values_, spread_;  // the latter with room for floats or doubles
};

/// Calls `work(first_row, rows)` for stretches of a piece, the last one first: its rows are those still in cache.
template <typename Work>
void backwards(const Piece& piece, const Work& work) {
  const int64_t stretch = std::max<int64_t>(64, (1 << 14) / piece.channels / 64 * 64);
  for (int64_t begin = (piece.rows - 1) / stretch * stretch; begin >= 0; begin -= stretch) {
    work(piece.first_row + begin, std::min(stretch, piece.rows - begin));
  }
}

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
                double eps, const at::Tensor& out, const at::Tensor& mean, const at::Tensor& rstd) {
  const NormKernels& kernels = kernels_of(input.scalar_type());
  const int64_t stride = shape.channels, of_group = stride / shape.groups, element = input.element_size();
  const std::vector<double> scale = doubles_of(weight, stride, 1), shift = doubles_of(bias, stride, 0);
  const Pieces pieces(shape, kernels, shape.rows * stride * element, element);
  const auto* from = static_cast<const char*>(input.const_data_ptr());
  auto* to = static_cast<char*>(out.mutable_data_ptr());
  const auto offset = [&](const Piece& piece, int64_t row) {
    return ((piece.sample * shape.rows + row) * stride + piece.first_channel) * element;
  };
  Sums moments(shape, pieces);  // the mean, and the sum of squared deviations

  const auto sum = [&](const Piece& piece) {
    std::vector<double> scratch(7 * kernels.period(piece.channels));
    const int64_t first = piece.first_channel;
    kernels.moments(from + offset(piece, piece.first_row), piece.rows, piece.channels, stride,
                    moments.first(piece.sample, piece.part) + first, moments.second(piece.sample, piece.part) + first,
                    scratch.data());
  };
  const auto normalise = [&](const Piece& piece) {
    const double* means = moments.first(piece.sample) + piece.first_channel;
    const double* deviations = moments.second(piece.sample) + piece.first_channel;
    Parameters m(kernels, piece), a(kernels, piece), b(kernels, piece);
    for (int64_t first = 0; first < piece.channels; first += of_group) {
      double average = 0, squares = 0;
      for (int64_t c = first; c < first + of_group; ++c) average += means[c];
      average /= of_group;
      for (int64_t c = first; c < first + of_group; ++c) {
        squares += deviations[c] + shape.rows * (means[c] - average) * (means[c] - average);
      }
      // Below zero by rounding only; what is not a number stays so.
      const double variance = (squares < 0 ? 0 : squares) / (of_group * shape.rows), r = 1 / std::sqrt(variance + eps);
      const double rounded = input.scalar_type() == at::kDouble ? average : static_cast<float>(average);
      for (int64_t c = first; c < first + of_group; ++c) {
        const int64_t channel = piece.first_channel + c;
        m[c] = average;
        a[c] = r * scale[channel];
        b[c] = shift[channel] + (rounded - average) * a[c];
      }
      if (piece.part == 0) {
        const int64_t group = piece.sample * shape.groups + (piece.first_channel + first) / of_group;
        set(mean, group, average);
        set(rstd, group, r);
      }
    }
    const void *ms = m.spread(), *as = a.spread(), *bs = b.spread();
    backwards(piece, [&](int64_t row, int64_t rows) {
      const int64_t at = offset(piece, row);
      kernels.normalise(from + at, to + at, rows, piece.channels, stride, ms, as, bs);
    });
  };

  if (pieces.parts() == 1) {
    pieces.for_each([&](const Piece& piece) {
      sum(piece);
      normalise(piece);
    });
    return;
  }
  pieces.for_each(sum);
  // Merged as blocks are, see moments.
  for (int64_t sample = 0; sample < shape.samples; ++sample) {
    double *means = moments.first(sample), *deviations = moments.second(sample);
    int64_t seen = pieces.rows_of(0);
    for (int64_t part = 1; part < pieces.parts(); seen += pieces.rows_of(part++)) {
      const double *part_means = moments.first(sample, part), *part_deviations = moments.second(sample, part);
      const auto rows = static_cast<double>(pieces.rows_of(part)), share = rows / (rows + seen);
      for (int64_t c = 0; c < stride; ++c) {
        const double difference = part_means[c] - means[c];
        means[c] += difference * share;
        deviations[c] += part_deviations[c] + difference * difference * seen * share;
      }
    }
  }
  pieces.for_each(normalise);
}

void group_norm_backward(const GroupNormShape& shape, const at::Tensor& grad, const at::Tensor& input,
                         const at::Tensor& mean, const at::Tensor& rstd, const at::Tensor& weight,
                         const at::Tensor& grad_input, const at::Tensor& grad_weight, const at::Tensor& grad_bias) {
  const NormKernels& kernels = kernels_of(input.scalar_type());
  const int64_t stride = shape.channels, of_group = stride / shape.groups, element = input.element_size();
  const std::vector<double> scale = doubles_of(weight, stride, 1);
  const Pieces pieces(shape, kernels, 2 * shape.rows * stride * element, element);
  const auto* from_grad = static_cast<const char*>(grad.const_data_ptr());
  const auto* from = static_cast<const char*>(input.const_data_ptr());
  auto* to = grad_input.defined() ? static_cast<char*>(grad_input.mutable_data_ptr()) : nullptr;
  const auto offset = [&](const Piece& piece, int64_t row) {
    return ((piece.sample * shape.rows + row) * stride + piece.first_channel) * element;
  };
  const auto group_at = [&](const Piece& piece, int64_t c) {
    return piece.sample * shape.groups + (piece.first_channel + c) / of_group;
  };
  const auto means_of = [&](const Piece& piece) {
    Parameters m(kernels, piece);
    for (int64_t first = 0; first < piece.channels; first += of_group) {
      const double average = get(mean, group_at(piece, first));
      for (int64_t c = first; c < first + of_group; ++c) m[c] = average;
    }
    return m;
  };
  Sums sums(shape, pieces);  // of the gradient, and of its products with the deviations from the mean

  const auto sum = [&](const Piece& piece) {
    Parameters m = means_of(piece);
    std::vector<double> scratch(7 * kernels.period(piece.channels));
    const int64_t at = offset(piece, piece.first_row), first = piece.first_channel;
    kernels.backward_sums(from_grad + at, from + at, piece.rows, piece.channels, stride, m.spread(),
                          sums.first(piece.sample, piece.part) + first, sums.second(piece.sample, piece.part) + first,
                          scratch.data());
  };
  const auto write = [&](const Piece& piece) {
    const double* sum = sums.first(piece.sample) + piece.first_channel;
    const double* product = sums.second(piece.sample) + piece.first_channel;
    Parameters m = means_of(piece), a(kernels, piece), p(kernels, piece), b(kernels, piece);
    for (int64_t first = 0; first < piece.channels; first += of_group) {
      const double r = get(rstd, group_at(piece, first)), elements = of_group * shape.rows;
      double weighted_sum = 0, weighted_product = 0;
      for (int64_t c = first; c < first + of_group; ++c) {
        weighted_sum += scale[piece.first_channel + c] * sum[c];
        weighted_product += scale[piece.first_channel + c] * product[c];
      }
      for (int64_t c = first; c < first + of_group; ++c) {
        a[c] = r * scale[piece.first_channel + c];
        p[c] = -r * r * r * weighted_product / elements;
        b[c] = -r * weighted_sum / elements;
      }
    }
    const void *ms = m.spread(), *as = a.spread(), *ps = p.spread(), *bs = b.spread();
    backwards(piece, [&](int64_t row, int64_t rows) {
      const int64_t at = offset(piece, row);
      kernels.backward(from_grad + at, from + at, to + at, rows, piece.channels, stride, ms, as, ps, bs);
    });
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
        for (int64_t i = 0; i < 2 * stride; ++i) all[i] += own[i];
      }
    }
    if (to) pieces.for_each(write);
  }
  // Of the parameters: the sums over the samples.
  double* of_weight = grad_weight.defined() ? grad_weight.mutable_data_ptr<double>() : nullptr;
  double* of_bias = grad_bias.defined() ? grad_bias.mutable_data_ptr<double>() : nullptr;
  if (of_weight) std::fill_n(of_weight, stride, 0.0);
  if (of_bias) std::fill_n(of_bias, stride, 0.0);
  for (int64_t sample = 0; sample < shape.samples; ++sample) {
    const double *sum = sums.first(sample), *product = sums.second(sample);
    for (int64_t group = 0; of_weight && group < shape.groups; ++group) {
      const double r = get(rstd, sample * shape.groups + group);
      for (int64_t c = group * of_group; c < (group + 1) * of_group; ++c) of_weight[c] += product[c] * r;
    }
    for (int64_t c = 0; of_bias && c < stride; ++c) of_bias[c] += sum[c];
  }
}

}  // namespace nhwc::cpu
