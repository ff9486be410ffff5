"""The learning problem alone: a Keras model, its data and plain SGD, in one process. Nothing here is distributed."""

import math
import time
from pathlib import Path

from common import Scheme, main, tf
from common.data import datasets

# Flags of the schemes that mean nothing here.
OF_CLUSTERS = (
    *("launch", "num_ps", "num_workers", "job_name", "task_index", "ps_hosts", "worker_hosts"),
    *("window", "rounds_per_call", "checkpoint_secs", "evaluation_secs", "max_restarts"),
)


def compiled(model, learning_rate):
    """Returns the Keras model of a `common.models.Model`, ready for `fit`: plain SGD on the loss that all schemes use.

    `common.models` has compiled it, if the user had not: with the mean cross-entropy of logits for class labels, and the mean
    squared error otherwise.
    """
    import keras

    model.keras_model.optimizer = keras.optimizers.SGD(learning_rate)
    return model.keras_model


def batches(x, y, batch_size, seed):
    """Returns an endless `tf.data.Dataset` of shuffled batches, all of `batch_size`: one may cross the end of an epoch."""
    return tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed).repeat().batch(batch_size)


def checkpoint_of(model):
    """Returns the `tf.train.Checkpoint` of TensorFlow 2 of a Keras model; with it, what it was trained with in all runs."""
    import tensorflow

    variables = {"seconds": tensorflow.Variable(0.0, dtype="float64"), "samples": tensorflow.Variable(0, dtype="int64")}
    return tensorflow.train.Checkpoint(model=model, **variables)


class Recorder:
    """Callbacks of `fit`: writes what a run writes, and stops it in time.

    Args:
      model: a compiled Keras model.
      dataset: a `common.data.Data`.
      log: a `common.training.MetricsLog`.
      checkpoint: what `checkpoint_of` gives, restored.
      settings: all flags as a namespace.
      is_interrupted: function that says whether to stop now.

    Attributes:
      step, last: the present step, and the one at which to stop.
    """

    def __init__(self, model, dataset, log, checkpoint, settings, is_interrupted):
        from common.training import updates_before

        self._model, self._dataset, self.log, self._batch_size = model, dataset, log, settings.batch_size
        self._checkpoint, self._is_interrupted = checkpoint, is_interrupted
        self._began = time.monotonic() - float(checkpoint.seconds.numpy())
        self._deadline = self._began + (settings.seconds or math.inf)
        self.step = self._first_step = self._written_step = int(model.optimizer.iterations)
        self._samples_before = int(checkpoint.samples.numpy()) - self.step * self._batch_size
        self.last = log.last_step = log.last_step - updates_before(self._samples_before, settings)
        self._written = self._evaluated = time.monotonic()
        self._losses, self._epoch_loss = [], 0.0  # of the steps since the last line; of this epoch, summed

    @property
    def updates(self):
        """Steps of this run, without those of a run that it goes on with."""
        return self.step - self._first_step

    def is_out_of_time(self):
        """Whether `--seconds` of training, in all runs, are over."""
        return time.monotonic() >= self._deadline

    def note(self):
        """Notes in the checkpoint, before it is saved, for how long and with how many samples the model was trained."""
        self._checkpoint.seconds.assign(time.monotonic() - self._began)
        self._checkpoint.samples.assign(self.samples)

    @property
    def samples(self):
        """With how many samples the model was trained in all runs."""
        return self._samples_before + self.step * self._batch_size

    def evaluate(self):
        """Evaluates on the test set, writes and returns loss and metrics, {name: number}."""
        results = self._model.evaluate(*self._dataset.test, batch_size=500, verbose=0, return_dict=True)
        self.log.write(self.step, **{f"test_{name}": value for name, value in results.items()})
        self._evaluated = time.monotonic()
        return results

    def on_train_batch_end(self, batch, logs):
        """Counts a step; twice a second writes the loss and the speed since the last line."""
        self.step += 1
        before = self._epoch_loss if batch else 0.0
        self._epoch_loss = logs["loss"] * (batch + 1)  # Keras gives the mean of the epoch so far
        if not math.isfinite(self._epoch_loss):
            raise self.log.failure(self.step, self._epoch_loss, "start again with")
        self._losses.append(self._epoch_loss - before)
        now = time.monotonic()
        stop = self.step >= self.last or self.is_out_of_time() or self._is_interrupted()
        if stop or now - self._written >= 0.5:
            speed = (self.step - self._written_step) * self._batch_size / (now - self._written)
            samples = self.updates * self._batch_size
            self.log.write(self.step, loss=sum(self._losses) / len(self._losses), samples=samples, samples_per_second=speed)
            self._written, self._written_step, self._losses = now, self.step, []
        if stop:
            self._model.stop_training = True

    def on_epoch_end(self, epoch, logs):
        """Evaluates, at most once a second."""
        if time.monotonic() - self._evaluated >= 1:
            self.evaluate()


def fit(model, recorder, checkpoints, dataset, settings, interruption):
    """Trains up to the recorder's last step, saves, and writes the result; returns the exit status, as `train` does.

    Args:
      model: a compiled Keras model.
      recorder: its `Recorder`.
      checkpoints: a `tf.train.CheckpointManager` of TensorFlow 2.
      dataset: a `common.data.Data`.
      settings: all flags as a namespace.
      interruption: a `common.training.Interruption`.
    """
    import keras

    from common.training import write_result

    first_step = recorder.step
    interruption.training_begins()
    recorder.evaluate()
    began = time.monotonic()
    if first_step < recorder.last and not recorder.is_out_of_time():
        steps_per_epoch = math.ceil(dataset.num_samples / settings.batch_size)
        model.fit(
            batches(dataset.x_train, dataset.y_train, settings.batch_size, settings.seed),
            epochs=math.ceil((recorder.last - first_step) / steps_per_epoch),
            steps_per_epoch=steps_per_epoch,
            callbacks=[keras.callbacks.LambdaCallback(recorder.on_epoch_end, on_train_batch_end=recorder.on_train_batch_end)],
            shuffle=False,  # the batches are shuffled already
            verbose=0,
        )
    ended = time.monotonic()
    recorder.note()
    checkpoints.save()
    if interruption.requested:
        return 130
    interruption.training_ends()
    evaluated = recorder.evaluate()
    recorder.log.close()
    model.save(Path(settings.run_dir, "model.keras"))
    # As `common.training.result.REPORT` has it; an update is never stale, or dropped, as there is no other worker.
    report = [0, began, first_step, ended, recorder.updates * settings.batch_size, recorder.updates, 0, 0, 0]
    write_result(settings, None, [report], recorder.step, evaluated, samples=recorder.samples)
    return 0


def train(task, settings):
    """Trains in this process and returns the exit status: 0, or 130 after Ctrl-C, when a checkpoint is saved.

    Args:
      task: None.
      settings: all flags as a namespace.

    Raises:
      UserError: for data and model that cannot be trained.
    """
    # Imported only now: tensorflow takes seconds, and an error about a wrong flag should come at once.
    import tensorflow

    from common.training import Interruption, MetricsLog, build_model, last_step

    interruption = Interruption()
    dataset = datasets.plain(datasets.load(settings.data, settings.seed), settings.run.scheme)
    datasets.check_batch(dataset.x_train, dataset.y_train, settings.batch_size)
    model = compiled(build_model(settings, dataset), settings.learning_rate)
    checkpoint = checkpoint_of(model)
    checkpoints = tensorflow.train.CheckpointManager(checkpoint, Path(settings.run_dir, "checkpoints"), max_to_keep=1)
    if settings.resume:
        checkpoint.restore(checkpoints.latest_checkpoint)
    last = last_step(settings, dataset.num_samples)
    with tf.Graph().as_default():  # TensorBoard's writer of TensorFlow 1 refuses to begin outside a graph
        log = MetricsLog(settings.run_dir, 0, last)

    recorder = Recorder(model, dataset, log, checkpoint, settings, lambda: interruption.requested)
    return fit(model, recorder, checkpoints, dataset, settings, interruption)


if __name__ == "__main__":
    main(Scheme(train=train, without=OF_CLUSTERS, epochs=60, batch_size=32, learning_rate=0.1))
