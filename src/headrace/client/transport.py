"""HTTP to a running Headrace: one transport for both clients and for the pipeline's tasks.

It knows timeouts, the API key, TLS and what a failed request means. It never goes through a proxy
that the environment names, and no error of it shows the key.
"""

import ssl
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any, NamedTuple
from urllib.parse import SplitResult, urlencode, urlsplit

import httpx
import msgspec

from ..errors import ConfigError, FeedReplaced, ServerAbsent, ServerBusy, ServerError
from .trust import TlsTrust

CONNECT_SECONDS = 3.0
RESPONSE_SECONDS = 60.0
STREAM_SECONDS = 30.0  # a stream has a heartbeat every ten
LONGEST_RETRY_AFTER = 300.0  # seconds, whatever a response says

JSON, NDJSON, SSE = "application/json", "application/x-ndjson", "text/event-stream"

_BUSY = (429, 500, 502, 503, 504)


class HttpRequest(NamedTuple):
    """One request to the server."""

    method: str
    path: str
    body: object = None  # a JSON document
    accept: str = JSON
    seconds: float = RESPONSE_SECONDS  # the longest silence


def with_query(path: str, query: Mapping[str, object]) -> str:
    """A path with its parameters, but for those that are None or empty."""
    given = {name: value for name, value in query.items() if value not in (None, "")}
    return f"{path}?{urlencode(given)}" if given else path


class HttpTransport:
    """Sends requests to one server."""

    def __init__(self, url: str, key: Callable[[], str], tls: TlsTrust | None = None) -> None:
        """`key` returns the API key for each request, or ""; ConfigError: `url` is no URL."""
        self.url = _checked(url)
        self._key = key
        # A server without TLS never needs the certificates, which take time to load.
        secure = httpx.URL(self.url).scheme == "https"
        self.tls = (
            (tls or TlsTrust()).context() if secure else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        )

    def connections(self) -> httpx.Client:
        """Connections that several requests may share, one after the other or at once."""
        return httpx.Client(verify=self.tls, trust_env=False)

    def connections_async(self) -> httpx.AsyncClient:
        """The same on an event loop."""
        return httpx.AsyncClient(verify=self.tls, trust_env=False)

    @contextmanager
    def open(
        self, request: HttpRequest, shared: httpx.Client | None = None
    ) -> Iterator[httpx.Response]:
        """The beginning of a successful response; without `shared`, on a connection of its own."""
        client = shared or self.connections()
        try:
            with self._unanswered():
                built = self._built(request, client, close=shared is None)
                response = client.send(built, stream=True)
            with closing(response):
                if not _successful(request, response):
                    raise self._refusal(request, response, b"".join(self.pieces(response)))
                yield response
        finally:
            if shared is None:
                client.close()

    async def send_async(self, request: HttpRequest, client: httpx.AsyncClient) -> httpx.Response:
        """The beginning of a successful response, which the caller closes with the client."""
        with self._unanswered():
            response = await client.send(self._built(request, client), stream=True)
        if not _successful(request, response):
            raise self._refusal(request, response, await self._body_async(response))
        return response

    def pieces(self, response: httpx.Response) -> Iterator[bytes]:
        """The body as it comes."""
        with self._lost():
            yield from response.iter_raw()

    async def next_piece(self, pieces: AsyncIterator[bytes]) -> bytes | None:
        """The next piece of a body; None at its end."""
        with self._lost():
            return await anext(pieces, None)

    def json(self, request: HttpRequest, shared: httpx.Client | None = None) -> Any:
        """The document that a request is answered with."""
        return self.document(request, self.read(request, shared)[0])

    def read(
        self, request: HttpRequest, shared: httpx.Client | None = None
    ) -> tuple[bytes, httpx.Headers]:
        """The whole body of a successful response, and its headers."""
        with self.open(request, shared) as response:
            return b"".join(self.pieces(response)), response.headers

    async def json_async(self, request: HttpRequest) -> Any:
        """The document that a request is answered with."""
        async with self.connections_async() as client:
            response = await self.send_async(request, client)
            return self.document(request, await self._body_async(response))

    def document(self, request: HttpRequest, body: bytes) -> Any:
        """A response's JSON."""
        try:
            return msgspec.json.decode(body)
        except msgspec.DecodeError as error:
            raise ServerAbsent(
                f"what answers at {self.url}{request.path} is not a Headrace server"
            ) from error

    def gone(self) -> ServerAbsent:
        """The error of a stream that ended."""
        return ServerAbsent(f"the server at {self.url} went away")

    def _built(
        self, request: HttpRequest, client: httpx.Client | httpx.AsyncClient, close: bool = True
    ) -> httpx.Request:
        headers = {"Accept": request.accept, "Accept-Encoding": "identity"}
        if close:
            headers["Connection"] = "close"
        if key := self._key():
            headers["X-API-Key"] = _printable(key)
        content = None
        if request.body is not None:
            headers["Content-Type"] = JSON
            content = msgspec.json.encode(request.body)
        return client.build_request(
            request.method,
            self.url + request.path,
            headers=headers,
            content=content,
            timeout=httpx.Timeout(request.seconds, connect=CONNECT_SECONDS),
        )

    async def _body_async(self, response: httpx.Response) -> bytes:
        with self._lost():  # as it comes: nobody requested that it be compressed
            return b"".join([piece async for piece in response.aiter_raw()])

    @contextmanager
    def _unanswered(self) -> Iterator[None]:
        try:
            yield
        except (httpx.TransportError, UnicodeError) as error:  # UnicodeError: of a host's name
            if (reason := _untrusted(error)) is not None:
                raise ServerError(
                    f"the certificate of {self.url} is not trusted: {reason}",
                    hint="Give the client your certificate authority's file: "
                    "Client(url, tls=TlsTrust(ca_file=…)), or the variable SSL_CERT_FILE.",
                ) from error
            raise ServerAbsent(f"no Headrace server answers at {self.url}") from error

    @contextmanager
    def _lost(self) -> Iterator[None]:
        try:
            yield
        except httpx.TransportError as error:
            raise self.gone() from error

    def _refusal(self, request: HttpRequest, response: httpx.Response, body: bytes) -> ServerError:
        status = response.status_code
        what = f"{self.url}{request.path.partition('?')[0]} answers {status}"
        try:
            document = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            document = None
        error: ServerError
        if not isinstance(document, dict) or not {"error", "message"} <= document.keys():
            error = ServerAbsent(f"{what}, but not as a Headrace server does")
            error.status = status
            return error
        kind = ServerBusy if status in _BUSY else ServerError
        if document["error"] == "other_log":
            kind = FeedReplaced
        error = kind(f"{what}: {document['message']}", hint=document.get("hint") or "")
        error.status = status
        error.word = str(document["error"])
        after = response.headers.get("Retry-After", "")
        # The other form, a date, is one that no Headrace sends.
        error.after = min(float(after), LONGEST_RETRY_AFTER) if after.isdigit() else 0.0
        return error


def _checked(url: str) -> str:
    parts = _parts(url)
    if parts is None:
        # Not shown: it may hold a password.
        raise ConfigError("the url must be like http://127.0.0.1:3000")
    if parts.username is not None or parts.password is not None:
        raise ConfigError(
            "the url must have no user and no password in it",
            hint="Give the API key to the client: Client(url, key).",
        )
    return url.rstrip("/")


def _parts(url: str) -> SplitResult | None:
    """The parts of a URL to which requests can be sent; None: of any other.

    A port that is none would look like an absent server.
    """
    try:
        parts, known = urlsplit(url), httpx.URL(url)
        fits = known.scheme in ("http", "https") and known.host and parts.port != 0
    except (httpx.InvalidURL, ValueError):
        return None
    return parts if fits else None


def _printable(key: str) -> str:
    if not (key.isascii() and key.isprintable()):
        # Not shown, as the error of the HTTP library would.
        raise ConfigError("the API key has characters that no key has", hint="Copy it again.")
    return key


def _successful(request: HttpRequest, response: httpx.Response) -> bool:
    # /health answers 503 with a document that says why.
    unhealthy = request.path == "/health" and response.status_code == 503
    return response.status_code < 300 or unhealthy


def _untrusted(error: BaseException | None) -> str | None:
    """Why the server's certificate is not trusted; None: that is not what failed."""
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return error.verify_message
        error = error.__cause__ or error.__context__
    return None
