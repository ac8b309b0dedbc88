"""Reads the metrics of this machine's nodes from their agents' sockets, for the worker that serves all at one port.

Nodes of one machine would need a port each, which any web page could try. Only their user can open the sockets.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

import aiohttp

from perdure.activities.nodes.local.folders import NodeFolder, NodeFolders
from perdure_training.node_api.layout import AGENT_SOCKET

logger = logging.getLogger(__name__)

_PATIENCE: Final = aiohttp.ClientTimeout(total=4.0)
_MOST_NODES: Final = 256
"""Nodes that are read, at most; a machine runs far fewer."""
_LARGEST: Final = 4 * 1024 * 1024
"""Bytes of one answer, at most."""


async def node_metrics(folders: NodeFolders) -> tuple[Sequence[bytes], int]:
    """Returns the metrics of the nodes that run, and the number of those that did not answer."""
    nodes = await asyncio.to_thread(folders.running_nodes)
    answers = await asyncio.gather(*(_read(node) for node in nodes[:_MOST_NODES]))
    texts = [answer for answer in answers if answer is not None]
    return texts, len(answers) - len(texts)


async def _read(node: NodeFolder) -> bytes | None:
    try:
        connector = aiohttp.UnixConnector(str(node.run_dir / AGENT_SOCKET))
        async with (
            aiohttp.ClientSession(connector=connector, timeout=_PATIENCE) as session,
            session.get("http://node/metrics") as answer,
        ):
            answer.raise_for_status()
            content = await answer.content.read(_LARGEST)
            while content and (more := await answer.content.read(_LARGEST - len(content))):
                content += more
            return content
    except (aiohttp.ClientError, OSError) as error:
        logger.info("%s did not return its metrics: %s", node.name, error or type(error).__name__)
        return None
