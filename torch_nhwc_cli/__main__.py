"""The entry of `python -m torch_nhwc_cli`."""

from torch_nhwc_cli import main

if __name__ == "__main__":
    main()
