"""``python -m axcore``: the same as the program ``axcore``."""

from axcore.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
