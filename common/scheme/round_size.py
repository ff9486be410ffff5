"""The size of a round, known from the round that was built: the basis of samples, epochs, speeds, schedules and simulations."""

from fractions import Fraction
from typing import NamedTuple


class RoundSize(NamedTuple):
    """The numbers of updates, local steps and samples in a round.

    Attributes:
      updates, windows: updates, and local trainings, of a worker in a round.
      steps_per_update: local steps of a worker per update; the maximum with `center.dynamic`.
      batch_size: samples of a local step.
      gradients_per_update: number of workers that contribute one gradient each; in an elastic run that at its beginning.
      counted: what the ps count for the samples: "updates"; "gradients", if an update is of all workers present; or
        "local steps", with `center.dynamic`.
    """

    updates: int = 1
    windows: int = 1
    steps_per_update: Fraction = Fraction(1)
    batch_size: int = 1
    gradients_per_update: int = 1
    counted: str = "updates"

    @property
    def local_steps(self):
        """Local steps of a worker in a round."""
        return self.updates * self.steps_per_update

    @property
    def samples_per_gradient(self):
        """Samples that a worker draws per update, a `Fraction`."""
        return self.batch_size * self.steps_per_update

    @property
    def samples_per_update(self):
        """Samples of all workers in an update, a `Fraction`."""
        return self.samples_per_gradient * self.gradients_per_update

    @property
    def samples_per_count(self):
        """Samples in the unit that the ps count, see `counted`."""
        of_each = {"gradients": self.samples_per_gradient, "local steps": self.batch_size}
        return of_each.get(self.counted, self.samples_per_update)


def size_of(center, local, batch_size):
    """Returns the `RoundSize` of the rounds built from these parameters; they are all alike."""
    waits = center.waits(local)
    counted = "local steps" if local.dynamic else "updates" if center.local_steps is None else "gradients"
    gradients = waits.gradients_per_update if waits else 1
    return local.round._replace(batch_size=batch_size, gradients_per_update=gradients, counted=counted)
