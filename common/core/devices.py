"""The devices of each process: a GPU for each worker; in one process its GPUs, parts of one, or parts of the CPU."""

import os
import re
import subprocess
import sys

from common import tf
from common.core.exit_reasons import last_error
from common.core.flags import UserError

MEMORY_LIMIT = 2048  # MB of a logical GPU. Of one GPU several are for trying out, not for speed, so this is not much


def gpus():
    """Returns TensorFlow's `PhysicalDevice`s of this process's GPUs: those of the machine, or of `CUDA_VISIBLE_DEVICES`."""
    return tf.config.list_physical_devices("GPU")


def logical_devices(count):
    """Makes `count` devices of this process, and returns their names, `/device:GPU:0` say, and a line that says what they are.

    A GPU each, if there are that many; if there are fewer, each is split into logical GPUs; without any the CPU is. They are
    there for all that this process does, eagerly or in a session: one without a configuration of its own gets this one.

    Memory of a whole GPU is taken as it is needed ("memory growth"). For a logical GPU, TensorFlow requires a
    memory limit instead.

    To be called before anything is computed, as the devices are made once.

    Raises:
      RuntimeError: if tensorflow has begun to compute, with other devices.
    """
    there = gpus()
    # Operations without a kernel for a GPU go to the CPU. Sessions of a graph, unlike eager code, would raise an error.
    tf.config.set_soft_device_placement(True)
    if len(there) >= count:
        tf.config.set_visible_devices(there[:count], "GPU")  # the others are left to others
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
    """Returns the `Settings` whose `gpus` is a list in place of the flag's text: what `CUDA_VISIBLE_DEVICES` calls them, empty
    if there is none. Unless the number of workers is given, there is one for each.

    Raises:
      UserError: if the text names none, or one that is not there.
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
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")  # if it is set, numbers count what it lists
    names = visible.split(",") if visible else [str(number) for number in range(count)]
    own = {} if num_workers_given or not numbers else {"num_workers": len(numbers)}
    return settings.but(gpus=[names[number] for number in numbers], **own)


def _count_gpus():
    """Asks another process, as this one imports no tensorflow. Only that knows what its build and the drivers make of them."""
    safe = "import sys; sys.path = [folder for folder in sys.path if folder]"  # -c would import from the current folder
    program = "import tensorflow as tf; print(len(tf.config.list_physical_devices('GPU')))"
    command = [sys.executable, "-c", f"{safe}; {program}"]
    asked = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, text=True)
    if asked.returncode:
        raise UserError(f"--gpus: TensorFlow cannot list the GPUs: {last_error(asked.stderr, '')}")
    return int(asked.stdout.split()[-1])


def devices_of(job, index, gpus):
    """Returns the variables that give a task its GPU: the workers one each, in turn; a ps computes next to nothing."""
    if job == "ps":
        return {"CUDA_VISIBLE_DEVICES": "-1"}
    return {"CUDA_VISIBLE_DEVICES": gpus[index % len(gpus)]} if gpus else {}


def say_gpus(settings):
    """Returns which worker has which GPU, in one line."""
    if not settings.gpus:
        return "TensorFlow sees no GPU here: each worker computes on its CPU device"
    each = [f"worker {i}: GPU {settings.gpus[i % len(settings.gpus)]}" for i in range(settings.num_workers)]
    return ", ".join(each)
