#include "cpu/group_norm.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/dispatch.h"
#include "cpu/work/ranges.h"

namespace nhwc::cpu {
namespace {

/// Returns parameters or statistics as doubles, or a default for each. One number is the one of each.
std::vector<double> doubles_of(const at::Tensor& numbers, int64_t count, double otherwise = 0) {
  std::vector<double> values(count, otherwise);
  if (!numbers.defined()) return values;
  const int64_t step = numbers.numel() == 1 ? 0 : numbers.is_contiguous() ? 1 : numbers.stride(0);
  // Not by `to`, a call of the dispatcher that takes longer than a small norm.
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, numbers.scalar_type(), "nhwc::group_norm", [&] {
    const auto* from = numbers.const_data_ptr<scalar_t>();
    for (int64_t i = 0; i < count; ++i) values[i] = static_cast<double>(from[i * step]);
  });
  return values;
}

std::vector<double> slopes_of(const Activation& activation, int64_t channels) {
  if (!has_slopes(activation.kind)) return {};
  std::vector<double> slopes = doubles_of(activation.slopes, channels);
  for (double& each : slopes) each += activation.parameter;
  return slopes;
}

/// Writes doubles to a dense tensor if it is defined.
void write_doubles(const std::vector<double>& values, const at::Tensor& to) {
  if (!to.defined()) return;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, to.scalar_type(), "nhwc::group_norm", [&] {
    std::transform(values.begin(), values.end(), to.mutable_data_ptr<scalar_t>(),
                   [](double value) { return static_cast<scalar_t>(value); });
  });
}

/// Statistics that are returned: floats, doubles or none.
class Statistics {
 public:
  explicit Statistics(const at::Tensor& numbers) {
    if (!numbers.defined()) return;
    if (numbers.scalar_type() == at::kDouble) {
      doubles_ = numbers.mutable_data_ptr<double>();
    } else {
      floats_ = numbers.mutable_data_ptr<float>();
    }
  }
  void set(int64_t index, double value) const {
    if (doubles_) doubles_[index] = value;
    if (floats_) floats_[index] = static_cast<float>(value);
  }

 private:
  double* doubles_ = nullptr;
  float* floats_ = nullptr;
};

/// Rows of a sample: all of them, or those of one part.
struct Piece {
  int64_t sample, part, first_row, rows;
};

/// Work on samples, in tasks that have enough of it for a thread: some samples, or one of the parts that a sample is
/// split into so that all threads have some. Parts depend on the number of threads alone, and tasks of whole samples on
/// the shape alone.
class Tasks {
 public:
  explicit Tasks(const GroupNormShape& shape)
      : shape_(shape),
        rows_(shape.rows, divide_up(shape.rows, parts_worth_threads(shape))),
        samples_(rows_.parts > 1 ? 1 : std::max<int64_t>(1, elements_worth_a_thread / (shape.rows * shape.channels))) {}

  int64_t parts() const { return rows_.parts; }
  int64_t count() const { return parts() * divide_up(shape_.samples, samples_); }
  int64_t rows_of(int64_t part) const { return rows_.size_of(part); }

  /// Calls `work(task, piece, scratch)` for all pieces, in parallel where that is faster. `scratch` has room for so
  /// many doubles.
  template <typename Work>
  void for_each(int64_t room, const Work& work) const {
    for_each_task(count(), products_worth_a_thread, room * sizeof(double), [&](int64_t task, char* scratch) {
      const int64_t first = task / parts() * samples_, part = task % parts();
      for (int64_t sample = first; sample < std::min(first + samples_, shape_.samples); ++sample) {
        work(task, Piece{sample, part, rows_.begin(part), rows_of(part)}, reinterpret_cast<double*>(scratch));
      }
    });
  }

 private:
  static int64_t parts_worth_threads(const GroupNormShape& shape) {
    const int64_t threads = at::in_parallel_region() ? 1 : at::get_num_threads();
    return std::min(threads_worth(shape.rows * shape.channels * products_of_element),
                    divide_up(threads, shape.samples));
  }

  GroupNormShape shape_;
  Parts rows_;
  int64_t samples_;
};

/// Two numbers for each channel or group of each task.
class Sums {
 public:
  Sums(int64_t tasks, int64_t width) : width_(width), values_(2 * width * tasks) {}
  double* first(int64_t task) { return values_.data() + 2 * width_ * task; }
  double* second(int64_t task) { return first(task) + width_; }

 private:
  int64_t width_;
  std::vector<double> values_;
};

/// A pass over one piece of the input, from which a sample's statistics are made and its outputs follow.
class Forward {
 public:
  Forward(const GroupNormShape& shape, const at::Tensor& input)
      : tasks(shape),
        shape_(shape),
        kernels_(of_type(level_kernels().norm, input.scalar_type())),
        input_(static_cast<const char*>(input.const_data_ptr())),
        bytes_of_row_(shape.channels * input.element_size()) {}

  const Tasks tasks;
  int64_t room() const { return kernels_.scratch(shape_.channels); }

  void sum(const Piece& piece, double* means, double* deviations, double* scratch) const {
    kernels_.moments(rows_of(piece), input_ + offset_of(piece), means, deviations, scratch);
  }
  void normalise(const Piece& piece, const NormNumbers& numbers, ActivationKind kind, const void* residual, void* out,
                 double* scratch) const {
    const int64_t at = offset_of(piece);
    kernels_.with[static_cast<int>(kind)].normalise(rows_of(piece), input_ + at,
                                                    residual ? static_cast<const char*>(residual) + at : nullptr,
                                                    static_cast<char*>(out) + at, numbers, scratch);
  }

 private:
  NormRows rows_of(const Piece& piece) const { return {piece.rows, shape_.channels, shape_.groups}; }
  int64_t offset_of(const Piece& piece) const { return (piece.sample * shape_.rows + piece.first_row) * bytes_of_row_; }

  const GroupNormShape shape_;
  const NormKernels& kernels_;
  const char* input_;
  int64_t bytes_of_row_;
};

/// Computes each sample's statistics, returns them, and calls `then(piece, means, rstds, scratch)` for its pieces.
template <typename Then>
void with_statistics(const Forward& forward, const GroupNormShape& shape, double eps, const at::Tensor& mean,
                     const at::Tensor& rstd, const at::Tensor& variances, const Then& then) {
  const Statistics all_means(mean), all_rstds(rstd), all_variances(variances);
  const Tasks& tasks = forward.tasks;
  const int64_t groups = shape.groups, of_group = shape.channels / groups, room = forward.room();
  const auto elements = static_cast<double>(of_group * shape.rows);

  const auto finish = [&](const Piece& piece, const double* means, const double* deviations, double* rstds,
                          double* scratch) {
    for (int64_t group = 0; group < groups; ++group) {
      // Rounding may make it negative; not-a-number stays.
      const double variance = (deviations[group] < 0 ? 0 : deviations[group]) / elements;
      const double r = 1 / std::sqrt(variance + eps);
      if (piece.part == 0) {
        const int64_t index = piece.sample * groups + group;
        all_means.set(index, means[group]);
        all_rstds.set(index, r);
        all_variances.set(index, variance);
      }
      rstds[group] = r;
    }
    then(piece, means, rstds, scratch);
  };

  if (tasks.parts() == 1) {
    tasks.for_each(room + 2 * groups, [&](int64_t, const Piece& piece, double* scratch) {
      double *means = scratch + room, *deviations = means + groups;
      forward.sum(piece, means, deviations, scratch);
      finish(piece, means, deviations, deviations, scratch);
    });
    return;
  }
  Sums moments(tasks.count(), groups);  // the mean, and the sum of squared deviations
  tasks.for_each(room, [&](int64_t task, const Piece& piece, double* scratch) {
    forward.sum(piece, moments.first(task), moments.second(task), scratch);
  });
  // Parts are merged like blocks, see `moments`.
  for (int64_t sample = 0; sample < shape.samples; ++sample) {
    const int64_t first = sample * tasks.parts();
    double *means = moments.first(first), *deviations = moments.second(first);
    int64_t seen = tasks.rows_of(0);
    for (int64_t part = 1; part < tasks.parts(); seen += tasks.rows_of(part++)) {
      const double *part_means = moments.first(first + part), *part_deviations = moments.second(first + part);
      const auto rows = static_cast<double>(tasks.rows_of(part)), share = rows / (rows + seen);
      for (int64_t group = 0; group < groups; ++group) {
        const double difference = part_means[group] - means[group];
        // The difference to an infinite mean is infinite, and so would be its share.
        means[group] += std::isfinite(difference) ? difference * share : part_means[group];
        deviations[group] += part_deviations[group] + difference * difference * of_group * seen * share;
      }
    }
  }
  tasks.for_each(room + groups, [&](int64_t task, const Piece& piece, double* scratch) {
    const int64_t first = task - piece.part;
    finish(piece, moments.first(first), moments.second(first), scratch + room, scratch);
  });
}

}  // namespace

void group_norm(const GroupNormShape& shape, const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                double eps, const at::Tensor& out, const at::Tensor& mean, const at::Tensor& rstd,
                const at::Tensor& variances) {
  const std::vector<double> scale = doubles_of(weight, shape.channels, 1), shift = doubles_of(bias, shape.channels);
  const Forward forward(shape, input);
  void* to = out.mutable_data_ptr();
  with_statistics(forward, shape, eps, mean, rstd, variances,
                  [&](const Piece& piece, const double* means, const double* rstds, double* scratch) {
                    forward.normalise(piece, {means, rstds, scale.data(), shift.data(), nullptr, 0},
                                      ActivationKind::none, nullptr, to, scratch);
                  });
}

void norm_statistics(const GroupNormShape& shape, const at::Tensor& input, double eps, const at::Tensor& mean,
                     const at::Tensor& rstd, const at::Tensor& variance) {
  with_statistics(Forward(shape, input), shape, eps, mean, rstd, variance, [](const auto&...) {});
}

void statistics_of(const at::Tensor& running_mean, const at::Tensor& running_var, double eps, const at::Tensor& mean,
                   const at::Tensor& rstd) {
  const int64_t channels = running_mean.numel();
  write_doubles(doubles_of(running_mean, channels), mean);
  std::vector<double> deviations = doubles_of(running_var, channels);
  for (double& each : deviations) each = 1 / std::sqrt(each + eps);
  write_doubles(deviations, rstd);
}

bool has_activation(at::ScalarType type, ActivationKind kind) {
  return of_type(level_kernels().norm, type).with[static_cast<int>(kind)].normalise != nullptr;
}

void normalise(const GroupNormShape& shape, const at::Tensor& input, const at::Tensor& mean, const at::Tensor& rstd,
               const at::Tensor& weight, const at::Tensor& bias, const at::Tensor& residual,
               const Activation& activation, const at::Tensor& out) {
  const std::vector<double> scale = doubles_of(weight, shape.channels, 1), shift = doubles_of(bias, shape.channels),
                            slopes = slopes_of(activation, shape.channels);
  const Forward forward(shape, input);
  const auto *means = mean.const_data_ptr<double>(), *rstds = rstd.const_data_ptr<double>();
  const void* others = residual.defined() ? residual.const_data_ptr() : nullptr;
  void* to = out.mutable_data_ptr();
  forward.tasks.for_each(forward.room(), [&](int64_t, const Piece& piece, double* scratch) {
    const int64_t group = piece.sample * shape.groups;
    forward.normalise(piece,
                      {means + group, rstds + group, scale.data(), shift.data(), slopes.data(), activation.parameter},
                      activation.kind, others, to, scratch);
  });
}

void group_norm_backward(const GroupNormShape& shape, const at::Tensor& grad, const at::Tensor& input,
                         const at::Tensor& mean, const at::Tensor& rstd, const at::Tensor& weight,
                         const at::Tensor& grad_input, const at::Tensor& grad_weight, const at::Tensor& grad_bias,
                         bool is_of_input, const at::Tensor& bias, const Activation& activation) {
  const NormKernels& kernels = of_type(level_kernels().norm, input.scalar_type());
  const int64_t channels = shape.channels, groups = shape.groups, of_group = channels / groups;
  const std::vector<double> scale = doubles_of(weight, channels, 1), shift = doubles_of(bias, channels),
                            means = doubles_of(mean, shape.samples * groups),
                            rstds = doubles_of(rstd, shape.samples * groups), slopes = slopes_of(activation, channels);
  const NormPasses& passes = kernels.with[static_cast<int>(activation.kind)];
  // An exponential takes longer than to write the gradient before the activation, and to read it.
  const bool is_written = has_exponential(activation.kind) && grad_input.defined() && is_of_input;
  const at::Tensor written = is_written ? at::empty_like(grad) : at::Tensor();
  auto* before = is_written ? static_cast<char*>(written.mutable_data_ptr()) : nullptr;
  const NormPasses& then = is_written ? kernels.with[0] : passes;
  const auto numbers_of = [&](const Piece& piece) {
    const int64_t group = piece.sample * groups;
    return NormNumbers{means.data() + group, rstds.data() + group, scale.data(),
                       shift.data(),         slopes.data(),        activation.parameter};
  };
  const Tasks tasks(shape);
  const auto* from_grad = static_cast<const char*>(grad.const_data_ptr());
  const auto* from = static_cast<const char*>(input.const_data_ptr());
  auto* to = grad_input.defined() ? static_cast<char*>(grad_input.mutable_data_ptr()) : nullptr;
  const auto offset = [&](const Piece& piece) {
    return (piece.sample * shape.rows + piece.first_row) * channels * input.element_size();
  };
  const int64_t room = kernels.scratch(channels);
  std::vector<double> of_weight(channels), of_bias(channels);

  // Of the gradient, and of its products with the deviations from the mean.
  const auto sum = [&](const Piece& piece, double* sums, double* products, double* scratch) {
    if (!is_of_input && !grad_weight.defined() && !grad_bias.defined()) return;
    const int64_t at = offset(piece);
    passes.backward_sums({piece.rows, channels, groups}, from_grad + at, from + at, before ? before + at : nullptr,
                         numbers_of(piece), sums, products, scratch);
  };
  const auto write = [&](const Piece& piece, const double* sums, const double* products, double* scratch) {
    if (!to) return;
    const int64_t at = offset(piece);
    then.backward({piece.rows, channels, groups}, (before ? before : from_grad) + at, from + at, to + at,
                  numbers_of(piece), is_of_input ? sums : nullptr, products, shape.rows, scratch);
  };
  // The gradients of the parameters are sums over the samples.
  const auto add = [&](int64_t sample, const double* sums, const double* products, double* to_bias, double* to_weight) {
    for (int64_t c = 0, group = sample * groups; c < channels; ++group) {
      for (const int64_t end = c + of_group; c < end; ++c) to_weight[c] += products[c] * rstds[group];
    }
    for (int64_t c = 0; c < channels; ++c) to_bias[c] += sums[c];
  };

  Sums all(tasks.count(), channels);
  if (tasks.parts() == 1) {
    tasks.for_each(room + 2 * channels, [&](int64_t task, const Piece& piece, double* scratch) {
      double *sums = scratch + room, *products = sums + channels;
      std::fill_n(sums, 2 * channels, 0.0);
      sum(piece, sums, products, scratch);
      write(piece, sums, products, scratch);
      add(piece.sample, sums, products, all.first(task), all.second(task));
    });
    for (int64_t task = 0; task < tasks.count(); ++task) {
      for (int64_t c = 0; c < channels; ++c) of_bias[c] += all.first(task)[c];
      for (int64_t c = 0; c < channels; ++c) of_weight[c] += all.second(task)[c];
    }
  } else {
    tasks.for_each(room, [&](int64_t task, const Piece& piece, double* scratch) {
      sum(piece, all.first(task), all.second(task), scratch);
    });
    for (int64_t sample = 0; sample < shape.samples; ++sample) {
      const int64_t first = sample * tasks.parts();
      double* sums = all.first(first);
      for (int64_t task = first + 1; task < first + tasks.parts(); ++task) {
        for (int64_t i = 0; i < 2 * channels; ++i) sums[i] += all.first(task)[i];
      }
      add(sample, sums, all.second(first), of_bias.data(), of_weight.data());
    }
    tasks.for_each(room, [&](int64_t task, const Piece& piece, double* scratch) {
      write(piece, all.first(task - piece.part), all.second(task - piece.part), scratch);
    });
  }
  write_doubles(of_weight, grad_weight);
  write_doubles(of_bias, grad_bias);
}

}  // namespace nhwc::cpu
