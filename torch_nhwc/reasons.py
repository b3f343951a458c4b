"""Why a site stays as it is: one code and one sentence each."""

import enum


class Reason(enum.Enum):
    """A reason not to convert a site; the value is the sentence that follows its path in messages."""

    COMPUTED = (
        "its weight is computed from other tensors (by a parametrization, weight_norm, spectral_norm, pruning, FSDP "
        "or a property), so that a change of its format would not last"
    )
    LAZY = "its weight has no shape before the first forward"
    PACKED = "its weight is packed (quantized, or for oneDNN)"
    SCRIPTED = "it is TorchScript: pass its weights to torch.ops.nhwc.convert_weights_ instead"
