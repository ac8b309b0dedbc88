"""The JSON Schema of the bodies of notifications, from their model."""

from __future__ import annotations

import json

from perdure.contract import NotificationBody
from perdure.spec.schema import DIALECT, plain_schema


def schema() -> str:
    """Returns the file's content."""
    described = plain_schema(NotificationBody, mode="serialization")
    document = {"$schema": DIALECT, "title": "A notification of Perdure, version 1", **described}
    return json.dumps(document, indent=2) + "\n"
