#include "cpu/softmax.h"

#include <cstring>

#include "cpu/dispatch.h"
#include "cpu/work/ranges.h"

namespace nhwc::cpu {
namespace {

/// Cuts pixels into tiles. They are few enough that what is computed of a tile stays in a first-level cache, and that
/// the lines of the next tile arrive meanwhile.
Parts tiles_of(int64_t pixels, int64_t channels) {
  constexpr int64_t numbers_of_tile = 1024;
  return {pixels, std::max(softmax_pixels, numbers_of_tile / channels / softmax_pixels * softmax_pixels),
          softmax_pixels};
}

/// The pixels of an activation, `[pixels, channels]`, and tiles of them as planes of floats, `[channels, pixels]`.
class Pixels {
 public:
  Pixels(const at::Tensor& activation, const Parts& tiles)
      : data_(static_cast<const char*>(activation.const_data_ptr())),
        tiles_(tiles),
        channels_(activation.size(1)),
        pixel_bytes_(channels_ * activation.element_size()),
        is_cast_(activation.scalar_type() != at::kFloat),
        casts_(number_transposes(activation.scalar_type())),
        transpose_(number_transposes(at::kFloat).to_numbers) {}

  /// Returns the pixels of a tile's planes: zeros follow the last one.
  int64_t plane(int64_t tile) const { return round_up(tiles_.size_of(tile), softmax_pixels); }
  int64_t numbers() const { return channels_ * tiles_.size; }              // of a tile
  int64_t numbers_with_room() const { return numbers() + 2 * numbers(); }  // as `read` and `write` need them

  /// Copies a tile to planes, which have room after them, and has the next one brought into the caches.
  void read(int64_t tile, float* planes) const {
    float *padded = planes + numbers(), *floats = padded + numbers();
    const char* pixels = data_ + tiles_.begin(tile) * pixel_bytes_;
    const int64_t count = tiles_.size_of(tile), missing = plane(tile) - count;
    if (missing != 0) {
      auto* copy = reinterpret_cast<char*>(padded);
      std::memcpy(copy, pixels, count * pixel_bytes_);
      std::memset(copy + count * pixel_bytes_, 0, missing * pixel_bytes_);
      pixels = copy;
    }
    if (is_cast_) {  // which is faster than both at once
      casts_.to_numbers(pixels, floats, 1, 1, plane(tile) * channels_, false);
      pixels = reinterpret_cast<const char*>(floats);
    }
    transpose_(pixels, planes, 1, plane(tile), channels_, false);
    if (tile + 1 < tiles_.parts) prefetch(tile + 1);
  }

  /// Copies planes, which have room after them, to a tile of a new tensor.
  void write(float* planes, int64_t tile) const {
    float *padded = planes + numbers(), *floats = padded + numbers();
    char* pixels = const_cast<char*>(data_) + tiles_.begin(tile) * pixel_bytes_;
    const bool is_whole = plane(tile) == tiles_.size_of(tile);
    char* to = is_whole ? pixels : reinterpret_cast<char*>(padded);
    transpose_(planes, is_cast_ ? reinterpret_cast<char*>(floats) : to, 1, channels_, plane(tile), false);
    if (is_cast_) casts_.from_numbers(floats, to, 1, 1, plane(tile) * channels_, false);
    if (!is_whole) std::memcpy(pixels, padded, tiles_.size_of(tile) * pixel_bytes_);
  }

  void prefetch(int64_t tile) const {
    const auto [begin, end] = tiles_[tile];
    for (int64_t byte = begin * pixel_bytes_; byte < end * pixel_bytes_; byte += 64) __builtin_prefetch(data_ + byte);
  }

 private:
  const char* const data_;
  const Parts tiles_;
  const int64_t channels_, pixel_bytes_;
  const bool is_cast_;
  const NumberTransposes casts_;
  const FilterKernels::Transpose transpose_;
};

/// Calls `work(tile, scratch)` for all tiles, with scratch memory for so many floats.
template <typename Work>
void for_each_tile(const Parts& tiles, int64_t channels, int64_t scratch_numbers, const Work& work) {
  for_each_task(tiles.parts, tiles.size * channels * products_of_element,
                scratch_numbers * static_cast<int64_t>(sizeof(float)),
                [&](int64_t tile, char* scratch) { work(tile, reinterpret_cast<float*>(scratch)); });
}

}  // namespace

void softmax(const at::Tensor& input, bool is_log, const at::Tensor& out) {
  if (input.numel() == 0) return;
  const int64_t channels = input.size(1), count = input.numel() / channels;
  const Parts tiles = tiles_of(count, channels);
  const Pixels from(input, tiles), to(out, tiles);
  const SoftmaxKernels& kernels = level_kernels().softmax;
  const auto compute = is_log ? kernels.log_softmax : kernels.softmax;
  for_each_tile(tiles, channels, from.numbers_with_room(), [&](int64_t tile, float* planes) {
    from.read(tile, planes);
    to.prefetch(tile);
    compute(planes, channels, from.plane(tile));
    to.write(planes, tile);
  });
}

void softmax_backward(const at::Tensor& grad, const at::Tensor& output, bool is_log, const at::Tensor& grad_input) {
  if (grad.numel() == 0) return;
  const int64_t channels = grad.size(1), count = grad.numel() / channels;
  const Parts tiles = tiles_of(count, channels);
  const Pixels from(grad, tiles), from_output(output, tiles), to(grad_input, tiles);
  const SoftmaxKernels& kernels = level_kernels().softmax;
  const auto compute = is_log ? kernels.log_softmax_gradient : kernels.softmax_gradient;
  for_each_tile(tiles, channels, from.numbers() + from.numbers_with_room(), [&](int64_t tile, float* outputs) {
    float* grads = outputs + from.numbers();
    from_output.read(tile, outputs);
    from.read(tile, grads);
    to.prefetch(tile);
    compute(grads, outputs, channels, from.plane(tile));
    to.write(grads, tile);
  });
}

}  // namespace nhwc::cpu
