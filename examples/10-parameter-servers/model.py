"""A linear model and its samples, which all processes share."""

import tensorflow as tf

FEATURES = 8


class Model(tf.Module):
    def __init__(self):
        self.weights = tf.Variable(tf.zeros([FEATURES]), name="weights")
        self.bias = tf.Variable(0.0, name="bias")
        self.epoch = tf.Variable(0, dtype=tf.int64, trainable=False, name="epoch")

    def loss(self, inputs, targets):
        return tf.reduce_mean((tf.linalg.matvec(inputs, self.weights) + self.bias - targets) ** 2)

    def learn(self, inputs, targets):
        with tf.GradientTape() as tape:
            loss = self.loss(inputs, targets)
        variables = [self.weights, self.bias]
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(0.02 * gradient)
        return loss


def batches(_=None):
    inputs = tf.random.stateless_normal([1024, FEATURES], seed=(1, 2))
    pairs = (inputs, tf.linalg.matvec(inputs, tf.range(1.0, FEATURES + 1)))
    return tf.data.Dataset.from_tensor_slices(pairs).shuffle(1024).repeat().batch(64)
