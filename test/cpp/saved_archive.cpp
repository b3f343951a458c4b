// A user's program that runs TorchScript archives, and knows nothing of this library. Prints "ok" where all agree.
#include <torch/script.h>

#include <iostream>

int main(int count, char** arguments) {
  torch::NoGradGuard no_grad;
  const auto x = torch::randn({2, 3, 8, 8});
  const auto expected = torch::jit::load(arguments[1]).forward({x}).toTensor();
  for (int index = 2; index < count; ++index) {
    auto module = torch::jit::load(arguments[index]);
    const auto output = module.forward({x}).toTensor();
    if (!torch::allclose(output, expected, 1e-4, 1e-5)) return 1;
    for (const auto& parameter : module.named_parameters()) {
      if (parameter.name == "first.weight" && parameter.value.stride(1) != 1) return 2;
    }
  }
  std::cout << "ok\n";
}
