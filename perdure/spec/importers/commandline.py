"""Imports command lines that start torchrun or dlrover-run on each node."""

from __future__ import annotations

from ..validate import default_name
from .draft import Draft
from .elasticjob import SYSTEM as DLROVER
from .launchers import LauncherError, read_launch
from .metadata import to_name
from .pods import Pod
from .reader import Field
from .world import Replicas, System, put_world

TORCHRUN = System(name="torchrun")


def read_command_line(command: Field, draft: Draft) -> None:
    """Reads a command line, given as the list of its words."""
    words = command.texts() or []
    try:
        launch = read_launch(words)
    except LauncherError as error:
        command.refuse(str(error))
        return
    if launch is None:
        command.refuse(
            "starts neither torchrun nor dlrover-run; other commands need no import: "
            "perdure run --nodes MIN:MAX -- COMMAND"
        )
        return
    script = launch.rest[0].text
    draft.put(
        ("name",), default_name([script]) if "/" in script or script.endswith((".py", ".sh")) else to_name(script)
    )
    put_world(
        draft,
        Pod(command=words, command_fields=(command,)),
        system=DLROVER if launch.dlrover else TORCHRUN,
        replicas=Replicas(least=1, most=1, stated=False),
    )
