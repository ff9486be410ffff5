"""Several hosts on this one machine: each a network with a name and an address of its own, joined by a bridge (Linux, root).

    with Hosts(3) as hosts:
        subprocess.run(hosts[0].command("ping", "-c", "1", "host2"))

A host is a network namespace, with namespaces for its name and for /etc/hosts; all else, files and users, it shares with the
machine. Everything on its network is real: packets, TCP, queues, lost links. The tests and `slow_links.py` use it.
"""

import contextlib
import ctypes
import fcntl
import heapq
import json
import os
import select
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

NETWORK = "10.99.0."
# A namespace ends with the last process in it; this one ends with the program that made it.
HOLDER = """
hostname "$1" && mount --bind "$2" /etc/hosts && mount -t tmpfs tmpfs /run && ip link set lo up &&
    echo ready && exec sleep infinity
"""


def why_not():
    """Returns why there can be no such hosts here, one line, or None if there can."""
    missing = [name for name in ("ip", "tc", "unshare", "nsenter", "setpriv") if shutil.which(name) is None]
    if os.geteuid() != 0:
        return "several hosts on one machine need root"
    if missing:
        return f"{', '.join(missing)} missing: apt-get install iproute2 util-linux"
    if subprocess.run(["unshare", "--net", "--uts", "--mount", "true"], capture_output=True).returncode:
        return "this system forbids network namespaces"
    return None


class Host:
    """One of the hosts.

    Attributes:
      name, address: what the others call it.
    """

    def __init__(self, name, address, hosts_file):
        self.name, self.address = name, address
        arguments = ["unshare", "--net", "--uts", "--mount", "sh", "-c", HOLDER, "sh", name, hosts_file]
        ready, holders = os.pipe()
        self._holder = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", *arguments], stdout=holders)
        os.close(holders)
        with open(ready) as holder:
            if holder.readline() != "ready\n":
                raise OSError(f"{name} cannot be made")
        self.pid = self._holder.pid

    def command(self, *words):
        """Returns the command that runs `words` on this host, in the present folder."""
        enter = ["nsenter", f"--target={self.pid}", "--net", "--uts", "--mount"]
        return [*enter, "sh", "-c", 'cd "$0" && exec "$@"', os.getcwd(), *words]

    def run(self, *words):
        """Runs a command on this host; returns what it prints."""
        return subprocess.run(self.command(*words), check=True, capture_output=True, text=True).stdout

    def close(self):
        """Ends it. A process that still runs on it keeps its network."""
        self._holder.kill()
        self._holder.wait()


class Hosts:
    """`count` hosts, `host1` and so on, and what joins them; a sequence, to be used as a context.

    Args:
      count: how many.
      bytes_per_second: what each link carries each way, if it has a limit (`tc ... tbf`).
      delay: seconds that each packet takes longer from host to host. Not every kernel has `netem`, so the packets pass through
        a thread of this program (`_Delay`), which is fast enough for links on which every answer takes twice this long. With
        `bytes_per_second` it holds that limit, too.

    Attributes:
      bridge: without `delay`, the `Host` through which all packets pass.
    """

    def __init__(self, count, bytes_per_second=None, delay=None):
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as stack:
            hosts_file = stack.enter_context(tempfile.NamedTemporaryFile("w", prefix="hosts"))
            lines = ["127.0.0.1 localhost", *(f"{NETWORK}{i + 1} host{i + 1}" for i in range(count))]
            hosts_file.write("\n".join(lines) + "\n")
            hosts_file.flush()

            def host(name, address):
                made = Host(name, address, hosts_file.name)
                stack.callback(made.close)
                return made

            self._hosts = [host(f"host{i + 1}", f"{NETWORK}{i + 1}") for i in range(count)]
            if delay:
                stack.callback(_Delay(self._hosts, delay, bytes_per_second).close)
            else:
                self.bridge = host("bridge", None)
                self.bridge.run("ip", "link", "add", "name", "bridge", "type", "bridge")
                self.bridge.run("ip", "link", "set", "bridge", "up")
            for i, one in enumerate(self._hosts):
                if not delay:
                    self._join(i, one, bytes_per_second)
                one.run("ip", "address", "add", f"{one.address}/24", "dev", "eth0")
                one.run("ip", "link", "set", "eth0", "up")
            self._stack = stack.pop_all()

    def _join(self, i, host, bytes_per_second):
        there = ["type", "veth", "peer", "name", "eth0", "netns", str(host.pid)]
        self.bridge.run("ip", "link", "add", "name", f"port{i}", *there)
        self.bridge.run("ip", "link", "set", f"port{i}", "master", "bridge", "up")
        if bytes_per_second:
            # A burst is one large segment; what has waited for half a second is dropped, and TCP slows down.
            queue = ["root", "tbf", "rate", f"{8 * bytes_per_second:.0f}bit", "burst", "128kb", "latency", "500ms"]
            self.bridge.run("tc", "qdisc", "add", "dev", f"port{i}", *queue)
            host.run("tc", "qdisc", "add", "dev", "eth0", *queue)

    def cut(self, i):
        """Cuts the link of host `i`, at the bridge: the host itself does not notice."""
        self.bridge.run("ip", "link", "set", f"port{i}", "nomaster")

    def mend(self, i):
        """Joins host `i` again."""
        self.bridge.run("ip", "link", "set", f"port{i}", "master", "bridge")

    def __getitem__(self, i):
        return self._hosts[i]

    def __len__(self):
        return len(self._hosts)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._stack.close()


@contextlib.contextmanager
def cluster(hosts, script, *flags, port=2222):
    """A cluster, a ps on the first of some hosts and a worker on each other: its processes, which are killed at the end.

    Also at the end of this program, whatever ends it.
    """
    where = [f"{host.name}:{port}" for host in hosts]
    started = []
    try:
        for i, host in enumerate(hosts):
            task = {"type": "worker", "index": i - 1} if i else {"type": "ps", "index": 0}
            config = {"cluster": {"ps": where[:1], "worker": where[1:]}, "task": task}
            started.append(
                subprocess.Popen(
                    ["setpriv", "--pdeathsig", "KILL", *host.command(sys.executable, str(script), *flags)],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    text=True,
                    env={**os.environ, "TF_CONFIG": json.dumps(config)},
                )
            )
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()
            if process.stdout:
                process.stdout.close()


def train(hosts, script, *flags):
    """Runs a cluster on some hosts to its end, see `cluster`.

    Raises:
      SystemExit: with what the tasks printed, if one of them failed.
    """
    with cluster(hosts, script, *flags) as tasks:
        outputs = [task.communicate()[0] for task in tasks]
    if any(task.returncode for task in tasks):
        sys.exit(f"{script} failed:\n" + "\n".join(outputs))


@contextlib.contextmanager
def ssh_to(of, folder):
    """Lets a program reach some hosts by ssh, each with a server of its own: gives the command that does."""
    key = Path(folder, "key")
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    options = {
        "HostKey": key,
        "AuthorizedKeysFile": f"{key}.pub",
        "PidFile": "none",
        "UsePAM": "no",
        "StrictModes": "no",
        "PermitRootLogin": "yes",
    }
    servers = []
    with contextlib.ExitStack() as stack:
        for host in of:
            host.run("mkdir", "-p", "/run/sshd")
            command = ["/usr/sbin/sshd", "-D", "-e", *(f"-o{name}={value}" for name, value in options.items())]
            server = subprocess.Popen(host.command(*command), stderr=subprocess.PIPE, text=True)
            stack.callback(server.communicate)
            stack.callback(server.terminate)
            servers.append(server)
        for server in servers:
            assert server.stderr and "listening" in server.stderr.readline()
        ssh = f"ssh -i {key} -oBatchMode=yes -oStrictHostKeyChecking=no -oUserKnownHostsFile=/dev/null -oLogLevel=ERROR"
        yield ssh


class _Delay:
    """Joins hosts so that each packet arrives `delay` seconds later: a thread that has an end of each host's `eth0`.

    A packet first passes the link of its sender, then that of its receiver, each of which carries `bytes_per_second` each way;
    None is no limit. Packets that cannot pass yet wait; none is dropped.
    """

    def __init__(self, hosts, delay, bytes_per_second=None):
        self._delay, self._seconds = delay, 1 / bytes_per_second if bytes_per_second else 0.0
        self._up_free, self._down_free = [0.0] * len(hosts), [0.0] * len(hosts)
        self._ends = [_tap(host, bytes([2, 0, 0, 0, 0, i])) for i, host in enumerate(hosts)]
        self._wake, self._stop = os.pipe()
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    def _carry(self):
        under_way: list[tuple[float, int, int, bytes]] = []
        count = 0
        while True:
            rest = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
            ready, _, _ = select.select([*self._ends, self._wake], [], [], rest)
            if self._wake in ready:
                return
            now = time.monotonic()
            for end in ready:
                packet, source = os.read(end, 65536), self._ends.index(end)
                takes = len(packet) * self._seconds
                sent = self._up_free[source] = max(now, self._up_free[source]) + takes
                to = [packet[5]] if packet[0] == 2 else [i for i in range(len(self._ends)) if i != source]  # or a broadcast
                for i in to:
                    count += 1
                    # It comes in while it goes out, if nothing else comes in.
                    passed = self._down_free[i] = max(sent, self._down_free[i] + takes)
                    heapq.heappush(under_way, (passed + self._delay, count, i, packet))
            while under_way and under_way[0][0] <= now:
                _, _, i, packet = heapq.heappop(under_way)
                with contextlib.suppress(OSError, IndexError):  # of a host whose interface is down
                    os.write(self._ends[i], packet)

    def close(self):
        os.write(self._stop, b"x")
        self._thread.join()
        for descriptor in (*self._ends, self._wake, self._stop):
            os.close(descriptor)


def _tap(host, hardware_address):
    """Makes the interface `eth0` of a host, and returns a descriptor at which its packets come and go."""
    libc = ctypes.CDLL(None, use_errno=True)
    tunsetiff, iff_tap, iff_no_pi, clone_newnet = 0x400454CA, 0x0002, 0x1000, 0x40000000
    with open("/proc/thread-self/ns/net") as here, open(f"/proc/{host.pid}/ns/net") as there:
        for namespace in (there, here):
            if libc.setns(namespace.fileno(), clone_newnet):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            if namespace is there:
                descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
                fcntl.ioctl(descriptor, tunsetiff, struct.pack("16sH22x", b"eth0", iff_tap | iff_no_pi))
    host.run("ip", "link", "set", "eth0", "address", hardware_address.hex(":"))
    return descriptor
