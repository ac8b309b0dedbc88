"""Describes a node's state: pure functions of its memory."""

from __future__ import annotations

from agent.state import AgentState
from perdure_launcher.protocol import World


def refusal_of(state: AgentState, world: World) -> str:
    """Returns why a node refuses a world; empty if it accepts it."""
    if state.leaving is not None:
        return f"this node is leaving: {state.leaving}"
    if world.generation < state.generation:
        return f"generation {world.generation} is over; this node is in {state.generation}"
    if world.generation == state.generation and world != state.world:
        return f"generation {world.generation} was handed out before, with another content"
    return ""


def summary_of(state: AgentState) -> str:
    """Returns a short description of the state, for users."""
    if state.leaving is not None:
        return "leaving"
    if state.exited_attempt >= state.attempt:
        return "command ended"
    if state.prepares:
        return "its command has not come to its torchrun"
    if state.ready_after is not None:
        return "waiting for a world"
    if state.entered and state.entered in (state.finished, state.complete):
        return "its command runs without ranks"
    if state.entered and state.entered == state.stepping >= state.generation:
        return "stepping" if state.stepped == state.stepping else "running"
    return "starting"
