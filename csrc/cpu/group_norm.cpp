#include "cpu/group_norm.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/dispatch.h"

namespace nhwc::cpu {
namespace {

const NormKernels& kernels_of(at::ScalarType type) {
  const NormKernelsByType& kernels = norm_kernels();
  switch (type) {
    case at::kDouble:
      return kernels.of_double;
    case at::kFloat:
      return kernels.of_float;
    case at::kHalf:
      return kernels.of_half;
    default:
      TORCH_INTERNAL_ASSERT(type == at::kBFloat16, "a kernel for ", type);
      return kernels.of_bfloat16;
  }
}

/// A parameter as doubles, ones or zeros where there is none.
std::vector<double> parameter(const at::Tensor& given, int64_t channels, double otherwise) {
  std::vector<double> values(channels, otherwise);
  if (given.defined()) {
    const at::Tensor dense = given.to(at::kDouble).contiguous();
    std::copy_n(dense.const_data_ptr<double>(), channels, values.begin());
  }
  return values;
}

/// Channels' values once for each channel of a period, in the type that the kernels sum in.
class Parameters {
 public:
  Parameters(bool is_double, int64_t period, int64_t channels) : channels_(channels) {
    if (is_double) {
      doubles_.resize(period);
    } else {
      floats_.resize(period);
    }
  }
  template <typename Value>
  void fill(const Value& value) {
    if (floats_.empty()) {
      fill(doubles_, value);
    } else {
      fill(floats_, value);
    }
  }
  const void* data() const {
    return floats_.empty() ? static_cast<const void*>(doubles_.data()) : static_cast<const void*>(floats_.data());
  }

 private:
  template <typename Number, typename Value>
  void fill(std::vector<Number>& numbers, const Value& value) {
    for (int64_t c = 0; c < channels_; ++c) numbers[c] = static_cast<Number>(value(c));
    for (size_t k = channels_; k < numbers.size(); ++k) numbers[k] = numbers[k - channels_];
  }

  int64_t channels_;
  std::vector<float> floats_;
  std::vector<double> doubles_;
};

/// Each sample's rows in as many parts as keep all threads busy, the same for the same number of threads.
struct Parts {
  int64_t count, rows;  // of a sample's parts; of a part, but for the last

  Parts(const GroupNormShape& shape) {
    constexpr int64_t elements_worth_a_thread = 1 << 15;
    const int64_t threads = at::in_parallel_region() ? 1 : at::get_num_threads();
    const int64_t wanted = std::min((threads + shape.samples - 1) / shape.samples,
                                    shape.rows * shape.channels / elements_worth_a_thread);
    rows = shape.samples >= threads || wanted <= 1 ? shape.rows : (shape.rows + wanted - 1) / wanted;
    count = (shape.rows + rows - 1) / rows;
  }
};

/// Calls `work(sample, part, first_row, rows)` for all parts of all samples, in parallel where that is worth it.
template <typename Work>
void for_each_part(const GroupNormShape& shape, const Parts& parts, const Work& work) {
  const int64_t elements = parts.rows * shape.channels;
  const int64_t grain = std::max<int64_t>(1, (1 << 15) / std::max<int64_t>(1, elements));
  at::parallel_for(0, shape.samples * parts.count, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t part = i % parts.count, first = part * parts.rows;
      work(i / parts.count, part, first, std::min(parts.rows, shape.rows - first));
    }
  });
}

/// Calls `work(first_row, rows)` for pieces of a part, the last one first: its rows are those still in cache.
template <typename Work>
void backwards(int64_t first, int64_t rows, int64_t row_bytes, const Work& work) {
  const int64_t piece = std::max<int64_t>(64, (1 << 16) / row_bytes / 64 * 64);
  for (int64_t begin = (rows - 1) / piece * piece; begin >= 0; begin -= piece) {
    work(first + begin, std::min(piece, rows - begin));
  }
}

const char* bytes_of(const at::Tensor& tensor) { return static_cast<const char*>(tensor.const_data_ptr()); }
char* mutable_bytes_of(const at::Tensor& tensor) { return static_cast<char*>(tensor.mutable_data_ptr()); }

template <typename Number>
void set(const at::Tensor& tensor, int64_t index, Number value) {
  if (tensor.scalar_type() == at::kDouble) {
    tensor.mutable_data_ptr<double>()[index] = value;
  } else {
    tensor.mutable_data_ptr<float>()[index] = static_cast<float>(value);
  }
}
double get(const at::Tensor& tensor, int64_t index) {
  return tensor.scalar_type() == at::kDouble ? tensor.const_data_ptr<double>()[index]
                                             : tensor.const_data_ptr<float>()[index];
}

/// Merges the moments of parts, in their order.
void merge_moments(int64_t channels, int64_t seen, int64_t rows, const double* part_mean, const double* part_deviations,
                   double* mean, double* deviations) {
  const double all = static_cast<double>(seen + rows), weight = seen * (rows / all);
  for (int64_t c = 0; c < channels; ++c) {
    const double difference = part_mean[c] - mean[c];
    mean[c] += difference * (rows / all);
    deviations[c] += part_deviations[c] + difference * difference * weight;
  }
}

}  // namespace

void group_norm(const GroupNormShape& shape, const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                double eps, const at::Tensor& out, const at::Tensor& mean, const at::Tensor& rstd) {
  const NormKernels& kernels = kernels_of(input.scalar_type());
  const int64_t channels = shape.channels, of_group = channels / shape.groups, period = kernels.period(channels);
  const int64_t row_bytes = channels * input.element_size();
  const bool is_double = input.scalar_type() == at::kDouble;
  const std::vector<double> scale = parameter(weight, channels, 1), shift = parameter(bias, channels, 0);
  const Parts parts(shape);
  const char* from = bytes_of(input);
  char* to = mutable_bytes_of(out);
  std::vector<double> moments(2 * channels * shape.samples * parts.count);
  const auto moments_of = [&](int64_t sample, int64_t part) {
    return moments.data() + 2 * channels * (sample * parts.count + part);
  };

  const auto sum = [&](int64_t sample, int64_t part, int64_t first, int64_t rows) {
    std::vector<double> scratch(4 * period);
    double* own = moments_of(sample, part);
    kernels.moments(from + (sample * shape.rows + first) * row_bytes, rows, channels, 0, own, own + channels,
                    scratch.data());
  };
  // The groups' statistics, and the factors and summands of the channels that they amount to.
  const auto normalise = [&](int64_t sample, int64_t part, int64_t first, int64_t rows) {
    const double* of_channels = moments_of(sample, 0);
    std::vector<double> group_mean(shape.groups), group_rstd(shape.groups);
    for (int64_t g = 0; g < shape.groups; ++g) {
      const double *means = of_channels + g * of_group, *deviations = means + channels;
      double average = 0, squares = 0;
      for (int64_t c = 0; c < of_group; ++c) average += means[c];
      average /= of_group;
      for (int64_t c = 0; c < of_group; ++c) {
        squares += deviations[c] + shape.rows * (means[c] - average) * (means[c] - average);
      }
      group_mean[g] = average;
      group_rstd[g] = 1 / std::sqrt(std::max(squares, 0.0) / (of_group * shape.rows) + eps);
      if (part == 0) {
        set(mean, sample * shape.groups + g, average);
        set(rstd, sample * shape.groups + g, group_rstd[g]);
      }
    }
    Parameters m(is_double, period, channels), a(is_double, period, channels), b(is_double, period, channels);
    m.fill([&](int64_t c) { return group_mean[c / of_group]; });
    a.fill([&](int64_t c) { return group_rstd[c / of_group] * scale[c]; });
    // With what the mean lost when it was rounded.
    b.fill([&](int64_t c) {
      const double exact = group_mean[c / of_group], rounded = is_double ? exact : static_cast<float>(exact);
      return shift[c] + (rounded - exact) * group_rstd[c / of_group] * scale[c];
    });
    backwards(sample * shape.rows + first, rows, row_bytes, [&](int64_t row, int64_t count) {
      kernels.normalise(from + row * row_bytes, to + row * row_bytes, count * channels, period, m.data(), a.data(),
                        b.data());
    });
  };

  if (parts.count == 1) {
    for_each_part(shape, parts, [&](auto... where) {
      sum(where...);
      normalise(where...);
    });
    return;
  }
  for_each_part(shape, parts, sum);
  for (int64_t sample = 0; sample < shape.samples; ++sample) {
    double* all = moments_of(sample, 0);
    for (int64_t part = 1; part < parts.count; ++part) {
      const int64_t seen = part * parts.rows, rows = std::min(parts.rows, shape.rows - seen);
      const double* own = moments_of(sample, part);
      merge_moments(channels, seen, rows, own, own + channels, all, all + channels);
    }
  }
  for_each_part(shape, parts, normalise);
}

void group_norm_backward(const GroupNormShape& shape, const at::Tensor& grad, const at::Tensor& input,
                         const at::Tensor& mean, const at::Tensor& rstd, const at::Tensor& weight,
                         const at::Tensor& grad_input, const at::Tensor& grad_weight, const at::Tensor& grad_bias) {
  const NormKernels& kernels = kernels_of(input.scalar_type());
  const int64_t channels = shape.channels, of_group = channels / shape.groups, period = kernels.period(channels);
  const int64_t row_bytes = channels * input.element_size();
  const bool is_double = input.scalar_type() == at::kDouble;
  const std::vector<double> scale = parameter(weight, channels, 1);
  const Parts parts(shape);
  const char *from_grad = bytes_of(grad), *from = bytes_of(input);
  char* to = grad_input.defined() ? mutable_bytes_of(grad_input) : nullptr;
  const auto statistic = [&](const at::Tensor& of, int64_t sample, int64_t c) {
    return get(of, sample * shape.groups + c / of_group);
  };
  // Of each part, the channels' sums of the gradient, and of its product with the deviation.
  std::vector<double> sums(2 * channels * shape.samples * parts.count);
  const auto sums_of = [&](int64_t sample, int64_t part) {
    return sums.data() + 2 * channels * (sample * parts.count + part);
  };

  const auto sum = [&](int64_t sample, int64_t part, int64_t first, int64_t rows) {
    Parameters m(is_double, period, channels);
    m.fill([&](int64_t c) { return statistic(mean, sample, c); });
    std::vector<double> scratch(4 * period);
    double* own = sums_of(sample, part);
    const int64_t at = (sample * shape.rows + first) * row_bytes;
    kernels.backward_sums(from_grad + at, from + at, rows, channels, m.data(), own, own + channels, scratch.data());
  };
  const auto write = [&](int64_t sample, int64_t, int64_t first, int64_t rows) {
    const double *sum = sums_of(sample, 0), *product = sum + channels;
    std::vector<double> of_rows(shape.groups), of_all(shape.groups);
    for (int64_t g = 0; g < shape.groups; ++g) {
      double weighted_sum = 0, weighted_product = 0;
      for (int64_t c = g * of_group; c < (g + 1) * of_group; ++c) {
        weighted_sum += scale[c] * sum[c];
        weighted_product += scale[c] * product[c];
      }
      const double r = get(rstd, sample * shape.groups + g), elements = static_cast<double>(of_group * shape.rows);
      of_rows[g] = -r * r * r * weighted_product / elements;
      of_all[g] = -r * weighted_sum / elements;
    }
    Parameters m(is_double, period, channels), a(is_double, period, channels), p(is_double, period, channels),
        b(is_double, period, channels);
    m.fill([&](int64_t c) { return statistic(mean, sample, c); });
    a.fill([&](int64_t c) { return statistic(rstd, sample, c) * scale[c]; });
    p.fill([&](int64_t c) { return of_rows[c / of_group]; });
    b.fill([&](int64_t c) { return of_all[c / of_group]; });
    backwards(sample * shape.rows + first, rows, row_bytes, [&](int64_t row, int64_t count) {
      const int64_t at = row * row_bytes;
      kernels.backward(from_grad + at, from + at, to + at, count * channels, period, m.data(), a.data(), p.data(),
                       b.data());
    });
  };

  if (parts.count == 1) {
    for_each_part(shape, parts, [&](auto... where) {
      sum(where...);
      if (to) write(where...);
    });
  } else {
    for_each_part(shape, parts, sum);
    for (int64_t sample = 0; sample < shape.samples; ++sample) {
      double* all = sums_of(sample, 0);
      for (int64_t part = 1; part < parts.count; ++part) {
        const double* own = sums_of(sample, part);
        for (int64_t i = 0; i < 2 * channels; ++i) all[i] += own[i];
      }
    }
    if (to) for_each_part(shape, parts, write);
  }
  const auto add_up = [&](const at::Tensor& result, const auto& of_sample) {
    if (!result.defined()) return;
    auto* values = result.mutable_data_ptr<double>();
    std::fill_n(values, channels, 0.0);
    for (int64_t sample = 0; sample < shape.samples; ++sample) {
      for (int64_t c = 0; c < channels; ++c) values[c] += of_sample(sample, c);
    }
  };
  add_up(grad_weight, [&](int64_t sample, int64_t c) {
    return sums_of(sample, 0)[channels + c] * statistic(rstd, sample, c);
  });
  add_up(grad_bias, [&](int64_t sample, int64_t c) { return sums_of(sample, 0)[c]; });
}

}  // namespace nhwc::cpu
