"""The worker's side of the process that talks to Ray: each call has a deadline, after which that process is ended."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from perdure.activities.nodes.backend import NodeNotYet, NodeRefused

logger = logging.getLogger(__name__)

_CONNECTS: Final = 30.0
"""Seconds for starting the process and connecting."""
_CALL: Final = 30.0
"""Seconds for a call that changes or reads Ray's tables."""
_LINE: Final = 2**26
_TAIL: Final = 400
"""Characters of the process's last words, which say why it has ended."""


class RayUnavailable(Exception):
    """The cluster does not answer; a later call may succeed."""


class RayConnection:
    """The process that talks to one Ray cluster. It is started when it is needed, and again after it has ended."""

    def __init__(self, *, address: str, namespace: str, python: str) -> None:
        """Connects at the first call.

        Args:
            address: of the cluster, as `ray.init` takes it.
            namespace: Ray's namespace of the actors.
            python: the interpreter that has Ray.
        """
        self._address = address
        self._command = (python, "-P", str(Path(__file__).with_name("bridge.py")), address, namespace)
        self._starting = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Mapping[str, Any]]] = {}

    async def call(self, method: str, *, lasts: float = 0.0, **arguments: Any) -> Any:
        """Calls a method of the bridge.

        Args:
            method: its name.
            lasts: seconds that the call may take in addition to what any call may.
            arguments: of the method.

        Raises:
            NodeRefused: if Ray of another version runs there, or the node's name belongs to another actor.
            NodeNotYet: if a node has to wait.
            RayUnavailable: if there is no answer in time.
        """
        async with self._starting:
            process = await self._running()
            # A process that has ended fails its own calls only.
            calls = self._waiting
        number = next(self._numbers)
        answer = calls[number] = asyncio.get_running_loop().create_future()
        try:
            assert process.stdin is not None
            process.stdin.write(json.dumps({"id": number, "call": method, **arguments}).encode() + b"\n")
            async with asyncio.timeout(_CALL + lasts):
                await process.stdin.drain()
                return self._result(await answer)
        except (TimeoutError, ConnectionError) as error:
            self._end(process)
            raise self._silent(_CALL + lasts) from error
        finally:
            calls.pop(number, None)

    def _result(self, answer: Mapping[str, Any]) -> Any:
        match answer.get("kind"):
            case None:
                return answer["result"]
            case "ForeignActor":
                raise NodeRefused(f"{answer['error']}; remove it, or give the job another name")
            case "NotYet":
                raise NodeNotYet(answer["error"])
            case "RuntimeError" if "mismatch" in answer["error"]:
                words = " ".join(str(answer["error"]).split())
                raise NodeRefused(
                    f"the Ray cluster at {self._address} and the worker differ: {words}; set PERDURE_RAY_PYTHON to an "
                    "interpreter with the cluster's versions"
                )
            case kind:
                raise RayUnavailable(f"the Ray cluster at {self._address}: {answer['error'] or kind}")

    def _silent(self, seconds: float) -> RayUnavailable:
        return RayUnavailable(f"the Ray cluster at {self._address} did not answer within {seconds:.0f} s")

    async def _running(self) -> asyncio.subprocess.Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        # The process runs Ray's code on what the cluster sends: it gets none of the worker's credentials.
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("TEMPORAL_", "PERDURE_"))}
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=kept,
            limit=_LINE,
            # A terminal's Ctrl-C is for the worker.
            start_new_session=True,
        )
        hello = asyncio.get_running_loop().create_future()
        self._waiting = {0: hello}
        self._reading = asyncio.create_task(self._read(process, self._waiting))
        try:
            async with asyncio.timeout(_CONNECTS):
                version = self._result(await hello)
        except TimeoutError as error:
            self._end(process)
            raise self._silent(_CONNECTS) from error
        logger.info("connected to the Ray cluster at %s, version %s", self._address, version)
        self._process = process
        return process

    async def _read(
        self, process: asyncio.subprocess.Process, calls: Mapping[int, asyncio.Future[Mapping[str, Any]]]
    ) -> None:
        """Hands answers to those that wait for them, until the process has ended."""
        assert process.stdout is not None
        assert process.stderr is not None
        words = asyncio.create_task(process.stderr.read())
        while line := await process.stdout.readline():
            content: Mapping[str, Any] = json.loads(line)
            waiting = calls.get(content["id"])
            if waiting is not None and not waiting.done():
                waiting.set_result(content)
        await process.wait()
        last = (await words).decode(errors="replace").strip()[-_TAIL:]
        if self._process is process:
            self._process = None
            logger.warning("the connection to the Ray cluster at %s has ended: %s", self._address, last)
        for waiting in calls.values():
            if not waiting.done():
                waiting.set_result({"kind": "Ended", "error": f"the connection has ended: {last}"})

    async def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._end(self._process)
        if self._reading is not None:
            await self._reading

    def _end(self, process: asyncio.subprocess.Process) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        if self._process is process:
            self._process = None
