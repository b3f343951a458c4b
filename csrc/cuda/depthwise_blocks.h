// The work of one block of a GPU's threads in a depthwise 3D convolution, in phases as in norm_blocks.h.
//
// A thread has a vector of channels. It computes a run of outputs along the width at a time, from inputs that it reads
// once for each row of taps. Sums are in float, in an order that depends on the plan alone.
#pragma once

#include "cuda/depthwise_plan.h"
#include "cuda/norm_blocks.h"

namespace nhwc::cuda {

/// What the blocks have in common. `taps` are those along the width, `stride` the one along it.
template <NormType type, unsigned lanes, unsigned taps, unsigned stride, typename Access>
class DepthwiseBlock {
 protected:
  using Element = detail::NormElement<type>;
  static constexpr unsigned bytes = Element::bytes, tile_channels = channel_threads * lanes;
  static constexpr unsigned run = depthwise_run(stride), window = (run - 1) * stride + taps;
  using Vector = detail::Bits<bytes * lanes>;
  using Sums = detail::Bits<4 * lanes>;

  NHWC_HOST_DEVICE DepthwiseBlock(const DepthwiseArguments& arguments, char* shared, Access access)
      : arguments_(arguments), plan_(arguments.plan), shared_(shared), access_(access) {}

  NHWC_HOST_DEVICE static float lane_of(const Vector& vector, unsigned lane) {
    if constexpr (lanes == 1) {
      return Element::to_real(vector);
    } else {
      return Element::to_real(detail::extract<bytes>(detail::as_quad(vector), lane));
    }
  }
  NHWC_HOST_DEVICE static Vector vector_of(const float (&numbers)[lanes]) {
    if constexpr (lanes == 1) {
      return Element::to_bits(numbers[0]);
    } else {
      Quad out{};
      NHWC_UNROLL
      for (unsigned lane = 0; lane < lanes; ++lane) detail::insert<bytes>(out, lane, Element::to_bits(numbers[lane]));
      if constexpr (sizeof(Vector) == sizeof(Quad)) {
        return out;
      } else {
        return {{out.words[0], out.words[1]}};
      }
    }
  }
  /// Loads numbers of adjacent channels from shared memory, or stores them.
  NHWC_HOST_DEVICE void load_shared(std::uint32_t index, float (&numbers)[lanes]) const {
    const auto bits = access_.template load_shared<Sums>(shared_, index * 4);
    memcpy(numbers, &bits, sizeof(numbers));
  }
  NHWC_HOST_DEVICE void store_shared(std::uint32_t index, const float (&numbers)[lanes]) const {
    access_.store_shared(shared_, index * 4, detail::same_bits<Sums>(numbers));
  }

  /// The element of an activation at a position, which may be before its row.
  NHWC_HOST_DEVICE std::int64_t place(const std::int32_t (&sizes)[3], std::uint32_t sample, std::int32_t depth,
                                      std::int32_t height, std::int32_t width, std::uint32_t channel) const {
    const std::int64_t row = (std::int64_t{sample} * sizes[0] + depth) * sizes[1] + height;
    return (row * sizes[2] + width) * plan_.channels + channel;
  }
  /// Returns a vector of a row, or zeros where a row that is not whole lacks it. Callers step from place to place: with
  /// all addresses at once, some architectures lack registers.
  template <bool is_whole>
  NHWC_HOST_DEVICE Vector load(const void* activation, std::int64_t place, std::int32_t column,
                               std::int32_t size) const {
    if constexpr (!is_whole) {
      if (static_cast<std::uint32_t>(column) >= static_cast<std::uint32_t>(size)) return {};
    }
    return access_.template load<Vector>(static_cast<const char*>(activation) + place * bytes);
  }
  NHWC_HOST_DEVICE bool sees_whole_window(std::int32_t begin) const {
    return begin >= 0 && begin + static_cast<std::int32_t>(window) <= plan_.input[2];
  }

  const DepthwiseArguments& arguments_;
  const DepthwisePlan& plan_;
  char* shared_;
  Access access_;
};

/// The outputs of a tile, of several along the depth. Filters are in shared memory, as `[taps, tile_channels]`.
template <NormType type, unsigned lanes, unsigned taps, unsigned stride, typename Access = DirectAccess>
class DepthwiseConvolve : DepthwiseBlock<type, lanes, taps, stride, Access> {
  using Base = DepthwiseBlock<type, lanes, taps, stride, Access>;
  using Base::access_, Base::arguments_, Base::plan_, Base::run, Base::window, Base::tile_channels, Base::bytes;
  using typename Base::Element, typename Base::Vector;

 public:
  static constexpr unsigned most_threads = depthwise_threads, blocks_of_processor = 2;

  NHWC_HOST_DEVICE DepthwiseConvolve(const DepthwiseArguments& arguments, std::uint32_t block, char* shared,
                                     Access access = {})
      : Base(arguments, shared, access) {
    channel_ = block % plan_.channel_tiles * tile_channels;
    block /= plan_.channel_tiles;
    for (unsigned axis = 2; axis > 0; --axis) {
      first_[axis] = block % plan_.tiles[axis] * plan_.slots[axis];
      block /= plan_.tiles[axis];
    }
    const std::uint32_t depths = (plan_.tiles[0] + plan_.steps - 1) / plan_.steps;
    first_[0] = block % depths * plan_.steps * plan_.slots[0];
    sample_ = block / depths;
  }

  template <typename All>
  NHWC_HOST_DEVICE void run_phases(const All& all) const {
    all([&](std::uint32_t thread) { load_filters(thread); });
    all([&](std::uint32_t thread) {
      const std::uint32_t channel = channel_ + thread % channel_threads * lanes;
      // The threads of a warp have the same columns, so that they agree whether these are at an edge.
      const std::uint32_t slot = thread / channel_threads, height = first_[1] + slot % plan_.slots[1];
      const std::uint32_t rest = slot / plan_.slots[1];
      const std::uint32_t column = (first_[2] + rest / plan_.slots[0]) * run;
      if (channel >= plan_.channels || height >= size(1) || column >= size(2)) return;
      const std::uint32_t last = first_[0] + plan_.steps * plan_.slots[0], end = last < size(0) ? last : size(0);
      for (std::uint32_t depth = first_[0] + rest % plan_.slots[0]; depth < end; depth += plan_.slots[0]) {
        convolve(channel, depth, height, column);
      }
    });
  }

 private:
  NHWC_HOST_DEVICE std::uint32_t size(unsigned axis) const { return static_cast<std::uint32_t>(plan_.output[axis]); }

  NHWC_HOST_DEVICE void load_filters(std::uint32_t thread) const {
    const std::uint32_t all_taps = plan_.taps(), count = all_taps * tile_channels;
    for (std::uint32_t i = thread; i < count; i += plan_.threads()) {
      const std::uint32_t tap = i / tile_channels, channel = channel_ + i % tile_channels;
      const std::uint32_t from = arguments_.is_flipped ? all_taps - 1 - tap : tap;
      float number = 0;
      if (channel < plan_.channels) number = element(arguments_.weight, std::uint64_t{channel} * all_taps + from);
      access_.store_shared(this->shared_, i * 4, detail::same_bits<std::uint32_t>(number));
    }
  }
  NHWC_HOST_DEVICE float element(const void* numbers, std::uint64_t index) const {
    const char* at = static_cast<const char*>(numbers) + index * bytes;
    return Element::to_real(access_.template load<detail::Bits<bytes>>(at));
  }

  NHWC_HOST_DEVICE void convolve(std::uint32_t channel, std::uint32_t depth, std::uint32_t height,
                                 std::uint32_t column) const {
    float sums[run][lanes];
    NHWC_UNROLL
    for (unsigned lane = 0; lane < lanes; ++lane) {
      const float bias = arguments_.bias ? element(arguments_.bias, channel + lane) : 0;
      NHWC_UNROLL
      for (unsigned i = 0; i < run; ++i) sums[i][lane] = bias;
    }
    const std::int32_t begin = static_cast<std::int32_t>(column * stride) - plan_.padding[2];
    if (this->sees_whole_window(begin)) {
      add_rows<true>(channel, depth, height, begin, sums);
    } else {
      add_rows<false>(channel, depth, height, begin, sums);
    }
    const std::int64_t first =
        this->place(plan_.output, sample_, static_cast<std::int32_t>(depth), static_cast<std::int32_t>(height),
                    static_cast<std::int32_t>(column), channel);
    NHWC_UNROLL
    for (unsigned i = 0; i < run; ++i) {
      if (column + i >= size(2)) continue;
      char* at = static_cast<char*>(arguments_.out) + (first + std::int64_t{i} * plan_.channels) * bytes;
      access_.store(at, this->vector_of(sums[i]));
    }
  }

  template <bool is_whole>
  NHWC_HOST_DEVICE void add_rows(std::uint32_t channel, std::uint32_t depth, std::uint32_t height, std::int32_t begin,
                                 float (&sums)[run][lanes]) const {
    const std::int32_t from_depth = static_cast<std::int32_t>(depth) * plan_.stride[0] - plan_.padding[0];
    const std::int32_t from_height = static_cast<std::int32_t>(height) * plan_.stride[1] - plan_.padding[1];
    for (std::int32_t i = 0; i < plan_.kernel[0]; ++i) {
      const std::int32_t d = from_depth + i;
      if (d < 0 || d >= plan_.input[0]) continue;
      for (std::int32_t j = 0; j < plan_.kernel[1]; ++j) {
        const std::int32_t h = from_height + j;
        if (h < 0 || h >= plan_.input[1]) continue;
        float filter[taps][lanes];
        const auto row = static_cast<std::uint32_t>(i * plan_.kernel[1] + j);
        NHWC_UNROLL
        for (unsigned tap = 0; tap < taps; ++tap) {
          this->load_shared((row * taps + tap) * tile_channels + channel - channel_, filter[tap]);
        }
        std::int64_t place = this->place(plan_.input, sample_, d, h, begin, channel);
        std::int32_t column = begin;
        NHWC_UNROLL
        for (unsigned k = 0; k < window; ++k, place += plan_.channels, ++column) {
          const Vector vector = this->template load<is_whole>(arguments_.input, place, column, plan_.input[2]);
          NHWC_UNROLL
          for (unsigned lane = 0; lane < lanes; ++lane) {
            const float value = this->lane_of(vector, lane);
            NHWC_UNROLL
            for (unsigned out = 0; out < run; ++out) {
              if (k < out * stride || k - out * stride >= taps) continue;
              sums[out][lane] += value * filter[k - out * stride][lane];
            }
          }
        }
      }
    }
  }

  std::uint32_t channel_, first_[3], sample_;
};

/// The sums of the weight's gradient over a chunk of runs. A thread has a row of taps, in one of several copies.
template <NormType type, unsigned lanes, unsigned taps, unsigned stride, typename Access = DirectAccess>
class DepthwiseGradients : DepthwiseBlock<type, lanes, taps, stride, Access> {
  using Base = DepthwiseBlock<type, lanes, taps, stride, Access>;
  using Base::access_, Base::arguments_, Base::plan_, Base::run, Base::window, Base::tile_channels;
  using typename Base::Vector;

 public:
  static constexpr unsigned most_threads = most_gradient_threads, blocks_of_processor = 1;

  NHWC_HOST_DEVICE DepthwiseGradients(const DepthwiseArguments& arguments, std::uint32_t block, char* shared,
                                      Access access = {})
      : Base(arguments, shared, access),
        channel_(block % plan_.channel_tiles * tile_channels),
        chunk_(block / plan_.channel_tiles) {}

  template <typename All>
  NHWC_HOST_DEVICE void run_phases(const All& all) const {
    const std::uint32_t rows = plan_.tap_rows(), of_copy = plan_.taps() * tile_channels;
    all([&](std::uint32_t thread) {
      const std::uint32_t lane = thread % channel_threads * lanes, row = thread / channel_threads % rows;
      const std::uint32_t copy = thread / channel_threads / rows;
      float sums[taps][lanes] = {};
      if (channel_ + lane < plan_.channels) add_runs(channel_ + lane, row, copy, sums);
      NHWC_UNROLL
      for (unsigned tap = 0; tap < taps; ++tap) {
        this->store_shared(copy * of_copy + (row * taps + tap) * tile_channels + lane, sums[tap]);
      }
    });
    all([&](std::uint32_t thread) {
      const std::uint32_t threads = channel_threads * rows * plan_.copies;
      for (std::uint32_t i = thread; i < of_copy; i += threads) {
        const std::uint32_t tap = i / tile_channels, channel = channel_ + i % tile_channels;
        if (channel >= plan_.channels) continue;
        float sum = 0;
        for (std::uint32_t copy = 0; copy < plan_.copies; ++copy) {
          const auto bits = access_.template load_shared<std::uint32_t>(this->shared_, (copy * of_copy + i) * 4);
          sum += detail::same_bits<float>(bits);
        }
        const std::uint64_t at = (std::uint64_t{chunk_} * plan_.taps() + tap) * plan_.channels + channel;
        access_.store(arguments_.sums + at, sum);
      }
    });
  }

 private:
  NHWC_HOST_DEVICE void add_runs(std::uint32_t channel, std::uint32_t row, std::uint32_t copy,
                                 float (&sums)[taps][lanes]) const {
    const std::uint64_t begin = std::uint64_t{chunk_} * plan_.chunk_runs + copy, all = plan_.all_runs();
    const std::uint64_t end = std::uint64_t{chunk_} * plan_.chunk_runs + plan_.chunk_runs;
    const std::int32_t tap_depth = static_cast<std::int32_t>(row) / plan_.kernel[1] - plan_.padding[0];
    const std::int32_t tap_height = static_cast<std::int32_t>(row) % plan_.kernel[1] - plan_.padding[1];
    // Heights follow each other, whose taps read mostly the same.
    const auto heights = static_cast<std::uint32_t>(plan_.output[1]),
               depths = static_cast<std::uint32_t>(plan_.output[0]);
    std::uint32_t height = static_cast<std::uint32_t>(begin % heights);
    std::uint64_t rest = begin / heights;
    std::uint32_t column = static_cast<std::uint32_t>(rest % plan_.runs);
    rest /= plan_.runs;
    std::uint32_t depth = static_cast<std::uint32_t>(rest % depths), sample = static_cast<std::uint32_t>(rest / depths);
    const std::uint64_t last = end < all ? end : all;
    const std::uint64_t count = begin < last ? (last - begin + plan_.copies - 1) / plan_.copies : 0;
    for (auto left = static_cast<std::uint32_t>(count); left > 0; --left) {
      const std::int32_t d = static_cast<std::int32_t>(depth) * plan_.stride[0] + tap_depth;
      const std::int32_t h = static_cast<std::int32_t>(height) * plan_.stride[1] + tap_height;
      if (d >= 0 && d < plan_.input[0] && h >= 0 && h < plan_.input[1]) {
        const std::int32_t to = static_cast<std::int32_t>(column * run);
        const std::int32_t from = to * static_cast<std::int32_t>(stride) - plan_.padding[2];
        const std::int64_t input = this->place(plan_.input, sample, d, h, from, channel);
        const std::int64_t grad = this->place(plan_.output, sample, static_cast<std::int32_t>(depth),
                                              static_cast<std::int32_t>(height), to, channel);
        if (this->sees_whole_window(from) && to + static_cast<std::int32_t>(run) <= plan_.output[2]) {
          add_run<true>(input, from, grad, to, sums);
        } else {
          add_run<false>(input, from, grad, to, sums);
        }
      }
      for (height += plan_.copies; height >= heights;) {
        height -= heights;
        if (++column < plan_.runs) continue;
        column = 0;
        if (++depth < depths) continue;
        depth = 0;
        ++sample;
      }
    }
  }

  template <bool is_whole>
  NHWC_HOST_DEVICE void add_run(std::int64_t input, std::int32_t from, std::int64_t grad, std::int32_t to,
                                float (&sums)[taps][lanes]) const {
    Vector grads[run];
    NHWC_UNROLL
    for (unsigned i = 0; i < run; ++i, grad += plan_.channels, ++to) {
      grads[i] = this->template load<is_whole>(arguments_.grad, grad, to, plan_.output[2]);
    }
    NHWC_UNROLL
    for (unsigned k = 0; k < window; ++k, input += plan_.channels, ++from) {
      const Vector vector = this->template load<is_whole>(arguments_.input, input, from, plan_.input[2]);
      NHWC_UNROLL
      for (unsigned lane = 0; lane < lanes; ++lane) {
        const float value = this->lane_of(vector, lane);
        NHWC_UNROLL
        for (unsigned out = 0; out < run; ++out) {
          if (k < out * stride || k - out * stride >= taps) continue;
          sums[k - out * stride][lane] += value * this->lane_of(grads[out], lane);
        }
      }
    }
  }

  std::uint32_t channel_, chunk_;
};

/// The weight's gradient for some channels of one tap, from the sums of all chunks.
template <NormType type, typename Access = DirectAccess>
class DepthwiseMerge {
  using Element = detail::NormElement<type>;

 public:
  static constexpr unsigned most_threads = merging_threads, blocks_of_processor = 4;

  NHWC_HOST_DEVICE DepthwiseMerge(const DepthwiseArguments& arguments, std::uint32_t block, char* shared,
                                  Access access = {})
      : arguments_(arguments),
        plan_(arguments.plan),
        tap_(block % plan_.taps()),
        channel_(block / plan_.taps() * merged_channels),
        shared_(shared),
        access_(access) {}

  template <typename All>
  NHWC_HOST_DEVICE void run_phases(const All& all) const {
    constexpr std::uint32_t parts = merging_threads / merged_channels;
    all([&](std::uint32_t thread) {
      const std::uint32_t channel = channel_ + thread % merged_channels;
      float sum = 0;
      for (std::uint32_t i = thread / merged_channels; i < plan_.chunks && channel < plan_.channels; i += parts) {
        const std::uint64_t at = (std::uint64_t{i} * plan_.taps() + tap_) * plan_.channels + channel;
        sum += access_.template load<float>(arguments_.sums + at);
      }
      access_.store_shared(shared_, thread * 4, detail::same_bits<std::uint32_t>(sum));
    });
    all([&](std::uint32_t thread) {
      const std::uint32_t channel = channel_ + thread;
      if (thread >= merged_channels || channel >= plan_.channels) return;
      float sum = 0;
      for (std::uint32_t part = 0; part < parts; ++part) {
        const std::uint32_t at = (part * merged_channels + thread) * 4;
        sum += detail::same_bits<float>(access_.template load_shared<std::uint32_t>(shared_, at));
      }
      const std::uint64_t to = (std::uint64_t{channel} * plan_.taps() + tap_) * Element::bytes;
      access_.store(static_cast<char*>(arguments_.out) + to, Element::to_bits(sum));
    });
  }

 private:
  const DepthwiseArguments& arguments_;
  const DepthwisePlan& plan_;
  std::uint32_t tap_, channel_;
  char* shared_;
  Access access_;
};

namespace detail {

template <NormType type, unsigned lanes, unsigned taps, typename Access, typename Use>
auto with_stride(DepthwiseStep step, const DepthwisePlan& plan, const Use& use) {
  if (step == DepthwiseStep::merge_gradients) return use(BlockType<DepthwiseMerge<type, Access>>{});
  if (step == DepthwiseStep::convolve) {
    return plan.stride[2] == 1 ? use(BlockType<DepthwiseConvolve<type, lanes, taps, 1, Access>>{})
                               : use(BlockType<DepthwiseConvolve<type, lanes, taps, 2, Access>>{});
  }
  return plan.stride[2] == 1 ? use(BlockType<DepthwiseGradients<type, lanes, taps, 1, Access>>{})
                             : use(BlockType<DepthwiseGradients<type, lanes, taps, 2, Access>>{});
}

template <NormType type, unsigned lanes, typename Access, typename Use>
auto with_taps(DepthwiseStep step, const DepthwisePlan& plan, const Use& use) {
  return plan.kernel[2] == 3   ? with_stride<type, lanes, 3, Access>(step, plan, use)
         : plan.kernel[2] == 5 ? with_stride<type, lanes, 5, Access>(step, plan, use)
                               : with_stride<type, lanes, 7, Access>(step, plan, use);
}

template <NormType type, typename Access, typename Use>
auto with_lanes(DepthwiseStep step, const DepthwisePlan& plan, const Use& use) {
  return plan.lanes == 1 ? with_taps<type, 1, Access>(step, plan, use)
                         : with_taps<type, depthwise_lanes, Access>(step, plan, use);
}

}  // namespace detail

/// Calls `use` with the `BlockType` of a step, which is for 3, 5 or 7 taps along the width and a stride of 1 or 2
/// there.
template <typename Access = DirectAccess, typename Use>
auto with_depthwise_block(DepthwiseStep step, NormType type, const DepthwisePlan& plan, const Use& use) {
  return type == NormType::float32    ? detail::with_lanes<NormType::float32, Access>(step, plan, use)
         : type == NormType::bfloat16 ? detail::with_lanes<NormType::bfloat16, Access>(step, plan, use)
                                      : detail::with_lanes<NormType::float16, Access>(step, plan, use);
}

}  // namespace nhwc::cuda
