"""Names on which gateways and agents agree."""

from __future__ import annotations

from typing import Final

GATEWAY_NAME: Final = "perdure-gateway.internal"
"""The name in the certificate of every gateway. `internal` is reserved for private use, so no one else can own it."""
GRANT_HEADER: Final = "perdure-grant"
"""The header of gRPC calls that carries the grant."""
TOKEN_HEADER: Final = "authorization"
"""The header that carries the pod's service account token, after `Bearer`."""
AUDIENCE: Final = "perdure-gateway"
"""The audience of these tokens, by which the API server itself refuses them."""
