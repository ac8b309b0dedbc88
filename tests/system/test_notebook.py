"""Test of the notebook in examples: it runs a job, and each of its cells shows something."""

from __future__ import annotations

import ast
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from perdure.local.control_plane import LocalControlPlane
from tests.docs.pages import ROOT

NOTEBOOK = ROOT / "examples" / "13-notebook" / "job.ipynb"


def run(source: str, names: dict[str, Any]) -> Any:
    """Runs a cell, and returns the value of its last line as a notebook does."""
    cell = ast.parse(source)
    *before, last = cell.body
    if not isinstance(last, ast.Expr):
        before, last = cell.body, None
    exec(compile(ast.Module(before, []), str(NOTEBOOK), "exec"), names)
    return eval(compile(ast.Expression(last.value), str(NOTEBOOK), "eval"), names) if last else None


@pytest.mark.long("commands")
def test_the_notebook_runs_a_job_to_its_end(
    control_plane: LocalControlPlane,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
):
    monkeypatch.setenv("PERDURE_STATE", str(control_plane.state.path))
    # A copy, since the script writes into the folder that it runs in.
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path / NOTEBOOK.parent.relative_to(ROOT))
    cells = ["".join(one["source"]) for one in json.loads(NOTEBOOK.read_text())["cells"] if one["cell_type"] == "code"]
    names: dict[str, Any] = {}
    shown = [run(cell, names) for cell in cells]
    tables = [value._repr_html_() for value in shown if value is not None]
    assert len(tables) == 4
    assert ">SUCCEEDED<" in tables[-1]
    assert "step 2000/2000" in capsys.readouterr().out
