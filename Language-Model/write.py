"""Lets a trained model write: `python write.py RUN/model.keras --prompt="Every "`."""

import argparse

from common import notebook

notebook.quiet()
import keras  # noqa: E402
from language_model import write  # noqa: E402

parser = argparse.ArgumentParser(description="Lets a trained model write.")
parser.add_argument("model", help="model.keras of a run")
parser.add_argument("--prompt", default="The ", help="what the text begins with (default: 'The ')")
parser.add_argument("--count", type=int, default=300, help="characters (default: 300)")
parser.add_argument("--temperature", type=float, default=0.5, help="the lower, the more often the likeliest one (default: 0.5)")
parser.add_argument("--seed", type=int, default=0, help="of the choice of characters (default: 0)")
given = vars(parser.parse_args())
print(write(keras.models.load_model(given.pop("model"), compile=False), **given))
