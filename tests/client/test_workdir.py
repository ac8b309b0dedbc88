"""Tests of uploaded code: unpacking restores it, the same files give the same archive, and invalid files are
refused."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.agent.workdir import WrongArchive, unpack_workdir
from perdure.base.errors import Refused
from perdure.client.client import Client
from perdure.client.workdir import PackedWorkdir, pack_workdir
from perdure.spec.errors import SpecError

NAMES = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=20).filter(
    lambda name: name not in (".", "..", ".git", ".venv", "__pycache__") and len(os.fsencode(name)) < 100
)
FILES = st.dictionaries(
    st.lists(NAMES, min_size=1, max_size=3).map("/".join),
    st.tuples(st.binary(max_size=2000), st.booleans()),
    max_size=8,
).filter(lambda files: not any(other.startswith(f"{path}/") for path in files for other in files))


def made(folder: Path, files: dict[str, tuple[bytes, bool]]) -> Path:
    for name, (content, runs) in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        path.chmod(0o700 if runs else 0o600)
    return folder


def unpacked(packed: PackedWorkdir, folder: Path, *, part: int = 500) -> Path:
    """Unpacks it as a pod does, from parts in a folder."""
    parts = folder / "parts"
    parts.mkdir()
    for index, begin in enumerate(range(0, len(packed.content), part)):
        (parts / f"{index:04}").write_bytes(packed.content[begin : begin + part])
    unpack_workdir(parts, packed.digest, folder / "workdir")
    return folder / "workdir"


def tree(folder: Path) -> dict[str, tuple[bytes, bool]]:
    """Returns the files of a folder, in the format of the argument of `made`."""
    return {
        str(path.relative_to(folder)): (path.read_bytes(), bool(path.stat().st_mode & stat.S_IXUSR))
        for path in folder.rglob("*")
        if path.is_file()
    }


@given(FILES)
def test_what_is_unpacked_is_what_was_packed(files: dict[str, tuple[bytes, bool]]) -> None:
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        packed = pack_workdir(made(Path(first), files))
        copy = made(Path(second), dict(reversed(files.items())))
        for path in copy.rglob("*"):
            os.utime(path, (1, 1))
        assert pack_workdir(copy) == packed
    with tempfile.TemporaryDirectory() as folder:
        assert tree(unpacked(packed, Path(folder))) == files


def test_every_user_of_the_pod_may_change_what_is_unpacked(tmp_path: Path) -> None:
    source = made(tmp_path / "source", {"a/b": (b"x", False), "a/run": (b"x", True)})
    (source / "empty").mkdir()
    (source / "a/link").symlink_to("../empty")
    old_umask = os.umask(0o077)
    try:
        folder = unpacked(pack_workdir(source), tmp_path)
    finally:
        os.umask(old_umask)
    modes = {name: stat.S_IMODE((folder / name).stat().st_mode) for name in (".", "a", "a/b", "a/run", "empty")}
    assert modes == {".": 0o777, "a": 0o777, "a/b": 0o666, "a/run": 0o777, "empty": 0o777}
    assert (folder / "a/link").readlink() == Path("../empty")


@pytest.mark.parametrize(
    ("exclude", "kept"),
    [
        ([], {"train.py", "data/x", "data/y.pt", "src/data/z", "src/m.pt"}),
        (["data/"], {"train.py", "src/m.pt"}),
        (["/data/"], {"train.py", "src/data/z", "src/m.pt"}),
        (["*.pt", "!src/m.pt"], {"train.py", "data/x", "src/data/z", "src/m.pt"}),
        (["*", "!train.py"], {"train.py"}),
        (["data", "src", "!.git/"], {"train.py", ".git/config"}),
    ],
)
def test_patterns_mean_what_they_mean_to_git(tmp_path: Path, exclude: list[str], kept: set[str]) -> None:
    names = ("train.py", "data/x", "data/y.pt", "src/data/z", "src/m.pt", ".git/config", "src/__pycache__/m.pyc")
    folder = made(tmp_path / "code", dict.fromkeys(names, (b"", False)))
    assert set(tree(unpacked(pack_workdir(folder, exclude), tmp_path))) == kept


def _link_outside(folder: Path) -> None:
    (folder / "data").symlink_to("../elsewhere")


def _absolute_link(folder: Path) -> None:
    (folder / "data").symlink_to(folder / "train.py")


def _pipe(folder: Path) -> None:
    os.mkfifo(folder / "pipe")


def _too_much(folder: Path) -> None:
    made(folder, {"data/part": (os.urandom(7_000_000), False), "runs/x": (os.urandom(2_000_000), False)})


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_link_outside, ['workdir.path: "data" is a link to ../elsewhere, which nodes do not have', "workdir.exclude"]),
        (_absolute_link, ['"data" is a link to /']),
        (_pipe, ['"pipe" is neither a file nor a folder nor a link']),
        (
            _too_much,
            [
                "code is too large to be uploaded: 9.0 MB in 3 files",
                "the largest: data/ (7.0 MB), runs/ (2.0 MB), data/part (7.0 MB), runs/x (2.0 MB), train.py (0 bytes)",
                "at most 8.0 MB compressed, and 256.0 MB and 100,000 files unpacked",
                "workdir.exclude; put data and packages into the image or on a volume",
            ],
        ),
    ],
)
def test_what_cannot_be_carried_is_named_with_a_remedy(
    tmp_path: Path, spoil: Callable[[Path], None], words: list[str]
) -> None:
    folder = made(tmp_path / "code", {"train.py": (b"", False)})
    spoil(folder)
    with pytest.raises(SpecError) as refused:
        pack_workdir(folder)
    assert [text for text in words if text not in str(refused.value)] == []
    pack_workdir(folder, ["data", "pipe", "runs"])


def test_a_file_that_may_not_be_read_is_named() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = made(Path(name) / "code", {"keys/id": (b"", False)})
        for path in (Path(name), folder, folder / "keys"):
            path.chmod(0o755)
        (folder / "keys/id").chmod(0)
        # The tests of a cluster run as root, who may read everything.
        root = os.geteuid() == 0
        if root:
            os.seteuid(65534)
        try:
            with pytest.raises(SpecError, match='"keys/id" cannot be read: Permission denied; make it readable'):
                pack_workdir(folder)
        finally:
            if root:
                os.seteuid(0)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda content: content[:-9], "cannot be unpacked"),
        (lambda content: content[:40] + bytes([content[40] ^ 1]) + content[41:], "cannot be unpacked"),
        (lambda content: pack_workdir(os.path.dirname(__file__)).content, "digest is sha256:"),
    ],
)
def test_what_arrives_damaged_is_not_run(tmp_path: Path, damage: Callable[[bytes], bytes], words: str) -> None:
    packed = pack_workdir(made(tmp_path / "code", {"train.py": (os.urandom(3000), False)}))
    damaged = PackedWorkdir(content=damage(packed.content), digest=packed.digest, files=1, size=3000)
    with pytest.raises(WrongArchive, match=words):
        unpacked(damaged, tmp_path)


async def test_a_worker_that_has_no_pods_refuses(client: Client, job_name: str, tmp_path: Path) -> None:
    made(tmp_path / "code", {"train.py": (b"", False)})
    role = {"nodes": 1, "command": ["torchrun", "train.py"], "image": "torch:1"}
    spec = {"name": job_name, "backend": "kubernetes", "workdir": {"path": str(tmp_path / "code")}}
    with pytest.raises(Refused, match="backend is 'kubernetes', which this worker does not serve"):
        await client.submit({**spec, "roles": {"worker": role}})
    assert job_name not in {job.name for job in await client.list()}
