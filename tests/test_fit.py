"""common/cli/api.py, serialization.py: `train` sends model, data and scheme to the tasks, shows what they say, ends them."""

import contextlib
import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
import warnings

import keras
import nbclient
import nbformat
import numpy as np
import pytest
from IPython.core.interactiveshell import InteractiveShell
from runs import SECONDS, is_training, processes, read_until, wait_until_gone
from traitlets.config import Config

from common import Scheme, flags, train
from common.cli import api, schemes, serialization
from common.core.flags import TrainingFailed, UserError

X, Y = np.arange(24, dtype=np.float32).reshape(8, 3), np.arange(8) % 2
DATA = (X, Y), (X, Y)


@pytest.mark.parametrize(
    "arguments, text",
    [
        (("DOWNPUR", "mlp", DATA), "there is no scheme 'DOWNPUR'; did you mean 'DOWNPOUR'?"),
        (("zzz", "mlp", DATA), "there is no scheme 'zzz'; there are AEAMSGD, AEASGD, AGN, "),
        ((3, "mlp", DATA), "a scheme is the name of a folder, such as 'HogWild', a Scheme, or a generator function, not 3"),
        (("HogWild", 3, DATA), "the model must be a keras.Model, a function that returns one, or a name, not int"),
        (("HogWild", "mlp", ((X, Y), (X, Y[:2]))), "the data: x_test has 8 samples, y_test has 2 labels"),
        (("HogWild", "mlp", (X, Y)), "the data must be ((x_train, y_train), (x_test, y_test)) as NumPy arrays, and weights as"),
        (("HogWild", "mlp", lambda: sys.exit(1)), None),  # the function is not called here
        (
            ("HogWild", (lambda lock: lambda: lock)(threading.Lock()), DATA),
            "the model cannot be sent to the workers: TypeError",
        ),
    ],
)
def test_what_is_refused_before_anything_starts(user_error, monkeypatch, tmp_path, arguments, text):
    monkeypatch.setattr(api, "_run", lambda *_: None)
    monkeypatch.setattr(api, "Run", lambda *_: None)
    if text is None:
        train(*arguments, run_dir=tmp_path)
        return
    with user_error(text):
        train(*arguments, run_dir=tmp_path)


def test_loss_that_keras_does_not_save(user_error):
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    model.compile("sgd", keras.losses.Huber(0.5))
    with user_error("the model cannot be sent to the workers: ", "not save the settings {'delta': 0.5} of its loss Huber"):
        serialization.SentModel(model)
    for loss in keras.losses.Huber(), keras.losses.CategoricalCrossentropy(label_smoothing=0.1), "mse":
        model.compile("sgd", loss)
        assert serialization.SentModel(model)().loss is not None


class First(keras.Model):
    """A model as Keras's guides begin with: its __init__ takes nothing, not even what Keras adds to a config."""

    def __init__(self):
        super().__init__()
        self.doubles, self.dense = Times(2), keras.layers.Dense(2)

    def call(self, x):
        return self.dense(self.doubles(x))


class Times(keras.layers.Layer):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def call(self, x):
        return self.factor * x


class Forgets(keras.layers.Layer):
    def build(self, shape):
        self.factor = self.add_weight(shape=(), initializer="random_normal", name="factor")

    def call(self, x):
        return self.factor * x

    def save_own_variables(self, store):
        pass

    load_own_variables = save_own_variables


class Wide(keras.Model):
    def __init__(self, units=4, **more):
        super().__init__(**more)
        self.dense = keras.layers.Dense(units)

    def call(self, x):
        return self.dense(x)


class WideStack(keras.Sequential):
    def __init__(self, name=None):
        super().__init__([keras.layers.Dense(2)], name=name)


class Powers(keras.losses.Loss):
    def __init__(self, power=2, **more):
        super().__init__(**more)
        self.power = power

    def call(self, y, p):
        return keras.ops.mean(keras.ops.abs(y - p) ** self.power)


class PowersWithConfig(Powers):
    def get_config(self):
        return {**super().get_config(), "power": self.power}


def closure():
    def loss(y, p):
        return keras.ops.mean(y - p)

    return loss


def dense_with(loss):
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(2)])
    model.compile("sgd", loss)
    return model


OWN = First, Times, Forgets, Wide, WideStack, Powers, PowersWithConfig


@pytest.fixture
def of_a_cell(monkeypatch):
    for own in OWN:
        monkeypatch.setattr(own, "__module__", "__main__")
        monkeypatch.setattr(sys.modules["__main__"], own.__name__, own, raising=False)


@pytest.mark.parametrize("is_built", [True, False])
def test_subclasses_are_sent(of_a_cell, is_built):
    models = First(), keras.Sequential([Times(3), keras.layers.Dense(2)])
    models[1].layers[0].trainable = False
    for model in models:
        if is_built:
            model(X)
        received = serialization.SentModel(model)()
        assert received(X).shape == (8, 2)
        if is_built:
            np.testing.assert_allclose(received(X), model(X), rtol=1e-6)
        before, after = (next(layer for layer in each._flatten_layers() if type(layer) is Times) for each in (model, received))
        assert (before.trainable, before.factor) == (after.trainable, after.factor) and "from_config" not in vars(Times)
    assert serialization.SentModel(dense_with(PowersWithConfig(3)))().loss.power == 3
    serialization.SentModel(dense_with(lambda y, p: keras.ops.mean(y - p)))()


@pytest.mark.parametrize(
    "make, text",
    [
        (lambda: Wide(6), "Keras does not save the argument units of Wide, which has no get_config of its own"),
        (lambda: keras.Sequential([keras.Input([3]), Wide(6)]), "Keras does not save the argument units of Wide, which has"),
        (lambda: dense_with(Powers(3)), "Keras does not save the argument power of Powers, which has"),
        (WideStack, "Keras rebuilds it from its config with 3 layers instead of 2"),
        (lambda: dense_with(closure()), "TypeError: Could not locate function 'loss'"),
        (lambda: keras.Sequential([keras.Input([3]), Forgets(name="f")], name="m"), "Keras does not restore m/f/factor"),
    ],
)
def test_models_that_would_come_as_others(of_a_cell, user_error, make, text):
    """In Keras 3.15 the first of them would come with four units."""
    with user_error(f"the model cannot be sent to the workers: {text}", "; give a function that returns the model"):
        serialization.SentModel(make())


def test_pace_is_for_a_function(user_error):
    with user_error("pace='ring' is only for a scheme given as a function: HogWild has its own"):
        train("HogWild", "mlp", DATA, pace="ring")
    with user_error("a scheme is the name of a folder, such as 'HogWild', a Scheme, or a generator function, not 3"):
        train(3, "mlp", DATA, pace="ring")


@pytest.mark.parametrize(
    "value, arguments",
    [
        (None, []),
        (True, ["--f"]),
        (False, ["--nof"]),
        (3, ["--f=3"]),
        (0.5, ["--f=0.5"]),
        ([0, 0.5], ["--f=0,0.5"]),
        ("a", ["--f=a"]),
    ],
)
def test_arguments_of_a_flag(value, arguments):
    assert api.as_arguments({"f": value}) == arguments


def test_what_the_launcher_says_becomes_what_train_says():
    line = "--data=/tmp/a/problem.py:data: stopped; --resume --run_dir=runs/a b goes on from there\n"
    said = api._named(line, {"--data=/tmp/a/problem.py:data": "the data"})
    assert said == "the data: stopped; train(..., run_dir='runs/a b', resume=True) goes on from there\n"


def test_every_scheme_has_a_name():
    scripts = schemes.ROOT.glob("*/run.sh")
    names = {path.parent.name for path in scripts if re.search("^exec .* --launch", path.read_text(), re.M)}
    assert len(names) > 14
    for name in names:
        assert api._script_of(name, "own", {}, None).parent.name == name


def test_a_scheme_is_sent_with_its_flags(tmp_path):
    def rule(center, local, hp):
        yield

    sent = Scheme(rule, pace="together", flags=[flags.number("beta", 0.5, "of mine", least=0)], window=4)
    script = api._script_of(sent, "own", {}, tmp_path)
    found = schemes.scheme_in(script)
    assert (script.name, found.name, found.pace) == ("rule.py", "rule", "together")
    assert flags.parse(found.flag_values(), ["--beta=2"], script.name).beta == 2


def test_arrays_are_mapped_not_copied(tmp_path):
    x = {"a": X, "b": np.arange(8, dtype=np.uint8)}
    arrays = serialization.SentArrays(serialization.loaded(((x, Y, np.ones(8)), (x, Y, np.ones(8)))), tmp_path)
    x_train, y_train, weights = arrays().train
    assert all(isinstance(array, np.memmap) for array in (*x_train.values(), y_train, weights))
    np.testing.assert_array_equal(x_train["a"], X)
    assert x_train["b"].dtype == np.uint8


class Scale(keras.layers.Layer):
    """A layer as one is defined in a cell."""

    def build(self, shape):
        self.factor = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x):
        return x * self.factor


def own_loss(y, p):
    return keras.ops.mean(keras.ops.abs(p - keras.ops.cast(y[:, None], "float32")), axis=-1)


def test_model_with_a_layer_and_a_loss_of_a_cell(monkeypatch):
    """Their module is the notebook, which no other process can import."""
    main = sys.modules["__main__"]
    for own in Scale, own_loss:
        monkeypatch.setattr(own, "__module__", "__main__")
        monkeypatch.setattr(main, own.__name__, own, raising=False)
    model = keras.Sequential([keras.Input([3]), Scale(), keras.layers.Dense(2)])
    model.compile("adam", own_loss)
    model.layers[0].factor.assign([1, 2, 3])
    sent = serialization.SentModel(model)
    for own in Scale, own_loss:
        monkeypatch.delattr(main, own.__name__)
    received = sent()
    np.testing.assert_allclose(received(X), model(X), rtol=1e-6)
    assert received.loss is own_loss


# --- With real processes -----------------------------------------------------------------------------------------------

PROGRAM = """
import sys
import keras
import nbclient
import nbformat
import numpy as np
from common import tf, train
from common.core.flags import TrainingFailed, UserError

rng = np.random.default_rng(0)
x = rng.random([600, 6]).astype("float32")
y = (x @ rng.normal(size=(6, 3))).argmax(axis=1)
data = (x[:500], y[:500]), (x[500:], y[500:])


class Scale(keras.layers.Layer):
    def build(self, shape):
        self.factor = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x):
        return x * self.factor


def own_loss(y, p):
    return keras.losses.sparse_categorical_crossentropy(y, p, from_logits=True)


def build():
    model = keras.Sequential([keras.Input([6]), Scale(), keras.layers.Dense(16, "relu"), keras.layers.Dense(3)])
    model.compile("adam", own_loss, metrics=["accuracy"])
    return model


def mine(center, local, hp):
    yield local.pull(center)
    yield local.train(hp.window, tf.train.GradientDescentOptimizer(hp.learning_rate))
    yield center.push(tf.train.GradientDescentOptimizer(hp.learning_rate), local.gradient)

"""


def program(tmp_path, code, beginning=(), **options):
    """Starts a program that defines a model, data and a scheme, and then does what `code` says.

    Its command line is `beginning`, the interpreter and a file.
    """
    file = tmp_path / "program.py"
    file.write_text(PROGRAM + code.replace("RUN", repr(str(tmp_path / "run"))))
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    return subprocess.Popen(
        [*beginning, sys.executable, file],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environ,
        **options,
    )


@pytest.mark.cluster
def test_model_and_data_of_a_program(tmp_path):
    """The saved model is the one that was evaluated, the given one is as before. It is process 1, as in a container."""
    code = """
import os
assert os.getpid() == 1
model = build()
before = model.get_weights()
run = train("DOWNPOUR", model, data, num_workers=2, window=4, epochs=40, run_dir=RUN)
assert all((a == b).all() for a, b in zip(before, model.get_weights()))
loss, accuracy = run.model.evaluate(*data[1], verbose=0)
np.testing.assert_allclose([loss, accuracy], [run.result["test_loss"], run.result["test_accuracy"]], rtol=1e-4)
assert accuracy > 0.9 and run.history["test_loss"][-1] == run.result["test_loss"]
run.plot().savefig(RUN + "/mine.png")
try:
    train("HogWild", "mlp", data, num_wokers=3)
except UserError as error:
    print("refused:", error)
print("ended")
"""
    process = program(tmp_path, code, ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"])
    output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0 and output.endswith("ended\n"), output
    assert "minimizes own loss, by Adagrad on the ps, Adagrad on the workers (the model's own Adam is not used)" in output
    assert "refused: unknown flag --num_wokers; did you mean --num_workers?" in output


@pytest.mark.parametrize(
    ("name", "value"), [("dtype_policy", "mixed_bfloat16"), ("floatx", "float64"), ("image_data_format", "channels_first")]
)
@pytest.mark.parametrize("model", ["mlp", lambda: None])
def test_settings_of_keras_that_the_tasks_would_not_have_are_refused(user_error, monkeypatch, name, value, model):
    change, before = getattr(keras.config, f"set_{name}"), getattr(keras.config, name)()
    with contextlib.ExitStack() as stack:
        stack.callback(change, before)
        change(value)
        with user_error(f"keras.config.{name}() is '{value}' in this program", f"call keras.config.set_{name} in the function"):
            train("HogWild", model, "digits")
        for replaced in "_run", "Run":
            monkeypatch.setattr(api, replaced, lambda *_: None)
        train("HogWild", keras.Sequential([keras.layers.Dense(1)]), "digits")  # is sent with its own


@pytest.mark.cluster
def test_scheme_of_a_program(tmp_path):
    """First functions in place of a model and arrays; then ways in which it fails."""
    code = """
end, functions = [], {"learning_rate_schedule": lambda step, total: 1 - 0.5 * step / total}
def callback(step, metrics):
    end.append(step)
    print("called", len(end), metrics["test_loss"] if "test_loss" in metrics else 1 / 0)
functions["callback"] = callback
def model():
    import warnings
    for _ in range(2):
        warnings.warn("this model is small")
    return keras.Sequential([keras.layers.Dense(3)])
run = train(mine, model, lambda: data, epochs=20, learning_rate=0.5, run_dir=RUN, **functions)
assert not end
print("ended with", run.result["test_loss"])
assert run.result["scheme"] == "mine" and run.result["test_accuracy"] > 0.8, run.result
try:
    train(mine, lambda: keras.Sequential([keras.layers.Dense(3)]), data, learning_rate=1e38, epochs=20)
except TrainingFailed as error:
    print("failed:", error)
try:
    train(mine, lambda: 1 / 0, data)
except UserError as error:
    print("refused:", error)
"""
    process = program(tmp_path, code, cwd=tmp_path)
    output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, output
    assert "by SGD on the ps, SGD on the workers, learning rate by <lambda> over 313 updates;" in output
    assert re.search(r"called (\d+) (\S+)\n(.*\n)*ended with \2\n", output), output
    assert len(re.findall(r"^UserWarning: this model is small \(.*, line \d+\)$", output, re.M)) == 1
    assert "the callback raised ZeroDivisionError: division by zero; training goes on" in output
    assert re.search(r"failed: worker \d: the loss is (nan|inf) at step", output), output
    assert "refused: the model: model() raised ZeroDivisionError: division by zero" in output


@pytest.mark.cluster
def test_interruption_leaves_no_process(tmp_path):
    """The stop button of a notebook saves; the end of a kernel, here in its next run, ends all that it has started."""
    code = """
for name in "first", "second":
    try:
        train("HogWild", build, data, epochs=1_000_000, rounds_per_call=2, run_dir=f"{RUN}/{name}")
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""
    with program(tmp_path, code, start_new_session=True) as process:
        for name, number in ("first", signal.SIGINT), ("second", signal.SIGKILL):
            read_until(process, is_training)
            started = processes(tmp_path / "run" / name)
            assert len(started) >= 4  # the launcher, ps, workers
            process.send_signal(number)
            if number == signal.SIGINT:
                read_until(process, lambda line: "stopped; a checkpoint is saved" in line)
                read_until(process, lambda line: line == "interrupted\n")
            assert wait_until_gone(started) == []
        assert process.wait(SECONDS) == -signal.SIGKILL


def test_model_that_is_not_built_is_sent_without_a_warning():
    """It is built where its samples are known."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sent = serialization.SentModel(keras.Sequential([keras.layers.Dense(2)]))
    assert not sent().built


@pytest.mark.parametrize("kind", [UserError, TrainingFailed])
def test_a_notebook_shows_one_line(capsys, kind):
    """In place of a stack trace."""
    shell = InteractiveShell(config=Config({"HistoryManager": {"enabled": False}}), user_ns={"kind": kind})
    capsys.readouterr()
    shell.run_cell("raise kind('what was wrong')")
    assert capsys.readouterr().out.strip() == f"{kind.__name__}: what was wrong"


CELLS = """
from common.cli.api import Run
run = Run(RUN, None, None, {})
run.plot()
---
run.plot();
---
figure = run.plot()
figure.set_size_inches(9, 3)
---
figure
"""


@pytest.mark.slow
def test_a_notebook_shows_a_plot_once(tmp_path):
    """Also where it is not what the cell returns; and again in a later cell that returns it."""
    (tmp_path / "result.json").write_text("{}")
    (tmp_path / "metrics").mkdir()
    line = {"time": 1.0, "worker": 0, "global_step": 1, "loss": 0.5, "test_loss": 0.5, "samples_per_second": 9.0}
    (tmp_path / "metrics" / "worker-0.jsonl").write_text(json.dumps(line) + "\n")
    cells = [nbformat.v4.new_code_cell(text) for text in CELLS.replace("RUN", repr(str(tmp_path))).split("---\n")]
    nbclient.NotebookClient(notebook := nbformat.v4.new_notebook(cells=cells), timeout=SECONDS).execute()
    for cell in notebook.cells:
        assert ["image/png" in output.get("data", {}) for output in cell.outputs] == [True], cell.source


def test_data_for_which_there_is_no_place(user_error, monkeypatch):
    def save(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(np, "save", save)
    with user_error(
        "the data cannot be written to ", " for the workers: No space left on device; name another folder in TMPDIR"
    ):
        train("HogWild", "mlp", DATA)
