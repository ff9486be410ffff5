"""Signals: orderly ends of a process, and survival of a closed terminal."""

import contextlib
import errno
import io
import os
import signal
import sys
import threading

# Ctrl-C, the launcher's signal to its workers, and the hangup of the terminal.
INTERRUPTING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def heeded(numbers=INTERRUPTING_SIGNALS):
    """Returns those of these signals that this process does not ignore.

    Signals ignored at the start stay ignored: SIGHUP under `nohup`, SIGINT in a script's background job (`&`).
    """
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


def hear_signals(numbers, heard):
    """From now on calls `heard(number)` for each of these signals, in a thread of its own, except for ignored signals.

    Python's own handlers run in the main thread, which may be blocked in C++ code, waiting for an unreachable ps. To be called
    in the main thread, before tensorflow starts threads, which would be interrupted instead. An older thread, such as one of
    numpy's, may still receive the signal; the pipe then notifies ours.
    """
    numbers = heeded(numbers)
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    for number in numbers:
        signal.signal(number, lambda *_: None)  # else KeyboardInterrupt, or the end of the process
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
    """Makes SIGHUP, unless ignored, raise KeyboardInterrupt as Ctrl-C does, and discards output to a closed terminal."""
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
    """Returns a text stream like `stream` on a file descriptor; on a terminal, the stream outlives it."""
    if not os.isatty(descriptor):
        return stream if stream.fileno() == descriptor else open(descriptor, "w", buffering=1)
    buffer = io.BufferedWriter(_Terminal(descriptor, "w", closefd=False))
    return io.TextIOWrapper(buffer, stream.encoding, stream.errors, line_buffering=True)


class _Terminal(io.FileIO):
    """A terminal whose output is discarded after it is closed, so that no print fails, even in the user's functions.

    Then only SIGHUP ends the run, unless `nohup`, `setsid` or `disown` prevents it.
    """

    def write(self, data):
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return len(data)


def exit_at_once(status):
    """Ends this process from any thread; restores the terminal's cursor, which the progress table hides."""
    with contextlib.suppress(OSError):  # the terminal may be closed
        if os.isatty(1):
            os.write(1, b"\x1b[?25h")
    os._exit(status)
