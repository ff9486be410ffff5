"""The turns of workers, and the versions of x̃ behind their updates."""


class Turns:
    """The order of workers at a barrier or a staleness bound, as `common.core.Clocks` enforces it on a ps.

    Args:
      num_workers: number of workers.
      waiting: `Waiting`.
    """

    def __init__(self, num_workers, waiting):
        self._waiting, self._clocks, self._low = waiting, [0] * num_workers, 0
        self._pulled = [0] * num_workers  # `low` when each worker last passed a wait
        self._at = {0: num_workers}  # number of clocks at each value
        self._ahead = 0  # of `together`: gradients received for the next update

    def may_go_on(self, worker):
        """Whether this worker need not wait."""
        if self._waiting.quorum is not None:
            return self._clocks[worker] <= self._low
        return self._waiting.staleness is None or self._clocks[worker] - self._low <= self._waiting.staleness

    def pass_by(self, worker):
        """Records that this worker passes its wait, or restarts."""
        self._pulled[worker] = self._low

    def tick(self, worker):
        """Advances this worker's clock; returns whether that may release others."""
        clock = self._clocks[worker]
        self._clocks[worker] = clock + 1
        self._at[clock] -= 1
        self._at[clock + 1] = self._at.get(clock + 1, 0) + 1
        if clock > self._low or self._at[clock]:
            return False
        del self._at[clock]
        self._low += 1
        return True

    def give(self, worker, fragment=None):
        """Takes this worker's gradient for `together`; returns whether it counts, and whether it completes an update.

        The gradient of a fragment counts only in the fragment's turn.
        """
        is_its_turn = fragment is None or self._low % self._waiting.fragments == fragment
        counts = self._pulled[worker] == self._low and self._clocks[worker] <= self._low and is_its_turn
        if counts:
            self._clocks[worker] = self._low + 1
            self._ahead += 1
            if self._ahead == self._waiting.quorum:
                self._low, self._ahead = self._low + 1, 0
                return True, True
        return counts, False


class Versions:
    """The global step, and the version of x̃ behind the x of each worker: the source of staleness.

    `common.scheme.build_rounds` counts the same in the graph of a worker.

    Args:
      num_workers: number of workers.
      waiting: `Waiting`.

    Attributes:
      turns: the `Turns` of the workers.
      updates: number of updates, the global step.
      dropped: number of dropped gradients.
      known: of each worker, the global step of the x̃ that it has read; with prefetch, of the one that it computes with.
      own: of each worker, the number of its own updates that this x̃ lacks.
    """

    def __init__(self, num_workers, waiting):
        self._waiting, self.turns = waiting, Turns(num_workers, waiting)
        self.updates, self.dropped = 0, 0
        self.known, self.own = [0] * num_workers, [0] * num_workers
        self._ahead, self._own_since_ahead = [0] * num_workers, [0] * num_workers  # the same for the prefetched x̃

    def read(self, worker):
        """Counts a read of x̃ by this worker."""
        self.known[worker], self.own[worker] = self.updates, 0

    def read_ahead(self, worker):
        """Counts a prefetch: from now on this worker computes with the x̃ of the previous one."""
        self.known[worker], self.own[worker] = self._ahead[worker], self._own_since_ahead[worker]
        self.restart(worker)

    def restart(self, worker):
        """Counts the prefetch with which this worker begins."""
        self._ahead[worker], self._own_since_ahead[worker] = self.updates, 0

    def update(self, worker, fragment=None):
        """Counts a gradient or a difference of this worker, towards the update of a quorum where there is one.

        Args:
          worker: its index.
          fragment: of a `send`, the number of its fragment of x̃.

        Returns:
          The newest global step known to the worker, and the one after its update: equal if the gradient is dropped.
        """
        before = self.updates
        if self._waiting.quorum is not None:
            counts, makes_update = self.turns.give(worker, fragment)
            self.updates, self.dropped = before + makes_update, self.dropped + (not counts)
            return before, before + counts
        known, threshold = self.known[worker] + self.own[worker], self._waiting.threshold
        if threshold is not None and before - known >= threshold:
            self.dropped += 1
            return before, before
        self.updates = before + 1
        self.own[worker] += 1
        self._own_since_ahead[worker] += 1
        return known, before + 1
