"""The predefined events of the parts of a job, so that all jobs name the same things in the same way.

Each method emits one kind of event, with its own name; docs/events.md lists them. A method that returns a `Span` is
used as a context manager, or begins and ends by the span's methods. All take more attributes.
"""

from __future__ import annotations

from typing import Any

from perdure_training.events.background import AsyncExporter
from perdure_training.events.emitter import EventEmitter, Span
from perdure_training.events.plain import describe_error
from perdure_training.numbers import watch


class TrainerEvents(EventEmitter):
    """Events of training scripts."""

    def __init__(self, *exporters: AsyncExporter, rank: int | None = None, generation: int | None = None) -> None:
        """Creates the emitter.

        Args:
            exporters: As for `EventEmitter`: without any, the event file of this rank.
            rank: The rank of this process, where exporters are given.
            generation: The generation of its world, where exporters are given.
        """
        super().__init__("trainer", *exporters, rank=rank, generation=generation)

    def start(self, **attributes: Any) -> None:
        """The script began."""
        self.instant("start", **attributes)

    def init(self, **attributes: Any) -> Span:
        """The script builds its model, its optimizer and its process group."""
        return self.span("init", **attributes)

    def load_dataset(self, **attributes: Any) -> Span:
        """The script opens its data."""
        return self.span("load_dataset", **attributes)

    def load_checkpoint(self, **attributes: Any) -> Span:
        """The script loads a training state."""
        return self.span("load_checkpoint", **attributes)

    def train(self, **attributes: Any) -> Span:
        """The script trains: all epochs, or all steps."""
        return self.span("train", **attributes)

    def epoch(self, *, epoch: int, **attributes: Any) -> Span:
        """One epoch."""
        return self.span("epoch", epoch=epoch, **attributes)

    def step(self, *, step: int, **attributes: Any) -> Span:
        """One step."""
        return self.span("step", step=step, **attributes)

    def metrics(self, *, step: int, **attributes: Any) -> None:
        """Figures of a step. Of this process's, `loss` and `grad_norm` are followed as those of `report` are."""
        self.instant("metrics", step=step, **attributes)
        if self.is_of_this_process:
            watch.follow(step, loss=_number(attributes.get("loss")), gradient_norm=_number(attributes.get("grad_norm")))

    def evaluate(self, **attributes: Any) -> Span:
        """The script evaluates the model."""
        return self.span("evaluate", **attributes)

    def predict(self, **attributes: Any) -> Span:
        """The script has the model predict."""
        return self.span("predict", **attributes)

    def save(self, *, step: int, **attributes: Any) -> Span:
        """The script saves its state, and does not train meanwhile."""
        return self.span("save", step=step, **attributes)

    def persist(self, *, step: int, **attributes: Any) -> Span:
        """A saved state is written to storage while the training continues."""
        return self.span("persist", step=step, **attributes)

    def exception(self, error: BaseException | str, /, **attributes: Any) -> None:
        """An exception ended the training, or a part of it."""
        text = error if isinstance(error, str) else describe_error(error)
        self.instant("exception", error=text, **attributes)

    def finish(self, **attributes: Any) -> None:
        """The training is complete."""
        self.instant("finish", **attributes)


class AgentEvents(EventEmitter):
    """Events of the agent of a node, which it emits by itself."""

    def __init__(self, *exporters: AsyncExporter) -> None:
        """Creates the emitter.

        Args:
            exporters: The destinations.
        """
        super().__init__("agent", *exporters)

    def start(self, **attributes: Any) -> None:
        """The agent began to serve its node."""
        self.instant("start", **attributes)

    def lease_taken(self, *, epoch: int, **attributes: Any) -> None:
        """The agent holds a lease: the control plane reaches the node."""
        self.instant("lease_taken", epoch=epoch, **attributes)

    def lease_released(self, *, epoch: int, **attributes: Any) -> None:
        """The agent's lease ended."""
        self.instant("lease_released", epoch=epoch, **attributes)

    def world(self, *, generation: int, **attributes: Any) -> None:
        """The node was given a newer world."""
        self.instant("world", generation=generation, **attributes)

    def rendezvous(self, *, generation: int, **attributes: Any) -> Span:
        """The node enters a world, from the time at which it was given it until its rendezvous returned."""
        return self.span("rendezvous", generation=generation, **attributes)

    def abort(self, *, generation: int, reason: str, **attributes: Any) -> None:
        """The ranks of the node that train in a world are ended, for a newer world."""
        self.instant("abort", generation=generation, reason=reason, **attributes)

    def ready(self, *, generation: int, **attributes: Any) -> None:
        """The node waits for a world newer than this generation."""
        self.instant("ready", generation=generation, **attributes)

    def entered(self, *, generation: int, **attributes: Any) -> None:
        """The node's rendezvous returned the world."""
        self.instant("entered", generation=generation, **attributes)

    def stepping(self, *, generation: int, **attributes: Any) -> None:
        """All ranks of the node have made a step in the world, or have stayed alive in it."""
        self.instant("stepping", generation=generation, **attributes)

    def stalled(self, *, generation: int, **attributes: Any) -> None:
        """No rank of the node steps any more."""
        self.instant("stalled", generation=generation, **attributes)

    def stall_ended(self, *, generation: int, **attributes: Any) -> None:
        """The ranks step again."""
        self.instant("stall_ended", generation=generation, **attributes)

    def rank_exited(self, *, generation: int, **attributes: Any) -> None:
        """A rank of the node ended before the training did."""
        self.instant("rank_exited", generation=generation, **attributes)

    def fault_detected(self, *, generation: int, **attributes: Any) -> None:
        """The agent reports a failure to the job."""
        self.instant("fault_detected", generation=generation, **attributes)

    def bad_number(self, *, generation: int, **attributes: Any) -> None:
        """A rank of the node has a loss or a gradient norm that is not a finite number."""
        self.instant("bad_number", generation=generation, **attributes)

    def corruption(self, *, generation: int, **attributes: Any) -> None:
        """A rank of the node does not compute what the other ranks compute."""
        self.instant("corruption", generation=generation, **attributes)

    def command_exited(self, *, attempt: int, **attributes: Any) -> None:
        """The node's command ended."""
        self.instant("command_exited", attempt=attempt, **attributes)

    def finished(self, *, generation: int, **attributes: Any) -> None:
        """All ranks of the node ended with 0, or its command did."""
        self.instant("finished", generation=generation, **attributes)

    def metrics(self, **attributes: Any) -> None:
        """Figures of the node's machine, each minute, in the file `metrics.jsonl` beside the others."""
        self.instant("metrics", **attributes)

    def leaving(self, *, reason: str, **attributes: Any) -> None:
        """The node leaves the job: its command is ended for good."""
        self.instant("leaving", reason=reason, **attributes)

    def exit(self, **attributes: Any) -> None:
        """The agent ends."""
        self.instant("exit", **attributes)


class JobEvents(EventEmitter):
    """Events of jobs, which workers emit by themselves."""

    def __init__(self, *exporters: AsyncExporter) -> None:
        """Creates the emitter.

        Args:
            exporters: The destinations.
        """
        super().__init__("job", *exporters)

    def phase(self, *, phase: str, **attributes: Any) -> None:
        """The job is in another phase."""
        self.instant("phase", phase=phase, **attributes)

    def world(self, *, world_generation: int, **attributes: Any) -> None:
        """The job formed a world."""
        self.instant("world", world_generation=world_generation, **attributes)

    def rendezvous(self, *, world_generation: int, **attributes: Any) -> Span:
        """The nodes of a world enter it, from the decision until the job knows that all of them have."""
        return self.span("rendezvous", world_generation=world_generation, **attributes)

    def abort(self, *, world_generation: int, reason: str, **attributes: Any) -> None:
        """A world is over before its ranks were done: after a failure, on request, or for a change of its nodes."""
        self.instant("abort", world_generation=world_generation, reason=reason, **attributes)

    def incident(self, *, number: int, **attributes: Any) -> Span:
        """An interruption, from its first evidence until the world steps again; its number is `perdure explain`'s."""
        return self.span("incident", number=number, **attributes)

    def observation(self, *, number: int, **attributes: Any) -> None:
        """A pause that ended by itself."""
        self.instant("observation", number=number, **attributes)

    def restart(self, *, restarts: int, **attributes: Any) -> None:
        """A failure cost a restart of the budget; the number of all restarts."""
        self.instant("restart", restarts=restarts, **attributes)

    def relaunch(self, *, node: int, incarnation: int, **attributes: Any) -> None:
        """A node is replaced."""
        self.instant("relaunch", node=node, incarnation=incarnation, **attributes)

    def checkpoint(self, *, step: int, **attributes: Any) -> None:
        """A checkpoint became durable."""
        self.instant("checkpoint", step=step, **attributes)

    def shards_set_aside(self, *, dataset: str, samples: int, **attributes: Any) -> None:
        """More samples of a dataset were set aside, as each try to process them failed; the number of all of them."""
        self.instant("shards_set_aside", dataset=dataset, samples=samples, **attributes)

    def outcome(self, *, phase: str, exit_code: int, **attributes: Any) -> None:
        """The job's end is decided: it succeeded, failed or was cancelled."""
        self.instant("outcome", phase=phase, exit_code=exit_code, **attributes)


def _number(value: Any) -> float | None:
    """A number; None for a tensor, since reading it may make the program wait for a GPU."""
    return float(value) if isinstance(value, float) else None
