"""Decide what happens to every site of a model, and to what follows its weight, before anything is touched.

Carrying a plan out belongs to `converting`; nothing here writes to a tensor or a module.
"""

from torch_nhwc.planning.deciding import plan
from torch_nhwc.planning.plans import Action, CompanionRow, LayerRow, Plan, PlanRow

__all__ = ["Action", "CompanionRow", "LayerRow", "Plan", "PlanRow", "plan"]
