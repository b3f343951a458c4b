"""The names that users may rely on."""

import ast
from pathlib import Path

import torch_nhwc as nhwc

INTEGRATIONS = Path(nhwc.__file__).parent / "integrations"


def public_names():
    """Those below `torch_nhwc.`; of the modules for frameworks by their sources, since to import them takes seconds."""
    names = [*nhwc.__all__, *(f"functional.{name}" for name in nhwc.functional.__all__)]
    for path in INTEGRATIONS.glob("*.py"):
        defined = [
            node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef | ast.ClassDef)
        ]
        names += [f"integrations.{path.stem}.{name}" for name in defined if not name.startswith("_")]
    return names
