"""The program `python -m common.advise`, which recommends a scheme: see common/cli/advise.py."""

import sys

from common.cli.advise import main

if __name__ == "__main__":
    main(sys.argv[1:])
