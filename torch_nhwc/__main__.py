"""The entry of `python -m torch_nhwc`, which does what `torch-nhwc` does."""

from torch_nhwc_cli import main

if __name__ == "__main__":
    main()
