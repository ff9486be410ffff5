"""Continuous evaluation: while workers train, one more process evaluates each checkpoint, keeps the best, says when to stop.

The workers train with HogWild; any other scheme would do. The last worker is the evaluator
(`TaskSpecDef.use_last_worker_as_evaluator`): it is no part of their cluster, gets no samples to train with and sends nothing to
the ps. All that it knows of the training is in the run's folder, which it shares with the chief:

    checkpoints/            read: the chief writes one every --checkpoint_secs
    training-has-ended      read: the chief writes it after its last checkpoint; the evaluator removes it when it ends, too
    evaluator-says-stop     written when the validation loss has not improved for --patience evaluations
    best/                   written: the checkpoint of the least validation loss; at the end its model.keras, evaluation.json
    tensorboard/evaluator/  written: loss and accuracy, in the charts of the workers' own
"""

import glob
import json
import math
import re
import sys
from pathlib import Path

from common import Scheme, UserError, main, tf
from common.core import BUILDING, LOADING, checkpoints_in, doing, meanwhile, model_options
from common.models import keras_model

sys.path.append(str(Path(__file__).resolve().parents[1] / "HogWild"))
from hogwild import hogwild  # noqa: E402


def new_checkpoints(checkpoint_dir, has_ended):
    """Yields the path of the newest checkpoint whenever there is a new one; ends after the last one of the training.

    Args:
      checkpoint_dir: where the chief saves them.
      has_ended: function that says whether it has saved the last.
    """
    seen = None

    def nothing_follows():
        return has_ended() and tf.train.latest_checkpoint(checkpoint_dir) == seen

    # Looks every second. The order matters: first whether training has ended, then whether there is a later checkpoint.
    for seen in tf.train.checkpoints_iterator(checkpoint_dir, timeout=2, timeout_fn=nothing_follows):
        if seen in checkpoints_in(checkpoint_dir):  # not what the list of a folder from elsewhere may name
            with meanwhile("evaluating a checkpoint"):  # until the next one is asked for
                yield seen


class Evaluator:
    """Loss and accuracy of a model on held-out samples and on the test set.

    Args:
      model: a `common.models.Model`.
      validation: a `common.data.Data`, or a `common.data.Stream`, whose test set are the held-out samples.
      dataset: the same with the real test set.
    """

    def __init__(self, model, validation, dataset):
        from common.training import evaluation_of

        with tf.Graph().as_default():
            self._parameters = tf.placeholder(tf.float32, [model.size])
            self._state = [tf.placeholder(value.dtype, value.shape) for value in model.initial_state]
            self._fetches = []
            feeds: dict = {}
            for name, of in ("validation", validation), ("test", dataset):
                with tf.variable_scope(name):
                    self._fetches.append(evaluation_of(model, (self._parameters, self._state), of, feeds))
            self._session = tf.Session()
            self._session.run(tf.local_variables_initializer(), feeds)

    def _evaluate(self, fetches, values):
        parameters, state = values
        results = self._session.run(fetches, {self._parameters: parameters, **dict(zip(self._state, state))})
        return {name: float(value) for name, value in results.items()}

    def validate(self, values):
        """Returns loss and metrics on the held-out samples, {name: number}.

        Args:
          values: parameters `[size]` and state of the model, as `values_in` returns them.
        """
        return self._evaluate(self._fetches[0], values)

    def test(self, values):
        """Returns the same on the test set, which is for the end: what was chosen by it, it cannot judge."""
        return self._evaluate(self._fetches[1], values)


def values_in(checkpoint, model):
    """Returns what the model needs of a checkpoint: its parameters `[size]`, its state, and the global step.

    The state (moving means, say) is as the chief has estimated it at these parameters, see `common.models.Model.state_at`.

    Raises:
      UserError: if it is of another model.
    """
    reader = tf.train.load_checkpoint(checkpoint)
    parameters = reader.get_tensor("average" if reader.has_tensor("average") else "parameters")  # with --ema the average
    if parameters.shape != (model.size,):
        raise UserError(
            f"the checkpoint {checkpoint} has {parameters.size:,} parameters, but the model has {model.size:,}: start the "
            "evaluator with the same flags as the other tasks"
        )
    state = [reader.get_tensor(f"state_{i}") for i in range(len(model.initial_state))]
    return (parameters, state), int(reader.get_tensor("global_step"))


class Best:
    """The best checkpoint so far, in a folder of its own, from where it can be restored like any other.

    `evaluation.json` names it, also to a process that takes over from one that was killed.

    Attributes:
      loss: its validation loss, infinite if there is none yet.
      checkpoint: its path, or None.
      notes: what is known of it.

    Raises:
      UserError: if the file is damaged.
    """

    def __init__(self, folder):
        self._folder = Path(folder).resolve()
        self._file = self._folder / "evaluation.json"
        self._folder.mkdir(exist_ok=True)
        self._take(self._read() if self._file.exists() else {})

    def _read(self):
        try:
            notes = json.loads(self._file.read_text())
            if re.fullmatch(r"model\.ckpt-\d+", notes["checkpoint"]) and math.isfinite(notes["validation_loss"]):
                return notes
        except (ValueError, TypeError, KeyError, RecursionError):  # no JSON, or not what `keep` writes
            pass
        raise UserError(f"{self._file} is damaged: remove it, and the next checkpoint will be the best so far")

    def _take(self, notes):
        self.notes, self.loss = notes, notes.get("validation_loss", math.inf)
        self.checkpoint = str(self._folder / notes["checkpoint"]) if notes else None
        if notes:  # a name without a folder, so that this one can be copied elsewhere
            tf.train.update_checkpoint_state(str(self._folder), notes["checkpoint"], [notes["checkpoint"]])
        self._remove_others()

    def _remove_others(self):
        for file in self._folder.glob("model.ckpt-*"):
            if file.stem != self.notes.get("checkpoint"):
                file.unlink()

    def copy(self, checkpoint):
        """Copies a checkpoint here before it is looked at, since the chief keeps the newest five only. Returns the path.

        The copy before it is removed, unless that was kept.
        """
        name = Path(checkpoint).name
        if name != self.notes.get("checkpoint"):
            self._remove_others()
            for file in Path(checkpoint).parent.glob(glob.escape(name) + ".*"):
                tf.gfile.Copy(str(file), str(self._folder / file.name), overwrite=True)
        return str(self._folder / name)

    def keep(self, copy, **notes):
        """Makes the copy the best one, and removes the one before. All or nothing."""
        from common.core import write_json

        notes = {"checkpoint": Path(copy).name, **notes}
        write_json(self._file, notes)
        self._take(notes)

    def note(self, **notes):
        """Adds to what is known of the best one."""
        self.keep(self.checkpoint, **{**self.notes, **notes})


def evaluate(task, settings):
    """The life of the evaluator; returns the exit status.

    Args:
      task: its `common.cluster.TaskSpecDef`.
      settings: all flags as a namespace.

    Raises:
      UserError: for data and model that cannot be evaluated, or that are not those of the training.
    """
    from common.core import plots
    from common.data import sources, streams
    from common.training import ENDED, STOP, MetricsLog, samples_of, split

    doing(LOADING)
    training, validation = split(dataset := sources.load(settings), settings)
    doing(BUILDING)
    of_model = settings.model, samples_of(training, settings), settings.seed, settings.loss
    model = keras_model.build(*of_model, **model_options(settings))
    doing("building the graph")
    run_dir = Path(settings.run_dir)
    evaluator, best = Evaluator(model, validation, dataset), Best(run_dir / "best")
    with tf.Graph().as_default():  # TensorBoard's writer of TensorFlow 1 refuses to begin outside a graph
        # The tags are those of the workers, so that TensorBoard draws both in one chart.
        tags = {"validation_loss": "loss", "validation_accuracy": "test_accuracy"}
        log = MetricsLog(run_dir, "evaluator", None, tags)  # only the workers know how long the training is
    without_improvement, evaluated = 0, None
    doing("waiting for a checkpoint", waits=True)
    for checkpoint in new_checkpoints(str(run_dir / "checkpoints"), (run_dir / ENDED).exists):
        try:
            copy = best.copy(checkpoint)
            values, step = values_in(copy, model)
        except tf.errors.OpError:
            if tf.train.checkpoint_exists(checkpoint):
                raise
            continue  # it was so old that the chief has just removed it: there is a newer one
        if step == evaluated:
            continue  # it was saved once more, as no step came between
        evaluated = step
        with streams.reading(dataset):
            results = evaluator.validate(values)
        loss, notes = results["loss"], {f"validation_{name}": value for name, value in results.items()}
        log.write(step, **notes)
        is_better = loss < best.loss
        if is_better:
            best.keep(copy, global_step=step, **notes)
        without_improvement = 0 if is_better else without_improvement + 1
        metrics = "".join(f", {name} {value:.3f}" for name, value in results.items() if name != "loss")
        print(f"step {step:,}: validation loss {loss:.4f}{metrics}{', the best' if is_better else ''}", flush=True)
        if without_improvement == settings.patience:
            print(f"no improvement in {settings.patience} evaluations: training may stop", flush=True)
            (run_dir / STOP).touch()
    doing("writing the result")
    log.close()
    if best.checkpoint:  # none if no loss was finite
        values, _ = values_in(best.checkpoint, model)
        model.save(*values, run_dir / "best" / "model.keras")
        with streams.reading(dataset):
            best.note(**{f"test_{name}": value for name, value in evaluator.test(values).items()})
    plots.draw_curve(run_dir)
    (run_dir / ENDED).unlink(missing_ok=True)  # or a run that resumes from here would count as ended
    return 0


SCHEME = Scheme(
    hogwild,
    evaluate=evaluate,
    without=("evaluation_secs",),  # every checkpoint is evaluated
    epochs=600,
    batch_size=32,
    learning_rate=0.1,
    validation=0.1,
    patience=5,
    checkpoint_secs=1,
)

if __name__ == "__main__":
    main(SCHEME)
