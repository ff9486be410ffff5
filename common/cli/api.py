"""Training from Python, or from a cell of a notebook: `train` starts the same cluster as a folder's run.sh.

    from common import train

    run = train("DOWNPOUR", model, ((x_train, y_train), (x_test, y_test)), num_workers=4, window=20)
    run.model.evaluate(x_test, y_test)
    run.plot()

The processes of the cluster are new. They get data, model and functions from this one through a folder of files
(`common.cli.serialization`), which a scheme's script reads like any FILE.py:FUNCTION.
"""

import contextlib
import datetime
import functools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

from common.cli.schemes import ROOT, script_of
from common.cli.serialization import PROBLEM, SCHEME, SentModel, check_keras, dump, loaded, send
from common.core import Settings, TrainingFailed, UserError, model_options, plots, progress, run_folder
from common.launch import warm
from common.scheme import Scheme

FUNCTIONS = {"callback", "groups", "learning_rate_schedule"}  # flags that may be functions, called with arguments
DEFAULTS: dict[str, Any] = {"epochs": 1, "batch_size": 32, "learning_rate": 0.01}  # of a scheme given as a function


def train(scheme, model, data, *, run_dir=None, pace="own", verbose=True, **flags):
    """Trains a model with parameter servers and workers as processes of this machine, and returns the `Run`.

    An interruption (Ctrl-C, the stop button of a notebook) saves a checkpoint and raises
    KeyboardInterrupt; `train(..., run_dir=FOLDER, resume=True)` goes on from there.

    Args:
      scheme: the name of a folder of this project, as "DOWNPOUR"; a `Scheme`; or a generator function of (center, local, hp),
        see Write-Your-Own-Scheme.
      model: a `keras.Model`, left unchanged, whose weights are the initial parameters; a function that returns one;
        "FILE.keras"; or "linear", "dense", "mlp", "cnn", "cnn1d", "transformer".
      data: ((x_train, y_train), (x_test, y_test)), each pair optionally with sample weights as a third, and optionally a
        validation set between the two; x may be arrays, or data frames, whose columns go to the model's inputs by name; a
        function that returns that, or a pair of `tf.data.Dataset`s; files, as "DIR/*.csv"; or "digits", "linear", "mnist",
        "mnist1d", "quadratic", "text". See book/guide/data-and-models.md.
      run_dir: output folder of the run; runs/SCHEME/TIME by default.
      pace: of a scheme given as a function, see `common.Scheme`.
      verbose: whether to show progress.
      **flags: the flags of the folder's run.sh, as num_workers=4; `bash DOWNPOUR/run.sh --help` lists them. `callback`,
        `groups` and `learning_rate_schedule` may be functions. A callback runs in another process than this one: its output
        is shown here, its assignments have no effect here.

    Raises:
      UserError: if model, data or a flag cannot be used.
      TrainingFailed: if training fails.
    """
    name = scheme if isinstance(scheme, str) else getattr(scheme, "name", getattr(scheme, "__name__", type(scheme).__name__))
    run_folder.check_no_url(run_dir)
    folder = Path(run_dir or f"runs/{name}/{datetime.datetime.now():%Y-%m-%d_%H-%M-%S.%f}").resolve()
    keras = sys.modules.get("keras")  # if there is a model, Keras has been imported
    if keras and isinstance(model, keras.Model):
        if any(hasattr(layer, "is_on_ps") for layer in model._flatten_layers()):
            raise UserError("the model has a table (common.Embedding), which begins on the ps: give a function that makes it")
        model = SentModel(model)  # with the settings of its layers
    elif keras:
        check_keras()
    with tempfile.TemporaryDirectory(prefix="sent-") as sent:
        script, problem = _script_of(scheme, pace, flags, Path(sent)), Path(sent, "problem.py")
        problem.write_text(PROBLEM)
        given = {"data": data, "model": model} | {flag: flags[flag] for flag in FUNCTIONS if callable(flags.get(flag))}
        specs = {flag: send(value, flag, problem) for flag, value in given.items()}
        arguments = as_arguments({"run_dir": str(folder), **flags, **specs})
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
        """The trained `keras.Model`, compiled with the minimized loss; with its tables (`common.Embedding`), if saved."""
        from common.core import checkpoints_in
        from common.models import keras_model
        from common.scheme import saved_tables, tables

        flags = {**self._flags, "num_workers": self.result["num_workers"], "run_dir": self.path}
        dataset, loss = loaded(self._data, flags), self._flags.get("loss")
        were_on_ps = bool(self.result.get("tables"))
        if were_on_ps and not (self.path / "model.keras").exists():
            raise UserError(f"{self.path} has no model.keras, as its tables were not saved: `common.rows_of` reads rows")
        with tables.on_ps(self.result["tables_seed"]) if were_on_ps else contextlib.nullcontext():
            if isinstance(self._model, str):
                built = keras_model.build(self._model, dataset, loss=loss, **model_options(Settings(**self._flags)))
            else:
                built = keras_model.checked(self._model(), dataset, loss)
        if were_on_ps:
            built.fill(saved_tables.whole(checkpoints_in(self.path / "checkpoints")[-1], spec) for spec in built.tables)
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
    """Returns the path of a scheme's script; for a `Scheme` or a function, writes it to the folder `sent`."""
    if callable(scheme):
        own = {name: flags[name] for name in ("local_optimizer",) if name in flags}
        scheme, pace = Scheme(scheme, pace=pace, **DEFAULTS, **own), "own"
    if not isinstance(scheme, (str, Scheme)):
        what = "the name of a folder, such as 'HogWild', a Scheme, or a generator function"
        raise UserError(f"a scheme is {what}, not {scheme!r:.60}")
    if pace != "own":
        name = getattr(scheme, "name", scheme)
        raise UserError(f"pace={pace!r} is only for a scheme given as a function: {name} has its own")
    if isinstance(scheme, str):
        return script_of(scheme)
    path = sent / scheme.name / f"{scheme.name}.py"
    path.parent.mkdir()
    path.write_text(SCHEME)
    dump(scheme, path.parent / "scheme.pickle", "the scheme")
    return path


def as_arguments(flags):
    """Returns the command-line arguments that set flags to these values, {name: value}; None leaves a flag out."""
    arguments = []
    for flag, value in flags.items():
        if callable(value):
            raise UserError(f"{flag} must be 'FILE.py:FUNCTION', not a function of this program")
        if isinstance(value, bool):
            arguments.append(f"--{flag}" if value else f"--no{flag}")
        elif value is not None:
            arguments.append(f"--{flag}={','.join(map(str, value)) if isinstance(value, (list, tuple)) else value}")
    return arguments


def _run(command, program, names, verbose):
    """Runs a launcher to its end, and shows its output. It ends, at the latest, with this process.

    Its last line, if it fails, begins with `program`. `names` are {text: replacement} in its output.

    Raises:
      UserError, TrainingFailed: by its exit status, if not 0.
      KeyboardInterrupt: if this process was interrupted; the launcher has saved a checkpoint by then.
    """
    is_notebook = "ipykernel" in sys.modules
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environ = warm.kept({**os.environ, "LAUNCHER_PID": str(os.getpid()), "PYTHONUNBUFFERED": "1", "PYTHONPATH": path})
    has_terminal = verbose and not is_notebook and sys.stdout is sys.__stdout__ and os.isatty(1)
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
