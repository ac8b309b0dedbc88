"""Tests that everything that the docs name exists: files, links, modules, variables, fields, targets and workflows."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from perdure.activities.nodes.kubernetes.settings import VARIABLES
from perdure.local.control_plane import SERVER_OPTIONS
from perdure.spec.fields import field_at
from scripts.docs import PAGES as GENERATED
from tests.docs.pages import PAGES, ROOT, Page
from tests.support.source import parse

NOT_OURS = {
    "train.py": "the reader's script",
    "pretrain.py": "the reader's script",
    "finetune.py": "the reader's script",
    "job.yaml": "the reader's file",
    "runtime.yaml": "the reader's file",
    "go.mod": "of a Go module",
    "agent.sock": "a socket of a node",
}
"""Names that look like files of this repository."""

HELD_OTHERWISE = {*GENERATED, "metrics.md"}
"""Pages that are compared with the code as a whole."""

_SOURCES = (
    "perdure",
    "workflows",
    "activities",
    "agent",
    "perdure_launcher",
    "scripts",
    "benchmarks",
    "examples",
    "tests",
)
_SUFFIXES = (".py", ".md", ".yaml", ".yml", ".toml", ".sh", ".json", ".lock", ".sbatch", ".txt")


@cache
def tracked() -> frozenset[str]:
    """The repository's files and folders."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    files = [PurePosixPath(name) for name in listed.stdout.splitlines() if (ROOT / name).exists()]
    folders = {str(folder) for file in files for folder in file.parents}
    return frozenset({*map(str, files), *folders} - {"."})


@cache
def code() -> str:
    """The text of all code, and of what configures it."""
    texts = [
        (ROOT / name).read_text(encoding="utf-8", errors="replace")
        for name in sorted(tracked())
        if (ROOT / name).is_file() and name.startswith((*_SOURCES, "deploy"))
    ]
    return "\n".join(texts)


def wrong_names(named: Callable[[Page], Iterable[str]], exists: Callable[[str], bool]) -> list[str]:
    """Returns what pages name that does not exist, each with its page."""
    return [f"{page.name}: {name}" for page in PAGES for name in sorted(set(named(page))) if not exists(name)]


def test_relative_links_lead_somewhere():
    anchors = {page.path: page.anchors for page in PAGES}

    def leads_somewhere(page: Page, link: str) -> bool:
        path, _, anchor = link.partition("#")
        target = (page.path.parent / path).resolve() if path else page.path
        return target.exists() and (not anchor or anchor in anchors.get(target, set()))

    links = [(page, link) for page in PAGES for link in page.links if not re.match(r"[a-z]+:", link)]
    assert len(links) > 100
    assert [f"{page.name}: {link}" for page, link in links if not leads_somewhere(page, link)] == []


def test_every_page_is_reached_from_the_readme():
    pages_by_path = {page.path: page for page in PAGES}
    reached, left = set[Page](), [pages_by_path[ROOT / "README.md"]]
    while left:
        page = left.pop()
        if page not in reached:
            reached.add(page)
            targets = [(page.path.parent / link.partition("#")[0]).resolve() for link in page.links]
            left += [pages_by_path[target] for target in targets if target in pages_by_path]
    assert [page.name for page in PAGES if page not in reached] == []


def path_in(text: str) -> str | None:
    """The path of this repository that a text is; None where it is something else."""
    name = text.removesuffix("/").removeprefix("./")
    if name in NOT_OURS or not re.fullmatch(r"[\w.-]+(/[\w.-]+)*", name):
        return None
    top = name.partition("/")[0]
    if "/" in name and top in {entry for entry in tracked() if "/" not in entry}:
        return name
    return name if name.endswith(".py") or (text.endswith("/") and top in _SOURCES) else None


def exists(name: str) -> bool:
    """Whether a path, or the end of one as in `policy/judge.py`, is the repository's."""
    return any(entry == name or entry.endswith(f"/{name}") for entry in tracked())


def words_of(page: Page) -> list[str]:
    """Each piece of code by itself, and the words of blocks."""
    words = [word for block in page.blocks if block.language in ("", "console", "yaml") for word in block.text.split()]
    return [snippet.text for snippet in page.snippets] + [word.strip("\"'(),;") for word in words]


def test_paths_exist():
    assert wrong_names(lambda page: filter(None, map(path_in, words_of(page))), exists) == []


def test_tests_exist():
    files = {PurePosixPath(name).stem for name in tracked()}
    case = re.compile(r"(test_\w+)(\[.*\])?")
    named = [match[1] for page in PAGES for snippet in page.snippets if (match := case.fullmatch(snippet.text))]
    assert sorted({name for name in named if name not in files}) == []


def test_modules_and_what_they_hold_exist():
    dotted = re.compile(rf"({'|'.join(_SOURCES)})(\.\w+)+")

    def modules(page: Page) -> Iterator[str]:
        for snippet in page.snippets:
            if dotted.fullmatch(snippet.text) and snippet.text not in NOT_OURS and not path_in(snippet.text):
                yield snippet.text

    assert wrong_names(modules, importable) == []


def importable(name: str) -> bool:
    """Whether a dotted name is a module's, or that of something that one defines; nothing is run for it."""
    path = ROOT / name.replace(".", "/")
    if path.is_dir() or path.with_suffix(".py").is_file():
        return True
    module, _, thing = name.rpartition(".")
    source = find_spec(module)
    if source is None or source.origin is None:
        return False
    tree = parse(Path(source.origin))
    return thing in {getattr(node, "name", "") or getattr(node, "id", "") for node in ast.walk(tree)}


def test_variables_are_read_or_set_somewhere():
    known = code() + "\n".join(f"{VARIABLES}{name}" for name in re.findall(r"VARIABLES}([A-Z_]+)", code()))

    def variables(page: Page) -> list[str]:
        text = "\n".join([*(snippet.text for snippet in page.snippets), *(block.text for block in page.blocks)])
        return re.findall(r"\bPERDURE_[A-Z_]+[A-Z]\b", text)

    assert wrong_names(variables, lambda name: name in known) == []


ROLE = ("roles", "<name>")


def field_named(text: str) -> tuple[str, ...] | None:
    """Returns the location of a dotted name in the specification, if its first part is a field of the job or of a
    role."""
    name = text.partition(":")[0]
    if not re.fullmatch(r"[a-z_]+(\.([a-z_]+|<name>))+", name) or chart_has(name) or path_in(name):
        return None
    path = tuple(name.split("."))
    return next((start + path for start in ((), ROLE) if field_at((*start, path[0]))[0] is not None), None)


def test_fields_of_the_specification_exist():
    named = {path for page in PAGES for snippet in page.snippets if (path := field_named(snippet.text))}
    assert len(named) > 50
    assert sorted(".".join(path) for path in named if field_at(path)[0] is None) == []


def test_identifiers_occur_in_the_code():
    known = set(re.findall(r"\b[a-z]+(?:_[a-z0-9]+)+\b", code()))
    identifier = re.compile(r"(?!test_)[a-z]+(_[a-z0-9]+)+")

    def identifiers(page: Page) -> Iterator[str]:
        if page.path.name not in HELD_OTHERWISE:
            yield from (snippet.text for snippet in page.snippets if identifier.fullmatch(snippet.text))

    assert wrong_names(identifiers, known.__contains__) == []


def test_cases_of_tests_exist():
    sources: dict[str, str] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        sources[path.stem] = sources.get(path.stem, "") + path.read_text(encoding="utf-8")
    named = [
        (match[1], case.strip(" …").lstrip("-"))
        for page in PAGES
        for snippet in page.snippets
        if (match := re.fullmatch(r"(test_\w+)\[(.*)\]", snippet.text))
        for case in match[2].split(",")
    ]
    assert len(named) > 10
    assert [name for name in named if name[1] not in sources[name[0]]] == []


def test_the_agents_requests_are_those_that_it_serves():
    request = r"(POST|GET)%s(/v1/[a-z/]+)"
    page = (ROOT / "docs" / "node-protocol.md").read_text(encoding="utf-8")
    served = set(re.findall(request % '", "', (ROOT / "agent" / "server.py").read_text(encoding="utf-8")))
    assert len(served) > 10
    assert set(re.findall(f"`{request % ' '}", page)) == served


def test_all_rooms_of_the_policy_and_the_modules_beside_them_are_in_the_architecture():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    policy = ROOT / "workflows" / "policy"
    rooms = {path.parent for path in policy.rglob("*.py")} - {policy}
    assert len(rooms) > 8
    words = [f"{room.relative_to(policy)}/" for room in rooms]
    words += [path.name for path in policy.glob("*.py") if path.name != "__init__.py"]
    assert sorted(word for word in words if word not in page) == []


@cache
def chart_values() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "deploy" / "helm" / "perdure" / "values.yaml").read_text(encoding="utf-8"))


def chart_has(name: str) -> bool:
    """Whether the chart has a value of this name."""
    value: Any = chart_values()
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            return False
        value = value[part]
    return True


def test_values_of_the_chart_exist():
    def values(page: Page) -> Iterator[str]:
        yield from re.findall(r"--set ([\w.]+)=", "\n".join(block.text for block in page.blocks))
        dotted = [name for snippet in page.snippets if "." in (name := snippet.text.partition(":")[0])]
        # Temporal's server has a part of the same name as one of ours: `history`.
        servers = {value.partition("=")[0] for _, value in SERVER_OPTIONS}
        yield from (name for name in dotted if name.partition(".")[0] in chart_values() and name not in servers)

    assert wrong_names(values, lambda name: chart_has(name) or field_named(name) is not None) == []


def test_what_does_not_exist_is_found():
    assert path_in("tests/agent/nothing.py") == "tests/agent/nothing.py"
    assert not exists("tests/agent/nothing.py")
    assert path_in("nothing.py") == "nothing.py"
    assert path_in("agent/") == "agent"
    assert path_in("2/8") is None
    assert importable("perdure.agent.config.AgentConfig")
    assert not importable("perdure.agent.config.Nothing")
    assert field_named("timing.nothing") == ("timing", "nothing")
    assert field_named("nodes.nothing") == (*ROLE, "nodes", "nothing")
    assert chart_has("gangs.system")
    assert not chart_has("gangs.nothing")
