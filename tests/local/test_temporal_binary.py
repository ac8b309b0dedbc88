"""Tests of finding Temporal's binary: each location in turn, and never an incomplete file."""

from __future__ import annotations

import io
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from perdure.local import temporal_binary
from perdure.local.temporal_binary import VERSION, TemporalBinaryMissing

GOOD = "#!/bin/sh\necho 'temporal version 9.9.9 (Server 1.31.2, UI 2.50.1)'\n"
OLD = "#!/bin/sh\necho 'temporal version 0.11.0 (Server 1.22.4, UI 2.21.3)'\n"


def script(path: Path, content: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    path.chmod(0o755)
    return path


@pytest.fixture(autouse=True)
def bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No binary anywhere, no Go, no internet."""
    (tmp_path / "bin").mkdir()
    for tool in ("sh", "echo"):
        (tmp_path / "bin" / tool).symlink_to(f"/bin/{tool}")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("PERDURE_TEMPORAL", raising=False)
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


def test_a_download_is_installed_once(downloads: Downloads, tmp_path: Path) -> None:
    downloads.answer = archive(GOOD)
    said: list[str] = []
    binary = temporal_binary.ensure(said.append)
    assert binary == tmp_path / "cache" / "perdure" / "temporal" / VERSION / "temporal"
    assert "Downloading" in said[0]
    assert temporal_binary.ensure() == binary
    assert len(downloads.paths) == 1
    assert downloads.paths[0].startswith(f"/v{VERSION}?platform=")


@pytest.mark.parametrize(
    "answer",
    [b"<html>blocked by the proxy</html>", archive(GOOD)[:60], archive(OLD)],
    ids=["not an archive", "cut off", "another version"],
)
def test_a_bad_download_leaves_nothing_and_the_next_way_is_tried(
    downloads: Downloads, tmp_path: Path, answer: bytes
) -> None:
    downloads.answer = answer
    with pytest.raises(TemporalBinaryMissing, match="no Go toolchain"):
        temporal_binary.ensure()
    left = list((tmp_path / "cache" / "perdure" / "temporal" / VERSION).iterdir())
    assert [path.name for path in left] == ["lock"]


def test_no_way_at_all_says_what_was_tried() -> None:
    with pytest.raises(TemporalBinaryMissing) as missing:
        temporal_binary.ensure()
    for words in ("the download failed", "no Go toolchain", "PERDURE_TEMPORAL"):
        assert words in str(missing.value)


def test_a_go_toolchain_builds_it(tmp_path: Path) -> None:
    """The toolchain is a stand-in: the real build takes minutes, and `make setup` runs it."""
    go = f'#!/bin/sh\nif [ "$1" = build ]; then cat > "$6" <<\'END\'\n{GOOD}END\nfi\n'
    script(tmp_path / "bin" / "go", go)
    (tmp_path / "bin" / "cat").symlink_to("/bin/cat")
    assert temporal_binary.ensure().is_file()
