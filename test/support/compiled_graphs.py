"""Functions compiled to graphs, and the operators in those."""

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

# With 2.11 all sizes in a graph count as symbols, which leave PyTorch's convolutions.
HAS_NUMBERS = torch.__version__ >= "2.13"


def compiled(function, dynamic=False):
    """Compile a function. Return it, and a list that gets the operators of its graphs, forward and backward."""
    operators = []

    def keep(graph, _):
        operators.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    return torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic), operators
