"""What one rank loads of a saved state, wherever that lies: in the job's storage, or in the memory of the nodes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from perdure_training.checkpoint.dictionary_types import Path, recorded_types
from perdure_training.checkpoint.differing import OwnView, names_of_others, own_view
from perdure_training.checkpoint.distributed_format import Loading, names_in
from perdure_training.checkpoint.saved_structure import as_saved
from perdure_training.checkpoint.world import RankIdentity

logger = logging.getLogger(__name__)

Share = Callable[[object], list[Any]]
"""Tells all ranks a value, and returns those of all, by rank."""


@dataclass(frozen=True, kw_only=True)
class StateOfRank:
    """What is restored, as one rank has it."""

    values: Mapping[str, Any]
    """Values, and the state dicts of objects. Tensors are changed in place."""
    objects: Collection[str]
    """Names of objects that judge by themselves what they are given."""
    each_rank: frozenset[str]
    """Names of what a rank that was not there keeps, such as generators."""
    replicated: bool
    """Every rank's state is the same."""
    from_rank_0: frozenset[str] = frozenset()
    """Names of values of which a world of another size takes rank 0's."""


class OfAnotherWorld(KeyError):
    """What was saved has values that differ between ranks, and only a world of as many ranks can have it. Nothing of
    the state has changed, and nothing is wrong with it or with what was saved."""

    def __init__(self, text: str, *, ranks: int) -> None:
        """Creates the error.

        Args:
            text: Which values these are.
            ranks: The number of ranks that saved it.
        """
        super().__init__(text)
        self.ranks = ranks


@dataclass(frozen=True)
class PlannedState:
    """A state that can be loaded; nothing of it has changed."""

    loading: Loading
    _target: Mapping[str, Any]
    _own: Mapping[str, str]
    """The names of which each rank has its own value, with the name of that value."""

    def loaded(self) -> dict[str, Any]:
        """Returns the state, once `loading` has all of it."""
        return {name: value[self._own[name]] if name in self._own else value for name, value in self._target.items()}


def plan_state(metadata: Metadata, state: StateOfRank, *, own: RankIdentity, share: Share, source: str) -> PlannedState:
    """Plans what this rank loads. All ranks of the world call it, and either can all load it, or get the same error.

    Args:
        metadata: What was saved, as the ranks that saved it have planned it.
        state: What is restored.
        own: This rank.
        share: Tells all ranks a value.
        source: What the metadata is of, for people.

    Raises:
        OfAnotherWorld: if only a world of another size can have it.
        KeyError: if it has another state.
    """
    view = own_view(
        metadata,
        rank=own.rank,
        world_size=own.world_size,
        replicated=state.replicated,
        from_rank_0=state.from_rank_0,
    )
    saved = names_in(metadata)
    mark = f"rank-{own.rank}"
    # A world with more ranks than were saved leaves the others' generators as they are.
    differs = {name for name in state.each_rank if mark in saved.get(name, ())}
    target = {name: value for name, value in state.values.items() if name not in state.each_rank}
    target |= {name: {mark: state.values[name]} for name in differs}
    of_others = names_of_others(metadata, rank=own.rank, world_size=own.world_size)
    places: dict[str, dict[Path, Any]] = {}
    for name in view.own_names:
        if name in of_others and not state.replicated:
            # This rank's optimizer must not grow by what another one keeps.
            continue
        first, *rest = view.paths[name]
        places.setdefault(str(first), {})[tuple(rest)] = view.metadata.state_dict_metadata[name]
    types = recorded_types(metadata)
    for name, value in target.items():
        if name not in differs:
            of_name = {path[1:]: one for path, one in types.items() if path[0] == name}
            target[name] = as_saved(value, places.get(name, {}), is_object=name in state.objects, types=of_name)
    loading = Loading(target, view.metadata)
    ranks, of_another = _of_another_world(view, loading, state, own=own)
    problem = of_another or loading.problem
    left = [name for name in view.own_names if name not in loading.names and name.split(".")[0] not in state.each_rank]
    reports = share({"names": sorted(state.values), "problem": problem, "left": left, "ranks": ranks})
    wanted = {name for report in reports for name in report["names"]}
    if not loading.first_names | (state.each_rank & state.values.keys()) <= saved.keys() <= wanted:
        raise KeyError(
            f"the checkpoint has {sorted(saved)}, the state has {sorted(state.values)}: restore what was saved"
        )
    problems = sorted({report["problem"] for report in reports} - {""})
    lost = set[str](left).intersection(*(report["left"] for report in reports))
    if lost:
        problems.append(f"no rank's state has {', '.join(sorted(lost)[:8])}, which would be lost")
    if problems:
        text = f"{source}: the checkpoint does not have the state that is restored: {'; '.join(problems)}"
        if not lost and all(report["ranks"] for report in reports if report["problem"]):
            raise OfAnotherWorld(text, ranks=max(report["ranks"] for report in reports))
        raise KeyError(text)
    return PlannedState(loading, target, dict.fromkeys(differs, mark))


def _of_another_world(view: OwnView, loading: Loading, state: StateOfRank, *, own: RankIdentity) -> tuple[int, str]:
    """Why values that differ between ranks cannot be loaded into a world of this size, and of how many ranks they are;
    empty if they can."""
    names = list(view.others)
    if state.replicated:
        names = [name for name in names if name in loading.names]
    if not names:
        return 0, ""
    text = _values(names, {name: view.others[name] for name in names})
    # Also where the state has no such value yet: an optimizer has its moments from its first step on.
    if not state.replicated:
        return max(view.others[name] for name in names), (
            f"{text}, and a world of {own.world_size} cannot split them anew. Continue with as many ranks; or"
            " save split tensors as DTensors, such as those of FSDP2, and leave out what each rank can begin anew"
        )
    if own.rank == 0:
        logger.warning("perdure: %s, although the state is replicated; new ranks take those of rank 0", text)
    return 0, ""


def _values(names: list[str], sizes: Mapping[str, int]) -> str:
    first = ", ".join(sorted(names)[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    ranks = max(sizes.values())
    return f"{first} {'differ' if len(names) > 1 else 'differs'} between the {ranks} ranks that saved it"
