"""The ways in which training can bypass the job's world, with the message for the user about each.

On several nodes each of them means separate trainings over one checkpoint folder, all of which look healthy.
"""

from __future__ import annotations

from enum import Enum

from ..environment import TORCHRUN_VARIABLE


class Case(Enum):
    """One way. The launcher detects the first five among processes (`in_node`), torchrun the next one, a training
    process the others in itself (`in_rank`)."""

    TORCHRUN_IN_COMMAND = (
        "the command starts torchrun by itself, so {consequence}. Set the role's `rendezvous` to `torchrun`"
    )
    TORCHRUN_IN_PROCESSES = (
        "each of this node's processes starts torchrun by itself, so they would train beside each other, over the same "
        "checkpoints. Set the role's `rendezvous` to `torchrun`, or its `nproc_per_node` to 1"
    )
    RENDEZVOUS_BYPASSED = (
        "ranks were started without Perdure's rendezvous, so {consequence}. Usual causes: a launcher that brings its "
        "own rendezvous, or a script that overwrites PYTHONPATH. Start the ranks with plain torchrun, and add to "
        "PYTHONPATH instead of replacing it"
    )
    DEEPSPEED_LAUNCHER = (
        "the deepspeed launcher starts ranks by itself, so {consequence}. DeepSpeed needs no launcher of its own; "
        "write instead: {instead}"
    )
    LAUNCHED_ELSEWHERE = (
        "{program} starts torchrun where Perdure's environment does not reach it, so {consequence}. Let the container "
        "or the machine itself be the node: start `perdure join JOB -- torchrun ...` in it, or leave {program} out: a "
        "node outlives the terminal"
    )
    TORCHRUNS_AT_ONCE = (
        "the command starts several torchruns at once, and each would take this node's place in the job's world. Run "
        "them as jobs of their own, or one after another"
    )
    NOT_A_RANK = (
        "this process trains although it has no rank in a world: it was started without torchrun, so {consequence}. "
        "`accelerate launch` does this unless --multi_gpu and at least two processes are requested, and so does a "
        "script that runs plain python. Start the ranks with torchrun (scripts that use accelerate run under it as "
        "they are), or set the role's `rendezvous` to `env`, and Perdure starts one process per rank itself. If it is "
        f"meant to train beside the job, start it with `env -u {TORCHRUN_VARIABLE}`"
    )
    SEPARATE_PROCESS_GROUP = (
        "the script requests a process group of {size} at {address}, which no other node can reach, so {consequence}. "
        "Leave MASTER_ADDR, MASTER_PORT, the rank and the world size out of the script: each rank finds them in its "
        "environment (init_process_group() alone is enough)"
    )

    def explain(self, *, several_nodes: bool, **details: object) -> str:
        """Returns the message for the user.

        Args:
            several_nodes: Whether the job may have other nodes.
            details: The case's own: `instead`, `program`, or `size` and `address`.
        """
        return self.value.format(consequence=_SEPARATE if several_nodes else _NOT_RESTARTED, **details)


_SEPARATE = "each node would train alone beside the others, over the same checkpoints"
_NOT_RESTARTED = "nothing would start it again after a failure"
