// How drivers cut their work: equal parts, tasks that do not depend on the number of threads, what is worth a thread,
// scratch memory, and partial sums.
#pragma once

#include <ATen/Parallel.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/ScalarType.h>

#include <algorithm>

#include "cpu/work/axes.h"

namespace nhwc::cpu {

inline int64_t divide_up(int64_t size, int64_t part) { return (size + part - 1) / part; }
inline int64_t round_up(int64_t size, int64_t unit) { return divide_up(size, unit) * unit; }

/// Items in parts of one size, which is a multiple of a unit, except for the last part.
struct Parts {
  int64_t count, size, parts;

  /// Cuts `count` items into parts of about `most` at most: the size is rounded up to the unit.
  Parts(int64_t count, int64_t most, int64_t unit = 1)
      : count(count),
        size(round_up(divide_up(count, std::max<int64_t>(1, divide_up(count, most))), unit)),
        parts(count == 0 ? 0 : divide_up(count, size)) {}

  int64_t begin(int64_t part) const { return part * size; }
  int64_t size_of(int64_t part) const { return std::min(size, count - part * size); }
  Range operator[](int64_t part) const { return {begin(part), begin(part) + size_of(part)}; }
};

/// Returns one of `parts` ranges of nearly equal sizes.
inline Range equal_part(int64_t count, int64_t parts, int64_t part) {
  return {count * part / parts, count * (part + 1) / parts};
}

/// Sums are cut into about this many tasks, on any number of threads: the results do not depend on it.
constexpr int64_t enough_tasks = 16;

/// What is worth a thread, in multiply-adds. In elements it is PyTorch's own bound: one takes as long to move as a
/// register of multiply-adds.
constexpr int64_t products_of_element = 16, elements_worth_a_thread = 1 << 15,
                  products_worth_a_thread = products_of_element * elements_worth_a_thread;

/// Returns how many threads some work is worth, of those that there are.
inline int64_t threads_worth(int64_t products) {
  const int64_t threads = at::in_parallel_region() ? 1 : at::get_num_threads();
  return std::clamp<int64_t>(products / products_worth_a_thread, 1, threads);
}

/// Calls `work(task, scratch)` for all tasks, in as many threads as they are worth. The scratch memory, of that many
/// bytes, is aligned to cache lines, and of no other thread meanwhile.
template <typename Work>
void for_each_task(int64_t tasks, int64_t products_of_task, int64_t scratch_bytes, const Work& work) {
  const int64_t grain = divide_up(products_worth_a_thread, std::max<int64_t>(1, products_of_task));
  at::parallel_for(0, tasks, grain, [&](int64_t begin, int64_t end) {
    const c10::DataPtr scratch = c10::GetCPUAllocator()->allocate(scratch_bytes);
    for (int64_t task = begin; task < end; ++task) work(task, static_cast<char*>(scratch.get()));
  });
}

/// Adds partial sums, `[parts, size]`, to the first of them, in their order.
template <typename Number>
void add_up_parts(void* sums, int64_t parts, int64_t size) {
  auto* __restrict total = static_cast<Number*>(sums);
  for (int64_t part = 1; part < parts; ++part) {
    const Number* __restrict other = static_cast<const Number*>(sums) + part * size;
    for (int64_t k = 0; k < size; ++k) total[k] += other[k];
  }
}

/// The same for sums of a dtype: floats, or doubles for doubles.
inline void add_up_parts_of(at::ScalarType type, void* sums, int64_t parts, int64_t size) {
  (type == at::kDouble ? add_up_parts<double> : add_up_parts<float>)(sums, parts, size);
}

}  // namespace nhwc::cpu
