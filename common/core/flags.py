"""The flags of every scheme, and user errors as one clear line. Imports no tensorflow."""

import difflib
import errno
import functools
import itertools
import json
import os
import re
import sys
import threading
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags as absl

INT32, INT64 = 2**31 - 1, 2**63 - 1  # maxima of the graph's counters
FLOAT32, LEAST_FLOAT32 = (2 - 2**-23) * 2.0**127, 2.0**-149  # the largest and the smallest positive float32
ABSL_READS = {"flagfile", "undefok"}  # flags that absl reads before all others, defined or not
SECONDS = threading.TIMEOUT_MAX  # the longest wait that 64 bits of nanoseconds can count, 292 years
ROOM = 1_000_000  # default capacity, in rows, of a table without a fixed size

SCHEDULES = ("cosine", "linear")
COMPRESSIONS = ("none", "bf16", "int8", "int4", "sign", "topk")  # see common.scheme.pack
TABLE_OPTIMIZERS = ("scheme", "sgd", "adagrad", "rowwise_adagrad", "lazy_adam", "sparse_adam")
PULL_COMPRESSIONS = ("none", "bf16", "int8")
TRANSFORMER = {"layers": 1, "width": 64, "heads": 4}  # of --model=transformer, unless flags say otherwise

# Built-in data and the models that fit them: with the values in KNOWN, no check of the input before the run is needed
FITTING = {
    "digits": ("linear", "mlp"),
    "linear": ("linear", "mlp"),
    "text": ("linear", "transformer"),
    "mnist1d": ("linear", "mlp", "cnn1d"),
    "quadratic": ("dense", "linear", "mlp"),
}
MOST_PLACES = 256  # largest --max_workers
KNOWN = {
    "max_workers": (None,),  # otherwise the scheme's rule has to be checked
    "learning_rate_schedule": (None, *SCHEDULES),
    **dict.fromkeys(("callback", "groups", "init_from"), (None,)),
    "compress": ("none",),  # otherwise the scheme's messages have to be checked
    **dict.fromkeys(TRANSFORMER, (None,)),
}


class _OneLine(Exception):
    """An exception with a self-contained message: IPython, like a program, shows it without a stack trace."""

    def _render_traceback_(self):
        return [f"{type(self).__name__}: {self}"]


class UserError(_OneLine):
    """An error of the user. The text is one line: the mistake, the expected value, the remedy.

    No caller has to catch it: the program prints that line without a stack trace, and exits with status 2.
    """


class Settings:
    """The settings of a run, all flags and derived values: an immutable namespace; `but` makes a changed copy."""

    def __init__(self, **values):
        self.__dict__.update(values)

    def __getattr__(self, name):
        raise _NoFlag(f"there is no flag --{name}; a scheme's own flags are in Scheme(..., flags=[...])")

    def __setattr__(self, name, value):
        raise AttributeError(f"settings are immutable: make a changed copy with but({name}=...)")

    def but(self, **changes):
        """Returns these settings with some changes."""
        return Settings(**{**vars(self), **changes})


class _NoFlag(UserError, AttributeError):
    """The error for an attribute that settings lack."""


# Errors of writing to a disk that is full, read-only, failing or another user's
_UNWRITABLE = [os.strerror(n) for n in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO)]


def why_unwritable(error):
    """Returns the reason for a failed write, if this exception states one; TensorFlow's errors have it in their text."""
    text = error.strerror or "" if isinstance(error, OSError) else str(error)
    return next((reason for reason in _UNWRITABLE if reason in text), None)


def check_backend(name):
    """Raises a `UserError` unless this backend of Keras is TensorFlow."""
    if name != "tensorflow":
        raise UserError(f"Keras runs on {name}; unset KERAS_BACKEND or set it to tensorflow")


def check_keras():
    """Raises a `UserError` if the settings of Keras, in `KERAS_BACKEND` and in the user's keras.json, do not suit a run.

    They are read without Keras, whose import fails if its backend is missing.
    """
    path = Path(os.environ.get("KERAS_HOME") or Path("~/.keras").expanduser(), "keras.json")
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        found = {}  # as Keras does
    if given := os.environ.get("KERAS_BACKEND"):
        check_backend(given)
    for name, expected in {"backend": "tensorflow", "image_data_format": "channels_last", "floatx": "float32"}.items():
        value = found.get(name, expected) if isinstance(found, dict) else expected
        if value != expected and not (name == "backend" and given):
            raise UserError(f'{path} sets "{name}" to {value!r}: expected "{expected}"')


class TrainingFailed(_OneLine):
    """Training cannot continue, and a restart would not help. The text is one line: the failure, its place, the remedy.

    It ends a program as a `UserError` does, but with status 1.
    """


def _print_one_line(kind, error, traceback, otherwise=sys.excepthook):
    if not issubclass(kind, (UserError, TrainingFailed)):
        return otherwise(kind, error, traceback)
    print(f"{os.path.basename(sys.argv[0])}: {error}", file=sys.stderr)
    sys.exit(2 if issubclass(kind, UserError) else 1)


sys.excepthook = _print_one_line


class _Number(absl.ArgumentParser):
    """A number within bounds, or a `UserError` that names the flag."""

    def __init__(self, name, convert, least=None, above=None, most=None, below=None, finite=True):
        super().__init__()
        self.name, self.convert, self.finite = name, convert, finite
        self.least, self.above, self.most, self.below = least, above, most, below
        self.syntactic_help = "a whole number" if convert is int else "a number"

    def parse(self, argument):
        try:
            value = self.convert(argument)
        except (TypeError, ValueError):
            raise UserError(f"--{self.name} must be {self.syntactic_help}, not {argument!r}") from None
        most = f"{self.most:g}" if isinstance(self.most, float) else self.most
        bounds = {
            f"at least {self.least}": self.least is None or value >= self.least,
            f"greater than {self.above}": self.above is None or value > self.above,
            "finite": not self.finite or value not in (float("inf"), float("-inf")),
            f"at most {most}": not self.finite or value <= self.most,
            f"less than {self.below}": self.below is None or value < self.below,
            f"at least {LEAST_FLOAT32:g}, or it is 0 as a float32": not 0 < abs(value) < LEAST_FLOAT32,
        }
        for bound, holds in bounds.items():
            if not holds:
                raise UserError(f"--{self.name} must be {bound}, not {argument}")
        return value


class _Numbers(absl.ArgumentParser):
    """Numbers within bounds, separated by commas."""

    def __init__(self, number):
        super().__init__()
        self._number = number

    def parse(self, argument):
        return [self._number.parse(part) for part in argument.split(",")] if isinstance(argument, str) else argument


class Flag(NamedTuple):
    """The definition of a flag; it can be pickled, unlike absl's."""

    name: str
    default: Any
    help: str
    make: Any  # function of default and help that returns the `absl.flags.Flag` for a command line


def _flag(parser, serializer, name, default, help):
    return Flag(name, default, help, functools.partial(absl.Flag, parser, serializer, name))


def integer(name, default, help, least=None, most=INT64):
    """Returns a flag for a whole number of at least `least` and at most `most`."""
    return _flag(_Number(name, int, least, most=most), None, name, default, help)


def number(name, default, help, least=None, above=None, below=None, finite=True, most=FLOAT32):
    """Returns a flag for a real number of at least `least` and at most `most`, greater than `above` and less than `below`."""
    return _flag(_Number(name, float, least, above, most, below, finite), None, name, default, help)


def numbers(name, default, help, least=None, above=None, most=FLOAT32):
    """Returns a flag for real numbers within the same bounds, one or more, separated by commas."""
    parser = _Numbers(_Number(name, float, least, above, most))
    return _flag(parser, absl.ListSerializer(","), name, default, help)


def boolean(name, default, help):
    """Returns a flag that is on or off: `--name` or `--noname`."""
    return Flag(name, default, help, functools.partial(absl.BooleanFlag, name))


def string(name, default, help):
    """Returns a flag for any string."""
    return _flag(absl.ArgumentParser(), absl.ArgumentSerializer(), name, default, help)


def strings(name, default, help):
    """Returns a flag for strings, separated by commas."""
    return _flag(absl.ListParser(), absl.CsvListSerializer(","), name, default, help)


def choice(name, default, options, help):
    """Returns a flag for one of the strings `options`."""
    return Flag(name, default, help, functools.partial(absl.EnumFlag, name, enum_values=options))


class alias(NamedTuple):  # noqa: N801  (used as the functions beside it)
    """Another name for `original`, a flag in the same table."""

    name: str
    original: str


def overlap():
    """Returns the flag --overlap of schemes that can pull ahead, see `common.scheme.LocalParameters.pull_ahead`."""
    text = "pull the parameters of the next round during this one: less waiting on slow links, but one round staler"
    return boolean("overlap", False, text)


def adamw():
    """Returns the flags of a worker's AdamW in DiLoCo and its relatives."""
    return number("weight_decay", 0.1, "λ of AdamW", least=0), number("local_learning_rate", 0.002, "η' of AdamW", above=0)


def table(*flags):
    """Returns the `absl.flags.FlagValues` that hold these flags, and --help; they read one command line."""
    values = absl.FlagValues()
    for flag in sorted((*flags, boolean("help", False, "show this help")), key=lambda flag: isinstance(flag, alias)):
        if isinstance(flag, alias):
            _add_alias(values, *flag)
        else:
            values[flag.name] = flag.make(flag.default, flag.help)
    return values


def _add_alias(values, name, original):
    absl.DEFINE_alias(name, original, values)
    alias, parser = values[name], values[original].parser
    parse_as_original = alias.parse

    def parse(argument):
        parser.name = name  # errors name the flag that was given
        try:
            parse_as_original(argument)
        finally:
            parser.name = original

    alias.parse = parse


def gpus():
    """Returns the flag that `common.core.with_gpus` reads."""
    text = "all, or numbers such as 0,2: one GPU per worker (default of --num_workers: one worker per GPU)"
    return string("gpus", None, text)


def isolation():
    """Returns the flags that `common.launch.fork_server` reads."""
    text = "run the tasks in a network of their own where the system allows it, see SECURITY.md (off: --noisolation)"
    need = "fail if the tasks cannot have a network of their own"
    return boolean("isolation", True, text), boolean("require_isolation", False, need)


def _of_cluster_and_input():
    """Yields flags of every scheme; a title comes before each group."""
    yield "Cluster"
    yield integer("num_ps", 1, "parameter servers to start", least=1)
    yield integer("num_workers", 2, "workers to start", least=1)
    text = "places for workers, which may join (common/join.sh) and leave (common/leave.sh) during training"
    yield integer("max_workers", None, text, least=1, most=MOST_PLACES)
    yield gpus()
    text = "seconds for which workers that are ready wait for the others before the first update"
    yield number("start_secs", 60, text, least=0, most=SECONDS)
    yield integer("warm_start_steps", 0, "global updates of worker 0 before the others begin (asynchronous schemes)", least=0)
    text = "extra milliseconds of each worker's local training, as 0,0,50, to see the effect of a straggler"
    yield numbers("delays", None, text, least=0, most=1000 * SECONDS)
    yield from isolation()
    yield "Length of the run"
    # At most 2**32, so that the samples of all epochs over a set of 2³¹ still fit in 64 bits.
    yield number("epochs", None, "passes over the training set, all workers together", above=0, most=2**32)
    text = "stop at this many global updates; an asynchronous worker finishes the call that it is in (default: from --epochs)"
    yield integer("steps", None, text, least=1)
    text = "stop after this many seconds of training, without outages of a ps and preparation of graphs"
    yield number("seconds", None, text, above=0, most=SECONDS)
    yield integer("patience", None, "evaluations without a smaller validation loss after which training ends", least=1)
    yield "Data"
    names = "digits, linear, mnist, mnist1d, quadratic, text"
    text = f"{names}; files, 'DIR/*.csv', *.parquet, *.arrow, *.tfrecord; or FILE.py:FUNCTION, which runs with your rights"
    yield string("data", "digits", text)
    yield string("test_data", None, "files of the test set, for --data=FILES (default: every tenth record of these)")
    yield string("label", None, "label column of CSV, Parquet, Arrow (default: label, target or y, or else the last one)")
    yield string("parse", None, "FILE.py:FUNCTION that parses a TFRecord, a scalar string tensor, into (x, y)")
    yield choice("missing", None, ("0", "mean"), "value of empty fields in CSV, Parquet, Arrow (default: they are refused)")
    yield integer("hash_strings", None, "buckets for the strings of columns (default: a vocabulary)", least=1, most=INT32)
    yield string("data_cache", None, "folder for the arrays of converted files and datasets (default: one in ~/.cache)")
    yield boolean("stream", False, "read a tf.data.Dataset anew in each epoch, as for augmentation, instead of converting it")
    yield number("validation", None, "share of the training set to hold out, for validation_loss etc.", above=0, below=1)
    yield "Model"
    names = "linear, dense (no bias), mlp, cnn (images), cnn1d (series), transformer (sequences of whole numbers)"
    yield string("model", "mlp", f"{names}; FILE.keras, a saved model; or FILE.py:FUNCTION")
    yield string("custom_objects", None, "FILE.py with the classes and functions of the user's in --model=FILE.keras")
    yield string("init_from", None, "initial parameters and tables, by name and shape: folder of a run, or FILE.keras")
    for name, most, text in (
        ("layers", 1000, "blocks of --model=transformer"),  # each adds some 400 operations to the graph
        ("width", INT32, "embedding width of --model=transformer, a multiple of --heads"),
        ("heads", INT32, "attention heads of --model=transformer"),
    ):
        yield integer(name, None, f"{text} (default: {TRANSFORMER[name]})", least=1, most=most)
    yield string("loss", None, "loss of a model that has none, by its name in Keras, such as huber (default: by the labels)")


def _of_training():
    """Yields the next groups."""
    yield "Training"
    yield integer("batch_size", None, "samples per step and worker", least=1)
    # At most INT32, as a loop in the graph counts the steps in 32 bits.
    yield integer("window", 1, "local steps between two exchanges with the ps", least=1, most=INT32)
    yield number("learning_rate", None, "step size", above=0)
    text = "learning rate as a function of the global step: cosine, linear, or FILE.py:FUNCTION (default: constant)"
    yield string("learning_rate_schedule", None, text)
    yield integer("warmup_steps", 0, "global updates during which the learning rate grows to its full size", least=0)
    yield number("weight_decay", 0, "λ of decoupled weight decay, as in AdamW, applied by the scheme's optimizer", least=0)
    yield string("groups", None, "FILE.py:FUNCTION of path and shape of a variable: its factor of the learning rate, its decay")
    yield number("clip_norm", None, "maximum norm of a local gradient (Keras's global_clipnorm); longer: scaled", above=0)
    yield number("ema", None, "β of a moving average of the global parameters, to be evaluated and written", above=0, below=1)
    yield choice("local_optimizer", None, ("sgd", "momentum", "adagrad", "adam"), "optimizer of a worker's local steps")
    yield number("local_learning_rate", None, "step size of --local_optimizer (default: --learning_rate)", above=0)
    yield number("local_momentum", 0.9, "momentum of --local_optimizer=momentum", least=0, below=1)
    # At most 2**31, as Keras takes 32 bits and each worker adds its index.
    yield integer("seed", 0, "seed of initial values and of the order of samples", least=0, most=2**31)
    yield "Messages"
    yield choice("compress", "none", COMPRESSIONS, "compression of the vectors that a worker sends to the ps")
    yield number("topk", None, "share of the values that --compress=topk sends (default: 0.01)", above=0, most=1.0)
    yield choice("compress_pull", "none", PULL_COMPRESSIONS, "compression of the parameters that a worker pulls for training")
    # A round takes at least 18 kB of the graph (HogWild), whose limit is 2 GB.
    text = "maximum number of rounds in one session call (default: by model and length of the run)"
    yield integer("rounds_per_call", None, text, least=1, most=100_000)
    yield "Tables on the ps"
    text = "optimizer of the rows of tables on the ps (common.Embedding); scheme: the scheme's own"
    yield choice("table_optimizer", "scheme", TABLE_OPTIMIZERS, text)
    yield number("table_learning_rate", None, "step size of --table_optimizer (default: --learning_rate)", above=0)
    text = "capacity in rows, over all ps, of each table without a fixed size (common.Embedding(None, width))"
    yield integer("max_rows", ROOM, text, least=1, most=2**31 - 1)
    yield choice("save_tables", "yes", ("yes", "no"), "write model.keras, with the whole tables of the ps")


def _of_the_run():
    """Yields the last groups."""
    yield "Files and evaluation"
    yield string("run_dir", None, "folder of all files of the run (default: runs/SCHEME/TIME)")
    text = "seconds between evaluations on the test set during training; more if an evaluation takes long"
    yield number("evaluation_secs", 1, text, above=0, most=SECONDS)
    text = "FILE.py:FUNCTION, called by the chief with the global step and the numbers of each line of metrics or evaluation"
    yield string("callback", None, text)
    yield "Faults"
    yield boolean("resume", False, "continue from the newest checkpoint in --run_dir, on any number of ps and workers")
    text = "seconds between checkpoints: the death of a ps costs at most this much training, and one call"
    yield number("checkpoint_secs", 5, text, above=0, most=SECONDS)
    text = "maximum number of restarts of a task within an hour: the first at once, later ones after a pause that grows to 30 s"
    yield integer("max_restarts", 3, text, least=0)
    text = "seconds without progress after which a task is killed and restarted; also the limit for checking --data and --model"
    yield number("hang_secs", 60, text, least=2, most=SECONDS)
    yield "Tasks started by hand"
    yield boolean("launch", False, "start --num_ps and --num_workers processes on this machine, as run.sh does")
    yield choice("job_name", None, ("ps", "worker"), "the job of this task, when started by hand")
    yield integer("task_index", None, "the index of this task in its job", least=0)
    yield strings("ps_hosts", None, "host:port of each ps, separated by commas")
    yield strings("worker_hosts", None, "host:port of each worker, separated by commas")
    text = "seconds to wait for a task that cannot be reached; then the chief finishes without it, or training fails"
    yield number("give_up_secs", 600, text, least=1, most=SECONDS)


# {title: flags}, in the order of --help and book/guide/flags.md; any other flag is a script's own
GROUPS: dict[str, list[Flag]] = {}
for _each in (*_of_cluster_and_input(), *_of_training(), *_of_the_run()):
    if isinstance(_each, str):
        GROUPS[_each] = _group = []
    else:
        _group.append(_each)

CHECK = boolean("check", False, "check the flags, the data and the model, without training")  # set by the launcher
LOCAL = ("local_optimizer", "local_learning_rate", "local_momentum")


def of_every_scheme(defaults):
    """Yields the flags of every scheme. `defaults` are a scheme's own, by flag name.

    Flags of the local optimizer are among them only if a scheme gives a default for `local_optimizer`.
    """
    for flag in (*itertools.chain(*GROUPS.values()), CHECK):
        if flag.name in LOCAL and "local_optimizer" not in defaults:
            continue
        if defaults.get(flag.name) is not None:
            flag = flag._replace(default=defaults[flag.name], help=re.sub(r" \(default: [^)]*\)$", "", flag.help))
        yield flag


def parse(values, arguments, program, without=()):
    """Parses `arguments` and returns all flags as `Settings`; those in `without` keep their defaults and cannot be given.

    Raises:
      UserError: for an unknown flag, a bad value, an argument that is no flag, --topk with another compression, or transformer
        sizes with another model.
    """
    _refuse_absls_own(values, arguments)
    try:
        rest = values([program, *arguments])[1:]
    except absl.UnrecognizedFlagError as error:
        raise _unknown(values, error.flagname) from None
    except (absl.Error, ValueError) as error:
        text = re.sub(r"\('(.*)', '(.*)'\)", r"\1, \2", " ".join(str(error).split()))
        raise UserError(f"{text} (--help lists all)") from None
    if values.help:
        print_help(values, program, without)
        sys.exit(0)
    for name in present(values, *without):
        raise UserError(f"--{name} is not a flag of {program} (--help lists its flags)")
    if rest:
        raise UserError(f"unexpected argument {rest[0]!r}: flags are written --name=value (--help lists all)")
    # Only a scheme's program has these two flags.
    if "topk" in values and values.topk is not None and values.compress != "topk":
        raise UserError(f"--topk={values.topk:g} needs --compress=topk: add that, or leave --topk out")
    settings = Settings(**{name: values[name].value for name in values})
    _check_sizes(settings)
    return settings


def model_options(settings):
    """Returns options of a model by keyword: {"layers", "width", "heads": number} of a transformer, and "custom_objects"."""
    given = {name: getattr(settings, name, None) for name in (*TRANSFORMER, "custom_objects")}
    return {name: TRANSFORMER.get(name) if value is None else value for name, value in given.items()}


def _check_sizes(settings):
    for name in TRANSFORMER:
        if (value := getattr(settings, name, None)) is not None and settings.model != "transformer":
            raise UserError(f"--{name}={value} needs --model=transformer: add that, or leave --{name} out")
    if (has := model_options(settings))["width"] % has["heads"]:
        raise UserError(
            f"--heads={has['heads']} does not divide --width={has['width']}: each head has an equal part of the width, so "
            "choose a width that is a multiple of the heads"
        )


def _unknown(values, name):
    close = difflib.get_close_matches(name, values, 1)
    near = f"; did you mean --{close[0]}?" if close else ""
    return UserError(f"unknown flag --{name}{near} (--help lists all)")


def _refuse_absls_own(values, arguments):
    """Raises a `UserError` for the flags that absl reads itself.

    `--flagfile` would add unchecked flags, and `--undefok` hide the misspelling of a flag.
    """
    for argument in itertools.takewhile(lambda argument: argument != "--", arguments):
        named = re.match(r"--?([^=]+)", argument)
        if named and named[1] in ABSL_READS:
            raise _unknown(values, named[1])


def present(values, *names):
    """Returns those of the flags `names` that were given on the command line."""
    return [name for name in names if values[name].present]


def in_groups(values, without=()):
    """Yields (title, names) of the groups of flags that a user may give, the script's own first."""
    names = set(values) - {"check", "help", *without}
    groups = {title: [flag.name for flag in group] for title, group in GROUPS.items()}
    yield "This program", sorted(names.difference(*groups.values()))
    for title, group in groups.items():
        yield title, [name for name in group if name in names]


def print_help(values, program, without):
    """Prints every flag with its default, except those in `without`."""
    print(f"usage: {os.path.basename(program)} [--flag=value ...]")
    for title, names in in_groups(values, without):
        if names:
            print(f"\n{title}:")
        for name in names:
            flag = values[name]
            default = "" if flag.default is None else f" (default: {flag.default_as_str.strip(chr(39))})"
            print(f"  --{name:<22} {flag.help}{default}")
