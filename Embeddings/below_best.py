"""Compares the test AUC of a run with the best that is possible: `python below_best.py RUN`. Prints one line."""

import argparse
import json
from pathlib import Path

import ratings


def compared(result):
    """Returns the line.

    Args:
      result: what a run has written to `result.json`.
    """
    if Path(result["data"]).parts[-1] != "ratings.py:load":
        return "the best reachable AUC is known only for --data=ratings.py:load"
    if "test_auc" not in result:
        return "the model has no metric named auc to compare with the best reachable AUC"
    found, best = result["test_auc"], ratings.best_auc()
    return f"test AUC {found:.4f}, the best reachable {best:.4f}: {best - found:.4f} below it"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", help="folder of a run")
    print(compared(json.loads(Path(parser.parse_args().run, "result.json").read_text())))
