"""Imports what commands of `perdure` import, for the interpreter that their processes are forked from."""

import gc
from importlib import import_module

import typer.main

from perdure.cli import main

for _name in (
    "perdure.cli.auto",
    "perdure.cli.explain",
    "perdure.cli.keys",
    "perdure.cli.live",
    "perdure.cli.reports",
    "perdure.client.archive",
    "perdure.client.client",
    "perdure.client.joining",
    "perdure.client.scaling",
    "perdure.client.stacks",
    "perdure.client.watching",
    "perdure.local.control_plane",
    "perdure.page.report",
    "perdure.spec.dump",
    "perdure.spec.importers.documents",
    "perdure.spec.importers.schedulers",
    "perdure.spec.schema",
    "rich._emoji_codes",
    "typer.rich_utils",
):
    import_module(_name)

COMMAND = typer.main.get_command(main.app)
"""The command that `app` makes of its functions whenever it is called."""

# A process that collects garbage would get a copy of all of this.
gc.collect()
gc.freeze()
