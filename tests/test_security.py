"""The examples of SECURITY.md: its demonstration, run as the page says, and the Kubernetes policy."""

import contextlib
import os
import re
import subprocess
import sys
import threading

import pytest
import yaml
from conftest import CHECKOUT

from common.launch import launcher

PAGE = (CHECKOUT / "SECURITY.md").read_text()


def block(language, beginning):
    """Returns the one fenced block of the page in that language that begins so."""
    found = [text for text in re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.M | re.S) if text.startswith(beginning)]
    assert len(found) == 1
    return found[0]


def test_the_readme_links_to_the_page():
    assert "](SECURITY.md)" in (CHECKOUT / "README.md").read_text()


@pytest.mark.cluster
def test_whoever_knows_the_address_of_a_server_reads_and_writes_files_and_parameters(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(launcher.reserved_port()).getsockname()[1]
        serve = block("python", "import tensorflow.compat.v1 as tf  # serve.py")
        assert serve.count("127.0.0.1:2222") == 1
        (there / "serve.py").write_text(serve.replace("127.0.0.1:2222", f"127.0.0.1:{port}"))
        (here / "look.py").write_text(block("python", "import sys  # look.py"))
        # Linux has more addresses of its own than the one that the server was told; it listens on them all the same
        address = "127.0.0.2"
        environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "TF_GRPC_REUSE_PORT": "true", "no_proxy": address}
        server = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "serve.py"],
                cwd=there,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        stack.callback(server.kill)
        limit = threading.Timer(200, server.kill)  # a server that hangs is an empty line below
        limit.start()
        stack.callback(limit.cancel)
        assert server.stdout and server.stdout.readline() == "weights are [1. 2.]; Enter to look again\n"
        looked = subprocess.run(
            [sys.executable, "look.py", f"{address}:{port}"],
            cwd=here,
            env=environment,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert looked.returncode == 0, looked.stderr
        with open("/etc/hosts", "rb") as hosts:
            beginning = hosts.read(20)
        assert looked.stdout.splitlines() == [f"a file of that machine: {beginning!r}", "its parameters: [1. 2.]"]
        assert (there / "written-there").read_text() == "by whoever asked"
        assert not (here / "written-there").exists()
        assert server.communicate("\n")[0] == "now they are [6. 6.]\n"


def test_the_kubernetes_policy_admits_only_pods_of_the_same_training():
    policy = yaml.safe_load(block("yaml", "apiVersion"))
    assert (policy["apiVersion"], policy["kind"]) == ("networking.k8s.io/v1", "NetworkPolicy")
    assert set(policy) == {"apiVersion", "kind", "metadata", "spec"} and policy["metadata"]["name"]
    spec = policy["spec"]
    assert set(spec) == {"podSelector", "policyTypes", "ingress", "egress"}
    assert set(spec["policyTypes"]) == {"Ingress", "Egress"}
    same = {"podSelector": spec["podSelector"]}
    assert spec["podSelector"]["matchLabels"]  # an empty selector would be all pods
    port = [{"protocol": "TCP", "port": 2222}]
    assert spec["ingress"] == [{"from": [same], "ports": port}]
    to_pods, to_names = spec["egress"]
    assert to_pods == {"to": [same], "ports": port}
    assert [set(peer) for peer in to_names["to"]] == [{"namespaceSelector", "podSelector"}]  # two peers would be either of them
    assert to_names["ports"] == [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}]
