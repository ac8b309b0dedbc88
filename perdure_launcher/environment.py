"""Builds the environment of the command: torchrun's options, and the path on which Python finds Perdure's plugins.

Only one folder is added to the user's path, and it contains only this package and the library for training scripts:
nothing else that is installed beside Perdure may shadow the user's packages.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from perdure_training.node_api.codec import encode
from perdure_training.node_api.layout import INJECTED, ROLES, WARM
from perdure_training.node_api.local_rank import FIRST_RANK_VARIABLE
from perdure_training.node_api.rank_environment import (
    ADDRESS_VARIABLE,
    GENERATION_VARIABLE,
    KNOWN_VARIABLE,
    PORT_VARIABLE,
    PROGRESS_VARIABLE,
    ROLE_VARIABLE,
    ROLES_VARIABLE,
    ROLLS_BACK_VARIABLE,
    RUN_ID_VARIABLE,
    SCRIPT_FAILURES_VARIABLE,
    SPIKES_VARIABLE,
    UNSOUND_VARIABLE,
)

from . import __version__
from .config import CONFIG_VARIABLE, LauncherConfig
from .supervisor.commands import BACKEND
from .system.interfaces import interface_of
from .system.processes import pid_namespace
from .torch_internals import UNLIMITED_RESTARTS

if TYPE_CHECKING:
    from perdure_training.node_api.bodies import World

TORCHRUN_VARIABLE = "PERDURE_TORCHRUN"
"""Variable with the settings for the rendezvous handler; ranks do not inherit it."""
STAGE_VARIABLE = "PERDURE_STAGE"
"""Variable with the number of torchruns of the command that ended before this one: each has states of its own."""
MEMORY_VARIABLE = "PERDURE_MEMORY_DIR"
"""Variable with the node's folder in memory; missing where there is none."""
MEMORY_ORIGIN_VARIABLE = "PERDURE_MEMORY_ORIGIN"
"""Variable with the `MemoryOrigin` of that folder, for what a rank reports of snapshots that are missing."""
COPIES_VARIABLE = "PERDURE_COPIES"
"""Variable with the address and the token of this node's receiver of copies of snapshots."""
STORE_VARIABLE = "PERDURE_STORE"
"""Variable with address and port of the generation's store, which a script that sets MASTER_ADDR does not change."""
SECRETS_VARIABLE = "PERDURE_SECRET_NAMES"
"""Variable with the names of the job's secrets: their values are left out of events."""
TRAINING_LIBRARY = "perdure_training"
"""The package for training scripts, a sibling of this one wherever the launcher is installed."""
PARENT_VARIABLE = "PERDURE_RANK_PARENT"
"""Variable with the PID of the ranks' parent and its PID namespace: ranks end with that process."""

LONGEST_VARIABLE = 100_000
"""Bytes of one variable that Perdure makes, at most: Linux starts no program with one of 128 KiB or more."""

_HIDDEN = (CONFIG_VARIABLE, "PERDURE_AGENT_CONFIG")

_ENTRY_POINTS = f"""\
[torchrun.handlers]
{BACKEND} = perdure_launcher.rendezvous:get_handler

[torch.backends]
{BACKEND} = perdure_launcher.rank_plugins.step_counter:autoload
{BACKEND}-unmanaged = perdure_launcher.unmanaged_training.in_rank:autoload
"""


@dataclass(frozen=True)
class TorchrunSettings:
    """Settings that the launcher passes to the handler in `PERDURE_TORCHRUN`."""

    run_directory: str
    run_id: str
    launcher: str
    """The launcher's PID and PID namespace."""
    address: str
    processes: int
    max_nodes: int
    store_ports: tuple[int, int] | None
    """The first and the last port that a store may listen on; None for any free port."""
    stop_grace_s: float
    warm_starts: bool
    exported: tuple[str, ...]
    """The variables that the handler removes from the ranks' environment."""

    @property
    def launcher_pid(self) -> int | None:
        """The launcher's PID; None where it has another one in this process's namespace."""
        number, _, namespace = self.launcher.partition(" ")
        return int(number) if namespace == pid_namespace() else None

    @property
    def warm_folder(self) -> Path:
        return Path(self.run_directory) / WARM

    @property
    def allowed_ports(self) -> range | None:
        return range(self.store_ports[0], self.store_ports[1] + 1) if self.store_ports else None

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str) -> TorchrunSettings:
        fields = cast("dict[str, Any]", json.loads(text))
        fields["exported"] = tuple(fields["exported"])
        fields["store_ports"] = tuple(fields["store_ports"]) if fields["store_ports"] else None
        return cls(**fields)


def inject(run_directory: Path) -> Path:
    """Creates the folder for PYTHONPATH: copies of this package and of the training library beside it, and the entry
    points by which torch finds this one.

    They are copies so that an upgrade of the launcher's own package cannot break ranks that start later. The training
    library comes before one that the user's image has, so that all its modules are of the launcher's release.

    Raises:
        OSError: if the run directory cannot be written.
    """
    target = run_directory / INJECTED
    package = Path(__file__).parent
    for source in (package, package.parent / TRAINING_LIBRARY):
        shutil.copytree(source, target / source.name, dirs_exist_ok=True)
    metadata = target / f"{package.name}-{__version__}.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {package.name.replace('_', '-')}\nVersion: {__version__}\n"
    )
    (metadata / "entry_points.txt").write_text(_ENTRY_POINTS)
    return target


def base_environment(config: LauncherConfig, injected: Path, inherited: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of every process of the command, in both modes."""
    environment = {name: value for name, value in inherited.items() if name not in _HIDDEN}
    environment.update(config.env)
    if config.secrets:
        environment[SECRETS_VARIABLE] = ",".join(config.secrets)
    if config.role:
        environment[ROLE_VARIABLE] = config.role
    if config.port is not None:
        environment[PORT_VARIABLE] = str(config.port)
        environment[ADDRESS_VARIABLE] = config.address
    for variable, is_set in ((ROLLS_BACK_VARIABLE, config.rolls_back), (SPIKES_VARIABLE, config.reports_spikes)):
        if is_set:
            environment[variable] = "1"
    # Buffered output would be lost when a process dies, and with it the reason of its death.
    environment.setdefault("PYTHONUNBUFFERED", "1")
    if interface := interface_of(config.address):
        environment.setdefault("GLOO_SOCKET_IFNAME", interface)
    path = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = f"{injected}{os.pathsep}{path}" if path else str(injected)
    return environment


def torchrun_environment(config: LauncherConfig, base: Mapping[str, str], *, processes: int) -> dict[str, str]:
    """Returns the environment of a command that starts torchrun: options as `PET_*`, which the command's own flags
    override."""
    options = {
        "PET_RDZV_BACKEND": BACKEND,
        "PET_RDZV_ENDPOINT": "localhost:0",
        "PET_RDZV_ID": config.run_id,
        "PET_NNODES": config.nodes,
        "PET_NPROC_PER_NODE": str(processes),
        # The job has the restart budget: torchrun's own would also count restarts as the victim of another node.
        "PET_MAX_RESTARTS": str(UNLIMITED_RESTARTS),
    }
    settings = TorchrunSettings(
        run_directory=str(config.run_directory),
        run_id=config.run_id,
        launcher=f"{os.getpid()} {pid_namespace()}",
        address=config.address,
        processes=processes,
        max_nodes=config.max_nodes,
        store_ports=(config.store_ports[0], config.store_ports[-1]) if config.store_ports else None,
        stop_grace_s=config.stop_grace.total_seconds(),
        warm_starts=config.warm_starts,
        exported=(*options, TORCHRUN_VARIABLE),
    )
    environment = {**base, **options, TORCHRUN_VARIABLE: settings.dump()}
    # By default torchrun kills ranks after 30 s, regardless of the job's grace period.
    environment.setdefault(
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(max(1, math.ceil(config.termination_grace.total_seconds())))
    )
    return environment


def expected_environment(torchrun: Mapping[str, str], *, processes: int) -> dict[str, str]:
    """Returns the environment that torchrun's ranks will have, without the variables that depend on the rank."""
    environment = {
        name: value for name, value in torchrun.items() if not name.startswith("PET_") and name != TORCHRUN_VARIABLE
    }
    if processes > 1:
        # torchrun does the same, so that the ranks of a node do not compete for its cores.
        environment.setdefault("OMP_NUM_THREADS", "1")
    return environment


def read_roles(progress: Path) -> str:
    """Returns all roles of the job, as the agent has written them last; empty where it has written none."""
    try:
        return (progress.parent / ROLES).read_text(encoding="utf-8")
    except OSError:
        return ""


def generation_environment(world: World, *, progress: Path, run_id: str, parent: int, stage: int = 0) -> dict[str, str]:
    """Returns the variables of the ranks of one generation."""
    unsound = (world.unsound, *world.unsound.earlier) if world.unsound is not None else ()
    roles = read_roles(progress)
    return {
        # A kernel that refuses a variable starts no rank.
        **({ROLES_VARIABLE: roles} if 0 < len(roles.encode()) <= LONGEST_VARIABLE else {}),
        GENERATION_VARIABLE: str(world.generation),
        FIRST_RANK_VARIABLE: str(world.base_rank),
        UNSOUND_VARIABLE: ",".join(f"{one.generation}:{one.after}:{one.found_at}" for one in unsound),
        **(
            {SCRIPT_FAILURES_VARIABLE: ",".join(map(str, world.script_failures))}
            if world.script_failures is not None
            else {}
        ),
        **({KNOWN_VARIABLE: encode(world.known).decode()} if world.known is not None else {}),
        STAGE_VARIABLE: str(stage),
        PROGRESS_VARIABLE: str(progress),
        RUN_ID_VARIABLE: run_id,
        PARENT_VARIABLE: f"{parent} {pid_namespace()}",
    }
