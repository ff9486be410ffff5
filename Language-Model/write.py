"""Lets a trained model write: `python write.py RUN/model.keras --prompt="Every "`."""

import argparse

from common.cli import notebook

notebook.quiet()
import keras  # noqa: E402
from language_model import write  # noqa: E402

parser = argparse.ArgumentParser(description="Generates text with a trained model.")
parser.add_argument("model", help="model.keras of a run")
parser.add_argument("--prompt", default="The ", help="beginning of the text (default: 'The ')")
parser.add_argument("--count", type=int, default=300, help="number of characters (default: 300)")
parser.add_argument("--temperature", type=float, default=0.5, help="lower: more often the likeliest character (default: 0.5)")
parser.add_argument("--seed", type=int, default=0, help="seed of the sampled characters (default: 0)")
given = vars(parser.parse_args())
print(write(keras.models.load_model(given.pop("model"), compile=False), **given))
