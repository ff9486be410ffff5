"""Several GPUs in one process: a copy of the model on each, a tower, and one update with the mean of their gradients.

The parameters x̃ lie on the first device, with the first tower, which needs no copy of them; every update is made
there, at the speed of that device. On the CPU they would cross the bus to each GPU, and all the gradients back.

Without a GPU the towers are on logical devices of the CPU: the same graph, to look at, on the cores that one would have, too.
"""

import functools
import json
from pathlib import Path

from common import Scheme, UserError, flags, main, tf
from common.core import devices, write_json
from common.data import Batches, datasets
from common.scheme import GlobalParameters, LocalParameters, Step

# Flags of the schemes that mean nothing here.
OF_CLUSTERS = ("launch", "num_ps", "num_workers", "job_name", "task_index", "ps_hosts", "worker_hosts", "max_restarts")
TEXT = "copies of the model, one per device (default: the number of GPUs, at least 2)"
OWN_FLAGS = [flags.integer("num_towers", None, TEXT, least=1)]


def multiple_gpus(center, towers, hp):
    """x_i ← x̃;  x̃ ← x̃ − η (1/n) Σ g_i(x_i), over all n towers.

    Each tower i has a device of its own, where its parameters x_i and its samples are, and where it computes g_i, the gradient
    of its next batch. All x_i are the same x̃, so this is SGD with a batch n times as large: n batches, one update.

    η is `hp.learning_rate`.
    """
    sgd = tf.train.GradientDescentOptimizer(hp.learning_rate)
    yield towers.pull(center)  # x_i ← x̃, a copy to every device
    yield towers.compute_gradients()  # g_i(x_i), on all devices at the same time
    yield center.push(sgd, towers.mean_gradient())  # x̃ ← x̃ − η (1/n) Σ g_i, on the device of x̃


class Towers:
    """What `multiple_gpus` and `build_rounds` see of all towers: operations that belong to all, each on its own device.

    Args:
      center: the `GlobalParameters`.
      built: a `common.models.Model` for each tower.
      batches: for each tower a function of its name that gives its `common.data.Batches`.
      names: of the devices, one for each.
    """

    def __init__(self, center, built, batches, names):
        self.names, self.model, self.num_workers = names, built[0], 1  # all together make each update
        self.towers, self.init_feed_dict = [], {}
        for i, name in enumerate(names):
            with tf.device(name):
                own = batches[i](f"batches_{i}")
                tower = LocalParameters(center, built[i], own, f"tower_{i}", i, len(names))
            self.towers.append(tower)
            self.init_feed_dict.update(tower.init_feed_dict)
        self.state = self.towers[0].state
        self.name, self.round, self.dynamic = "towers", None, None

    @property
    def windows(self):
        """How many copies of the model there are in the graph."""
        return sum(tower.windows for tower in self.towers)

    @property
    def local_steps(self):
        """How many there are in the graph; all towers make the same one at the same time."""
        return self.towers[0].local_steps

    def begin_call(self):
        """Called in each session call before its rounds."""
        for tower in self.towers:
            tower.begin_call()

    def pull(self, center):
        """x_i ← x̃ on every device."""
        pulls = self._on_each_device(lambda tower: tower.pull(center))
        return Step(sum((pull.operations for pull in pulls), ()), pulled=pulls[0].pulled)

    def compute_gradients(self):
        """The gradient of each tower's next batch, which stays on its device; x_i does not change."""
        return sum(self._on_each_device(lambda tower: tower.train(1, lambda g: tf.no_op())), Step())

    def mean_gradient(self):
        """Returns (1/n) Σ g_i as a tensor `[size]` on the first device."""
        with tf.device(self.names[0]):
            return tf.add_n([tower.gradient.read_value() for tower in self.towers]) / len(self.towers)

    def _on_each_device(self, function):
        steps = []
        for name, tower in zip(self.names, self.towers, strict=True):
            with tf.device(name), tf.name_scope(f"{tower.name}/"):
                steps.append(function(tower))
        return steps


def begin(settings, is_keras=False):
    """Loads the data, makes the devices, and prints what they are.

    Args:
      settings: all flags as a namespace.
      is_keras: whether checkpoints hold a Keras model, as those of MirroredStrategy do, and not x̃.

    Returns:
      The names of the devices, the data, and the flags with the batch size of all devices together.

    Raises:
      UserError: if the data cannot be trained with, there are more devices than samples, or the run was the other script's.
    """
    if settings.resume:
        checkpoint = tf.train.load_checkpoint(str(Path(settings.run_dir, "checkpoints")))
        if checkpoint.has_tensor("_CHECKPOINTABLE_OBJECT_GRAPH") != is_keras:
            other = "run.sh" if is_keras else "run_mirrored_strategy.sh"
            raise UserError(
                f"the checkpoint in {settings.run_dir} was written by the other script here: continue it with bash {other}"
            )
    dataset = datasets.load(settings.data, settings.seed)
    dataset = datasets.plain(dataset, "MirroredStrategy here") if is_keras else dataset
    count = settings.num_towers or max(2, len(devices.gpus()))
    if dataset.num_samples < count:
        raise UserError(
            f"{dataset.num_samples} training samples are too few for {count} towers: choose fewer --num_towers or more data"
        )
    datasets.check_batch(dataset.x_train, dataset.y_train, settings.batch_size, num_workers=count)
    names, line = devices.logical_devices(count)
    print(line, flush=True)
    return names, dataset, settings.but(batch_size=count * settings.batch_size)


def end(settings, names):
    """Adds the devices to `result.json`; the batch size in it is that of one of them."""
    path = Path(settings.run_dir, "result.json")
    result = json.loads(path.read_text())
    result.update(batch_size=settings.batch_size, num_towers=len(names), devices=names)
    write_json(path, result)


def train(task, settings):
    """Trains with `--num_towers` towers and returns the exit status: 0, or 130 when interrupted.

    Args:
      task: None.
      settings: all flags as a namespace.

    Raises:
      UserError: if data and model cannot be trained.
    """
    # Imported only now, with tensorflow, which costs seconds: a bad flag is told at once.
    from common.cluster import Saver, monitored_session
    from common.core import Keeper
    from common.training import (
        Interruption,
        Plan,
        build_calls,
        build_model,
        fed_test_set,
        run_worker,
        write_result,
    )

    interruption = Interruption()
    names, dataset, whole = begin(settings)
    n = len(names)
    built = [build_model(settings, dataset, i) for i in range(n)]

    with tf.Graph().as_default():
        with tf.device("/CPU:0"):
            tf.train.get_or_create_global_step()  # integers are the CPU's
        center = GlobalParameters(built[0].initial_parameters, device_fn=names[0])

        def batches_of(i):
            x, y, *weights = datasets.shard(dataset, i, n)
            return lambda name: Batches(x, y, settings.batch_size, settings.seed + i, name, weights[0] if weights else None)

        towers = Towers(center, built, [batches_of(i) for i in range(n)], names)
        calls = build_calls(multiple_gpus, center, towers, whole, dataset.num_samples)
        parameters, step = center.read()
        final = parameters, [v.read_value() for v in towers.state]
        feeds = dict(towers.init_feed_dict)
        evaluation = step, built[0].evaluate(*final, *fed_test_set(dataset, feeds))
        scaffold = tf.train.Scaffold(
            saver=Saver(save_relative_paths=True),
            init_feed_dict=center.init_feed_dict,
            local_init_op=tf.local_variables_initializer(),
            local_init_feed_dict=feeds,
        )
        checkpoints = Path(settings.run_dir, "checkpoints")
        keeper = Keeper(center, checkpoints, settings.checkpoint_secs, samples_per_update=calls.size.samples_per_update)
        plan = Plan(
            last=calls.last,
            step=center.step,
            next_call=calls.next_call,
            evaluation=evaluation,
            final=final,
            scaffold=scaffold,
            size=calls.size,
            keeper=keeper,
        )
        outcome = run_worker(plan, None, whole, None, interruption, functools.partial(monitored_session, keeper=keeper))
    if outcome.final:
        built[0].save(*outcome.final, Path(settings.run_dir, "model.keras"))
    if outcome.evaluated:
        write_result(whole, None, outcome.reports, *outcome.evaluated, samples=outcome.samples, size=calls.size)
        end(settings, names)
    return outcome.status


if __name__ == "__main__":
    without = (*OF_CLUSTERS, "window", "delays")
    main(Scheme(train=train, flags=OWN_FLAGS, without=without, epochs=60, batch_size=32, learning_rate=0.2))
