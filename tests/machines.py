"""Several hosts on this machine for the tests: see Multiple-Machines/hosts.py."""

import contextlib
import importlib.util
import shutil
import subprocess
from pathlib import Path

from runs import ROOT
from skips import skip_for

spec = importlib.util.spec_from_file_location("hosts", ROOT / "Multiple-Machines" / "hosts.py")
assert spec and spec.loader
hosts = importlib.util.module_from_spec(spec)
spec.loader.exec_module(hosts)


def need(*programs):
    """Skips the test, with a line that says why, where hosts or programs cannot be had; where they must be, it fails."""
    missing = [program for program in programs if shutil.which(program) is None]
    skip_for(f"{', '.join(missing)} missing" if missing else hosts.why_not())


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
