"""Tests of archives that no client of ours has packed: what a node unpacks stays in its folder, and small."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from perdure.agent import workdir
from perdure.agent.workdir import WrongArchive, unpack_workdir

Pack = Callable[[tarfile.TarFile], None]
GIBIBYTE = 2**30
PIECE = 16 * 2**20


def unpack(content: bytes, folder: Path, *, digest: str = "sha256:any") -> None:
    parts = folder / "parts"
    parts.mkdir()
    (parts / "0000").write_bytes(content)
    unpack_workdir(parts, digest, folder / "workdir")


def packed(pack: Pack) -> tuple[bytes, str]:
    """The archive, and the digest of the tar file, which the attacker may choose as well."""
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w", format=tarfile.GNU_FORMAT) as archive:
        pack(archive)
    return gzip.compress(tar.getvalue()), f"sha256:{hashlib.sha256(tar.getvalue()).hexdigest()}"


def file(name: str, content: bytes = b"evil") -> Pack:
    def pack(archive: tarfile.TarFile) -> None:
        member = tarfile.TarInfo(name)
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))

    return pack


def special(name: str, kind: bytes, linkname: str = "") -> Pack:
    def pack(archive: tarfile.TarFile) -> None:
        member = tarfile.TarInfo(name)
        member.type, member.linkname, member.mode = kind, linkname, 0o6777
        archive.addfile(member)

    return pack


def in_order(*packs: Pack) -> Pack:
    def pack(archive: tarfile.TarFile) -> None:
        for one in packs:
            one(archive)

    return pack


LONG = "/".join(["d" * 200] * 30)
"""A path whose resolution the kernel refuses; filters that resolve links have been deceived by such."""

ESCAPES: dict[str, Pack] = {
    "a file above": file("../victim/file"),
    "a file above, from within": file("a/../../victim/file"),
    "a link to above": special("link", tarfile.SYMTYPE, "../victim"),
    "a link to a file of the machine": special("link", tarfile.SYMTYPE, "/etc/passwd"),
    "a hard link to above": special("link", tarfile.LNKTYPE, "../victim/file"),
    "a file over a link": in_order(special("link", tarfile.SYMTYPE, "."), file("link/file")),
    "a file in a link's place": in_order(special("link", tarfile.SYMTYPE, "other"), file("link")),
    "a hard link over a link": in_order(
        special("link", tarfile.SYMTYPE, "."), file("file"), special("hard", tarfile.LNKTYPE, "link/file")
    ),
    "a chain of links": in_order(
        special("a", tarfile.SYMTYPE, "."),
        special("b", tarfile.SYMTYPE, "/".join(["a"] * 40)),
        special("c", tarfile.SYMTYPE, f"b/{LONG}/../../../victim"),
        file("c/file"),
    ),
    "a device": special("device", tarfile.CHRTYPE),
    "a disk": special("disk", tarfile.BLKTYPE),
    "a pipe": special("pipe", tarfile.FIFOTYPE),
}


@pytest.mark.parametrize("way", ESCAPES)
def test_nothing_leaves_the_folder(way: str, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "file").write_text("kept")
    content, digest = packed(ESCAPES[way])
    with pytest.raises(WrongArchive):
        unpack(content, tmp_path, digest=digest)
    assert {path.name: path.read_text() for path in victim.iterdir()} == {"file": "kept"}
    assert (victim / "file").stat().st_nlink == 1
    assert all(path.is_file() or path.is_symlink() for path in (tmp_path / "workdir").iterdir())


def test_an_absolute_path_is_one_within_the_folder(tmp_path: Path) -> None:
    target = tmp_path / "absolute"
    content, digest = packed(file(str(target)))
    unpack(content, tmp_path, digest=digest)
    assert not target.exists()
    assert (tmp_path / "workdir" / str(target).lstrip("/")).read_bytes() == b"evil"


def test_no_file_keeps_a_right_of_its_packer(tmp_path: Path) -> None:
    def pack(archive: tarfile.TarFile) -> None:
        member = tarfile.TarInfo("root-shell")
        member.mode, member.uid = 0o6755, 0
        archive.addfile(member)

    content, digest = packed(pack)
    unpack(content, tmp_path, digest=digest)
    assert (tmp_path / "workdir" / "root-shell").stat().st_mode & 0o7777 == 0o777


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    member = tarfile.TarInfo(name)
    member.size, member.type = size, kind
    return member.tobuf(format=tarfile.GNU_FORMAT)


def zeros(size: int) -> bytes:
    """Gzipped zeros, a thousandth of their size: gzip's members may be repeated."""
    return gzip.compress(bytes(PIECE), compresslevel=9) * (size // PIECE)


BOMBS: dict[str, Callable[[], bytes]] = {
    "a file": lambda: gzip.compress(header("zeros", 100 * GIBIBYTE)) + zeros(100 * GIBIBYTE),
    "what follows the archive's end": lambda: gzip.compress(bytes(1024)) + zeros(GIBIBYTE),
    "a header of a file": lambda: gzip.compress(header("x", 100 * GIBIBYTE, tarfile.XHDTYPE)) + zeros(GIBIBYTE),
    "a long name": lambda: gzip.compress(header("x", 100 * GIBIBYTE, tarfile.GNUTYPE_LONGNAME)) + zeros(GIBIBYTE),
    "files without content": lambda: gzip.compress(header("empty", 0) * (workdir.MOST_FILES + 1), compresslevel=1),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_costs_no_disk_and_little_memory(bomb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Bytes and files up to the real limits take seconds.
    monkeypatch.setattr(workdir, "MOST_FILES", 1_000)
    monkeypatch.setattr(workdir, "LARGEST", PIECE)
    monkeypatch.setattr(workdir, "_LONGEST", 2 * PIECE)
    content = BOMBS[bomb]()
    tracemalloc.start()
    try:
        with pytest.raises(WrongArchive, match="more than"):
            unpack(content, tmp_path)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    left = [path.lstat() for path in (tmp_path / "workdir").rglob("*")]
    assert sum(status.st_blocks for status in left) * 512 <= workdir.LARGEST
    # The packed archive is in memory twice, and a header at most up to the limit, while it grows.
    assert most < 2 * len(content) + 8 * PIECE < GIBIBYTE / 2


@pytest.mark.parametrize(("size", "words"), [(100 * GIBIBYTE, "more than"), (2**20, "has a sparse file, huge")])
def test_a_sparse_file_is_refused(size: int, words: str, tmp_path: Path) -> None:
    raw = bytearray(header("huge", 0, tarfile.GNUTYPE_SPARSE))
    # The real size is in the header of GNU's sparse files, at 483, in base 256.
    raw[483:495] = b"\x80" + size.to_bytes(11, "big")
    raw[148:156] = b" " * 8
    raw[148:156] = f"{sum(raw):06o}\0 ".encode()
    with pytest.raises(WrongArchive, match=words):
        unpack(gzip.compress(bytes(raw) + bytes(1024)), tmp_path)
    assert not (tmp_path / "workdir" / "huge").exists()


def test_half_of_an_archive_is_none(tmp_path: Path) -> None:
    content, _ = packed(file("a", b"short"))
    with pytest.raises(WrongArchive, match="cannot be unpacked"):
        unpack(content[: len(content) // 2], tmp_path)
