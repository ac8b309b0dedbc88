"""Tests of merging ranks' stacks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from perdure.client.stacks import Branch, merged
from perdure.contract import RankPosition, StackFrame, ThreadStack


def position(rank: int, *functions: str) -> RankPosition:
    """A rank with these calls, the outermost first."""
    frames = tuple(StackFrame(function=name, file="train.py", line=1) for name in reversed(functions))
    return RankPosition(rank=rank, pid=rank, threads=(ThreadStack(frames=frames),) if frames else ())


def calls(branch: Branch) -> dict[str, Branch]:
    return {frame.function: below for frame, below in branch.calls.items()}


def test_ranks_share_the_calls_that_they_have_in_common():
    root = merged([position(2, "main", "load"), position(0, "main", "step", "reduce"), position(1, "main", "step")])
    main = calls(root)["main"]
    assert (root.ranks, main.ranks) == ([0, 1, 2], [0, 1, 2])
    assert {name: branch.ranks for name, branch in calls(main).items()} == {"step": [0, 1], "load": [2]}
    assert calls(main)["step"].ends == [1]


def test_a_rank_without_a_stack_is_in_no_branch():
    assert merged([position(0), position(1, "main")]).ranks == [1]


def test_a_thousand_ranks_share_one_branch_but_for_the_one_that_is_elsewhere():
    elsewhere = 617
    ranks = [
        position(rank, *(("main", "load") if rank == elsewhere else ("main", "step", "reduce"))) for rank in range(1000)
    ]
    main = calls(merged(ranks))["main"]
    assert {name: (len(below.ranks), below.ranks[0]) for name, below in calls(main).items()} == {
        "step": (999, 0),
        "load": (1, elsewhere),
    }


@given(st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=5), max_size=6))
def test_each_rank_ends_at_its_innermost_call(stacks: list[list[str]]):
    root = merged(position(rank, *functions) for rank, functions in enumerate(stacks))

    def ends(branch: Branch, path: tuple[str, ...]) -> dict[int, tuple[str, ...]]:
        found = dict.fromkeys(branch.ends, path)
        for name, below in calls(branch).items():
            found |= ends(below, (*path, name))
        return found

    assert ends(root, ()) == {rank: tuple(functions) for rank, functions in enumerate(stacks)}
