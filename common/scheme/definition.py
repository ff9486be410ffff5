"""A training scheme as its folder's script defines it: its function, its pace, and the flags of the script."""

import difflib
import time

from common.core import RunFacts, UserError, flags

PACES = ("own", "together", "ring")
# Flags without meaning for a script that has
BARRIERS = ("warm_start_steps",)  # workers that wait for each other: they start together
NO_PUSH = ("compress", "compress_pull", "topk", "ema")  # no messages between a scheme and the ps
NO_RULE = (  # a main loop of its own
    *("start_secs", "clip_norm", "learning_rate_schedule", "warmup_steps", "weight_decay", "groups", "max_workers"),
    *("validation", "patience", "callback", "test_data", "label", "parse", "missing", "hash_strings", "data_cache", "stream"),
    *("table_optimizer", "table_learning_rate", "save_tables", "max_rows", "init_from"),  # its tables are in the model
)
NO_LAUNCH = ("gpus", "max_workers")  # one process
REPLACED = ("weight_decay", "local_learning_rate")  # flags that a scheme may define anew, with a default and a text of its own


class Scheme:
    """A training scheme. Its script has one, called SCHEME, and passes it to `common.main`.

        SCHEME = Scheme(hogwild, flags=[flags.overlap()], epochs=60, batch_size=32, learning_rate=0.1)

        if __name__ == "__main__":
            main(SCHEME)

    Args:
      function: generator function of (center, local, hp), see `common.scheme.steps`.
      train: instead of `function`, for a script with its own main loop: a function `train(task, settings)` as in
        `common.training`. The loop calls `task_status.doing(...)` at each call, or the launcher treats it as hung.
      pace: "own" for workers without a barrier; "together" for workers that wait for each other at the ps, as with
        `center.together` and `center.pace`; "ring" for workers that wait among themselves, with `center.ring`: all are
        restarted when one has died.
      optimizer_on: "ps" or "worker", the place of the optimizer in the scheme's paper: its learning rates follow a schedule,
        and weight decay shrinks the parameters there, see `common.scheme.hyperparameters`.
      flags: the scheme's own flags, made by `flags.number` and the functions beside it; `hp` has their values.
      check: function of the flags, a namespace, that raises a `UserError` for an invalid combination.
      evaluate: function `evaluate(task, settings)` that the last worker of a cluster runs instead of training.
      without: names of flags without meaning for this script, as the cluster flags for one that always trains alone.
      **defaults: the scheme's own defaults of the flags of every scheme, by name.

    Raises:
      UserError: for an argument that cannot be, such as the default of a flag that does not exist.
    """

    def __init__(
        self,
        function=None,
        *,
        train=None,
        pace="own",
        optimizer_on="ps",
        flags=(),
        check=None,
        evaluate=None,
        without=(),
        **defaults,
    ):
        self.function, self.train, self.pace, self.optimizer_on = function, train, pace, optimizer_on
        self.flags, self.check, self.evaluate, self.defaults = tuple(flags), check, evaluate, defaults
        self.without = (
            *without,
            *(BARRIERS if train or pace != "own" else ()),
            *(NO_PUSH if train or pace == "ring" else ()),
            *(NO_RULE if train else ()),
            *(NO_LAUNCH if "launch" in without else ()),
        )
        self._check()

    def _check(self):
        if callable(self.function) == callable(self.train):
            raise UserError("a Scheme needs a generator function of (center, local, hp), or train=, a main loop of its own")
        if self.pace not in PACES:
            raise UserError(f"Scheme(pace={self.pace!r}): expected one of {', '.join(map(repr, PACES))}")
        if self.optimizer_on not in ("ps", "worker"):
            raise UserError(f"Scheme(optimizer_on={self.optimizer_on!r}): expected 'ps' or 'worker'")
        known = {flag.name for flag in flags.of_every_scheme(self.defaults)}
        for name in sorted(self.defaults.keys() - known):
            near = difflib.get_close_matches(name, known, 1)
            raise UserError(f"Scheme({name}=...): there is no flag --{name}" + (f"; did you mean {near[0]}?" if near else ""))
        for name in self.own_flags:
            if name in known and name not in REPLACED:
                what = f"give its default, Scheme({name}=...), or choose another name"
                raise UserError(f"--{name} is a flag of every scheme: {what}")

    @property
    def name(self):
        """The name of its function."""
        return (self.function or self.train).__name__

    @property
    def own_flags(self):
        """The names of the scheme's own flags, without aliases, sorted."""
        return sorted(flag.name for flag in self.flags if not isinstance(flag, flags.alias))

    def facts(self, name, num_workers):
        """Returns the `common.core.RunFacts` of a run of this scheme that begins now, with this many workers.

        Args:
          name: of the scheme's folder.
          num_workers: number of workers at the beginning.
        """
        return RunFacts(name, self.pace, self.optimizer_on, self.own_flags, time.monotonic(), num_workers)

    def flag_values(self, *more, **defaults):
        """Returns the `absl.flags.FlagValues` of a command line: the flags of every scheme, the scheme's own, and `more`.

        Args:
          *more: flags of a program that runs this scheme, as the simulator.
          **defaults: that program's defaults of the flags of every scheme, where the scheme has none of its own.
        """
        own = {flag.name: flag for flag in (*self.flags, *more)}
        common = {flag.name: flag for flag in flags.of_every_scheme({**defaults, **self.defaults})}
        return flags.table(*(common | own).values())
