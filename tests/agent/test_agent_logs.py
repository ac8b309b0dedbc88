"""Tests of copying the log: parts, rotations, restarts, and storage that rejects writes."""

from __future__ import annotations

import secrets
from pathlib import Path

import fsspec
import pytest

from perdure.agent.logs import LogShipper
from perdure.contract import NodeCredentials

NODE = NodeCredentials(uid="0a1b2c3d", role="worker", rank=1, incarnation=2, token="secret")


class Log:
    """A node's log, rotated as the launcher does it."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / "logs" / "output.log"
        self.path.parent.mkdir(parents=True)
        self.all = b""

    def write(self, content: bytes) -> None:
        self.all += content
        with self.path.open("ab") as file:
            file.write(content)

    def rotate(self) -> None:
        for number in range(4, 0, -1):
            source = self.path if number == 1 else self.path.with_name(f"output.log.{number - 1}")
            if source.exists():
                source.rename(self.path.with_name(f"output.log.{number}"))
        self.path.touch()


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"file://{tmp_path}/storage/job" if request.param == "file" else f"memory://{secrets.token_hex(4)}/job"


def shipped(url: str) -> bytes:
    files, root = fsspec.core.url_to_fs(f"{url}/worker-1/2")
    return b"".join(files.cat_file(path) for path in sorted(files.ls(root, detail=False)))


async def test_what_is_written_arrives_in_order(tmp_path: Path, url: str) -> None:
    run = tmp_path / "run"
    log = Log(run)
    shipper = LogShipper(run, url, NODE, part_max=1000)
    await shipper.ship()
    for round_number in range(6):
        log.write(b"%d " % round_number * 350)
        if round_number in (2, 4):
            log.rotate()
        await shipper.ship()
        assert shipped(url) == log.all
    # Another agent continues where this one was.
    log.write(b"and on")
    log.rotate()
    log.write(b" and on")
    await LogShipper(run, url, NODE, part_max=1000).ship()
    assert shipped(url) == log.all


async def test_several_rotations_between_two_copies_lose_nothing_that_is_kept(tmp_path: Path, url: str) -> None:
    run = tmp_path / "run"
    log = Log(run)
    shipper = LogShipper(run, url, NODE, part_max=64)
    log.write(b"first\n")
    await shipper.ship()
    for number in range(3):
        log.write(b"file %d\n" % number * 20)
        log.rotate()
    await shipper.ship()
    assert shipped(url) == log.all


async def test_storage_that_refuses_is_tried_again(tmp_path: Path) -> None:
    run = tmp_path / "run"
    log = Log(run)
    blocked = tmp_path / "storage"
    blocked.write_text("a file where a folder should be")
    shipper = LogShipper(run, f"file://{blocked}/job", NODE)
    log.write(b"hello")
    await shipper.ship()
    blocked.unlink()
    await shipper.ship()
    assert shipped(f"file://{blocked}/job") == b"hello"
