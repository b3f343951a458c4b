// Why a weight is left as it is: one table of sentences, which reports and errors say alike.
#pragma once

#include <string>
#include <string_view>

#include "torch_nhwc/ops.h"

namespace nhwc {

/// The sentence of a reason, by its name in capitals, as it follows the name of what it is about. Raises for others.
std::string sentence_of(std::string_view reason);

/// The same for a refusal, as it follows "the weight" in an error.
std::string refusal_of(Outcome refusal);

}  // namespace nhwc
