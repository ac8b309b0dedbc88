"""The secrets of this machine: one small file for each, which jobs name as `NAME/KEY` like Secrets of Kubernetes.

A node reads the values when it starts, on its own machine. They never are in a specification, a history, a log or on a
command line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from perdure.base.errors import SecretUnavailable
from perdure.base.files import write_private_file
from perdure.base.state_folder import default_path

FOLDER_VARIABLE = "PERDURE_SECRETS"
"""A folder of files NAME/KEY to use instead of the one in the state folder, such as mounted Secrets."""

LONGEST = 128 * 1024 - 256
"""Bytes of a value: Linux accepts no variable of 128 KB."""

_REFERENCE = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/(?!\.{1,2}$)[-._a-zA-Z0-9]+")


class SecretStore:
    """The files of one folder."""

    def __init__(self, path: Path | None = None, *, mounted: bool = False) -> None:
        """Uses a folder, by default the one that `PERDURE_SECRETS` names, else that of the state folder.

        Args:
            path: The folder.
            mounted: Another program has made the folder, such as a kubelet, and answers for its permissions.
        """
        named = os.environ.get(FOLDER_VARIABLE)
        self._own = (path is not None or not named) and not mounted
        self.path = path or (Path(named) if named else default_path() / "secrets")

    def read(self, reference: str) -> str:
        """The value of a secret.

        Raises:
            SecretUnavailable: if there is none, or others can read it too.
        """
        path = self._file(reference)
        try:
            with path.open("rb") as file:
                known = os.fstat(file.fileno())
                content = file.read(LONGEST + 1)
        except OSError as error:
            raise SecretUnavailable(
                f"the secret {reference} is not on this machine: {path}: {error.strerror}",
                remedy=f"Store it here: perdure secret set {reference}",
            ) from error
        if self._own and known.st_mode & 0o077:
            raise SecretUnavailable(f"other users may read the secret {reference}", remedy=f"chmod 600 {path}")
        return _check_value(reference, content)

    def environment(self, references: Mapping[str, str]) -> dict[str, str]:
        """The values for variables.

        Raises:
            SecretUnavailable: if one cannot be read; the message names the variable.
        """
        values: dict[str, str] = {}
        for variable, reference in references.items():
            try:
                values[variable] = self.read(reference)
            except SecretUnavailable as error:
                raise SecretUnavailable(f"secrets.{variable}: {error}", remedy=error.remedy) from error
        return values

    def write(self, reference: str, value: bytes) -> None:
        """Stores a secret, in place of an earlier value.

        Raises:
            SecretUnavailable: if it cannot be a variable.
        """
        path = self._file(reference)
        _check_value(reference, value)
        for folder in (self.path.parent, self.path, path.parent):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private_file(path, value, durable=True)

    def remove(self, reference: str) -> bool:
        """Removes a secret; False if there was none."""
        path = self._file(reference)
        try:
            path.unlink()
        except FileNotFoundError:
            return False
        if not any(path.parent.iterdir()):
            path.parent.rmdir()
        return True

    def references(self) -> list[str]:
        """All secrets, as NAME/KEY."""
        found = (path.relative_to(self.path).as_posix() for path in self.path.glob("*/*") if path.is_file())
        return sorted(name for name in found if _REFERENCE.fullmatch(name))

    def _file(self, reference: str) -> Path:
        if not _REFERENCE.fullmatch(reference):
            raise SecretUnavailable(f"{reference!r} does not name a secret; expected NAME/KEY, such as hf/token")
        return self.path / reference


def _check_value(reference: str, value: bytes) -> str:
    if len(value) > LONGEST or b"\0" in value:
        raise SecretUnavailable(
            f"the secret {reference} cannot be an environment variable: it has a NUL or over {LONGEST} bytes"
        )
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise SecretUnavailable(f"the secret {reference} cannot be an environment variable: it is not UTF-8") from None
