"""A table under TensorFlow 2's own parameter servers: `ParameterServerStrategy`, a variable in shards, `embedding_lookup`.

    TABLE_ROWS=1000000 python benchmarks/sharded_variable.py --num_workers=2 --run_dir=runs/sharded

The model and the samples are those of `clicks.py`. `keras.Model.fit` does not run under this strategy with Keras 3, so the
model is written in `tf.Variable`s; a step of SGD is a subtraction from each, from the table a `scatter_sub` of the rows that
have a gradient. The table is cut over all ps by `FixedShardsPartitioner`, and nothing else is cut, which would take more
messages. A call of the scheduled function trains `--steps_per_call` steps in a loop of the graph; TensorFlow's guide has one.
The samples are constants of the graph, or with `--dataset` from `tf.data` on each worker, as the guide has it. With
`--distinct` a step looks each row up once, as ours does, and not once for each id.
"""

import argparse
import contextlib
import multiprocessing
import os
import time
from pathlib import Path

import alternatives
import clicks
import memory
import parameter_server_strategy

from common.core import run_folder
from common.launch import launcher

AT_ONCE = 200  # steps that are scheduled before somebody looks at the time


def main():
    """Runs ps tasks, workers and the coordinator, which writes `result.json`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--run_dir", type=Path, required=True)
    parser.add_argument("--num_workers", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--num_ps", type=int, default=2, help="ps tasks (default: 2)")
    parser.add_argument("--batch_size", type=int, default=512, help="samples of a step (default: 512)")
    parser.add_argument("--learning_rate", type=float, default=0.1, help="(default: 0.1)")
    parser.add_argument("--seconds", type=float, default=5, help="of training (default: 5)")
    parser.add_argument("--steps_per_call", type=int, default=1, help="of the scheduled function (default: 1)")
    parser.add_argument("--dataset", action="store_true", help="take the samples from tf.data")
    parser.add_argument("--distinct", action="store_true", help="look up each row once per step")
    options = parser.parse_args()
    options.run_dir.mkdir(parents=True, exist_ok=True)
    os.environ.update(alternatives.environment(options.num_workers))
    # With fewer threads it waits for ever: TensorFlow's guide has the same.
    os.environ["TF_NUM_INTEROP_THREADS"] = str(options.num_workers + 1)
    jobs = [("ps", i) for i in range(options.num_ps)] + [("worker", i) for i in range(options.num_workers)]
    with contextlib.ExitStack() as stack:
        cluster: dict[str, list[str]] = {"ps": [], "worker": [], "chief": []}
        for job, _ in [*jobs, ("chief", 0)]:
            port = stack.enter_context(launcher.reserved_port()).getsockname()[1]
            cluster[job].append(f"127.0.0.1:{port}")
        context, pids = multiprocessing.get_context("spawn"), [f"{os.getpid()}"]
        for job, index in jobs:
            arguments = job, index, cluster, os.getpid()
            process = context.Process(target=parameter_server_strategy.serve, args=arguments, daemon=True)
            process.start()
            pids.append(f"{process.pid}")
        run_folder.write_json(options.run_dir / "result.json", coordinate(options, cluster, pids))


def coordinate(options, cluster, pids):
    """Trains, as the coordinator; returns what came out, as `result.json` has it."""
    import tensorflow as tf

    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster), task_type="chief", task_id=0, rpc_layer="grpc"
    )
    shards = tf.distribute.experimental.partitioners.FixedShardsPartitioner(options.num_ps)

    def of_table(shape, dtype, axis=0):
        return shards(shape, dtype, axis) if shape[0] == clicks.ROWS else [1] * len(shape)

    strategy = tf.distribute.ParameterServerStrategy(resolver, variable_partitioner=of_table)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    (x_train, y_train), (x_test, y_test) = clicks.data()
    inputs, hidden = clicks.IDS * clicks.WIDTH, clicks.HIDDEN
    glorot = tf.keras.initializers.GlorotUniform(0)

    def first_rows(shape=(clicks.ROWS, clicks.WIDTH), dtype=tf.float32, **_):
        return tf.random.uniform(shape, -0.05, 0.05, dtype)

    with strategy.scope():
        table = tf.Variable(first_rows, shape=[clicks.ROWS, clicks.WIDTH], dtype=tf.float32)
        firsts = glorot([inputs, hidden]), tf.zeros([hidden]), glorot([hidden, 1]), tf.zeros([1])
        dense = [tf.Variable(first) for first in firsts]
    variables = [*table.variables, *dense]

    def loss_of(ids, labels):
        if options.distinct:
            distinct, where = tf.unique(tf.reshape(ids, [-1]))
            rows = tf.gather(tf.nn.embedding_lookup(table, distinct), where)
        else:
            rows = tf.nn.embedding_lookup(table, ids)
        units = tf.nn.relu(tf.matmul(tf.reshape(rows, [-1, inputs]), dense[0]) + dense[1])
        logits = tf.squeeze(tf.matmul(units, dense[2]) + dense[3], axis=1)
        return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(tf.cast(labels, tf.float32), logits))

    def step(ids, labels):
        with tf.GradientTape() as tape:
            loss = loss_of(ids, labels)
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            if isinstance(gradient, tf.IndexedSlices):
                variable.scatter_sub(tf.IndexedSlices(options.learning_rate * gradient.values, gradient.indices))
            else:
                variable.assign_sub(options.learning_rate * gradient)

    def of_worker():
        data = tf.data.Dataset.from_tensor_slices((x_train, y_train)).shuffle(len(x_train)).repeat()
        return data.batch(options.batch_size, drop_remainder=True).prefetch(4)

    @tf.function
    def train_steps(*iterators):
        x, y = tf.constant(x_train), tf.constant(y_train)
        for _ in tf.range(options.steps_per_call):
            if iterators:
                ids, labels = next(iterators[0])
            else:
                indices = tf.random.uniform([options.batch_size], maxval=len(x_train), dtype=tf.int64)
                ids, labels = tf.gather(x, indices), tf.gather(y, indices)
            step(ids, labels)

    iterators = (iter(coordinator.create_per_worker_dataset(of_worker)),) if options.dataset else ()

    def train(calls):
        for _ in range(calls):
            coordinator.schedule(train_steps, iterators)
        coordinator.join()

    train(10 * options.num_workers)  # traces it for each worker
    calls, at_once = 0, max(1, AT_ONCE // options.steps_per_call)
    start, used = time.monotonic(), sum(map(memory.processor_seconds, pids))
    while time.monotonic() - start < options.seconds:
        train(at_once)
        calls += at_once
    seconds, used = time.monotonic() - start, sum(map(memory.processor_seconds, pids)) - used
    samples = calls * options.steps_per_call * options.batch_size
    return {
        "num_ps": options.num_ps,
        "num_workers": options.num_workers,
        "batch_size": options.batch_size,
        "parameters": sum(int(tf.size(variable)) for variable in dense),
        "optimizer": "GradientDescent",
        "samples": samples,
        "train_seconds": seconds,
        "samples_per_second": samples / seconds,
        "processor_ms_per_1000_samples": 1e6 * used / samples,
        "test_loss": float(loss_of(x_test, y_test)),
        "restarts": 0,
    }


if __name__ == "__main__":
    main()
