"""Results are written as JSON; a text that is something else is one error that says what is expected."""

import pytest

from torch_nhwc import Plan, Report
from torch_nhwc.tracing import Trace
from torch_nhwc.tuning import Tuning
from torch_nhwc.verifying import Verification


@pytest.mark.parametrize("text", ["", "3", "[]", "{}", '{"rows": [3]}', '{"version": 2}', '{"plan": {}}'])
@pytest.mark.parametrize("kind", [Plan, Report, Trace, Tuning, Verification])
def test_text_that_is_something_else_raises(kind, text):
    name = kind.__name__
    with pytest.raises(ValueError, match=rf"{name}\.from_json: expected what {name}\.to_json writes"):
        kind.from_json(text)
