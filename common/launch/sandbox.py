"""Uses Linux for a process of a run: a network of its own, no power beyond an ordinary user's, an end with its parent."""

import contextlib
import ctypes
import errno
import fcntl
import os
import signal
import socket
import struct


def die_with_parent(parent, number=signal.SIGKILL):
    """Makes this process end when its parent, process `parent`, ends, however it ends (Linux): it gets that signal."""
    pr_set_pdeathsig = 1
    prctl(pr_set_pdeathsig, number)
    if os.getppid() != parent:
        os._exit(1)


def prctl(what, value=0, *more):
    """Sets a property of this process, where the system, and its version, has it; returns whether it has."""
    libc = ctypes.CDLL(None)
    return hasattr(libc, "prctl") and libc.prctl(what, value, *more, *[0] * (3 - len(more))) == 0


def adopt_orphans():
    """Processes that descendants of this one leave behind when they end become its children (Linux)."""
    pr_set_child_subreaper = 36
    prctl(pr_set_child_subreaper, 1)


def why_no_own_network():
    """Tries `enter_own_network` in another process; returns None, or the reason why it fails and how to change that."""
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
    """Puts this process, which must have one thread only, and its children into a network that no other process is in.

    It is a Linux network namespace with a loopback interface, inside a user namespace, which needs no rights. Some systems
    refuse a later step, when there is no way back: to be tried before, see `why_no_own_network`.

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
    """Takes from this process, and all that it will start, what a namespace of its own lets it do beyond an ordinary user."""
    pr_capbset_drop, pr_cap_ambient, clear_all = 24, 47, 4
    capability = 0
    while prctl(pr_capbset_drop, capability):  # or a program that root starts would get them again
        capability += 1
    prctl(pr_cap_ambient, clear_all)
    version_3, this_process = 0x20080522, 0
    header, none = struct.pack("Ii", version_3, this_process), bytes(24)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.capset(header, none):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def give_up_new_privileges():
    """No program that this process will start gains rights by its file, as sudo does."""
    pr_set_no_new_privs = 38
    prctl(pr_set_no_new_privs, 1)


def how_to_allow(number):
    """The reason why `enter_own_network` ended with this error number, and how to change that."""

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
