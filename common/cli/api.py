"""Training from Python, or from a cell of a notebook: `train` starts the same cluster as a folder's run.sh.

    from common import train

    run = train("DOWNPOUR", model, ((x_train, y_train), (x_test, y_test)), num_workers=4, window=20)
    run.model.evaluate(x_test, y_test)
    run.plot()

The processes of the cluster are new. They get data, model and functions from this one through a folder of files (`_send`),
which a scheme's script reads like any FILE.py:FUNCTION (`receive`).
"""

import contextlib
import datetime
import functools
import inspect
import io
import itertools
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from common.cli.schemes import ROOT, script_of
from common.core import Settings, TrainingFailed, UserError, plots, progress, sizes
from common.data import Rows, datasets, streams
from common.launch import warm

FUNCTIONS = {"callback", "learning_rate_schedule"}  # flags that may be functions, called with arguments
DEFAULTS: dict[str, Any] = {"epochs": 1, "batch_size": 32, "learning_rate": 0.01}  # of a scheme given as a function

# The modules in that folder: the first for flags that name a function, the second for a scheme given as a function.
_PROBLEM = '''"""Data and model of a notebook, or a program; see common/cli/api.py."""

from common.cli.api import receive


def __getattr__(name):
    return receive(__file__, name)
'''
_SCHEME = '''"""A scheme of a notebook, or a program; see common/cli/api.py."""

from common import Scheme, main
from common.cli.api import receive

function, arguments = receive(__file__, "scheme")
SCHEME = Scheme(function, **arguments)

if __name__ == "__main__":
    main(SCHEME)
'''


def train(scheme, model, data, *, run_dir=None, pace="own", verbose=True, **flags):
    """Trains a model with parameter servers and workers as processes of this machine, and returns the `Run`.

    An interruption (Ctrl-C, the stop button of a notebook) saves a checkpoint and raises
    KeyboardInterrupt; `train(..., run_dir=FOLDER, resume=True)` goes on from there.

    Args:
      scheme: the name of a folder of this project, as "DOWNPOUR"; or a scheme, a generator function of (center, local, hp), see
        Write-Your-Own-Scheme.
      model: a `keras.Model`, left unchanged, whose weights are the initial parameters; a function that returns one;
        or "linear", "dense", "mlp", "cnn", "cnn1d", "transformer".
      data: ((x_train, y_train), (x_test, y_test)), each pair optionally with sample weights as a third; a
        function that returns that, or a pair of `tf.data.Dataset`s; files, as "DIR/*.csv"; or "digits", "linear", "mnist",
        "mnist1d", "quadratic", "text". See book/guide/data-and-models.md.
      run_dir: output folder of the run; runs/SCHEME/TIME by default.
      pace: of a scheme given as a function, see `common.Scheme`.
      verbose: whether to show progress.
      **flags: the flags of the folder's run.sh, as num_workers=4; `bash DOWNPOUR/run.sh --help` lists them. `callback` and
        `learning_rate_schedule` may be functions. A callback runs in another process than this one: its output
        is shown here, its assignments have no effect here.

    Raises:
      UserError: if model, data or a flag cannot be used.
      TrainingFailed: if training fails.
    """
    name = scheme if isinstance(scheme, str) else getattr(scheme, "__name__", type(scheme).__name__)
    folder = Path(run_dir or f"runs/{name}/{datetime.datetime.now():%Y-%m-%d_%H-%M-%S.%f}").resolve()
    if _is_model(model) and any(hasattr(layer, "is_on_ps") for layer in model._flatten_layers()):
        raise UserError("the model has a table (common.Embedding), which begins on the ps: give a function that makes it")
    _check_keras(model)
    model = _SentModel(model) if _is_model(model) else model
    with tempfile.TemporaryDirectory(prefix="sent-") as sent:
        script, problem = _script_of(scheme, pace, flags, Path(sent)), Path(sent, "problem.py")
        problem.write_text(_PROBLEM)
        specs = {"data": _send(data, "data", problem), "model": _send(model, "model", problem)}
        for flag in FUNCTIONS & flags.keys():
            if callable(flags[flag]):
                specs[flag] = _send(flags[flag], flag, problem)
        given = {"run_dir": str(folder), **flags, **specs}
        arguments = [argument for flag in given.items() for argument in as_arguments(*flag)]
        names = {f"--{flag}={problem}:{flag}": f"the {flag}" for flag in specs}
        _run([sys.executable, str(script), "--launch", *arguments], script.name, names, verbose)
    return Run(folder, model, data, flags)


class Run:
    """The results of a training.

    Attributes:
      path: of its folder.
      result: contents of `result.json`: speed, samples, staleness, loss and metrics on the test set.
    """

    def __init__(self, path, model, data, flags):
        self.path, self._model, self._data, self._flags = Path(path), model, data, flags
        self.result = json.loads((self.path / "result.json").read_text())

    @functools.cached_property
    def model(self):
        """The trained `keras.Model`, compiled with the minimized loss; with its tables, if any (`common.Embedding`).

        Raises:
          UserError: if the tables were not saved.
        """
        from common.core import checkpoints_in
        from common.models import keras_model
        from common.scheme import tables

        flags = {**self._flags, "num_workers": self.result["num_workers"], "run_dir": self.path}
        dataset, loss = _loaded(self._data, flags), self._flags.get("loss")
        were_on_ps = bool(self.result.get("tables"))
        if were_on_ps and not (self.path / "model.keras").exists():
            raise UserError(f"{self.path} has no model.keras, as its tables were not saved: `common.rows_of` reads rows")
        with tables.on_ps(self.result["tables_seed"]) if were_on_ps else contextlib.nullcontext():
            if isinstance(self._model, str):
                built = keras_model.build(self._model, dataset, loss=loss, **sizes(Settings(**self._flags)))
            else:
                built = keras_model.checked(self._model(), dataset, loss)
        if were_on_ps:
            built.fill(tables.whole(checkpoints_in(self.path / "checkpoints")[-1], spec) for spec in built.tables)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the model's own optimizer has slots, which no scheme trains
            built.keras_model.load_weights(self.path / "model.keras")
        return built.keras_model

    @functools.cached_property
    def metrics(self):
        """The lines that the workers wrote during training, a list of dicts: loss, speed, staleness of each half second."""
        return plots.read_metrics(self.path)

    @property
    def history(self):
        """Loss and metrics on the test set during training: {name: list}, with "global_step" and "seconds"."""
        keys = [key for _, key, _ in progress.measures(self.metrics) if key.startswith("test_")]
        lines = list({line["global_step"]: line for line in self.metrics if all(key in line for key in keys)}.values())
        found = {"global_step": [n["global_step"] for n in lines], "seconds": [n["time"] - lines[0]["time"] for n in lines]}
        return {**found, **{key: [n[key] for n in lines] for key in keys}}

    def plot(self):
        """Draws loss, metrics and speed over time, and returns the Matplotlib figure; a notebook shows it once."""
        import matplotlib.pyplot as plt

        figure: Any = plt.figure(layout="constrained")
        plots.draw(figure, self.path)

        def show():
            from IPython.display import display

            plt.close(figure)  # or pyplot would show it again at the end of the cell
            del figure._ipython_display_
            display(figure)

        figure._ipython_display_ = show
        return figure

    def __repr__(self):
        measured = ", ".join(f"{name} {self.result[key]:{form}}" for name, key, form in progress.measures([self.result]))
        return f"{self.result['scheme']}: {measured}; {self.path}"


def _script_of(scheme, pace, flags, sent):
    """Returns the path of a scheme's script; for a scheme given as a function, writes it to the folder `sent`."""
    if isinstance(scheme, str):
        script = script_of(scheme)
        if pace != "own":
            raise UserError(f"pace={pace!r} is only for a scheme given as a function: {scheme} has its own")
        return script
    if not callable(scheme):
        raise UserError(f"a scheme is the name of a folder, such as 'HogWild', or a generator function, not {scheme!r:.60}")
    path = sent / scheme.__name__ / f"{scheme.__name__}.py"
    path.parent.mkdir()
    path.write_text(_SCHEME)
    own = {name: flags[name] for name in ("local_optimizer",) if name in flags}
    _dump((scheme, {"pace": pace, **DEFAULTS, **own}), path.parent / "scheme.pickle", "the scheme")
    return path


def as_arguments(flag, value):
    """Returns the command-line arguments that set a flag to this value."""
    if callable(value):
        raise UserError(f"{flag} must be 'FILE.py:FUNCTION', not a function of this program")
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no{flag}"]
    return [f"--{flag}={','.join(map(str, value)) if isinstance(value, (list, tuple)) else value}"]


def _send(value, flag, problem):
    """Returns a flag's command-line value; a `value` other than a string is pickled beside the file `problem`."""
    if isinstance(value, str):
        return value
    if flag == "data" and not callable(value):
        value = _Arrays(_loaded(value), problem.parent)
    if not callable(value):
        raise UserError(f"the model must be a keras.Model, a function that returns one, or a name, not {type(value).__name__}")
    _dump(value, problem.with_name(f"{flag}.pickle"), f"the {flag}")
    return f"{problem}:{flag}"


def _is_model(value):
    keras = sys.modules.get("keras")  # if there is a model, Keras has been imported
    return keras is not None and isinstance(value, keras.Model)


def _check_keras(model):
    """Raises a `UserError` if this program has changed Keras settings that a model built by a function in a task would lack.

    A `keras.Model` is sent with the settings of its layers.
    """
    keras = sys.modules.get("keras")
    if keras is None or _is_model(model):
        return
    found = {"dtype_policy": keras.config.dtype_policy().name}
    found |= {name: getattr(keras.config, name)() for name in ("floatx", "image_data_format")}
    expected = {"dtype_policy": "float32", "floatx": "float32", "image_data_format": "channels_last"}
    for name, value in found.items():
        if value != expected[name]:
            raise UserError(
                f"keras.config.{name}() is {value!r} in this program, and {expected[name]!r} in the processes that train: "
                f"call keras.config.set_{name} in the function that makes the model"
            )


class _Arrays:
    """Arrays for other processes, each in a file that all processes map, so that a machine holds it in memory once."""

    def __init__(self, dataset, folder):
        self._folder, self._count = str(folder), 0
        self._parts = [None if part is None else datasets.mapped(self._save, part) for part in dataset]

    def _save(self, array):
        if isinstance(array, Rows):
            if array.has_file:
                return array
            array = array[:]
        name = f"array-{self._count}.npy"
        try:
            np.save(Path(self._folder, name), array)
        except OSError as error:
            raise UserError(
                f"the data cannot be written to {Path(self._folder).parent} for the workers: {error.strerror or error}; name "
                "another folder in TMPDIR, or give a function that returns the data"
            ) from error
        self._count += 1
        return name

    def __call__(self):
        def load(saved):
            return saved if isinstance(saved, Rows) else np.load(Path(self._folder, saved), mmap_mode="r")

        x, y, x_test, y_test, *weights = (None if part is None else datasets.mapped(load, part) for part in self._parts)
        return (x, y, weights[0]), (x_test, y_test, weights[1])


class _SentModel:
    """A Keras model for another process: the file that Keras saves, and the user's own classes and functions.

    Raises:
      UserError: if another process would load a different model.
    """

    def __init__(self, keras_model):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "model.keras")
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # that it is not built yet, or has a lambda
                    keras_model.save(path)
            except Exception as error:
                raise _cannot_be_sent(datasets.one_line(error)) from error
            self._saved = path.read_bytes()
        _check_losses(keras_model)
        main = vars(sys.modules["__main__"])
        with zipfile.ZipFile(io.BytesIO(self._saved)) as archive:
            texts = set(_strings_in(json.loads(archive.read("config.json"))))
        found = {text: main.get(text.rpartition(">")[2]) for text in texts}  # a registered object is named PACKAGE>NAME
        self._own = {text: value for text, value in found.items() if getattr(value, "__module__", None) == "__main__"}
        self._kinds = {type(layer) for layer in keras_model._flatten_layers() if _is_own(layer)}
        _check_settings(keras_model)
        self._check_same(keras_model)

    def __call__(self):
        import keras

        with tempfile.TemporaryDirectory() as folder, _made_from_config(self._kinds), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Skipping variable loading for optimizer")  # unused by schemes
            path = Path(folder, "model.keras")
            path.write_bytes(self._saved)
            return keras.models.load_model(path, custom_objects=self._own, safe_mode=False)

    def _check_same(self, keras_model):
        try:
            again = self()
        except Exception as error:  # from Keras or from a user's class
            causes = re.findall(r"(?:xception encountered|during deserialization): (.+)", str(error))
            raise _cannot_be_sent(causes[-1] if causes else datasets.one_line(error).partition(". ")[0]) from error
        before, after = ([type(layer) for layer in model._flatten_layers()] for model in (keras_model, again))
        if before != after:
            raise _cannot_be_sent(f"Keras rebuilds it from its config with {len(after)} layers instead of {len(before)}")
        if not keras_model.built:
            return
        for old, new in itertools.zip_longest(keras_model.weights, again.weights):
            a, b = (None if v is None else v.numpy() for v in (old, new))
            if a is None or b is None or not np.array_equal(a, b, equal_nan=a.dtype.kind == "f"):
                raise _cannot_be_sent(f"Keras does not restore {(old or new).path} unchanged")


def _cannot_be_sent(why):
    return UserError(f"the model cannot be sent to the workers: {why}; give a function that returns the model")


def _is_own(value):
    return type(value).__module__.partition(".")[0] != "keras"


@contextlib.contextmanager
def _made_from_config(kinds):
    """Lets Keras rebuild objects of these classes even if their `__init__` takes no `trainable`, `dtype` or `name`.

    Keras adds these to the saved arguments of every class without a `get_config` of its own.
    """
    import keras

    def from_config(kind, config):
        taken = inspect.signature(kind.__init__).parameters
        added = {name: config[name] for name in ("trainable", "dtype", "name") if name in config and name not in taken}
        made = kind(**{name: value for name, value in config.items() if name not in added})
        if "dtype" in added:
            made.dtype_policy = keras.dtype_policies.get(added["dtype"])
        made.trainable = config.get("trainable", True)
        return made

    changed = []
    for kind in kinds:
        takes_all = any(p.kind == p.VAR_KEYWORD for p in inspect.signature(kind.__init__).parameters.values())
        is_keras = [getattr(kind, name).__module__.startswith("keras.src.") for name in ("get_config", "from_config")]
        if all(is_keras) and not takes_all and not issubclass(kind, (keras.Sequential, keras.src.models.functional.Functional)):
            kind.from_config = classmethod(from_config)
            changed.append(kind)
    try:
        yield
    finally:
        for kind in changed:
            del kind.from_config


def _check_settings(keras_model):
    """Raises a `UserError` if Keras does not save the constructor arguments of an object of a user's own class.

    Keras 3.15 saves those of a layer, but not those of a subclassed model, a loss or a metric.
    """
    import keras

    compiled = getattr(keras_model, "_compile_config", None)
    given = keras.tree.flatten([getattr(compiled, "config", {}).get(k) for k in ("loss", "metrics", "weighted_metrics")])
    measures = [each for each in given if isinstance(each, (keras.losses.Loss, keras.metrics.Metric))]
    for owner in filter(_is_own, [*keras_model._flatten_layers(), *measures]):
        if not type(owner).get_config.__module__.startswith("keras.src."):
            continue
        parameters = list(inspect.signature(type(owner).__init__).parameters.values())[1:]
        names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        saved = {"inputs", "outputs", "layers", "name", "trainable", "dtype"}
        if not isinstance(owner, keras.Model):
            saved = saved | owner.get_config().keys()
        if forgotten := [name for name in names if name not in saved]:
            raise _cannot_be_sent(
                f"Keras does not save the argument {forgotten[0]} of {type(owner).__name__}, which has no get_config of its own"
            )


def _check_losses(keras_model):
    """Raises a `UserError` if Keras does not save all of a compiled loss: in 3.15 a Huber loss loses its delta."""
    import keras

    for loss in keras.tree.flatten(getattr(keras_model, "loss", None)):
        if isinstance(loss, keras.losses.Loss) and hasattr(loss, "_fn_kwargs"):
            try:
                again = type(loss).from_config(loss.get_config())
            except Exception:  # of a class with another way of loading
                continue
            if repr(again._fn_kwargs) != repr(loss._fn_kwargs):
                raise _cannot_be_sent(f"Keras does not save the settings {loss._fn_kwargs} of its loss {type(loss).__name__}")


def _strings_in(value):
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, list):
        return [text for each in value for text in _strings_in(each)]
    return [value] if isinstance(value, str) else []


def _dump(value, path, what):
    """Pickles a value with its definitions in a notebook or a program; modules are pickled by name."""
    import cloudpickle

    try:
        pickled = cloudpickle.dumps(value)
    except Exception as error:
        raise UserError(f"{what} cannot be sent to the workers: {datasets.one_line(error)}") from error
    path.write_bytes(pickle.dumps(sys.path) + pickled)


def receive(file, name):
    """Returns the sent object: a function; for a scheme, the function and its defaults.

    Args:
      file: path of the calling module, beside the pickle.
      name: "data", "model", "scheme", or one of `FUNCTIONS`.

    Raises:
      AttributeError: if nothing of that name was sent.
    """
    path = Path(file).with_name(f"{name}.pickle")
    if not path.exists():
        raise AttributeError(name)
    with open(path, "rb") as pickled:
        sys.path += [folder for folder in pickle.load(pickled) if folder not in sys.path]  # of modules pickled by name
        return pickle.load(pickled)


def _run(command, program, names, verbose):
    """Runs a launcher to its end, and shows its output. It ends, at the latest, with this process.

    Args:
      command: its command line.
      program: prefix of its last line if it fails.
      names: {text: replacement} in its output.
      verbose: whether to show its output.

    Raises:
      UserError, TrainingFailed: by its exit status, if not 0.
      KeyboardInterrupt: if this process was interrupted; the launcher has saved a checkpoint by then.
    """
    is_notebook = "ipykernel" in sys.modules
    environ = {**os.environ, "LAUNCHER_PID": str(os.getpid()), "PYTHONUNBUFFERED": "1"}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environ = warm.kept(environ)
    has_terminal = (
        verbose and not is_notebook and sys.stdout is sys.__stdout__ and sys.stdout is not None and sys.stdout.isatty()
    )
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        launcher = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=None if has_terminal else subprocess.PIPE,
            stderr=errors,
            env=environ,
            text=True,
            errors="replace",
            start_new_session=True,  # so that Ctrl-C reaches only this process, which forwards it
        )
        is_interrupted = False
        try:
            while launcher.returncode is None:
                try:
                    for line in _shown(launcher.stdout, is_notebook):
                        if verbose:
                            print(_named(line, names), end="", flush=True)
                    launcher.wait()
                except KeyboardInterrupt:
                    is_interrupted = True
                    print()  # keeps the progress line
                    launcher.send_signal(signal.SIGINT)
        finally:
            if launcher.poll() is None:
                os.killpg(launcher.pid, signal.SIGKILL)
                launcher.wait()
        errors.seek(0)
        line = ([line for line in errors.read().splitlines() if line.strip()] or ["it printed nothing"])[-1]
    if launcher.returncode == 0:
        return
    if is_interrupted or launcher.returncode == 130:
        interrupted: Any = KeyboardInterrupt()
        interrupted._render_traceback_ = lambda: ["KeyboardInterrupt"]  # for IPython: the launcher has reported the outcome
        raise interrupted
    line = _named(line.removeprefix(f"{program}: "), names)
    raise UserError(line) if launcher.returncode == 2 else TrainingFailed(line)


def _named(line, names):
    """Returns a line of the launcher in the terms of a caller of `train`."""
    for text, name in names.items():
        line = line.replace(text, name)
    return re.sub(r"--resume --run_dir=(.+) goes on from", r"train(..., run_dir='\1', resume=True) goes on from", line)


def _shown(lines, is_notebook):
    """Yields a launcher's lines for printing; in a notebook, a progress line replaces the previous one."""
    width = 0
    for line in lines or ():
        if is_notebook and line.startswith("step "):
            yield "\r" * (width > 0) + line.rstrip("\n").ljust(width)
            width = len(line)
        else:
            yield "\n" * (width > 0) + line
            width = 0
    yield "\n" * (width > 0)


def _loaded(given, flags=None):
    """Returns the `common.data.Data` that `train` was given; for data streamed during training, some samples."""
    own = {name: (flags or {}).get(name) for name in ("label", "parse", "test_data", "seconds", "steps", "run_dir")}
    spec, number = given if isinstance(given, str) else "", (flags or {}).get("num_workers", 1)
    settings = Settings(**own, data=spec, num_workers=number, seed=0, check=False)
    try:
        if streams.is_of_datasets(given):
            raise UserError("--data=: a tf.data.Dataset cannot be sent to the workers: give a function that returns the pair")
        if spec:
            dataset = streams.load(settings)
        else:
            dataset = streams.of_function(settings, given) if callable(given) else datasets.checked(given, "")
    except UserError as error:
        said = re.sub("^--data= must give", "the data must be", str(error))
        raise UserError(re.sub("^--data=(?=:)", "the data", said)) from None
    return dataset.first if isinstance(dataset, streams.Stream) else dataset
