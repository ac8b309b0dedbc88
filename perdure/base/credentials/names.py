"""Names on which gateways and agents agree."""

from __future__ import annotations

from typing import Final

GATEWAY_NAME: Final = "perdure-gateway.internal"
"""The name in the certificate of every gateway. `internal` is reserved for private use, so no one else can own it."""
GRANT_HEADER: Final = "perdure-grant"
"""The header of gRPC calls that carries the grant."""
TOKEN_HEADER: Final = "authorization"
"""The header that carries the token of the pod's service account, or the machine's own, after `Bearer`."""
TICKET_HEADER: Final = "perdure-ticket"
"""The header that carries the secret of a ticket, in calls of machines that join."""
MACHINES_SERVICE: Final = "perdure.gateway.v1.Machines"
"""The gateway's own service, for machines that join: JSON in gRPC."""
JOIN, LEAVE, RESULT = "Join", "Leave", "Result"
"""Its methods."""
AUDIENCE: Final = "perdure-gateway"
"""The audience of these tokens, by which the API server itself refuses them."""
