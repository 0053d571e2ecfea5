"""`python -m scute_compile.cli` is `scute`."""

import sys

from scute_compile.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
