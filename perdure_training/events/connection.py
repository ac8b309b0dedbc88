"""Posts to one address over a connection that stays open: a new one for each request costs more than the request."""

from __future__ import annotations

import base64
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from socket import socket
from typing import cast
from urllib.parse import SplitResult, unquote, urlsplit

_LONGEST_ANSWER = 1 << 16
_PORTS = {"http": 80, "https": 443}
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True)
class Answer:
    """What a server answered."""

    status: int
    retry_after: str
    """The header of this name; empty without one."""
    body: bytes


class Connection:
    """A connection to a server, through the proxy that the environment names, if any; used by one thread.

    Redirects are not followed: headers may have a credential, which is for the named address only.
    """

    def __init__(self, address: str, headers: Mapping[str, str], *, certificate: str | None = None) -> None:
        """Creates the object; the first request connects.

        Args:
            address: The whole address, with http:// or https://.
            headers: More headers of each request.
            certificate: A file with the authorities to trust; None for the system's.
        """
        self._address = address
        self._headers = headers
        self._certificate = certificate
        self._head = b""
        self._open: HTTPConnection | None = None

    def post(self, body: bytes, *, timeout: float) -> Answer:
        """Sends a request and reads the answer.

        Args:
            body: The content.
            timeout: Seconds for each step of the exchange.

        Raises:
            OSError: if there is no answer, or none of HTTP.
            ValueError: if the address, the certificate or a header cannot be used.
        """
        try:
            if self._open is not None:
                try:
                    return self._exchange(self._open, body, timeout)
                except (ConnectionError, HTTPException, ssl.SSLError):
                    # Servers end connections over which nothing was sent for a while.
                    pass
            self._open = self._connect()
            return self._exchange(self._open, body, timeout)
        except HTTPException as error:
            raise OSError(f"{type(error).__name__}: {error}") from None

    def close(self) -> None:
        """Ends the connection; a later request connects again."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def forget(self) -> None:
        """Leaves the connection to the process that this one was forked from."""
        self._open = None

    def _exchange(self, over: HTTPConnection, body: bytes, timeout: float) -> Answer:
        complete = False
        try:
            if over.sock is None:
                over.timeout = timeout
                over.connect()
            sock = cast("socket", over.sock)
            # At once: http.client itself sends the body by a second call of the system.
            sock.settimeout(timeout)
            sock.sendall(b"%bContent-Length: %d\r\n\r\n%b" % (self._head, len(body), body))
            with HTTPResponse(sock, method="POST") as response:
                response.begin()
                content = response.read(_LONGEST_ANSWER)
                # Unread bytes of this response would be parsed as the next one.
                complete = response.isclosed() and not response.will_close
                return Answer(response.status, response.headers.get("Retry-After", ""), content)
        finally:
            if not complete:
                self.close()

    def _connect(self) -> HTTPConnection:
        """Creates the connection; it connects with the request."""
        from urllib.request import getproxies, proxy_bypass

        address = urlsplit(self._address)
        host = address.hostname or ""
        port = address.port or _PORTS[address.scheme]
        own = address.netloc.rpartition("@")[2]
        path = (address.path or "/") + (f"?{address.query}" if address.query else "")
        proxy = None if proxy_bypass(host) else getproxies().get(address.scheme)
        via = urlsplit(proxy if "://" in proxy else f"http://{proxy}") if proxy else None
        first = (via.hostname or "", via.port or _PORTS["http"]) if via else (host, port)
        if address.scheme == "https":
            made = HTTPSConnection(*first, context=ssl.create_default_context(cafile=self._certificate))
            if via:
                made.set_tunnel(host, port, _authorization(via))
            self._head = _head(path, {"Host": own, **self._headers})
            return made
        target = f"http://{own}{path}" if via else path
        self._head = _head(target, {"Host": own, **self._headers, **(_authorization(via) if via else {})})
        return HTTPConnection(*first)


def _head(target: str, headers: Mapping[str, str]) -> bytes:
    """The request line and the headers, but for the length.

    Raises:
        ValueError: if one of them would begin another line.
    """
    lines = f"POST {target} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())
    for line in lines:
        if _CONTROL.search(line):
            raise ValueError(f"a header or the address has control characters: {line.partition(':')[0]!r}")
    return "".join(f"{line}\r\n" for line in lines).encode("latin-1", errors="replace")


def _authorization(proxy: SplitResult) -> dict[str, str]:
    if proxy.username is None:
        return {}
    words = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
    return {"Proxy-Authorization": f"Basic {base64.b64encode(words.encode()).decode()}"}
