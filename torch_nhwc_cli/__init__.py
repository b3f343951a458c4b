"""The program `torch-nhwc`: a package of its own, so that help and errors of options do not wait for torch."""

import sys


def main() -> None:
    """Run the command line, or only `env` if the extra `cli` is not installed."""
    try:
        from torch_nhwc_cli.program import app
    except ModuleNotFoundError as error:
        if sys.argv[1:] != ["env"]:
            print(f"torch-nhwc: {error.name} is missing: type `pip install 'torch-nhwc[cli]'`", file=sys.stderr)
            sys.exit(2)
        from torch_nhwc.cli import environment_as_text

        print(environment_as_text())
    else:
        app()
