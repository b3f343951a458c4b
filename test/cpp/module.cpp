// The walk over modules. Without arguments, checks torch::nn and prints "ok". With the paths of two archives, converts
// the first, prints the report and writes the second.
#include <torch/script.h>
#include <torch/torch.h>
#include <torch_nhwc/module.h>

#include <functional>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

namespace {

using nhwc::Action;
using nhwc::Outcome;

void check(bool condition, const std::string& what) {
  if (condition) return;
  std::cerr << "failed: " << what << "\n";
  std::exit(1);
}

void check_raises(const std::function<void()>& call, const std::string& text) {
  try {
    call();
  } catch (const c10::Error& error) {
    const std::string message = error.what_without_backtrace();
    check(message.find(text) != std::string::npos, "expected the error to say '" + text + "', got '" + message + "'");
    return;
  }
  check(false, "expected an error that says '" + text + "'");
}

// A convolution of the user's own.
struct ScaledImpl : torch::nn::Conv2dImpl {
  ScaledImpl() : torch::nn::Conv2dImpl(torch::nn::Conv2dOptions(4, 4, 3).padding(1)) {}
  torch::Tensor forward(const torch::Tensor& x) { return 0.5 * torch::nn::Conv2dImpl::forward(x); }
};
TORCH_MODULE(Scaled);

// Every kind of convolution, other tensors, a layer that is registered twice, and two layers that share a weight.
struct Model : torch::nn::Module {
  torch::nn::Conv1d line{register_module("line", torch::nn::Conv1d(2, 4, 3))};
  torch::nn::Conv2d plane{register_module("plane", torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 4, 3).padding(1)))};
  torch::nn::Sequential body{register_module(
      "body", torch::nn::Sequential(Scaled(), torch::nn::BatchNorm2d(4),
                                    torch::nn::ConvTranspose2d(torch::nn::ConvTranspose2dOptions(4, 6, 2).stride(2))))};
  torch::nn::Conv3d space{register_module("space", torch::nn::Conv3d(2, 3, 3))};
  torch::nn::ConvTranspose3d wide{register_module("wide", torch::nn::ConvTranspose3d(3, 2, 2))};
  torch::nn::Conv2d tied{register_module("tied", torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 4, 3).padding(1)))};
  torch::nn::Conv2d again{register_module("again", plane)};
  torch::Tensor kernel = register_parameter("kernel", torch::randn({4, 3, 3, 3}));

  Model() { tied->weight = plane->weight; }

  torch::Tensor forward(const torch::Tensor& x, const torch::Tensor& volume) {
    const auto y = body->forward(plane(x) + tied(again(x).slice(1, 0, 3)));
    return y.sum() + wide(space(volume)).square().mean();
  }
};

std::vector<const void*> addresses(const torch::nn::Module& module) {
  std::vector<const void*> found;
  for (const auto& parameter : module.parameters()) found.push_back(parameter.const_data_ptr());
  return found;
}

std::vector<std::string> paths_of(const nhwc::ModuleReport& report, Action action) {
  std::vector<std::string> found;
  for (const auto& site : report.sites) {
    if (site.action == action) found.push_back(site.path);
  }
  return found;
}

const nhwc::SiteReport& site_of(const nhwc::ModuleReport& report, const std::string& path) {
  for (const auto& site : report.sites) {
    if (site.path == path) return site;
  }
  check(false, "no site " + path);
  return report.sites.front();
}

void check_text(const nhwc::ModuleReport& report, const std::string& expected) {
  std::ostringstream text;
  text << report;
  check(text.str() == expected, "the report:\n" + text.str());
}

void converts_every_convolution() {
  Model model;  // of no shared_ptr
  const auto x = torch::randn({2, 3, 8, 8}), volume = torch::randn({1, 2, 5, 5, 5});
  const auto expected = model.forward(x, volume);
  expected.backward();
  const auto parameters = model.named_parameters();
  std::vector<torch::Tensor> values;
  for (const auto& each : parameters) values.push_back(each.value().detach().clone());

  check_text(nhwc::convert_module_(model),
             "plane.weight (torch::nn::Conv2dImpl) [4, 3, 3, 3]: convert, strides [27, 9, 3, 1] to [27, 1, 9, 3]\n"
             "body.0.weight ((anonymous namespace)::ScaledImpl) [4, 4, 3, 3]: convert, strides [36, 9, 3, 1] to "
             "[36, 1, 12, 4]\n"
             "body.2.weight (torch::nn::ConvTranspose2dImpl) [4, 6, 2, 2]: convert, strides [24, 4, 2, 1] to "
             "[24, 1, 12, 6]\n"
             "space.weight (torch::nn::Conv3dImpl) [3, 2, 3, 3, 3]: convert, strides [54, 27, 9, 3, 1] to "
             "[54, 1, 18, 6, 2]\n"
             "wide.weight (torch::nn::ConvTranspose3dImpl) [3, 2, 2, 2, 2]: convert, strides [16, 8, 4, 2, 1] to "
             "[16, 1, 8, 4, 2]\n"
             "tied.weight (torch::nn::Conv2dImpl) [4, 3, 3, 3]: keep, it is the same tensor as an earlier site's, and "
             "changes with it\n"
             "6 sites: 5 convert, 0 restride, 1 keep, 0 refuse\n");
  check(model.body->ptr<ScaledImpl>(0)->weight.strides() == at::IntArrayRef({36, 1, 12, 4}), "strides of 2D weights");
  check(model.wide->weight.strides() == at::IntArrayRef({16, 1, 8, 4, 2}), "strides of 3D weights");
  check(model.kernel.is_contiguous() && model.line->weight.is_contiguous(), "what is no site");
  check(torch::allclose(model.forward(x, volume), expected, 1e-3, 1e-3), "the output");
  for (size_t index = 0; index < values.size(); ++index) {
    const std::string& name = parameters[index].key();
    const torch::Tensor now = model.named_parameters()[name];
    check(now.is_same(parameters[index].value()) && torch::equal(now, values[index]), "identity and values of " + name);
    check(!now.grad().defined() || now.grad().strides() == now.strides(), "the gradient follows " + name);
  }

  const auto before = addresses(model);
  const auto second = nhwc::convert_module_(model, {.storage = "fresh"});
  check(second.summary() == "6 sites: 0 convert, 0 restride, 6 keep, 0 refuse", "a second time");
  check(addresses(model) == before, "a second time moves nothing");
  check(second.sites.front().outcome == Outcome::unchanged, "the outcome of what is in format");
  check(second.sites.front().reason == "it has the strides of the format already", "the reason of what is in format");

  nhwc::convert_module_(model, {.memory_format = at::MemoryFormat::Contiguous});
  for (size_t index = 0; index < values.size(); ++index) {
    const auto& value = parameters[index].value();
    check(value.strides() == values[index].strides() && torch::equal(value, values[index]), "there and back");
  }
}

void one_refused_site() {
  Model model;
  const auto flat = torch::zeros(1000);
  model.space->weight.set_data(flat.narrow(0, 10, model.space->weight.numel()).view_as(model.space->weight));
  const auto before = addresses(model);
  const std::string refused =
      "space.weight (torch::nn::Conv3dImpl) [3, 2, 3, 3, 3]: refuse, the weight is part of a larger storage";

  check_raises([&] { nhwc::convert_module_(model, {.strict = true}); },
               "nothing was changed, because of\n  " + refused);
  check(addresses(model) == before && model.plane->weight.is_contiguous(), "strict changes nothing");

  const auto report = nhwc::convert_module_(model);
  check(paths_of(report, Action::refuse) == std::vector<std::string>{"space"}, "the refused site");
  const auto& site = site_of(report, "space");
  check(site.outcome == Outcome::part_of_larger_storage, "its outcome");
  check(site.reason.rfind("the weight is part of a larger storage", 0) == 0, "its reason");
  check(site.target_strides == std::vector<int64_t>({54, 1, 18, 6, 2}), "its target strides");
  check(model.space->weight.is_contiguous(), "the refused weight");
  check(model.wide->weight.is_contiguous(at::MemoryFormat::ChannelsLast3d), "the others are converted");

  check(nhwc::convert_module_(model, {.storage = "detach", .strict = true}).sites[3].outcome == Outcome::copied,
        "detach");

  Model empty;
  empty.plane->weight = torch::Tensor();
  check(nhwc::convert_module_(empty).sites.front().reason == "the layer has no weight", "an undefined weight");
}

void views_of_one_memory() {
  struct Tied : torch::nn::Module {
    torch::nn::Conv2d encoder{register_module("encoder", torch::nn::Conv2d(3, 8, 3))};
    torch::nn::Conv2d decoder{register_module("decoder", torch::nn::Conv2d(8, 3, 3))};
    torch::nn::Conv2d other{register_module("other", torch::nn::Conv2d(3, 8, 3))};
    torch::nn::Conv2d alias{register_module("alias", torch::nn::Conv2d(3, 8, 3))};
    torch::nn::Conv2d looked_at{register_module("looked_at", torch::nn::Conv2d(3, 8, 3))};

    Tied() {
      decoder->weight.set_data(encoder->weight.detach().transpose(0, 1));
      alias->weight.set_data(other->weight.detach());
      register_buffer("first", looked_at->weight.detach()[0]);
    }
  };
  const std::vector<std::string> refused = {"encoder", "decoder", "looked_at"};

  for (const char* storage : {"auto", "fresh", "detach"}) {
    Tied model;
    const auto report = nhwc::convert_module_(model, {.storage = storage});
    check(paths_of(report, Action::refuse) == refused, "what is tied by a view");
    const auto& site = site_of(report, "encoder");
    check(site.reason.rfind("another parameter or buffer of the model reads the same memory in another way", 0) == 0 &&
              !site.outcome,
          "its reason");
    check(model.encoder->weight.is_contiguous(), "the encoder stays");
    check(model.decoder->weight.const_data_ptr() == model.encoder->weight.const_data_ptr(), "and its memory is one");
    check(model.looked_at->weight.const_data_ptr() == model.buffers().front().const_data_ptr(), "the buffer's as well");
    check(model.other->weight.strides() == at::IntArrayRef({27, 1, 9, 3}), "an exact alias is converted");
    check(model.alias->weight.const_data_ptr() == model.other->weight.const_data_ptr(), "and stays one");

    const auto is_other = [](const std::string& path) { return path == "other"; };
    const nhwc::ModuleOptions back = {
        .memory_format = at::MemoryFormat::Contiguous, .storage = storage, .filter = is_other};
    check(paths_of(nhwc::convert_module_(model, back), Action::refuse) == std::vector<std::string>{"other"},
          "where the filter leaves out its alias, it does not change");
  }
}

void the_options() {
  Model model;
  const auto flat = nhwc::convert_module_(model, {.memory_format = at::MemoryFormat::ChannelsLast});
  check((paths_of(flat, Action::keep) == std::vector<std::string>{"space", "wide", "tied"}), "channels_last is 4D");
  check(site_of(flat, "wide").reason == "the memory format is of the other rank", "the other rank");
  const auto deep = nhwc::convert_module_(model, {.memory_format = at::MemoryFormat::ChannelsLast3d, .strict = true});
  check((paths_of(deep, Action::convert) == std::vector<std::string>{"space", "wide"}), "channels_last_3d is 5D");

  const auto is_body = [](const std::string& path) { return path.rfind("body.", 0) == 0; };
  const auto part = nhwc::convert_module_(model, {.memory_format = at::MemoryFormat::Contiguous, .filter = is_body});
  check((paths_of(part, Action::convert) == std::vector<std::string>{"body.0", "body.2"}), "the filter");
  check(site_of(part, "plane").reason == "the filter left it out", "what the filter leaves out");
  check(!model.plane->weight.is_contiguous(), "what the filter leaves out is not converted");

  torch::nn::Conv2d layer(3, 4, 3);
  check_raises([&] { nhwc::convert_module_(*layer, {.storage = "new"}); }, "expected storage to be 'auto'");
  check_raises([&] { nhwc::convert_module_(*layer, {.memory_format = at::MemoryFormat::Preserve}); },
               "expected contiguous_format, channels_last or channels_last_3d");
  check(nhwc::convert_module_(*layer).summary() == "1 site: 1 convert, 0 restride, 0 keep, 0 refuse", "one site");
  torch::nn::Linear linear(2, 2);
  check(nhwc::convert_module_(*linear).sites.empty(), "no convolution");
}

void convert_archive(const std::string& from, const std::string& to) {
  auto module = torch::jit::load(from);
  std::cout << nhwc::convert_module_(module);
  module.save(to);
}

}  // namespace

int main(int count, char** arguments) {
  if (count == 3) {
    convert_archive(arguments[1], arguments[2]);
    return 0;
  }
  converts_every_convolution();
  one_refused_site();
  views_of_one_memory();
  the_options();
  std::cout << "ok\n";
}
