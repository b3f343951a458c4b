"""Exported programs: converted as they are, and true about their own tensors."""

import copy

import pytest
import torch
from saved_files import STRIDES, Network
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations

import torch_nhwc as nhwc
from torch_nhwc import Action, Reason

X = torch.randn(2, 3, 8, 8)


def exported(model, x=X):
    batch = torch.export.Dim("batch", min=2, max=64)
    return torch.export.export(model.eval(), (x,), dynamic_shapes=({0: batch},))


def tensors_of(program):
    return {**program.constants, **program.state_dict}


def told(program):
    """The strides that a program says its tensors have."""
    values = {node.name: node.meta["val"] for node in program.graph.find_nodes(op="placeholder")}
    specs = program.graph_signature.input_specs
    return {spec.target: values[spec.arg.name].stride() for spec in specs if spec.target is not None}


def all_told(program):
    return [getattr(node.meta.get("val"), "stride", lambda: None)() for node in program.graph.nodes]


@pytest.mark.parametrize("is_decomposed", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_a_program_converts_and_says_so(is_decomposed):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    program = exported(model)
    program = program.run_decompositions() if is_decomposed else program
    expected, before = model(X), (told(program), all_told(program))
    assert [row.action for row in nhwc.plan(program).rows] == [Action.CONVERT, Action.RESTRIDE]
    report = nhwc.convert_(program, strict=True)
    assert report.model is program
    assert (report.rows[0].full_name, report.rows[0].layer) == ("0.weight", "Conv2d")
    assert told(program) == {name: tensor.stride() for name, tensor in tensors_of(program).items()}
    assert told(program)["0.weight"] == STRIDES
    values = {node.name: node.meta["val"] for node in program.graph.nodes if "val" in node.meta}
    assert values["relu"].is_contiguous(memory_format=torch.channels_last)  # what is computed from them, too
    torch.testing.assert_close(program.module()(X), expected)
    assert nhwc.convert_(program).new_bytes == 0
    report.revert()
    assert (told(program), all_told(program)) == before
    torch.testing.assert_close(program.module()(X), expected)


class Reaching(nn.Module):
    """Weights that reach convolutions in other ways than as the parameter of a layer."""

    def __init__(self):
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(3, 3, 3, 3))
        self.register_buffer("buffer", torch.randn(3, 3, 3, 3))
        self.register_buffer("unsaved", torch.randn(3, 3, 3, 3), persistent=False)
        self.constant = torch.randn(3, 3, 3, 3)
        self.branched = nn.Conv2d(3, 3, 3)
        self.ungraded = nn.ConvTranspose2d(3, 3, 3, groups=3)
        self.position = nn.Parameter(torch.randn(1, 3, 1, 1))
        self.normed = parametrizations.weight_norm(nn.Conv2d(3, 3, 1))

    def forward(self, x):
        x = functional.conv2d(x + self.position, self.kernel.to(torch.float64), padding=1)
        x = functional.conv2d(x, self.buffer.detach(), padding=1)
        x = functional.conv2d(x, self.unsaved, padding=1)
        x = functional.conv2d(x, self.constant, padding=1)
        x = torch.cond(x.sum() > 0, lambda x: self.branched(x), lambda x: self.branched(-x), (x,))
        with torch.no_grad():
            x = self.ungraded(x)
        return self.normed(x)


def test_every_way_to_a_convolution_is_found_and_what_is_computed_is_refused():
    model, x = Reaching().double().eval(), X.double()
    model.constant = model.constant.double()
    program, expected = exported(model, x), model(x)
    with pytest.warns(UserWarning, match="1 of 7 sites stay as they are: '<computed"):
        report = nhwc.convert_(program)
    reasons = {row.full_name: row.reason for row in report.rows}
    assert reasons.pop("<computed 6>") is Reason.ON_THE_FLY
    assert reasons == dict.fromkeys(["kernel", "buffer", "unsaved", "constant", "branched.weight", "ungraded.weight"])
    assert {tensors_of(program)[name].stride() for name in [*reasons][:5]} == {STRIDES}
    torch.testing.assert_close(program.module()(x), expected)


def test_a_program_decomposed_for_contiguous_weights_is_left_as_it_is_where_it_would_not_run():
    program = exported(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 2))).run_decompositions()
    before = told(program), all_told(program)
    with pytest.raises(RuntimeError, match=r"would not run with these: Cannot view a tensor .* before exporting it"):
        nhwc.convert_(program)
    assert (told(program), all_told(program)) == before
    assert all(tensor.is_contiguous() for tensor in program.state_dict.values())


class ByStrides(nn.Module):
    """Reads an activation by strides, which are numbers in the program."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        return torch.as_strided(self.conv(x), (2, 4, 6), (144, 36, 1))


def test_a_program_that_reads_memory_by_strides_is_left_as_it_is():
    program = torch.export.export(ByStrides().eval(), (X,))
    before = all_told(program)
    with pytest.raises(RuntimeError, match=r"aten.as_strided.default reads conv2d by strides of its own"):
        nhwc.convert_(program)
    assert all_told(program) == before
    assert program.state_dict["conv.weight"].is_contiguous()


class CountsInForward(nn.Module):
    """Has a size that only its values give."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        return (self.conv(x) > 0).nonzero().float().sum()


def test_gradients_and_symbols_stay_what_the_program_says_of_them():
    program = torch.export.export(CountsInForward(), (X,))

    def said():
        nodes = [(node, node.meta.get("val")) for node in program.graph.nodes if node.op != "output"]
        needed = {node.name: getattr(value, "requires_grad", None) for node, value in nodes}
        return needed, [str(node.meta.get("unbacked_bindings")) for node, _ in nodes]

    before = said()
    assert before[0]["p_conv_weight"]
    nhwc.convert_(program, strict=True)
    assert said() == before


def test_a_program_of_a_converted_model_is_put_right():
    """Its tensors are the model's, and it does not notice when those change."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    program = exported(model)
    nhwc.convert_(model)
    assert told(program)["0.weight"] != model[0].weight.stride()
    report = nhwc.convert_(program)
    assert report.rows[0].reason is Reason.IN_FORMAT
    assert told(program)["0.weight"] == model[0].weight.stride() == STRIDES


def test_a_plan_and_an_optimizer_go_with_a_program():
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    program, other = exported(model), exported(copy.deepcopy(model))
    optimizer = torch.optim.Adam(model.parameters())
    model(X).sum().backward()
    optimizer.step()
    plan = nhwc.Plan.from_json(nhwc.plan(program).to_json())
    nhwc.convert_(program, plan=plan, optimizer=optimizer)
    assert optimizer.state[model[0].weight]["exp_avg"].stride() == STRIDES
    nhwc.convert_(other, plan=plan)
    assert told(other)["0.weight"] == STRIDES
    left = nhwc.convert_(other, torch.contiguous_format, filter_fn=lambda _, path: path != "0")
    assert left.rows[0].reason is Reason.FILTERED


@pytest.mark.parametrize("option", ["ema", "example_inputs", "verify", "preserve", "each_forward"])
def test_what_is_for_modules_that_run_is_refused(option):
    program = exported(nn.Sequential(nn.Conv2d(3, 4, 3)))
    with pytest.raises(ValueError, match=f"{option} is not for an exported program: give it to the model, before"):
        nhwc.convert_(program, **{option: X if option in ("example_inputs", "verify") else True})
    with pytest.raises(RuntimeError, match="an exported program takes no hook that brings its inputs"):
        nhwc.convert_(program, input_format="channels_last")
    assert told(program)["0.weight"] == (27, 9, 3, 1) == program.state_dict["0.weight"].stride()


@pytest.mark.exhaustive  # the compiler takes a minute
def test_aot_inductor_compiles_a_converted_program_to_equal_numbers(tmp_path):
    model = Network()
    program, expected = exported(model), model.eval()(X)
    nhwc.convert_(program, strict=True)
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    torch.testing.assert_close(torch._inductor.aoti_load_package(path)(X), expected)
