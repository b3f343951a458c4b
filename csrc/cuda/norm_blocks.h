// The work of one block of a GPU's threads in group norm, in phases with barriers between them.
//
// `run(all)` calls `all(phase)` for one phase after the other; a kernel calls the phase with its thread's number and
// then waits at a barrier, a test without a GPU calls it with all numbers. So everything but the barrier can be run,
// tested and counted by any C++17 compiler.
//
// Variances are sums of squared deviations from a value that the thread has seen, merged by the rule of Chan, Golub and
// LeVeque: they are right whatever the mean is. A mean is the sum of two numbers, this value and an offset from it. The
// order of all sums depends on the plan alone.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>

#include "cuda/norm_plan.h"
#include "torch_nhwc/cuda/elements.h"
#include "torch_nhwc/cuda/tile.h"

#if defined(__CUDA_ARCH__)
#define NHWC_PRAGMA(text) _Pragma(#text)
#define NHWC_UNROLL_BY(times) NHWC_PRAGMA(unroll times)
#else
#define NHWC_UNROLL_BY(times)
#endif

namespace nhwc::cuda {

/// Names a class of blocks, which it has none of.
template <typename Block>
struct BlockType {
  using Type = Block;
};

namespace detail {

template <typename To, typename From>
NHWC_HOST_DEVICE To same_bits(const From& value) {
  static_assert(sizeof(To) == sizeof(From), "bits are kept");
  To result;
  memcpy(&result, &value, sizeof(To));
  return result;
}

/// The elements of a type as bits, and the numbers that are computed with.
template <NormType type>
struct NormElement {
  static constexpr unsigned bytes = bytes_of(type);
  using Real = std::conditional_t<type == NormType::float64, double, float>;

  NHWC_HOST_DEVICE static Real to_real(const Bits<bytes>& bits) {
    if constexpr (type == NormType::bfloat16) {
      return same_bits<float>(cast<Elements::bfloat16_to_float>(bits));
    } else if constexpr (type == NormType::float16) {
      return same_bits<float>(cast<Elements::half_to_float>(bits));
    } else {
      return same_bits<Real>(bits);
    }
  }
  NHWC_HOST_DEVICE static Bits<bytes> to_bits(Real value) {
    if constexpr (type == NormType::bfloat16) {
      return cast<Elements::float_to_bfloat16>(same_bits<std::uint32_t>(value));
    } else if constexpr (type == NormType::float16) {
      return cast<Elements::float_to_half>(same_bits<std::uint32_t>(value));
    } else {
      return same_bits<Bits<bytes>>(value);
    }
  }
};

/// The lanes of a thread's vector, in parts of at most 16 bytes.
template <typename Element, unsigned lanes>
struct Lanes {
  static constexpr unsigned bytes = Element::bytes * lanes, parts = bytes > 16 ? bytes / 16 : 1;
  static constexpr unsigned lanes_of_part = lanes / parts;
  using Part = Bits<bytes / parts>;
  Part of[parts];

  NHWC_HOST_DEVICE typename Element::Real operator[](unsigned lane) const {
    if constexpr (lanes == 1) {
      return Element::to_real(of[0]);
    } else {
      return Element::to_real(extract<Element::bytes>(as_quad(of[lane / lanes_of_part]), lane % lanes_of_part));
    }
  }
  NHWC_HOST_DEVICE void set(unsigned lane, typename Element::Real value) {
    if constexpr (lanes == 1) {
      of[0] = Element::to_bits(value);
    } else {
      insert<Element::bytes>(of[lane / lanes_of_part], lane % lanes_of_part, Element::to_bits(value));
    }
  }
};

/// What follows a norm, on its result and for the gradient.
template <typename Real>
struct Following {
  NormActivation activation;
  Real parameter;

  /// A slope is the one of the channel, for kernels that have such.
  template <Follower follower>
  NHWC_HOST_DEVICE Real apply(Real y, Real slope) const {
    if constexpr (follower == Follower::slopes) return y > 0 ? y : y * slope;
    if constexpr (follower == Follower::lines) {
      if (activation == NormActivation::none) return y;
      // Written so that what is undefined stays so.
      if (activation == NormActivation::leaky_relu) return y > 0 ? y : y * parameter;
      return y <= 0 ? Real{0} : y > parameter ? parameter : y;
    }
    if constexpr (follower == Follower::exponentials) return y * gate(y);
    return y;
  }
  /// Returns the gradient of the norm's result, from that of what follows.
  template <Follower follower>
  NHWC_HOST_DEVICE Real gradient(Real grad, Real y, Real slope) const {
    if constexpr (follower == Follower::slopes) return y > 0 ? grad : grad * slope;
    if constexpr (follower == Follower::lines) {
      if (activation == NormActivation::none) return grad;
      if (activation == NormActivation::leaky_relu) return y > 0 ? grad : grad * parameter;
      return y <= 0 || y >= parameter ? Real{0} : grad;
    }
    if constexpr (follower == Follower::exponentials) {
      const Real g = gate(y);
      if (activation == NormActivation::gelu) {
        return grad * (g + y * std::exp(y * y * Real(-0.5)) * Real(0.39894228040143267794));
      }
      if (activation == NormActivation::silu) return grad * (g + y * g * (1 - g));
      return grad * (g + y * g * (1 - g) * (1 + y * y * Real(3 * 0.044715)) * Real(twice_root));
    }
    return grad;
  }

 private:
  static constexpr double twice_root = 1.5957691216057307117;  // 2 sqrt(2 / pi)

  /// The factor by which an activation multiplies its argument. That of GELU by tanh is a logistic function, too.
  NHWC_HOST_DEVICE Real gate(Real y) const {
    if (activation == NormActivation::gelu) return Real(0.5) * (1 + std::erf(y * Real(0.70710678118654752440)));
    const Real inner = activation == NormActivation::silu ? y : y * (1 + y * y * Real(0.044715)) * Real(twice_root);
    return 1 / (1 + std::exp(-inner));
  }
};

/// The mean of `count` numbers, which is `shift + offset`, and the sum of their squared deviations from it.
template <typename Real>
struct Moments {
  static constexpr unsigned fields = 4;
  Real count, shift, offset, deviations;

  NHWC_HOST_DEVICE void merge(const Moments& other) {
    if (other.count == 0) return;
    if (count == 0) {
      *this = other;
      return;
    }
    const Real all = count + other.count, share = other.count / all;
    const Real difference = (other.shift - shift) + (other.offset - offset);
    offset += difference * share;
    deviations += other.deviations + difference * difference * (count * share);
    count = all;
  }
};

/// Two sums: of gradients, and of their products with the deviations from the mean.
template <typename Real>
struct Products {
  static constexpr unsigned fields = 2;
  Real sum, product;

  NHWC_HOST_DEVICE void merge(const Products& other) {
    sum += other.sum;
    product += other.product;
  }
};

/// Values of a block in shared memory, their fields in one array each.
template <typename Value, typename Real, typename Access>
class SharedValues {
 public:
  NHWC_HOST_DEVICE SharedValues(char* shared, std::uint32_t size, Access access)
      : shared_(shared), size_(size), access_(access) {}

  NHWC_HOST_DEVICE Value load(std::uint32_t index) const {
    Fields fields;
    NHWC_UNROLL
    for (unsigned i = 0; i < Value::fields; ++i) {
      fields.of[i] = access_.template load_shared<Real>(shared_, at(i, index));
    }
    return same_bits<Value>(fields);
  }
  NHWC_HOST_DEVICE void store(std::uint32_t index, const Value& value) const {
    const auto fields = same_bits<Fields>(value);
    NHWC_UNROLL
    for (unsigned i = 0; i < Value::fields; ++i) access_.store_shared(shared_, at(i, index), fields.of[i]);
  }

  /// Stores the values of a thread's lanes, which are neighbours. Threads of a warp begin at different lanes: otherwise
  /// they would all be in the same banks.
  template <unsigned lanes>
  NHWC_HOST_DEVICE void store_lanes(std::uint32_t thread, const Value (&values)[lanes]) const {
    constexpr unsigned threads_of_all_banks = 128 / (sizeof(Real) * lanes);
    const std::uint32_t rotation = thread / threads_of_all_banks % lanes;
    NHWC_UNROLL
    for (unsigned field = 0; field < Value::fields; ++field) {
      Real numbers[lanes];
      NHWC_UNROLL
      for (unsigned lane = 0; lane < lanes; ++lane) numbers[lane] = same_bits<Fields>(values[lane]).of[field];
      rotate(numbers, rotation);
      NHWC_UNROLL
      for (unsigned i = 0; i < lanes; ++i) {
        access_.store_shared(shared_, at(field, thread * lanes + (i + rotation) % lanes), numbers[i]);
      }
    }
  }

  /// Merges `copies` runs of values, `distance` apart, into the first, in each of so many sets.
  template <typename All>
  NHWC_HOST_DEVICE void merge(const All& all, std::uint32_t copies, std::uint32_t distance,
                              std::uint32_t sets = 1) const {
    const std::uint32_t pitch = copies * distance;
    for (std::uint32_t left = copies; left > 1; left = (left + 1) / 2) {
      const std::uint32_t half = (left + 1) / 2, merged = (left - half) * distance;
      all([&](std::uint32_t thread) {
        for (std::uint32_t i = thread; i < merged * sets; i += norm_threads) {
          const std::uint32_t index = i / merged * pitch + i % merged;
          Value value = load(index);
          value.merge(load(index + half * distance));
          store(index, value);
        }
      });
    }
  }

 private:
  struct Fields {
    Real of[Value::fields];
  };

  NHWC_HOST_DEVICE std::uint32_t at(unsigned field, std::uint32_t index) const {
    return (field * size_ + index) * static_cast<std::uint32_t>(sizeof(Real));
  }
  char* shared_;
  std::uint32_t size_;
  Access access_;
};

}  // namespace detail

/// What the blocks have in common: their arguments, and numbers of channels.
template <NormType type, typename Access>
class NormBlock {
 public:
  using Element = detail::NormElement<input_type(type)>;
  using Result = detail::NormElement<result_type(type)>;
  using Real = typename Element::Real;

 protected:
  static constexpr unsigned bytes = Element::bytes;
  using Element_ = detail::Bits<bytes>;

  NHWC_HOST_DEVICE NormBlock(const NormArguments& arguments, Access access)
      : norm_(arguments), plan_(arguments.plan), access_(access) {}

  NHWC_HOST_DEVICE Real number(const void* numbers, std::uint64_t index) const {
    return access_.template load<Real>(static_cast<const Real*>(numbers) + index);
  }
  NHWC_HOST_DEVICE void set(void* numbers, std::uint64_t index, Real value) const {
    access_.store(static_cast<Real*>(numbers) + index, value);
  }
  /// Statistics are float or double, and computed with in double where they are stored so.
  NHWC_HOST_DEVICE double statistic(const void* statistics, std::uint64_t group) const {
    if (!norm_.has_double_statistics) return number(statistics, group);
    return access_.template load<double>(static_cast<const double*>(statistics) + group);
  }
  NHWC_HOST_DEVICE void set_statistic(void* statistics, std::uint64_t group, double value) const {
    if (!norm_.has_double_statistics) return set(statistics, group, static_cast<Real>(value));
    access_.store(static_cast<double*>(statistics) + group, value);
  }
  /// Where a channel's statistics are. Those of inputs with a bias are of each channel.
  NHWC_HOST_DEVICE std::uint64_t statistics_of(std::uint64_t group, std::uint64_t sample, std::uint32_t channel) const {
    return norm_.input_bias ? sample * plan_.channels + channel : group;
  }
  /// The output is `(input - mean) * scale + shift`; what the rounded mean is off by is in the shift.
  struct Coefficients {
    Real mean, scale, shift;
  };
  NHWC_HOST_DEVICE Coefficients coefficients_of(std::uint64_t group, std::uint32_t channel) const {
    const double exact = statistic(norm_.mean, group);
    const Real mean = static_cast<Real>(exact);
    const Real scale = static_cast<Real>(statistic(norm_.rstd, group)) * parameter(norm_.weight, channel, 1);
    return {mean, scale, parameter(norm_.bias, channel, 0) + static_cast<Real>(mean - exact) * scale};
  }
  NHWC_HOST_DEVICE void set_parameter(void* parameters, std::uint32_t channel, Real value, bool are_float) const {
    if (are_float) {
      access_.store(static_cast<float*>(parameters) + channel, static_cast<float>(value));
    } else {
      access_.store(static_cast<char*>(parameters) + channel * bytes, Element::to_bits(value));
    }
  }
  NHWC_HOST_DEVICE Real parameter(const void* parameters, std::uint32_t channel, Real otherwise) const {
    return parameters ? stored(parameters, channel, norm_.has_float_parameters) : otherwise;
  }
  NHWC_HOST_DEVICE Real slope_of(std::uint32_t channel) const {
    const Real own = stored(norm_.slopes, norm_.has_one_slope ? 0 : channel, norm_.has_float_slopes);
    return own + static_cast<Real>(norm_.parameter);
  }
  NHWC_HOST_DEVICE Real stored(const void* parameters, std::uint32_t channel, bool are_float) const {
    if (are_float) {
      return static_cast<Real>(access_.template load<float>(static_cast<const float*>(parameters) + channel));
    }
    return Element::to_real(access_.template load<Element_>(static_cast<const char*>(parameters) + channel * bytes));
  }
  NHWC_HOST_DEVICE std::uint32_t channels_of_group() const { return plan_.channels / plan_.groups; }
  NHWC_HOST_DEVICE std::uint64_t rows_of_chunk(std::uint64_t chunk) const {
    const std::uint64_t left = plan_.rows - chunk * plan_.chunk_rows;
    return left < plan_.chunk_rows ? left : plan_.chunk_rows;
  }

  const NormArguments& norm_;
  const NormPlan& plan_;
  Access access_;
};

/// A block that takes a tile of the channels of a chunk of rows.
template <NormType type, unsigned lanes, typename Access>
class NormChunk : public NormBlock<type, Access> {
 protected:
  using Base = NormBlock<type, Access>;
  using Element = typename Base::Element;
  using Real = typename Base::Real;
  using Result = typename Base::Result;
  using Base::access_, Base::bytes, Base::norm_, Base::plan_;
  using Vector = detail::Lanes<Element, lanes>;
  using ResultVector = detail::Lanes<Result, lanes>;

  NHWC_HOST_DEVICE NormChunk(const NormArguments& arguments, std::uint32_t block, Access access)
      : Base(arguments, access),
        tile_(block % plan_.tiles),
        chunk_(block / plan_.tiles % plan_.chunks),
        sample_(block / plan_.tiles / plan_.chunks),
        begin_((sample_ * plan_.rows + std::uint64_t{chunk_} * plan_.chunk_rows) * plan_.channels),
        elements_(static_cast<std::uint32_t>(this->rows_of_chunk(chunk_) * plan_.channels)) {
    const auto address = reinterpret_cast<std::uintptr_t>(norm_.input) + begin_ * bytes;
    skew_ = lanes == 1 ? 0 : static_cast<std::uint32_t>(address % (lanes * bytes) / bytes);
  }

  /// The thread's first vector. The vectors begin at the last aligned address before the chunk.
  NHWC_HOST_DEVICE std::uint32_t first_vector(std::uint32_t thread) const {
    return tile_ * plan_.width + thread % plan_.width + thread / plan_.width * plan_.period;
  }
  NHWC_HOST_DEVICE bool is_active(std::uint32_t thread) const {
    return thread < plan_.slots * plan_.width && tile_ * plan_.width + thread % plan_.width < plan_.period;
  }
  /// The channel of the n-th element of the vectors.
  NHWC_HOST_DEVICE std::uint32_t channel(std::uint32_t index) const {
    return (index + lanes * plan_.channels - skew_) % plan_.channels;
  }
  /// The group of a channel of the block's sample.
  NHWC_HOST_DEVICE std::uint64_t group_of(std::uint32_t channel) const {
    return sample_ * plan_.groups + channel / this->channels_of_group();
  }
  NHWC_HOST_DEVICE std::uint64_t place(std::uint32_t vector) const {
    return begin_ - skew_ + std::uint64_t{vector} * lanes;
  }
  template <typename Vector_>
  NHWC_HOST_DEVICE Vector_ load_as(const void* tensor, std::uint32_t vector) const {
    using Part = typename Vector_::Part;
    const char* first = static_cast<const char*>(tensor) + place(vector) * (Vector_::bytes / lanes);
    Vector_ loaded;
    NHWC_UNROLL
    for (unsigned i = 0; i < Vector_::parts; ++i) {
      loaded.of[i] = access_.template load<Part>(first + i * sizeof(Part));
    }
    return loaded;
  }
  NHWC_HOST_DEVICE Vector load(const void* tensor, std::uint32_t vector) const {
    return load_as<Vector>(tensor, vector);
  }
  template <typename Element_>
  NHWC_HOST_DEVICE Real load_edge(const void* tensor, std::uint32_t vector, unsigned lane) const {
    const char* element = static_cast<const char*>(tensor) + (place(vector) + lane) * Element_::bytes;
    return Element_::to_real(access_.template load<detail::Bits<Element_::bytes>>(element));
  }
  NHWC_HOST_DEVICE Real load(const void* tensor, std::uint32_t vector, unsigned lane) const {
    return load_edge<Element>(tensor, vector, lane);
  }
  /// What the backward reads.
  struct Both {
    ResultVector grad;
    Vector input;
  };
  NHWC_HOST_DEVICE Both load_both(std::uint32_t vector) const {
    return {load_as<ResultVector>(norm_.grad, vector), load(norm_.input, vector)};
  }
  template <typename Element_>
  NHWC_HOST_DEVICE void store_edge(std::uint32_t vector, unsigned lane, Real value) const {
    access_.store(static_cast<char*>(norm_.out) + (place(vector) + lane) * Element_::bytes, Element_::to_bits(value));
  }
  /// Stores a vector of numbers by lane.
  template <typename Element_, typename Number>
  NHWC_HOST_DEVICE void store(std::uint32_t vector, const Number& number) const {
    detail::Lanes<Element_, lanes> out;
    NHWC_UNROLL
    for (unsigned lane = 0; lane < lanes; ++lane) out.set(lane, number(lane));
    char* first = static_cast<char*>(norm_.out) + place(vector) * Element_::bytes;
    NHWC_UNROLL
    for (unsigned i = 0; i < out.parts; ++i) access_.store(first + i * sizeof(out.of[0]), out.of[i]);
  }

  /// Calls `first(loaded)` for the thread's first whole vector, `use(vector, loaded)` for the others, of which
  /// `in_flight` are loaded together, as many as registers hold, and `edge(vector, lane)` for the elements of vectors
  /// that the chunk has in part.
  template <unsigned in_flight, typename Load, typename First, typename Use, typename Edge>
  NHWC_HOST_DEVICE void walk(std::uint32_t thread, const Load& load, const First& first, const Use& use,
                             const Edge& edge) const {
    using Loaded = decltype(load(0u));
    const std::uint32_t step = plan_.slots * plan_.period, end = (skew_ + elements_) / lanes;
    const auto part = [&](std::uint32_t vector) {
      for (unsigned lane = 0; lane < lanes; ++lane) {
        const std::uint32_t index = vector * lanes + lane;
        if (index >= skew_ && index < skew_ + elements_) edge(vector, lane);
      }
    };
    std::uint32_t vector = first_vector(thread);
    const bool has_head = vector == 0 && skew_ != 0;
    if (has_head) vector = step;
    if (vector < end) {
      first(vector, load(vector));
      vector += step;
    }
    for (; std::uint64_t{vector} + (in_flight - 1) * std::uint64_t{step} < end; vector += in_flight * step) {
      Loaded loaded[in_flight];
      NHWC_UNROLL
      for (unsigned i = 0; i < in_flight; ++i) loaded[i] = load(vector + i * step);
      NHWC_UNROLL
      for (unsigned i = 0; i < in_flight; ++i) use(vector + i * step, loaded[i]);
    }
    for (; vector < end; vector += step) use(vector, load(vector));
    if constexpr (lanes > 1) {
      if (has_head) part(0);
      if (vector == end && end * lanes < skew_ + elements_) part(end);
    }
  }

  /// Merges the values of all threads into those of the tile's channels, and calls `write(channel, value)` for each.
  template <typename Value, typename All, typename Accumulate, typename Write>
  NHWC_HOST_DEVICE void reduce(const All& all, char* shared, const Accumulate& accumulate, const Write& write) const {
    const std::uint32_t size = plan_.slots * plan_.width * lanes;
    const std::uint32_t distance = plan_.tiles == 1 ? plan_.channels : plan_.width * lanes;
    const detail::SharedValues<Value, Real, Access> values(shared, size, access_);
    all([&](std::uint32_t thread) {
      if (thread >= plan_.slots * plan_.width) return;
      Value of_lanes[lanes] = {};
      if (is_active(thread)) accumulate(thread, of_lanes);
      values.store_lanes(thread, of_lanes);
    });
    values.merge(all, size / distance, distance);
    all([&](std::uint32_t thread) {
      const std::uint32_t begin = tile_ * plan_.width * lanes;
      for (std::uint32_t i = thread; i < distance; i += norm_threads) {
        if (plan_.tiles == 1 || begin + i < plan_.period * lanes) write(channel(begin + i), values.load(i));
      }
    });
  }

  /// The place of a channel's number among the sums of the chunks, or among the coefficients of samples.
  NHWC_HOST_DEVICE std::uint64_t sum_of(unsigned field, unsigned fields, std::uint32_t channel) const {
    return ((sample_ * plan_.chunks + chunk_) * fields + field) * plan_.channels + channel;
  }
  NHWC_HOST_DEVICE Real coefficient(unsigned field, unsigned fields, std::uint32_t channel) const {
    return this->number(norm_.coefficients, (sample_ * fields + field) * plan_.channels + channel);
  }

  std::uint32_t tile_, chunk_;
  std::uint64_t sample_, begin_;
  std::uint32_t elements_, skew_;
};

/// Forward: the moments of each channel of a chunk.
template <NormType type, unsigned lanes, typename Access = DirectAccess>
class ChunkMoments : NormChunk<type, lanes, Access> {
  using Base = NormChunk<type, lanes, Access>;
  using Base::norm_;
  using typename Base::Real, typename Base::Vector;
  using Value = detail::Moments<Real>;

 public:
  NHWC_HOST_DEVICE ChunkMoments(const NormArguments& arguments, std::uint32_t block, char* shared, Access access = {})
      : Base(arguments, block, access), shared_(shared) {}

  template <typename All>
  NHWC_HOST_DEVICE void run(const All& all) const {
    this->template reduce<Value>(
        all, shared_, [&](std::uint32_t thread, Value(&of_lanes)[lanes]) { accumulate(thread, of_lanes); },
        [&](std::uint32_t channel, const Value& value) {
          this->set(norm_.chunk_sums, this->sum_of(0, 3, channel), value.shift);
          this->set(norm_.chunk_sums, this->sum_of(1, 3, channel), value.offset);
          this->set(norm_.chunk_sums, this->sum_of(2, 3, channel), value.deviations);
        });
  }

 private:
  NHWC_HOST_DEVICE void accumulate(std::uint32_t thread, Value (&of_lanes)[lanes]) const {
    Real shift[lanes], sum[lanes], squares[lanes];
    unsigned count = 0, of_edges[lanes] = {};
    NHWC_UNROLL
    for (unsigned lane = 0; lane < lanes; ++lane) shift[lane] = sum[lane] = squares[lane] = 0;
    const auto add = [&](unsigned lane, Real value) {
      const Real deviation = value - shift[lane];
      sum[lane] += deviation;
      squares[lane] += deviation * deviation;
    };
    this->template walk<(lanes > 4 ? 3 : 4)>(
        thread, [&](std::uint32_t vector) { return this->load(norm_.input, vector); },
        [&](std::uint32_t, const Vector& loaded) {
          count = 1;
          NHWC_UNROLL
          for (unsigned lane = 0; lane < lanes; ++lane) shift[lane] = loaded[lane];
          // An infinite or undefined deviation of the first value from itself counts as well.
          NHWC_UNROLL
          for (unsigned lane = 0; lane < lanes; ++lane) add(lane, shift[lane]);
        },
        [&](std::uint32_t, const Vector& loaded) {
          ++count;
          NHWC_UNROLL
          for (unsigned lane = 0; lane < lanes; ++lane) add(lane, loaded[lane]);
        },
        [&](std::uint32_t vector, unsigned edge) {
          const Real value = this->load(norm_.input, vector, edge);
          NHWC_UNROLL
          for (unsigned lane = 0; lane < lanes; ++lane) {  // so that all indices are constants
            if (lane != edge) continue;
            if (count + of_edges[lane] == 0) shift[lane] = value;
            ++of_edges[lane];
            add(lane, value);
          }
        });
    NHWC_UNROLL
    for (unsigned lane = 0; lane < lanes; ++lane) {
      const Real number = static_cast<Real>(count + of_edges[lane]);
      if (number == 0) continue;
      const Real offset = sum[lane] / number, deviations = squares[lane] - sum[lane] * offset;
      of_lanes[lane] = {number, shift[lane], offset, deviations < 0 ? 0 : deviations};
    }
  }

  char* shared_;
};

/// Backward: the sums of each channel of a chunk.
template <NormType type, unsigned lanes, Follower follower, typename Access = DirectAccess>
class ChunkProducts : NormChunk<type, lanes, Access> {
  using Base = NormChunk<type, lanes, Access>;
  using Base::norm_;
  using typename Base::Real, typename Base::Result;
  using Value = detail::Products<Real>;

 public:
  NHWC_HOST_DEVICE ChunkProducts(const NormArguments& arguments, std::uint32_t block, char* shared, Access access = {})
      : Base(arguments, block, access), shared_(shared) {}

  template <typename All>
  NHWC_HOST_DEVICE void run(const All& all) const {
    this->template reduce<Value>(
        all, shared_, [&](std::uint32_t thread, Value(&of_lanes)[lanes]) { accumulate(thread, of_lanes); },
        [&](std::uint32_t channel, const Value& value) {
          this->set(norm_.chunk_sums, this->sum_of(0, 2, channel), value.sum);
          this->set(norm_.chunk_sums, this->sum_of(1, 2, channel), value.product);
        });
  }

 private:
  NHWC_HOST_DEVICE void accumulate(std::uint32_t thread, Value (&of_lanes)[lanes]) const {
    Real mean[lanes], scale[lanes], shift[lanes], slope[lanes] = {};
    NHWC_UNROLL
    for (unsigned lane = 0; lane < lanes; ++lane) {
      const std::uint32_t channel = this->channel(this->first_vector(thread) * lanes + lane);
      if constexpr (follower == Follower::nothing) {
        mean[lane] = static_cast<Real>(this->statistic(norm_.mean, this->group_of(channel)));
      } else {
        const auto found = this->coefficients_of(this->group_of(channel), channel);
        mean[lane] = found.mean, scale[lane] = found.scale, shift[lane] = found.shift;
      }
      if constexpr (follower == Follower::slopes) slope[lane] = this->slope_of(channel);
    }
    const detail::Following<Real> following{norm_.activation, static_cast<Real>(norm_.parameter)};
    const auto add = [&](unsigned lane, Real grad, Real value) {
      const Real deviation = value - mean[lane];
      if constexpr (follower != Follower::nothing) {
        grad = following.template gradient<follower>(grad, deviation * scale[lane] + shift[lane], slope[lane]);
      }
      of_lanes[lane].sum += grad;
      of_lanes[lane].product += grad * deviation;
    };
    const auto use = [&](std::uint32_t, const typename Base::Both& loaded) {
      NHWC_UNROLL
      for (unsigned lane = 0; lane < lanes; ++lane) add(lane, loaded.grad[lane], loaded.input[lane]);
    };
    this->template walk<2>(
        thread, [&](std::uint32_t vector) { return this->load_both(vector); }, use, use,
        [&](std::uint32_t vector, unsigned edge) {
          const Real grad = this->template load_edge<Result>(norm_.grad, vector, edge);
          NHWC_UNROLL
          for (unsigned lane = 0; lane < lanes; ++lane) {
            if (lane == edge) add(lane, grad, this->load(norm_.input, vector, edge));
          }
        });
  }

  char* shared_;
};

/// Forward: the output, `(input - mean) * scale + shift`, and what follows.
template <NormType type, unsigned lanes, Follower follower, typename Access = DirectAccess>
class NormaliseChunk : NormChunk<type, lanes, Access> {
  using Base = NormChunk<type, lanes, Access>;
  using Base::norm_;
  using typename Base::Real, typename Base::Result;

  struct Loaded {
    typename Base::Vector input;
    typename Base::ResultVector residual;
  };

 public:
  NHWC_HOST_DEVICE NormaliseChunk(const NormArguments& arguments, std::uint32_t block, char*, Access access = {})
      : Base(arguments, block, access) {}

  template <typename All>
  NHWC_HOST_DEVICE void run(const All& all) const {
    all([&](std::uint32_t thread) {
      if (this->is_active(thread)) write(thread);
    });
  }

 private:
  NHWC_HOST_DEVICE void write(std::uint32_t thread) const {
    Real mean[lanes], scale[lanes], shift[lanes], slope[lanes] = {};
    NHWC_UNROLL
    for (unsigned lane = 0; lane < lanes; ++lane) {
      const std::uint32_t channel = this->channel(this->first_vector(thread) * lanes + lane);
      if constexpr (follower == Follower::nothing) {
        mean[lane] = this->coefficient(0, 3, channel);
        scale[lane] = this->coefficient(1, 3, channel);
        shift[lane] = this->coefficient(2, 3, channel);
      } else {
        const auto found = this->coefficients_of(this->group_of(channel), channel);
        mean[lane] = found.mean, scale[lane] = found.scale, shift[lane] = found.shift;
      }
      if constexpr (follower == Follower::slopes) slope[lane] = this->slope_of(channel);
    }
    const detail::Following<Real> following{norm_.activation, static_cast<Real>(norm_.parameter)};
    const auto result = [&](unsigned lane, Real value, Real residual) {
      return following.template apply<follower>((value - mean[lane]) * scale[lane] + shift[lane] + residual,
                                                slope[lane]);
    };
    const bool has_residual = follower != Follower::nothing && norm_.residual;
    const auto use = [&](std::uint32_t vector, const Loaded& loaded) {
      this->template store<Result>(vector, [&](unsigned lane) {
        return result(lane, loaded.input[lane], has_residual ? loaded.residual[lane] : Real{0});
      });
    };
    this->template walk<(lanes <= 4                      ? 4
                         : follower == Follower::nothing ? 3
                                                         : 2)>(
        thread,
        [&](std::uint32_t vector) {
          Loaded loaded{};
          loaded.input = this->load(norm_.input, vector);
          if (has_residual) {
            loaded.residual = this->template load_as<typename Base::ResultVector>(norm_.residual, vector);
          }
          return loaded;
        },
        use, use,
        [&](std::uint32_t vector, unsigned edge) {
          const Real value = this->load(norm_.input, vector, edge);
          const Real residual = has_residual ? this->template load_edge<Result>(norm_.residual, vector, edge) : Real{0};
          NHWC_UNROLL
          for (unsigned lane = 0; lane < lanes; ++lane) {
            if (lane == edge) this->template store_edge<Result>(vector, lane, result(lane, value, residual));
          }
        });
  }
};

/// Backward: the input's gradient, `of_grad * grad + of_input * (input - mean) + shift`, where `of_grad` is the scale
/// of the forward.
template <NormType type, unsigned lanes, Follower follower, typename Access = DirectAccess>
class GradientChunk : NormChunk<type, lanes, Access> {
  using Base = NormChunk<type, lanes, Access>;
  using Base::norm_;
  using typename Base::Real, typename Base::Element, typename Base::Result;

 public:
  NHWC_HOST_DEVICE GradientChunk(const NormArguments& arguments, std::uint32_t block, char*, Access access = {})
      : Base(arguments, block, access) {}

  template <typename All>
  NHWC_HOST_DEVICE void run(const All& all) const {
    all([&](std::uint32_t thread) {
      if (this->is_active(thread)) write(thread);
    });
  }

 private:
  NHWC_HOST_DEVICE void write(std::uint32_t thread) const {
    Real mean[lanes], of_grad[lanes], of_input[lanes], shift[lanes], of_output[lanes], slope[lanes] = {};
    NHWC_UNROLL
    for (unsigned lane = 0; lane < lanes; ++lane) {
      const std::uint32_t channel = this->channel(this->first_vector(thread) * lanes + lane);
      mean[lane] = this->coefficient(0, 4, channel);
      of_grad[lane] = this->coefficient(1, 4, channel);
      of_input[lane] = this->coefficient(2, 4, channel);
      shift[lane] = this->coefficient(3, 4, channel);
      if constexpr (follower != Follower::nothing) {
        of_output[lane] = this->coefficients_of(this->group_of(channel), channel).shift;
      }
      if constexpr (follower == Follower::slopes) slope[lane] = this->slope_of(channel);
    }
    const detail::Following<Real> following{norm_.activation, static_cast<Real>(norm_.parameter)};
    const auto gradient = [&](unsigned lane, Real grad, Real value) {
      const Real deviation = value - mean[lane];
      if constexpr (follower != Follower::nothing) {
        grad = following.template gradient<follower>(grad, deviation * of_grad[lane] + of_output[lane], slope[lane]);
      }
      return of_grad[lane] * grad + (of_input[lane] * deviation + shift[lane]);
    };
    const auto use = [&](std::uint32_t vector, const typename Base::Both& loaded) {
      this->template store<Element>(
          vector, [&](unsigned lane) { return gradient(lane, loaded.grad[lane], loaded.input[lane]); });
    };
    this->template walk<2>(
        thread, [&](std::uint32_t vector) { return this->load_both(vector); }, use, use,
        [&](std::uint32_t vector, unsigned edge) {
          const Real grad = this->template load_edge<Result>(norm_.grad, vector, edge);
          const Real value = this->load(norm_.input, vector, edge);
          NHWC_UNROLL
          for (unsigned lane = 0; lane < lanes; ++lane) {
            if (lane == edge) this->template store_edge<Element>(vector, lane, gradient(lane, grad, value));
          }
        });
  }
};

/// A block that merges the sums of the chunks, for some groups of a sample: first over the chunks, then over the
/// channels of a group.
template <NormType type, typename Value, typename Access>
class MergeBlock : public NormBlock<type, Access> {
 protected:
  using Base = NormBlock<type, Access>;
  using Real = typename Base::Real;
  using Base::norm_, Base::plan_, Base::access_;

  NHWC_HOST_DEVICE MergeBlock(const NormArguments& arguments, std::uint32_t block, char* shared, Access access)
      : Base(arguments, access), values_(shared, norm_threads, access) {
    const std::uint32_t blocks = (plan_.groups + plan_.merged_groups - 1) / plan_.merged_groups;
    sample_ = block / blocks;
    first_group_ = block % blocks * plan_.merged_groups;
    const std::uint32_t left = plan_.groups - first_group_;
    groups_ = left < plan_.merged_groups ? left : plan_.merged_groups;
    channels_ = groups_ * this->channels_of_group();
    columns_ = channels_ < norm_threads ? channels_ : norm_threads;
    slices_ = norm_threads / columns_;
  }

  NHWC_HOST_DEVICE std::uint32_t channel(std::uint32_t index) const {
    return first_group_ * this->channels_of_group() + index;
  }
  NHWC_HOST_DEVICE std::uint64_t group_of(std::uint32_t index) const {
    return sample_ * plan_.groups + first_group_ + index;
  }
  NHWC_HOST_DEVICE Real sum(std::uint64_t chunk, unsigned field, unsigned fields, std::uint32_t index) const {
    const std::uint64_t place = ((sample_ * plan_.chunks + chunk) * fields + field) * plan_.channels + channel(index);
    return this->number(norm_.chunk_sums, place);
  }

  std::uint64_t sample_;
  std::uint32_t first_group_, groups_, channels_;  // of the block
  std::uint32_t columns_, slices_;                 // channels and shares of the chunks that threads take
  detail::SharedValues<Value, Real, Access> values_;
};

/// Forward: the statistics, and the coefficients of the output.
template <NormType type, typename Access = DirectAccess>
class MergeMoments : MergeBlock<type, detail::Moments<typename NormBlock<type, Access>::Real>, Access> {
  using Value = detail::Moments<typename NormBlock<type, Access>::Real>;
  using Base = MergeBlock<type, Value, Access>;
  using Base::norm_, Base::plan_, Base::values_, Base::columns_, Base::slices_, Base::channels_, Base::groups_,
      Base::sample_;
  using typename Base::Real;

 public:
  NHWC_HOST_DEVICE MergeMoments(const NormArguments& arguments, std::uint32_t block, char* shared, Access access = {})
      : Base(arguments, block, shared, access) {}

  template <typename All>
  NHWC_HOST_DEVICE void run(const All& all) const {
    all([&](std::uint32_t thread) {
      if (thread >= columns_ * slices_) return;
      Value value = {};
      for (std::uint32_t index = thread % columns_; index < channels_; index += columns_) {
        const Real added = this->parameter(norm_.input_bias, this->channel(index), 0);
        NHWC_UNROLL_BY(4)
        for (std::uint32_t chunk = thread / columns_; chunk < plan_.chunks; chunk += slices_) {
          value.merge({static_cast<Real>(this->rows_of_chunk(chunk)), this->sum(chunk, 0, 3, index),
                       this->sum(chunk, 1, 3, index) + added, this->sum(chunk, 2, 3, index)});
        }
      }
      values_.store(thread, value);
    });
    values_.merge(all, slices_, columns_);
    const std::uint32_t of_group = columns_ / groups_;
    values_.merge(all, of_group, 1, groups_);
    all([&](std::uint32_t thread) {
      if (thread >= groups_) return;
      const Value value = values_.load(thread * of_group);
      const Real mean = value.shift + value.offset, variance = value.deviations / value.count;
      const Real rstd = 1 / std::sqrt(variance + static_cast<Real>(norm_.eps));
      const std::uint64_t group = this->group_of(thread);
      const double exact = static_cast<double>(value.shift) + value.offset;
      const double exact_rstd = norm_.has_double_statistics ? 1 / std::sqrt(variance + norm_.eps) : double{rstd};
      if (norm_.input_bias) {
        for (std::uint32_t i = 0; i < this->channels_of_group(); ++i) {
          const std::uint32_t channel = this->channel(thread * this->channels_of_group() + i);
          const std::uint64_t place = this->statistics_of(group, sample_, channel);
          this->set_statistic(norm_.mean, place, exact - this->parameter(norm_.input_bias, channel, 0));
          this->set_statistic(norm_.rstd, place, exact_rstd);
        }
      } else {
        this->set_statistic(norm_.mean, group, exact);
        this->set_statistic(norm_.rstd, group, exact_rstd);
      }
      if (norm_.variance) this->set(norm_.variance, group, variance);
      if (norm_.running_mean) {  // of batch norm, whose groups are the channels
        const auto update = [&](void* running, Real of_input) {
          const auto channel = static_cast<std::uint32_t>(group);
          const Real before = this->parameter(running, channel, 0), momentum = static_cast<Real>(norm_.momentum);
          this->set_parameter(running, channel, momentum * of_input + (1 - momentum) * before,
                              norm_.has_float_parameters);
        };
        update(norm_.running_mean, mean);
        update(norm_.running_var, value.deviations / (value.count - 1));
      }
      // What the rounded mean is off by goes into the shift.
      values_.store(thread * of_group, {mean, rstd, (mean - value.shift) - value.offset, 0});
    });
    if (!norm_.coefficients) return;
    all([&](std::uint32_t thread) {
      for (std::uint32_t index = thread; index < channels_; index += norm_threads) {
        const Value value = values_.load(index / this->channels_of_group() * of_group);
        const Real mean = value.count, rstd = value.shift, remainder = value.offset;
        const std::uint32_t channel = this->channel(index);
        const Real scale = rstd * this->parameter(norm_.weight, channel, 1);
        const std::uint64_t place = sample_ * 3 * plan_.channels + channel;
        this->set(norm_.coefficients, place, mean);
        this->set(norm_.coefficients, place + plan_.channels, scale);
        this->set(norm_.coefficients, place + 2 * std::uint64_t{plan_.channels},
                  this->parameter(norm_.bias, channel, 0) + remainder * scale);
      }
    });
  }
};

/// Backward: the sums of the sample's channels, and the coefficients of the input's gradient.
template <NormType type, typename Access = DirectAccess>
class MergeProducts : MergeBlock<type, detail::Products<typename NormBlock<type, Access>::Real>, Access> {
  using Value = detail::Products<typename NormBlock<type, Access>::Real>;
  using Base = MergeBlock<type, Value, Access>;
  using Base::norm_, Base::plan_, Base::values_, Base::columns_, Base::slices_, Base::channels_, Base::groups_,
      Base::sample_;
  using typename Base::Real;

 public:
  NHWC_HOST_DEVICE MergeProducts(const NormArguments& arguments, std::uint32_t block, char* shared, Access access = {})
      : Base(arguments, block, shared, access) {}

  template <typename All>
  NHWC_HOST_DEVICE void run(const All& all) const {
    all([&](std::uint32_t thread) {
      if (thread >= columns_ * slices_) return;
      Value all_columns = {};
      for (std::uint32_t index = thread % columns_; index < channels_; index += columns_) {
        Value value = {};
        NHWC_UNROLL_BY(4)
        for (std::uint32_t chunk = thread / columns_; chunk < plan_.chunks; chunk += slices_) {
          value.merge({this->sum(chunk, 0, 2, index), this->sum(chunk, 1, 2, index)});
        }
        all_columns.merge(slices_ == 1 ? weighted(index, value) : value);
      }
      values_.store(thread, all_columns);
    });
    if (slices_ > 1) {
      values_.merge(all, slices_, columns_);
      all([&](std::uint32_t thread) {
        if (thread < columns_) values_.store(thread, weighted(thread, values_.load(thread)));
      });
    }
    const std::uint32_t of_group = columns_ / groups_;
    values_.merge(all, of_group, 1, groups_);
    all([&](std::uint32_t thread) {
      for (std::uint32_t index = thread; index < channels_; index += norm_threads) {
        const std::uint32_t in_block = index / this->channels_of_group();
        const Value value = values_.load(in_block * of_group);
        const Real elements = static_cast<Real>(plan_.rows) * static_cast<Real>(this->channels_of_group());
        const std::uint64_t group = this->group_of(in_block);
        const std::uint32_t channel = this->channel(index);
        const std::uint64_t statistics = this->statistics_of(group, sample_, channel);
        const Real rstd = static_cast<Real>(this->statistic(norm_.rstd, statistics));
        const Real of_all = norm_.is_of_input ? -rstd / elements : Real{0};  // by way of the statistics
        const std::uint64_t place = sample_ * 4 * plan_.channels + channel, next = plan_.channels;
        this->set(norm_.coefficients, place, static_cast<Real>(this->statistic(norm_.mean, statistics)));
        this->set(norm_.coefficients, place + next, rstd * this->parameter(norm_.weight, channel, 1));
        this->set(norm_.coefficients, place + 2 * next, of_all * rstd * rstd * value.product);
        this->set(norm_.coefficients, place + 3 * next, of_all * value.sum);
      }
    });
  }

 private:
  // Writes a channel's sums for the gradients of the parameters, and returns its part of the group's sums.
  NHWC_HOST_DEVICE Value weighted(std::uint32_t index, const Value& value) const {
    const std::uint32_t channel = this->channel(index);
    const std::uint64_t group = this->group_of(index / this->channels_of_group());
    const Real rstd = static_cast<Real>(this->statistic(norm_.rstd, this->statistics_of(group, sample_, channel)));
    const std::uint64_t place = sample_ * 2 * plan_.channels + channel;
    this->set(norm_.sample_sums, place, value.sum);
    this->set(norm_.sample_sums, place + plan_.channels, value.product * rstd);
    const Real weight = this->parameter(norm_.weight, channel, 1);
    return {value.sum * weight, value.product * weight};
  }
};

/// Backward: the gradients of the parameters, sums over the samples.
template <NormType type, typename Access = DirectAccess>
class ParameterGradients : NormBlock<type, Access> {
  using Base = NormBlock<type, Access>;
  using Base::norm_, Base::plan_;
  using typename Base::Real;
  using Value = detail::Products<Real>;
  static constexpr unsigned columns = channels_of_parameter_block, slices = norm_threads / columns;

 public:
  NHWC_HOST_DEVICE ParameterGradients(const NormArguments& arguments, std::uint32_t block, char* shared,
                                      Access access = {})
      : Base(arguments, access), first_(block * columns), values_(shared, norm_threads, access) {}

  template <typename All>
  NHWC_HOST_DEVICE void run(const All& all) const {
    all([&](std::uint32_t thread) {
      const std::uint32_t channel = first_ + thread % columns;
      Value value = {};
      for (std::uint64_t sample = thread / columns; channel < plan_.channels && sample < plan_.samples;
           sample += slices) {
        const std::uint64_t place = sample * 2 * plan_.channels + channel;
        value.merge({this->number(norm_.sample_sums, place), this->number(norm_.sample_sums, place + plan_.channels)});
      }
      values_.store(thread, value);
    });
    values_.merge(all, slices, columns);
    all([&](std::uint32_t thread) {
      if (thread >= columns || first_ + thread >= plan_.channels) return;
      const Value value = values_.load(thread);
      const auto set = [&](void* gradients, Real sum) {
        if (gradients) this->set_parameter(gradients, first_ + thread, sum, norm_.has_float_gradients);
      };
      set(norm_.grad_weight, value.product);
      set(norm_.grad_bias, value.sum);
    });
  }

 private:
  std::uint32_t first_;
  detail::SharedValues<Value, Real, Access> values_;
};

/// The statistics that running ones are for batch norm in evaluation: mean and reciprocal deviation.
template <NormType type, typename Access = DirectAccess>
class KnownStatistics : NormBlock<type, Access> {
  using Base = NormBlock<type, Access>;
  using Base::norm_, Base::plan_;

 public:
  NHWC_HOST_DEVICE KnownStatistics(const NormArguments& arguments, std::uint32_t block, char*, Access access = {})
      : Base(arguments, access), first_(block * norm_threads) {}

  template <typename All>
  NHWC_HOST_DEVICE void run(const All& all) const {
    all([&](std::uint32_t thread) {
      const std::uint32_t channel = first_ + thread;
      if (channel >= plan_.channels) return;
      const double variance = this->parameter(norm_.running_var, channel, 1);
      const double mean = this->parameter(norm_.running_mean, channel, 0);
      this->set_statistic(norm_.mean, channel, mean - this->parameter(norm_.input_bias, channel, 0));
      this->set_statistic(norm_.rstd, channel, 1 / std::sqrt(variance + norm_.eps));
    });
  }

 private:
  std::uint32_t first_;
};

/// A block that does all steps for a tile of whole groups: their sums, in runs of groups that are merged, and the pass
/// that writes. What one step leaves in global memory, the next one of the same block reads after a barrier.
template <typename Sums, typename Merge, typename Write, typename Access>
class WholeBlock {
 public:
  NHWC_HOST_DEVICE WholeBlock(const NormArguments& arguments, std::uint32_t block, char* shared, Access access = {})
      : arguments_(arguments), block_(block), shared_(shared), access_(access) {}

  template <typename All>
  NHWC_HOST_DEVICE void run(const All& all) const {
    const NormPlan& plan = arguments_.plan;
    const std::uint32_t merges_of_sample = (plan.groups + plan.merged_groups - 1) / plan.merged_groups;
    const std::uint32_t first = block_ % plan.tiles * plan.merges, left = merges_of_sample - first;
    Sums(arguments_, block_, shared_, access_).run(all);
    for (std::uint32_t i = 0; i < (left < plan.merges ? left : plan.merges); ++i) {
      Merge(arguments_, block_ / plan.tiles * merges_of_sample + first + i, shared_, access_).run(all);
    }
    Write(arguments_, block_, shared_, access_).run(all);
  }

 private:
  const NormArguments& arguments_;
  std::uint32_t block_;
  char* shared_;
  Access access_;
};

/// The class of a kernel's blocks.
template <NormStep step, NormType type, unsigned lanes, Follower follower, typename Access = DirectAccess>
using BlockOfStep = std::tuple_element_t<
    static_cast<int>(step),
    std::tuple<ChunkMoments<type, lanes, Access>, MergeMoments<type, Access>,
               NormaliseChunk<type, lanes, follower, Access>, ChunkProducts<type, lanes, follower, Access>,
               MergeProducts<type, Access>, GradientChunk<type, lanes, follower, Access>,
               ParameterGradients<type, Access>,
               WholeBlock<ChunkMoments<type, lanes, Access>, MergeMoments<type, Access>,
                          NormaliseChunk<type, lanes, follower, Access>, Access>,
               WholeBlock<ChunkProducts<type, lanes, follower, Access>, MergeProducts<type, Access>,
                          GradientChunk<type, lanes, follower, Access>, Access>,
               KnownStatistics<type, Access>>>;

}  // namespace nhwc::cuda
