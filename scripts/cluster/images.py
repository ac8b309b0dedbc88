"""Builds container images without Docker: layers are tar files, and an image is a few documents that name them.

Perdure's image, for worker and agents, contains this machine's Python, Perdure's dependencies and this checkout, like
the image that users build with `deploy/images`; a test verifies that the two agree. Training containers use an image
with only a shell: tests mount this machine's Python and torch.
"""

from __future__ import annotations

import compileall
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, distribution
from importlib.util import cache_from_source
from pathlib import Path
from py_compile import PycInvalidationMode
from typing import Any

from packaging.requirements import Requirement

from scripts.cluster.binaries import CACHE, packaged_file
from scripts.setup import IMAGE_EXTRAS

PAUSE_IMAGE = "localhost/perdure/pause:1"
"""The image of the container that holds a pod's namespaces."""

BARE_IMAGE = "localhost/perdure/bare:1"
"""An image with a shell and basic commands; it runs any program that is mounted from this machine."""

ROOT = Path(__file__).resolve().parents[2]

_OCI = "application/vnd.oci.image"
_PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
_SITE_PACKAGES = f"usr/local/lib/{_PYTHON}/site-packages"
_NOT_NEEDED = {"test", "tests", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3", "site-packages"}
_FOLDERS = ("bin", "dev", "etc", "home", "lib", "lib64", "opt", "proc", "root", "run", "sys", "usr", "var")
_SHELL_COMMANDS = ("sh", "cat", "cp", "echo", "env", "id", "ls", "mkdir", "sleep", "test", "touch", "true")

USER = "65532:65532"
"""The user of Perdure's image: not a user of the host, and not root."""

COMMAND = ("perdure", "worker", "--backend", "kubernetes")
"""The default command of Perdure's image; agents' containers run another one."""

OUR_PACKAGES = ("perdure", "perdure_launcher", "perdure_training")

ENVIRONMENT = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1"}


@dataclass(frozen=True)
class Image:
    """An image as a file that containerd imports."""

    reference: str
    archive: Path


def bare_images(folder: Path) -> list[Image]:
    """Builds the image that holds a pod's namespaces, and the image for training containers."""
    layer = _write_layer(folder / "bare.layer", _bare_entries())
    return [
        _image(PAUSE_IMAGE, [layer], folder / "pause.tar", command=["/bin/busybox", "sleep", "2147483647"]),
        _image(BARE_IMAGE, [layer], folder / "bare.tar", command=["/bin/sh"]),
    ]


def perdure_image(folder: Path, code: Path = ROOT) -> Image:
    """Builds Perdure's image from this checkout or another folder; its reference changes with its content."""
    base = _write_layer(folder / "bare.layer", _bare_entries())
    code = _write_layer(folder / "code.layer", _code_entries(code))
    layers = [base, _python_layer(), code]
    digest = hashlib.sha256("".join(map(_digest, layers)).encode()).hexdigest()[:12]
    archive = folder / f"perdure-{digest}.tar"
    reference = f"localhost/perdure/perdure:{digest}"
    if archive.exists():
        return Image(reference, archive)
    return _image(reference, layers, archive, command=COMMAND, user=USER, environment=ENVIRONMENT)


def host_mounts() -> list[Path]:
    """Returns the folders that a bare container needs to run this environment's Python and torch."""
    prefixes = {Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve(), ROOT}
    prefixes = {path for path in prefixes if not path.is_relative_to("/usr")}
    nested = {path for path in prefixes if any(path != other and path.is_relative_to(other) for other in prefixes)}
    return [*map(Path, ("/usr", "/lib", "/lib64")), *sorted(prefixes - nested)]


def _python_layer() -> Path:
    """Builds the layer with Python and the locked dependencies. It is cached by their versions, since that takes
    seconds."""
    lock = (ROOT / "requirements.lock").read_bytes()
    names = " ".join(f"{one.name}-{one.version}" for one in dependencies())
    key = hashlib.sha256(f"{sys.version} {sys.base_prefix} {names} {_SITE_PACKAGES}".encode() + lock).hexdigest()[:16]
    path = CACHE / "images" / f"python-{key}.layer"
    if not path.exists():
        # Checkouts share the folder: the newest layer may belong to another one.
        for old in sorted(path.parent.glob("*.layer"), key=lambda layer: layer.stat().st_mtime)[:-2]:
            old.unlink(missing_ok=True)
        _write_layer(path, _python_entries())
    return path


_Entry = tuple[tarfile.TarInfo, Path | bytes | None]


def _bare_entries() -> Iterator[_Entry]:
    busybox = packaged_file("busybox-static")
    if busybox is None:
        raise RuntimeError("busybox-static is not installed")
    for name in _FOLDERS:
        yield _folder(name)
    yield _folder("tmp", mode=0o1777)
    yield _file("bin/busybox", busybox)
    for name in _SHELL_COMMANDS:
        yield _link(f"bin/{name}", "busybox")
    yield _file("etc/passwd", b"root:x:0:0:root:/root:/bin/sh\nperdure:x:65532:65532::/tmp:/bin/sh\n", mode=0o644)


def _python_entries() -> Iterator[_Entry]:
    executable = Path(sys.executable).resolve()
    library = Path(sysconfig.get_path("stdlib"))
    native = [executable]
    yield _file(f"usr/local/bin/{_PYTHON}", executable)
    yield _link("usr/local/bin/python3", _PYTHON)
    for path in _files_below(library, without=_NOT_NEEDED):
        if path.suffix == ".so":
            native.append(path)
        yield _file(f"usr/local/lib/{_PYTHON}/{path.relative_to(library)}", path)
    for one in dependencies():
        for name in one.files or ():
            path = Path(str(one.locate_file(name)))
            if ".." in name.parts or not path.is_file():
                continue
            if ".so" in path.suffixes:
                native.append(path)
            yield _file(f"{_SITE_PACKAGES}/{name}", path)
            # Includes the compiled file if there is one; a read-only container would compile the module at every start.
            if path.suffix == ".py" and (compiled := Path(cache_from_source(str(path)))).exists():
                yield _file(f"{_SITE_PACKAGES}/{name.parent}/__pycache__/{compiled.name}", compiled)
    for path in _shared_libraries(native):
        yield _file(str(path).lstrip("/"), path)
    yield _file("etc/ld.so.cache", Path("/etc/ld.so.cache"), mode=0o644)


def _code_entries(code: Path) -> Iterator[_Entry]:
    with tempfile.TemporaryDirectory() as folder:
        for package in OUR_PACKAGES:
            copy = Path(folder, package)
            shutil.copytree(code / package, copy, ignore=shutil.ignore_patterns("__pycache__"))
            compileall.compile_dir(copy, quiet=1, stripdir=folder, invalidation_mode=PycInvalidationMode.UNCHECKED_HASH)
            for path in _files_below(copy, without=set()):
                yield _file(f"{_SITE_PACKAGES}/{path.relative_to(folder)}", path.read_bytes())
    own = distribution("perdure")
    for name in own.files or ():
        if name.name in ("METADATA", "entry_points.txt"):
            yield _file(f"{_SITE_PACKAGES}/{name}", Path(str(own.locate_file(name))))
    # Those of the code, which may be that of an earlier release.
    for name, place in tomllib.loads((code / "pyproject.toml").read_text())["project"]["scripts"].items():
        module, _, attribute = place.partition(":")
        call = f"import sys\nfrom {module} import {attribute}\nsys.exit({attribute}())\n"
        yield _file(f"usr/local/bin/{name}", f"#!/usr/local/bin/python3\n{call}".encode(), mode=0o755)


def dependencies() -> list[Distribution]:
    """Returns the installed dependencies of Perdure with the extras that its image has."""
    found: dict[str, Distribution] = {}
    waiting = [Requirement(f"perdure[{','.join(IMAGE_EXTRAS)}]")]
    followed: set[tuple[str, str]] = set()
    while waiting:
        wanted = waiting.pop()
        one = found[wanted.name] = distribution(wanted.name)
        for extra in ("", *wanted.extras):
            if (one.name, extra) in followed:
                continue
            followed.add((one.name, extra))
            required = map(Requirement, one.requires or ())
            waiting += [each for each in required if each.marker is None or each.marker.evaluate({"extra": extra})]
    found = {one.name: one for one in found.values() if one.name != "perdure"}
    return [found[name] for name in sorted(found)]


def _shared_libraries(native: Iterable[Path]) -> list[Path]:
    """Returns the shared libraries that the loader would load for these files, and the loader itself."""
    answer = subprocess.run(["ldd", *native], capture_output=True, text=True, check=False)
    found = re.findall(r"(?:=> |^\s+)(/\S+) \(0x", answer.stdout, flags=re.MULTILINE)
    return sorted({Path(path) for path in found if "site-packages" not in path})


def _files_below(folder: Path, *, without: set[str]) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in without and not name.startswith("config-"))
        yield from (Path(parent, name) for name in sorted(names))


def _folder(name: str, *, mode: int = 0o755) -> _Entry:
    info = tarfile.TarInfo(name)
    info.type, info.mode = tarfile.DIRTYPE, mode
    return info, None


def _link(name: str, target: str) -> _Entry:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = tarfile.SYMTYPE, target
    return info, None


def _file(name: str, content: Path | bytes, *, mode: int | None = None) -> _Entry:
    info = tarfile.TarInfo(name)
    if isinstance(content, bytes):
        info.size, info.mode = len(content), mode or 0o644
        return info, content
    status = content.stat()
    # Readable for every user that a container may have. Compiled modules are valid only with the modification time of
    # their source.
    info.size, info.mtime = status.st_size, int(status.st_mtime)
    info.mode = mode or (0o755 if status.st_mode & 0o100 else 0o644)
    return info, content


def _write_layer(path: Path, entries: Iterable[_Entry]) -> Path:
    """Writes a layer's tar file atomically; returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with tarfile.open(draft, "w") as archive:
        for info, content in entries:
            if isinstance(content, Path):
                with content.open("rb") as file:
                    archive.addfile(info, file)
            else:
                archive.addfile(info, io.BytesIO(content) if content is not None else None)
    draft.replace(path)
    return path


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def _image(
    reference: str,
    layers: list[Path],
    archive: Path,
    *,
    command: Sequence[str],
    user: str = "",
    environment: Mapping[str, str] | None = None,
) -> Image:
    digests = [_digest(layer) for layer in layers]
    machine = {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine]
    variables = {"PATH": "/usr/local/bin:/usr/bin:/bin", **(environment or {})}
    configuration = _document(
        {
            "architecture": machine,
            "os": "linux",
            "config": {
                "Cmd": list(command),
                "User": user,
                "Env": [f"{name}={value}" for name, value in variables.items()],
            },
            "rootfs": {"type": "layers", "diff_ids": digests},
        }
    )
    manifest = _document(
        {
            "schemaVersion": 2,
            "mediaType": f"{_OCI}.manifest.v1+json",
            "config": _descriptor(f"{_OCI}.config.v1+json", configuration),
            "layers": [
                {"mediaType": f"{_OCI}.layer.v1.tar", "digest": digest, "size": layer.stat().st_size}
                for digest, layer in zip(digests, layers, strict=True)
            ],
        }
    )
    names = {"io.containerd.image.name": reference, "org.opencontainers.image.ref.name": reference}
    descriptor = _descriptor(f"{_OCI}.manifest.v1+json", manifest) | {"annotations": names}
    index = _document({"schemaVersion": 2, "mediaType": f"{_OCI}.index.v1+json", "manifests": [descriptor]})
    blobs: dict[str, Path | bytes] = dict(zip(digests, layers, strict=True))
    blobs |= {_digest_of(content): content for content in (configuration, manifest)}
    entries = [
        _file("oci-layout", b'{"imageLayoutVersion":"1.0.0"}'),
        _file("index.json", index),
        *(_file(f"blobs/sha256/{digest.removeprefix('sha256:')}", content) for digest, content in blobs.items()),
    ]
    return Image(reference, _write_layer(archive, entries))


def _document(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content).encode()


def _digest_of(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _descriptor(media_type: str, content: bytes) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": _digest_of(content), "size": len(content)}
