"""The file that admits machines to a job through the gateway: its owner makes it and gives it to them."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from pydantic import BaseModel, ConfigDict, SecretStr, ValidationError, field_serializer

from perdure.base.credentials.names import GATEWAY_NAME
from perdure.base.errors import PerdureError
from perdure.base.files import write_private_file

_REMEDY = "`perdure ticket NAME` makes one, where Temporal is reachable."


def gateway_address(text: str) -> str:
    """Reads the address of a gateway: HOST:PORT, or https://HOST:PORT.

    Raises:
        PerdureError: if it is neither.
    """
    address = text.strip().removeprefix("https://").removesuffix("/")
    host, _, port = address.rpartition(":")
    if not host or "/" in address or not port.isdecimal() or not 0 < int(port) < 65536:
        raise PerdureError(
            f'--gateway: got "{text}"; expected HOST:PORT', remedy="For example gateway.example.org:7433."
        )
    return address


class TicketFile(BaseModel):
    """Everything that a machine needs to join."""

    model_config = ConfigDict(frozen=True, extra="ignore", hide_input_in_errors=True)

    job: str
    namespace: str
    id: str
    secret: SecretStr
    nodes: int
    expires_at: datetime
    gateway: str = ""
    """Host and port; empty: the command line must name it."""
    authority: str
    """The certificate, in PEM, of the authority that issues the gateway's certificate."""
    server_name: str = GATEWAY_NAME
    """The name in that certificate."""

    @field_serializer("secret", when_used="json")
    def _write_secret(self, secret: SecretStr) -> str:
        return secret.get_secret_value()

    def write(self, path: Path) -> None:
        """Writes the file, which only its owner can read.

        Raises:
            PerdureError: if it cannot be written.
        """
        try:
            write_private_file(path, f"{self.model_dump_json(indent=1)}\n".encode())
        except OSError as error:
            raise PerdureError(
                f"the ticket {path} cannot be written: {error.strerror}", remedy="Name another file with --file."
            ) from error

    @classmethod
    def read(cls, path: Path) -> TicketFile:
        """Reads the file.

        Raises:
            PerdureError: if it cannot be read or is not a ticket.
        """
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise PerdureError(f"the ticket {path} cannot be read: {error.strerror}", remedy=_REMEDY) from error
        except ValidationError as error:
            problem = error.errors()[0]
            field = ".".join(map(str, problem["loc"])) or "content"
            raise PerdureError(f"{path} is not a ticket: {field}: {problem['msg']}", remedy=_REMEDY) from None
