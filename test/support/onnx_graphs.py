"""Models exported to ONNX, and their operators."""

import contextlib
import io

import onnx
import torch


def onnx_model(model, x, dynamo):
    """Export a model by one of PyTorch's two exporters."""
    if dynamo:
        with contextlib.redirect_stdout(io.StringIO()):
            return torch.onnx.export(model, (x,), dynamo=True, verbose=False).model_proto
    file = io.BytesIO()
    torch.onnx.export(model, (x,), file, dynamo=False)
    return onnx.load_from_string(file.getvalue())


def operators_of(onnx_model):
    """Return the operators of a graph, in order."""
    return [node.op_type for node in onnx_model.graph.node]


def onnx_operators(model, x, dynamo):
    """Return the operators of the exported model, or the class of the exporter's error."""
    try:
        return operators_of(onnx_model(model, x, dynamo))
    except torch.onnx.OnnxExporterError as error:
        return type(error)
