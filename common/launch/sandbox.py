"""Linux sandbox for a process of a run: own network namespace, no extra capabilities, exit with its parent."""

import contextlib
import ctypes
import errno
import fcntl
import os
import signal
import socket
import struct


def die_with_parent(parent, number=signal.SIGKILL):
    """Sends signal `number` to this process when its parent, process `parent`, ends, however that happens (Linux)."""
    pr_set_pdeathsig = 1
    prctl(pr_set_pdeathsig, number)
    if os.getppid() != parent:
        os._exit(1)


def prctl(what, value=0, *more):
    """Sets a property of this process; returns whether the system supports it and has set it."""
    libc = ctypes.CDLL(None)
    return hasattr(libc, "prctl") and libc.prctl(what, value, *more, *[0] * (3 - len(more))) == 0


def adopt_orphans():
    """Makes orphaned descendants children of this process (Linux)."""
    pr_set_child_subreaper = 36
    prctl(pr_set_child_subreaper, 1)


def why_no_own_network():
    """Tries `enter_own_network` in a fork; returns None, or the reason for its failure and the remedy."""
    pid = os.fork()
    if pid == 0:
        try:
            enter_own_network()
            os._exit(0)
        except OSError as error:
            os._exit(error.errno or errno.EPERM)
    number = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return how_to_allow(number) if number else None


def enter_own_network():
    """Moves this process, which must be single-threaded, and its children into a network of their own.

    It is a Linux network namespace with a loopback interface, inside a user namespace, which needs no privileges. Some systems
    refuse a later step, which cannot be undone: try `why_no_own_network` first.

    Raises:
      OSError: if the system forbids it.
    """
    clone_newuser, clone_newnet = 0x10000000, 0x40000000
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "unshare"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    user, group = os.geteuid(), os.getegid()
    if libc.unshare(clone_newuser | clone_newnet):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    for file, text in ("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1"):
        with open(f"/proc/self/{file}", "w") as opened:
            opened.write(text)
    siocgifflags, siocsifflags, iff_up = 0x8913, 0x8914, 1
    with socket.socket() as any_socket:
        request = struct.pack("16sH14x", b"lo", 0)
        flags = struct.unpack("16sH14x", fcntl.ioctl(any_socket, siocgifflags, request))[1]
        fcntl.ioctl(any_socket, siocsifflags, struct.pack("16sH14x", b"lo", flags | iff_up))


def give_up_power():
    """Drops the capabilities that a user namespace of its own gives to this process and its descendants."""
    pr_capbset_drop, pr_cap_ambient, clear_all = 24, 47, 4
    capability = 0
    while prctl(pr_capbset_drop, capability):  # otherwise a program started by root would regain them
        capability += 1
    prctl(pr_cap_ambient, clear_all)
    version_3, this_process = 0x20080522, 0
    header, none = struct.pack("Ii", version_3, this_process), bytes(24)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.capset(header, none):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def give_up_new_privileges():
    """Stops programs started by this process from gaining privileges through their file, as sudo does."""
    pr_set_no_new_privs = 38
    prctl(pr_set_no_new_privs, 1)


def how_to_allow(number):
    """Returns the reason for this error number of `enter_own_network`, and the remedy."""

    def says(path, value):
        with contextlib.suppress(OSError), open(f"/proc/sys/{path}") as file:
            return file.read().strip() == value
        return False

    for path, bad, good in (
        ("kernel/apparmor_restrict_unprivileged_userns", "1", "0"),
        ("kernel/unprivileged_userns_clone", "0", "1"),
        ("user/max_user_namespaces", "0", "10000"),
        ("user/max_net_namespaces", "0", "10000"),
    ):
        if says(path, bad):
            return f"the system forbids it; `sudo sysctl {path.replace('/', '.')}={good}` allows it"
    if number == errno.ENOSYS:
        return "this system has no network namespaces"
    return f"the system forbids it ({os.strerror(number)}), as containers do; SECURITY.md says how to allow it"
