"""Training on parameter servers: boilerplate to copy. Put in a model, data and an optimizer of your own.

    python distributed_session.py [CHECKPOINT_DIR]

The same script is each task of a cluster, whether ps or worker: the environment says which (`TF_CONFIG`, or `JOB_NAME
TASK_INDEX PS_HOSTS WORKER_HOSTS` and maybe `MASTER_HOST`). If it says nothing, this is one process that trains on its own.
"""

import sys

from sharding import array_dataset

from common import DistributedSession, TaskSpec, TaskSpecDef, tf
from common.data import digits


def dense(name, x, units):
    weights = tf.get_variable(f"{name}/weights", [x.shape[-1], units])
    return x @ weights + tf.get_variable(f"{name}/biases", initializer=tf.zeros([units]))


def model(images):
    """Returns the logits `[n, 10]` of images `[n, 8, 8, 1]`."""
    return dense("output", tf.nn.relu(dense("hidden", tf.reshape(images, [-1, 64]), 64)), 10)


def main(checkpoint_dir="runs/Distributed-Session", last_step=1000, batch_size=32, learning_rate=0.2):
    task_spec = TaskSpec() or TaskSpecDef()  # the latter: one process, which is its own master
    if task_spec.is_ps():
        return task_spec.create_server()  # when every worker has left its session

    (x_train, y_train), (x_test, y_test) = digits()
    with tf.Graph().as_default(), tf.device(task_spec.device_fn()):  # variables on the ps tasks, the rest on this worker
        batches = array_dataset((x_train, y_train), batch_size, task_spec.num_workers, task_spec.shard_index)
        images, labels = tf.data.make_one_shot_iterator(batches).get_next()
        logits = tf.make_template("model", model)  # makes its variables when it is first called
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits(images)))
        accuracy = tf.reduce_mean(tf.cast(tf.equal(tf.argmax(logits(x_test), axis=1), y_test), tf.float32))
        step = tf.train.get_or_create_global_step()  # counts the steps of all workers together
        train = tf.train.GradientDescentOptimizer(learning_rate).minimize(loss, global_step=step)

        next_report = 0
        with DistributedSession(task_spec, checkpoint_dir, hooks=[tf.train.StopAtStepHook(last_step=last_step)]) as session:
            while not session.should_stop():
                step_now, loss_now, _ = session.run([step, loss, train])
                if task_spec.is_master() and step_now >= next_report:
                    print(f"step {step_now}, loss {loss_now:.3f}", flush=True)
                    next_report = step_now + 200
            if task_spec.is_master():  # a session that has been asked to stop refuses `run`, but not `run_step_fn`
                print(f"test accuracy {session.run_step_fn(lambda step_context: step_context.session.run(accuracy)):.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
