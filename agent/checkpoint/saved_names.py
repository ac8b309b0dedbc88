"""What names of files that scripts save have in common: which of their numbers count saves, and which count ranks.

`step-100.pt` and `step-200.pt` are two saves, of which the later one is restored. `rank0.pt` and `rank1.pt` are two
parts of one save: they are restored together.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

_NUMBER: Final = re.compile(r"\d+")
_OF_A_RANK: Final = re.compile(
    r"(rank|(^|[^a-z])(shard|part|worker|host|node|gpu|device|proc|process|replica|[tpdecms]p))[-_.=: ]*$",
    re.IGNORECASE,
)
"""The end of what is before the number of a rank: also tensor, pipeline, data, expert, context, model and sequence
parallel ranks."""
_OF_A_SAVE: Final = re.compile(r"(step|epoch|iter(ation)?s?|checkpoint|ckpt|save|batch)[-_.=: ]*$", re.IGNORECASE)
"""The end of what is before the number of a save."""
_OF_SEVERAL: Final = re.compile(r"[-_]of[-_]\d", re.IGNORECASE)
_SEVERAL: Final = re.compile(r"\d[-_]of[-_]$", re.IGNORECASE)
_DISTRIBUTED: Final = re.compile(r"__\d+_\d+\.distcp")
"""A file of `torch.distributed.checkpoint`, with the rank and the number of its file."""


class SavedName(NamedTuple):
    """A name by its numbers. `#` stands for one that is left out, `@` for that of a rank."""

    kind: str
    """The name without the numbers of saves: what one rank has saved again and again."""
    save: str
    """The name without the numbers of ranks: what the ranks have saved together."""
    family: str
    """The name without numbers."""
    ranks: str
    """The numbers of ranks; empty where there is none."""
    counts_saves: bool = False
    """A word says that a number counts saves."""


def parse(name: str) -> SavedName:
    """Finds out what the numbers in a name count."""
    kind, save, family, ranks, end = "", "", "", list[str](), 0
    counts_saves = False
    all_of_ranks = _DISTRIBUTED.fullmatch(name) is not None
    for number in _NUMBER.finditer(name):
        before, between, after = name[: number.start()], name[end : number.start()], name[number.end() :]
        is_rank = all_of_ranks or _OF_A_RANK.search(before) or _OF_SEVERAL.match(after) or _SEVERAL.search(before)
        counts_saves = counts_saves or (not is_rank and _OF_A_SAVE.search(before) is not None)
        kind += between + (number[0] if is_rank else "#")
        save += between + ("@" if is_rank else number[0])
        family += between + ("@" if is_rank else "#")
        if is_rank:
            ranks.append(number[0])
        end = number.end()
    rest = name[end:]
    return SavedName(kind + rest, save + rest, family + rest, ".".join(ranks), counts_saves)
