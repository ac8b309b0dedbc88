"""A regression by `tf.estimator.train_and_evaluate`, which reads TF_CONFIG: `estimator.py FOLDER STEPS`."""

from __future__ import annotations

import sys
import time

import tensorflow as tf

v1 = tf.compat.v1
FEATURES = 4


def batches():
    inputs = tf.random.stateless_normal([256, FEATURES], seed=(1, 2))
    targets = tf.linalg.matvec(inputs, tf.range(1.0, FEATURES + 1))
    return tf.data.Dataset.from_tensor_slices((inputs, targets)).shuffle(256).repeat().batch(32)


def model(features, labels, mode):
    weights = v1.get_variable("weights", [FEATURES], initializer=v1.zeros_initializer())
    loss = tf.reduce_mean((tf.linalg.matvec(features, weights) - labels) ** 2)
    step = v1.train.GradientDescentOptimizer(0.01).minimize(loss, global_step=v1.train.get_global_step())
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=step)


class Slowly(v1.train.SessionRunHook):
    """Lets a test see the training."""

    def after_run(self, context, values):
        time.sleep(0.05)


folder, steps = sys.argv[1], int(sys.argv[2])
v1.logging.set_verbosity(v1.logging.INFO)
config = tf.estimator.RunConfig(model_dir=folder, save_checkpoints_steps=50, log_step_count_steps=20)
tf.estimator.train_and_evaluate(
    tf.estimator.Estimator(model, config=config),
    tf.estimator.TrainSpec(batches, max_steps=steps, hooks=[Slowly()]),
    tf.estimator.EvalSpec(batches, steps=4, start_delay_secs=0, throttle_secs=1),
)
print("trained", flush=True)
