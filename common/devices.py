"""The devices that one process computes on: its GPUs, parts of one, or without a GPU parts of the CPU."""

from common import tf

MEMORY_LIMIT = 2048  # MB of a logical GPU. Of one GPU several are for trying out, not for speed, so this is not much


def gpus():
    """Returns TensorFlow's `PhysicalDevice`s of this process's GPUs: those of the machine, or of `CUDA_VISIBLE_DEVICES`."""
    return tf.config.list_physical_devices("GPU")


def logical_devices(count):
    """Makes `count` devices of this process, and returns their names, `/device:GPU:0` say, and a line that says what they are.

    A GPU each, if there are that many; if there are fewer, each is split into logical GPUs; without any the CPU is. They are
    there for all that this process does, eagerly or in a session: one without a configuration of its own gets this one.

    Memory of a whole GPU is taken as it is needed ("memory growth"). Of a logical GPU TensorFlow wants to know a limit instead.

    To be called before anything is computed, as the devices are made once.

    Raises:
      RuntimeError: if tensorflow has begun to compute, with other devices.
    """
    there = gpus()
    # What has no kernel for a GPU goes to the CPU. Sessions of a graph, unlike eager code, would take it for an error.
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
