"""How the nodes of a job reach each other, where a network does not let everything pass."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

from .base import Matching, Section

FEWEST_PORTS = 8
"""A node holds several at a time, and a generation must not meet the port of the one before."""


def _is_port_range(text: str) -> str:
    ports = read_ports(text)
    if ports.start < 1 or ports.stop > 65536:
        raise ValueError("expected ports from 1 to 65535")
    if len(ports) < FEWEST_PORTS:
        raise ValueError(f"names {len(ports)} ports; expected at least {FEWEST_PORTS}, the lower end first")
    return text


PortRange = Annotated[
    str,
    Matching(pattern=r"[0-9]{1,5}-[0-9]{1,5}", expected="a range of ports such as 29500-29599"),
    AfterValidator(_is_port_range),
]
"""Ports from one to another, both included."""


def read_ports(text: str) -> range:
    """The ports of a `PortRange`."""
    first, last = (int(number) for number in re.findall(r"\d+", text))
    return range(first, last + 1)


class Network(Section):
    """How nodes reach each other."""

    store_ports: PortRange | None = None
    """The ports that the store of a world may listen on, such as `29500-29599`, where a firewall stands between nodes;
    unset: any free ports. Each generation takes the next one, and nodes that share a machine share them. The
    ranks' own connections (gloo, NCCL) take ports as the system gives them out."""
