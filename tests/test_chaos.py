"""Some rounds of tests/chaos.py, of which thousands can be run: each scheme once, with faults that are the same every time."""

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


@pytest.mark.parametrize("number", range(0, 6, 2))
def test_run_comes_through(run_dir, number):
    one = chaos.Round(1, number, run_dir).run()
    assert one.problem == "", one.injected
