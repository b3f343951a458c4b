// The tensors that the graphs of a torch::jit::Module convolve with.
#pragma once

#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/passes/inliner.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_set>
#include <utility>
#include <vector>

#include "torch_nhwc/module/convert_sites.h"

namespace nhwc {
namespace module_detail {

// An operator of TorchScript that convolves.
struct Convolution {
  std::int64_t rank;  // of its weight, 0 where it serves all ranks
  bool is_packed;     // whether an object holds the weight, instead of the operator's second argument
};

// The Python walk, finding/convolutions.py, knows the same.
inline std::optional<Convolution> find_convolution(c10::Symbol kind) {
  static const std::string convolutions =
      " aten::conv2d aten::conv3d aten::conv_transpose2d aten::conv_transpose3d aten::convolution aten::_convolution "
      "aten::_convolution_mode aten::mkldnn_convolution prim::mkldnn_convolution mkldnn_prepacked::conv2d_run "
      "nhwc::conv3d quantized::conv2d quantized::conv2d_relu quantized::conv2d_add quantized::conv2d_add_relu "
      "quantized::conv2d_dynamic quantized::conv3d quantized::conv3d_relu quantized::conv3d_dynamic "
      "quantized::conv_transpose2d quantized::conv_transpose2d_dynamic quantized::conv_transpose3d "
      "quantized::conv_transpose3d_dynamic ";
  const std::string name = kind.toQualString();
  if (convolutions.find(" " + name + " ") == std::string::npos) return std::nullopt;
  const auto has = [&name](const char* part) { return name.find(part) != std::string::npos; };
  return Convolution{has("2d") ? 4 : has("3d") ? 5 : 0, has("quantized::") || has("prepacked::")};
}

// The tensors that the graphs of a TorchScript module convolve with. To a graph, everything begins with its inputs: a
// chain of attributes of `self` leads to a weight, and what does more than that computes one.
class GraphWalk {
 public:
  explicit GraphWalk(const torch::jit::Module& module) {
    // Every module in it has methods that a caller may use.
    for (const auto& named : module.named_modules()) {
      const Attribute self{nullptr, "", named.name, named.value._ivalue()};
      for (const auto& method : named.value.get_methods()) visit(*method.graph(), {self});
    }
  }

  std::vector<Site> sites() && { return std::move(sites_); }

 private:
  using Value = torch::jit::Value;
  using Node = torch::jit::Node;

  struct Attribute {
    const c10::ivalue::Object* owner;  // null where a chain begins
    std::string path;                  // of the owner, in the module
    std::string name;                  // in the owner; where a chain begins, in the module
    c10::IValue value;
  };
  // What is known of the inputs of a graph.
  using Inputs = std::vector<std::optional<Attribute>>;

  void visit(torch::jit::Graph& graph, const Inputs& inputs) {
    const auto inlined = graph.copy();
    torch::jit::Inline(*inlined);
    visit(*inlined->block(), inputs);
  }

  void visit(const torch::jit::Block& block, const Inputs& inputs) {
    for (const Node* node : block.nodes()) {
      if (const auto convolution = find_convolution(node->kind())) add(*node, *convolution, inputs);
      for (const torch::jit::Block* inner : node->blocks()) visit(*inner, inputs);
      if (node->kind() == c10::prim::fork) {
        Inputs passed;
        for (const Value* input : node->inputs()) passed.push_back(locate(*input, inputs));
        visit(*node->g(c10::attr::Subgraph), passed);
      }
    }
  }

  void add(const Node& node, const Convolution& convolution, const Inputs& inputs) {
    const Value* weight = &weight_argument(node, convolution);
    bool is_laid_out = false;
    for (; is_passed_on(*weight); weight = weight->node()->input(0)) {
      is_laid_out = is_laid_out || lays_out(*weight->node());
    }
    const auto attribute = locate(*weight, inputs);
    const Node& from = *weight->node();  // what a loop carries along is no argument, but computed
    const bool is_argument = from.kind() == c10::prim::Param && from.owningBlock() == from.owningGraph()->block();
    if (!attribute && (is_argument || is_laid_out)) return;  // the caller's, or as it should be

    const auto literal = constant_of(*weight);
    std::unordered_set<const Value*> seen;
    const auto source = find_source(*weight, inputs, seen);
    Site site = source ? site_of(*source) : site_of(node, *weight);
    const c10::IValue value = attribute ? attribute->value : literal.value_or(c10::IValue());
    if (value.isTensor()) site.weight = value.toTensor();
    site.rank = site.weight.defined() ? site.weight.dim() : rank_of(node, convolution);
    if (site.rank != 0 && site.rank != 4 && site.rank != 5) return;
    if (!convolution.is_packed) site.groups = groups_of(node);
    if (convolution.is_packed) {
      site.reason = "PACKED";
    } else if (literal) {
      site.reason = "FROZEN";
    } else if (!attribute) {
      site.reason = "COMPUTED_IN_FORWARD";
      if (!source) site.path = "", site.name = "<computed>";
    } else if (site.weight.defined() && site.weight.layout() != at::kStrided) {
      site.reason = "PACKED";
    }
    const void* owner = source ? static_cast<const void*>(source->owner) : site.weight.unsafeGetTensorImpl();
    if (seen_.emplace(owner, site.name, site.reason).second) sites_.push_back(std::move(site));
  }

  // Whether a value is the same weight as its node's first input: in another dtype, as autocast does, or not `None`.
  static bool is_passed_on(const Value& value) {
    const c10::Symbol kind = value.node()->kind();
    return kind == c10::aten::to || kind == c10::aten::_to_copy || kind == c10::aten::detach ||
           kind == c10::aten::alias || kind == c10::aten::clone || kind == c10::prim::unchecked_cast ||
           kind == convert_weight_;
  }

  // Whether what passes a weight on brings it into a format, by our operator or by PyTorch's.
  static bool lays_out(const Node& node) {
    if (node.kind() != c10::aten::clone) return node.kind() == convert_weight_;
    const auto literal = torch::jit::toIValue(node.input(1));
    return literal && literal->isInt() &&
           (literal->toMemoryFormat() == at::MemoryFormat::ChannelsLast ||
            literal->toMemoryFormat() == at::MemoryFormat::ChannelsLast3d);
  }

  static std::optional<c10::IValue> constant_of(const Value& value) {
    if (value.node()->kind() == c10::prim::ConstantMKLDNNTensor) return value.node()->t(c10::attr::value);
    return torch::jit::toIValue(&value);
  }

  // The chain of attributes that a value is, if it is one.
  static std::optional<Attribute> locate(const Value& value, const Inputs& inputs) {
    const Node& node = *value.node();
    if (node.kind() == c10::prim::Param) {
      const bool is_known = node.owningBlock() == node.owningGraph()->block() && value.offset() < inputs.size();
      return is_known ? inputs[value.offset()] : std::nullopt;
    }
    if (node.kind() == c10::prim::unchecked_cast) return locate(*node.input(), inputs);
    if (node.kind() != c10::prim::GetAttr) return std::nullopt;
    const auto holder = locate(*node.input(), inputs);
    if (!holder || !holder->value.isObject()) return std::nullopt;
    const auto object = holder->value.toObject();
    const std::string& name = node.s(c10::attr::name);
    return Attribute{object.get(), join(holder->path, holder->name), name, object->getAttr(name)};
  }

  // An attribute that a value is or is computed from.
  static std::optional<Attribute> find_source(const Value& value, const Inputs& inputs,
                                              std::unordered_set<const Value*>& seen) {
    if (!seen.insert(&value).second) return std::nullopt;
    const auto attribute = locate(value, inputs);
    if (attribute && holds_tensors(attribute->value)) return attribute;
    const Node& node = *value.node();
    std::vector<const Value*> operands;
    for (const torch::jit::Block* branch : node.blocks()) {
      operands.insert(operands.end(), branch->outputs().begin(), branch->outputs().end());
    }
    operands.insert(operands.end(), node.inputs().begin(), node.inputs().end());
    if (const Node* loop = node.kind() == c10::prim::Param ? node.owningBlock()->owningNode() : nullptr) {
      operands.insert(operands.end(), loop->inputs().begin(), loop->inputs().end());
    }
    for (const Value* operand : operands) {
      if (const auto source = find_source(*operand, inputs, seen)) return source;
    }
    return std::nullopt;
  }

  static bool holds_tensors(const c10::IValue& value) {
    return value.isTensor() || value.isTensorList() || (value.isObject() && !value.isModule());
  }

  static const Value& weight_argument(const Node& node, const Convolution& convolution) {
    const auto is_object = [](const Value* input) { return input->type()->kind() == c10::TypeKind::ClassType; };
    const auto inputs = node.inputs();
    const auto object = std::find_if(inputs.begin(), inputs.end(), is_object);
    return convolution.is_packed && object != inputs.end() ? **object : *node.input(1);
  }

  // The rank by the operator, or by its stride, which follows input, weight and bias.
  static std::int64_t rank_of(const Node& node, const Convolution& convolution) {
    if (convolution.rank != 0) return convolution.rank;
    const Value& stride = *node.input(3);
    if (stride.node()->kind() == c10::prim::ListConstruct) return stride.node()->inputs().size() + 2;
    const auto literal = torch::jit::toIValue(&stride);
    return literal && literal->isIntList() ? literal->toIntVector().size() + 2 : 0;
  }

  // Zero where a graph computes them.
  static std::int64_t groups_of(const Node& node) {
    const bool is_general = node.kind() == c10::aten::convolution || node.kind() == c10::aten::_convolution;
    const auto literal = torch::jit::toIValue(node.input(is_general ? 8 : 6));
    return literal && literal->isInt() ? literal->toInt() : 0;
  }

  static Site site_of(const Attribute& attribute) {
    return {attribute.path, attribute.name, attribute.owner->type()->name()->name(), 0, {}};
  }

  // Of a constant, for which freezing leaves the name that it had, and an archive none.
  static Site site_of(const Node& node, const Value& value) {
    std::string name = value.debugName();
    std::string path;
    if (name.rfind("self.", 0) == 0) {
      const size_t dot = name.rfind('.');
      path = name.substr(0, dot).substr(std::min<size_t>(dot, 5));
      name = name.substr(dot + 1);
    }
    return {path, name, node.kind().toUnqualString(), 0, {}};
  }

  inline static const auto convert_weight_ = c10::Symbol::fromQualString("nhwc::convert_weight");

  std::vector<Site> sites_;
  std::set<std::tuple<const void*, std::string, std::string_view>> seen_;  // owner, name and reason of the sites
};

}  // namespace module_detail

}  // namespace nhwc
