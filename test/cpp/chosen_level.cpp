// Prints the instruction set that the library chooses on this CPU, without any of its kernels.
#include <cstdio>

#include "cpu/dispatch.cpp"

namespace nhwc::cpu::isa {

const Kernels baseline{}, avx2{}, avx512{};
const FilterKernels filter_baseline{}, filter_avx2{}, filter_avx2_128{}, filter_avx512{}, filter_avx512_vbmi{};
const FilterKernels filter_avx512_vbmi_half_width{};
const FilterKernels::Transpose float_to_bfloat16{}, float_to_bfloat16_half_width{};

}  // namespace nhwc::cpu::isa

int main() { std::puts(nhwc::cpu::capability().c_str()); }
