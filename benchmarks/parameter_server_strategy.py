"""TensorFlow 2's own parameter servers: ParameterServerStrategy and ClusterCoordinator on the same problem.

    python benchmarks/parameter_server_strategy.py --launch --num_workers=2 --run_dir=runs/strategy

Asynchronous SGD as TensorFlow's guide has it: a coordinator, a process of its own, sends steps to any worker that is free, and
the variables lie on the ps. `keras.Model.fit` does not run under this strategy with Keras 3, so the network is written in
`tf.Variable`s, and the optimizer is one subtraction each. The samples are constants of the graph, which draws them at random;
a dataset on each worker, as the guide has it, is slower. A call of the scheduled function trains `--steps_per_call` steps in a
loop of the graph; the guide has one step a call.
"""

import contextlib
import math
import multiprocessing
import os
import time

import alternatives
import numpy as np

from common.launch import launcher, sandbox

SIZES = (64, 128, 128, 10)  # of --model=mlp


def main():
    """Runs ps tasks, workers and the coordinator, which writes `result.json`."""
    options, digits = alternatives.parse(steps_per_call=(1, "steps per call of the scheduled function"))
    # With fewer threads it waits for ever: TensorFlow's guide has the same.
    environment = {"TF_NUM_INTEROP_THREADS": str(options.num_workers + 1), **os.environ}
    os.environ.update(alternatives.environment(options.num_workers) | environment)
    jobs = [("ps", i) for i in range(options.num_ps)] + [("worker", i) for i in range(options.num_workers)]
    with contextlib.ExitStack() as stack:
        cluster: dict[str, list[str]] = {"ps": [], "worker": [], "chief": []}
        for job, _ in [*jobs, ("chief", 0)]:
            port = stack.enter_context(launcher.reserved_port()).getsockname()[1]
            cluster[job].append(f"127.0.0.1:{port}")
        context = multiprocessing.get_context("spawn")
        for job, index in jobs:
            context.Process(target=serve, args=(job, index, cluster, os.getpid()), daemon=True).start()
        coordinate(options, digits, cluster)


def serve(job, index, cluster, launcher):
    """The life of a ps or a worker, which ends with the launcher."""
    sandbox.die_with_parent(launcher)
    import tensorflow as tf

    tf.distribute.Server(tf.train.ClusterSpec(cluster), job, index, protocol="grpc").join()


def coordinate(options, digits, cluster):
    """Trains, as the coordinator."""
    import tensorflow as tf

    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster), task_type="chief", task_id=0, rpc_layer="grpc"
    )
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    tf.random.set_seed(options.seed)
    with strategy.scope():
        initial = tf.keras.initializers.GlorotUniform(options.seed)
        layers = [
            (tf.Variable(initial([inputs, outputs])), tf.Variable(tf.zeros([outputs])))
            for inputs, outputs in zip(SIZES, SIZES[1:])
        ]
    variables = [variable for layer in layers for variable in layer]

    def network(images):
        hidden = tf.reshape(images, [-1, SIZES[0]])
        for i, (weights, biases) in enumerate(layers):
            hidden = tf.matmul(hidden, weights) + biases
            hidden = tf.nn.relu(hidden) if i < len(layers) - 1 else hidden
        return hidden

    @tf.function
    def train_steps():
        x, y = tf.constant(digits.x_train), tf.constant(digits.y_train)
        for _ in tf.range(options.steps_per_call):
            indices = tf.random.uniform([options.batch_size], maxval=len(digits.x_train), dtype=tf.int64)
            images, labels = tf.gather(x, indices), tf.gather(y, indices)
            with tf.GradientTape() as tape:
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=network(images))
                loss = tf.reduce_mean(losses)
            for variable, gradient in zip(variables, tape.gradient(loss, variables)):
                variable.assign_sub(options.learning_rate * gradient)

    last = options.steps or math.ceil(options.epochs * len(digits.x_train) / options.batch_size)
    for _ in range(20 * options.num_workers):  # traces it for each worker
        coordinator.schedule(train_steps)
    coordinator.join()
    calls, at_once = 0, 500  # what is scheduled before somebody looks at the time
    start = time.monotonic()
    while calls * options.steps_per_call < last and not (options.seconds and time.monotonic() - start > options.seconds):
        for _ in range(at_once):
            coordinator.schedule(train_steps)
        calls += at_once
        coordinator.join()
    seconds = time.monotonic() - start

    logits = network(digits.x_test)
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(digits.y_test, logits))
    steps, parameters = calls * options.steps_per_call, sum(int(np.prod(variable.shape)) for variable in variables)
    accuracy = np.mean(np.argmax(logits, axis=1) == digits.y_test)
    trained = steps * options.batch_size
    alternatives.write_result(options, "ParameterServerStrategy", parameters, steps, trained, seconds, accuracy, loss)


if __name__ == "__main__":
    main()
