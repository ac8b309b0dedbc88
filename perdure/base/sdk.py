"""Imports Temporal's SDK without grpcio, for processes that reach a server through the SDK's own core.

The SDK's generated code imports grpcio wherever it is installed, for stubs that nothing here uses: a tenth of a second,
and 11 MB of each agent. Import this module before the SDK. What needs grpcio itself imports it as before.
"""

from __future__ import annotations

import sys
from typing import Any, cast

_modules = cast("dict[str, Any]", sys.modules)
_hidden = _modules.setdefault("grpc", None) is None
try:
    import temporalio.client
    import temporalio.worker  # noqa: F401
finally:
    if _hidden:
        del _modules["grpc"]
