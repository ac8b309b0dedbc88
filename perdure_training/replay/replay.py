"""Checks sampled steps of a training: the parameters of all replicas, and gradients that another rank computes again.

The gradients of a step are computed from parameters that only the optimizer changes afterwards. So a step is replayed
before the optimizer's step, where its starting state is still there, and needs no copy of it.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from perdure_training.node_api.corruption_file import (
    GRADIENTS,
    NOT_DETERMINISTIC,
    PARAMETERS,
    Corruption,
    corruption_path,
    write_corruption,
)
from perdure_training.node_api.progress_file import speaks_for_rank
from perdure_training.node_api.rank_environment import PROGRESS_VARIABLE, generation_of, is_rank, unsound_steps_of
from perdure_training.node_api.replay_files import ReplayAnswer
from perdure_training.numbers import watch
from perdure_training.replay.checksums import GradientSums, digest, sum_bits
from perdure_training.replay.judgement import Judgement, Result, describe, judge, judge_replicas, may_be_other_kernels
from perdure_training.replay.replicas import DrawnNumbers, Replicas
from perdure_training.replay.requests import ReplayRequests

logger = logging.getLogger(__name__)

_DISTANCES = (0, 2, 1)
"""Whose shares are computed in further replays, one after the other: each rank's own, and those of two other ranks."""
_WITH_FIXED_KERNELS = (1, 0, 2, 1, 0, 2)
"""Whose shares are computed without a choice of kernels before a rank is named, in each of these replays."""
_FAILED = 0
"""The checksum of a replay that raised an error."""
_MADE_AGAIN = 4
"""Steps that are checked before and at one whose loss was not a number, when it is made again."""
_TEXTS = 8
_MICROSECONDS = 1e6


class Replay:
    """The checks of one training whose parameters are the same on all ranks of a process group.

    Invariants:
        - The training computes the same with it as without it.
        - All ranks check the same steps.
        - No machine is blamed for a step that is not deterministic, or for the kernels that its rank has chosen.
    """

    def __init__(
        self,
        model: nn.Module,
        compute: Callable[..., Any] | None = None,
        *,
        every: int = 100,
        max_overhead: float = 0.01,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Creates the object; every rank creates it with the same arguments, at the same time.

        Args:
            model: The model, as the script calls it: on each rank with all parameters, such as a
                DistributedDataParallel.
            compute: Computes the gradients of one batch, and returns the loss or anything else. It changes nothing
                but gradients, buffers and random numbers; the optimizer's step is not part of it.
            every: Steps from one check to the next.
            max_overhead: The share of the time of the steps that checks may take: where `every` would take more, fewer
                steps are checked.
            group: The data-parallel ranks; by default all ranks.

        Raises:
            ValueError: if an argument is out of range, or the model's parameters are spread over ranks.
        """
        if every < 1:
            raise ValueError(f"every: expected at least 1, found {every}")
        if max_overhead <= 0:
            raise ValueError(f"max_overhead: expected more than 0, found {max_overhead}")
        self._parameters = [one for one in model.parameters() if one.requires_grad]
        if not self._parameters or any(hasattr(one, "device_mesh") for one in self._parameters):
            raise ValueError("model: expected parameters, each of them whole on every rank")
        self._model = model
        self._compute = compute
        self._every, self._stretch = every, 1
        self._max_overhead = max_overhead
        self._replicas = Replicas(self._parameters[0].device, group)
        self._requests = ReplayRequests(self._replicas)
        self._clean: int | None = None
        """The newest step at whose check everything agreed."""
        self._again = steps_after_a_bad_loss(os.environ)
        self._counting: tuple[int, float] | None = None
        """The number of calls since the last check ended, and the time of that."""
        self._over = False
        """Something was found, and nothing more is checked."""
        self._replays = compute is not None
        """False where there is nothing to replay, and once a step could not be replayed or was not deterministic."""
        self._checksum = 0
        """What this rank has given to the last comparison."""
        self._problem = ""
        """What the last check has found."""

    def __call__(self, step: int, *batch: Any) -> Any:
        """Computes the gradients of a step, and checks them where the step is due.

        Args:
            step: The step that is made, counted over the whole training, as `Checkpointer.save` gets it afterwards.
            batch: What `compute` gets.

        Returns:
            What `compute` returns.

        Raises:
            RuntimeError: if there is no `compute`, or if it changes the parameters.
        """
        compute = self._compute
        if compute is None:
            raise RuntimeError("Replay: expected a function that computes the gradients of a batch")
        if not self._is_due(step):
            return compute(*batch)
        begun = time.monotonic()
        versions = [one._version for one in self._parameters]
        share = _Share(self._model, self._parameters, batch)
        computed, checksum = share.compute(compute)
        used = time.monotonic() - begun
        if versions != [one._version for one in self._parameters]:
            raise RuntimeError("Replay: compute changes the parameters; make the optimizer's step after it")
        if self._compare(step) and self._replays:
            with share.set_aside():
                self._replay(step, share, compute, checksum)
        self._finish(step, time.monotonic() - begun - used)
        return computed

    def compare(self, step: int) -> None:
        """Checks that all replicas have the same parameters, where the step is due: for a script without `compute`.
        Call it each step, on every rank."""
        if self._is_due(step):
            begun = time.monotonic()
            self._compare(step)
            self._finish(step, time.monotonic() - begun)

    def _is_due(self, step: int) -> bool:
        if self._over or self._replicas.count == 1:
            return False
        if self._counting is None:
            self._counting = 0, time.monotonic()
        calls, since = self._counting
        self._counting = calls + 1, since
        requested = self._requests.is_due()
        return requested or step % (self._every * self._stretch) == 0 or step in self._again

    def _compare(self, step: int) -> bool:
        """Compares the parameters; returns whether they agree."""
        own = self._checksum = digest(sum_bits(one) for one in self._parameters)
        checksums = [row[0] for row in self._replicas.gather([own])]
        alike: dict[Any, dict[int, int]] = {}
        for rank, kind in enumerate(self._replicas.kinds):
            alike.setdefault(kind, {})[rank] = checksums[rank]
        odd = [rank for some in alike.values() for rank in judge_replicas(some)]
        if not odd:
            return True
        texts = tuple(f"rank {self._replicas.global_rank(rank)} has {checksums[rank]:016x}" for rank in odd)
        usual = next((one for rank, one in enumerate(checksums) if rank not in odd), None)
        if usual is not None:
            texts = (*texts[: _TEXTS - 1], f"the others have {usual:016x}")
        self._over = True
        if self._clean is None and (usual is None or len(odd) > 1):
            self._give_up(step, "the ranks have other parameters from the start", texts)
        else:
            self._accuse(step, PARAMETERS, odd, texts, sound=self._sound)
        return False

    def _replay(self, step: int, share: _Share, compute: Callable[..., Any], checksum: int) -> None:
        """Has another rank compute this rank's gradients, and finds out who is wrong if it has others."""
        replicas, self._checksum = self._replicas, checksum
        rows = enumerate(row[0] for row in replicas.gather([checksum]))
        results = [Result(owner=rank, by=rank, checksum=one, is_replay=False) for rank, one in rows]
        number, distance = 0, 1
        while True:
            own = share.replay(compute, replicas, distance)
            rows = enumerate(row[0] for row in replicas.gather([own]))
            again = [Result(owner=replicas.owner(distance, rank), by=rank, checksum=one) for rank, one in rows]
            if any(one.checksum == _FAILED for one in again):
                self._problem = "a step could not be replayed, and no other one is; parameters are compared"
                logger.warning("perdure: %s", self._problem)
                self._replays = False
                return
            results += again
            judgement = judge(results)
            if judgement is None:
                return
            if judgement.confirmed:
                if may_be_other_kernels(results) and self._agree_with_fixed_kernels(share, compute):
                    self._replays = False
                    self._give_up(step, "the ranks have chosen other kernels", self._shown(results))
                else:
                    self._blame(step, judgement, results)
                return
            distance, number = _DISTANCES[number % len(_DISTANCES)], number + 1

    def _agree_with_fixed_kernels(self, share: _Share, compute: Callable[..., Any]) -> bool:
        """Whether the ranks compute the same where none of them chooses kernels by measuring them, as cuDNN's
        benchmark and autotuning do: each on its own, and by chance differently."""
        results: list[Result] = []
        with fixed_kernels():
            for distance in _WITH_FIXED_KERNELS:
                own = share.replay(compute, self._replicas, distance)
                rows = enumerate(row[0] for row in self._replicas.gather([own]))
                owners = ((self._replicas.owner(distance, rank), rank, one) for rank, one in rows)
                results += [Result(owner=owner, by=by, checksum=one) for owner, by, one in owners]
        return all(one.checksum != _FAILED for one in results) and judge(results) is None

    def _shown(self, results: Sequence[Result]) -> tuple[str, ...]:
        return describe(results, [self._replicas.global_rank(rank) for rank in range(self._replicas.count)])

    def _blame(self, step: int, judgement: Judgement, results: Sequence[Result]) -> None:
        shown = self._shown(results)
        self._replays = False
        # Two ranks that have never agreed may be machines of which each rounds in its own way.
        if not judgement.ranks or not (judgement.names_one or self._clean is not None):
            self._give_up(step, "the step is not deterministic, or not the same on all ranks", shown)
            return
        self._over = True
        passing = judgement.names_one and not judgement.repeats
        # What only this step did wrong has changed no parameter so far.
        sound = step - 1 if passing else self._sound
        self._accuse(step, GRADIENTS, judgement.ranks, shown, sound=sound, repeats=judgement.repeats)

    @property
    def _sound(self) -> int | None:
        return None if self._clean is None else max(self._clean - 1, 0)

    def _accuse(
        self,
        step: int,
        kind: str,
        odd: Sequence[int],
        texts: tuple[str, ...],
        *,
        sound: int | None,
        repeats: bool = False,
    ) -> None:
        """Reports that one of these ranks has computed wrongly."""
        self._problem = f"the {kind} are not the same: {'; '.join(texts[:_TEXTS])}"
        # So that sound snapshots are not overwritten until the job has gone back to one.
        watch.spoil("ranks do not compute the same")
        if self._replicas.rank in odd:
            logger.error("perdure: the %s of step %d are not the same: %s", kind, step, "; ".join(texts[:_TEXTS]))
            suspects = tuple(map(self._replicas.global_rank, odd))
            self._report(
                Corruption(kind=kind, step=step, sound=sound, suspects=suspects, repeats=repeats, checksums=texts)
            )

    def _give_up(self, step: int, reason: str, texts: tuple[str, ...]) -> None:
        """Reports that a check says nothing about devices."""
        self._problem = f"{reason}: {'; '.join(texts[:_TEXTS])}"
        if self._replicas.rank == 0:
            logger.warning("perdure: step %d: %s, so no device can be checked: %s", step, reason, "; ".join(texts))
            self._report(Corruption(kind=NOT_DETERMINISTIC, step=step, checksums=(reason, *texts)))

    def _report(self, found: Corruption) -> None:
        device, texts = self._replicas.device_name, found.checksums[:_TEXTS]
        found = replace(found, device=device, checksums=texts, time=time.time())
        try:
            if speaks_for_rank(os.environ):
                path = corruption_path(Path(os.environ[PROGRESS_VARIABLE]), int(os.environ["RANK"]))
                write_corruption(path, found, generation=generation_of(os.environ))
        except (OSError, ValueError) as error:
            logger.warning("a rank that computes wrongly is not reported: %s", error)

    def _finish(self, step: int, cost: float) -> None:
        """Ends a check, and chooses how many steps pass until the next one: the same number on all ranks."""
        answer = ReplayAnswer(
            step=step,
            compared=GRADIENTS if self._replays else PARAMETERS,
            checksum=f"{self._checksum:016x}",
            problem=self._problem,
            seconds=cost,
        )
        self._requests.answer(answer)
        if self._over:
            self._requests.close(answer)
            return
        self._clean = step
        assert self._counting is not None
        calls, since = self._counting
        usual = max(time.monotonic() - since - cost, 0.0) / max(calls, 1)
        costs = self._replicas.gather([round(cost * _MICROSECONDS), round(usual * _MICROSECONDS)])
        cost, usual = max(one for one, _ in costs), max(1, *(one for _, one in costs))
        self._stretch = max(math.ceil(cost / (self._max_overhead * self._every * usual)), 1)
        self._counting = 0, time.monotonic()


def steps_after_a_bad_loss(environment: Mapping[str, str]) -> range:
    """Returns the steps that the job makes again since a loss was not a number: a device may have been the cause."""
    unsound = unsound_steps_of(environment) if is_rank(environment) else None
    if unsound is None or unsound.found_at < 0:
        return range(0)
    return range(max(unsound.after, unsound.found_at - _MADE_AGAIN) + 1, unsound.found_at + 1)


@contextmanager
def fixed_kernels() -> Generator[None]:
    """Has torch take the same kernels on all ranks, whatever the script has set."""
    cudnn: Any = torch.backends.cudnn
    chosen = cudnn.benchmark, cudnn.deterministic
    enabled, only_warns = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    cudnn.benchmark, cudnn.deterministic = False, True
    # Operations that have no such kernel keep theirs.
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.deterministic = chosen
        torch.use_deterministic_algorithms(enabled, warn_only=only_warns)


class _Share:
    """What one rank contributes to a step: its batch, and the random numbers that it draws."""

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter], batch: tuple[Any, ...]) -> None:
        """Remembers what the computation begins with."""
        self._parameters = parameters
        self._batch = batch
        self._drawn = DrawnNumbers()
        self._buffers = [(one, one.detach().clone()) for one in model.buffers()]
        # A forward pass spreads rank 0's buffers if this is set, and sets it anew.
        self._wrappers = [
            (one, one.require_forward_param_sync) for one in model.modules() if isinstance(one, DistributedDataParallel)
        ]

    def compute(self, compute: Callable[..., Any]) -> tuple[Any, int]:
        """Computes the gradients that the training uses; returns the result, and their checksum."""
        sums = GradientSums(self._parameters)
        try:
            computed = compute(*self._batch)
        finally:
            checksum = sums.close()
        return computed, checksum

    def replay(self, compute: Callable[..., Any], replicas: Replicas, distance: int) -> int:
        """Computes the share of the rank so many places before, without its peers; returns the checksum."""
        batch, drawn = replicas.shift((self._batch, self._drawn), distance)
        drawn.draw_again()
        with ExitStack() as alone, torch.no_grad():
            for buffer, content in self._buffers:
                buffer.copy_(content)
            for wrapper, spreads in self._wrappers:
                wrapper.require_forward_param_sync = spreads
                alone.enter_context(wrapper.no_sync())
            for parameter in self._parameters:
                parameter.grad = None
            sums = GradientSums(self._parameters)
            try:
                with torch.enable_grad():
                    compute(*batch)
            except Exception:
                logger.exception("perdure: a replay failed")
                sums.close()
                return _FAILED
            return sums.close()

    @contextmanager
    def set_aside(self) -> Generator[None]:
        """Keeps the gradients, buffers and random numbers of the training from what replays make."""
        gradients = [one.grad for one in self._parameters]
        buffers = [(one, one.detach().clone()) for one, _ in self._buffers]
        wrappers = [(one, one.require_forward_param_sync) for one, _ in self._wrappers]
        drawn = DrawnNumbers()
        try:
            yield
        finally:
            drawn.draw_again()
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.grad = gradient
            with torch.no_grad():
                for buffer, content in buffers:
                    buffer.copy_(content)
            for wrapper, spreads in wrappers:
                wrapper.require_forward_param_sync = spreads
