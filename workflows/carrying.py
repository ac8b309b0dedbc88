"""Packs the state that a run hands to the next one when it continues as new, to keep it far below the server's limit.

The server takes no command whose arguments exceed 2 MB: the workflow task fails, is handed out again and fails again,
and the workflow decides nothing anymore. A small value rides as plain JSON, which the Temporal UI shows; a larger one
is compressed. Nodes repeat the same keys and words, so their JSON shrinks to a tenth and less.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from typing import Literal, TypeVar
from zlib import compress, decompress

from perdure.contract import Message

LARGEST_PLAIN = 256 * 1024
"""Bytes of JSON that ride uncompressed: about 300 nodes. The server warns from 512 KB on."""

_Carried = TypeVar("_Carried", bound=Message)


class Packed(Message):
    """A message as compressed JSON."""

    encoding: Literal["zlib+base64"]
    """The encoding of `packed_json`. A release that does not know it fails the workflow task, which a newer release
    takes."""
    packed_json: str


def pack(message: _Carried) -> _Carried | Packed:
    """Returns the message itself where it is small, else its compressed form."""
    content = message.model_dump_json().encode()
    if len(content) <= LARGEST_PLAIN:
        return message
    return Packed(encoding="zlib+base64", packed_json=b64encode(compress(content)).decode())


def unpack(carried: _Carried | Packed, kind: type[_Carried]) -> _Carried:
    """Returns the message that was given to `pack`."""
    if isinstance(carried, Packed):
        return kind.model_validate_json(decompress(b64decode(carried.packed_json)))
    return carried
