"""Tests of where state is kept, for users that a machine does not know: containers run as any user ID."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import pytest

from perdure.base.errors import StateFolderError
from perdure.base.state_folder import STATE_VARIABLE, default_path


def test_a_user_without_a_home_folder_reads_what_to_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def no_home() -> NoReturn:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    for variable in (STATE_VARIABLE, "XDG_STATE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(StateFolderError, match="no home folder is known") as told:
        default_path()
    assert STATE_VARIABLE in told.value.remedy
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path))
    assert default_path() == tmp_path
