"""Uses the store of its job: its first life waits for a key that never comes, its second meets the others."""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

from perdure_training.store import JobStore

out, rank = Path(sys.argv[1]), int(os.environ["RANK"])
store, lasting = JobStore(), JobStore(lasting=True)
lives = lasting.add(f"lives of {rank}", 1)
if lives == 1:
    store.barrier("begun")
    (out / f"waits-{rank}").touch()
    store.wait(["never"])
keys = store.num_keys()
store.barrier("checked", timeout=timedelta(minutes=2))
total = store.add("sum", rank + 1)
store.barrier("added", timeout=timedelta(minutes=2))
(out / f"result-{rank}.json").write_text(json.dumps({"lives": lives, "keys": keys, "sum": store.get("sum").decode()}))
