"""Embeddings: ratings of which the best AUC is known, the recommender, and run.sh, which compares a run with the best."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import keras
import numpy as np
import pytest
from runs import SECONDS

from common.data import datasets
from common.data.batches import Batches
from common.models import keras_model
from common.scheme import tables
from common.simulation.replay import Replay

FOLDER = Path(__file__).parent.parent / "Embeddings"
sys.path.append(str(FOLDER))
import below_best  # noqa: E402
import bigrams  # noqa: E402
import ratings  # noqa: E402
import recommender  # noqa: E402


def bytes_of(made):
    (x, y), (x_test, y_test) = made.data
    return [array.tobytes() for array in (x["user"], x["item"], y, x_test["user"], x_test["item"], y_test, made.scores)]


def test_equal_seeds_make_equal_ratings():
    first, again, other = (ratings.make(30, 50, 1000, seed=seed) for seed in (1, 1, 2))
    assert bytes_of(first) == bytes_of(again)
    assert not any(one == two for one, two in zip(bytes_of(first), bytes_of(other), strict=True))


@pytest.mark.parametrize(("users", "items", "samples", "factors"), [(1, 1, 20, 1), (3, 70_000, 5000, 2), (40, 7, 333, 16)])
def test_ratings_of_any_size(users, items, samples, factors):
    """Ids are within their table, labels 0 or 1, and a twentieth is for the test."""
    made = ratings.make(users, items, samples, factors)
    (x, y), (x_test, y_test) = made.data
    assert len(y) + len(y_test) == samples and len(y_test) == len(made.scores) == round(samples / 20)
    for part, labels in (x, y), (x_test, y_test):
        assert part["user"].shape == part["item"].shape == labels.shape[:1] and set(np.unique(labels)) <= {0, 1}
        assert part["user"].dtype == part["item"].dtype == np.int32
        assert part["user"].min() >= 0 and part["user"].max() < users and part["item"].min() >= 0 and part["item"].max() < items
    np.testing.assert_allclose(made.scores, made.score(x_test["user"], x_test["item"]))
    assert made.user_factors.shape == (users, factors) and made.item_factors.shape == (items, factors)


@pytest.mark.parametrize("size", [(0, 1, 100), (1, 0, 100), (1, 1, 19), (1, 1, 100, 0)])
def test_ratings_of_no_size(size):
    with pytest.raises(ValueError, match="expected at least 1 user, 1 item, 1 factor"):
        ratings.make(*size)


def test_labels_and_popularity_are_as_they_should_be():
    """Labels are 1 as often as σ of their scores says; scores spread as promised; items are drawn as Zipf has it."""
    made = ratings.make(2000, 3000, 400_000, 4)
    (x, y), _ = made.data
    score = made.score(x["user"], x["item"])
    for low, high in (-9, -2), (-2, -0.5), (-0.5, 0.5), (0.5, 2), (2, 9):
        here = (low < score) & (score < high)
        assert y[here].mean() == pytest.approx((1 / (1 + np.exp(-score[here]))).mean(), abs=0.005)
    products = made.user_factors @ made.item_factors.T
    assert products.std() == pytest.approx(2, rel=0.05) and made.item_scores.std() == pytest.approx(0.5, rel=0.05)
    counts = np.bincount(x["item"], minlength=3000)
    assert counts[0] / counts[9] == pytest.approx(10, rel=0.1) and counts[:10].sum() / counts[10:100].sum() == pytest.approx(
        (1 / np.arange(1, 11)).sum() / (1 / np.arange(11, 101)).sum(), rel=0.02
    )


def test_auc_is_how_often_a_one_is_before_a_zero():
    rng = np.random.default_rng(0)
    scores, y = rng.integers(0, 12, 200) / 4, rng.integers(0, 2, [200, 1])  # many are equal
    ones, zeros = scores[y[:, 0] == 1], scores[y[:, 0] == 0]
    pairs = (ones[:, None] > zeros).mean() + (ones[:, None] == zeros).mean() / 2
    assert ratings.auc(scores, y) == pytest.approx(pairs, abs=1e-12)
    assert ratings.auc(np.array([1.0, 2, 3, 4]), np.array([0, 0, 1, 1])) == 1


def test_no_score_is_better_than_the_true_one():
    """Neither one that knows a part of it, nor a disturbed one; Keras's AUC, which runs report, is the same."""
    made = ratings.make(300, 400, 400_000)
    x, y = made.test
    best = ratings.auc(made.scores, y)
    assert 0.8 < best < 0.9
    metric = keras.metrics.AUC(from_logits=True)
    metric.update_state(y, made.scores[:, None])
    assert float(metric.result()) == pytest.approx(best, abs=2e-4)
    rng = np.random.default_rng(0)
    others = made.item_scores[x["item"]], made.scores + rng.normal(0, 0.5, len(y)), made.scores[::-1]
    assert all(ratings.auc(other, y) < best - 0.005 for other in others)


def test_the_line_says_how_far_below_the_best(monkeypatch):
    monkeypatch.setattr(ratings, "best_auc", lambda: 0.85)
    result = {"data": "/a/Embeddings/ratings.py:load", "test_auc": 0.8412}
    assert below_best.compared(result) == "test AUC 0.8412, the best reachable 0.8500: 0.0088 below it"
    assert "is known only for" in below_best.compared({**result, "data": "mine.py:load"})
    assert "no metric" in below_best.compared({"data": "ratings.py:load"})


@pytest.mark.slow
def test_two_workers_learn_more_than_how_popular_items_are(hogwild):
    """Their tables come near the truth, and a row that is never needed stays as it was."""
    made = ratings.make(60, 80, 40_000, 2)
    dataset = datasets.checked(made.data, "ratings")
    keras.utils.set_random_seed(0)
    with tables.on_ps(0):
        model = keras_model.checked(recommender.build(users=60, items=81, width=2), dataset)
    flags = {"table_optimizer": "rowwise_adagrad", "table_learning_rate": 0.5, "learning_rate": 0.1}
    hp = types.SimpleNamespace(**flags, window=5, overlap=False)

    def make_batches(i):
        x, y = datasets.shard(dataset, i, 2)
        return Batches(x, y, 64, seed=i, name=f"shard_{i}")

    replay = Replay(hogwild, hp, model, make_batches, 2, num_ps=2)
    first = replay.table("items")
    replay.run(350)
    users, items = replay.table("users"), replay.table("items")
    assert users.shape == (60, 2) and items.shape == (81, 3)
    *weights, of_bias, bias = replay.center
    x, y = made.test
    u, v = users[x["user"]], items[x["item"]]
    scores = (u * weights * v[:, :2]).sum(axis=1) + of_bias * v[:, 2] + bias
    best, found = ratings.auc(made.scores, y), ratings.auc(scores, y)
    assert best - 0.03 < found < best + 0.01
    assert ratings.auc(made.item_scores[x["item"]], y) < best - 0.1
    np.testing.assert_array_equal(items[80], first[80])
    assert np.abs(items[:80] - first[:80]).max(axis=1).min() > 0.01
    replay.close()


def test_pairs_are_spread_over_their_table():
    pairs = np.arange(bigrams.TOKENS**2, dtype=np.int32)
    for buckets in 64, 4096:
        rows = np.bincount(bigrams.hashed(pairs, buckets), minlength=buckets)
        assert len(rows) == buckets and rows.max() < 6 * len(pairs) / buckets


def test_a_pair_is_a_character_and_the_one_before():
    """What stands two places before, or after, changes nothing."""
    model = bigrams.build(512)
    model.set_weights([np.random.default_rng(0).normal(size=w.shape) for w in model.get_weights()])
    x = np.random.default_rng(1).integers(0, bigrams.TOKENS, [2, 64]).astype(np.int32)
    changed = x.copy()
    changed[:, 20] = (x[:, 20] + 1) % bigrams.TOKENS
    change = np.abs(model.predict_on_batch(x) - model.predict_on_batch(changed)).max(axis=-1)
    assert (change[:, 20:22] > 1e-3).all() and np.delete(change, [20, 21], axis=1).max() < 1e-5


def run(*arguments, **environ):
    command = ["bash", FOLDER / "run.sh", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env={**os.environ, **environ})


@pytest.mark.slow
def test_no_such_scheme():
    done = run("--scheme=HogWidl")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("run.sh: there is no scheme 'HogWidl'; ") and done.stderr.count("\n") == 1


@pytest.mark.cluster
def test_it_trains_and_compares(tmp_path):
    """With another scheme, two ps, and a model that is given: flags count in place of those of run.sh."""
    file = tmp_path / "narrow.py"
    file.write_text("import recommender\n\n\ndef build():\n    return recommender.build(width=2)\n")
    folder = tmp_path / "run"
    given = f"--model={file}:build", "--num_ps=2", "--window=2", "--steps=6", "--rounds_per_call=1", "--run_dir", str(folder)
    done = run("--scheme=DOWNPOUR-Easy", *given, PYTHONPATH=str(FOLDER))
    assert done.returncode == 0, done.stderr
    result = json.loads((folder / "result.json").read_text())
    assert result["scheme"] == "DOWNPOUR-Easy" and 6 <= result["global_steps"] < 10
    of = {table["layer"]: table for table in result["tables"]}
    users, items = of["users"], of["items"]
    assert (users["layer"], users["rows"], users["width"], items["rows"], items["width"]) == ("users", 2000, 2, 5000, 3)
    assert users["ids_per_round"] == 1024 > items["rows_per_round"] and len(items["rows_per_round_and_ps"]) == 2
    assert done.stdout.splitlines()[-1] == below_best.compared(result)
