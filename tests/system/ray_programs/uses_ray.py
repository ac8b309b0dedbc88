"""`uses_ray.py FOLDER`: a script that uses Ray itself, as outside of a job: Ray Data feeds the workers of Ray Train.

It writes a line for each start, and ends once the folder has a file `finish`.
"""

# Ray is not installed where this is checked.

import json
import os
import sys
import time
from pathlib import Path

import ray
import ray.data
import ray.train
from ray.train import RunConfig, ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer


def train(config):
    """Counts the rows of its part of the data."""
    rows = sum(len(batch["id"]) for batch in ray.train.get_dataset_shard("train").iter_batches())
    Path(config["folder"], f"rows-{ray.train.get_context().get_world_rank()}").write_text(str(rows))
    ray.train.report({"rows": rows})


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    ray.init(logging_level="ERROR")
    data = ray.data.range(200).map_batches(lambda batch: {"id": batch["id"] * 2})
    total = sum(row["id"] for row in data.take_all())
    DataParallelTrainer(
        train,
        train_loop_config={"folder": str(folder)},
        datasets={"train": data},
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(name=f"from-{os.environ['PERDURE_GENERATION']}", storage_path=str(folder / "storage")),
    ).fit()
    rows = sum(int(path.read_text()) for path in folder.glob("rows-*"))
    context = ray.get_runtime_context()
    found = {"generation": int(os.environ["PERDURE_GENERATION"]), "total": total, "rows": rows}
    with (folder / "starts").open("a") as starts:
        starts.write(json.dumps(found | {"namespace": context.namespace, "pid": os.getpid()}) + "\n")
    while not (folder / "finish").exists():
        time.sleep(0.05)
