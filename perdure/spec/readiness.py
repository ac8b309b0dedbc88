"""When a node that serves others is ready. Apart from roles, since agents know this of their specification alone."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from .base import Integer, Matching, Section

LARGEST_PORT = 65_535


class Readiness(Section):
    """The sign by which a node that serves others is known to be ready."""

    port: Integer = Field(ge=1, le=LARGEST_PORT)
    """The port on which it accepts connections. Where nodes share a machine, node N of the role uses this port plus N;
    its command reads it from PERDURE_PORT."""
    http: Annotated[str, Matching(pattern=r"/\S*", expected="a path such as /health")] | None = None
    """The path that it answers with a status of 2xx; unset: an accepted connection is enough."""
