"""The actor of one node, which Ray runs with nothing but Ray and the standard library.

The node's processes are those of every other machine. They need an interpreter with Perdure, which may be another one
than Ray's. The actor holds the pipe that they read: they end with it, whatever ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from typing import Any

import ray
from ray.experimental import internal_kv

NODE_MODULE = "perdure.activities.nodes.ray.node"
CODE = "perdure/code/"
STARTED = "perdure/started/"
"""The prefix of the keys by which no incarnation runs twice: an actor's name is free again once it has ended."""


def _parts_of(archive: str) -> str:
    """Writes the parts of the job's code into a folder of this machine, which the node's processes remove."""
    keys = internal_kv._internal_kv_list(f"{CODE}{archive}/")
    if not keys:
        raise RuntimeError(
            "the job's code is not in Ray's tables, which a new head does not have; submit the job again"
        )
    folder = tempfile.mkdtemp(prefix="perdure-code-")
    try:
        for key in keys:
            with open(os.path.join(folder, key.decode().rpartition("/")[2]), "wb") as part:
                part.write(internal_kv._internal_kv_get(key))
    except BaseException:
        # A full disk: what was written would fill it for the next try.
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder


class Node:
    """Starts the node's processes, and ends with them."""

    def __init__(self, name: str, python: str, programs: str, rack_label: str, task: dict[str, Any]) -> None:
        if internal_kv._internal_kv_put(STARTED + name, b"", overwrite=False):
            raise RuntimeError(f"{name} has run before, and no incarnation of a node starts twice")
        context = ray.get_runtime_context()
        self._node_id = context.get_node_id()
        rack = context.get_node_labels().get(rack_label, "") if rack_label else ""
        machine = {
            "address": ray.util.get_node_ip_address(),
            "rack": rack if isinstance(rack, str) else ",".join(rack),
        }
        if archive := task.get("archive"):
            machine["parts"] = _parts_of(archive)
        reading, writing = os.pipe()
        command = [python or sys.executable, "-P", "-m", NODE_MODULE, str(writing)]
        # Ray's own workers find their cluster by these, and so does a script that uses Ray.
        environment = os.environ | {"RAY_ADDRESS": context.gcs_address}
        # This interpreter is that of the runtime environment, if that has one.
        first = programs or os.path.dirname(sys.executable)
        environment["PATH"] = os.pathsep.join((first, os.environ.get("PATH", os.defpath)))
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, pass_fds=(writing,), env=environment, start_new_session=True
        )
        # Ray's workers have a niceness of 15: on a machine that others use, too, the imports alone would take seconds.
        with contextlib.suppress(OSError):
            if os.getpriority(os.PRIO_PROCESS, 0) > 0:
                os.setpriority(os.PRIO_PROCESS, self._process.pid, 0)
        os.close(writing)
        self._ending = reading
        self._ended: asyncio.Task[dict[str, Any]] | None = None
        self._write({**task, "machine": machine})
        # Raylets have each of their processes collect garbage every 10 s. A collection of all that Ray has imported
        # takes tens of milliseconds, which is most of what an actor costs that only waits.
        gc.freeze()

    async def describe_node(self) -> dict[str, Any]:
        """Returns where the node runs; the answer tells that it has started."""
        return {"host": socket.gethostname(), "node_id": self._node_id}

    async def leave(self, reason: str, save: bool) -> None:
        """Has the node's command end, with the job's grace period."""
        self._write({"reason": reason, "save": save})

    async def wait(self) -> dict[str, Any]:
        """Returns how the node ended, once none of its processes runs.

        Each connection of the worker calls it, and those that have ended have left their calls: all get one answer.
        """
        if self._ended is None:
            self._ended = asyncio.create_task(asyncio.to_thread(self._wait))
        return await asyncio.shield(self._ended)

    def _wait(self) -> dict[str, Any]:
        with os.fdopen(self._ending, encoding="utf-8") as ending:
            text = ending.read()
        code = self._process.wait()
        return json.loads(text) if text else {"reason": f"its processes' parent exited with {code}"}

    def _write(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            # It has ended, which `wait` reports.
            pass
