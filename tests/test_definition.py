"""common/scheme/definition.py: what a `Scheme` takes, and refuses in one line."""

import pytest

from common import Scheme, flags, main
from common.cli import schemes


def rule(center, local, hp):
    yield


def test_own_flags_and_defaults():
    momentum, window = flags.number("momentum", 0.5, "μ", least=0), flags.alias("n_push", "window")
    scheme = Scheme(rule, flags=[momentum, window, flags.overlap()], epochs=3, window=4)
    assert scheme.own_flags == ["momentum", "overlap"]
    for _ in range(2):  # each command line has flags of its own
        values = scheme.flag_values(flags.integer("more", 7, "of a program"), num_workers=9)
        settings = flags.parse(values, ["--n_push=5", "--momentum=1"], "mine.py")
        assert (settings.epochs, settings.window, settings.momentum, settings.more) == (3.0, 5, 1.0, 7)
        assert settings.num_workers == 9 and settings.overlap is False
        assert flags.parse(scheme.flag_values(), [], "mine.py").momentum == 0.5


def test_a_flag_of_every_scheme_that_a_scheme_may_define_anew(parse, user_error):
    own = [flags.number("weight_decay", 0.1, "λ of AdamW", least=0)]
    assert (parse(own=own).weight_decay, parse().weight_decay) == (0.1, 0)
    with user_error("--seed is a flag of every scheme: give its default, Scheme(seed=...), or choose another name"):
        Scheme(rule, flags=[flags.integer("seed", 3, "of mine")])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"epoch": 3}, "Scheme(epoch=...): there is no flag --epoch; did you mean epochs?"),
        ({"pace": "alone"}, "Scheme(pace='alone'): expected one of 'own', 'together', 'ring'"),
        ({"optimizer_on": "gpu"}, "Scheme(optimizer_on='gpu'): expected 'ps' or 'worker'"),
        ({"train": rule}, "a Scheme needs a generator function of (center, local, hp), or train=, a main loop of its own"),
    ],
)
def test_arguments_that_cannot_be(user_error, arguments, text):
    with user_error(text):
        Scheme(rule, **arguments)


def test_a_function_is_no_scheme(user_error):
    with user_error("main(...) takes a Scheme: SCHEME = Scheme(function, epochs=60, ...), and then main(SCHEME)"):
        main(rule)


def test_flags_without_meaning():
    assert Scheme(rule).without == ()
    assert set(Scheme(rule, pace="together").without) == {"warm_start_steps"}
    assert set(Scheme(rule, pace="ring").without) == {"warm_start_steps", "compress", "compress_pull", "topk", "ema"}
    assert {"gpus", "max_workers", "launch", "patience"} < set(Scheme(train=rule, without=("launch",)).without)


def test_scripts_without_a_scheme(tmp_path, user_error):
    script = tmp_path / "mine.py"
    with user_error(f"there is no script {script}"):
        schemes.script_of(str(script))
    script.write_text("SCHEMES = 3\n")
    with user_error(f"{script} has no SCHEME = Scheme(...), as a scheme's script has"):
        schemes.scheme_in(script)
    with user_error("distributed_setup.py has a main loop of its own, so virtual workers cannot run it"):
        schemes.scheme_in(schemes.script_of("Distributed-Setup"))
