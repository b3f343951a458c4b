"""What becomes of the storage of a weight: what can be asked for, and what happens."""

import enum
from typing import Literal

Storage = Literal["auto", "fresh", "reuse", "detach"]


class Outcome(enum.IntEnum):
    """An outcome says what an in-place conversion did, or would do, to one weight.

    Negative ones are refusals; only `plan_weights` gives them.

    Example:
        >>> torch_nhwc.convert_weight_(torch.randn(8, 3, 3, 3)) is torch_nhwc.Outcome.REUSED
        True
    """

    KEPT = 0
    """In format already: nothing happened."""
    RESTRIDED = 1
    """The bytes were in order: only the strides changed."""
    REUSED = 2
    """The bytes were permuted in their own storage."""
    FRESH = 3
    """New storage."""
    FRESH_HELD = 4
    """New storage, because something else holds the old one."""
    FRESH_FOREIGN = 5
    """New storage, because the memory is not from the device's own allocator."""
    FRESH_SHARED = 6
    """New storage, because the memory is shared between processes."""

    NOT_A_LEAF = -1
    """The weight is computed from other tensors."""
    TRACED = -2
    """Traced, fake, functional or a tensor subclass, or a tracer is active."""
    WRAPPED = -3
    """Its gradient accumulator has post hooks: DDP or FSDP1 came first."""
    PART_OF_LARGER_STORAGE = -4
    """A view, or a slice of a flat parameter buffer."""
    GRADIENT_IN_THE_WAY = -5
    """Its gradient cannot follow."""
    LAZY_VIEW = -6
    """A conjugate or negative view that is not resolved."""
    HELD = -7
    """Under `"reuse"`, where `"auto"` says `FRESH_HELD`."""
    FOREIGN = -8
    """Under `"reuse"`, where `"auto"` says `FRESH_FOREIGN`."""
    SHARED = -9
    """Under `"reuse"`, where `"auto"` says `FRESH_SHARED`."""
    NOT_PERMUTABLE = -10
    """Under `"reuse"`: not dense, or no in-place kernel for the device."""

    @property
    def is_refusal(self) -> bool:
        """Whether the operators would raise."""
        return self < 0
