"""Trains a linear model with parameter servers, as TensorFlow's own guide does: every process runs this script, and
TF_CONFIG tells it which one it is.

The chief coordinates and saves, workers compute, parameter servers hold the variables, the evaluator reads checkpoints.
"""

# pyright: reportMissingModuleSource=false, reportArgumentType=false, reportOperatorIssue=false

import argparse
import os
import time

import tensorflow as tf

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="out/parameter-servers")
parser.add_argument("--epochs", type=int, default=60)
parser.add_argument("--steps", type=int, default=20, help="of an epoch")
parser.add_argument("--pause", type=float, default=0.5, help="seconds after an epoch, to watch it")
arguments = parser.parse_args()

FEATURES = 8
TRUTH = tf.range(1.0, FEATURES + 1)


class Model(tf.Module):
    """The variables, spread over the parameter servers."""

    def __init__(self):
        self.weights = tf.Variable(tf.zeros([FEATURES]), name="weights")
        self.bias = tf.Variable(0.0, name="bias")
        self.epoch = tf.Variable(0, dtype=tf.int64, trainable=False, name="epoch")

    def loss(self, inputs, targets):
        return tf.reduce_mean((tf.linalg.matvec(inputs, self.weights) + self.bias - targets) ** 2)


def batches(_=None):
    inputs = tf.random.stateless_normal([1024, FEATURES], seed=(1, 2))
    pairs = (inputs, tf.linalg.matvec(inputs, TRUTH))
    return tf.data.Dataset.from_tensor_slices(pairs).shuffle(1024).repeat().batch(64)


def serve(cluster):
    os.environ["GRPC_FAIL_FAST"] = "use_caller"
    server = tf.distribute.Server(
        cluster.cluster_spec(), job_name=cluster.task_type, task_index=cluster.task_id, protocol="grpc"
    )
    server.join()


def coordinate(cluster):
    strategy = tf.distribute.ParameterServerStrategy(cluster)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        model = Model()
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(model=model), arguments.out, max_to_keep=3)
    manager.restore_or_initialize()
    print(f"starts after epoch {model.epoch.numpy()} with {cluster.cluster_spec().as_dict()}", flush=True)

    @tf.function
    def step(iterator):
        def on_worker(inputs, targets):
            with tf.GradientTape() as tape:
                loss = model.loss(inputs, targets)
            variables = [model.weights, model.bias]
            for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
                variable.assign_sub(0.02 * gradient)
            return loss

        return strategy.run(on_worker, args=next(iterator))

    iterator = iter(coordinator.create_per_worker_dataset(batches))
    while model.epoch.numpy() < arguments.epochs:
        losses = [coordinator.schedule(step, args=(iterator,)) for _ in range(arguments.steps)]
        coordinator.join()
        time.sleep(arguments.pause)
        model.epoch.assign_add(1)
        manager.save()
        print(f"epoch {model.epoch.numpy()} loss {losses[-1].fetch():.6f}", flush=True)


def evaluate():
    model = Model()
    inputs, targets = next(iter(batches()))
    for path in tf.train.checkpoints_iterator(arguments.out):
        tf.train.Checkpoint(model=model).restore(path).expect_partial()
        print(f"evaluated epoch {model.epoch.numpy()}: loss {model.loss(inputs, targets):.6f}", flush=True)


resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
if resolver.task_type in ("worker", "ps"):
    serve(resolver)
elif resolver.task_type == "evaluator":
    evaluate()
else:
    coordinate(resolver)
