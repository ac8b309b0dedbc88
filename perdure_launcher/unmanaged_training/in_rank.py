"""Detects, inside a training process, training that takes no part in the job's world.

On several nodes there would be several trainings over one checkpoint folder, and each would look healthy. The launcher
sees processes only from outside. This module knows whether a process steps an optimizer although it has no rank in a
world, and with which peers a rank forms its process group. `import torch` loads it in every process of the command.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import parse_qsl, urlsplit

from perdure_training.node_api.addresses import host_and_port, split_address
from perdure_training.node_api.layout import AGENT_SOCKET
from perdure_training.node_api.progress_file import mark_without_process_group, speaks_for_rank
from perdure_training.node_api.rank_environment import PROGRESS_VARIABLE, generation_of, is_rank

from ..environment import STORE_VARIABLE, TORCHRUN_VARIABLE, TorchrunSettings
from ..rank_plugins import uncaught
from ..rank_plugins.rank_process import mark_training
from ..torch_internals import process_group_handlers
from .cases import Case

_UNMANAGED = "/v1/launcher/unmanaged"
_STEPS_BEFORE_A_GROUP = 10
"""Steps after which a process group is expected: scripts may step once before they begin (to silence a scheduler's
warning, say)."""
_LOOPBACK = ("localhost", "127.", "::1", "0.0.0.0")


class UnmanagedTrainingError(RuntimeError):
    """The training takes no part in the job's world, and would corrupt the output of others."""


def autoload() -> None:
    """Installs the checks; the entry point in the group `torch.backends`. If it raised, `import torch` would fail."""
    with contextlib.suppress(Exception):
        # A copy, as in `step_counter`.
        if is_rank(os.environ.copy()):
            use_job_store()
        elif TORCHRUN_VARIABLE in os.environ:
            refuse_steps()


def refuse_steps() -> None:
    """Makes the first optimizer step fail in a process that is not a rank, below a command that starts torchrun."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    settings = TorchrunSettings.load(os.environ[TORCHRUN_VARIABLE])

    def refuse(*_: object) -> None:
        stop(Path(settings.run_directory), Case.NOT_A_RANK.explain(several_nodes=settings.max_nodes > 1))

    # torchrun's own process runs this, too, but steps no optimizer.
    register_optimizer_step_pre_hook(refuse)


def use_job_store() -> None:
    """Makes a rank's first process group use the job's store, regardless of the address in the script."""
    place = RankPlace.of(os.environ)
    if place is None:
        return
    handlers = process_group_handlers()
    for scheme in ("env", "tcp"):
        handlers[scheme] = _with_job_store(handlers[scheme], place)
    if place.world_size > 1 and speaks_for_rank(os.environ):
        _record_steps_without_group(place)


@dataclass(frozen=True)
class RankPlace:
    """The rank variables that the process had before any line of the script ran."""

    address: str
    port: str
    rank: int
    world_size: int
    local_world_size: int
    progress: Path

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> RankPlace | None:
        """Reads the variables; None if one is missing."""
        try:
            address, port = split_address(environment[STORE_VARIABLE])
            return cls(
                address=address,
                port=str(port),
                rank=int(environment["RANK"]),
                world_size=int(environment["WORLD_SIZE"]),
                local_world_size=int(environment["LOCAL_WORLD_SIZE"]),
                progress=Path(environment[PROGRESS_VARIABLE]),
            )
        except (KeyError, ValueError):
            return None

    def job_url(self, url: str) -> str:
        """Returns the URL to use instead of this one, in the format of `init_process_group`.

        A group of the same ranks is the job's, and uses the job's store. Any other group is the script's own concern,
        unless it can only be separate training.

        Raises:
            UnmanagedTrainingError: if the group can only be separate training.
        """
        parts = urlsplit(url)
        query = dict(parse_qsl(parts.query))
        if parts.scheme == "tcp":
            rendezvous = (parts.hostname or "", str(parts.port or ""))
        else:
            # A launcher within the script gives its processes places of its own by these variables.
            rendezvous = (os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", ""))
            query = {"rank": os.environ.get("RANK", ""), "world_size": os.environ.get("WORLD_SIZE", ""), **query}
        rank = int(query.get("rank") or self.rank)
        size = int(query.get("world_size") or self.world_size)
        if rendezvous == (self.address, self.port):
            return url
        there = ":".join(rendezvous)
        if (rank, size) == (self.rank, self.world_size):
            own = host_and_port(self.address, self.port)
            _print(
                f"the script names {there} for its process group; the job's own {own} is used, "
                "since only that is there again after a failure"
            )
            os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = self.address, self.port
            return f"env://?{parts.query}"
        if self.world_size > self.local_world_size and rendezvous[0].startswith(_LOOPBACK):
            explanation = Case.SEPARATE_PROCESS_GROUP.explain(several_nodes=True, size=size, address=there)
            stop(self.progress.parent, explanation)
        return url


def _with_job_store(original: Callable[..., Any], place: RankPlace) -> Callable[..., Any]:
    # The script may change the variables before it forms its process group.
    own = os.environ.copy()

    def rendezvous(url: str, *args: Any, **kwargs: Any) -> Any:
        import torch.distributed as dist

        # `init_process_group` puts a hook before it that prints only what hooks which return have printed.
        uncaught.stay_first()
        # Groups that are created beside the first one are the script's own concern, and so are those of processes that
        # a rank starts while it trains.
        if not dist.is_initialized() and speaks_for_rank(own):
            job_url = place.job_url(url)
            mark_training(os.environ)
            if job_url != url:
                return process_group_handlers()["env"](job_url, *args, **kwargs)
        return original(url, *args, **kwargs)

    return rendezvous


def _record_steps_without_group(place: RankPlace) -> None:
    """Records that the rank makes steps without a process group: a sweep may intend that, a training does not."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    steps = 0
    is_compiling, is_initialized = torch.compiler.is_compiling, torch.distributed.is_initialized

    def look(*_: object) -> None:
        nonlocal steps
        if is_compiling() or steps == _STEPS_BEFORE_A_GROUP:
            return
        steps += 1
        if steps == _STEPS_BEFORE_A_GROUP and not is_initialized():
            with contextlib.suppress(OSError):
                mark_without_process_group(place.progress, generation=generation_of(os.environ))

    # Never removed: torch may be iterating over its hooks, and the user's step would fail.
    register_optimizer_step_post_hook(look)


def stop(run_directory: Path, detail: str) -> NoReturn:
    """Reports to the agent, and blocks this process until the agent knows.

    Raises:
        UnmanagedTrainingError: then.
    """
    # Not at the top: every rank imports this module, and hardly any needs it.
    from perdure_training.node_api.agent_client import REQUEST_TIMEOUT, Agent, AgentAway, AgentRefused, pauses
    from perdure_training.node_api.bodies import UnmanagedReport

    _print(detail)
    agent, report = Agent(run_directory / AGENT_SOCKET), UnmanagedReport(ranks=(os.getpid(),), detail=detail)
    for pause in pauses():
        try:
            agent.post(_UNMANAGED, report, within=REQUEST_TIMEOUT)
            break
        except AgentAway:
            time.sleep(pause)
        except AgentRefused:
            break
    raise UnmanagedTrainingError(detail)


def _print(text: str) -> None:
    sys.stderr.write(f"perdure: {text}\n")
    sys.stderr.flush()
