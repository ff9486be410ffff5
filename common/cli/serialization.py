"""Serialization of data, model and functions of this process for the processes that train, through a folder of files."""

import contextlib
import inspect
import io
import itertools
import json
import pickle
import re
import sys
import tempfile
import warnings
import zipfile
from pathlib import Path

import numpy as np

from common.core import Settings, UserError
from common.data import Rows, Stream, datasets, mapped, one_line, sources

# The modules in the folder of files: the first for flags that name a function, the second for a scheme given as a function.
PROBLEM = """from common.cli.serialization import receive


def __getattr__(name):
    return receive(__file__, name)
"""
SCHEME = """from common import main
from common.cli.serialization import receive

SCHEME = receive(__file__, "scheme")

if __name__ == "__main__":
    main(SCHEME)
"""


def send(value, flag, problem):
    """Returns a flag's command-line value; a `value` other than a string is pickled beside the file `problem`."""
    if isinstance(value, str):
        return value
    if flag == "data" and not callable(value):
        value = SentArrays(loaded(value), problem.parent)
    if not callable(value):
        raise UserError(f"the model must be a keras.Model, a function that returns one, or a name, not {type(value).__name__}")
    dump(value, problem.with_name(f"{flag}.pickle"), f"the {flag}")
    return f"{problem}:{flag}"


def dump(value, path, what):
    """Pickles a value with its definitions in a notebook or a program; modules are pickled by name."""
    import cloudpickle

    try:
        pickled = cloudpickle.dumps(value)
    except Exception as error:
        raise UserError(f"{what} cannot be sent to the workers: {one_line(error)}") from error
    path.write_bytes(pickle.dumps(sys.path) + pickled)


def receive(file, name):
    """Returns what was sent beside the module `file`: "data", "model", "scheme", or one of `common.cli.api.FUNCTIONS`."""
    path = Path(file).with_name(f"{name}.pickle")
    if not path.exists():
        raise AttributeError(name)
    with open(path, "rb") as pickled:
        sys.path += [folder for folder in pickle.load(pickled) if folder not in sys.path]  # of modules pickled by name
        return pickle.load(pickled)


def loaded(given, flags=None):
    """Returns the `common.data.Data` that `train` was given; for data streamed during training, some samples."""
    own = dict.fromkeys(("label", "parse", "test_data", "missing", "hash_strings", "data_cache", "stream", "max_workers"))
    own |= dict.fromkeys(("seconds", "steps", "learning_rate_schedule", "validation", "run_dir"))
    own |= {name: value for name, value in (flags or {}).items() if name in own}
    spec, number = given if isinstance(given, str) else "", (flags or {}).get("num_workers", 1)
    settings = Settings(**{**own, "max_workers": None}, data=spec, num_workers=number, seed=0, check=False)
    try:
        if sources.is_of_datasets(given):
            raise UserError("--data=: a tf.data.Dataset cannot be sent to the workers: give a function that returns the pair")
        if spec:
            dataset = sources.load(settings)
        else:
            dataset = sources.of_function(settings, given) if callable(given) else datasets.checked(given, "")
    except UserError as error:
        said = re.sub("^--data= must give", "the data must be", str(error))
        raise UserError(re.sub("^--data=(?=:)", "the data", said)) from None
    return dataset.first if isinstance(dataset, Stream) else dataset


def check_keras():
    """Raises a `UserError` if this program has changed Keras settings that a model built by a function in a task would lack."""
    import keras

    for name, expected in ("dtype_policy", "float32"), ("floatx", "float32"), ("image_data_format", "channels_last"):
        found = getattr(keras.config, name)()
        found = getattr(found, "name", found)  # of a policy
        if found != expected:
            raise UserError(
                f"keras.config.{name}() is {found!r} in this program, and {expected!r} in the processes that train: "
                f"call keras.config.set_{name} in the function that makes the model"
            )


class SentModel:
    """A Keras model for another process: the file that Keras saves, and the user's own classes and functions.

    Raises a `UserError` if another process would load a different model.
    """

    def __init__(self, keras_model):
        import keras

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "model.keras")
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # that it is not built yet, or has a lambda
                    keras_model.save(path)
            except Exception as error:
                raise _cannot_be_sent(one_line(error)) from error
            self._saved = path.read_bytes()
        main = vars(sys.modules["__main__"])
        with zipfile.ZipFile(io.BytesIO(self._saved)) as archive:
            texts = [text for text in keras.tree.flatten(json.loads(archive.read("config.json"))) if isinstance(text, str)]
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
            raise _cannot_be_sent(causes[-1] if causes else one_line(error).partition(". ")[0]) from error
        before, after = ([type(layer) for layer in model._flatten_layers()] for model in (keras_model, again))
        if before != after:
            raise _cannot_be_sent(f"Keras rebuilds it from its config with {len(after)} layers instead of {len(before)}")
        if not keras_model.built:
            return
        for old, new in itertools.zip_longest(keras_model.weights, again.weights):
            a, b = (None if v is None else v.numpy() for v in (old, new))
            if a is None or b is None or not np.array_equal(a, b, equal_nan=a.dtype.kind == "f"):
                raise _cannot_be_sent(f"Keras does not restore {(new if old is None else old).path} unchanged")


class SentArrays:
    """Arrays for other processes, each in a file that all processes map, so that a machine holds it in memory once."""

    def __init__(self, dataset, folder):
        self._folder, self._count = str(folder), 0
        self._parts = [mapped(self._save, part) for part in dataset.parts]
        self._like = dataset.with_parts([None] * len(self._parts))

    def _save(self, array):
        if array is None or (isinstance(array, Rows) and array.has_file):
            return array
        name = f"array-{self._count}.npy"
        try:
            np.save(Path(self._folder, name), array[:])
        except OSError as error:
            raise UserError(
                f"the data cannot be written to {Path(self._folder).parent} for the workers: {error.strerror or error}; name "
                "another folder in TMPDIR, or give a function that returns the data"
            ) from error
        self._count += 1
        return name

    def __call__(self):
        def load(saved):
            return np.load(Path(self._folder, saved), mmap_mode="r") if isinstance(saved, str) else saved

        return self._like.with_parts(mapped(load, part) for part in self._parts)


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
    """Raises a `UserError` if Keras does not save the settings of a loss, or of an object of a user's own class.

    Keras 3.15 does not save the delta of a Huber loss. It saves the constructor arguments of a layer, but not those of a
    subclassed model, a loss or a metric.
    """
    import keras

    compiled = getattr(keras_model, "_compile_config", None)
    given = keras.tree.flatten([getattr(compiled, "config", {}).get(k) for k in ("loss", "metrics", "weighted_metrics")])
    measures = [each for each in given if isinstance(each, (keras.losses.Loss, keras.metrics.Metric))]
    for loss in measures:
        if isinstance(loss, keras.losses.Loss) and hasattr(loss, "_fn_kwargs"):
            try:
                again = type(loss).from_config(loss.get_config())
            except Exception:  # of a class with another way of loading
                continue
            if repr(again._fn_kwargs) != repr(loss._fn_kwargs):
                raise _cannot_be_sent(f"Keras does not save the settings {loss._fn_kwargs} of its loss {type(loss).__name__}")
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
