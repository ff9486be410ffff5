"""Some rounds of tests/chaos.py, of which thousands can be run: with faults that are the same every time."""

import chaos
import pytest

pytestmark = pytest.mark.cluster


def test_plan_is_drawn_from_the_seed(tmp_path):
    one, again, another = (chaos.Round(seed, 3, tmp_path / "run") for seed in (1, 1, 2))
    assert one.plan == again.plan != another.plan
    assert 1 <= len(one.plan) <= 3 and all(0 <= at <= chaos.FAULTS_UNTIL for at, _, _ in one.plan)


def test_what_a_round_objects_to(tmp_path):
    (tmp_path / "run.out").write_text("step 1 of 9\nthe last line\n")
    assert next(chaos.Round(1, 0, tmp_path / "run").problems(1)) == "exit status 1: the last line"


def begins(time, what, step, last=5000):
    """When the chief said with which parameters it begins."""
    return time, {"parameters": what, "global_step": step, "last_step": last}


# A run that trains from second 10 on, a hundred steps a second; a line of metrics every half second.
TRAINED = [(10 + i / 2, 50 * i, i / 2) for i in range(21)]
NEW = begins(10.0, "new", 0)


@pytest.mark.parametrize(
    "signals, then, losses, problem",
    [
        ([20.0], begins(22.0, "restored from model.ckpt-900", 900), [1.0], ""),
        (
            [20.0],
            begins(22.0, "restored from model.ckpt-700", 700),
            [3.0],
            "3.0 s were lost when parameters were restored from",
        ),
        ([20.0], begins(22.0, "restored from model.ckpt-1000", 1000), [0.0], ""),
        ([27.0], begins(29.0, "restored from model.ckpt-900", 900), [1.5], ""),  # nobody has trained after second 20
        (
            [],
            begins(22.0, "restored from model.ckpt-900", 900),
            [],
            "parameters were restored from model.ckpt-900, though no ps",
        ),
        ([], begins(22.0, "restored from model.ckpt-1000", 1000, last=1000), [], ""),
        ([], begins(22.0, "restored from model.ckpt-1000", 1000), [], "parameters were restored from model.ckpt-1000"),
        ([], begins(22.0, "found on the ps", 1000), [], ""),
        ([], begins(22.0, "found on the ps", 500), [], "the parameters found on the ps are of step 500, after one of 1000"),
    ],
)
def test_how_much_was_lost(tmp_path, signals, then, losses, problem):
    one = chaos.Round(1, 0, tmp_path / "run")
    one._ends_of_parameters = signals
    found = list(one._losses(TRAINED, [NEW, then]))
    assert one.losses == pytest.approx(losses, abs=0.01)
    assert len(found) == bool(problem) and all(line.startswith(problem) for line in found)


WAIT = "Synchronous-SGD", "Semi-Synchronous-SGD", "DiLoCo"


def rounds(schemes, scheme, soak, folder, **options):
    """The round of this scheme or, with --soak, so many of each scheme whose workers wait, or do not wait, as those of this."""
    folder.mkdir()
    each = list(schemes)
    alike = [other for other in each if (other in WAIT) == (scheme in WAIT)] if soak else [scheme]
    for number in [each.index(other) + i * len(each) for i in range(soak or 1) for other in alike]:
        yield chaos.Round(number=number, folder=folder / str(number), **options).run()


@pytest.mark.parametrize("scheme", ["AEASGD", "DiLoCo"])
def test_runs_come_through(run_dir, soak, scheme):
    for one in rounds(chaos.SCHEMES, scheme, soak, run_dir, seed=1):
        assert one.problem == "", (one.number, one.injected)


@pytest.mark.parametrize("scheme", ["AGN", "DiLoCo"])
def test_runs_come_through_while_workers_come_and_go(run_dir, soak, scheme):
    """Short rounds. Somebody joins, is killed, and leaves, in most of them."""
    for one in rounds(chaos.COME_AND_GO, scheme, soak, run_dir, seed=29, has_places=True, share=0.3):
        assert one.problem == "", (one.number, one.injected)
