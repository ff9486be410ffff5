"""The program `python -m common.advise`, which says where to start: see common/cli/advise.py."""

import sys

from common.cli.advise import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
