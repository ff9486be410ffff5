"""The monitored session of a task: recreated from the newest checkpoint after a ps restart."""

import contextlib
import os
import re
from typing import Any

from common import tf
from common.cluster import membership
from common.core import UserError, checkpoints_in, devices, meanwhile, newest_good_checkpoint, nobody, writing_into


class Saver(tf.train.Saver):
    """A saver with a one-line error if a checkpoint cannot be written; earlier checkpoints stay intact."""

    def save(self, sess, save_path, *args, **kwargs):
        """As `tf.train.Saver.save`.

        Raises:
          TrainingFailed: if the disk is full, read-only or gone.
        """
        with writing_into(os.path.dirname(save_path)):
            return super().save(sess, save_path, *args, **kwargs)


@contextlib.contextmanager
def _lost_ps():
    """Turns a `CancelledError` that a ps restart caused into an `AbortedError`, after which a monitored session recovers.

    TensorFlow reports the first error of a call's devices. A transfer that it cancelled itself may come before its cause.
    """
    try:
        yield
    except tf.errors.CancelledError as error:
        if not re.search("^(ABORTED|UNAVAILABLE): ", error.message, re.MULTILINE):
            raise
        raise tf.errors.AbortedError(error.node_def, error.op, error.message) from error


class _Session(tf.Session):
    def run(self, *args, **kwargs):
        with _lost_ps():
            return super().run(*args, **kwargs)


class _SessionOfWorkers(_Session):
    """A session that reaches other workers. It is never closed: that would wait for an answer of those that have ended."""

    def close(self):
        membership.never_close(self)


class _Creator(tf.train.SessionCreator):
    """As `tf.train.ChiefSessionCreator` and `WorkerSessionCreator`, with two differences.

    A chief that finds initialized parameters on the ps keeps them and restores only lost ones. And the other workers poll every
    0.1 s for initialized parameters; TensorFlow's creator polls every 30 s, so workers would start up to 30 s late.
    """

    def __init__(self, task, scaffold, target, checkpoint_dir, config, keeper=None, reaches_workers=False):
        self._task, self._scaffold, self._target, self._checkpoint_dir = task, scaffold, target, checkpoint_dir
        self._config, self._keeper = task.config(config, reaches_workers) if task else config, keeper
        self._class = _SessionOfWorkers if reaches_workers else _Session

    def create_session(self):
        is_chief = self._task is None or self._task.is_master()
        what = "initializing or restoring the parameters" if is_chief else "waiting for the chief to initialize the parameters"
        # Workers wait for the chief; if it waits for workers in turn, it reports that itself.
        with meanwhile(what, waits=not is_chief, whom=nobody if is_chief else lambda: ["worker 0"]), _lost_ps():
            session = self._create_session()
            session.__class__ = self._class  # `SessionManager` creates a plain `tf.Session`
            return session

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
        # As its `init_fn`, since the manager itself would restore a checkpoint over live parameters.
        session = manager.prepare_session(
            self._target, config=self._config, init_fn=lambda session: is_new.append(self._provide(session, scaffold))
        )
        session.is_new = is_new[-1]  # for hooks: whether the variables have their initial values
        return session

    def _provide(self, session, scaffold):
        """Initializes or restores lost global variables; returns whether their values are the initial ones."""
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
            scaffold.saver.recover_last_checkpoints(paths[: paths.index(newest) + 1])  # rotated out in turn
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
    """Turns the saver's error about an incompatible checkpoint into one line.

    Args:
      what: name of the checkpoint, for the message.
      otherwise: alternative to its own model, for the message.
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
        # The saver reports only that restoring failed; if no key is missing, the shapes differ.
        is_of_another = missing or isinstance(error, tf.errors.InvalidArgumentError)
        if "Restoring from checkpoint failed" not in str(error) or not is_of_another:
            raise
        why = f"it has no {missing[1]!r}" if missing else "it has another number of parameters"
        raise UserError(f"{what} does not fit: {why}; use the model that it was saved with, or {otherwise}") from None


def _check_shapes(what, otherwise, saver, checkpoint):
    """Raises a `UserError` if a variable's shape differs from the checkpoint's: the saver would assign it anyway."""
    saved, variables = tf.train.load_checkpoint(checkpoint).get_variable_to_shape_map(), saver._var_list or []
    named = variables.items() if isinstance(variables, dict) else ((v.op.name, v) for v in variables if hasattr(v, "shape"))
    for name, variable in named:
        if not hasattr(variable, "shape") or variable._get_save_slice_info():
            continue  # a partition of a variable; the saver checks those
        if name in saved and not variable.shape.is_compatible_with(saved[name]):
            raise UserError(
                f"{what} does not fit: it has {name!r} of shape {saved[name]}, not {variable.shape.as_list()}; "
                f"use the model that it was saved with, or {otherwise}"
            )


class _LeavingSession(tf.train.MonitoredSession):
    """A monitored session that tells the ps tasks of a normal close; after an error the worker may be restarted."""

    def __init__(self, task_spec, *arguments):
        self._task_spec = task_spec
        super().__init__(*arguments)

    def close(self):
        """Closes the session, and tells the ps tasks that this worker is done."""
        super().close()
        self._leave()

    def __exit__(self, exception_type, exception, traceback):
        suppressed = super().__exit__(exception_type, exception, traceback)
        if exception_type in (None, tf.errors.OutOfRangeError, StopIteration):  # normal ends of an input or a loop
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
    """Counterpart of `tf.train.MonitoredTrainingSession` for this task of a cluster, or for one process.

        with DistributedSession(task_spec, checkpoint_dir, hooks=[tf.train.StopAtStepHook(last_step=1000)]) as session:
            while not session.should_stop():
                session.run(train_op)

    The master initializes the variables or restores them from the newest checkpoint, and saves them, also at the end; the
    others wait for the initialization. No task waits for an absent worker: device filters are set, also in your own `config`
    if it has none. After a ps restart `run` continues from the newest checkpoint. A normal exit from the session tells the ps
    tasks that this worker is done; an error does not, since the worker may be restarted.

    Args:
      task_spec: a `TaskSpecDef`; None for one process, with no servers. On a ps, this serves until training is over and then
        exits the program.
      config: a `tf.ConfigProto`.
      others: as in `tf.train.MonitoredTrainingSession`. By default summaries are saved every 100 steps; they go into
        `checkpoint_dir`, as do the steps per second.

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
    scaffold = scaffold or _scaffold()
    own: list[Any] = []
    if task_spec is not None and task_spec.device:
        _provide_own(scaffold, task_spec)
    if task_spec is None or task_spec.is_master():
        own = list(chief_only_hooks or [])
        if checkpoint_dir:
            every = save_summaries_steps, save_summaries_secs
            own += _hooks_of_files(checkpoint_dir, scaffold, log_step_count_steps, every, save_checkpoint_secs)
    creator = _Creator(task_spec, scaffold, target, checkpoint_dir, config)
    return _LeavingSession(task_spec, creator, [*own, *(hooks or [])], stop_grace_period_secs)


def _hooks_of_files(folder, scaffold, count_steps, summaries, checkpoint_secs):
    """Yields the master's hooks that write into `checkpoint_dir`; `summaries` are steps and seconds between two of them."""
    if count_steps:
        yield tf.train.StepCounterHook(count_steps, output_dir=folder)
    steps, secs = (None if given is _DEFAULT else given for given in summaries)
    if summaries == (_DEFAULT, _DEFAULT):
        steps = 100
    if steps or secs:
        yield tf.train.SummarySaverHook(steps, secs, output_dir=folder, scaffold=scaffold)
    if checkpoint_secs:
        yield _saver_hook(folder, checkpoint_secs, scaffold)


def _check_tokens():
    """Raises a `UserError` if a graph has two `SyncReplicasOptimizer`s: they would share one token queue."""
    operations = tf.get_default_graph().get_operations()
    queues = [each for each in operations if each.type == "FIFOQueueV2" and each.get_attr("shared_name") == b"sync_token_q"]
    if len(queues) > 1:
        raise UserError(
            f"the graph has {len(queues)} SyncReplicasOptimizers, and {', '.join(each.name for each in queues)} would be one "
            "queue of tokens on the ps: apply the gradients of all variables with one of them"
        )


def _provide_own(scaffold, task):
    """Lets a task initialize the global variables on its own device, such as optimizer slots of local variables.

    No other task can, and none waits for them. The master's are in its checkpoints, like all of its global variables. A user's
    scaffold with a readiness or init operation of its own stays unchanged.
    """
    device = tf.DeviceSpec.from_string(task.device)
    own: list[Any] = []
    others: list[Any] = []
    for variable in tf.global_variables():
        place = tf.DeviceSpec.from_string(variable.device or "")
        (own if (place.job, place.task) == (device.job, device.task) else others).append(variable)
    if not own or scaffold.ready_for_local_init_op is not None or scaffold.local_init_op is not None:
        return
    initialized = [
        tf.cond(tf.is_variable_initialized(v), tf.no_op, lambda v=v: tf.group(tf.assign(v, v.initial_value))) for v in own
    ]
    scaffold._ready_for_local_init_op = tf.report_uninitialized_variables(others)
    scaffold._local_init_op = tf.group(tf.train.Scaffold.default_local_init_op(), *initialized)


def _scaffold():
    """A scaffold whose saver writes checkpoints on the master.

    By default each TensorFlow ps writes its shard on its own machine, and fails if the folder does not exist there.
    """
    if tf.get_collection(tf.GraphKeys.SAVERS):
        return tf.train.Scaffold()  # uses the saver of that collection
    return tf.train.Scaffold(saver=Saver(allow_empty=True, save_relative_paths=True, defer_build=True))


def _saver_hook(checkpoint_dir, checkpoint_secs, scaffold):
    return tf.train.CheckpointSaverHook(checkpoint_dir, save_secs=checkpoint_secs, scaffold=scaffold, save_graph_def=False)


def monitored_session(
    task,
    target,
    scaffold,
    checkpoint_dir,
    checkpoint_secs,
    hooks=(),
    keeper=None,
    is_short=False,
    reaches_workers=False,
):
    """Returns a `tf.train.MonitoredSession` for this task; its end tells the ps tasks nothing, see `membership.say_done`.

    The chief (and a single process, `task` None) initializes lost global variables or restores them from the newest checkpoint.
    The `common.core.Keeper` saves them. Without one the chief saves between its calls: at the start, every `checkpoint_secs`
    seconds and at the end.

    `is_short`: optimizing the graphs would take longer than it saves. `reaches_workers`: the graph has operations of others.
    """
    hooks = list(hooks)
    if keeper:
        hooks.append(keeper)
    elif task is None or task.is_master():
        hooks.append(_saver_hook(checkpoint_dir, checkpoint_secs, scaffold))
    config = tf.ConfigProto(allow_soft_placement=True)
    rewriting, optimizing = config.graph_options.rewrite_options, config.graph_options.optimizer_options
    # The fused operation of a small layer is slower: see benchmarks/README.md.
    rewriting.remapping = type(rewriting).OFF
    rewriting.meta_optimizer_iterations = rewriting.ONE  # a second pass finds nothing more and takes as long
    if is_short and not devices.gpus():  # on a GPU, the optimizer is needed for the image layout
        rewriting.disable_meta_optimizer = True
        optimizing.opt_level = optimizing.L0
    creator = _Creator(task, scaffold, target, checkpoint_dir, config, keeper, reaches_workers)
    return tf.train.MonitoredSession(creator, hooks)
