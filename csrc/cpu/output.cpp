#include "cpu/output.h"

#include "cpu/dispatch.h"
#include "cpu/work/ranges.h"

namespace nhwc::cpu {

void Output::finish(const at::Tensor& result, const void* first, int64_t count) const {
  const auto* all = static_cast<const float*>(result.const_data_ptr());
  auto* values = static_cast<float*>(const_cast<void*>(first));
  const float* others = residual.defined() ? static_cast<const float*>(residual.const_data_ptr()) : nullptr;
  level_kernels().output.finish[static_cast<int>(activation.kind)](values, others ? others + (values - all) : nullptr,
                                                                   count, activation.parameter);
}

void Output::finish(const at::Tensor& result) const {
  if (is_empty()) return;
  const Parts parts(result.numel(), elements_worth_a_thread);
  const auto* all = static_cast<const float*>(result.const_data_ptr());
  for_each_task(parts.parts, parts.size * products_of_element, 0,
                [&](int64_t part, char*) { finish(result, all + parts.begin(part), parts.size_of(part)); });
}

}  // namespace nhwc::cpu
