"""What a rank may ask an agent about checkpoints: attacks by paths and by files that are handed over; retention."""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from perdure.agent.checkpoint.part import Part, PartRequest, SnapshotChanged
from perdure.agent.checkpoint.retention import best_of, is_superseded, superfluous
from perdure.contract import CheckpointRef, CheckpointStored
from perdure_training.node_api.storage_link import StorageLink, StorageProblem
from tests.support.waiting import DEADLINE
from tests.training.checkpoint_agent import CheckpointAgent, checkpoint_agent

FOLDER = "step-5-run-1"


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[CheckpointAgent]:
    with checkpoint_agent(tmp_path / "storage") as agent:
        agent.begin(1)
        yield agent


@pytest.fixture
def link(agent: CheckpointAgent) -> StorageLink:
    return StorageLink(agent.run_dir)


def recipe(pieces: list[tuple[int, int, int]], others: bytes = b"") -> bytes:
    text = json.dumps(pieces).encode()
    return struct.pack("<Q", len(text)) + text + others


_open: list[int] = []


@pytest.fixture(autouse=True)
def files_are_closed() -> Iterator[None]:
    yield
    while _open:
        os.close(_open.pop())


def opened(folder: Path, name: str, content: bytes | None = None) -> int:
    """A descriptor of the file, with this content where there is none yet."""
    if content is not None:
        (folder / name).write_bytes(content)
    _open.append(os.open(folder / name, os.O_RDONLY))
    return _open[-1]


def request(content: bytes, **changes: Any) -> dict[str, Any]:
    described = {"offset": 0, "size": len(content), "checksum": zlib.crc32(content)}
    fields = {"folder": FOLDER, "rank": 0, "ranks": 1, "name": "__0_0.distcp"}
    return {"request": "store", **fields, "size": len(content), "snapshot": described} | changes


def test_pieces_of_the_snapshot_and_others_become_one_file(link: StorageLink, tmp_path: Path):
    snapshot = bytes(range(200))
    files = [
        opened(tmp_path, "snapshot", snapshot),
        opened(tmp_path, "recipe", recipe([(0, 0, 3), (1, 100, 50), (0, 3, 2)], b"abcde")),
        opened(tmp_path, "metadata", b"pickle"),
    ]
    assert link.ask(request(snapshot, size=55), files=files, within=DEADLINE) == {}
    folder = tmp_path / "storage" / FOLDER
    assert (folder / "__0_0.distcp").read_bytes() == b"abc" + snapshot[100:150] + b"de"
    assert link.ask({"request": "await", "folder": FOLDER, "within": 30}, within=DEADLINE)["committed"]
    assert (folder / ".metadata").read_bytes() == b"pickle"
    assert link.ask({"request": "list", "place": ""}, within=DEADLINE)["checkpoints"] == [{"folder": FOLDER, "step": 5}]
    assert link.ask({"request": "verify", "folder": FOLDER, "share": [0, 1]}, within=DEADLINE) == {"damage": ""}
    read = {"request": "read", "folder": FOLDER, "name": "__0_0.distcp", "offset": 2, "length": 2}
    assert link.read(read, patience=0) == b"c" + snapshot[100:101]


@pytest.mark.parametrize(
    "asked",
    [
        {"request": "read", "folder": "../../etc", "name": "passwd"},
        {"request": "read", "folder": FOLDER, "name": "../../secret"},
        {"request": "read", "folder": f"../{FOLDER}", "name": ".metadata"},
        {"request": "read", "folder": f"/etc/{FOLDER}", "name": ".metadata"},
        {"request": "list", "place": ".."},
        {"request": "list", "place": "/etc"},
        {"request": "verify", "folder": "a/b/c/step-1-run-1", "share": [0, 1]},
        {"request": "rm"},
        {},
    ],
)
def test_no_request_leads_out_of_the_storage(link: StorageLink, asked: dict[str, Any]):
    with pytest.raises(StorageProblem, match=r"expected|unknown"):
        link.ask(asked, within=DEADLINE)


def stored_folder(tmp_path: Path, *, content: bytes, records: dict[str, Any] | None, committed: bool = True) -> Path:
    """A folder of the storage with one rank's part, whose record says what `records` does."""
    folder = tmp_path / "storage" / FOLDER
    folder.mkdir(parents=True)
    metadata = {"size": 6, "checksum": zlib.crc32(b"pickle")}
    (folder / (".metadata" if committed else "metadata.uncommitted")).write_bytes(b"pickle")
    with (folder / "__0_0.distcp").open("wb") as file:
        file.write(content)
        file.truncate(max((records or {}).get("truncated", 0), len(content)))
    if records is not None:
        part = {"size": len(content), "checksum": zlib.crc32(content)} | records
        files = {".metadata": metadata, "__0_0.distcp": part}
        (folder / "perdure-0.json").write_text(json.dumps({"ranks": 1, "files": files}))
    return folder


LARGE = 1 << 25


@pytest.mark.parametrize(
    ("records", "committed", "problem"),
    [
        (None, True, "no committed checkpoint: perdure-0.json is missing"),
        ({}, False, "no committed checkpoint: .metadata is missing"),
        ({"checksum": 1}, True, "not what was stored"),
        ({"size": 3}, True, "not what was stored"),
        ({"size": LARGE}, True, "not the size that was stored"),
        ({"size": LARGE - 1, "truncated": LARGE}, True, "not the size that was stored"),
    ],
)
def test_a_read_is_of_what_agents_stored_in_a_committed_checkpoint(
    link: StorageLink, tmp_path: Path, records: dict[str, Any] | None, committed: bool, problem: str
):
    """The file may be the agent's own, mounted below a storage that the job chose."""
    stored_folder(tmp_path, content=b"the token of the agent", records=records, committed=committed)
    read = {"request": "read", "folder": FOLDER, "name": "__0_0.distcp", "offset": 4, "length": 5}
    with pytest.raises(StorageProblem, match=problem):
        link.read(read, patience=0)


def test_what_is_put_in_place_of_a_file_that_was_read_is_not_handed_out(link: StorageLink, tmp_path: Path):
    folder = stored_folder(tmp_path, content=b"a part", records={})
    read = {"request": "read", "folder": FOLDER, "name": "__0_0.distcp"}
    assert link.read(read, patience=0) == b"a part"
    (folder / "__0_0.distcp").write_bytes(b"secret")
    assert link.read(read, patience=0) == b"a part"
    assert link.read(read | {"name": ".metadata"}, patience=0) == b"pickle"
    with pytest.raises(StorageProblem, match="not what was stored"):
        link.read(read, patience=0)


def test_a_large_file_is_read_in_ranges(link: StorageLink, tmp_path: Path):
    stored_folder(tmp_path, content=b"begin", records={"size": LARGE, "truncated": LARGE})
    read = {"request": "read", "folder": FOLDER, "name": "__0_0.distcp", "offset": 3, "length": 4}
    assert link.read(read, patience=0) == b"in\0\0"


@pytest.mark.parametrize(
    ("changes", "pieces", "problem"),
    [
        ({"folder": "elsewhere"}, [(1, 0, 10)], "folder"),
        ({"name": "x.sh"}, [(1, 0, 10)], "name"),
        ({"name": "__1_0.distcp"}, [(1, 0, 10)], "name"),
        ({"name": "__1_0.distcp", "rank": 1}, [(1, 0, 10)], "not a rank of this node"),
        ({"folder": "step-5-other-1"}, [(1, 0, 10)], "another run"),
        ({"folder": "step-5-run-0"}, [(1, 0, 10)], "generation 0 is over"),
        ({"folder": "step-5-run-2"}, [(1, 0, 10)], "no world of this node"),
        ({"folder": f"step-{10**17}-run-1"}, [(1, 0, 10)], "less than or equal"),
        ({}, [(1, 0, 11)], "another size"),
        ({"size": 20}, [(1, 0, 20)], "outside"),
        ({}, [(1, -5, 10)], "outside"),
        ({"snapshot": {"offset": 0, "size": 10, "checksum": 1}}, [(1, 0, 10)], "damaged in memory"),
        ({"snapshot": {"offset": 5000, "size": 10, "checksum": 1}}, [(1, 0, 10)], "ends before"),
    ],
)
def test_a_part_that_is_not_as_it_says_is_refused(
    link: StorageLink, tmp_path: Path, changes: dict[str, Any], pieces: list[tuple[int, int, int]], problem: str
):
    files = [opened(tmp_path, "snapshot", b"0123456789"), opened(tmp_path, "recipe", recipe(pieces))]
    with pytest.raises(StorageProblem, match=problem):
        link.ask(request(b"0123456789", **changes), files=files, within=DEADLINE)


def test_a_part_that_takes_long_completes_its_checkpoint_whatever_other_checkpointers_store_meanwhile(
    agent: CheckpointAgent, link: StorageLink, tmp_path: Path
):
    agent.ranks = 2
    content = b"abc"

    def store(folder: str, rank: int) -> None:
        files = [
            opened(tmp_path, "snapshot", content),
            opened(tmp_path, "recipe", recipe([(1, 0, 3)])),
            opened(tmp_path, "metadata", b"pickle"),
        ]
        part = request(content, folder=folder, rank=rank, ranks=2, name=f"__{rank}_0.distcp")
        link.ask(part, files=files[: 3 - rank], within=DEADLINE)

    store("model/step-5-run-1", 0)
    for step in range(20):
        store(f"average/step-{step}-run-1", 0)
        store(f"average/step-{step}-run-1", 1)
    store("model/step-5-run-1", 1)
    folders = [one.stored.checkpoint.folder for one in agent.of(CheckpointStored)]
    assert (len(folders), folders[-1]) == (21, "model/step-5-run-1")


def test_files_that_are_none_are_refused(link: StorageLink, tmp_path: Path):
    reading, writing = os.pipe()
    try:
        with pytest.raises(StorageProblem, match="regular files"):
            link.ask(request(b""), files=[reading, reading], within=DEADLINE)
        with pytest.raises(StorageProblem, match="regular files"):
            link.ask(request(b""), within=DEADLINE)
    finally:
        os.close(reading)
        os.close(writing)


def test_files_without_end_take_no_memory(link: StorageLink, tmp_path: Path):
    """Each is handed over as a file of 100 GB that takes no space."""
    for name in ("recipe", "metadata"):
        with (tmp_path / name).open("wb") as file:
            file.write(recipe([(1, 0, 10)]) if name == "metadata" else struct.pack("<Q", 100 * 2**30))
            file.truncate(100 * 2**30)
    content = b"0123456789"
    files = [opened(tmp_path, "snapshot", content), opened(tmp_path, "recipe")]
    with pytest.raises(StorageProblem, match="expected at most"):
        link.ask(request(content), files=files, within=DEADLINE)
    wanted = PartRequest.model_validate(request(content))
    files = [files[0], opened(tmp_path, "recipe", recipe([(1, 0, 10)])), opened(tmp_path, "metadata")]
    part = Part(wanted, files)
    assert len(next(part.metadata())) <= 2**23


def test_a_file_that_becomes_shorter_does_not_end_the_agent(tmp_path: Path):
    snapshot = opened(tmp_path, "snapshot", bytes(100))
    files = [snapshot, opened(tmp_path, "recipe", recipe([(1, 0, 100)]))]
    part = Part(PartRequest.model_validate(request(bytes(100))), files)
    os.truncate(tmp_path / "snapshot", 50)
    with pytest.raises(SnapshotChanged, match="ends before"):
        list(part.content())


def test_a_link_in_the_place_of_the_desired_state_leads_the_agent_nowhere(agent: CheckpointAgent, tmp_path: Path):
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    (agent.run_dir / "checkpoint-desired.json").symlink_to(victim)
    agent.request_checkpoint(3)
    assert victim.read_text() == "untouched"
    assert json.loads((agent.run_dir / "checkpoint-desired.json").read_text())["request"] == 3


@pytest.mark.parametrize("private", ['{"token": "secret", "number": 1}', "[1]", "secret", "[" * 1000])
def test_a_link_in_the_place_of_the_desired_state_publishes_nothing(
    agent: CheckpointAgent, tmp_path: Path, private: str
):
    (tmp_path / "agent.json").write_text(private)
    (agent.run_dir / "checkpoint-desired.json").symlink_to(tmp_path / "agent.json")
    agent.request_checkpoint(3)
    assert json.loads((agent.run_dir / "checkpoint-desired.json").read_text()) == {"request": 3}


@pytest.mark.parametrize("found", [b'{"number": 1, "x": "y"}', b"[1]", b"[" * 2000, b'{"number": "x"}', b"\xff"])
def test_a_desired_state_of_another_writer_does_no_harm(agent: CheckpointAgent, found: bytes):
    (agent.run_dir / "checkpoint-desired.json").write_bytes(found)
    agent.request_checkpoint(3)
    assert json.loads((agent.run_dir / "checkpoint-desired.json").read_text()) == {"request": 3}


def saved(*steps: int, generation: int = 1) -> list[CheckpointRef]:
    return [CheckpointRef(step=step, generation=generation, run="run", place="") for step in steps]


def test_folders_are_read_as_they_are_written():
    for text in (FOLDER, f"stage-1/{FOLDER}", f"stage-1/ema/{FOLDER}"):
        assert CheckpointRef.parse(text).folder == text


@pytest.mark.parametrize(
    ("committed", "keep_last", "keep_every", "deleted"),
    [
        ((10, 20, 30), 3, None, []),
        ((10, 20, 30), 2, None, [10]),
        ((10, 20, 30), 1, 20, [10]),
        ((20, 30), 3, None, [10]),
        ((10, 20, 30), 1, 10, []),
    ],
)
def test_what_is_not_kept_is_deleted(
    committed: tuple[int, ...], keep_last: int, keep_every: int | None, deleted: list[int]
):
    everything = saved(10, 20, 30)
    found = superfluous(
        everything,
        committed=frozenset(saved(*committed)),
        newest=saved(30)[0],
        keep_last=keep_last,
        keep_every=keep_every,
    )
    assert [one.step for one in found] == deleted


def test_a_newer_folder_that_is_not_committed_yet_is_kept():
    everything = saved(10, 20, 30)
    found = superfluous(
        everything, committed=frozenset(saved(10, 20)), newest=saved(20)[0], keep_last=1, keep_every=None
    )
    assert [one.step for one in found] == [10]


def test_the_best_are_kept_beside_the_newest():
    one, two, three, four = everything = saved(10, 20, 30, 40)
    values = {one: 0.5, two: 0.1, three: 0.1, four: float("nan")}
    assert best_of(values, highest=False, count=1) == [three]
    assert best_of(values, highest=False, count=2) == [three, two]
    assert best_of(values, highest=True, count=5) == [one, three, two]
    found = superfluous(
        everything, committed=frozenset(everything), newest=four, keep_last=1, keep_every=None, best=[two]
    )
    assert found == [one, three]


@pytest.mark.parametrize(
    ("folder", "deletable"),
    [
        ("step-10-run-2", True),
        ("step-60-run-2", True),
        ("step-40-run-1", True),
        # The run has gone back to an older one, and not reached this step again.
        ("step-60-run-1", False),
        # Another run's: loaded, older than that, passed over, and of another checkpointer.
        ("step-30-before-5", True),
        ("step-20-before-5", True),
        ("step-20-long_before-1", True),
        ("step-45-before-5", False),
        ("moments/step-20-before-5", False),
    ],
)
def test_a_run_deletes_only_what_it_has_stored_or_continued_from(folder: str, deletable: bool):
    newest, inherited = CheckpointRef.parse("step-50-run-2"), [CheckpointRef.parse("step-30-before-5")]
    assert is_superseded(CheckpointRef.parse(folder), newest=newest, inherited=inherited) == deletable
    if "-run-" not in folder:
        assert not is_superseded(CheckpointRef.parse(folder), newest=newest, inherited=[])


def test_a_run_that_started_over_deletes_nothing_that_it_could_not_load():
    newest = CheckpointRef.parse("step-50-run-3")
    for folder, deletable in {"step-40-run-1": False, "step-40-run-2": True, "step-40-run-3": True}.items():
        assert is_superseded(CheckpointRef.parse(folder), newest=newest, inherited=[], kept_before=2) == deletable
