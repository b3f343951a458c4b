"""The names that users may rely on, by the module that they are imported from."""

from importlib import import_module

ROOMS = "ops", "functional", "planning", "training", "checkpoint", "tracing", "tuning", "verifying", "cpp_extension"
# Written down here: `data` has no list of its own, and the modules for frameworks import them, which takes seconds.
OTHERS = {
    "torch_nhwc.data": ["collate", "to_channels_last", "wrap_collate_fn"],
    "torch_nhwc.integrations.accelerate": ["contiguous_broadcasts_"],
    "torch_nhwc.integrations.lightning": ["ChannelsLast"],
    "torch_nhwc.integrations.transformers": ["ChannelsLastTrainer"],
}


def public_names() -> dict[str, list[str]]:
    """Return the public names of each module; those of `torch_nhwc` itself are not repeated for other modules."""
    top = import_module("torch_nhwc").__all__
    names = {"torch_nhwc": list(top)}
    for module in (f"torch_nhwc.{room}" for room in ROOMS):
        names[module] = [name for name in import_module(module).__all__ if name not in top]
    return names | OTHERS
