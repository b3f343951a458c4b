"""What a report of a problem needs to say about the machine and the build."""

from torch_nhwc import __version__
from torch_nhwc.ops.library import build_info, library_path
from torch_nhwc.running import machine


def describe() -> dict[str, object]:
    """Return versions, compilers and devices as plain data."""
    return {"torch_nhwc": __version__, **machine(), "library": library_path().name, "built with": dict(build_info())}


def as_text() -> str:
    """Return `describe` in lines."""
    lines = []
    for name, value in describe().items():
        if isinstance(value, dict):
            lines += [f"{name}:", *(f"    {key}: {entry}" for key, entry in value.items())]
        else:
            lines.append(f"{name}: {value}")
    return "\n".join(lines)
