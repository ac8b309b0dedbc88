"""What a Trainer of Hugging Face's resumes with from memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed import TCPStore

pytestmark = pytest.mark.long("frameworks")


class Model(nn.Module):
    """Learns to give zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.linear(inputs).square().mean()}


def test_the_scaler_of_gradients_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from transformers import Trainer, TrainingArguments

    from perdure_training.checkpoint.hugging_face import MemoryCheckpoints

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    identity = {"PERDURE_MEMORY_DIR": str(tmp_path / "memory"), "PERDURE_RUN_ID": "run", "TORCHELASTIC_RUN_ID": "run"}
    where = {"PERDURE_STORE": f"127.0.0.1:{store.port}"}

    def trained(generation: int, steps: int) -> tuple[Any, Any]:
        """Trains up to this many steps; returns the Trainer, and what it resumed from."""
        with monkeypatch.context() as patched:
            # Not for the Trainer, which would form a process group.
            for name, value in (variables | identity | where | {"PERDURE_GENERATION": str(generation)}).items():
                patched.setenv(name, value)
            memory = MemoryCheckpoints(every=1)
        arguments = TrainingArguments(
            str(tmp_path / "out"), max_steps=steps, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True
        )
        data = cast("Any", [{"inputs": torch.ones(2)}] * 64)
        trainer = Trainer(Model(), arguments, train_dataset=data, callbacks=[memory])
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        found = memory.resume(trainer)
        trainer.train(resume_from_checkpoint=found)
        memory._checkpointer.flush()
        return trainer, found

    first, found = trained(1, 4)
    assert found is None
    scale = first.accelerator.scaler.get_scale()
    assert scale > 8.0
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    where["PERDURE_STORE"] = f"127.0.0.1:{store.port}"
    again, found = trained(2, 4)
    assert found is not None
    assert again.accelerator.scaler.get_scale() == scale
