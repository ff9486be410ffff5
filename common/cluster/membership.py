"""Membership of workers in a cluster, and its shutdown: reports to the chief, and the exit of the ps."""

import contextlib
import ctypes
import threading
import time

import numpy as np

from common import tf

WAKE_SECS = 1.0  # interval at which a chief that waits for reports checks all ps


class Rendezvous:
    """Final barrier of the workers of a cluster, as operations in the present graph.

    Each worker submits a report when it stops, and waits. The chief gathers all reports, finishes its work with the parameters,
    now constant, and dismisses the others. All wait on queues on ps 0. The reports stay in a table there, so that a worker that
    is restarted meanwhile, even the chief, can continue where it was.

    A worker that leaves for good submits its report and does not wait: see `leave`.

    Args:
      task: this worker.
      size: length of a report; its last number is 0, or the time at which the worker left for good.
      kept: function that returns reports of workers that have left, {worker: numbers}: a restarted ps has lost its table.
      expected: function of a session that returns the set of workers to expect; by default all. The others are free places.

    Attributes:
      is_gathering: whether this is the chief, waiting for reports.
      given_up: numbers of the workers whose reports it does not wait for, a set.
    """

    def __init__(self, task, size, kept=dict, expected=None):
        self._came, self._kept = {task.shard_index}, kept
        self.given_up: set[int] = set()
        self.is_gathering = False
        self._all = self._awaited = set(range(task.num_workers))
        self._expected = expected or (lambda session: self._all)
        self._report = report = tf.placeholder(tf.float64, [size])
        with tf.device("/job:ps/task:0"):
            table = tf.raw_ops.MutableHashTableOfTensorsV2(
                key_dtype=tf.int64, value_dtype=tf.float64, value_shape=[size], shared_name="reports"
            )
            arrivals = tf.queue.FIFOQueue(1000, tf.int64, shared_name="arrivals")
            dismissal = tf.queue.FIFOQueue(1, tf.bool, shared_name="dismissal")
            index = tf.constant(task.shard_index, tf.int64)
            hand_in = tf.raw_ops.LookupTableInsertV2(table_handle=table, keys=[index], values=[report])
            with tf.control_dependencies([hand_in]):
                arrive = arrivals.enqueue(index)
            self._hand_in = arrive
            self._list = tf.raw_ops.LookupTableExportV2(table_handle=table, Tkeys=tf.int64, Tvalues=tf.float64)
            nothing = tf.zeros([size], tf.float64)
            self._own = tf.raw_ops.LookupTableFindV2(table_handle=table, keys=index, default_value=nothing)
            self._take_back = tf.raw_ops.LookupTableRemoveV2(table_handle=table, keys=[index])
            with tf.control_dependencies([arrive]):
                self._hand_in_and_wait = dismissal.dequeue()
            with tf.control_dependencies([hand_in]):
                self._hand_in_and_list = tf.raw_ops.LookupTableExportV2(table_handle=table, Tkeys=tf.int64, Tvalues=tf.float64)
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
            self._came, self._awaited = set(known), self._expected(session) - self.given_up
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
        session.run(self._hand_in, {self._report: report})

    def come_back(self, session):
        """Revokes an earlier departure under this worker's number; returns whether there was one. Call it at the start."""
        has_left = session.run(self._own)[-1] > 0
        if has_left:
            session.run(self._take_back)
        return has_left

    def absent(self, session):
        """Returns the numbers of workers that have left for good and are not back, and of free places."""
        left = {worker for worker, report in self._known(*session.run(self._list)).items() if report[-1] > 0}
        return sorted(left | self._all - self._expected(session))

    def _known(self, workers, reports):
        return self._kept() | dict(zip(workers.tolist(), reports, strict=True))

    def missing(self):
        """Returns the workers that `gather` waits for, as ["worker 3"]."""
        return [f"worker {i}" for i in sorted(self._awaited - self._came)]

    def dismiss(self, session):
        """Lets the other workers exit; called by the chief."""
        with contextlib.suppress(tf.errors.CancelledError):  # already dismissed before the chief was restarted
            session.run(self._dismiss)


def _done_queue(ps_index):
    with tf.device(f"/job:ps/task:{ps_index}"):
        return tf.queue.FIFOQueue(1000, tf.int64, shared_name="done")


def _left_queue(ps_index):
    with tf.device(f"/job:ps/task:{ps_index}"):
        return tf.queue.FIFOQueue(1000, [tf.int64, tf.float64], shared_name="left")


def say_done(task, server, others=()):
    """Tells every ps that this worker is done, and so are `others`, which have left for good."""
    say_done_for(task, server, [task.shard_index, *others])


def say_done_for(task, server, workers):
    """Tells every ps that these workers are done."""
    if workers:
        _say(task, server, lambda i: _done_queue(i).enqueue_many([tf.constant(workers, tf.int64)]))


def say_gone(task, server, report):
    """Records arrival, report and departure of a worker that leaves before it has a session; from any thread.

    Returns after `LEFT_SECONDS` at the latest.
    """

    def say():
        with tf.Graph().as_default() as graph:
            rendezvous = Rendezvous(task, len(report))
            words = [Present(f"/job:ps/task:{i}").leave(task.shard_index) for i in range(task.num_ps)]
            with tf.Session(server.target, graph, config=task.config()) as session:
                session.run(words)
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


def gate_table(device):
    """Returns the table of the workers that have arrived at the start barrier, see `common.cluster.Gate`."""
    with tf.device(device):
        return tf.raw_ops.MutableHashTableV2(key_dtype=tf.int64, value_dtype=tf.int64, shared_name="came_to_gate")


def came_to_gate(device, index):
    """Returns the operation that registers worker `index` as arrived."""
    table, keys = gate_table(device), tf.constant([index], tf.int64)
    return tf.raw_ops.LookupTableInsertV2(table_handle=table, keys=keys, values=keys)


class Present:
    """Number of workers present in an elastic run: worker 0, and those that have arrived and not left for good since.

    A killed worker stays counted until its restart takes its place: no worker counts twice. The tables are lost with the ps:
    after its restart all workers register again.

    Args:
      device: device of the global step; "" for this process.
    """

    def __init__(self, device):
        self._device = device
        with tf.device(device), tf.control_dependencies(None):
            self._came = gate_table(device)
            self._gone = tf.raw_ops.MutableHashTableV2(key_dtype=tf.int64, value_dtype=tf.int64, shared_name="gone")

    def count(self):
        """Returns the number of workers, an int64 scalar."""
        with tf.device(self._device):
            came, gone = (tf.raw_ops.LookupTableSizeV2(table_handle=table) for table in (self._came, self._gone))
            return 1 + came - gone

    def enter(self, worker):
        """Returns the operation for the start of a worker's session: it revokes an earlier departure under its number."""
        with tf.device(self._device):
            return tf.raw_ops.LookupTableRemoveV2(table_handle=self._gone, keys=tf.constant([worker], tf.int64))

    def leave(self, worker):
        """Returns the operation of a worker that leaves for good; it registers the arrival too, which a ps may have lost."""
        with tf.device(self._device), tf.control_dependencies([came_to_gate(self._device, worker)]):
            keys = tf.constant([worker], tf.int64)
            return tf.raw_ops.LookupTableInsertV2(table_handle=self._gone, keys=keys, values=keys)


def say_left(task, server):
    """Tells every ps that this worker was interrupted and has saved all its state; see `count_left_as_done`."""

    def leave(i):
        with tf.device(f"/job:ps/task:{i}"):
            return _left_queue(i).enqueue([tf.constant(task.shard_index, tf.int64), tf.timestamp()])

    _say(task, server, leave, tf.RunOptions(timeout_in_ms=1000 * LEFT_SECONDS))


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
    # Closing a session waits for an answer from each ps: for ever if a ps has exited.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(session))  # never closed, not even at interpreter exit


def serve(task, server):
    """Serves as a ps until every worker has reported that it is done."""
    done: set[int] = set()
    with tf.Graph().as_default():
        next_done = _done_queue(task.index).dequeue()
        alone = tf.ConfigProto(device_filters=[task.device])  # don't wait for other ps tasks, which may have exited
        with tf.Session(server.target, config=task.config(alone)) as session:
            while len(done) < task.num_workers:
                done.add(int(session.run(next_done)))


LEFT_SECONDS = 10  # a scheduler stops a ps and its workers within this time; a worker that left earlier may be back


def count_left_as_done(task, server):
    """Counts workers that leave as done, on a ps asked to exit: so the chief can save a checkpoint before.

    Never returns; runs in a thread of its own while another is in `serve`.
    """
    asked = time.time()
    with tf.Graph().as_default():
        next_left, index = _left_queue(task.index).dequeue(), tf.placeholder(tf.int64, [])
        is_done = _done_queue(task.index).enqueue(index)
        alone = tf.ConfigProto(device_filters=[task.device])
        with tf.Session(server.target, config=task.config(alone)) as session:
            while True:
                worker, moment = session.run(next_left)
                if has_just_left(moment, asked):
                    session.run(is_done, {index: worker})


def has_just_left(moment, asked):
    """Whether a worker that left at `moment` left with a ps that was `asked` to end; both by the wall clock of that ps.

    A moment in the future means that this clock was set back since: then nobody knows, and the worker may be back.
    """
    return asked - LEFT_SECONDS < moment <= time.time()
