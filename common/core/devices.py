"""The devices of each process: a GPU for each worker; in one process its GPUs, parts of one, or parts of the CPU."""

import os
import re
import subprocess
import sys

from common import tf
from common.core.exit_reasons import last_error
from common.core.flags import UserError

MEMORY_LIMIT = 2048  # MB of a logical GPU; small, as splitting a GPU is for trying out, not for speed


def gpus():
    """Returns TensorFlow's `PhysicalDevice`s of this process's GPUs: those of the machine, or of `CUDA_VISIBLE_DEVICES`."""
    return tf.config.list_physical_devices("GPU")


def logical_devices(count):
    """Makes `count` devices of this process, and returns their names, such as `/device:GPU:0`, and a line that describes them.

    Each is a whole GPU, if there are enough; otherwise the GPUs, or without any the CPU, are split into logical devices. They
    serve eager code and every session of this process that has no configuration of its own.

    Memory of a whole GPU grows on demand ("memory growth"). For a logical GPU, TensorFlow requires a memory limit instead.

    To be called before anything is computed, as TensorFlow fixes its devices then.

    Raises:
      RuntimeError: if tensorflow has begun to compute, with other devices.
    """
    there = gpus()
    # Without soft placement, sessions, unlike eager code, fail at an operation that has no GPU kernel.
    tf.config.set_soft_device_placement(True)
    if len(there) >= count:
        tf.config.set_visible_devices(there[:count], "GPU")  # leave the rest to other processes
        for gpu in there[:count]:
            tf.config.experimental.set_memory_growth(gpu, True)
        line = f"{count} of {_number_of(there)}" if len(there) > count else _number_of(there)
    elif there:
        for i, gpu in enumerate(there):
            _split(gpu, len(range(i, count, len(there))), memory_limit=MEMORY_LIMIT)
        line = f"{_number_of(there)}, split into {count} logical GPUs of at most {MEMORY_LIMIT:,} MB"
    else:
        _split(tf.config.list_physical_devices("CPU")[0], count)
        line = f"no GPU: {count} logical CPU device{'s' if count > 1 else ''}"
    names = [device.name for device in tf.config.list_logical_devices("GPU" if there else "CPU")]
    return names, line


def _split(device, count, **limits):
    parts = [tf.config.LogicalDeviceConfiguration(**limits) for _ in range(count)]
    tf.config.set_logical_device_configuration(device, parts)


def _number_of(gpus):
    return f"{len(gpus)} GPU{'s' if len(gpus) > 1 else ''}"


def with_gpus(settings, num_workers_given):
    """Returns the `Settings` with `gpus` as a list of names for `CUDA_VISIBLE_DEVICES`, in place of the flag's text.

    The list is empty if there is no GPU. Unless the number of workers is given, there is one worker per GPU.

    Raises:
      UserError: if the text is invalid, or names a GPU twice or one that does not exist.
    """
    text = settings.gpus
    if text != "all" and not re.fullmatch(r"\d+(,\d+)*", text):
        raise UserError(f"--gpus must be all, or GPU numbers such as 0,2, not {text!r}")
    named = [] if text == "all" else [int(number) for number in text.split(",")]
    if len(set(named)) < len(named):
        raise UserError(f"--gpus={text} names a GPU twice; to have workers share GPUs, give more --num_workers")
    count = _count_gpus()
    numbers = named or list(range(count))
    if max(numbers, default=-1) >= count:
        those = f"only {count}: 0 to {count - 1}" if count else "none"
        raise UserError(f"--gpus={text} names GPU {max(numbers)}, but TensorFlow sees {those}")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")  # if set, GPU numbers index this list
    names = visible.split(",") if visible else [str(number) for number in range(count)]
    own = {} if num_workers_given or not numbers else {"num_workers": len(numbers)}
    return settings.but(gpus=[names[number] for number in numbers], **own)


def _count_gpus():
    """Asks TensorFlow in another process, as this one does not import it; the count depends on its build and the drivers."""
    safe = "import sys; sys.path = [folder for folder in sys.path if folder]"  # -c would import from the current folder
    program = "import tensorflow as tf; print(len(tf.config.list_physical_devices('GPU')))"
    command = [sys.executable, "-c", f"{safe}; {program}"]
    asked = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, text=True)
    if asked.returncode:
        raise UserError(f"--gpus: TensorFlow cannot list the GPUs: {last_error(asked.stderr, '')}")
    return int(asked.stdout.split()[-1])


def devices_of(job, index, gpus):
    """Returns the environment variables that assign a task its GPU: workers in turn; none for a ps, which computes little."""
    if job == "ps":
        return {"CUDA_VISIBLE_DEVICES": "-1"}
    return {"CUDA_VISIBLE_DEVICES": gpus[index % len(gpus)]} if gpus else {}


def say_gpus(settings):
    """Returns the assignment of GPUs to workers, in one line."""
    if not settings.gpus:
        return "TensorFlow sees no GPU here: each worker computes on its CPU device"
    return ", ".join(f"worker {i}: GPU {settings.gpus[i % len(settings.gpus)]}" for i in range(settings.num_workers))
