"""`ray_train.py ADDRESS SCRIPT FOLDER SIZE`: runs a training script by Ray Train V2, restarted after any failure.

Ray Train runs a function in each of its workers and creates the process group before; the script does the rest, and
restores its own checkpoint, as it does under every other system.
"""

# Ray is not installed where this is checked.

import os
import runpy
import sys

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train(config):
    os.environ["BENCH_FOLDER"] = config["folder"]
    runpy.run_path(config["script"], run_name="__main__")


if __name__ == "__main__":
    address, script, folder, size = sys.argv[1:]
    ray.init(address, logging_level="ERROR")
    TorchTrainer(
        train,
        train_loop_config={"script": script, "folder": folder},
        scaling_config=ScalingConfig(
            num_workers=int(size), resources_per_worker={"CPU": 1}, placement_strategy="SPREAD"
        ),
        run_config=RunConfig(
            name="bench", storage_path=f"{folder}/storage", failure_config=FailureConfig(max_failures=-1)
        ),
    ).fit()
