"""Signals: a process notices that it has to end, and goes on when its terminal is closed."""

import contextlib
import errno
import io
import os
import signal
import sys
import threading

# Ctrl-C, what the launcher sends to its workers, and the end of the terminal.
INTERRUPTING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def heeded(numbers=INTERRUPTING_SIGNALS):
    """Returns those of these signals that this process does not ignore.

    A program goes on to ignore what it was started to ignore: SIGHUP by `nohup`, SIGINT by a script that starts it with `&`.
    """
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


def hear_signals(numbers, heard):
    """From now on calls `heard(number)` for each of these signals, in a thread of its own, except for those that are ignored.

    Python's own handlers run in the main thread, which may be in C++ code, waiting for a ps that is not there, and would never
    call them. To be called in the main thread, before tensorflow starts threads of its own, which would be interrupted instead.
    A thread that is older, as numpy's are in a script that imports it, may still be the one to get the signal; the pipe then
    tells ours.
    """
    numbers = heeded(numbers)
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    for number in numbers:
        signal.signal(number, lambda *_: None)  # in place of the one that would raise KeyboardInterrupt, or end the process
    arrivals, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)  # a byte for each signal, whichever thread gets it

    def wait():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
        while True:
            number = os.read(arrivals, 1)[0]
            if number in numbers:
                heard(number)

    threading.Thread(target=wait, daemon=True).start()


def prepare_for_a_closed_terminal():
    """For a program: from now on SIGHUP raises KeyboardInterrupt, as Ctrl-C does, unless it is ignored; and output to a
    terminal that was closed is discarded."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream and stream.isatty():
            setattr(sys, name, lasting(stream, stream.fileno()))
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, _interrupt_once)


def _interrupt_once(number, frame):
    signal.signal(number, signal.SIG_IGN)  # the shell and the system may both send it
    raise KeyboardInterrupt


def lasting(stream, descriptor):
    """Returns a text stream like `stream` to a file descriptor; if that is a terminal, one that outlives it."""
    if not os.isatty(descriptor):
        return stream if stream.fileno() == descriptor else open(descriptor, "w", buffering=1)
    buffer = io.BufferedWriter(_Terminal(descriptor, "w", closefd=False))
    return io.TextIOWrapper(buffer, stream.encoding, stream.errors, line_buffering=True)


class _Terminal(io.FileIO):
    """A terminal. When it is closed, output is discarded, so a print does not fail, in the user's functions either.
    Only SIGHUP ends the run then: `nohup`, `setsid` and `disown` keep that away."""

    def write(self, data):
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return len(data)


def exit_at_once(status):
    """Ends this process from any thread. On a terminal it shows the cursor, which the table of progress hides."""
    with contextlib.suppress(OSError):  # the terminal may be closed
        if os.isatty(1):
            os.write(1, b"\x1b[?25h")
    os._exit(status)
