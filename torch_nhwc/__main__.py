"""The entry of `python -m torch_nhwc` and of the console script `torch-nhwc`."""

import sys

from torch_nhwc.cli import environment_as_text


def main() -> None:
    """Run the command line, or only `env` if the extra `cli` is not installed."""
    try:
        from torch_nhwc.cli.commands import app
    except ModuleNotFoundError as error:
        if sys.argv[1:] != ["env"]:
            print(f"torch-nhwc: {error.name} is missing: type `pip install 'torch-nhwc[cli]'`", file=sys.stderr)
            sys.exit(2)
        print(environment_as_text())
    else:
        app()


if __name__ == "__main__":
    main()
