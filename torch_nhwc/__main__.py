"""What `python -m torch_nhwc` and the console script `torch-nhwc` run."""

import sys

from torch_nhwc.cli import environment


def main() -> None:
    """Runs the command line; `env` works without any extra."""
    try:
        from torch_nhwc.cli.commands import app
    except ModuleNotFoundError as error:
        if sys.argv[1:] != ["env"]:
            print(f"torch-nhwc: {error.name} is missing: type `pip install 'torch-nhwc[cli]'`", file=sys.stderr)
            sys.exit(2)
        print(environment.as_text())
    else:
        app()


if __name__ == "__main__":
    main()
