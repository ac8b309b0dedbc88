"""The worker's side of the process that talks to Ray: each call has a deadline, after which that process is ended."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import pwd
import re
import signal
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
_KEPT: Final = re.compile(
    r"PATH|HOME|USER|LOGNAME|LANG|LC_\w+|TZ|TMPDIR|LD_LIBRARY_PATH|PYTHON\w+|RAY_\w+|GRPC_\w+|SSL_CERT_\w+|"
    r"(?i:https?|no|all)_(?i:proxy)"
)
"""The worker's variables that the process gets: those that Ray and its connections need. Jobs of the cluster may run
code in it, and all others may be credentials."""
_CLOSES: Final = 5.0
"""Seconds in which what the process wrote is read to the end. Code of the cluster's jobs may have started others in it,
which hold its pipes open."""
_TAIL: Final = 400
"""Characters of the process's last words, which say why it has ended."""


class RayUnavailable(Exception):
    """The cluster does not answer; a later call may succeed."""


class RayConnection:
    """The process that talks to one Ray cluster. It is started when it is needed, and again after it has ended."""

    def __init__(self, *, address: str, namespace: str, python: str, user: str = "") -> None:
        """Connects at the first call.

        Args:
            address: of the cluster, as `ray.init` takes it.
            namespace: Ray's namespace of the actors.
            python: the interpreter that has Ray.
            user: as whom the process runs; empty: the worker's own.
        """
        self._address = address
        self._command = (python, "-P", str(Path(__file__).with_name("bridge.py")), address, namespace)
        self._user = user
        self._starting = asyncio.Lock()
        self._refusals = 0
        """How often no connection was had."""
        self._refusal: RayUnavailable | NodeRefused | None = None
        """Why the last one was not."""
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
            NodeRefused: if the process cannot start or Ray of another version runs there, or what the node asks of Ray
                cannot be had.
            NodeNotYet: if a node has to wait.
            RayUnavailable: if there is no answer in time.
        """
        process, calls = await self._connected()
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
            case "WrongEnvironment":
                raise NodeRefused(f"Ray takes no such ray.runtime_env: {' '.join(answer['error'].split())}")
            case "NotYet":
                raise NodeNotYet(answer["error"])
            case "RuntimeError" if "mismatch" in answer["error"]:
                words = " ".join(str(answer["error"]).split())
                raise NodeRefused(
                    f"the Ray cluster at {self._address} and the worker differ: {words}; set PERDURE_RAY_PYTHON to an "
                    "interpreter with the cluster's versions"
                )
            case "Ended" if "No module named 'ray'" in answer["error"]:
                raise NodeRefused(
                    f"{self._command[0]} has no Ray; install Ray of the cluster's version there, or set "
                    "PERDURE_RAY_PYTHON to an interpreter that has it"
                )
            case kind:
                raise RayUnavailable(f"the Ray cluster at {self._address}: {answer['error'] or kind}")

    def _silent(self, seconds: float) -> RayUnavailable:
        return RayUnavailable(f"the Ray cluster at {self._address} did not answer within {seconds:.0f} s")

    async def _connected(self) -> tuple[asyncio.subprocess.Process, dict[int, asyncio.Future[Mapping[str, Any]]]]:
        """Returns the process, and the calls that wait for its answers: one that has ended fails its own calls only.

        Those that wait for one try to connect share its outcome: no call waits for more than one.
        """
        refusals = self._refusals
        async with self._starting:
            if self._refusal is not None and self._refusals != refusals:
                raise type(self._refusal)(str(self._refusal))
            try:
                return await self._running(), self._waiting
            except (RayUnavailable, NodeRefused) as error:
                self._refusals += 1
                self._refusal = error
                raise

    async def _running(self) -> asyncio.subprocess.Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        kept = {name: value for name, value in os.environ.items() if _KEPT.fullmatch(name)}
        identity: dict[str, Any] = {}
        if self._user:
            them = pwd.getpwnam(self._user)
            kept |= {"HOME": them.pw_dir, "USER": them.pw_name, "LOGNAME": them.pw_name}
            groups = os.getgrouplist(them.pw_name, them.pw_gid)
            if os.geteuid() != them.pw_uid:
                identity = {"user": them.pw_uid, "group": them.pw_gid, "extra_groups": groups}
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=kept,
                **identity,
                limit=_LINE,
                # A terminal's Ctrl-C is for the worker.
                start_new_session=True,
            )
        except OSError as error:
            raise NodeRefused(
                f"the process that talks to Ray cannot be started: {error}; set PERDURE_RAY_PYTHON to an interpreter "
                "with Ray" + (f" that {self._user} reaches" if self._user else "")
            ) from error
        hello = asyncio.get_running_loop().create_future()
        self._waiting = {0: hello}
        self._reading = asyncio.create_task(self._read(process, self._waiting))
        try:
            async with asyncio.timeout(_CONNECTS):
                version = self._result(await hello)
        except TimeoutError as error:
            self._end(process)
            raise self._silent(_CONNECTS) from error
        except asyncio.CancelledError:
            # The next call starts another one.
            self._end(process)
            raise
        logger.info("connected to the Ray cluster at %s, version %s", self._address, version)
        self._process = process
        return process

    async def _read(
        self, process: asyncio.subprocess.Process, calls: Mapping[int, asyncio.Future[Mapping[str, Any]]]
    ) -> None:
        """Hands answers to those that wait for them, until the process has ended."""
        assert process.stdout is not None
        assert process.stderr is not None
        words = asyncio.create_task(_last_of(process.stderr))
        try:
            while line := await process.stdout.readline():
                content: Mapping[str, Any] = json.loads(line)
                waiting = calls.get(content["id"])
                if waiting is not None and not waiting.done():
                    waiting.set_result(content)
        except (ValueError, KeyError, TypeError) as error:
            # Jobs of the cluster may run code in it.
            logger.warning("the process that talks to Ray wrote no answer, and is ended: %r", error)
            self._end(process)
            await _last_of(process.stdout)
        await process.wait()
        last = await words
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
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CLOSES):
                    await self._reading

    def _end(self, process: asyncio.subprocess.Process) -> None:
        """Ends the process, with all that it has started in its session."""
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        if self._process is process:
            self._process = None


async def _last_of(stream: asyncio.StreamReader) -> str:
    """Reads to the end, and returns the last characters."""
    last = b""
    while read := await stream.read(65536):
        last = (last + read)[-4 * _TAIL :]
    return last.decode(errors="replace").strip()[-_TAIL:]
