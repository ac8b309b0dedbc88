"""The storage of a job, as fsspec opens it.

A storage may be a folder that training code writes to, such as one on a volume that both containers mount. What it puts
there must not lead the agent to files that only the agent can read or write, so folders are not opened by fsspec.
"""

from __future__ import annotations

import errno
import importlib
import os
import shutil
import stat
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

from perdure.agent.storage_credentials import options_of
from perdure_training.node_api.untrusted_files import NotARegularFile, folder_beneath, open_file, sync_folder


def open_storage(url: str, *, contained: bool = False) -> tuple[Any, str]:
    """Returns a file system and the path of a storage in it.

    Args:
        url: A folder, as fsspec takes it.
        contained: Whether training code is another user, which must not lead the agent to the agent's own files: a
            folder must then be on the volume that its path names (`LocalFiles`), and credentials are those of
            `storage_credentials`.

    Raises:
        ValueError: if it is a chain of file systems: the last one would open files of the machine, and follow links.
            Or if `options_of` refuses it.
    """
    if "::" in url:
        raise ValueError(f"storage: {url} chains file systems; expected the URL of one, such as file:///folder")
    options = options_of(url) if contained else {}
    # Imported late: with its backends it is a large part of an agent's memory.
    fsspec: Any = importlib.import_module("fsspec.core")
    # Nodes write to the same folder, so listings are never kept.
    files, root = fsspec.url_to_fs(url, use_listings_cache=False, **options)
    protocols = (files.protocol,) if isinstance(files.protocol, str) else files.protocol
    root = str(root).rstrip("/")
    return (LocalFiles(Path(root), contained=contained) if "file" in protocols else files), root


class LocalFiles:
    """The files below one folder of the machine; the methods are those of fsspec that are used.

    Invariant: no link below the folder is followed, and only regular files are read and written.
    """

    def __init__(self, root: Path, *, contained: bool = False) -> None:
        """Creates the object.

        Args:
            root: The folder. The path to it may have links, which users make.
            contained: Whether these links may not lead out of the mounted volume that the path names. Where training
                code is another user than this process, it can replace the folder itself by a link.
        """
        self._root = root
        self._contained = contained

    def open(self, path: str, mode: str) -> BinaryIO:
        """Opens a file for `rb` or `wb`."""
        with self._parent(path) as (name, within):
            flags = os.O_RDONLY if mode == "rb" else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            return cast("BinaryIO", os.fdopen(open_file(name, flags, within), mode))

    def pipe_file(self, path: str, content: bytes) -> None:
        """Writes a file."""
        with self.open(path, "wb") as file:
            file.write(content)

    def cat_file(self, path: str) -> bytes:
        """Returns the content of a file."""
        with self.open(path, "rb") as file:
            return file.read()

    def makedirs(self, path: str, *, exist_ok: bool) -> None:
        """Creates a folder, and those above it."""
        if not self._contained:
            _make_folders(self._root)
        with self._folder(self._parts(path), create=exist_ok):
            pass

    def size(self, path: str) -> int:
        """Returns the size of a file."""
        with self.open(path, "rb") as file:
            return os.fstat(file.fileno()).st_size

    def info(self, path: str) -> dict[str, Any]:
        """Describes a file.

        Raises:
            FileNotFoundError: if there is none, or a link or something else stands there.
            OSError: if that is not known, as with a stale handle of NFS.
        """
        try:
            with self._parent(path) as (name, within):
                found = os.stat(name, dir_fd=within, follow_symlinks=False)
        except NotARegularFile as error:
            raise FileNotFoundError(errno.ENOENT, error.strerror, path) from error
        if not stat.S_ISREG(found.st_mode):
            raise FileNotFoundError(errno.ENOENT, "it is not a regular file", path)
        return {"name": path, "size": found.st_size, "type": "file"}

    def ls(self, path: str, *, detail: bool) -> list[Any]:
        """Returns the paths in a folder; with `detail` as dictionaries that have the sizes, too."""
        with self._folder(self._parts(path)) as within:
            if not detail:
                return [f"{path}/{name}" for name in os.listdir(within)]
            found: list[dict[str, Any]] = []
            for name in os.listdir(within):
                # What another node deletes meanwhile is not there.
                with suppress(FileNotFoundError):
                    size = os.stat(name, dir_fd=within, follow_symlinks=False).st_size
                    found.append({"name": f"{path}/{name}", "size": size})
            return found

    def mv(self, path: str, new: str) -> None:
        """Gives a file another name in its folder, durably."""
        with self._parent(path) as (name, within):
            os.replace(name, PurePosixPath(new).name, src_dir_fd=within, dst_dir_fd=within)
            sync_folder(within)

    def persist(self, path: str) -> None:
        """Makes the name of a new file durable: without this a loss of power can take a file whose content is."""
        with self._parent(path) as (_, within):
            sync_folder(within)

    def rm_file(self, path: str) -> None:
        """Deletes a file."""
        with self._parent(path) as (name, within):
            os.unlink(name, dir_fd=within)

    def rm(self, path: str, *, recursive: bool) -> None:
        """Deletes a folder with all that is in it."""
        assert recursive
        with self._parent(path) as (name, within):
            shutil.rmtree(name, dir_fd=within)

    def invalidate_cache(self) -> None:
        """Does nothing: no listing is kept."""

    @contextmanager
    def _parent(self, path: str) -> Generator[tuple[str, int]]:
        *folders, name = self._parts(path)
        with self._folder(folders) as within:
            yield name, within

    @contextmanager
    def _folder(self, parts: Sequence[str], *, create: bool = False) -> Generator[int]:
        """Opens a folder below the storage, and yields its descriptor."""
        found, beneath = self._root.resolve(), tuple[str, ...]()
        if self._contained:
            volume = next(folder for folder in (self._root, *self._root.parents) if os.path.ismount(folder))
            if not found.is_relative_to(volume):
                raise NotARegularFile(errno.EXDEV, f"a link leads out of the volume {volume}", str(self._root))
            # What was resolved may have been replaced since: from the volume on, no link is followed.
            found, beneath = volume, found.relative_to(volume).parts
        with folder_beneath(found, (*beneath, *parts), create=create) as within:
            yield within

    def _parts(self, path: str) -> tuple[str, ...]:
        return PurePosixPath(path).relative_to(self._root).parts


def _make_folders(folder: Path) -> None:
    """Creates a folder and those above it, durably."""
    if folder.is_dir():
        return
    _make_folders(folder.parent)
    folder.mkdir(exist_ok=True)
    above = os.open(folder.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync_folder(above)
    finally:
        os.close(above)
