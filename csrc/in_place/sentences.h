// Why a weight is not converted: one table of sentences for reports and errors.
#pragma once

#include <string>
#include <string_view>

#include "torch_nhwc/ops.h"

namespace nhwc {

/// Returns the sentence of a reason by its name in capitals, to follow the name of a weight. Raises for other names.
std::string sentence_of(std::string_view reason);

/// Returns the sentence of a refusal, to follow "the weight" in an error.
std::string refusal_of(Outcome refusal);

}  // namespace nhwc
