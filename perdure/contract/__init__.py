"""The contract between the parts of the control plane: one model per signal, update, query and activity argument.

| module | messages |
|-|-|
| `agents` | from agents to groups and jobs |
| `routes` | where messages of agents go |
| `commands` | from groups to agents |
| `checkpoints` | about durable checkpoints, both ways |
| `backends` | between groups and backends |
| `groups` | between jobs and groups |
| `worlds` | what jobs, groups and agents know alike of the nodes that train together |
| `transitions` | from groups to jobs: changes of nodes, one model for each kind |
| `questions` | from users to agents: what all of their questions have in common |
| `notifications` | from jobs to those whom they notify |
| `nodes` | what groups, jobs and users know alike of a node |
| `logs` | from users to agents: requests for a node's log |
| `stacks` | from users to agents: where a node's ranks are |
| `courses` | the progress of a training over time |
| `peaks` | the most of its machine that a node has used |
| `checks` | from users to agents: checks of a node's machine |
| `findings` | from agents to jobs: what ranks have found about their own numbers |
| `hangs` | from agents to jobs: where ranks are that make no step, and who hangs |
| `joining` | between a job and machines that a user or a scheduler started |
| `users` | from users to jobs |
| `workdirs` | from clients to uploads of code, and on to backends |
| `datasets` | between agents and the datasets of their job |
| `store` | between agents and the store of their job |
| `actions` | a job's actions on an interruption |
| `views` | from jobs and groups to users |
| `cluster` | about the machines of a cluster, and advice to the jobs that share it |
| `history` | about jobs of the past: from users to workers, and back |
| `archive` | what is kept of a job at `outputs.archive` |
| `vocabulary` | the enumerations that all of them share |
| `base` | base classes and text limits |

Each model is defined in one module. All can be imported from here, because most callers need several of the modules.
The limits and the types of fields are imported from their own module, and so are the models that an agent needs: there
is one for each node, and the first name that is imported from here loads all modules.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perdure.contract.actions import *
    from perdure.contract.agents import *
    from perdure.contract.archive import *
    from perdure.contract.backends import *
    from perdure.contract.base import *
    from perdure.contract.checkpoints import *
    from perdure.contract.checks import *
    from perdure.contract.cluster import *
    from perdure.contract.commands import *
    from perdure.contract.courses import *
    from perdure.contract.datasets import *
    from perdure.contract.findings import *
    from perdure.contract.groups import *
    from perdure.contract.hangs import *
    from perdure.contract.history import *
    from perdure.contract.identity import *
    from perdure.contract.incidents import *
    from perdure.contract.joining import *
    from perdure.contract.logs import *
    from perdure.contract.nodes import *
    from perdure.contract.notifications import *
    from perdure.contract.peaks import *
    from perdure.contract.routes import *
    from perdure.contract.scaling import *
    from perdure.contract.stacks import *
    from perdure.contract.store import *
    from perdure.contract.transitions import *
    from perdure.contract.users import *
    from perdure.contract.views import *
    from perdure.contract.vocabulary import *
    from perdure.contract.workdirs import *
    from perdure.contract.worlds import *

_MODULES = (
    "actions",
    "agents",
    "archive",
    "backends",
    "base",
    "checkpoints",
    "checks",
    "cluster",
    "commands",
    "courses",
    "datasets",
    "findings",
    "groups",
    "hangs",
    "history",
    "identity",
    "incidents",
    "joining",
    "logs",
    "nodes",
    "notifications",
    "peaks",
    "routes",
    "scaling",
    "stacks",
    "store",
    "transitions",
    "users",
    "views",
    "vocabulary",
    "workdirs",
    "worlds",
)


def _load() -> None:
    from importlib import import_module

    for name in _MODULES:
        module = import_module(f"{__name__}.{name}")
        globals().update((exported, getattr(module, exported)) for exported in module.__all__)


def __getattr__(name: str) -> Any:
    # Others are what Python asks of any module, and modules that are being imported.
    if not name.startswith("_") and name not in _MODULES:
        _load()
        if name in globals():
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
