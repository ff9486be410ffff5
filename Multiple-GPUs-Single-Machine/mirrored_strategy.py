"""TensorFlow's own way: `tf.distribute.MirroredStrategy` keeps a copy of every variable on each GPU of this process.

The model is built and compiled as in Non-Distributed-Setup, but in the strategy's scope: there every variable becomes one with
a copy on each device. `fit` cuts each batch into a part for each of them. Each computes the gradient of its part, an
all-reduce adds them up on all devices, and each makes the same update of its own copy. There is no x̃ beside the copies.
"""

import sys
import types
from pathlib import Path

import numpy as np
from multiple_gpus import OWN_FLAGS, begin, end

from common import Scheme, main, tf

sys.path.append(str(Path(__file__).resolve().parents[1] / "Non-Distributed-Setup"))
from non_distributed_setup import OF_CLUSTERS, Recorder, checkpoint_of, compiled, fit


class FirstReplica:
    """A mirrored Keras model as `Recorder` takes one.

    It is evaluated by its copy on the first device, as Keras's own `evaluate` fails if the devices cannot share the samples
    evenly.

    Args:
      model: a `common.models.Model` whose Keras model is compiled.
    """

    def __init__(self, model):
        self._model, self._keras_model, self._session = model, model.keras_model, None
        # Not the variable: int() of one with several copies fails.
        self.optimizer = types.SimpleNamespace(iterations=self._keras_model.optimizer.iterations.numpy())

    def evaluate(self, x, y, **_):
        """Returns loss and metrics on these samples as `keras.Model.evaluate` does; always on as many samples."""
        parameters = np.concatenate([v.numpy().ravel() for v in self._keras_model.trainable_variables])
        state = [v.numpy() for v in self._keras_model.non_trainable_variables]
        values = [parameters, *state, x, y]
        if self._session is None:
            with tf.Graph().as_default():  # outside of the strategy, in whose scope Keras divides losses by the replicas
                self._feeds = parameters, *state, x, y = [tf.placeholder(value.dtype, value.shape) for value in values]
                self._results, self._session = self._model.evaluate(parameters, state, x, y), tf.Session()
        results = self._session.run(self._results, dict(zip(self._feeds, values)))
        return {name: float(value) for name, value in results.items()}

    @property
    def stop_training(self):
        """Whether `fit` is to stop."""
        return self._keras_model.stop_training

    @stop_training.setter
    def stop_training(self, stop):
        self._keras_model.stop_training = stop


def train(task, settings):
    """Trains with a replica on each device and returns the exit status: 0, or 130 after Ctrl-C, when a checkpoint is saved.

    It differs from `non_distributed_setup.train` in the scope, the batch size, and in who evaluates.

    Args:
      task: None.
      settings: all flags as a namespace; `--num_towers` says how many replicas.

    Raises:
      UserError: if data and model cannot be trained.
    """
    import tensorflow

    from common.training import Interruption, MetricsLog, build_model, last_step

    interruption = Interruption()
    names, dataset, whole = begin(settings, is_keras=True)
    with tf.distribute.MirroredStrategy(names).scope():
        built = build_model(settings, dataset)
        model = compiled(built, settings.learning_rate)
        checkpoint = checkpoint_of(model)
        checkpoints = tensorflow.train.CheckpointManager(checkpoint, Path(settings.run_dir, "checkpoints"), max_to_keep=1)
        if settings.resume:
            checkpoint.restore(checkpoints.latest_checkpoint)
    last = last_step(whole, dataset.num_samples)
    with tf.Graph().as_default():  # TensorBoard's writer of TensorFlow 1 refuses to begin outside a graph
        log = MetricsLog(settings.run_dir, 0, last)

    recorder = Recorder(FirstReplica(built), dataset, log, checkpoint, whole, lambda: interruption.requested)
    status = fit(model, recorder, checkpoints, dataset, whole, interruption)
    if status == 0:
        end(settings, names)
    return status


if __name__ == "__main__":
    without = (*OF_CLUSTERS, "delays")
    main(Scheme(train=train, flags=OWN_FLAGS, without=without, epochs=60, batch_size=32, learning_rate=0.2))
