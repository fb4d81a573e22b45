"""Which servers a client trusts over TLS, and what it shows those that want to know it."""

import re
import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from ..errors import ConfigError

_CERTIFICATE = re.compile("-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsTrust:
    """Files in PEM: who signs the server's certificate, and who the client is."""

    ca_file: str = ""  # trusted instead of the system's authorities; "": these
    certificate: str = ""  # shown to a server that wants one (`server.tls.client_ca`) …
    key: str = ""  # … with its key; "": in the same file
    # The first certificate in `ca_file` is the server's own: it alone is trusted, and may name
    # any host. For programs beside the server, which ask for 127.0.0.1.
    own: bool = False

    def context(self) -> ssl.SSLContext:
        """For HTTP and WebSocket; ConfigError: a file cannot be used."""
        try:
            if self.own:
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
                context.check_hostname = False
                context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
                context.load_verify_locations(cadata=first_certificate(self.ca_file))
            else:
                context = ssl.create_default_context(cafile=self.ca_file or None)
            if self.certificate:
                context.load_cert_chain(self.certificate, self.key or None, password="")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"the client's TLS files cannot be used: {error}",
                hint="ca_file, certificate and key must be files in PEM; the key without a "
                "password.",
            ) from error
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        return context

    def credentials(self) -> grpc.ChannelCredentials:
        """For gRPC; ConfigError: a file cannot be used."""
        try:
            chain = Path(self.certificate).read_bytes() if self.certificate else None
            key = Path(self.key or self.certificate).read_bytes() if chain else None
            roots = Path(self.ca_file).read_bytes() if self.ca_file else None
        except OSError as error:
            raise ConfigError(f"a TLS file of the client cannot be read: {error}") from error
        return grpc.ssl_channel_credentials(roots, key, chain)


def first_certificate(file: str) -> str:
    """The first certificate in a file: where there is a chain, that of whom it is for."""
    found = _CERTIFICATE.search(Path(file).read_text())
    if found is None:
        raise ValueError(f"there is no certificate in {file}")
    return found[0]
