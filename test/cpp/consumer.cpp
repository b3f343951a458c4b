// Converts weights, trains, and keeps activations channels-last, from C++ alone. Prints "ok" where everything agrees.
#include <torch/torch.h>
#include <torch_nhwc/functional.h>
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
  check(nhwc::plan_weights({layer->weight}).front() == nhwc::Outcome::in_place, "plan");
  check(nhwc::convert_weight_(layer->weight) == nhwc::Outcome::in_place, "outcome");
  check(layer->weight.strides() == at::IntArrayRef({27, 1, 9, 3}), "strides in place");
  check(torch::allclose(layer(x), expected, 1e-4, 1e-5), "output");
  check(nhwc::convert_weights_({layer->weight}, at::MemoryFormat::Contiguous, "fresh").front() == nhwc::Outcome::copied,
        "back");
  try {
    nhwc::convert_weight_(layer->weight * 1);
    check(false, "a non-leaf must raise");
  } catch (const c10::Error& error) {
    check(std::string(error.what()).find("is not a leaf of the autograd graph") != std::string::npos, "error text");
  }
}

void keeps_activations_channels_last() {
  namespace ours = nhwc::functional;
  const auto format = at::MemoryFormat::ChannelsLast3d;
  const auto x = torch::randn({2, 4, 4, 4, 4}).contiguous(format).requires_grad_();
  const auto ones = torch::ones({4}), weight = torch::randn({4, 4, 1, 1, 1});
  const auto expect = [&](const at::Tensor& out, const at::Tensor& expected, const char* what) {
    check(torch::allclose(out, expected, 1e-4, 1e-5), what);
    check(out.is_contiguous(format), what);
  };
  const auto dense = x.detach().contiguous();
  expect(ours::group_norm(x, 2, ones, ones), torch::group_norm(dense, 2, ones, ones), "group norm");
  expect(ours::instance_norm(x), torch::group_norm(dense, 4), "instance norm");
  expect(ours::batch_norm(x, {}, {}, ones, ones, true),
         torch::batch_norm(dense, ones, ones, {}, {}, true, 0, 1e-5, false), "batch norm");
  expect(ours::gelu(x), torch::gelu(dense), "gelu");
  expect(ours::avg_pool3d(x, 2), torch::avg_pool3d(dense, 2), "avg_pool3d");
  expect(ours::adaptive_avg_pool3d(x, std::array<c10::SymInt, 3>{2, 2, 2}),
         torch::adaptive_avg_pool3d(dense, {2, 2, 2}), "adaptive_avg_pool3d");
  const std::array<std::int64_t, 3> two = {2, 2, 2};
  expect(std::get<0>(ours::adaptive_max_pool3d(x, two)), std::get<0>(torch::adaptive_max_pool3d(dense, two)),
         "max pool");
  expect(ours::conv3d(x, weight), torch::conv3d(dense, weight), "conv3d");
  const auto image = x.detach()[0], kernel = torch::randn({2, 4, 3, 3});
  check(torch::allclose(ours::conv2d(image, kernel), torch::conv2d(image, kernel), 1e-4, 1e-5), "conv2d");
  const auto rows = torch::randn({8, 4}), matrix = torch::randn({3, 4});
  check(torch::equal(ours::linear(rows, matrix), torch::linear(rows, matrix)), "linear");
  const std::array<c10::SymInt, 6> pad = {1, 1, 0, 0, 0, 0};
  expect(ours::pad_circular(x, pad), torch::cat({dense.slice(4, 3), dense, dense.slice(4, 0, 1)}, 4), "pad");
  expect(ours::pad(x, pad, "circular"), ours::pad_circular(dense, pad), "pad by a mode");
  const std::array<double, 3> twice = {2, 2, 2};
  expect(ours::interpolate(x, {}, at::ArrayRef<double>(twice), "trilinear"),
         torch::upsample_trilinear3d(dense, {8, 8, 8}, false), "interpolate");
  ours::gelu(x).sum().backward();
  check(x.grad().is_contiguous(format), "the gradient's format");
}

}  // namespace

int main() {
  converts_and_differentiates();
  converts_a_module_in_place();
  keeps_activations_channels_last();
  std::cout << "ok\n";
}
