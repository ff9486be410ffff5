"""Membership of workers in a cluster, and its shutdown: reports to the chief, and the exit of the ps."""

import contextlib
import ctypes
import threading
import time

import numpy as np

from common import tf

WAKE_SECS = 1.0  # interval at which a chief that waits for reports checks all ps
PS_0 = "/job:ps/task:0"


class Members:
    """A table of the workers of a run, on a ps, with a row for each that has come, as operations in the present graph.

    A worker comes (it waits at the start barrier, or trains), reports when it has ended, and may leave for good. A place
    without a row is free. A killed worker stays until its restart takes its place: no worker counts twice.

    Each column is a hash table, so that a write needs no lock. They need no initialization, belong to no checkpoint and live as
    long as the ps: after its restart all workers register again, and those that have left are known from the run's folder.

    Args:
      device: device of the table, `PS_0` in a cluster; "" for this process.
      size: length of a report.
      begin: number of workers at the start of the run: these are expected before they come.
    """

    def __init__(self, device, size=1, begin=1):
        self.device, self.size, self._begin = device, size, begin
        with tf.device(device), tf.control_dependencies(None):
            self._came, self._left = (
                tf.raw_ops.MutableHashTableV2(key_dtype=tf.int64, value_dtype=tf.int64, shared_name=f"members_{column}")
                for column in ("came", "left")
            )
            self._reports = tf.raw_ops.MutableHashTableOfTensorsV2(
                key_dtype=tf.int64, value_dtype=tf.float64, value_shape=[size], shared_name="members_report"
            )
            self._who_came, self._who_left = self._workers(self._came), self._workers(self._left)

    def _workers(self, column):
        return tf.raw_ops.LookupTableExportV2(table_handle=column, Tkeys=tf.int64, Tvalues=tf.int64).keys

    def _insert(self, column, worker, value):
        return tf.raw_ops.LookupTableInsertV2(table_handle=column, keys=[worker], values=[value])

    def come(self, worker):
        """Returns the operation that registers a worker as arrived."""
        with tf.device(self.device):
            worker = tf.cast(worker, tf.int64)
            return self._insert(self._came, worker, worker)

    def enter(self, worker):
        """Revokes an earlier departure under this worker's number; returns whether there was one, a boolean scalar.

        To be run at the start of each session. The report of a worker that has ended stays.
        """
        with tf.device(self.device):
            worker, none = tf.cast(worker, tf.int64), tf.constant(-1, tf.int64)
            had_left = tf.raw_ops.LookupTableFindV2(table_handle=self._left, keys=worker, default_value=none) >= 0
            with tf.control_dependencies([had_left]):
                removed = [
                    tf.raw_ops.LookupTableRemoveV2(table_handle=column, keys=[tf.where(had_left, worker, none)])
                    for column in (self._left, self._reports)
                ]
            with tf.control_dependencies(removed):
                return tf.identity(had_left)

    def report(self, worker, report):
        """Returns the operation that stores a worker's report, `[size]`."""
        with tf.device(self.device):
            return self._insert(self._reports, tf.cast(worker, tf.int64), report)

    def leave(self, worker, report):
        """Returns the operation of a worker that leaves for good; it registers the arrival too: a ps may have lost it."""
        with tf.device(self.device):
            worker = tf.cast(worker, tf.int64)
            with tf.control_dependencies([self.come(worker), self.report(worker, report)]):
                return self._insert(self._left, worker, worker)

    def count(self):
        """Returns the number of workers that are there, an int64 scalar: worker 0, and those that have come and not left."""
        with tf.device(self.device):
            came, left = (tf.raw_ops.LookupTableSizeV2(table_handle=column) for column in (self._came, self._left))
            return 1 + came - left

    def reports(self):
        """Returns the workers that have reported, `[n]`, and their reports, `[n, size]`."""
        with tf.device(self.device):
            return tf.raw_ops.LookupTableExportV2(table_handle=self._reports, Tkeys=tf.int64, Tvalues=tf.float64)

    def who_came(self, session):
        """Returns the indices of the workers that have arrived, a set."""
        return set(session.run(self._who_came).tolist())

    def who_left(self, session):
        """Returns the indices of the workers that have left for good and are not back, a set."""
        return set(session.run(self._who_left).tolist())

    def expected(self, session):
        """Returns the indices of the workers that belong to the run, a set; the other places are free."""
        return {*range(self._begin), *self.who_came(session)}


class Rendezvous:
    """Final barrier of the workers of a cluster, as operations in the present graph.

    Each worker submits a report when it stops, and waits. The chief gathers all reports, finishes its work with the parameters,
    now constant, and dismisses the others. All wait on queues on ps 0. The reports stay in the table of members, so that a
    worker that is restarted meanwhile, even the chief, can continue where it was.

    Args:
      task: this worker.
      members: the `Members` of the cluster.
      kept: function that returns reports of workers that have left, {worker: numbers}: a restarted ps has lost its table.

    Attributes:
      is_gathering: whether this is the chief, waiting for reports.
      given_up: numbers of the workers whose reports it does not wait for, a set.
    """

    def __init__(self, task, members, kept=dict):
        self._came, self._members, self._kept = {task.shard_index}, members, kept
        self.given_up: set[int] = set()
        self.is_gathering = False
        self._all = self._awaited = set(range(task.num_workers))
        self._report = tf.placeholder(tf.float64, [members.size])
        with tf.device(members.device):
            arrivals = tf.queue.FIFOQueue(1000, tf.int64, shared_name="arrivals")
            dismissal = tf.queue.FIFOQueue(1, tf.bool, shared_name="dismissal")
            index = tf.constant(task.shard_index, tf.int64)
            hand_in, leave = members.report(index, self._report), members.leave(index, self._report)
            with tf.control_dependencies([hand_in]):
                arrive = arrivals.enqueue(index)
                self._hand_in_and_list = members.reports()
            with tf.control_dependencies([arrive]):
                self._hand_in_and_wait = dismissal.dequeue()
            with tf.control_dependencies([leave]):
                self._leave = arrivals.enqueue(index)
            self._next_arrival, self._wake = arrivals.dequeue(), arrivals.enqueue(index)
            self._dismiss = dismissal.close()
        self._touch = []
        for i in range(task.num_ps):
            with tf.device(f"/job:ps/task:{i}"):
                self._touch.append(tf.no_op())

    def wait(self, session, report):
        """Submits the report of a worker that is not the chief, and waits until it is dismissed."""
        with contextlib.suppress(tf.errors.OutOfRangeError):  # the chief closes this queue, always empty, to dismiss
            session.run(self._hand_in_and_wait, {self._report: report})

    def gather(self, session, report):
        """Submits the chief's report, waits for all workers, and returns their reports `[workers, size]` in order."""
        self.is_gathering = True
        while True:
            # Submits its own each time, since a restarted ps has lost it.
            (workers, reports), _ = session.run([self._hand_in_and_list, self._touch], {self._report: report})
            known = self._known(workers, reports)
            self._came, self._awaited = set(known), self._members.expected(session) - self.given_up
            if self._awaited <= self._came:
                self.given_up -= self._came  # they reported after all
                return np.array([known[worker] for worker in sorted(known)])
            with self._woken(session):
                session.run(self._next_arrival)

    @contextlib.contextmanager
    def _woken(self, session):
        """A context in which the wait for an arrival ends after `WAKE_SECS` at the latest.

        It waits on ps 0 alone: the chief would not notice the death of another ps whose parameters a worker waits for.
        """
        is_over = threading.Event()

        def wake():
            while not is_over.wait(WAKE_SECS):
                with contextlib.suppress(tf.errors.OpError, RuntimeError, AttributeError):  # the session is being recreated
                    session._tf_sess().run(self._wake)

        thread = threading.Thread(target=wake, daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()

    def give_up(self, workers):
        """Makes `gather`, in another thread, stop waiting for these workers."""
        self.given_up |= workers

    def leave(self, session, report):
        """Submits the report of a worker that leaves for good: nobody waits for it any more."""
        session.run(self._leave, {self._report: report})

    def absent(self, session):
        """Returns the numbers of workers that have left for good and are not back, and of free places."""
        left = self._members.who_left(session) | set(self._kept()) - self._members.who_came(session)
        return sorted(left | self._all - self._members.expected(session))

    def _known(self, workers, reports):
        return self._kept() | dict(zip(workers.tolist(), reports, strict=True))

    def missing(self):
        """Returns the workers that `gather` waits for, as ["worker 3"]."""
        return [f"worker {i}" for i in sorted(self._awaited - self._came)]

    def dismiss(self, session):
        """Lets the other workers exit; called by the chief."""
        with contextlib.suppress(tf.errors.CancelledError):  # already dismissed before the chief was restarted
            session.run(self._dismiss)


def _departures(ps_index):
    """The queue of a ps for workers that depart: pairs of a worker and 0, or the time of this ps at which it may be back."""
    with tf.device(f"/job:ps/task:{ps_index}"):
        return tf.queue.FIFOQueue(1000, [tf.int64, tf.float64], [[], []], shared_name="departures")


def say_done(task, server, others=()):
    """Tells every ps that this worker is done, and so are `others`, which have left for good."""
    say_done_for(task, server, [task.shard_index, *others])


def say_done_for(task, server, workers):
    """Tells every ps that these workers are done."""

    def depart(i):
        return _departures(i).enqueue_many([tf.constant(workers, tf.int64), tf.zeros(len(workers), tf.float64)])

    if workers:
        _say(task, server, depart)


def say_left(task, server):
    """Tells every ps that this worker was interrupted and has saved all its state; see `ask_to_end`."""

    def depart(i):
        with tf.device(f"/job:ps/task:{i}"):
            return _departures(i).enqueue([tf.constant(task.shard_index, tf.int64), tf.timestamp()])

    _say(task, server, depart, tf.RunOptions(timeout_in_ms=1000 * LEFT_SECONDS))


def say_gone(task, server, report):
    """Records arrival, report and departure of a worker that leaves before it has a session; from any thread.

    Returns after `LEFT_SECONDS` at the latest.
    """

    def say():
        with tf.Graph().as_default() as graph:
            rendezvous = Rendezvous(task, Members(PS_0, len(report)))
            with tf.Session(server.target, graph, config=task.config()) as session:
                rendezvous.leave(session, report)
        say_left(task, server)

    saying = threading.Thread(target=say, daemon=True)
    saying.start()
    saying.join(LEFT_SECONDS)


def has_code_of_chief(task, server, code):
    """Whether this worker's code equals that of worker 0, which publishes it here; true if worker 0 has not done so yet."""
    with tf.Graph().as_default() as graph, tf.device("/job:ps/task:0"):
        table = tf.raw_ops.MutableHashTableV2(key_dtype=tf.int64, value_dtype=tf.string, shared_name="code")
        of_chief = tf.constant(0, tf.int64)
        if task.is_master():
            tells = tf.raw_ops.LookupTableInsertV2(table_handle=table, keys=[of_chief], values=[code])
        else:
            tells = tf.raw_ops.LookupTableFindV2(table_handle=table, keys=of_chief, default_value=code)
    with tf.Session(server.target, graph, config=task.config()) as session:
        return session.run(tells) in (None, code.encode())


def _say(task, server, word, options=None):
    graph = tf.Graph()
    with graph.as_default():
        says = [word(i) for i in range(task.num_ps)]
    session = tf.Session(server.target, graph, config=task.config())
    # The last message makes a ps exit at once, maybe before it answers.
    its_end = tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError, tf.errors.DeadlineExceededError
    for say in says:  # one `run` per ps, as an error of one operation fails the whole `run`
        with contextlib.suppress(*its_end):
            session.run(say, options=options)
    never_close(session)


def never_close(session):
    """Keeps a session open, even at interpreter exit: closing it waits for each of its tasks, for ever if one has exited."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(session))


LEFT_SECONDS = 10  # a scheduler stops a ps and its workers within this time; a worker that left earlier may be back
_ASKED = -1  # in place of a worker: the ps itself is asked to end


def serve(task, server):
    """Serves as a ps until every worker has reported that it is done."""
    done = _Done()
    with tf.Graph().as_default():
        next_departure = _departures(task.index).dequeue()
        with tf.Session(server.target, config=_alone(task)) as session:
            while len(done.workers) < task.num_workers:
                done.add(*session.run(next_departure))


class _Done:
    """The workers that are done; once the ps is asked to end, workers that leave count, too.

    So the chief can save a checkpoint before.
    """

    def __init__(self):
        self.workers: set[int] = set()
        self._left: list[tuple[int, float]] = []
        self._asked = None

    def add(self, worker, moment):
        """Takes a pair from the queue of departures."""
        if worker == _ASKED:
            self._asked = moment
        elif moment:
            self._left.append((int(worker), moment))
        else:
            self.workers.add(int(worker))
        if self._asked is not None:
            self.workers |= {worker for worker, moment in self._left if has_just_left(moment, self._asked)}
            self._left.clear()


def ask_to_end(task, server):
    """Makes `serve`, in another thread of this ps, count workers that leave as done."""
    with tf.Graph().as_default():
        ask = _departures(task.index).enqueue([tf.constant(_ASKED, tf.int64), tf.constant(time.time(), tf.float64)])
        with tf.Session(server.target, config=_alone(task)) as session:
            session.run(ask)


def _alone(task):
    """Returns the configuration of a session that does not wait for other ps tasks: they may have exited."""
    return task.config(tf.ConfigProto(device_filters=[task.device]))


def has_just_left(moment, asked):
    """Whether a worker that left at `moment` left with a ps that was `asked` to end; both by the wall clock of that ps.

    A moment in the future means that this clock was set back since: then nobody knows, and the worker may be back.
    """
    return asked - LEFT_SECONDS < moment <= time.time()
