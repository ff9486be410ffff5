"""A recommender's data: who likes what, made up, with known factors behind it; so the best AUC that is possible is known."""

from typing import NamedTuple

import numpy as np

TEST = 0.05  # of the ratings
FACTORS = 4
MADE_OF = {"users": 2_000, "items": 5_000, "samples": 2_000_000}  # `load`


class Ratings(NamedTuple):
    """Ratings, and what is behind them.

    Attributes:
      train, test: samples and labels, x = {"user": ids `[n]`, "item": ids `[n]`} and y, 1 if the user likes the item, else 0.
      scores: the true scores of the test set, `[n]`.
      user_factors, item_factors: `[users, factors]`, `[items, factors]`.
      item_scores: what every user adds for an item, `[items]`.
    """

    train: tuple
    test: tuple
    scores: np.ndarray
    user_factors: np.ndarray
    item_factors: np.ndarray
    item_scores: np.ndarray

    @property
    def data(self):
        """((x_train, y_train), (x_test, y_test)), what `--data` takes."""
        return self.train, self.test

    def score(self, user, item):
        """Returns the true scores of users and items, arrays of ids of the same shape."""
        return self.item_scores[item] + np.einsum("...k,...k", self.user_factors[user], self.item_factors[item])


def zipf(rng, n, count):
    """Returns so many numbers 0 to n − 1, int32: number i is drawn in proportion to 1 / (i + 1), with this NumPy generator."""
    until = np.cumsum(1 / np.arange(1, n + 1))
    return np.searchsorted(until, rng.random(count) * until[-1], side="right").clip(max=n - 1).astype(np.int32)


def make(users, items, samples, factors=FACTORS, seed=0):
    """Returns `Ratings`: y is 1 with probability σ(score), where score = bᵢ + u·v.

    The factors of users u and of items v, and the b of items, are normal, with variances that give u·v the standard deviation 2
    and b 0.5. All users are equally likely; items are drawn as `zipf` does.

    Args:
      users, items, samples, factors: how many; of the samples the last `TEST` are the test set.
      seed: equal ones give equal ratings.

    Raises:
      ValueError: if there are fewer than 1 of users, items or factors, or too few samples for a test set.
    """
    if min(users, items, factors) < 1 or samples * TEST < 1:
        raise ValueError(f"expected at least 1 user, 1 item, 1 factor and {round(1 / TEST)} samples")
    rng = np.random.default_rng(seed)
    size = np.sqrt(2) * factors**-0.25  # of a factor, so that the sum of the products has the standard deviation 2
    u = rng.normal(0, size, [users, factors]).astype(np.float32)
    v = rng.normal(0, size, [items, factors]).astype(np.float32)
    b = rng.normal(0, 0.5, items).astype(np.float32)
    user = rng.integers(0, users, samples, np.int32)
    item = zipf(rng, items, samples)
    made = Ratings((), (), np.zeros(0), u, v, b)
    score = made.score(user, item)
    y = (rng.random(samples) < 1 / (1 + np.exp(-score))).astype(np.float32)
    n = samples - round(samples * TEST)
    train, test = (({"user": user[part], "item": item[part]}, y[part, None]) for part in (slice(n), slice(n, None)))
    return made._replace(train=train, test=test, scores=score[n:])


def auc(scores, y):
    """Returns the area under the ROC curve, exactly: how often a 1 has a higher score than a 0, ties counted half.

    Args:
      scores, y: arrays `[n]`.
    """
    values, which, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2  # from 1 on; the mean of those that are equal
    ones = np.ravel(y) > 0
    n1, n0 = ones.sum(), (~ones).sum()
    return float((ranks[which.ravel()][ones].sum() - n1 * (n1 + 1) / 2) / (n1 * n0))


def load():
    """The data of run.sh, what `--data=ratings.py:load` names."""
    return make(**MADE_OF).data


def best_auc():
    """Returns the AUC of the true scores on the test set of `load`: no model can expect a better one."""
    made = make(**MADE_OF)
    return auc(made.scores, made.test[1])
