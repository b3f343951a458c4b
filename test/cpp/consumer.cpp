// Converts, trains, and runs a TorchScript archive, from C++ alone. Prints "ok" where everything agrees.
#include <torch/script.h>
#include <torch/torch.h>
#include <torch_nhwc/ops.h>

#include <iostream>

namespace {

void check(bool condition, const char* what) {
  if (condition) return;
  std::cerr << "failed: " << what << "\n";
  std::exit(1);
}

void converts_and_differentiates() {
  const auto weight = torch::randn({4, 3, 3, 3}, torch::requires_grad());
  const auto out = nhwc::convert_weight(weight, at::MemoryFormat::ChannelsLast, torch::kDouble);
  check(out.strides() == at::IntArrayRef({27, 1, 9, 3}), "strides");
  check(out.scalar_type() == torch::kDouble, "dtype");
  (out * out).sum().backward();
  check(torch::allclose(weight.grad(), 2 * weight.detach()), "gradient");
  check(weight.grad().strides() == weight.strides(), "strides of the gradient");
  const auto all = nhwc::convert_weights({weight, torch::randn({2, 3, 3, 3, 3})});
  check(all[1].is_contiguous(at::MemoryFormat::ChannelsLast3d), "a list of mixed ranks");
}

void converts_a_module_in_place() {
  torch::nn::Conv2d layer(torch::nn::Conv2dOptions(3, 4, 3));
  const auto x = torch::randn({2, 3, 8, 8});
  const auto expected = layer(x).detach();
  check(nhwc::plan_weights({layer->weight}).front() == nhwc::Outcome::reused, "plan");
  check(nhwc::convert_weight_(layer->weight) == nhwc::Outcome::reused, "outcome");
  check(layer->weight.strides() == at::IntArrayRef({27, 1, 9, 3}), "strides in place");
  check(torch::allclose(layer(x), expected, 1e-4, 1e-5), "output");
  check(nhwc::convert_weights_({layer->weight}, at::MemoryFormat::Contiguous, "fresh").front() == nhwc::Outcome::fresh,
        "back");
  try {
    nhwc::convert_weight_(layer->weight * 1);
    check(false, "a non-leaf must raise");
  } catch (const c10::Error& error) {
    check(std::string(error.what()).find("is not a leaf of the autograd graph") != std::string::npos, "error text");
  }
}

void trains_an_archive(const char* path) {
  auto module = torch::jit::load(path);
  const auto x = torch::randn({2, 3, 8, 8});
  const auto out = module.forward({x}).toTensor();
  out.sum().backward();
  const auto weight = module.attr("weight").toTensor();
  check(weight.grad().defined(), "the gradient of an archive");
  check(torch::allclose(out, torch::conv2d(x, weight), 1e-4, 1e-5), "the output of an archive");
}

}  // namespace

int main(int, char** arguments) {
  converts_and_differentiates();
  converts_a_module_in_place();
  trains_an_archive(arguments[1]);
  std::cout << "ok\n";
}
