"""Shared by the tests: small problems, a session with initialized variables, the schemes' functions."""

import contextlib
import gc
import importlib.util
import os
import signal
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"  # before the first import of tensorflow, which reads it then


from common import Scheme, tf  # noqa: E402
from common.cluster import task_spec  # noqa: E402
from common.core import flags, signals  # noqa: E402
from common.data import datasets  # noqa: E402
from common.launch import launcher, warm  # noqa: E402
from common.models import keras_model  # noqa: E402
from common.simulation.replay import Replay  # noqa: E402

CHECKOUT = Path(__file__).resolve().parents[1]

# A server in the process of the tests would report waits for others into the output of later tests.
task_spec.say_waits_of = lambda name, hosts: None

# A script that starts the tests with `&` lets them ignore Ctrl-C, and `nohup` the end of a terminal. They still do, but not so
# that what they start inherits it: that is sent these signals.
for number in signals.INTERRUPTING_SIGNALS:
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, lambda *_: None)


def pytest_configure(config):
    """Keeps a warm process for the runs of all tests, which then import tensorflow once."""
    is_alone = "PYTEST_XDIST_WORKER" not in os.environ  # workers have the variable from the process that starts them
    if is_alone and "not cluster" not in config.option.markexpr:
        os.environ.update(warm.kept(dict(os.environ)))


def pytest_addoption(parser):
    help = "tests of chance: all cases, each so many times (20 by default)"
    parser.addoption("--soak", type=int, default=0, nargs="?", const=20, metavar="TIMES", help=help)


@pytest.fixture
def soak(request):
    """How many times all cases of a test of chance are to run; 0: only the first, once."""
    return request.config.getoption("--soak")


def pytest_collection_modifyitems(items):
    """Marks the cells of notebooks, so that `-m "not notebook"` leaves them out."""
    for item in items:
        if item.path.suffix == ".ipynb":
            item.add_marker("notebook")


def pytest_collection_finish():
    """Modules and tests stay: a garbage collection that looks through them takes 0.4 s."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)  # the graphs that tests build are garbage in large pieces


_unmarked = None  # the test that runs, if it may start no process


def _refuse_processes(event, arguments):
    if event == "subprocess.Popen" and _unmarked:
        raise AssertionError(f"{_unmarked} starts {arguments[0]}: tests that start processes are marked cluster or slow")


sys.addaudithook(_refuse_processes)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item):
    """Keeps the promise of `tests/run.sh --fast`: without these marks a test starts no program."""
    global _unmarked
    _unmarked = None if any(item.get_closest_marker(mark) for mark in ("cluster", "slow", "notebook")) else item.name
    yield
    _unmarked = None


@pytest.fixture
def parse():
    """A function that parses a command line as a scheme's script does."""

    def parse(*arguments, own=(), **defaults):
        scheme = Scheme(lambda center, local, hp: None, flags=own, **defaults)
        return flags.parse(scheme.flag_values(), list(arguments), "scheme.py")

    return parse


@pytest.fixture
def user_error():
    """A context that expects a `UserError` of one line, with each of these texts in it."""

    @contextlib.contextmanager
    def user_error(*texts):
        with pytest.raises(flags.UserError) as info:
            yield
        message = str(info.value)
        assert message and "\n" not in message
        for text in texts:
            assert text in message

    return user_error


@pytest.fixture
def graph():
    """A graph of the test's own, as the default one."""
    with tf.Graph().as_default() as graph:
        yield graph


@pytest.fixture
def initialized():
    """A function that opens a session of the present graph in which all variables are initialized.

    Its arguments are what has an `init_feed_dict`: global and local parameters, batches; and the target of a server.
    """
    with contextlib.ExitStack() as stack:

        def initialized(*fed, target=""):
            feeds = {feed: value for each in fed for feed, value in each.init_feed_dict.items()}
            session = tf.Session(target)
            stack.callback(session.close)
            session.run(tf.global_variables_initializer(), feeds)
            session.run(tf.local_variables_initializer(), feeds)  # later, since x begins as a copy of the global parameters
            return session

        yield initialized


@pytest.fixture(scope="session")
def servers():
    """A function that gives a worker (its task, its server) of a cluster with so many ps tasks, all in this process.

    The servers live on from test to test, but nothing that lies on them does: variables of other shapes, clocks.
    """
    with contextlib.ExitStack() as stack:
        known: dict[int, Any] = {}

        def servers(num_ps):
            if num_ps not in known:
                os.environ["TF_GRPC_REUSE_PORT"] = "true"
                ports = [stack.enter_context(launcher.reserved_port()).getsockname()[1] for _ in range(num_ps + 1)]
                hosts = [f"localhost:{port}" for port in ports]
                where: Any = {"ps_hosts": hosts[1:], "worker_hosts": hosts[:1]}
                tasks = [task_spec.TaskSpecDef("ps", i, **where) for i in range(num_ps)]
                worker = task_spec.TaskSpecDef("worker", 0, **where)
                known[num_ps] = worker, worker.create_server(), [task.start_server() for task in tasks]
            worker, server, _ = known[num_ps]
            tf.Session.reset(server.target)
            return worker, server

        yield servers


@pytest.fixture(scope="session")
def load_scheme():
    """A function that takes the update rule `name` from FOLDER/name.py."""

    def load_scheme(folder, name):
        spec = importlib.util.spec_from_file_location(name, CHECKOUT / folder / f"{name}.py")
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return getattr(module, name)

    return load_scheme


@pytest.fixture(scope="module")
def replays(model, batches, known_batches, load_scheme):
    """A function that gives a `Replay` of two workers of a scheme, at its start. One that was built before begins anew: it
    is the same (test_replay.py), and takes a fraction of the time. Another schedule is another replay.
    """
    with contextlib.ExitStack() as stack:
        known: dict[Any, Any] = {}

        def replays(scheme, hp, num_ps=1, schedule=None, batches=batches):
            key = schedule, scheme.folder, scheme.name, num_ps, str(sorted(vars(hp).items())), *map(id, batches)
            if key in known:
                known[key].restart()
                return known[key]

            def make_batches(i):
                return known_batches(*(b[i] for b in batches), f"batches_{i}")

            rule = load_scheme(scheme.folder, scheme.name)
            known[key] = replay = Replay(rule, hp, model, make_batches, num_ps=num_ps, schedule=schedule)
            stack.callback(replay.close)
            stack.callback(lambda: batches)  # as long as this is kept, no other has its id
            return replay

        yield replays


@pytest.fixture
def hogwild(load_scheme):
    """The update rule of HogWild/hogwild.py."""
    return load_scheme("HogWild", "hogwild")


class KnownBatches:
    """Stands in for `common.data.Batches`: the batches come in the order in which they are given, then again.

    Args:
      x, y: arrays `[count, batch_size, ...]`.
    """

    def __init__(self, x, y, name="batches"):
        self.count, self.batch_size, self.num_samples = len(x), x.shape[1], x.shape[0] * x.shape[1]
        self.arrays = tuple(array.reshape(-1, *array.shape[2:]) for array in (x, y))
        self.init_feed_dict = {}
        self._x, self._y = tf.constant(x), tf.constant(y)
        with tf.variable_scope(name):
            self._position = tf.get_variable(
                "position", initializer=0, trainable=False, collections=[tf.GraphKeys.LOCAL_VARIABLES], use_resource=True
            )

    def begin_call(self):
        """Nothing."""

    def next(self, window):
        """Returns the numbers `[window]` of the next batches."""
        return (self._position.assign_add(window) - window + tf.range(window)) % self.count

    def numbers(self, k):
        """Returns which samples are numbers k since the start."""
        return k % self.num_samples

    def samples(self, index):
        """Returns batch number `index`."""
        return tf.gather(self._x, index), tf.gather(self._y, index)


@pytest.fixture(scope="session")
def known_batches():
    """The class `KnownBatches`."""
    return KnownBatches


@pytest.fixture
def regression():
    """A linear regression: `data.Data` of 60 samples of 3 features, 20 of them for the test."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=[60, 3]).astype(np.float32)
    y = (x @ [[1.0], [-2.0], [3.0]] + 0.5 + rng.normal(0, 0.1, [60, 1])).astype(np.float32)
    return datasets.checked(((x[20:], y[20:]), (x[:20], y[:20])), "regression")


@pytest.fixture
def images():
    """A classification: `data.Data` of 50 random images [8, 8, 1] of 3 classes, 23 of them for the test."""
    rng = np.random.default_rng(2)
    x = rng.random([50, 8, 8, 1]).astype(np.float32)
    y = rng.integers(0, 3, 50)
    y[:3] = y[-3:] = [0, 1, 2]
    return datasets.checked(((x[23:], y[23:]), (x[:23], y[:23])), "images")


@pytest.fixture
def hyperparameters():
    """A function that makes the hyperparameters of a scheme."""
    return types.SimpleNamespace


@pytest.fixture
def run_dir(tmp_path):
    """The folder of a run. None of the run's processes outlives the test, whatever happens in it."""
    folder = tmp_path / "run"
    yield folder
    left = runs.processes(folder)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert not left, "the test left processes behind"


@pytest.fixture(scope="module")
def batches():
    """The batches of two workers, for the schemes' tests: x [2 workers, 7, 4, 3] and y [2, 7, 4, 1]."""
    rng = np.random.default_rng(5)
    x = rng.normal(size=[2, 7, 4, 3]).astype(np.float32)
    return x, (x @ [[1.0], [-2], [3]] + 0.5 + rng.normal(0, 0.3, [2, 7, 4, 1])).astype(np.float32)


@pytest.fixture(scope="module")
def model():
    """y = w x + b with three w, for the schemes' tests."""
    import keras

    keras.utils.set_random_seed(0)
    return keras_model.by_labels(keras.Sequential([keras.Input([3]), keras.layers.Dense(1)]), is_classification=False)
