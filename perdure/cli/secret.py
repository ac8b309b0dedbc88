"""The command for the secrets of this machine."""

from __future__ import annotations

import getpass
import sys
from enum import StrEnum
from typing import Annotated

import typer

from perdure.cli.common import Session, out


class Action(StrEnum):
    """What to do."""

    SET = "set"
    LIST = "list"
    REMOVE = "remove"


def secret(
    action: Annotated[Action, typer.Argument(metavar="set|list|remove", help="What to do.", show_default=False)],
    reference: Annotated[
        str | None, typer.Argument(metavar="[NAME/KEY]", help="The secret, as jobs name it.", show_default=False)
    ] = None,
    *,
    here: Annotated[Session, "output"],
) -> None:
    """Keep secrets on this machine for jobs that name them in `secrets`; no value is ever printed.

    `set` reads the value from standard input, or asks for it on a terminal. Nodes of the backends local and joined read
    it on the machine where they start.

    [dim]perdure secret set hf/token · perdure secret list · perdure secret remove hf/token[/]
    """
    from perdure.base.secret_store import SecretStore

    store = SecretStore()
    if action is Action.LIST:
        if reference is not None:
            raise typer.BadParameter("list shows all secrets", param_hint="NAME/KEY")
        known = store.references()
        if here.json:
            here.show(known)
        else:
            out.print("\n".join(known) or f"no secrets in {store.path}", markup=False)
        return
    if reference is None:
        raise typer.BadParameter("which one?", param_hint="NAME/KEY")
    if action is Action.SET:
        store.write(reference, _value(reference))
        out.print(f"{reference} is stored; a job names it: secrets: {{VARIABLE: {reference}}}", markup=False)
    else:
        removed = store.remove(reference)
        out.print(f"{reference} is removed" if removed else f"there was no {reference}", markup=False)


def _value(reference: str) -> bytes:
    """The value, without the line break that ends it."""
    if sys.stdin.isatty():
        return getpass.getpass(f"value of {reference}: ").encode()
    return sys.stdin.buffer.read().removesuffix(b"\n").removesuffix(b"\r")
