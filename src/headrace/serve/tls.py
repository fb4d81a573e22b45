"""TLS of the server: its certificate, read again when the files change.

Connections that are open keep what they agreed on; the next ones get what is new.
"""

import asyncio
import logging
import ssl
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import grpc

from ..client.trust import first_certificate
from ..config.settings import TlsSection
from ..errors import ConfigError

logger = logging.getLogger(__name__)

LOOK_SECONDS = 2.0  # between two looks at the files

_READABLE_BY_OTHERS = 0o007


class TlsVersion(NamedTuple):
    """What the files held at one time."""

    context: ssl.SSLContext
    grpc: grpc.ServerCertificateConfiguration


class CertificateFiles:
    """The certificate, the key and the clients' authority of the config."""

    def __init__(self, settings: TlsSection) -> None:
        """Read them; ConfigError says which cannot be used."""
        self.settings = settings
        self._stamp = self._stamped()
        self._unusable: tuple[object, ...] = ()  # the last ones that could not be used
        self._version = self._read()
        self._warn()

    def context(self) -> ssl.SSLContext:
        """What the next connection is served with."""
        return self._version.context

    def credentials(self) -> grpc.ServerCredentials:
        """The same for gRPC, which looks at each handshake."""
        return grpc.dynamic_ssl_server_credentials(
            self._version.grpc,
            lambda: self._version.grpc,
            require_client_authentication=self.settings.client_ca is not None,
        )

    async def watch(self) -> None:
        """Read the files again whenever they change, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await asyncio.to_thread(self.refresh)

    def refresh(self) -> None:
        """Read the files again if they changed; what cannot be used leaves all as it was."""
        stamp = self._stamped()
        if stamp == self._stamp:
            return
        try:
            self._version = self._read()
        except ConfigError as error:
            # It is read again at the next look: the pair may be written in two steps.
            if stamp != self._unusable:
                logger.error("tls not reloaded, the former certificate is used error=%s", error)
            self._unusable = stamp
            return
        self._stamp = stamp
        logger.info("tls reloaded certificate=%s", self.settings.certificate)
        self._warn()

    def _stamped(self) -> tuple[object, ...]:
        stamps = []
        for path in filter(None, (*self._pair, self.settings.client_ca)):
            try:
                status = path.stat()
                stamps.append((status.st_mtime_ns, status.st_ino, status.st_size))
            except OSError:
                stamps.append((0, 0, 0))
        return tuple(stamps)

    @property
    def _pair(self) -> tuple[Path, Path]:
        return self.settings.certificate, self.settings.key or self.settings.certificate

    def _read(self) -> TlsVersion:
        certificate, key = self._pair
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            # A key with a password would otherwise be asked for at the terminal.
            context.load_cert_chain(certificate, key, password="")
            pair = [(key.read_bytes(), certificate.read_bytes())]
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"server.tls.certificate {certificate} and server.tls.key {key} cannot be used: "
                f"{error}",
                hint="Both must be files in PEM that this user may read: the certificate with "
                "its chain, and its key without a password.",
            ) from error
        roots = self._trust_clients(context)
        return TlsVersion(context, grpc.ssl_server_certificate_configuration(pair, roots))

    def _trust_clients(self, context: ssl.SSLContext) -> bytes | None:
        authority = self.settings.client_ca
        if authority is None:
            return None
        try:
            context.load_verify_locations(authority)
            # This machine's own commands show the server's certificate.
            context.load_verify_locations(cadata=first_certificate(str(self.settings.certificate)))
            roots = authority.read_bytes()
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"server.tls.client_ca {authority} cannot be used: {error}",
                hint="It must be a file of certificates in PEM that this user may read.",
            ) from error
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        context.verify_mode = ssl.CERT_REQUIRED
        return roots

    def _warn(self) -> None:
        key = self._pair[1]
        with suppress(OSError):  # replaced just now, which the next look finds
            if key.stat().st_mode & _READABLE_BY_OTHERS:
                logger.warning(
                    "tls key=%s can be read by every user of this machine; `chmod o-rwx %s` ends "
                    "that",
                    key,
                    key,
                )
