"""The way back of a conversion: what it changes, as it was."""

import weakref
from collections.abc import Callable, MutableMapping
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from torch_nhwc.converting.commit import commit
from torch_nhwc.converting.edits import Edit, bring_back_edits
from torch_nhwc.converting.telling import tell_unshared
from torch_nhwc.finding.site import Found
from torch_nhwc.formats import CONTIGUOUS, Strides
from torch_nhwc.memory import tied_by_view
from torch_nhwc.modules import wrapping
from torch_nhwc.ops import lay_out_weights_
from torch_nhwc.planning.companions import Sources, Weight, find_companions, sources_of
from torch_nhwc.planning.following import Following
from torch_nhwc.planning.matching import match
from torch_nhwc.planning.plans import Plan
from torch_nhwc.planning.rows import Action
from torch_nhwc.reasons import Reason
from torch_nhwc.stepping.guard import align_seen
from torch_nhwc.stepping.loading import leave_as_loaded


class Undo(NamedTuple):
    """What a conversion changes, as it was. Holds models, optimizers and tensors weakly."""

    model: "weakref.ref[nn.Module]"
    sources: Callable[[], Sources]
    strides: dict[str, Strides | None]
    """Of the weights, by full name. `None` where contiguous ones must do: there were none, or elements overlapped."""
    companions: MutableMapping[Tensor, Strides]
    """The strides of those companions that did not lie as their weight: the others go back with it."""
    edits: list[Edit]

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """`None` in deep copies and pickles of a report: what it goes back to is the original's."""
        return type(None), ()

    @classmethod
    def of(cls, following: Following, edits: list[Edit]) -> "Undo":
        """To be made before anything changes."""
        followed = {companion.weight.name for companion in following.companions if companion.changes}
        strides: dict[str, Strides | None] = {}
        for decision in following.decisions:
            site = decision.site
            if decision.changes or decision.waits or (followed and site.full_name in followed):
                is_lost = site.tensor is None or decision.reason is Reason.OVERLAPPING
                strides[site.full_name] = None if is_lost else decision.tensor.stride()
        apart: MutableMapping[Tensor, Strides] = WeakTensorKeyDictionary()
        for companion in following.companions if strides else ():
            own = companion.tensor.stride()
            # The strides of expanded tensors cannot be brought back.
            if companion.reason is None and own != companion.weight.tensor.stride() and 0 not in own:
                apart[companion.tensor] = own
        return cls(weakref.ref(following.model), following.sources.weakly(), strides, apart, edits)

    def revert(self, plan: Plan, optimizer: Any, ema: Any) -> None:
        """What `Report.revert` does; see there."""
        model = self.model()
        if model is None:
            raise RuntimeError("Report.revert: the model is gone")
        given = sources_of(optimizer, ema, model)
        sources = self.sources().joined(given)
        # Layers alone are known by themselves, wherever a wrapper has put them since.
        found = match(plan, model, any_dtype=True) if self.strides or not self.edits else Found(model, [], set(), [])
        sites = found.sites
        tied = tied_by_view(found.tensors, [site.tensor for site in sites])
        sources.check_optimizers(model, (site.tensor for site in sites))
        weights = []
        for site in sites:
            if site.full_name not in self.strides:
                continue
            reason = site.reason
            if id(site.tensor) in tied:
                reason = Reason.TIED_BY_VIEW
            elif site.tensor is not None and wrapping.is_offloaded(site.module, site.tensor):
                reason = Reason.OFFLOADED
            if reason and reason in (Reason.OFFLOADED, Reason.TIED_BY_VIEW, *wrapping.REASONS):
                raise RuntimeError(f"Report.revert: {site.full_name!r}: {reason.value}")
            if site.tensor is not None:
                before = self.strides[site.full_name] or CONTIGUOUS.strides(site.tensor.shape)
                weights.append(Weight(site.full_name, site.tensor, before))
        tell_unshared([weight for weight in weights if weight.tensor.stride() != weight.strides], CONTIGUOUS)
        companions = [each for each in find_companions(weights, sources) if each.reason is None]
        tensors = [weight.tensor for weight in weights] + [companion.tensor for companion in companions]
        strides = [weight.strides for weight in weights]
        strides += [self.companions.get(companion.tensor, companion.weight.strides) for companion in companions]
        exchanged = {row.path: None for row in plan.layers if row.action is Action.EXCHANGE}
        exchanged |= {row.path: None for row in plan.rows if row.action is Action.EACH_FORWARD}
        # A checkpoint from before may be loaded after this, by an optimizer that aligns what it loads.
        edits = [edit.reverse for edit in reversed(self.edits) if edit.back is not leave_as_loaded]
        edits += bring_back_edits(exchanged, given)
        commit(tensors, partial(lay_out_weights_, tensors, strides), edits)
        align_seen()
