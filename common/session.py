"""The monitored session of a task: created anew when a ps dies and comes back, restored from the newest checkpoint."""

import re

from common import tf
from common.flags import UserError


class _Creator(tf.train.SessionCreator):
    """What `tf.train.ChiefSessionCreator` and `WorkerSessionCreator` do, looking every 0.1 s whether the chief has initialized
    the parameters. Theirs looks every 30 s, so each worker would start that late."""

    def __init__(self, task, scaffold, target, checkpoint_dir):
        self._task, self._scaffold, self._target, self._checkpoint_dir = task, scaffold, target, checkpoint_dir

    def create_session(self):
        scaffold = self._scaffold.finalize()
        manager = tf.train.SessionManager(
            local_init_op=scaffold.local_init_op,
            local_init_feed_dict=scaffold.local_init_feed_dict,
            ready_op=scaffold.ready_op,
            ready_for_local_init_op=scaffold.ready_for_local_init_op,
            graph=tf.get_default_graph(),
            recovery_wait_secs=0.1,
        )
        config = self._task.config() if self._task else None
        if self._task and not self._task.is_master():
            return manager.wait_for_session(self._target, config=config)
        try:
            return manager.prepare_session(
                self._target,
                config=config,
                saver=scaffold.saver,
                checkpoint_dir=self._checkpoint_dir,
                init_op=scaffold.init_op,
                init_feed_dict=scaffold.init_feed_dict,
            )
        except (tf.errors.NotFoundError, tf.errors.InvalidArgumentError) as error:
            missing = re.search(r"Key (\S+) not found", str(error))
            # The saver says that restoring failed; if nothing is missing, the shapes differ.
            is_of_another = missing or isinstance(error, tf.errors.InvalidArgumentError)
            if "Restoring from checkpoint failed" not in str(error) or not is_of_another:
                raise
            what = f"it has no {missing[1]!r}" if missing else "its parameters are as many as another model has"
            raise UserError(
                f"the checkpoint in {self._checkpoint_dir} is not of this scheme and model: {what}; give the flags that the "
                "run was begun with, or another --run_dir"
            ) from None


def monitored_session(task, target, scaffold, checkpoint_dir, checkpoint_secs, hooks=()):
    """Returns a `tf.train.MonitoredSession` for this task.

    The chief (and a process on its own, `task` None) initializes the global variables or restores them from the newest
    checkpoint, and saves one at the beginning, every `checkpoint_secs` seconds and at the end.
    """
    hooks = list(hooks)
    if task is None or task.is_master():
        saver = tf.train.CheckpointSaverHook(checkpoint_dir, save_secs=checkpoint_secs, scaffold=scaffold, save_graph_def=False)
        hooks.append(saver)
    return tf.train.MonitoredSession(_Creator(task, scaffold, target, checkpoint_dir), hooks)
