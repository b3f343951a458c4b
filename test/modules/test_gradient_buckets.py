"""Communication hooks that read gradients one by one: recognised by their code, however it is put together."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.algorithms import ddp_comm_hooks
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import post_localSGD_hook

from torch_nhwc.modules.gradient_buckets import hooks_that_permute


def reads(state, bucket):
    return [gradient.norm() for gradient in bucket.gradients()]


def reads_inside(state, bucket):
    def then(future):
        return bucket.gradients()

    return bucket.buffer().then(then)


def calls(state, bucket):
    return reads(state, bucket)


def calls_itself(state, bucket):
    return calls_itself(state, bucket) if state else bucket.buffer()


def with_name(name, state, bucket):
    return bucket.gradients(), name


class Hook:
    """Callable, as a function is."""

    def __call__(self, state, bucket):
        return bucket.gradients()

    def method(self, state, bucket):
        return bucket.gradients()


def compressed(hook):
    return ddp_comm_hooks.default.fp16_compress_wrapper(hook)


READ = {
    "a function": reads,
    "a function inside": reads_inside,
    "a call": calls,
    "a partial": partial(with_name, "name"),
    "an object": Hook(),
    "a method": Hook().method,
    "a wrapped one": compressed(compressed(reads)),
    "PyTorch's with an optimizer": ddp_comm_hooks.optimizer_overlap._hook_then_optimizer(None, SimpleNamespace()),
}
OTHERS = {
    "the buffer": lambda state, bucket: bucket.buffer(),
    "itself": calls_itself,
    "a builtin": print,
    "allreduce": ddp_comm_hooks.default.allreduce_hook,
    "float16": ddp_comm_hooks.default.fp16_compress_hook,
    "bfloat16": ddp_comm_hooks.default.bf16_compress_hook,
    "nothing": ddp_comm_hooks.debugging.noop_hook,
    "by tensor": ddp_comm_hooks.quantization.quantization_pertensor_hook,
    "by channel": ddp_comm_hooks.quantization.quantization_perchannel_hook,
    "low rank": ddp_comm_hooks.powerSGD.powerSGD_hook,
    "low rank, batched": ddp_comm_hooks.powerSGD.batched_powerSGD_hook,
    "low rank, compressed": compressed(ddp_comm_hooks.powerSGD.powerSGD_hook),
    "local SGD": post_localSGD_hook,
}


def wrapper(hook, views=False):
    return SimpleNamespace(_comm_hooks=[(hook, None)], gradient_as_bucket_view=views)


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("views", [False, True])
def test_h44_what_reads_gradients_is_named(name, views):
    hook = READ[name]
    assert hooks_that_permute(wrapper(hook, views)) == [getattr(hook, "__qualname__", type(hook).__name__)]


@pytest.mark.parametrize("name", OTHERS)
def test_h44_what_does_not_or_comes_out_right_is_not(name):
    assert hooks_that_permute(wrapper(OTHERS[name])) == []


def test_h44_optimizers_in_the_backward_are_right_where_gradients_are_views_of_the_bucket(monkeypatch):
    monkeypatch.setattr(torch, "Stream", object)
    for views in (False, True):
        hook = ddp_comm_hooks.optimizer_overlap._apply_optim_in_backward_hook(gradient_is_bucket_view=views)
        assert len(hooks_that_permute(wrapper(hook, views))) == (not views)


def test_a_module_without_communication_has_none():
    assert hooks_that_permute(torch.nn.Conv2d(3, 3, 3)) == []
