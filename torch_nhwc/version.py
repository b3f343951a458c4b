"""The package's version; include/torch_nhwc/version.h says the same to C++."""

__version__ = "0.1.0"
