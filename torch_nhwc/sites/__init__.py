"""Sites: the convolution weights of a model, wherever they are, and what is wrapped around the model.

`planning` decides what happens to a site. Nothing in here changes a model.
"""

from torch_nhwc.sites.reasons import Kind, Reason

__all__ = ["Kind", "Reason"]
