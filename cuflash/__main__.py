"""`python -m cuflash`: the command line of cli.py."""

import sys

from cuflash.cli import main

if __name__ == "__main__":
    sys.exit(main())
