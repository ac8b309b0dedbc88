"""Every process runs this script, as TensorFlow's guide has it: TF_CONFIG tells each which one it is."""

import os
import time

import tensorflow as tf
from model import Model, batches

OUT, EPOCHS = os.environ["OUT"], int(os.environ.get("EPOCHS", "60"))
cluster = tf.distribute.cluster_resolver.TFConfigClusterResolver()
if cluster.task_type in ("worker", "ps"):
    os.environ["GRPC_FAIL_FAST"] = "use_caller"
    tf.distribute.Server(cluster.cluster_spec(), cluster.task_type, cluster.task_id, protocol="grpc").join()
elif cluster.task_type == "evaluator":
    model = Model()
    for path in tf.train.checkpoints_iterator(OUT):
        tf.train.Checkpoint(model=model).restore(path).expect_partial()
        loss = model.loss(*next(iter(batches())))
        print(f"evaluated epoch {model.epoch.numpy()}: loss {loss:.6f}", flush=True)

strategy = tf.distribute.ParameterServerStrategy(cluster)
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
with strategy.scope():
    model = Model()
manager = tf.train.CheckpointManager(tf.train.Checkpoint(model=model), OUT, max_to_keep=3)
manager.restore_or_initialize()
print(f"starts after epoch {model.epoch.numpy()} with {cluster.cluster_spec().as_dict()}", flush=True)
step = tf.function(lambda batch: strategy.run(model.learn, args=next(batch)))
iterator = iter(coordinator.create_per_worker_dataset(batches))
while model.epoch.numpy() < EPOCHS:
    losses = [coordinator.schedule(step, args=(iterator,)) for _ in range(20)]
    coordinator.join()
    time.sleep(0.5)  # as if the model were larger
    model.epoch.assign_add(1)
    manager.save()
    print(f"epoch {model.epoch.numpy()}: loss {losses[-1].fetch():.6f}", flush=True)
