"""The workers that take part in a cluster, and its end: when the chief has all reports, and when a ps may exit."""

import contextlib
import ctypes
import threading
import time

import numpy as np

from common import tf

WAKE_SECS = 1.0  # after which a chief that waits for reports looks at all ps


class Rendezvous:
    """How the workers of a cluster end together, as operations in the present graph.

    Each worker hands in a report when it stops, and waits. The chief gathers all reports, does its last work with the
    parameters, which no worker changes any more, and dismisses the others. All wait on queues on ps 0. The reports stay in a
    table there, so that a worker that is restarted meanwhile, the chief too, can take up where it was.

    A worker that leaves for good hands in its report and does not wait: see `leave`.

    Args:
      task: this worker.
      size: numbers in a report; the last is 0, or the time at which the worker has left for good.
      kept: function that returns reports of workers that have left, {worker: numbers}: a ps that is restarted has no others.
      expected: function of a session that returns the workers that have come, a set; by default all do. The others are places
        that nobody has taken.

    Attributes:
      is_gathering: whether this is the chief, which waits for reports.
      given_up: workers for whose reports it does not wait, a set of their numbers.
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
        """Hands in the report of a worker that is not the chief, and waits until it is dismissed."""
        try:
            session.run(self._hand_in_and_wait, {self._report: report})
        except tf.errors.OutOfRangeError:
            pass  # the chief has closed the queue, in which there never was anything

    def gather(self, session, report):
        """Adds the chief's own report, waits for those of all workers, and returns them `[workers, size]` in order."""
        self.is_gathering = True
        while True:
            # Its own again each time, since a ps that was restarted has forgotten it.
            (workers, reports), _ = session.run([self._hand_in_and_list, self._touch], {self._report: report})
            known = self._known(workers, reports)
            self._came, self._awaited = set(known), self._expected(session) - self.given_up
            if self._awaited <= self._came:
                self.given_up -= self._came  # they came after all
                return np.array([known[worker] for worker in sorted(known)])
            with self._woken(session):
                session.run(self._next_arrival)

    @contextlib.contextmanager
    def _woken(self, session):
        """A context in which the wait for an arrival ends after `WAKE_SECS` at the latest. It is a wait for ps 0 alone: the
        chief would not notice that another ps has died, and that a worker waits for the parameters on it."""
        is_over = threading.Event()

        def wake():
            while not is_over.wait(WAKE_SECS):
                with contextlib.suppress(tf.errors.OpError, RuntimeError, AttributeError):  # the session is made anew just now
                    session._tf_sess().run(self._wake)

        thread = threading.Thread(target=wake, daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()

    def give_up(self, workers):
        """From now on `gather`, in another thread, does not wait for these."""
        self.given_up |= workers

    def leave(self, session, report):
        """Hands in the report of a worker that leaves for good: nobody waits for it any more."""
        session.run(self._hand_in, {self._report: report})

    def come_back(self, session):
        """To be called by a worker that begins: if one of its number has left, that counts no more. Returns whether one had."""
        has_left = session.run(self._own)[-1] > 0
        if has_left:
            session.run(self._take_back)
        return has_left

    def absent(self, session):
        """Returns the numbers of the workers that have left for good, and are not back, and of places that nobody has taken."""
        left = {worker for worker, report in self._known(*session.run(self._list)).items() if report[-1] > 0}
        return sorted(left | self._all - self._expected(session))

    def _known(self, workers, reports):
        return self._kept() | dict(zip(workers.tolist(), reports, strict=True))

    def missing(self):
        """Returns the workers whose reports `gather` waits for, as ["worker 3"]."""
        return [f"worker {i}" for i in sorted(self._awaited - self._came)]

    def dismiss(self, session):
        """The chief's: lets the other workers go."""
        with contextlib.suppress(tf.errors.CancelledError):  # it has dismissed them before, and has died then
            session.run(self._dismiss)


def _done_queue(ps_index):
    with tf.device(f"/job:ps/task:{ps_index}"):
        return tf.queue.FIFOQueue(1000, tf.int64, shared_name="done")


def _left_queue(ps_index):
    with tf.device(f"/job:ps/task:{ps_index}"):
        return tf.queue.FIFOQueue(1000, [tf.int64, tf.float64], shared_name="left")


def say_done(task, server, others=()):
    """Tells every ps that this worker needs it no more, nor do `others`, which have left for good."""
    say_done_for(task, server, [task.shard_index, *others])


def say_done_for(task, server, workers):
    """Tells every ps that these workers need it no more."""
    if workers:
        _say(task, server, lambda i: _done_queue(i).enqueue_many([tf.constant(workers, tf.int64)]))


def say_gone(task, server, report):
    """Says of a worker that leaves before it has a session, in any thread: that it has come, its report, that it has left.

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
    """Whether this worker has the code of worker 0, which tells it here; also if it comes before worker 0."""
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
    """Returns the table of the workers that have come to where they wait for the chief, see `common.cluster.Gate`."""
    with tf.device(device):
        return tf.raw_ops.MutableHashTableV2(key_dtype=tf.int64, value_dtype=tf.int64, shared_name="came_to_gate")


def came_to_gate(device, index):
    """Returns the operation that says that worker `index` has come."""
    table, keys = gate_table(device), tf.constant([index], tf.int64)
    return tf.raw_ops.LookupTableInsertV2(table_handle=table, keys=keys, values=keys)


class Present:
    """How many workers take part, where they come and go: worker 0, and those that have come and have not left for good since.

    One that is killed counts until its next process comes, which takes its place: a worker never counts twice. It is as old as
    the ps: when that is restarted, all workers come to it anew.

    Args:
      device: of the global step; "" for this process.
    """

    def __init__(self, device):
        self._device = device
        with tf.device(device), tf.control_dependencies(None):
            self._came = gate_table(device)
            self._gone = tf.raw_ops.MutableHashTableV2(key_dtype=tf.int64, value_dtype=tf.int64, shared_name="gone")

    def count(self):
        """Returns the number, an int64 scalar."""
        with tf.device(self._device):
            came, gone = (tf.raw_ops.LookupTableSizeV2(table_handle=table) for table in (self._came, self._gone))
            return 1 + came - gone

    def enter(self, worker):
        """Returns the operation for the begin of a worker's session: if one of its number had left, it is back."""
        with tf.device(self._device):
            return tf.raw_ops.LookupTableRemoveV2(table_handle=self._gone, keys=tf.constant([worker], tf.int64))

    def leave(self, worker):
        """Returns the operation of a worker that leaves for good. It has come, also to a ps that does not know that yet."""
        with tf.device(self._device), tf.control_dependencies([came_to_gate(self._device, worker)]):
            keys = tf.constant([worker], tf.int64)
            return tf.raw_ops.LookupTableInsertV2(table_handle=self._gone, keys=keys, values=keys)


def say_left(task, server):
    """Tells every ps that this worker was interrupted and has saved everything; see `count_left_as_done`."""

    def leave(i):
        with tf.device(f"/job:ps/task:{i}"):
            return _left_queue(i).enqueue([tf.constant(task.shard_index, tf.int64), tf.timestamp()])

    _say(task, server, leave, tf.RunOptions(timeout_in_ms=1000 * LEFT_SECONDS))


def _say(task, server, word, options=None):
    graph = tf.Graph()
    with graph.as_default():
        says = [word(i) for i in range(task.num_ps)]
    session = tf.Session(server.target, graph, config=task.config())
    for say in says:  # one by one: an error of one call is an error of all that is in it
        try:
            session.run(say, options=options)
        except (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError, tf.errors.DeadlineExceededError):
            pass  # a ps that this was the last word for exits at once, maybe before it could answer
    # After a call, TensorFlow asks each ps to forget it, and closing waits for the answer: from a ps that has ended, for ever.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(session))  # so nothing closes it, also not the end of the interpreter


def serve(task, server):
    """The whole life of a ps: returns when every worker has said that it is done."""
    done: set[int] = set()
    with tf.Graph().as_default():
        next_done = _done_queue(task.index).dequeue()
        alone = tf.ConfigProto(device_filters=[task.device])  # without waiting for other ps tasks, which may have ended
        with tf.Session(server.target, config=task.config(alone)) as session:
            while len(done) < task.num_workers:
                done.add(int(session.run(next_done)))


LEFT_SECONDS = 10  # a scheduler that ends a ps ends its workers within this time; one that left earlier may be back


def count_left_as_done(task, server):
    """For a ps that is asked to end: from now on a worker that has left is done. So the chief can save a checkpoint before.

    Never returns; to be called in a thread of its own, while another one is in `serve`.
    """
    asked = time.time()
    with tf.Graph().as_default():
        next_left, index = _left_queue(task.index).dequeue(), tf.placeholder(tf.int64, [])
        is_done = _done_queue(task.index).enqueue(index)
        alone = tf.ConfigProto(device_filters=[task.device])
        with tf.Session(server.target, config=task.config(alone)) as session:
            while True:
                worker, moment = session.run(next_left)
                if moment > asked - LEFT_SECONDS:
                    session.run(is_done, {index: worker})
