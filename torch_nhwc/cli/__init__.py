"""The command line. The commands call the public functions; `torch-nhwc env` works without the extra `cli`."""

from torch_nhwc import __version__
from torch_nhwc.ops.library import build_info, library_path
from torch_nhwc.ops.qualification import kept_qualifications
from torch_nhwc.running.machine import machine


def describe_environment() -> dict[str, object]:
    """Return versions, compilers and devices as plain data, for a bug report."""
    return {
        "torch_nhwc": __version__,
        **machine(),
        "norms on GPUs": kept_qualifications(),
        "library": library_path().name,
        "built with": dict(build_info()),
    }


def environment_as_text() -> str:
    """Return `describe_environment` as lines of text."""
    lines = []
    for name, value in describe_environment().items():
        if isinstance(value, dict):
            lines += [f"{name}:", *(f"    {key}: {entry}" for key, entry in value.items())]
        else:
            lines.append(f"{name}: {value}")
    return "\n".join(lines)
