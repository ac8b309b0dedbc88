"""The training programs: each one's command, and the check that it ended with the right result."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.recovery.processes import QUIET_NETWORK

if TYPE_CHECKING:
    import torch

SOURCES = Path(__file__).with_name("programs")
BIN = Path(sys.executable).parent
ENVIRONMENT = {**QUIET_NETWORK, "ACCELERATE_USE_CPU": "true", "TOKENIZERS_PARALLELISM": "false"}


@dataclass(frozen=True)
class Program:
    """One training program."""

    name: str
    command: Callable[[Path, int], list[str]]
    """Returns the command for an output folder and a length."""
    length: int
    """The default length, in epochs or rounds."""
    result: Callable[[Path], str]
    """Returns a digest of the output in a folder, equal for every correct run. Raises OSError if there is none."""
    expected: Callable[[int], str] | None = None
    """Returns the expected result for a length; None if an undisturbed run has to produce it."""
    nodes: str = "2"
    """The range of nodes."""
    sharded: bool = False
    """Each rank has its own part of the state, which Perdure's library keeps in the memory of the nodes, without
    storage: the program writes down what is kept and loaded."""

    @property
    def most_nodes(self) -> int:
        return int(self.nodes.rpartition(":")[2])


def _torchrun(script: str) -> Callable[[Path, int], list[str]]:
    return lambda out, length: [str(BIN / "torchrun"), str(SOURCES / script), str(out), str(length)]


def _bash(script: str) -> Callable[[Path, int], list[str]]:
    return lambda out, length: ["bash", str(SOURCES / script), str(out), str(length)]


def _digest(tensors: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode())
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def _snapshot(out: Path, name: str = "snapshot.pt") -> str:
    import torch

    saved = torch.load(out / name)
    return f"{_digest(saved['model'])} after {saved['epoch']} epochs"


def _lightning(out: Path) -> str:
    import torch

    saved = torch.load(out / "last.ckpt", weights_only=False)
    return f"{_digest(saved['state_dict'])} after {saved['global_step']} steps"


def _trainer(out: Path) -> str:
    from safetensors.torch import load_file

    steps = max(json.loads(state.read_text())["global_step"] for state in out.glob("checkpoint-*/trainer_state.json"))
    return f"{_digest(load_file(out / 'final' / 'model.safetensors'))} after {steps} steps"


def _two_stages(out: Path) -> str:
    return f"{_snapshot(out / 'pretrain')}, then {_snapshot(out, 'exported.pt')}"


def _accelerate(out: Path) -> str:
    (out / "all-passed").stat()
    passed = set((out / "passed").read_text().split("\n")) - {""}
    return f"{len(passed)} programs passed"


def _finished(out: Path) -> str:
    """Steps only: a batch follows from the size of the world, and so do the parameters."""
    return f"{(out / 'finished').read_text().split()[0]} steps"


def _sharded(name: str, script: str, length: int) -> Program:
    return Program(
        name,
        _torchrun(script),
        length,
        _finished,
        lambda tens: f"{tens * 10} steps",
        nodes="2:3",
        sharded=True,
    )


PROGRAMS = (
    Program("ddp", _torchrun("ddp_env.py"), 500, _snapshot),
    Program("lightning", _torchrun("lightning_fit.py"), 400, _lightning),
    Program("trainer", _torchrun("hf_trainer.py"), 80, _trainer),
    Program("stages", _bash("two_stages.sh"), 250, _two_stages),
    Program(
        "accelerate", _bash("accelerate_scripts.sh"), 10, _accelerate, lambda rounds: f"{2 * rounds} programs passed"
    ),
    _sharded("llama", "fsdp2_llama.py", 400),
    _sharded("fsdp2-lightning", "fsdp2_lightning.py", 400),
)


async def undisturbed(program: Program, folder: Path, *, length: int) -> str:
    """Runs the program without faults, with two ranks under plain torchrun, and returns its result.

    Raises:
        RuntimeError: if it fails without faults.
    """
    folder.mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ,
        **ENVIRONMENT,
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "PET_NPROC_PER_NODE": "2",
        "STEP_SECONDS": "0",
    }
    with (folder / "undisturbed.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *program.command(folder, length), env=environment, stdout=log, stderr=log, stdin=asyncio.subprocess.DEVNULL
        )
        if await process.wait() != 0:
            raise RuntimeError(f"{program.name} fails without faults: {folder / 'undisturbed.log'}")
    return program.result(folder)
