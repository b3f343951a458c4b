"""The sentences for reports and errors that explain why a weight is not converted."""

import pytest
import torch

from torch_nhwc import Outcome

REASONS = [outcome.name for outcome in Outcome if outcome.is_refusal]
REASONS += ["IN_FORMAT", "TIED", "OTHER_RANK", "FILTERED", "UNDEFINED", "COMPUTED_IN_FORWARD", "PACKED", "FROZEN"]


def test_every_refusal_and_every_reason_of_the_walks_has_a_sentence_of_its_own():
    sentences = {torch.ops.nhwc.sentence(reason) for reason in REASONS}
    assert len(sentences) == len(REASONS)
    assert all(each[0].islower() and not each.endswith(".") and "\n" not in each for each in sentences)


def test_another_name_raises():
    with pytest.raises(ValueError, match="nhwc::sentence: expected the name of a reason, as IN_FORMAT, got 'kept'"):
        torch.ops.nhwc.sentence("kept")
