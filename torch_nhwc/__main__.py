"""`python -m torch_nhwc` and the console script `torch-nhwc`."""

import sys


def main() -> None:
    """Runs the command line; `env` works without any extra."""
    if sys.argv[1:] == ["env"]:
        from torch_nhwc import environment

        print(environment.as_text())
        return
    try:
        from torch_nhwc.cli import app
    except ModuleNotFoundError as error:
        sys.exit(f"{error.name} is missing: type `pip install 'torch-nhwc[cli]'`")
    app()


if __name__ == "__main__":
    main()
