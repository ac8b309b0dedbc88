"""Whatever is lost of nodes, ranks, copies and bytes, in whatever order messages come: what was saved last and is whole
is what the next world loads."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from perdure_training.node_api.bodies import UnsoundSteps
from perdure_training.snapshots.agreement import TRUSTED_RESTORES
from tests.training.played_nodes import Left, PlayedNode, Version, damage
from tests.training.played_worlds import Moment, PlayedRank, PlayedSite, Saved, played_site

MOST_RANKS = 4
AFTER_PATIENCE = 11.0
"""Seconds after which a rank gives up steps that others have not saved."""


class Machine(RuleBasedStateMachine):
    """A job whose state is in the memory of its nodes."""

    def __init__(self) -> None:
        super().__init__()
        self._open = ExitStack()
        logger = logging.getLogger("perdure_training")
        self._open.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.ERROR)
        self._folder = Path(tempfile.mkdtemp(prefix="perdure-test-"))
        self._open.callback(shutil.rmtree, self._folder)
        self.site: PlayedSite = self._open.enter_context(played_site(self._folder))

    def teardown(self) -> None:
        self._open.close()

    @initialize(
        replicated=st.booleans(),
        copies=st.integers(0, 2),
        ranks_of_node=st.sampled_from([1, 1, 2]),
        size=st.integers(1, 4),
    )
    def submit(self, replicated: bool, copies: int, ranks_of_node: int, size: int) -> None:
        self.replicated, self.copies, self.ranks_of_node = replicated, copies, ranks_of_node
        self.nodes: list[PlayedNode] = []
        self.made_in: dict[Version, Saved] = {}
        """What the snapshots of each version have."""
        self.failures: list[int] = []
        self.loads: dict[Saved, list[int]] = {}
        """The generations that have loaded a state."""
        self.unsound: UnsoundSteps | None = None
        self.is_certain = True
        """Whether no node has refused a copy in this generation."""
        self.since = 0
        """The first generation whose snapshots must stay."""
        self._begin([self.site.node() for _ in range(self._nodes(size))], {})

    def _nodes(self, size: int) -> int:
        return max(min(size, MOST_RANKS // self.ranks_of_node), 1)

    # What is left

    @property
    def ranks(self) -> list[PlayedRank]:
        assert self.site.world is not None
        return list(self.site.world.ranks)

    @property
    def living(self) -> list[PlayedNode]:
        return [node for node in self.nodes if not node.is_lost]

    def levels(self, left: Left, *, at_most: int | None = None) -> list[int]:
        """The newest step that is whole after the loss of no node, of any one, and so on."""
        most = max(self.copies, 1 if self.replicated else 0)
        return [left.newest(lost, at_most=at_most) for lost in range(most + 1)]

    def left(self, nodes: list[PlayedNode], *, since: int = 0, intact: bool = False) -> Left:
        """What is left on nodes of what may be loaded."""
        return Left(nodes, unsound=self.unsound, since=since, intact=intact)

    def kept_now(self) -> list[int]:
        """What must stay until there is something newer."""
        return self.levels(self.left(self.living, since=self.since))

    @invariant()
    def nothing_that_is_whole_is_deleted_before_something_newer_is(self) -> None:
        now = self.kept_now()
        sure = len(now) if self.is_certain else 1
        assert all(left >= before for left, before in zip(now[:sure], self.kept[:sure], strict=True)), (
            f"whole after the loss of 0, 1, ... nodes: {now}, and before: {self.kept}"
        )
        self.kept = now

    def _lost(self) -> None:
        """Something was lost, and not by the job."""
        self.kept = self.kept_now()

    # Training

    def _next_rank(self, number: int) -> PlayedRank | None:
        """A rank that can make a step: the others take part in it, so none is ahead by more than one."""
        lowest = min(rank.at for rank in self.ranks)
        able = [rank for rank in self.ranks if rank.lives and rank.at == lowest]
        return able[number % len(able)] if able and self.have_begun else None

    def _save(self, rank: PlayedRank) -> None:
        if rank.step():
            self.made_in[Version(rank.at, rank.own.generation)] = rank.state["saved"]

    @rule(steps=st.integers(1, 4))
    def trains(self, steps: int) -> None:
        """In lockstep, and each step is copied before the next."""
        for _ in range(steps):
            if not all(rank.lives for rank in self.ranks) or not self.have_begun:
                return
            while (rank := self._next_rank(0)) is not None and rank.at < max(one.at for one in self.ranks):
                self._save(rank)
            for rank in self.ranks:
                self._save(rank)
            for rank in self.ranks:
                while rank.lives and rank.finisher.waits:
                    rank.finish()

    @rule(number=st.integers(0, 3))
    def saves(self, number: int) -> None:
        if (rank := self._next_rank(number)) is not None:
            self._save(rank)

    @rule(number=st.integers(0, 3))
    def finishes(self, number: int) -> None:
        if able := [rank for rank in self.ranks if rank.lives and rank.finisher.waits]:
            able[number % len(able)].finish()

    @rule()
    def time_passes(self) -> None:
        self.site.now += AFTER_PATIENCE

    @rule(number=st.integers(0, 3))
    def has_copied_what_it_loaded(self, number: int) -> None:
        if self.site.detaching:
            does, arguments = self.site.detaching.pop(number % len(self.site.detaching))
            does(*arguments)

    @rule()
    def is_stored(self) -> None:
        """The newest step that all ranks have reported."""
        common = set.intersection(*(set(rank.finished) for rank in self.ranks))
        if common:
            stored = self.made_in.get(Version(max(common), self.site.generation))
            before = self.site.stored.get("state")
            if stored is not None and (before is None or stored.step > before.step):
                self.site.stored["state"] = stored

    # Faults

    @rule(number=st.integers(0, 3), leaves_folder=st.booleans())
    def loses_a_node(self, number: int, leaves_folder: bool) -> None:
        if self.living:
            self.site.lose(self.living[number % len(self.living)], leaves_folder=leaves_folder)
            self._lost()

    @rule(number=st.integers(0, 3))
    def a_rank_is_killed_while_it_copies(self, number: int) -> None:
        if able := [rank for rank in self.ranks if rank.lives and rank.finisher.waits]:
            self.site.network.tears_copies = True
            able[number % len(able)].finish()
            self.site.network.tears_copies = False

    @rule(number=st.integers(0, 3))
    def a_node_takes_no_copies(self, number: int) -> None:
        if self.living:
            self.living[number % len(self.living)].refuses = True
            self.is_certain = False

    @rule(node=st.integers(0, 3), number=st.integers(0, 30))
    def memory_is_damaged(self, node: int, number: int) -> None:
        if self.living and (found := self.living[node % len(self.living)].snapshots()):
            damage(found[number % len(found)][0])

    @precondition(lambda self: self.unsound is None)
    @rule(number=st.integers(0, 3))
    def a_loss_is_no_number(self, number: int) -> None:
        """The ranks train on until the next world: the other ones with losses that are numbers."""
        if able := [rank for rank in self.ranks if rank.lives and self.have_begun]:
            rank = able[number % len(able)]
            rank.is_spoiled = True
            # Of the step that it makes now: the loss before showed that the state before the last one was sound.
            self.unsound = UnsoundSteps(generation=self.site.generation, after=max(rank.at - 1, 0))
            self._lost()

    # The next world

    @rule(
        size=st.integers(1, 4),
        order=st.permutations(range(4)),
        failed=st.booleans(),
        takes_over=st.booleans(),
        kills=st.dictionaries(st.integers(0, 3), st.sampled_from(Moment), max_size=2),
    )
    def begins(self, size: int, order: list[int], failed: bool, takes_over: bool, kills: dict[int, Moment]) -> None:
        """The nodes that are left, in another order, with new ones, or without some of them."""
        if failed:
            self.failures.append(self.site.generation)
        left = self.living
        kept = [left[number] for number in order if number < len(left)][: self._nodes(size)]
        new = [
            self.site.node(left=self.site.left.pop() if takes_over and self.site.left else None)
            for _ in range(self._nodes(size) - len(kept))
        ]
        for node in left:
            if node not in kept:
                self.site.lose(node)
        for node in kept:
            node.refuses = False
        self._begin([*kept, *new], kills)

    def _begin(self, nodes: list[PlayedNode], kills: dict[int, Moment]) -> None:
        self.nodes = nodes
        self.is_certain = True
        before = self.left(nodes, intact=True)
        found = before.whole()
        had_any = any(node.snapshots() for node in nodes)
        world = self.site.begin(
            nodes,
            ranks_of_node=self.ranks_of_node,
            replicated=self.replicated,
            copies=self.copies,
            kills=kills,
            unsound=self.unsound,
            script_failures=self.failures,
        )
        self.have_begun = all(rank.lives for rank in world.ranks)
        agreed = world.ranks[0].memory.agreed
        assert agreed is not None
        newest = max(found, default=None)
        decision = agreed.decision
        if decision.step is None:
            undistrusted = [version for version in found if not self._may_distrust(version)]
            assert not undistrusted, f"of {undistrusted}, nothing is loaded: {decision.reason}"
            assert not had_any or decision.reason or agreed.obstacles, "it says why not"
        else:
            assert newest is not None
            chosen = Version(decision.step, decision.generation)
            assert chosen in found
            passed_over = [version for version in found if version > chosen and not self._may_distrust(version)]
            assert not passed_over, f"{chosen} is loaded, and {passed_over} is whole"
            # A newer one in storage is loaded where the nodes remember that the memory had a newer one, too.
            stored = self.site.stored.get("state")
            is_stored = stored is not None and stored.step > chosen.step and world.ranks[0].loaded == stored.step
            self._check_loaded(world.ranks, stored if is_stored and stored else self.made_in[chosen])
        loaded = {rank.state["saved"] for rank in world.ranks if rank.lives}
        if self.have_begun:
            [saved] = loaded
            if decision.step is None and not found:
                stored = self.site.stored.get("state")
                assert world.ranks[0].loaded == (stored.step if stored is not None else None)
            for rank in world.ranks:
                assert rank.state["weight"].tolist() == [saved.step, saved.made_in]
            self.loads.setdefault(saved, []).append(self.site.generation)
            self.made_in[Version(saved.step, self.site.generation)] = saved
            went_back_to = saved.step
        else:
            went_back_to = decision.step or 0
            if decision.step is not None:
                saved = self.made_in[Version(decision.step, decision.generation)]
                self.loads.setdefault(saved, []).append(self.site.generation)
                self.made_in[Version(saved.step, self.site.generation)] = saved
        after = self.levels(self.left(nodes, intact=True))
        # Newer steps are deleted: the training makes them again.
        kept = self.levels(before, at_most=went_back_to)
        assert all(one >= least for one, least in zip(after, kept, strict=True)), (
            f"whole after the loss of 0, 1, ... nodes: {after}, before the load of {went_back_to}: {kept}"
        )
        # The steps of a world that has loaded its state from storage take the room of what is in memory.
        of_memory = not self.have_begun or any(version.step == went_back_to for version in found)
        self.since = 0 if of_memory else self.site.generation
        self.kept = self.kept_now()

    def _check_loaded(self, ranks: Sequence[PlayedRank], saved: Saved) -> None:
        for rank in ranks:
            if rank.loaded is not None:
                assert rank.loaded == saved.step
                assert rank.state["saved"] == saved
                assert self.replicated or rank.state["part"] == rank.own.rank

    def _may_distrust(self, version: Version) -> bool:
        """Whether the script has failed after enough loads of it."""
        saved = self.made_in[version]
        followed = [one for one in self.failures if one > version.generation]
        return len(self.loads.get(saved, ())) >= TRUSTED_RESTORES and len(followed) >= TRUSTED_RESTORES


Machine.TestCase.settings = settings(
    stateful_step_count=30,
    # An explanation of a failure traces each line, which takes minutes.
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestWhatIsLeft = Machine.TestCase


@pytest.mark.long("survival")
@pytest.mark.timeout(900)
class TestWhatIsLeftInDepth(TestWhatIsLeft):
    """The same with many more examples."""

    settings = settings(TestWhatIsLeft.settings, max_examples=300)
