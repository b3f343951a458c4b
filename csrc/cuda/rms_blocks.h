// The work of one block of a GPU's threads in RMS norm, in phases with barriers between them, as in norm_blocks.h.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/norm_blocks.h"
#include "cuda/rms_plan.h"

namespace nhwc::cuda {

/// What the blocks have in common: vectors, and sums over the channels of rows.
template <NormType type, unsigned lanes, bool has_silu, typename Access>
class RmsBlock {
 protected:
  using Element = detail::NormElement<type>;
  using Real = typename Element::Real;
  using Vector = detail::Lanes<Element, lanes>;
  static constexpr Follower follower = has_silu ? Follower::exponentials : Follower::nothing;
  static constexpr std::uint32_t most_left = 8;

  NHWC_HOST_DEVICE RmsBlock(const RmsArguments& arguments, char* shared, Access access)
      : rms_(arguments), plan_(arguments.plan), shared_(shared), access_(access) {}

  NHWC_HOST_DEVICE Vector load(const void* tensor, std::uint64_t vector) const {
    using Part = typename Vector::Part;
    return {{access_.template load<Part>(static_cast<const Part*>(tensor) + vector)}};
  }
  NHWC_HOST_DEVICE void store(void* tensor, std::uint64_t vector, const Vector& value) const {
    access_.store(static_cast<typename Vector::Part*>(tensor) + vector, value.of[0]);
  }
  NHWC_HOST_DEVICE Vector bias(std::uint32_t vector) const { return rms_.bias ? load(rms_.bias, vector) : Vector{}; }
  /// Loaded where it is added, of the cache: registers hold what comes from memory.
  NHWC_HOST_DEVICE Vector input_bias(std::uint32_t vector) const {
    return rms_.input_bias ? load(rms_.input_bias, vector) : Vector{};
  }

  NHWC_HOST_DEVICE static detail::Following<Real> following() { return {NormActivation::silu, 0}; }

  /// Arrays of a number for each thread, in shared memory.
  NHWC_HOST_DEVICE Real shared(unsigned array, std::uint32_t index) const {
    return access_.template load_shared<Real>(shared_, at(array, index));
  }
  NHWC_HOST_DEVICE void set_shared(unsigned array, std::uint32_t index, Real value) const {
    access_.store_shared(shared_, at(array, index), value);
  }

  NHWC_HOST_DEVICE std::uint32_t width() const { return 1u << plan_.shift; }
  NHWC_HOST_DEVICE std::uint32_t row_of(std::uint32_t thread) const { return thread >> plan_.shift; }
  NHWC_HOST_DEVICE std::uint32_t part_of(std::uint32_t thread) const { return thread & (width() - 1); }

  /// Calls `use(vector, load(vector))` for a thread's vectors of its row, of which `in_flight` are loaded together.
  template <unsigned in_flight, typename Load, typename Use>
  NHWC_HOST_DEVICE void walk(std::uint32_t thread, const Load& load, const Use& use) const {
    for (std::uint32_t first = part_of(thread); first < plan_.vectors; first += in_flight * width()) {
      decltype(load(0u)) loaded[in_flight];
      NHWC_UNROLL
      for (unsigned i = 0; i < in_flight; ++i) {
        if (first + i * width() < plan_.vectors) loaded[i] = load(first + i * width());
      }
      NHWC_UNROLL
      for (unsigned i = 0; i < in_flight; ++i) {
        if (first + i * width() < plan_.vectors) use(first + i * width(), loaded[i]);
      }
    }
  }

  /// Adds up the numbers of a row's threads, until a few are left.
  template <typename All>
  NHWC_HOST_DEVICE void merge(const All& all, unsigned first_array, unsigned arrays) const {
    for (std::uint32_t left = width(); left > most_left; left /= 4) {
      all([&](std::uint32_t thread) {
        if (part_of(thread) >= left / 4) return;
        for (unsigned array = first_array; array < first_array + arrays; ++array) {
          Real sum = 0;
          NHWC_UNROLL
          for (unsigned i = 0; i < 4; ++i) sum += shared(array, thread + i * (left / 4));
          set_shared(array, thread, sum);
        }
      });
    }
  }
  /// Returns the sum of those that are left, which the threads of the row read together.
  NHWC_HOST_DEVICE Real sum_of_row(unsigned array, std::uint32_t thread) const {
    std::uint32_t left = width();
    while (left > most_left) left /= 4;
    Real sum = 0;
    NHWC_UNROLL
    for (unsigned i = 0; i < most_left; ++i) {
      if (i < left) sum += shared(array, thread - part_of(thread) + i);
    }
    return sum;
  }

  /// Written so that what is undefined stays so.
  NHWC_HOST_DEVICE bool is_clamped(Real squares) const { return std::sqrt(squares) < static_cast<Real>(rms_.eps); }
  NHWC_HOST_DEVICE Real factor(Real squares) const {
    return static_cast<Real>(rms_.scale) / (is_clamped(squares) ? static_cast<Real>(rms_.eps) : std::sqrt(squares));
  }

  const RmsArguments& rms_;
  const RmsPlan& plan_;
  char* shared_;
  Access access_;

 private:
  NHWC_HOST_DEVICE static std::uint32_t at(unsigned array, std::uint32_t index) {
    return (array * rms_threads + index) * static_cast<std::uint32_t>(sizeof(Real));
  }
};

/// Forward: as many rows as threads take at a time.
template <NormType type, unsigned lanes, bool has_silu, typename Access = DirectAccess>
class RmsForward : RmsBlock<type, lanes, has_silu, Access> {
  using Base = RmsBlock<type, lanes, has_silu, Access>;
  using Base::rms_, Base::plan_;
  using typename Base::Real, typename Base::Vector;

 public:
  static constexpr unsigned blocks_of_processor = rms_blocks_of_processor(false, has_silu);

  NHWC_HOST_DEVICE RmsForward(const RmsArguments& arguments, std::uint32_t block, char* shared, Access access = {})
      : Base(arguments, shared, access), first_row_(std::uint64_t{block} * (rms_threads >> plan_.shift)) {}

  template <typename All>
  NHWC_HOST_DEVICE void run(const All& all) const {
    all([&](std::uint32_t thread) {
      Real squares = 0;
      const std::uint64_t row = first_row_ + this->row_of(thread);
      if (row < plan_.rows) {
        this->template walk<4>(
            thread, [&](std::uint32_t vector) { return this->load(rms_.input, row * plan_.vectors + vector); },
            [&](std::uint32_t vector, const Vector& input) {
              const Vector added = this->input_bias(vector);
              NHWC_UNROLL
              for (unsigned lane = 0; lane < lanes; ++lane) {
                const Real value = input[lane] + added[lane];
                squares += value * value;
              }
            });
      }
      this->set_shared(0, thread, squares);
    });
    this->merge(all, 0, 1);
    all([&](std::uint32_t thread) {
      const std::uint64_t row = first_row_ + this->row_of(thread);
      if (row >= plan_.rows) return;
      const Real factor = this->factor(this->sum_of_row(0, thread));
      this->template walk<2>(
          thread,
          [&](std::uint32_t vector) {
            return Loaded{this->load(rms_.input, row * plan_.vectors + vector), this->load(rms_.weight, vector),
                          this->bias(vector)};
          },
          [&](std::uint32_t vector, const Loaded& loaded) {
            const Vector added = this->input_bias(vector);
            Vector out;
            NHWC_UNROLL
            for (unsigned lane = 0; lane < lanes; ++lane) {
              const Real value = loaded.input[lane] + added[lane];
              const Real y = value * factor * loaded.weight[lane] + loaded.bias[lane];
              out.set(lane, Base::following().template apply<Base::follower>(y, Real{0}));
            }
            this->store(rms_.out, row * plan_.vectors + vector, out);
          });
    });
  }

 private:
  struct Loaded {
    Vector input, weight, bias;
  };
  std::uint64_t first_row_;
};

/// Backward: a chunk of rows, tile by tile. First the sums over the channels of each row, by the threads of the row,
/// then the gradients and the sums over rows, by threads that keep their channels. The latter sums are in shared
/// memory from one tile to the next, or where a thread has several vectors of a row, in global memory.
template <NormType type, unsigned lanes, bool has_silu, typename Access = DirectAccess>
class RmsBackward : RmsBlock<type, lanes, has_silu, Access> {
  using Base = RmsBlock<type, lanes, has_silu, Access>;
  using Base::rms_, Base::plan_, Base::access_;
  using typename Base::Real, typename Base::Vector;
  using Value = detail::Products<Real>;
  // Arrays in shared memory: sums of squares and of products of a row, its factor, and that of the input in its
  // gradient; then for each lane the sums of gradients and of products.
  static constexpr unsigned squares = 0, products = 1, factors = 2, of_inputs = 3, sums = 4;

 public:
  static constexpr unsigned blocks_of_processor = rms_blocks_of_processor(true, has_silu);

  NHWC_HOST_DEVICE RmsBackward(const RmsArguments& arguments, std::uint32_t block, char* shared, Access access = {})
      : Base(arguments, shared, access), block_(block) {}

  template <typename All>
  NHWC_HOST_DEVICE void run(const All& all) const {
    const std::uint64_t begin = block_ * plan_.chunk_rows, left = plan_.rows - begin;
    const std::uint64_t end = begin + (left < plan_.chunk_rows ? left : plan_.chunk_rows);
    for (std::uint64_t first = begin; first < end; first += plan_.tile_rows) {
      const auto rows = static_cast<std::uint32_t>(end - first < plan_.tile_rows ? end - first : plan_.tile_rows);
      // Without what follows, gradients are known before the factor is.
      sum_channels<true, !has_silu>(all, first, rows);
      if (has_silu && rms_.out) sum_channels<false, true>(all, first, rows);
      all([&](std::uint32_t thread) {
        if (this->part_of(thread) != 0) return;
        const Real of_row = this->sum_of_row(squares, thread);
        this->set_shared(factors, this->row_of(thread), this->factor(of_row));
        const bool is_constant = !rms_.out || this->is_clamped(of_row);
        this->set_shared(of_inputs, this->row_of(thread),
                         is_constant ? Real{0} : this->sum_of_row(products, thread) / of_row);
      });
      all([&](std::uint32_t thread) {
        if (thread >= plan_.slots * plan_.columns) return;
        for (std::uint32_t vector = thread % plan_.columns; vector < plan_.vectors; vector += rms_threads) {
          write(thread, vector, first, rows, first == begin);
        }
      });
    }
    if (!rms_.sums || plan_.vectors > rms_threads) return;
    for (std::uint32_t left = plan_.slots; left > 1; left = (left + 1) / 2) {
      const std::uint32_t half = (left + 1) / 2 * plan_.columns;
      all([&](std::uint32_t thread) {
        if (thread >= left * plan_.columns - half) return;
        NHWC_UNROLL
        for (unsigned array = sums; array < sums + 2 * lanes; ++array) {
          this->set_shared(array, thread, this->shared(array, thread) + this->shared(array, thread + half));
        }
      });
    }
    all([&](std::uint32_t thread) {
      if (thread >= plan_.columns) return;
      NHWC_UNROLL
      for (unsigned lane = 0; lane < lanes; ++lane) {
        access_.store(place(0, thread, lane), this->shared(sums + 2 * lane, thread));
        access_.store(place(1, thread, lane), this->shared(sums + 2 * lane + 1, thread));
      }
    });
  }

 private:
  static constexpr unsigned in_flight = has_silu && lanes > 4 ? 1 : 2;  // that registers hold
  struct Both {
    Vector input, grad;
  };
  struct Parameters {
    Vector weight, bias;
  };
  NHWC_HOST_DEVICE Parameters parameters(std::uint32_t vector) const {
    return {this->load(rms_.weight, vector), has_silu ? this->bias(vector) : Vector{}};
  }

  /// Returns the gradient of the norm's result.
  NHWC_HOST_DEVICE static Real gradient(const Both& both, const Parameters& parameters, unsigned lane, Real factor) {
    const Real y = both.input[lane] * factor * parameters.weight[lane] + parameters.bias[lane];
    return Base::following().template gradient<Base::follower>(both.grad[lane], y, Real{0});
  }

  template <bool has_squares, bool has_products, typename All>
  NHWC_HOST_DEVICE void sum_channels(const All& all, std::uint64_t first, std::uint32_t rows) const {
    all([&](std::uint32_t thread) {
      const std::uint32_t row = this->row_of(thread);
      const bool is_read = has_products && rms_.out;
      Real of_squares = 0, of_products = 0, factor = 0;
      if constexpr (!has_squares) factor = this->factor(this->sum_of_row(squares, thread));
      if (row < rows) {
        this->template walk<in_flight>(
            thread,
            [&](std::uint32_t vector) {
              const std::uint64_t place = (first + row) * plan_.vectors + vector;
              return Both{this->load(rms_.input, place), is_read ? this->load(rms_.grad, place) : Vector{}};
            },
            [&](std::uint32_t vector, const Both& both) {
              const Parameters parameters = is_read ? this->parameters(vector) : Parameters{};
              NHWC_UNROLL
              for (unsigned lane = 0; lane < lanes; ++lane) {
                const Real input = both.input[lane];
                if (has_squares) of_squares += input * input;
                if (has_products) {
                  of_products += gradient(both, parameters, lane, factor) * parameters.weight[lane] * input;
                }
              }
            });
      }
      if (has_squares) this->set_shared(squares, thread, of_squares);
      if (has_products) this->set_shared(products, thread, of_products);
    });
    this->merge(all, has_squares ? squares : products, has_squares + has_products);
  }

  NHWC_HOST_DEVICE void write(std::uint32_t thread, std::uint32_t vector, std::uint64_t first, std::uint32_t rows,
                              bool is_first) const {
    Value of_lanes[lanes] = {};
    for (std::uint32_t row = thread / plan_.columns; row < rows; row += plan_.slots) {
      const std::uint64_t place = (first + row) * plan_.vectors + vector;
      const Both both{this->load(rms_.input, place), this->load(rms_.grad, place)};
      const Parameters parameters = this->parameters(vector);  // of the cache, for want of registers
      const Real factor = this->shared(factors, row), of_input = this->shared(of_inputs, row);
      Vector out;
      NHWC_UNROLL
      for (unsigned lane = 0; lane < lanes; ++lane) {
        const Real grad = gradient(both, parameters, lane, factor), input = both.input[lane];
        of_lanes[lane].merge({grad, grad * (input * factor)});
        out.set(lane, factor * (grad * parameters.weight[lane] - input * of_input));
      }
      if (rms_.out) this->store(rms_.out, place, out);
    }
    if (!rms_.sums) return;
    NHWC_UNROLL
    for (unsigned lane = 0; lane < lanes; ++lane) {
      const Real added[] = {of_lanes[lane].sum, of_lanes[lane].product};
      NHWC_UNROLL
      for (unsigned field = 0; field < 2; ++field) {
        const unsigned array = sums + 2 * lane + field;
        if (plan_.vectors <= rms_threads) {
          this->set_shared(array, thread, is_first ? added[field] : this->shared(array, thread) + added[field]);
        } else {
          Real* of_all = place(field, vector, lane);
          access_.store(of_all, is_first ? added[field] : access_.template load<Real>(of_all) + added[field]);
        }
      }
    }
  }

  /// The place of a sum of the chunk.
  NHWC_HOST_DEVICE Real* place(unsigned field, std::uint32_t vector, unsigned lane) const {
    return static_cast<Real*>(rms_.sums) + (std::uint64_t{block_} * 2 + field) * plan_.channels + vector * lanes + lane;
  }

  std::uint32_t block_;
};

namespace detail {

template <template <NormType, unsigned, bool, typename> typename Block, NormType type, typename Access, typename Use>
auto with_rms_block(bool has_silu, bool is_vector, const Use& use) {
  constexpr unsigned lanes = 16 / bytes_of(type);
  if (has_silu) {
    return is_vector ? use(BlockType<Block<type, lanes, true, Access>>{})
                     : use(BlockType<Block<type, 1, true, Access>>{});
  }
  return is_vector ? use(BlockType<Block<type, lanes, false, Access>>{})
                   : use(BlockType<Block<type, 1, false, Access>>{});
}

template <template <NormType, unsigned, bool, typename> typename Block, typename Access, typename Use>
auto with_rms_block(NormType type, bool has_silu, bool is_vector, const Use& use) {
  switch (type) {
    case NormType::float32: return with_rms_block<Block, NormType::float32, Access>(has_silu, is_vector, use);
    case NormType::bfloat16: return with_rms_block<Block, NormType::bfloat16, Access>(has_silu, is_vector, use);
    case NormType::float16: return with_rms_block<Block, NormType::float16, Access>(has_silu, is_vector, use);
    default: return with_rms_block<Block, NormType::float64, Access>(has_silu, is_vector, use);
  }
}

}  // namespace detail

/// Calls `use` with the `BlockType` of a kernel.
template <typename Access = DirectAccess, typename Use>
auto with_rms_block(bool is_backward, NormType type, bool has_silu, const RmsPlan& plan, const Use& use) {
  return is_backward ? detail::with_rms_block<RmsBackward, Access>(type, has_silu, plan.lanes > 1, use)
                     : detail::with_rms_block<RmsForward, Access>(type, has_silu, plan.lanes > 1, use);
}

}  // namespace nhwc::cuda
