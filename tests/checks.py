"""A plugin of pytest: ruff and mypy run beside the tests. Their findings come before pytest's verdict, and fail the run."""

import subprocess
import sys

import pytest

CHECKS = {"ruff": ["check", "--quiet", "."], "mypy": ["--no-error-summary"]}
_running: dict[str, subprocess.Popen] = {}
_found: dict[str, str] = {}


def pytest_configure(config):
    if hasattr(config, "workerinput") or config.option.collectonly:
        return  # once, not in each process of xdist
    for name, arguments in CHECKS.items():
        _running[name] = subprocess.Popen(
            [sys.executable, "-m", name, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session):
    for name, process in _running.items():
        output, _ = process.communicate()
        if process.returncode:
            _found[name] = output
            session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter):
    for name, output in _found.items():
        terminalreporter.section(f"{name}: failed", red=True)
        terminalreporter.write(output)
