"""The program `python -m common.run`, which runs any script as a cluster on this machine: see common/cli/run.py."""

import sys

from common.cli.run import main

if __name__ == "__main__":
    main(sys.argv[1:])
