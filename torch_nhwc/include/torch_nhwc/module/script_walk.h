// The convolution weights of a torch::jit::Module.
#pragma once

#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/passes/inliner.h>

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "torch_nhwc/module/convert_sites.h"

namespace nhwc {
namespace module_detail {

// An operator that convolves with its second input, and the index of the input that holds its groups.
struct ScriptConvolution {
  std::string_view name;
  std::size_t groups;
};
inline constexpr ScriptConvolution script_convolutions[] = {
    {"aten::conv2d", 6},
    {"aten::conv3d", 6},
    {"aten::conv_transpose2d", 6},
    {"aten::conv_transpose3d", 6},
    {"aten::_convolution_mode", 6},
    {"nhwc::conv2d", 6},
    {"nhwc::conv3d", 6},
    {"nhwc::conv_transpose2d", 6},
    {"nhwc::conv_transpose3d", 6},
    {"aten::convolution", 8},
    {"aten::_convolution", 8},
};

// Finds the weights that a graph reads from an attribute of the module, or of a module inside of it, and passes to a
// convolution unchanged.
class ScriptWalk {
 public:
  explicit ScriptWalk(const torch::jit::Module& module) {
    // A caller may use the methods of every module in it.
    for (const auto& named : module.named_modules()) {
      for (const auto& method : named.value.get_methods()) {
        const auto graph = method.graph()->copy();
        torch::jit::Inline(*graph);
        visit(*graph->block(), {nullptr, "", named.name, named.value._ivalue()});
      }
    }
  }

  std::vector<Site> sites() && { return std::move(sites_); }

 private:
  using Node = torch::jit::Node;

  struct Attribute {
    const c10::ivalue::Object* owner;
    std::string path;  // of the owner, in the module
    std::string name;  // in the owner
    c10::IValue value;
  };

  void visit(const torch::jit::Block& block, const Attribute& self) {
    for (const Node* node : block.nodes()) {
      for (const ScriptConvolution& convolution : script_convolutions) {
        if (convolution.name == node->kind().toQualString()) add(*node, convolution, self);
      }
      for (const torch::jit::Block* inner : node->blocks()) visit(*inner, self);
    }
  }

  void add(const Node& node, const ScriptConvolution& convolution, const Attribute& self) {
    const auto weight = locate(*node.input(1), self);
    if (!weight || !weight->value.isTensor()) return;
    const at::Tensor& tensor = weight->value.toTensor();
    if (!tensor.defined() || (tensor.dim() != 4 && tensor.dim() != 5)) return;
    if (!seen_.emplace(weight->owner, weight->name).second) return;
    const auto groups = torch::jit::toIValue(node.input(convolution.groups));
    sites_.push_back({weight->path, weight->name, weight->owner->type()->name()->name(), tensor.dim(), tensor, "",
                      groups && groups->isInt() ? groups->toInt() : 0});
  }

  // Follows a chain of attributes that begins with `self`, the first input of the graph.
  static std::optional<Attribute> locate(const torch::jit::Value& value, const Attribute& self) {
    if (&value == value.owningGraph()->inputs()[0]) return self;
    const Node& node = *value.node();
    if (node.kind() != c10::prim::GetAttr) return std::nullopt;
    const auto holder = locate(*node.input(), self);
    if (!holder) return std::nullopt;
    const auto object = holder->value.toObject();
    const std::string& name = node.s(c10::attr::name);
    return Attribute{object.get(), join(holder->path, holder->name), name, object->getAttr(name)};
  }

  std::vector<Site> sites_;
  std::set<std::pair<const c10::ivalue::Object*, std::string>> seen_;
};

}  // namespace module_detail
}  // namespace nhwc
