"""Decide by measurement which plan makes a model fastest on this machine, and how certain that is.

Plans are made by `planning` and applied by `converting`.
"""

from torch_nhwc.tuning.decision import Tuning, TuningRow
from torch_nhwc.tuning.tuner import tune

__all__ = ["Tuning", "TuningRow", "tune"]
