"""The monitored session of a task: created anew when a ps dies and comes back, restored from the newest checkpoint."""

import contextlib
import os
import re

from common import tf
from common.cluster import membership
from common.core import UserError, checkpoints_in, devices, meanwhile, newest_good_checkpoint, nobody, writing_into


class Saver(tf.train.Saver):
    """A saver that says in one line why a checkpoint cannot be written. TensorFlow leaves those before it as they are."""

    def save(self, sess, save_path, *args, **kwargs):
        """As `tf.train.Saver.save`.

        Raises:
          TrainingFailed: if the disk is full, read-only or gone.
        """
        with writing_into(os.path.dirname(save_path)):
            return super().save(sess, save_path, *args, **kwargs)


class _Creator(tf.train.SessionCreator):
    """Does the same as `tf.train.ChiefSessionCreator` and `WorkerSessionCreator`, with two differences.

    A chief that finds initialized parameters on the ps goes on with them: it restores only what is lost. And the others look
    every 0.1 s whether the chief has initialized the parameters. Theirs looks every 30 s, so each worker would start that late.
    """

    def __init__(self, task, scaffold, target, checkpoint_dir, config, keeper=None):
        self._task, self._scaffold, self._target, self._checkpoint_dir = task, scaffold, target, checkpoint_dir
        self._config, self._keeper = task.config(config) if task else config, keeper

    def create_session(self):
        is_chief = self._task is None or self._task.is_master()
        what = "initializing or restoring the parameters" if is_chief else "waiting for the chief to initialize the parameters"
        # The chief lets them begin when all have come: that it waits for these, it says itself.
        with meanwhile(what, waits=not is_chief, whom=nobody if is_chief else lambda: ["worker 0"]):
            return self._create_session()

    def _create_session(self):
        scaffold = self._scaffold.finalize()
        manager = tf.train.SessionManager(
            local_init_op=scaffold.local_init_op,
            local_init_feed_dict=scaffold.local_init_feed_dict,
            ready_op=scaffold.ready_op,
            ready_for_local_init_op=scaffold.ready_for_local_init_op,
            graph=tf.get_default_graph(),
            recovery_wait_secs=0.1,
        )
        if self._task and not self._task.is_master():
            session = manager.wait_for_session(self._target, config=self._config)
            session.is_new = False
            return session
        is_new = []
        # As its `init_fn`, since the manager itself would restore a checkpoint over parameters that live.
        session = manager.prepare_session(
            self._target, config=self._config, init_fn=lambda session: is_new.append(self._provide(session, scaffold))
        )
        session.is_new = is_new[-1]  # for hooks: whether its variables have their initial values
        return session

    def _provide(self, session, scaffold):
        """Gives the global variables their values, unless they have them; returns whether these are the initial ones."""
        keeper = self._keeper
        if keeper or self._task and tf.global_variables():
            lost = session.run(keeper.has_lost if keeper else scaffold.ready_for_local_init_op)
            if not lost.size:
                if keeper:
                    keeper.adopt(session)
                elif paths := checkpoints_in(self._checkpoint_dir):
                    scaffold.saver.recover_last_checkpoints(paths)
                return False
        if keeper:
            keeper.lose(session)
        newest = newest_good_checkpoint(self._checkpoint_dir)
        if newest:
            paths = checkpoints_in(self._checkpoint_dir)
            scaffold.saver.recover_last_checkpoints(paths[: paths.index(newest) + 1])  # which are to be removed in their turn
            what, otherwise = f"the checkpoint in {self._checkpoint_dir}", "another --run_dir or checkpoint_dir"
            with restoring(what, otherwise, scaffold.saver, newest):
                scaffold.saver.restore(session, newest)
                if keeper:
                    keeper.restore_tables(session, newest)
        else:
            session.run(scaffold.init_op, scaffold.init_feed_dict)
            if scaffold.init_fn:
                scaffold.init_fn(session)
        if keeper:
            keeper.begin_run(session, newest)
        return not newest


@contextlib.contextmanager
def restoring(what, otherwise, saver, checkpoint):
    """Turns the saver's complaint that a checkpoint does not fit into one line.

    Args:
      what: names the checkpoint.
      otherwise: what else to give than the model that it is of.
      saver: the `tf.train.Saver` that restores it.
      checkpoint: its path; None if there is none.

    Raises:
      UserError: in place of the saver's errors.
    """
    try:
        if checkpoint:
            _check_shapes(what, otherwise, saver, checkpoint)
        yield
    except tf.errors.DataLossError as error:
        raise UserError(f"{what} is damaged: {error.message.splitlines()[0]}; give {otherwise}") from None
    except (tf.errors.NotFoundError, tf.errors.InvalidArgumentError) as error:
        missing = re.search(r"Key (\S+) not found", str(error))
        # The saver says that restoring failed; if nothing is missing, the shapes differ.
        is_of_another = missing or isinstance(error, tf.errors.InvalidArgumentError)
        if "Restoring from checkpoint failed" not in str(error) or not is_of_another:
            raise
        why = f"it has no {missing[1]!r}" if missing else "it has another number of parameters"
        raise UserError(f"{what} does not fit: {why}; use the model that it was saved with, or {otherwise}") from None


def _check_shapes(what, otherwise, saver, checkpoint):
    """Raises a `UserError` unless variables have the shapes that they have in the checkpoint: the saver assigns any."""
    saved, variables = tf.train.load_checkpoint(checkpoint).get_variable_to_shape_map(), saver._var_list or []
    named = variables.items() if isinstance(variables, dict) else ((v.op.name, v) for v in variables if hasattr(v, "shape"))
    for name, variable in named:
        if not hasattr(variable, "shape") or variable._get_save_slice_info():
            continue  # a part of a variable, which the saver itself checks
        if name in saved and not variable.shape.is_compatible_with(saved[name]):
            raise UserError(
                f"{what} does not fit: it has {name!r} of shape {saved[name]}, not {variable.shape.as_list()}; "
                f"use the model that it was saved with, or {otherwise}"
            )


class _LeavingSession(tf.train.MonitoredSession):
    """A monitored session that tells the ps tasks when it is closed in peace. If it failed, the worker may come back."""

    def __init__(self, task_spec, *arguments):
        self._task_spec = task_spec
        super().__init__(*arguments)

    def close(self):
        """Closes the session; this worker needs the ps tasks no more."""
        super().close()
        self._leave()

    def __exit__(self, exception_type, exception, traceback):
        suppressed = super().__exit__(exception_type, exception, traceback)
        if exception_type in (None, tf.errors.OutOfRangeError, StopIteration):  # the two that end an input, and a loop
            self._leave()
        return suppressed

    def _leave(self):
        if self._task_spec and self._task_spec.create_server():
            membership.say_done(self._task_spec, self._task_spec.create_server())


_DEFAULT = object()


def DistributedSession(
    task_spec=None,
    checkpoint_dir=None,
    scaffold=None,
    hooks=None,
    chief_only_hooks=None,
    save_checkpoint_secs=600,
    save_summaries_steps=_DEFAULT,
    save_summaries_secs=_DEFAULT,
    config=None,
    stop_grace_period_secs=120,
    log_step_count_steps=100,
):
    """Returns what `tf.train.MonitoredTrainingSession` would for this task of a cluster, or for one process.

        with DistributedSession(task_spec, checkpoint_dir, hooks=[tf.train.StopAtStepHook(last_step=1000)]) as session:
            while not session.should_stop():
                session.run(train_op)

    The master initializes the variables, or restores them from the newest checkpoint, and saves them, also at the end; the
    others wait until it has. No task waits for a worker that is not there: the device filters are set, in a `config` of your
    own, too, if that has none. When a ps dies and comes back, `run` goes on from the newest checkpoint. Leaving the session
    tells the ps tasks that this worker is done; after an error it does not, since the worker may be started again.

    Args:
      task_spec: a `TaskSpecDef`; None for one process, with no servers. If it is a ps, this serves until the training is over
        and then ends the program.
      config: a `tf.ConfigProto`.
      others: as `tf.train.MonitoredTrainingSession` has them. Summaries are saved every 100 steps unless one of the two says
        otherwise, and go into `checkpoint_dir`, as do the steps per second.

    Raises:
      UserError: if there is no graph, if this is an evaluator, or if the checkpoint does not fit.
      SystemExit: on a ps.
    """
    if task_spec is not None and task_spec.is_ps():
        task_spec.create_server()
        raise SystemExit(0)
    if task_spec is not None and task_spec.is_evaluator():
        raise UserError(
            "an evaluator does not train: ask is_evaluator() first, and then restore checkpoints in a session of its own, as "
            "Continuous-Evaluation does"
        )
    if tf.executing_eagerly():
        raise UserError("there is no graph: build it, and open the session, inside `with tf.Graph().as_default():`")
    target = task_spec.target() if task_spec is not None else ""
    _check_tokens()
    scaffold, all_hooks = scaffold or _scaffold(), list(hooks or [])
    if task_spec is not None and task_spec.device:
        _provide_own(scaffold, task_spec)
    if task_spec is None or task_spec.is_master():
        own = list(chief_only_hooks or [])
        if checkpoint_dir:
            if save_summaries_steps is _DEFAULT:
                save_summaries_steps = 100 if save_summaries_secs is _DEFAULT else None
            if save_summaries_secs is _DEFAULT:
                save_summaries_secs = None
            if log_step_count_steps:
                own.append(tf.train.StepCounterHook(log_step_count_steps, output_dir=checkpoint_dir))
            if save_summaries_steps or save_summaries_secs:
                own.append(
                    tf.train.SummarySaverHook(
                        save_summaries_steps, save_summaries_secs, output_dir=checkpoint_dir, scaffold=scaffold
                    )
                )
            if save_checkpoint_secs:
                own.append(_saver_hook(checkpoint_dir, save_checkpoint_secs, scaffold))
        all_hooks = own + all_hooks
    creator = _Creator(task_spec, scaffold, target, checkpoint_dir, config)
    return _LeavingSession(task_spec, creator, all_hooks, stop_grace_period_secs)


def _check_tokens():
    """Raises a `UserError` if two of TensorFlow's `SyncReplicasOptimizer` in a graph would wait for each other's tokens."""
    operations = tf.get_default_graph().get_operations()
    queues = [each for each in operations if each.type == "FIFOQueueV2" and each.get_attr("shared_name") == b"sync_token_q"]
    if len(queues) > 1:
        raise UserError(
            f"the graph has {len(queues)} SyncReplicasOptimizers, and {', '.join(each.name for each in queues)} would be one "
            "queue of tokens on the ps: apply the gradients of all variables with one of them"
        )


def _provide_own(scaffold, task):
    """Lets a task itself initialize its own global variables, those on its device: slots of an optimizer of local variables.

    No other task can, and none waits for them. The master's are in its checkpoints, as all of its global variables are. Where a
    user's scaffold says when the variables are ready, that holds.
    """
    device = tf.DeviceSpec.from_string(task.device)

    def is_own(variable):
        place = tf.DeviceSpec.from_string(variable.device or "")
        return (place.job, place.task) == (device.job, device.task)

    own = [variable for variable in tf.global_variables() if is_own(variable)]
    if not own or scaffold.ready_for_local_init_op is not None or scaffold.local_init_op is not None:
        return
    others = [variable for variable in tf.global_variables() if not is_own(variable)]
    initialized = [
        tf.cond(tf.is_variable_initialized(v), tf.no_op, lambda v=v: tf.group(tf.assign(v, v.initial_value)))
        for v in own
    ]
    scaffold._ready_for_local_init_op = tf.report_uninitialized_variables(others)
    scaffold._local_init_op = tf.group(tf.train.Scaffold.default_local_init_op(), *initialized)


def _scaffold():
    """A scaffold whose saver lets the master write checkpoints. TensorFlow's own default lets each ps write its part, on its
    machine, and fails unless that has the folder, too."""
    if tf.get_collection(tf.GraphKeys.SAVERS):
        return tf.train.Scaffold()  # uses that one
    return tf.train.Scaffold(saver=Saver(allow_empty=True, save_relative_paths=True, defer_build=True))


def _saver_hook(checkpoint_dir, checkpoint_secs, scaffold):
    return tf.train.CheckpointSaverHook(checkpoint_dir, save_secs=checkpoint_secs, scaffold=scaffold, save_graph_def=False)


def monitored_session(task, target, scaffold, checkpoint_dir, checkpoint_secs, hooks=(), keeper=None, is_short=False):
    """Returns a `tf.train.MonitoredSession` for this task, whose end tells the ps tasks nothing: see `ending.say_done`.

    The chief (and a process on its own, `task` None) initializes the global variables or restores them from the newest
    checkpoint, if they are not there. The `common.core.Keeper` saves them. Without one the chief saves, between its
    calls: at the beginning, every `checkpoint_secs` seconds and at the end.

    `is_short` says that it takes longer to optimize the graphs than it saves.
    """
    hooks = list(hooks)
    if keeper:
        hooks.append(keeper)
    elif task is None or task.is_master():
        hooks.append(_saver_hook(checkpoint_dir, checkpoint_secs, scaffold))
    config = tf.ConfigProto(allow_soft_placement=True)
    rewriting, optimizing = config.graph_options.rewrite_options, config.graph_options.optimizer_options
    # TensorFlow would fuse a small layer's operations into one that takes longer: see benchmarks/README.md.
    rewriting.remapping = type(rewriting).OFF
    rewriting.meta_optimizer_iterations = rewriting.ONE  # the second finds nothing more, and takes as long
    if is_short and not devices.gpus():  # for a GPU, it changes the layout of images
        rewriting.disable_meta_optimizer = True
        optimizing.opt_level = optimizing.L0
    return tf.train.MonitoredSession(_Creator(task, scaffold, target, checkpoint_dir, config, keeper), hooks)
