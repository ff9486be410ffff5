"""The same model in one process, by Keras's `fit`, to compare several with. As many samples, a cosine schedule, too."""

import argparse
import time

from common.cli import notebook
from common.data import datasets

notebook.quiet()
import keras  # noqa: E402
from language_model import build  # noqa: E402

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--batch_size", type=int, default=16)
parser.add_argument("--learning_rate", type=float, default=0.003)
parser.add_argument("--warmup_steps", type=int, default=100)
parser.add_argument("--seed", type=int, default=0)
given = parser.parse_args()

keras.utils.set_random_seed(given.seed)
text, model = datasets.load("text"), build()
steps = given.epochs * -(-text.num_samples // given.batch_size) - given.warmup_steps
rate = keras.optimizers.schedules.CosineDecay(0.0, steps, warmup_target=given.learning_rate, warmup_steps=given.warmup_steps)
model.optimizer.learning_rate = rate
began = time.monotonic()
model.fit(*text.train, batch_size=given.batch_size, epochs=given.epochs, verbose=0)
seconds = time.monotonic() - began
found = model.evaluate(*text.test, verbose=0, return_dict=True)
samples = given.epochs * text.num_samples
print(f"fit: {samples:,} samples in {seconds:.1f} s, {samples / seconds:.0f} samples/s")
print(f"test perplexity {found['perplexity']:.3f}, test loss {found['loss']:.4f}")
