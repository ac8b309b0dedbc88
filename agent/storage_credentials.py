"""The credentials with which an agent opens a job's storage, where training code is another user than the agent.

The libraries of object stores look for credentials in many files, and follow what these say: to read another file and
send it to an address, or to run a command. Training code can write to volumes that its agent mounts, and the agent has
files of its own that prove its identity to the gateway. So such an agent loads no configuration of these libraries from
files. It uses credentials in variables, the identity of the machine, and keys in a file of Google's.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import urlsplit

_ABSENT: Final = os.devnull
"""The path of a configuration that is neither a file with content nor a folder."""

_CONFIGURATIONS: Final = (
    # botocore: profiles name commands, files with tokens, and addresses.
    *("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE", "BOTO_CONFIG"),
    *("FSSPEC_CONFIG_DIR", "CLOUDSDK_CONFIG", "AZURE_CONFIG_DIR"),
)
"""Variables with the places of configurations, which are by default below the home folder, or in /etc."""

_GOOGLE: Final = "GOOGLE_APPLICATION_CREDENTIALS"
_GOOGLE_KEPT: Final = "PERDURE_GOOGLE_CREDENTIALS"
"""Where this process keeps the value of that variable: Google's library does not know this name."""
_GOOGLE_MOST: Final = 1 << 16
"""Bytes of a file with Google's credentials, at most."""
_GOOGLE_TOKENS: Final = "https://oauth2.googleapis.com/token"
_GOOGLE_FIELDS: Final = {
    "service_account": ("type", "project_id", "private_key_id", "private_key", "client_email", "client_id"),
    "authorized_user": ("type", "client_id", "client_secret", "refresh_token", "quota_project_id"),
}
"""The types of Google's credentials that name no file, command or address, and their fields."""

_S3, _GOOGLE_STORAGE, _AZURE = ("s3", "s3a"), ("gs", "gcs"), ("az", "abfs", "abfss", "adl")
_FOLDERS: Final = ("", "file", "local")
PROTOCOLS: Final = (*_FOLDERS[1:], *_S3, *_GOOGLE_STORAGE, *_AZURE, "oss", "oci")
"""Storages whose libraries take no files of the machine from a URL, as those of archives, git and SFTP do."""


def ignore_configuration(home: Path, environment: MutableMapping[str, str] = os.environ) -> None:
    """Makes this process load no configuration that its own user did not write; call it before any is read.

    Args:
        home: A folder that training code cannot write to.
        environment: The process's own.
    """
    environment.update(dict.fromkeys(_CONFIGURATIONS, _ABSENT))
    environment["HOME"] = str(home)
    environment.pop("XDG_CONFIG_HOME", None)
    if path := environment.pop(_GOOGLE, None):
        environment[_GOOGLE_KEPT] = path


def options_of(url: str, environment: MutableMapping[str, str] = os.environ) -> dict[str, Any]:
    """Returns the credentials for a storage, as arguments for its library; empty if it finds them by itself.

    Raises:
        ValueError: if the storage is of a kind that could read the agent's own files, or if its credentials are.
    """
    scheme = urlsplit(url).scheme
    if scheme not in ("", *PROTOCOLS):
        raise ValueError(f"storage: got {scheme}://…; expected one of {', '.join(PROTOCOLS)}")
    if scheme not in _GOOGLE_STORAGE or not (path := environment.get(_GOOGLE_KEPT)):
        return {}
    return {"token": _google_credentials(Path(path))}


def _google_credentials(path: Path) -> dict[str, Any]:
    """Reads the file by itself: Google's library would follow what it names."""
    try:
        content = json.loads(_content_of(path))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{_GOOGLE}: {path} has no credentials of Google in JSON") from error
    fields = cast("dict[str, Any]", content) if isinstance(content, dict) else {}
    kind = fields.get("type")
    if kind not in _GOOGLE_FIELDS:
        raise ValueError(
            f"{_GOOGLE}: {path} has credentials of another type than {' and '.join(_GOOGLE_FIELDS)}: such as "
            "external_account, which names a file or a command; use a service account's key, or the machine's identity"
        )
    return {name: fields[name] for name in _GOOGLE_FIELDS[kind] if name in fields} | {"token_uri": _GOOGLE_TOKENS}


def _content_of(path: Path) -> bytes:
    """Reads a small regular file. A Secret's files are links, so links are followed."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_size > _GOOGLE_MOST:
            raise ValueError("no small regular file")
        return file.read(_GOOGLE_MOST)
