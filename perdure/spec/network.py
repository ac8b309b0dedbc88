"""The network between a job's nodes, for sites whose network does not let everything pass."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

from .base import Matching, Section

FEWEST_PORTS = 8
"""The fewest ports that a range may have: a node holds several at a time, and a generation must not reuse the port of
the one before."""


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
"""A range of ports, both ends included."""


def read_ports(text: str) -> range:
    """The ports of a `PortRange`."""
    first, last = (int(number) for number in re.findall(r"\d+", text))
    return range(first, last + 1)


class Network(Section):
    """The network between nodes."""

    store_ports: PortRange | None = None
    """The ports that the store of a world may listen on, such as `29500-29599`, for a firewall between nodes; unset:
    any free ports. Each generation takes the next port, and nodes on the same machine share the range. The ranks' own
    connections (gloo, NCCL) use ports that the system chooses."""
