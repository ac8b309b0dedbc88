"""The certificates that the gateway shows: one of its own authority, and the site's, where it has one.

Agents in pods expect the gateway's own name and trust its own authority only. The site's certificate is for machines
outside, which call the gateway by its public name. The name that a caller asks for (SNI) decides which one it is shown,
so neither needs to change for the other.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from perdure.base.credentials.certificates import GATEWAY_LIFETIME, Authority, Certificate

logger = logging.getLogger("perdure.gateway")

_RENEWED_AFTER: Final = GATEWAY_LIFETIME.total_seconds() / 2


class CertificateInvalid(Exception):
    """The site's certificate cannot be used; the message names the file."""


@dataclass(frozen=True, kw_only=True)
class SiteCertificate:
    """The files of the site's certificate, which something else renews."""

    certificate: Path
    """The certificate and those of intermediate authorities, in PEM."""
    private_key: Path

    def read(self) -> Certificate:
        """Returns the content.

        Raises:
            CertificateInvalid: if a file cannot be read, or they do not belong together.
        """
        try:
            found = Certificate(self.certificate.read_bytes(), self.private_key.read_bytes())
        except OSError as error:
            raise CertificateInvalid(f"{error.filename} cannot be read: {error.strerror}") from error
        try:
            certificate = x509.load_pem_x509_certificate(found.certificate)
        except ValueError:
            raise CertificateInvalid(f"{self.certificate} is not a certificate in PEM") from None
        try:
            key = serialization.load_pem_private_key(found.private_key, password=None)
        except (ValueError, TypeError):
            raise CertificateInvalid(f"{self.private_key} is not a private key in PEM without a password") from None
        if certificate.public_key() != key.public_key():
            raise CertificateInvalid(f"{self.private_key} is not the key of {self.certificate}")
        return found

    def version(self) -> tuple[object, ...]:
        """Returns a value that changes whenever a file is replaced."""
        found: list[object] = []
        for path in (self.certificate, self.private_key):
            try:
                state = path.stat()
            except OSError:
                found.append(None)
            else:
                found.append((state.st_ino, state.st_mtime_ns, state.st_size))
        return tuple(found)


class ServerCertificates:
    """Looks at each connection for newer certificates.

    Invariant: a site's certificate that cannot be used replaces no usable one.
    """

    def __init__(self, authority: Authority, site: SiteCertificate | None = None) -> None:
        """Reads and issues the first certificates.

        Args:
            authority: Issues the gateway's own.
            site: The site's.

        Raises:
            CertificateInvalid: if the site's cannot be used.
        """
        self._authority = authority
        self._site = site
        self._version = site.version() if site else ()
        self._sites_own = site.read() if site else None
        self._issue()

    def credentials(self) -> grpc.ServerCredentials:
        """Returns credentials for a server."""
        return grpc.dynamic_ssl_server_credentials(
            self._configuration(), self.newer, require_client_authentication=False
        )

    def newer(self) -> Any:
        """Returns the configuration for the next connections; None if it is as before."""
        issued, read = self._issue_if_due(), self._read_if_changed()
        return self._configuration() if issued or read else None

    def _configuration(self) -> Any:
        # A caller that asks for no name, or for another one, gets the first certificate.
        pairs = [self._own] + ([self._sites_own] if self._sites_own else [])
        return grpc.ssl_server_certificate_configuration([(one.private_key, one.certificate) for one in pairs])

    def _issue(self) -> None:
        self._own, self._issued_at = self._authority.issue(), time.monotonic()

    def _issue_if_due(self) -> bool:
        due = time.monotonic() - self._issued_at > _RENEWED_AFTER
        if due:
            self._issue()
        return due

    def _read_if_changed(self) -> bool:
        if self._site is None or (version := self._site.version()) == self._version:
            return False
        self._version = version
        try:
            self._sites_own = self._site.read()
        except CertificateInvalid as error:
            logger.error("the site's certificate stays as it was: %s", error)
            return False
        logger.info("the site's certificate was replaced")
        return True
