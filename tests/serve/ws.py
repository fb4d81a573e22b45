"""A client of the WebSocket protocol, on websocket-client."""

import json
import time
from types import TracebackType
from typing import Any, Self

import websocket

Message = dict[str, Any]

ANY_KEY = "cdc_" + "k" * 64  # well-formed, and good while a server on this machine has no keys


class Talk:
    """One connection; every message is JSON."""

    def __init__(self, url: str, **options: Any) -> None:
        address = url.replace("http://", "ws://") + "/v1/stream"
        # It looks at every byte in Python; json.loads would find wrong ones too.
        options["skip_utf8_validation"] = True
        self.socket = websocket.create_connection(
            address, timeout=20, suppress_origin=True, **options
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leave; where the server has closed already, websocket-client would leave the socket."""
        self.socket.close()
        self.socket.shutdown()  # type: ignore[no-untyped-call]

    def say(self, **message: Any) -> None:
        """Send a message."""
        self.socket.send(json.dumps(message))

    def hear(self) -> Message:
        """The next message."""
        text = self.socket.recv()
        assert isinstance(text, str)
        assert text, "the server has closed the connection"
        message: Message = json.loads(text)
        return message

    def ask(self, **message: Any) -> Message:
        """Send a message, and take what comes next as its answer."""
        self.say(**message)
        return self.hear()

    def await_type(self, *types: str) -> Message:
        """The next message of one of these types."""
        while True:
            message = self.hear()
            if message["type"] in types:
                return message

    def auth(self, key: str = ANY_KEY) -> Self:
        """Say who this is."""
        assert self.ask(type="auth", apiKey=key)["type"] == "auth_success"
        return self

    def subscribe(self, *tables: str, **more: Any) -> Message:
        """Ask for tables' events."""
        confirmed = self.ask(type="subscribe", tables=list(tables), **more)
        while confirmed["type"] in ("connection_status", "ping"):  # what comes by itself
            confirmed = self.hear()
        assert confirmed["type"] == "subscription_confirmed", confirmed
        return confirmed

    def events(self, count: int) -> list[Message]:
        """So many events; pings are answered, reports passed over."""
        found: list[Message] = []
        while len(found) < count:
            message = self.hear()
            if message["type"] == "ping":
                self.say(type="pong", timestamp=message["timestamp"])
            elif message["type"] == "cdc_event":
                found.append(message)
            else:
                assert message["type"] == "connection_status", message
        return found

    def closed(self) -> tuple[int, str]:
        """The code and reason with which the server closes, whatever it still says before."""
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            opcode, data = self.socket.recv_data(control_frame=True)
            if opcode == websocket.ABNF.OPCODE_CLOSE:
                return int.from_bytes(data[:2]), data[2:].decode()
        raise AssertionError("the server does not close")
