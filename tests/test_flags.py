"""common/core/flags.py: every flag, its bounds, and one clear line for every mistake."""

import subprocess
import sys

import pytest

from common.core import flags


def test_defaults_are_those_of_the_contract(parse):
    settings = parse()
    assert (settings.num_ps, settings.num_workers) == (1, 2)
    assert (settings.data, settings.model) == ("digits", "mlp")
    assert (settings.steps, settings.seconds, settings.run_dir) == (None, None, None)
    assert (settings.window, settings.seed) == (1, 0)
    assert (settings.resume, settings.launch, settings.check) == (False, False, False)
    assert (settings.checkpoint_secs, settings.max_restarts) == (5, 3)
    assert (settings.job_name, settings.task_index, settings.ps_hosts, settings.worker_hosts) == (None,) * 4


def test_scheme_has_defaults_of_its_own(parse):
    own = dict(epochs=7, batch_size=16, learning_rate=0.5, window=4, num_workers=3, seed=9, data="linear", model="linear")
    settings = parse(**own)
    assert {name: getattr(settings, name) for name in own} == own
    assert parse("--window=2", "--model=cnn", **own).window == 2


def test_values_have_their_types(parse):
    settings = parse("--steps=20", "--seconds=1.5", "--epochs=2", "--resume", "--nolaunch", "--ps_hosts=a:1,b:2")
    assert (settings.steps, settings.seconds, settings.epochs) == (20, 1.5, 2)
    assert isinstance(settings.steps, int) and isinstance(settings.epochs, float)
    assert (settings.resume, settings.launch) == (True, False)
    assert settings.ps_hosts == ["a:1", "b:2"]


def test_value_may_be_an_argument_of_its_own(parse):
    assert parse("--window", "5").window == 5


def test_only_our_flags_are_settings(parse):
    """Absl has flags of its own (--verbosity, --flagfile); a scheme's script does not see them."""
    settings = vars(parse())
    assert "window" in settings
    assert not {"verbosity", "flagfile", "logtostderr", "only_check_args"} & set(settings)


def test_flags_that_the_script_defines(parse, user_error):
    own = [flags.integer("n_push", 5, "steps between pushes", least=1), flags.number("alpha", 0.5, "elasticity", above=0)]

    settings = parse("--n_push=3", own=own)
    assert (settings.n_push, settings.alpha) == (3, 0.5)
    with user_error("--alpha must be greater than 0, not 0"):
        parse("--alpha=0", own=own)


def test_bounds_of_a_number(parse, user_error):
    own = [flags.number("momentum", 0.9, "of the past", least=0, below=1)]

    assert parse("--momentum=0.99", own=own).momentum == 0.99
    with user_error("--momentum must be less than 1, not 1"):
        parse("--momentum=1", own=own)
    with user_error("--momentum must be at least 0, not -0.1"):
        parse("--momentum=-0.1", own=own)


def test_numbers_separated_by_commas(parse, user_error):
    own = [flags.numbers("rates", "0.1,2", "step size of each worker", above=0)]

    assert parse(own=own).rates == [0.1, 2.0]
    assert parse("--rates=3", own=own).rates == [3.0]
    assert parse("--delays=0,0.5,20").delays == [0.0, 0.5, 20.0]
    for wrong, text in ("1,x", "must be a number, not 'x'"), ("1,", "must be a number"), ("1,0", "must be greater than 0"):
        with user_error(f"--rates {text}"):
            parse(f"--rates={wrong}", own=own)
    with user_error("--delays must be at least 0, not -1"):
        parse("--delays=0,-1")


def test_a_number_that_may_be_infinite(parse, user_error):
    own = [flags.number("staleness", 10, "steps ahead", least=0, finite=False)]

    assert parse("--staleness=inf", own=own).staleness == float("inf")
    for wrong in "-1", "nan", "-inf":
        with user_error(f"--staleness must be at least 0, not {wrong}"):
            parse(f"--staleness={wrong}", own=own)


def test_another_name_of_a_flag(parse, user_error):
    """Both names have the same value; the alias belongs to that script alone."""

    own = [flags.alias("n_push", "window")]

    assert parse("--n_push=3", own=own).window == 3
    assert parse("--window=4", own=own).n_push == 4
    with user_error("--n_push must be at least 1, not 0"):  # the flag that was given, not the one that it stands for
        parse("--n_push=0", own=own)
    with user_error("--window must be at least 1, not 0"):
        parse("--n_push=2", "--window=0", own=own)
    with user_error("--n_push must be a whole number, not 'x'"):
        parse("--n_push=x", own=own)
    with user_error("unknown flag --n_push"):
        parse("--n_push=3")


def test_flag_that_is_not_there(parse, user_error):
    """A scheme that asks for a flag which its script does not define."""
    with user_error("there is no flag --beta; a scheme's own flags are in Scheme(..., flags=[...])"):
        print(parse().beta)
    assert getattr(parse(), "beta", 1) == 1


def test_flags_that_only_some_schemes_have(parse, user_error):
    settings = parse("--local_optimizer=adam", local_optimizer="sgd")
    assert (settings.local_optimizer, settings.local_learning_rate) == ("adam", None)
    with user_error("--local_optimizer=lion", "<sgd|momentum|adagrad|adam>"):
        parse("--local_optimizer=lion", local_optimizer="sgd")
    for flag in "local_optimizer", "local_learning_rate", "local_momentum":
        with user_error(f"unknown flag --{flag}"):
            parse(f"--{flag}=1")


AT_LEAST = {
    "num_ps": 1,
    "num_workers": 1,
    "steps": 1,
    "batch_size": 1,
    "window": 1,
    "rounds_per_call": 1,
    "seed": 0,
    "max_restarts": 0,
    "task_index": 0,
}
ABOVE_0 = ["epochs", "seconds", "learning_rate", "checkpoint_secs", "evaluation_secs"]


@pytest.mark.parametrize("name, least", AT_LEAST.items())
def test_whole_numbers(parse, user_error, name, least):
    assert getattr(parse(f"--{name}={least}"), name) == least
    assert getattr(parse(f"--{name}=12"), name) == 12
    for low in least - 1, -7:
        with user_error(f"--{name} must be at least {least}, not {low}"):
            parse(f"--{name}={low}")
    for bad in "abc", "1.5", "", "1e3", "nan", "0x10":
        with user_error(f"--{name} must be a whole number, not {bad!r}"):
            parse(f"--{name}={bad}")


@pytest.mark.parametrize("name", ABOVE_0)
def test_real_numbers(parse, user_error, name):
    assert getattr(parse(f"--{name}=1e-3"), name) == 0.001
    for low in "0", "-1", "0.0", "nan", "-inf":
        with user_error(f"--{name} must be greater than 0, not {low}"):
            parse(f"--{name}={low}")
    with user_error(f"--{name} must be finite, not inf"):
        parse(f"--{name}=inf")
    for bad in "abc", "", "1,5":
        with user_error(f"--{name} must be a number, not {bad!r}"):
            parse(f"--{name}={bad}")


AT_MOST = {
    "epochs": "4294967296",
    "window": "2147483647",
    "rounds_per_call": "100000",
    **dict.fromkeys(["steps", "batch_size", "num_ps", "num_workers", "max_restarts", "task_index"], "9223372036854775807"),
    **dict.fromkeys(["seconds", "checkpoint_secs", "evaluation_secs", "hang_secs"], "9.22337e+09"),
    "delays": "9.22337e+12",
    "learning_rate": "3.40282e+38",
}


@pytest.mark.parametrize("name, most", AT_MOST.items())
def test_numbers_too_large_for_what_counts_them(parse, user_error, name, most):
    """A step, a sample, a moment; or for a float32. Nothing of this may overflow when training has begun."""
    whole = "e" not in most
    assert getattr(parse(f"--{name}={most if whole else float(most) * 0.999}"), name)
    too_high = [str(int(most) + 1), "1" + 30 * "0"] if whole and name != "epochs" else ["1e39", "1e308"]
    for high in too_high:
        with user_error(f"--{name} must be at most {most}, not {high}"):
            parse(f"--{name}={high}")


@pytest.mark.parametrize("name", ["learning_rate", "epochs", "delays"])
def test_numbers_that_a_float32_takes_for_zero(parse, user_error, name):
    assert parse(f"--{name}=1e-44")
    with user_error(f"--{name} must be at least 1.4013e-45, or it is 0 as a float32, not 1e-300"):
        parse(f"--{name}=1e-300")


@pytest.mark.parametrize(
    "argument",
    ["--flagfile=flags", "-flagfile=flags", "--undefok=windw", "--verbosity=1", "-v=1", "--nologtostderr", "--only_check_args"],
)
def test_absls_own_flags_are_unknown(parse, user_error, argument):
    """Whatever has been imported: some are defined with absl.logging, which tensorflow imports."""
    import absl.logging  # noqa: F401

    with user_error(f"unknown flag --{argument.lstrip('-').partition('=')[0]} (--help lists all)"):
        parse("--window=2", argument)


def test_a_flagfile_is_not_read(parse, user_error, tmp_path):
    (tmp_path / "flags").write_text("--window=3\n--flagfile=missing\n")
    with user_error("unknown flag --flagfile"):
        parse("--flagfile", str(tmp_path / "flags"))


@pytest.mark.parametrize("seed", [2**32, 2**63])
def test_seed_that_no_generator_takes(parse, user_error, seed):
    """NumPy's and Keras' global seeds are 32 bits."""
    with user_error("--seed"):
        parse(f"--seed={seed}")


@pytest.mark.parametrize(
    "unknown, meant", [("windw", "window"), ("num_worker", "num_workers"), ("learning-rate", "learning_rate"), ("zzz", None)]
)
def test_unknown_flag(parse, user_error, unknown, meant):
    near = f"; did you mean --{meant}?" if meant else ""
    with user_error(f"unknown flag --{unknown}{near} (--help lists all)"):
        parse(f"--{unknown}=3")


@pytest.mark.parametrize(
    "argument, texts",
    [
        ("--job_name=boss", ["job_name", "boss", "ps|worker"]),
        ("--resume=maybe", ["resume", "maybe"]),
        ("--window", ["window"]),
        ("--data", ["data"]),
        ("train", ["unexpected argument 'train'", "--name=value"]),
        ("-", ["unexpected argument '-'"]),
    ],
)
def test_other_mistakes(parse, user_error, argument, texts):
    with user_error(*texts):
        parse(argument)


def test_help_lists_every_flag_with_its_default(parse, capsys):
    with pytest.raises(SystemExit) as info:
        parse("--help", epochs=60.0)
    assert info.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: scheme.py")
    for name in [*AT_LEAST, *ABOVE_0, "data", "model", "run_dir", "resume", "job_name", "ps_hosts", "worker_hosts"]:
        assert f"  --{name} " in out
    assert "passes over the training set, all workers together (default: 60.0)" in out
    assert "--verbosity" not in out


def test_present_knows_what_was_given():
    values = flags.table(*flags.of_every_scheme({}))
    flags.parse(values, ["--num_ps=1"], "scheme.py")
    assert flags.present(values, "num_ps", "num_workers") == ["num_ps"]


@pytest.mark.slow
def test_flags_import_no_tensorflow():
    """The launcher does not import it either: that takes seconds."""
    code = "import sys, common.cli.program, common.launch.launcher; sys.exit('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
