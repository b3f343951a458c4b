"""Functions compiled to graphs, and the operators in those."""

import torch
from functorch.compile import aot_function, make_boxed_func


def compiled(function, dynamic=False):
    """Compile a function. Return it, and a list that gets the operators of its graphs, forward and backward."""
    operators = []

    def keep(graph, _):
        operators.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    def backend(graph, _):
        return aot_function(graph, keep, keep)

    torch._dynamo.reset()
    return torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic), operators
