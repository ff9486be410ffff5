"""common/core/run_folder.py: the folder of a run is one run's alone, and nothing is written through what was planted in it."""

import contextlib
import datetime
import errno
import fcntl
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import types
from pathlib import Path

import by_hand
import pytest
from runs import ENDLESS, HOGWILD, delete, finish, is_training, processes, read_until, result_of, run, start

import common.run
from common.cli.api import train
from common.cluster.task_spec import TaskSpecDef
from common.core import run_folder as of_runs
from common.core.flags import TrainingFailed
from common.core.run_facts import RunFacts
from common.core.run_folder import open_own, prepare_run_dir, write_json
from common.launch import control
from common.launch.fork_server import reserved_port
from common.training import worker_hooks

CHIEF, OTHER, PS, EVALUATOR = (
    TaskSpecDef(job, index, ps_hosts="a:1", worker_hosts="b:1,c:1")
    for job, index in (("worker", 0), ("worker", 1), ("ps", 0), ("evaluator", 0))
)


@pytest.fixture
def hold():
    """A context that has a folder prepared and locked; it gives the settings."""

    @contextlib.contextmanager
    def hold(run_dir, resume=False, task=None):
        where = None if run_dir is None else str(run_dir)
        settings = types.SimpleNamespace(run_dir=where, resume=resume, run=RunFacts("HogWild"))
        settings.run_dir, held = prepare_run_dir(settings, task)
        with held:
            yield settings

    return hold


@pytest.mark.parametrize(
    "address, program", [("gs://b/run", "gcsfuse,"), ("s3://b/run", "s3fs or rclone mount,"), ("hdfs://b", "a program such")]
)
def test_address_in_object_storage_names_the_mount(prepare, user_error, tmp_path, monkeypatch, address, program):
    """`Path` would take it for a folder of this machine. `train` refuses it, too, before it looks at anything else."""
    monkeypatch.chdir(tmp_path)
    line = f"--run_dir={address}: not a folder: mount the bucket with {program}"
    with user_error(line):
        prepare(address)
    with user_error(line):
        train("HogWild", None, None, run_dir=address)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def prepare(hold):
    """A function that prepares a folder, gives it back, and returns the settings."""

    def prepare(*arguments, **options):
        with hold(*arguments, **options) as settings:
            return settings

    return prepare


@pytest.fixture
def finished_run(tmp_path):
    """The folder of a run that has saved a checkpoint."""
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "model.ckpt-100.index").touch()
    return tmp_path / "run"


def test_folder_is_made(prepare, tmp_path):
    settings = prepare(tmp_path / "one" / "two")
    assert settings.run_dir == str(tmp_path / "one" / "two")
    found = {path.name for path in (tmp_path / "one" / "two").iterdir()}
    assert found == {"checkpoints", "logs", "metrics", "lock"}


def test_folder_may_exist(prepare, tmp_path):
    """As long as no run was saved there: one that failed at once can be tried again."""
    prepare(tmp_path)
    (tmp_path / "checkpoints" / "checkpoint").touch()  # of no use without one
    (tmp_path / "logs" / "worker-0.log").touch()
    prepare(tmp_path)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_new_folder_is_private(prepare, tmp_path):
    """It makes its contents private, too: no other user can enter."""
    prepare(tmp_path / "one" / "two")
    assert mode(tmp_path / "one" / "two") == 0o700


def test_folder_that_was_there_is_as_private_as_it_was(prepare, tmp_path):
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o755)
    prepare(tmp_path / "shared")
    assert mode(tmp_path / "shared") == 0o755


@pytest.mark.slow
def test_new_log_folder_is_private(tmp_path):
    (tmp_path / "mine.py").touch()
    with pytest.raises(SystemExit) as info:
        common.run.main(["--num_ps=1", "--num_workers=1", f"--log_dir={tmp_path / 'one' / 'two'}", str(tmp_path / "mine.py")])
    assert info.value.code == 0
    assert mode(tmp_path / "one" / "two") == 0o700


def test_relative_folder_becomes_absolute(prepare, tmp_path, monkeypatch):
    """The tasks may run elsewhere."""
    monkeypatch.chdir(tmp_path)
    assert prepare("here").run_dir == str(tmp_path / "here")


def test_default_folder_has_scheme_and_time(prepare, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = datetime.datetime.now()
    one, other = Path(prepare(None).run_dir), Path(prepare(None).run_dir)
    assert one.parent == tmp_path / "runs" / "HogWild"
    assert before <= datetime.datetime.strptime(one.name, "%Y-%m-%d_%H-%M-%S.%f") <= datetime.datetime.now()
    assert one != other  # two runs that start in the same second


@pytest.mark.parametrize("task", [None, CHIEF])
def test_another_run_is_not_overwritten(prepare, user_error, finished_run, task):
    with user_error(f"--run_dir={finished_run} already holds a run", "--resume", "another folder"):
        prepare(finished_run, task=task)


def test_other_workers_join_a_run_that_the_chief_has_begun(prepare, finished_run):
    prepare(finished_run, task=OTHER)


def test_resume(prepare, finished_run):
    assert prepare(finished_run, resume=True).run_dir == str(finished_run)


@pytest.mark.parametrize("task", [None, CHIEF])
def test_resume_without_a_checkpoint(prepare, user_error, tmp_path, task):
    with user_error("--resume: there is no checkpoint in", str(tmp_path / "nothing")):
        prepare(tmp_path / "nothing", resume=True, task=task)
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("name", ["model.ckpt.index", "model.ckpt-.index", "a b-100.index", "model.ckpt-*.index", "notes.txt"])
def test_files_that_are_no_checkpoints(prepare, user_error, tmp_path, name):
    """So a run that is to go on does not begin anew, without a word."""
    in_folder(tmp_path, f"checkpoints/{name}").touch()
    with user_error("--resume: there is no checkpoint in"):
        prepare(tmp_path, resume=True)
    prepare(tmp_path)


def test_resume_without_a_folder(prepare, user_error):
    with user_error("--resume needs --run_dir=FOLDER"):
        prepare(None, resume=True)


@pytest.mark.parametrize("below", ["", "run", "a/run"])
def test_file_in_the_way(prepare, user_error, tmp_path, below):
    (tmp_path / "file").touch()
    with user_error(f"--run_dir={tmp_path / 'file' / below} cannot be written: "):
        prepare(tmp_path / "file" / below)


@pytest.mark.parametrize("folder", ["logs", "metrics"])
def test_file_in_the_place_of_a_folder_of_the_run(prepare, user_error, tmp_path, folder):
    (tmp_path / folder).touch()
    with user_error(f"--run_dir={tmp_path} cannot be used: {folder} is a file, where a folder belongs; remove it, or give"):
        prepare(tmp_path)


def test_folder_that_takes_no_files(prepare, user_error):
    with user_error("--run_dir=/proc/run cannot be written: "):
        prepare("/proc/run")


def test_name_that_no_folder_can_have(prepare, user_error, tmp_path):
    with user_error("cannot be written: File name too long"):
        prepare(tmp_path / ("x" * 300))


def test_folder_that_may_not_be_entered(prepare, user_error, monkeypatch):
    """As `exists` says for another user's folder, where tests that run as root may enter."""

    def exists(path, **_):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", exists)
    with user_error("--run_dir=/home/other/run cannot be written: Permission denied"):
        prepare("/home/other/run")


def test_whole_run_that_comes_in_between(prepare, user_error, monkeypatch, tmp_path):
    """It begins and ends after this one has looked, and before this one has the lock."""
    makes = of_runs.make_private_folder

    def make(path):
        makes(path)
        (path / "checkpoints").mkdir()
        (path / "checkpoints" / "model.ckpt-100.index").touch()

    monkeypatch.setattr(of_runs, "make_private_folder", make)
    with user_error("already holds a run: continue it with --resume"):
        prepare(tmp_path / "run")


def test_json_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "result.json"
    write_json(path, {"steps": 1})
    with pytest.raises(TypeError):
        write_json(path, {"steps": object()})
    assert json.loads(path.read_text()) == {"steps": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]


def written(folder):
    """The files in a folder, but for locks: {path: time of the last change}."""
    files = (path for path in folder.rglob("*") if not path.is_dir() and not path.name.startswith("lock"))
    return {path: os.lstat(path).st_mtime_ns for path in files}


# One run, one folder


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize(
    "first, second", [(None, None), (None, CHIEF), (CHIEF, None), (CHIEF, CHIEF), (None, OTHER), (OTHER, None)]
)
def test_folder_that_is_in_use(hold, user_error, finished_run, first, second, resume):
    """Launched (or alone) and by hand, in each order; a checkpoint is there, as soon after any start."""
    with hold(finished_run, task=first, resume=True):
        before = written(finished_run)
        line = f"is in use by process {os.getpid()}: wait until that run has ended, or give another folder"
        with user_error(f"--run_dir={finished_run} {line}"), hold(finished_run, task=second, resume=resume):
            pass
        assert written(finished_run) == before


@pytest.mark.parametrize("task", [OTHER, PS, EVALUATOR])
def test_the_same_task_twice(hold, user_error, tmp_path, task):
    with hold(tmp_path, task=CHIEF), hold(tmp_path, task=task):
        with user_error(f"--run_dir={tmp_path} is in use by process {os.getpid()}: wait"), hold(tmp_path, task=task):
            pass


def test_tasks_by_hand_share_their_folder_in_any_order(hold, tmp_path):
    for order in (CHIEF, OTHER, PS, EVALUATOR), (EVALUATOR, PS, OTHER, CHIEF):
        with contextlib.ExitStack() as stack:
            for task in order:
                stack.enter_context(hold(tmp_path, task=task))


def test_folder_is_free_when_a_run_has_ended(hold, tmp_path):
    """Another process can lock the folder then; a task that is started again has its lock at once."""
    for task in None, CHIEF, CHIEF, OTHER, None, None:
        with hold(tmp_path, task=task):
            pass


@pytest.mark.slow
def test_the_holder_is_the_task_that_still_lives(hold, user_error, tmp_path):
    """Of tasks by hand several may have ended, whose numbers the files still have."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    with hold(tmp_path, task=OTHER):
        (tmp_path / "lock-ps-0").write_text(f"{ended.pid} {socket.gethostname()}\n")
        with user_error(f"is in use by process {os.getpid()}:"), hold(tmp_path):
            pass


@pytest.mark.parametrize("text", ["", "x", "1 2 3", "99999999999999 here\n", "\udcff", "-1 here\n"])
def test_holder_that_does_not_say_who_it_is(hold, user_error, tmp_path, text):
    with hold(tmp_path):
        (tmp_path / "lock").write_text(text, errors="surrogateescape")
        with user_error("is in use by another process: wait"), hold(tmp_path):
            pass


@pytest.mark.parametrize("task, name", [(None, "lock"), (CHIEF, "lock"), (CHIEF, "lock-worker-0"), (PS, "lock-ps-0")])
@pytest.mark.parametrize("is_made_again", [False, True])
def test_holder_notices_that_its_lock_was_removed(hold, tmp_path, task, name, is_made_again):
    with hold(tmp_path / "other"), hold(tmp_path / "run", task=task):
        of_runs.check_locks(tmp_path / "run")
        (tmp_path / "run" / name).unlink()
        if is_made_again:
            (tmp_path / "run" / name).touch()
        with pytest.raises(TrainingFailed, match=f"run/{name} was removed, so another run may write into the folder"):
            of_runs.check_locks(tmp_path / "run")
        of_runs.check_locks(tmp_path / "other")
    of_runs.check_locks(tmp_path / "run")  # it is not held any more


@pytest.mark.parametrize("is_made_again", [False, True])
def test_lock_that_is_removed_while_it_is_taken(hold, user_error, tmp_path, monkeypatch, is_made_again):
    flock = fcntl.flock

    def remove_first(descriptor, how):
        (tmp_path / "lock").unlink()
        if is_made_again:
            (tmp_path / "lock").touch()
        flock(descriptor, how)

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", remove_first)
        with user_error(f"--run_dir={tmp_path}: lock was removed while this run waited for it"), hold(tmp_path):
            pass
    with hold(tmp_path):
        pass


HOLDER = """
import os, signal, sys, types
from common.core.run_facts import RunFacts
from common.core.run_folder import prepare_run_dir

settings = types.SimpleNamespace(run_dir=sys.argv[1], resume=False, run=RunFacts("HogWild"))
prepare_run_dir(settings)  # nobody keeps what it returns
if os.fork() == 0:  # the child says so when it has given up what it inherited
    print(os.getppid(), os.getpid(), flush=True)
signal.pause()
"""


@pytest.mark.slow
def test_kernel_gives_the_lock_back_though_a_child_lives_on(hold, user_error, tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    pid, child = map(int, process.stdout.readline().split())
    try:
        with user_error(f"--run_dir={tmp_path} is in use by process {pid}: wait"), hold(tmp_path):
            pass
        process.kill()
        process.wait()
        with hold(tmp_path):
            os.kill(child, 0)  # it lives
    finally:
        os.kill(child, signal.SIGKILL)


def test_what_another_machine_holds_is_waited_for_as_it_may_be_lost(hold, user_error, tmp_path, monkeypatch, capsys):
    """NFS gives its locks back after a while only."""
    holder, say = contextlib.ExitStack(), of_runs.progress.say
    holder.enter_context(hold(tmp_path))
    (tmp_path / "lock").write_text("12 elsewhere\n")

    def say_and_give_back(line):
        say(line)
        holder.close()

    monkeypatch.setattr(of_runs.progress, "say", say_and_give_back)
    with hold(tmp_path):
        pass
    assert capsys.readouterr().out == (
        f"--run_dir={tmp_path} is in use by process 12 on elsewhere: waits up to 120 s, in case that machine was lost\n"
    )
    monkeypatch.setattr(of_runs, "OTHER_HOST_SECONDS", 0)
    with hold(tmp_path):
        (tmp_path / "lock").write_text("12 elsewhere\n")
        with user_error(f"--run_dir={tmp_path} is in use by process 12 on elsewhere: wait until"), hold(tmp_path):
            pass


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_file_system_without_locks(hold, tmp_path, monkeypatch, capsys, number):
    def flock(descriptor, how):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(of_runs.fcntl, "flock", flock)
    with hold(tmp_path, task=CHIEF):
        assert capsys.readouterr().out == f"nothing keeps other runs out of {tmp_path}: the file system has no locks\n"


def test_lock_that_fails_otherwise(hold, user_error, tmp_path, monkeypatch):
    def flock(descriptor, how):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(of_runs.fcntl, "flock", flock)
    with user_error(f"--run_dir={tmp_path} cannot be written: Input/output error"), hold(tmp_path):
        pass


def test_logs_of_two_programs_of_ones_own(tmp_path, capsys):
    (tmp_path / "mine.py").touch()
    with of_runs.lock_folder(tmp_path, "--log_dir", ["logs"]), pytest.raises(SystemExit) as info:
        common.run.main([f"--log_dir={tmp_path}", str(tmp_path / "mine.py")])
    assert info.value.code == 2
    assert capsys.readouterr().err.startswith(f"common.run: --log_dir={tmp_path} is in use by process {os.getpid()}: ")


@pytest.mark.cluster
@pytest.mark.parametrize("how", [["--launch"], []])
def test_a_run_ends_when_its_lock_is_removed(run_dir, how):
    """Launched, and a process that trains alone: otherwise a second run would train in the same folder."""
    first = start(run_dir, *how, *ENDLESS) if how else by_hand.start(HOGWILD, *ENDLESS, f"--run_dir={run_dir}")
    read_until(first, is_training)
    (run_dir / "lock").unlink()
    assert finish(first, status=1).splitlines()[-1].startswith(f"hogwild.py: {run_dir}/lock was removed, so another run may ")


@pytest.mark.cluster
def test_a_second_run_in_the_same_folder_ends_and_the_first_goes_on(run_dir):
    """However both are started; also when somebody deletes its logs and its metrics, and a task is started again. As soon as it
    is killed, another may go on with it."""
    first = start(run_dir, "--launch", *ENDLESS, "--checkpoint_secs=1")
    read_until(first, is_training)
    in_use = f"--run_dir={run_dir} is in use by process {first.pid}: wait until that run has ended, or give another folder"
    with reserved_port() as ps, reserved_port() as worker:
        hosts = [f"--{job}_hosts=localhost:{port.getsockname()[1]}" for job, port in (("ps", ps), ("worker", worker))]
        by_hand = ["--job_name=worker", "--task_index=0", *hosts]
        seconds = [start(run_dir, *flags) for flags in (["--launch"], ["--launch", "--resume"], [], ["--resume"], by_hand)]
        for second in seconds:
            assert finish(second, status=2) == f"hogwild.py: {in_use}\n"
    assert len(processes(run_dir, "--job_name=worker")) == 2 and first.poll() is None
    for name in "logs", "metrics":
        delete(run_dir / name)
    (victim,) = processes(run_dir, "--job_name=worker", "--task_index=1")
    os.kill(victim, signal.SIGKILL)
    read_until(first, lambda line: line == "worker 1 was killed by SIGKILL; restart 1 of 3\n")
    logs = [run_dir / "logs" / f"{task}.log" for task in ("ps-0", "worker-0", "worker-1")]
    metrics = [run_dir / "metrics" / f"worker-{i}.jsonl" for i in (0, 1)]
    read_until(first, lambda _: all(path.exists() and (path in logs or path.stat().st_size) for path in [*logs, *metrics]))
    step = max(json.loads(line)["global_step"] for line in metrics[0].read_text().splitlines())
    first.kill()
    first.wait()
    run(run_dir, "--resume", f"--steps={step + 1000}")
    assert result_of(run_dir)["test_accuracy"] >= 0.95


# What somebody has planted


def in_folder(run_dir, name):
    """The path of a file in a folder of a run that has saved a checkpoint; in a folder that is made."""
    (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
    return run_dir / name


@pytest.mark.parametrize("task", [None, CHIEF, OTHER])
@pytest.mark.parametrize(
    "name",
    [
        *("lock", "lock-worker-0", "result.json", "result.json.unfinished", "curve.png", "curve.unfinished-1.png"),
        *("model.keras", "model.keras.unfinished.keras", worker_hooks.STOP, worker_hooks.ENDED),
        *("logs/worker-0.log", "logs/fork-server.log", "metrics/worker-1.jsonl", "checkpoints/checkpoint"),
        *("checkpoints/model.ckpt-100.index", "tensorboard/worker-0", "best/evaluation.json", "best/model.keras"),
        *("logs", "metrics", "tensorboard", "best", "contributions", "contributions/worker-0.json"),
    ],
)
def test_link_in_the_folder(hold, user_error, finished_run, tmp_path, name, task):
    """Whether there is something at its end, or it would be made."""
    elsewhere = tmp_path / "elsewhere"
    in_folder(finished_run, name).unlink(missing_ok=True)
    (finished_run / name).symlink_to(elsewhere)
    with user_error(f"--run_dir={finished_run} cannot be used: {name} is a link; remove it, or give another folder"):
        with hold(finished_run, resume=True, task=task):
            pass
    assert not elsewhere.exists()
    elsewhere.mkdir() if "." not in name else elsewhere.write_text("precious")
    with user_error(f"{name} is a link"), hold(finished_run, resume=True, task=task):
        pass
    assert list(elsewhere.iterdir()) == [] if elsewhere.is_dir() else elsewhere.read_text() == "precious"


@pytest.mark.parametrize("kind", ["file", "folder", "link", "pipe"])
def test_what_is_called_control_and_is_no_socket(hold, user_error, finished_run, tmp_path, kind):
    path = finished_run / "control"
    make = {
        "file": path.touch,
        "folder": path.mkdir,
        "link": lambda: path.symlink_to(tmp_path),
        "pipe": lambda: os.mkfifo(path),
    }
    make[kind]()
    with user_error(f"--run_dir={finished_run} cannot be used: control is not the socket that a run makes"):
        with hold(finished_run, resume=True):
            pass
    assert os.path.lexists(path)


def test_the_socket_of_a_launcher_that_was_killed(hold, finished_run):
    with control.heard(finished_run, lambda request: None):
        os.link(finished_run / "control", finished_run / "kept")
    (finished_run / "kept").rename(finished_run / "control")
    with hold(finished_run, resume=True):
        pass


def test_folder_of_checkpoints_is_a_link(hold, user_error, finished_run, tmp_path):
    (finished_run / "checkpoints").rename(tmp_path / "another")
    (finished_run / "checkpoints").symlink_to(tmp_path / "another")
    with user_error("checkpoints is a link"), hold(finished_run, resume=True):
        pass


def test_run_dir_itself_may_be_a_link(hold, finished_run, tmp_path):
    """The user has named it."""
    (tmp_path / "latest").symlink_to(finished_run)
    with hold(tmp_path / "latest", resume=True) as settings:
        assert settings.run_dir == str(finished_run)


def test_what_is_no_runs_is_not_looked_at(hold, tmp_path):
    (tmp_path / "data").symlink_to("/")
    (tmp_path / "my.log").symlink_to("/nowhere")
    with hold(tmp_path):
        pass


@pytest.mark.parametrize(
    "name", ["logs/worker-0.log", "metrics/worker-0.jsonl", "lock", "checkpoints/checkpoint", "result.json"]
)
@pytest.mark.parametrize("kind", ["a pipe", "a socket", "a folder, where a file belongs"])
def test_other_things_than_files(hold, user_error, finished_run, monkeypatch, name, kind):
    """No process waits at a pipe that has no other end."""
    path = in_folder(finished_run, name)
    with contextlib.ExitStack() as stack:
        if kind == "a pipe":
            os.mkfifo(path)
        elif kind == "a socket":
            monkeypatch.chdir(path.parent)  # a socket's path may be a hundred characters
            stack.enter_context(socket.socket(socket.AF_UNIX)).bind(path.name)
        else:
            path.mkdir()
        with (
            user_error(f"--run_dir={finished_run} cannot be used: {name} is {kind}; remove it"),
            hold(finished_run, resume=True),
        ):
            pass


@pytest.mark.parametrize("name", ["logs/worker-0.log", "metrics/worker-0.jsonl", "lock"])
def test_file_that_has_another_name(hold, user_error, finished_run, tmp_path, name):
    """Lines that a run adds to it would be in the other one, too."""
    (tmp_path / "precious").write_text("precious")
    in_folder(finished_run, name).hardlink_to(tmp_path / "precious")
    with user_error(f"{name} is a file that has another name, too"), hold(finished_run, resume=True):
        pass
    assert (tmp_path / "precious").read_text() == "precious"


def test_checkpoints_may_have_other_names(hold, finished_run, tmp_path):
    """As copies of a folder made by `cp -al`: they are replaced, not changed."""
    (tmp_path / "copy").hardlink_to(finished_run / "checkpoints" / "model.ckpt-100.index")
    with hold(finished_run, resume=True):
        pass


@pytest.mark.parametrize("name", ["", "lock", "logs", "logs/worker-0.log", "checkpoints/model.ckpt-100.index", "best/x/y"])
def test_folders_and_files_of_others(hold, user_error, finished_run, monkeypatch, name):
    """Here `lstat` and `stat` say whose they are, as only root could give them away."""
    if name:
        in_folder(finished_run, name).touch() if name != "logs" else (finished_run / name).mkdir()
    theirs = os.lstat(finished_run / name).st_ino

    def told(path, *, original):
        found = original(path)
        if found.st_ino == theirs:
            found = os.stat_result([*found[:4], found.st_uid + 1, *found[5:]])
        return found

    for function in os.stat, os.lstat:
        monkeypatch.setattr(
            of_runs.os, function.__name__, lambda path, *, original=function, **options: told(path, original=original)
        )
    what = f"{name} belongs to another user; remove it, or give" if name else "it belongs to another user; give"
    with user_error(f"--run_dir={finished_run} cannot be used: {what}"), hold(finished_run, resume=True):
        pass


PLANTED = {"a link": lambda path, other: path.symlink_to(other), "a file that has": lambda path, other: path.hardlink_to(other)}


@pytest.mark.parametrize("kind", PLANTED)
def test_planted_while_the_run_trains(user_error, tmp_path, kind):
    (tmp_path / "precious").write_text("precious\n{")
    PLANTED[kind](tmp_path / "worker-0.jsonl", tmp_path / "precious")
    with user_error(f"{tmp_path / 'worker-0.jsonl'} is {kind}"):
        open_own(tmp_path / "worker-0.jsonl", os.O_RDWR)
    assert (tmp_path / "precious").read_text() == "precious\n{"


def test_pipe_that_somebody_reads(user_error, tmp_path):
    os.mkfifo(tmp_path / "worker-0.log")
    reader = os.open(tmp_path / "worker-0.log", os.O_RDONLY | os.O_NONBLOCK)
    with user_error("worker-0.log is a pipe"):
        open_own(tmp_path / "worker-0.log", os.O_WRONLY)
    os.close(reader)


def test_json_is_not_written_through_a_link(tmp_path):
    (tmp_path / "precious").write_text("precious")
    for name in "result.json", "result.json.unfinished":
        (tmp_path / name).symlink_to(tmp_path / "precious")
    write_json(tmp_path / "result.json", {"steps": 1})
    assert (tmp_path / "precious").read_text() == "precious"
    assert not (tmp_path / "result.json").is_symlink() and json.loads((tmp_path / "result.json").read_text()) == {"steps": 1}


def test_no_descriptor_is_left_open(hold, user_error, tmp_path):
    """By a refusal, or by a lock that was given back."""
    os.mkfifo(tmp_path / "worker-0.log")
    before = os.listdir("/dev/fd")
    for _ in range(3):
        with user_error("is a pipe"):
            open_own(tmp_path / "worker-0.log", os.O_RDWR)
        with hold(tmp_path / "run"), user_error("in use"), hold(tmp_path / "run"):
            pass
    assert os.listdir("/dev/fd") == before
