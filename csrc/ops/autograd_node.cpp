#include "ops/autograd_node.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/version.h>

#include <algorithm>
#include <mutex>

#include "cpu/pages.h"

namespace nhwc {
namespace {

namespace autograd = torch::autograd;
namespace compiled = torch::dynamo::autograd;

// The owning pointer of a node changed from std::shared_ptr to c10::intrusive_ptr after torch 2.11.
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 12
template <typename Node>
auto make_node() {
  return std::shared_ptr<Node>(new Node(), autograd::deleteNode);
}
auto owner_of(autograd::Node* node) { return node->getptr(); }
#else
template <typename Node>
auto make_node() {
  return c10::make_intrusive<Node>();
}
auto owner_of(autograd::Node* node) { return c10::intrusive_ptr<autograd::Node>::reclaim_copy(node); }
#endif

/// Returns the gradients of the inputs, in the dtypes of the forward: a backward inside of autocast must not lower
/// them.
autograd::variable_list computed(const Formula& formula, const autograd::variable_list& gradients,
                                 const Formula::Context& context) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  return formula.apply(gradients, context);
}

struct OperatorBackward : autograd::Node {
  const Formula* formula = nullptr;
  std::vector<autograd::SavedVariable> saved;
  bool saves_output = false;  // as the last one of them
  std::vector<c10::IValue> constants;

  std::vector<at::Tensor> unpack() {
    std::vector<at::Tensor> tensors;
    tensors.reserve(saved.size());
    for (const autograd::SavedVariable& each : saved) tensors.push_back(each.unpack(owner_of(this)));
    return tensors;
  }

  std::vector<bool> needed_gradients() {
    std::vector<bool> needed(num_outputs());
    for (size_t input = 0; input < needed.size(); ++input) needed[input] = task_should_compute_output(input);
    return needed;
  }

  autograd::variable_list apply(autograd::variable_list&& gradients) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    const cpu::HugePages requested;
    return computed(*formula, gradients, {unpack(), constants, needed_gradients()});
  }

  std::string name() const override { return formula->name; }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (autograd::SavedVariable& each : saved) each.reset_data();
  }

  // Compiled autograd specialises on the constants, so that the graph it captures may hold them.
  void compiled_args(compiled::CompiledNodeArgs& arguments) const override {
    for (size_t i = 0; i < saved.size(); ++i) arguments.collect(saved[i], saves_output && i + 1 == saved.size());
    for (const c10::IValue& each : constants) arguments.collect(each);
  }

  autograd::variable_list apply_with_saved(const autograd::variable_list& gradients,
                                           compiled::SwapSavedVariables& swapped) override {
    for (autograd::SavedVariable& each : saved) swapped.before(each);
    // The graph calls the formula with one list: the saved tensors, the constants, and what is needed.
    std::vector<c10::IValue> packed;
    std::vector<at::TypePtr> types;
    for (const at::Tensor& each : unpack()) {
      packed.emplace_back(each);
      types.push_back(at::TensorType::get());
    }
    for (const c10::IValue& each : constants) {
      packed.push_back(each);
      types.push_back(each.type());
    }
    packed.push_back(compiled::IValuePacker<std::vector<bool>>::pack(needed_gradients()));
    types.push_back(compiled::IValuePacker<std::vector<bool>>::packed_type());
    const auto call = [formula = formula, tensors = saved.size()](const autograd::variable_list& incoming,
                                                                  const std::vector<c10::IValue>& arguments) {
      std::vector<at::Tensor> unpacked;
      for (size_t i = 0; i < tensors; ++i) unpacked.push_back(arguments[i].toTensor());
      const std::vector<c10::IValue> constants(arguments.begin() + tensors, arguments.end() - 1);
      const auto asked = compiled::IValuePacker<std::vector<bool>>::unpack(arguments.back());
      return computed(*formula, incoming, {unpacked, constants, asked});
    };
    const auto& compiler = compiled::getPyCompilerInterface();
    const std::string function = bound(*compiler, swapped.get_py_compiler(), call, types);
    autograd::variable_list result =
        compiler->call_function(swapped.get_py_compiler(), "apply_functional", function, gradients, packed,
                                compiled::IValuePacker<std::vector<std::optional<autograd::InputMetadata>>>::pack(
                                    compiled::get_input_metadata(next_edges())));
    for (autograd::SavedVariable& each : saved) swapped.after(each);
    return result;
  }

 private:
  /// The function's name in graphs. Bound once, as the nodes of PyTorch itself: a name that is bound twice is an error.
  template <typename Compiler, typename Call>
  std::string bound(const Compiler& compiler, PyObject* py_compiler, const Call& call,
                    const std::vector<at::TypePtr>& types) const {
    static std::mutex mutex;
    static std::vector<std::pair<const Formula*, std::string>> names;
    const std::lock_guard<std::mutex> lock(mutex);
    for (const auto& [known, name] : names) {
      if (known == formula) return name;
    }
    names.emplace_back(formula, compiler.bind_function(py_compiler, formula->name, call, types,
                                                       /*is_custom_function=*/false, /*is_traceable=*/true));
    return names.back().second;
  }
};

}  // namespace

void record(const Formula& formula, const at::Tensor& output, at::ArrayRef<at::Tensor> inputs,
            at::ArrayRef<at::Tensor> saved, std::vector<c10::IValue> constants, bool saves_output) {
  const auto node = make_node<OperatorBackward>();
  node->formula = &formula;
  node->constants = std::move(constants);
  node->saves_output = saves_output;
  autograd::edge_list edges;
  edges.reserve(inputs.size());
  for (const at::Tensor& each : inputs) {
    edges.push_back(each.defined() ? autograd::impl::gradient_edge(each) : autograd::Edge());
  }
  node->set_next_edges(std::move(edges));
  autograd::set_history(output, node);
  for (const at::Tensor& each : saved) node->saved.emplace_back(each, /*is_output=*/false);
  if (saves_output) node->saved.emplace_back(output, /*is_output=*/true);
}

bool needs_gradient(at::ArrayRef<at::Tensor> inputs) {
  return at::GradMode::is_enabled() && std::any_of(inputs.begin(), inputs.end(), [](const at::Tensor& input) {
           return input.defined() && input.requires_grad();
         });
}

bool has_tangent(at::ArrayRef<at::Tensor> inputs) {
  return std::any_of(inputs.begin(), inputs.end(),
                     [](const at::Tensor& input) { return input.defined() && input._fw_grad(/*level=*/0).defined(); });
}

}  // namespace nhwc
