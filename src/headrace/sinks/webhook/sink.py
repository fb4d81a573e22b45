"""Every change posted to an endpoint, signed, alone or in batches."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import unquote_plus

import msgspec

from ...errors import ConfigError, SinkUnavailable
from ...formats.signature import STANDARD_SECRET, standard_key
from ...plugins import Finding
from ...secret import Secret
from ..push import Policy, PushSettings, client_context
from .address import Endpoint, endpoint
from .channel import HttpChannel, RequestLimits
from .pool import ConnectionPool, EndpointUnreachable
from .request import JSON, RequestEncoder, expect_headers, expect_secret
from .response import SecretMask


@dataclass(frozen=True, slots=True, kw_only=True)
class Webhook(PushSettings):
    """Events posted to an https endpoint, with Savegress's headers and those of Standard Webhooks.

    A response of 2xx accepts what was posted, 410 halts the sink, 429 pauses it; 408, 425, 5xx and
    no response are retried; anything else is a refusal. A refused batch is split until the events
    are found that it was refused for.
    """

    url: Secret  # its path may be all that protects it
    secret: Secret | None = None  # what signs; None: nothing is signed
    previous_secret: Secret | None = None  # signs too, until every receiver knows the new one
    headers: Mapping[str, Secret] = field(default_factory=dict)
    batch: bool = False  # whether events are posted together, up to batch_size of them
    concurrency: int = 16  # requests at once, of a task; those of one row follow each other
    timeout_seconds: float = 30.0  # for a request and its response
    allow_private_networks: bool = False  # also http://, and any address
    ca_file: str = ""  # certificates to trust instead of the system's

    def __post_init__(self) -> None:
        PushSettings.__post_init__(self)
        self._endpoint()
        expect_headers(self.headers)
        expect_secret("secret", self.secret)
        expect_secret("previous_secret", self.previous_secret)
        if self.previous_secret is not None and self.secret is None:
            raise ConfigError("previous_secret is set and secret is not; set the new one there")
        if not 1 <= self.concurrency <= 1000:
            raise ConfigError(f"concurrency must be from 1 to 1000, not {self.concurrency}")
        if not 0 < self.timeout_seconds <= 600:
            raise ConfigError(
                f"timeout_seconds must be above 0, up to 600, not {self.timeout_seconds:g}"
            )

    def _endpoint(self) -> Endpoint:
        return endpoint(self.url.reveal(), private=self.allow_private_networks)

    @property
    def address(self) -> str:
        """The url."""
        return self.url.reveal()

    @property
    def policy(self) -> Policy:
        """A window holds a batch for each request that may be on its way."""
        plain = super(Webhook, self).policy  # super() does not know slots
        if not self.batch:
            return plain
        return msgspec.structs.replace(
            plain,
            batch_size=self.batch_size * self.concurrency,
            batch_bytes=self.batch_bytes * self.concurrency,
        )

    def connect(self) -> HttpChannel:
        """Open the endpoint; a connection is made when there is something to post."""
        place = self._endpoint()
        secrets = [each for each in (self.secret, self.previous_secret) if each is not None]
        media_type = JSON if self.batch else self.formats.named(self.format).media_type
        return HttpChannel(
            place,
            RequestEncoder(place, media_type, secrets=secrets, headers=self.headers),
            RequestLimits(
                self.concurrency,
                self.timeout_seconds,
                self.policy.schedule,
                self.batch_size if self.batch else 0,
                self.batch_bytes,
            ),
            tls=self._tls() if place.tls else None,
            private=self.allow_private_networks,
            mask=self._mask(place, secrets),
        )

    def _check_connection(self) -> Finding:
        place = self._endpoint()
        with asyncio.Runner() as runner:
            runner.run(self._reach(place))
        what = "connects, and its certificate is trusted" if place.tls else "connects"
        return Finding("connection", ok=True, detail=f"{place.origin} {what}")

    async def _reach(self, place: Endpoint) -> None:
        loop, tls = asyncio.get_running_loop(), self._tls() if place.tls else None
        pool = ConnectionPool(loop, place, tls=tls, private=self.allow_private_networks)
        try:
            await pool.reach()
        except EndpointUnreachable as error:
            raise SinkUnavailable(str(error)) from None
        finally:
            pool.close()

    def _mask(self, place: Endpoint, secrets: Sequence[Secret]) -> SecretMask:
        """Hides what a response may repeat and must not show."""
        texts = {each.reveal() for each in self.headers.values()}
        for secret in secrets:
            texts.add(secret.reveal().removeprefix(STANDARD_SECRET))
            texts.add(_text(standard_key(secret.reveal())))
        path, _, query = place.target.partition("?")
        texts |= {path.strip("/"), *path.split("/")}
        for pair in query.split("&"):  # a name says nothing, unless it is all there is
            name, _, value = pair.partition("=")
            texts.add(value or name)
        return SecretMask(map(Secret, texts | set(map(unquote_plus, texts))))

    def _tls(self) -> ssl.SSLContext:
        context = client_context(self.ca_file)
        context.set_alpn_protocols(["http/1.1"])
        return context


def _text(key: bytes) -> str:
    """A key as text; "": it is not text."""
    try:
        return key.decode()
    except UnicodeDecodeError:
        return ""
