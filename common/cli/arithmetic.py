"""Arithmetic of memory, messages and steps, before any measurement. book/guide/arithmetic.md works problems with it.

All values are float32, 4 bytes each. Bytes and seconds are lower bounds: buffers, the framework and waiting come on top.
"""

import math

VALUE = 4  # bytes of a float32
IN_WORKER = 4  # vectors of P values: x, the gradient of a step, its sum over the round, and that sum of the round before


def ps_bytes(parameters, slots=0, num_ps=1):
    """Returns the bytes on each ps: its part of x̃, and `slots` vectors of its optimizer per parameter."""
    return VALUE * parameters * (1 + slots) / num_ps


def worker_bytes(parameters, slots=0, activations=0):
    """Returns the bytes in a worker: its vectors, `slots` more of its optimizer, and the `activations` of a batch in bytes."""
    return VALUE * parameters * (IN_WORKER + slots) + activations


def step_seconds(parameters, uses, flops):
    """Returns the seconds of a local step with dense layers at `flops` floating point operations per second.

    A parameter takes 2 operations (a product and a sum) in the forward pass each time that it is used, and 4 in the backward
    pass: 2 for the gradient of the layer's input, 2 for its own. So 6 P per sample, or token.

    Args:
      parameters: P, of the layers that multiply; rows of a table are only looked up.
      uses: number of uses of each parameter in a batch: its samples or tokens, times the positions of a convolution.
    """
    return 6 * parameters * uses / flops


def message_seconds(message, bandwidth, latency=0):
    """Returns the seconds of a message of so many bytes over a link of `bandwidth` bytes per second."""
    return latency + message / bandwidth


def workers_fed(step, window, message, ps_bandwidth, num_ps=1):
    """Returns the number of workers, not rounded, whose messages fill the links of the ps if none of them ever waits.

    Args:
      step: seconds of a local step.
      window: local steps per round.
      message: bytes of a round in the busier direction.
      ps_bandwidth: bytes per second of each ps's link in that direction.
    """
    return window * step * num_ps * ps_bandwidth / message


def window_for(workers, step, message, ps_bandwidth, num_ps=1):
    """Returns the shortest window with which the links of the ps carry the messages of so many workers."""
    return max(1, math.ceil(workers / workers_fed(step, 1, message, ps_bandwidth, num_ps)))
