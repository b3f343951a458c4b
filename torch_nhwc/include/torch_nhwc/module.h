// Whole models in C++: the convolution weights of a torch::nn::Module or a torch::jit::Module, converted in one call.
//
// Everything here is inline over ops.h, and the library has to be loaded or linked as it says there. The including file
// needs LibTorch's C++ API (torch/torch.h) or TorchScript's (torch/script.h), whichever its model is made of.
#pragma once

#include <c10/core/MemoryFormat.h>
#include <c10/util/Exception.h>
#include <c10/util/strides.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/passes/inliner.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/conv.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <optional>
#include <ostream>
#include <set>
#include <sstream>
#include <string>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "torch_nhwc/ops.h"

namespace nhwc {

/// Which sites of a module are converted, and how.
struct ModuleOptions {
  /// Nothing: channels-last, by the rank of each weight. `ChannelsLast` converts the 4D weights and `ChannelsLast3d`
  /// the 5D ones, and the others are kept; `Contiguous` goes for both.
  std::optional<at::MemoryFormat> memory_format = std::nullopt;
  /// Where the bytes go: "auto", "fresh", "reuse" or "detach", see `convert_weights_` of ops.h.
  std::string storage = "auto";
  /// Raise where a site cannot be converted, instead of leaving it as it is.
  bool strict = false;
  /// Takes the path of a layer and says whether its weight is to be converted. Nothing: all are.
  std::function<bool(const std::string& path)> filter = nullptr;
};

/// What happened to a site.
enum class Action {
  convert,   ///< it was brought into the format, and bytes moved
  restride,  ///< only its strides changed
  keep,      ///< there was nothing to do, or it was not asked for
  refuse,    ///< it should have changed and could not
};

/// What became of one site: one weight of one convolution layer.
struct SiteReport {
  std::string path;                          ///< of the layer in the module; empty for the module itself
  std::string name;                          ///< of the weight in the layer
  std::string layer;                         ///< the layer's class
  std::vector<std::int64_t> sizes;           ///< of the weight; empty, like the strides, where there is no strided one
  std::vector<std::int64_t> strides;         ///< before
  std::vector<std::int64_t> target_strides;  ///< those of the format, empty where the site is not asked for
  Action action = Action::keep;
  std::optional<Outcome> outcome = std::nullopt;  ///< the operators', nothing where they were not asked
  std::string reason = "";                        ///< why the site was kept or refused, else empty
};

inline std::ostream& operator<<(std::ostream& out, Action action);
/// One line, without an end.
inline std::ostream& operator<<(std::ostream& out, const SiteReport& site);

/// What became of every site of a module.
struct ModuleReport {
  /// In the order of registration, or of the graphs. A layer that the module holds twice has one site; layers that
  /// share a weight have one each, and the weight is converted once.
  std::vector<SiteReport> sites;

  /// The number of sites by what was done to them, in one line.
  std::string summary() const;
};

/// One line for each site, and the summary.
inline std::ostream& operator<<(std::ostream& out, const ModuleReport& report);

/// Brings the weights of all convolution layers of a module into a memory format: `Conv2d`, `Conv3d`, their transposed
/// kinds and what derives from them, the module itself included. Weights change as by `convert_weights_` of ops.h, in
/// one call of it and all or nothing: `.grad` follows, shared weights stay shared, and what is in format is left alone.
///
/// @returns what became of each site; sites that cannot be converted are left as they are, with the reason.
/// @throws c10::Error, before anything is touched: under `strict`, where a site that was asked for cannot be converted;
///         for another storage or memory format. From within the conversion, as `convert_weights_` of ops.h.
inline ModuleReport convert_weights_(torch::nn::Module& module, const ModuleOptions& options = {});

/// The same for TorchScript: scripted, traced or loaded from an archive. The sites are the tensors that the module's
/// graphs pass to a convolution as its weight, in whatever layer, parameter or buffer. Those that a graph computes or
/// has as constants (a frozen module) are refused, and packed ones (quantized, or for oneDNN); what a method takes as
/// an argument is its caller's.
inline ModuleReport convert_weights_(torch::jit::Module& module, const ModuleOptions& options = {});

namespace module_detail {

// Sentences that follow a site's name, as in torch_nhwc/reasons.py. For the rest the operators' errors have the words.
inline constexpr const char* in_format = "its strides are the wanted ones already";
inline constexpr const char* tied = "it is the same tensor as an earlier site's, and changes with it";
inline constexpr const char* other_rank = "the memory format is of the other rank";
inline constexpr const char* filtered = "the filter left it out";
inline constexpr const char* missing = "the layer has no weight";
inline constexpr const char* computed =
    "the weight that reaches the convolution is computed from it: use torch.ops.nhwc.convert_weight there";
inline constexpr const char* packed = "its weight is packed (quantized, or for oneDNN): convert before packing";
inline constexpr const char* frozen =
    "its weight is a constant of a frozen TorchScript module: convert before freezing";

// A site as the walk finds it.
struct Site {
  std::string path;
  std::string name;
  std::string layer;
  std::int64_t rank;   // of the weight, 0 where nothing tells
  at::Tensor weight;   // undefined where the walk has none
  std::string reason;  // why the weight cannot be converted, empty where the walk knows of nothing against it
};

inline std::string join(const std::string& path, const std::string& name) {
  return path.empty() ? name : path + "." + name;
}

inline std::vector<std::int64_t> canonical_strides(at::IntArrayRef sizes,
                                                   std::optional<at::MemoryFormat> memory_format) {
  if (memory_format == at::MemoryFormat::Contiguous) return at::IntArrayRef(c10::contiguous_strides(sizes)).vec();
  return sizes.size() == 5 ? c10::get_channels_last_strides_3d(sizes) : c10::get_channels_last_strides_2d(sizes);
}

// Whether the format is one that a weight of this rank can have.
inline bool serves_rank(std::optional<at::MemoryFormat> memory_format, std::int64_t rank) {
  if (memory_format == at::MemoryFormat::ChannelsLast) return rank == 4 || rank == 0;
  if (memory_format == at::MemoryFormat::ChannelsLast3d) return rank == 5 || rank == 0;
  return true;
}

// What the operators would raise for every weight alike, and for the lack of the library.
inline void check_options(const ModuleOptions& options) {
  const auto format = options.memory_format.value_or(at::MemoryFormat::Contiguous);
  TORCH_CHECK(format == at::MemoryFormat::Contiguous || format == at::MemoryFormat::ChannelsLast ||
                  format == at::MemoryFormat::ChannelsLast3d,
              "nhwc::convert_weights_: expected contiguous_format, channels_last or channels_last_3d, got ", format);
  plan_weights(at::TensorList(), options.memory_format, options.storage);
}

// Why the operators refuse a weight, in their words; empty where they do not.
inline std::string refusal(const at::Tensor& weight, const ModuleOptions& options, std::optional<Outcome>& outcome) {
  try {
    outcome = plan_weights({weight}, options.memory_format, options.storage).front();
    // What is refused raises without a change, and the error says why.
    if (*outcome < Outcome::kept) convert_weight_(weight, options.memory_format, options.storage);
    return "";
  } catch (const c10::Error& error) {
    const std::string message = error.what_without_backtrace();
    return message.substr(message.find(": ") + 2);  // behind the operator, which the caller did not call
  }
}

// The row of a site before anything is converted: there is no reason where the operator is to be called.
inline SiteReport plan_site(const Site& site, const ModuleOptions& options) {
  SiteReport row{site.path, site.name, site.layer, {}, {}, {}};
  if (site.weight.defined() && site.weight.layout() == at::kStrided) {
    row.sizes = site.weight.sizes().vec();
    row.strides = site.weight.strides().vec();
  }
  if (options.filter && !options.filter(site.path)) {
    row.reason = filtered;
  } else if (!serves_rank(options.memory_format, site.rank)) {
    row.reason = other_rank;
  } else {
    if (row.sizes.size() == 4 || row.sizes.size() == 5) {
      row.target_strides = canonical_strides(row.sizes, options.memory_format);
    }
    // A constant that was converted before it was frozen is as it should be.
    const bool is_in_format = !row.strides.empty() && row.strides == row.target_strides;
    row.reason = is_in_format || site.reason.empty() ? refusal(site.weight, options, row.outcome) : site.reason;
    if (!row.reason.empty()) row.action = Action::refuse;
  }
  return row;
}

inline ModuleReport convert_sites(const std::vector<Site>& sites, const ModuleOptions& options) {
  check_options(options);
  ModuleReport report;
  std::vector<at::Tensor> weights;
  std::vector<size_t> rows;  // of the weights
  std::unordered_set<const at::TensorImpl*> seen;
  std::ostringstream refused;
  for (const Site& site : sites) {
    SiteReport& row = report.sites.emplace_back(plan_site(site, options));
    if (row.action == Action::refuse) refused << "\n  " << row;
    if (!row.reason.empty()) continue;
    if (seen.insert(site.weight.unsafeGetTensorImpl()).second) {
      weights.push_back(site.weight);
      rows.push_back(report.sites.size() - 1);
    } else {
      row.reason = tied;
    }
  }
  TORCH_CHECK(!options.strict || refused.str().empty(), "nhwc::convert_weights_: nothing was changed, because of",
              refused.str());
  // Weights in format as well, for their gradients.
  const auto outcomes = convert_weights_(weights, options.memory_format, options.storage);
  for (size_t index = 0; index < rows.size(); ++index) {
    SiteReport& row = report.sites[rows[index]];
    row.outcome = outcomes[index];
    if (row.outcome == Outcome::kept) {
      row.reason = in_format;
    } else {
      row.action = row.outcome == Outcome::restrided ? Action::restride : Action::convert;
    }
  }
  return report;
}

// The weight of a module that is, or derives from, one of the layers; null for others.
template <typename... Layers>
const at::Tensor* weight_of(const torch::nn::Module& module) {
  const at::Tensor* weight = nullptr;
  const auto look = [&weight](const auto* layer) {
    if (layer) weight = &layer->weight;
  };
  (look(dynamic_cast<const Layers*>(&module)), ...);
  return weight;
}

// By hand, since named_modules wants modules that a shared_ptr owns, and lists one that is held twice two times.
inline void find_sites(const torch::nn::Module& module, const std::string& path,
                       std::unordered_set<const torch::nn::Module*>& seen, std::vector<Site>& sites) {
  using namespace torch::nn;
  if (!seen.insert(&module).second) return;
  if (const auto* weight = weight_of<Conv2dImpl, Conv3dImpl, ConvTranspose2dImpl, ConvTranspose3dImpl>(module)) {
    sites.push_back({path, "weight", module.name(), weight->defined() ? weight->dim() : 0, *weight,
                     weight->defined() ? "" : missing});
  }
  for (const auto& child : module.named_children()) {
    find_sites(*child.value(), join(path, child.key()), seen, sites);
  }
}

// An operator of TorchScript that convolves.
struct Convolution {
  std::int64_t rank;  // of its weight, 0 where it serves all ranks
  bool is_packed;     // whether an object holds the weight, instead of the operator's second argument
};

inline const Convolution* find_convolution(c10::Symbol kind) {
  static const std::unordered_map<std::string, Convolution> convolutions = {
      {"aten::conv2d", {4, false}},
      {"aten::conv3d", {5, false}},
      {"aten::conv_transpose2d", {4, false}},
      {"aten::conv_transpose3d", {5, false}},
      {"aten::convolution", {0, false}},
      {"aten::_convolution", {0, false}},
      {"aten::_convolution_mode", {0, false}},
      {"aten::mkldnn_convolution", {0, false}},
      {"prim::mkldnn_convolution", {0, false}},
      {"mkldnn_prepacked::conv2d_run", {4, true}},
      {"quantized::conv2d", {4, true}},
      {"quantized::conv2d_add", {4, true}},
      {"quantized::conv2d_add_relu", {4, true}},
      {"quantized::conv2d_dynamic", {4, true}},
      {"quantized::conv2d_relu", {4, true}},
      {"quantized::conv3d", {5, true}},
      {"quantized::conv3d_dynamic", {5, true}},
      {"quantized::conv3d_relu", {5, true}},
      {"quantized::conv_transpose2d", {4, true}},
      {"quantized::conv_transpose2d_dynamic", {4, true}},
      {"quantized::conv_transpose3d", {5, true}},
      {"quantized::conv_transpose3d_dynamic", {5, true}},
  };
  const auto found = convolutions.find(kind.toQualString());
  return found == convolutions.end() ? nullptr : &found->second;
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
      if (const Convolution* convolution = find_convolution(node->kind())) add(*node, *convolution, inputs);
      for (const torch::jit::Block* inner : node->blocks()) visit(*inner, inputs);
      if (node->kind() == c10::prim::fork) {
        Inputs passed;
        for (const Value* input : node->inputs()) passed.push_back(locate(*input, inputs));
        visit(*node->g(c10::attr::Subgraph), passed);
      }
    }
  }

  void add(const Node& node, const Convolution& convolution, const Inputs& inputs) {
    const Value& argument = weight_argument(node, convolution);
    const auto attribute = locate(argument, inputs);
    const auto literal = torch::jit::toIValue(&argument);
    std::unordered_set<const Value*> seen;
    const auto source = find_source(argument, inputs, seen);
    if (!source && !literal) return;  // made of the method's arguments alone

    Site site = source ? site_of(*source) : site_of(node, argument);
    const c10::IValue value = attribute ? attribute->value : literal.value_or(c10::IValue());
    if (value.isTensor()) site.weight = value.toTensor();
    site.rank = site.weight.defined() ? site.weight.dim() : rank_of(node, convolution);
    if (site.rank != 0 && site.rank != 4 && site.rank != 5) return;
    if (convolution.is_packed || (site.weight.defined() && site.weight.layout() != at::kStrided)) {
      site.reason = packed;
    } else if (literal) {
      site.reason = frozen;
    } else if (!attribute) {
      site.reason = computed;
    }
    const void* owner = source ? static_cast<const void*>(source->owner) : site.weight.unsafeGetTensorImpl();
    if (seen_.emplace(owner, site.name, site.reason).second) sites_.push_back(std::move(site));
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

  static Site site_of(const Attribute& attribute) {
    return {attribute.path, attribute.name, attribute.owner->type()->name()->name(), 0, {}, ""};
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
    return {path, name, node.kind().toUnqualString(), 0, {}, ""};
  }

  std::vector<Site> sites_;
  std::set<std::tuple<const void*, std::string, std::string>> seen_;  // owner, name and reason of the sites
};

}  // namespace module_detail

inline ModuleReport convert_weights_(torch::nn::Module& module, const ModuleOptions& options) {
  std::vector<module_detail::Site> sites;
  std::unordered_set<const torch::nn::Module*> seen;
  module_detail::find_sites(module, "", seen, sites);
  return module_detail::convert_sites(sites, options);
}

inline ModuleReport convert_weights_(torch::jit::Module& module, const ModuleOptions& options) {
  return module_detail::convert_sites(module_detail::GraphWalk(module).sites(), options);
}

inline std::ostream& operator<<(std::ostream& out, Action action) {
  switch (action) {
    case Action::convert: return out << "convert";
    case Action::restride: return out << "restride";
    case Action::keep: return out << "keep";
    case Action::refuse: return out << "refuse";
  }
  return out;
}

inline std::string ModuleReport::summary() const {
  std::ostringstream out;
  out << sites.size() << (sites.size() == 1 ? " site" : " sites");
  const char* separator = ": ";
  for (const Action action : {Action::convert, Action::restride, Action::keep, Action::refuse}) {
    const auto has_action = [action](const SiteReport& site) { return site.action == action; };
    out << separator << std::count_if(sites.begin(), sites.end(), has_action) << " " << action;
    separator = ", ";
  }
  return out.str();
}

inline std::ostream& operator<<(std::ostream& out, const SiteReport& site) {
  out << module_detail::join(site.path, site.name) << " (" << site.layer << ")";
  if (!site.sizes.empty()) out << " " << at::IntArrayRef(site.sizes);
  out << ": " << site.action << ", ";
  if (!site.reason.empty()) return out << site.reason;
  return out << "strides " << at::IntArrayRef(site.strides) << " to " << at::IntArrayRef(site.target_strides);
}

inline std::ostream& operator<<(std::ostream& out, const ModuleReport& report) {
  for (const SiteReport& site : report.sites) out << site << "\n";
  return out << report.summary() << "\n";
}

}  // namespace nhwc
