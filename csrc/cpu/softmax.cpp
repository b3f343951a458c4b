#include "cpu/softmax.h"

#include <algorithm>
#include <cstring>

#include "cpu/dispatch.h"
#include "cpu/threads.h"

namespace nhwc::cpu {
namespace {

// Few enough that all tiles of a step are in a first-level cache, and that the lines of the next tile arrive meanwhile.
constexpr int64_t numbers_of_tile = 1024;

static_assert(most_softmax_channels * softmax_pixels <= numbers_of_tile);

struct alignas(64) Tile {
  float numbers[numbers_of_tile];
};

int64_t rounded_up(int64_t pixels) { return (pixels + softmax_pixels - 1) / softmax_pixels * softmax_pixels; }

/// The pixels of an activation in tiles, which are copied to planes of floats and back.
class Pixels {
 public:
  const int64_t channels;

  explicit Pixels(const at::Tensor& activation)
      : channels(activation.size(1)),
        count_(activation.numel() / channels),
        of_tile_(numbers_of_tile / channels / softmax_pixels * softmax_pixels),
        row_size_(channels * activation.element_size()),
        is_cast_(activation.scalar_type() != at::kFloat),
        casts_(number_transposes(activation.scalar_type())),
        transpose_(number_transposes(at::kFloat).to_numbers) {}

  /// Calls `compute` with the first pixel of each tile and their number.
  template <typename Compute>
  void for_each_tile(const Compute& compute) const {
    const int64_t tiles = (count_ + of_tile_ - 1) / of_tile_;
    at::parallel_for(0, tiles, elements_worth_a_thread / numbers_of_tile, [&](int64_t begin, int64_t end) {
      for (int64_t first = begin * of_tile_; first < std::min(count_, end * of_tile_); first += of_tile_) {
        compute(first, std::min(of_tile_, count_ - first));
      }
    });
  }

  /// Copies pixels to planes, with zeros after the last one, and has the next ones brought into the caches.
  void read(const at::Tensor& from, int64_t first, int64_t count, Tile& planes) const {
    const auto* all = static_cast<const char*>(from.const_data_ptr());
    const char* rows = all + first * row_size_;
    Tile padded;
    if (count % softmax_pixels != 0) {
      auto* bytes = reinterpret_cast<char*>(padded.numbers);
      std::memcpy(bytes, rows, count * row_size_);
      std::memset(bytes + count * row_size_, 0, (rounded_up(count) - count) * row_size_);
      rows = bytes;
    }
    Tile floats;
    if (is_cast_) {  // which is faster than both at once
      casts_.to_numbers(rows, floats.numbers, 1, 1, rounded_up(count) * channels, false);
      rows = reinterpret_cast<const char*>(floats.numbers);
    }
    transpose_(rows, planes.numbers, 1, rounded_up(count), channels, false);
    prefetch(all, first + of_tile_);
  }

  void prepare_write(const at::Tensor& to, int64_t first) const {
    prefetch(static_cast<const char*>(to.const_data_ptr()), first);
  }

  void write(const Tile& planes, int64_t first, int64_t count, const at::Tensor& to) const {
    char* rows = static_cast<char*>(to.mutable_data_ptr()) + first * row_size_;
    Tile padded;
    const bool is_whole = count % softmax_pixels == 0;
    char* to_rows = is_whole ? rows : reinterpret_cast<char*>(padded.numbers);
    Tile floats;
    transpose_(planes.numbers, is_cast_ ? reinterpret_cast<char*>(floats.numbers) : to_rows, 1, channels,
               rounded_up(count), false);
    if (is_cast_) casts_.from_numbers(floats.numbers, to_rows, 1, 1, rounded_up(count) * channels, false);
    if (!is_whole) std::memcpy(rows, padded.numbers, count * row_size_);
  }

 private:
  void prefetch(const char* all, int64_t first) const {
    const int64_t end = std::min(count_, first + of_tile_) * row_size_;
    for (int64_t byte = first * row_size_; byte < end; byte += 64) __builtin_prefetch(all + byte);
  }

  const int64_t count_, of_tile_, row_size_;
  const bool is_cast_;
  const NumberTransposes casts_;
  const FilterKernels::Transpose transpose_;
};

}  // namespace

void softmax(const at::Tensor& input, bool is_log, const at::Tensor& out) {
  if (input.numel() == 0) return;
  const Pixels pixels(input);
  const auto compute = is_log ? softmax_kernels().log_softmax : softmax_kernels().softmax;
  pixels.for_each_tile([&](int64_t first, int64_t count) {
    Tile planes;
    pixels.read(input, first, count, planes);
    pixels.prepare_write(out, first);
    compute(planes.numbers, pixels.channels, rounded_up(count));
    pixels.write(planes, first, count, out);
  });
}

void softmax_backward(const at::Tensor& grad, const at::Tensor& output, bool is_log, const at::Tensor& grad_input) {
  if (grad.numel() == 0) return;
  const Pixels pixels(grad);
  const auto compute = is_log ? softmax_kernels().log_softmax_gradient : softmax_kernels().softmax_gradient;
  pixels.for_each_tile([&](int64_t first, int64_t count) {
    Tile grads, outputs;
    pixels.read(grad, first, count, grads);
    pixels.read(output, first, count, outputs);
    pixels.prepare_write(grad_input, first);
    compute(grads.numbers, outputs.numbers, pixels.channels, rounded_up(count));
    pixels.write(grads, first, count, grad_input);
  });
}

}  // namespace nhwc::cpu
