"""Chromium without a window, driven over its own debugging protocol; and a site for it to open."""

import asyncio
import json
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
import websocket

from headrace.testing import wait_until
from tests.needs import missing

T = TypeVar("T")

NAMES = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = [
    "--headless=new",
    "--remote-debugging-port=0",
    "--no-first-run",
    "--disable-gpu",
    "--disable-dev-shm-usage",  # small in containers
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


# --- the browser ---------------------------------------------------------------------------------


class Page:
    """A page in a browser."""

    def __init__(self, socket: websocket.WebSocket) -> None:
        self._socket = socket
        self._asked = 0

    def open(self, url: str) -> None:
        """Go there, and return when it is loaded."""
        self._ask("Page.navigate", url=url)
        wait_until(
            lambda: (
                self.run("location.href !== 'about:blank' && document.readyState") == "complete"
            ),
            timeout=120,
            message=f"{url} is loaded",
        )

    def run(self, script: str) -> Any:
        """What an expression in the page gives, promises awaited."""
        answer = self._ask(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def await_true(self, script: str, message: str) -> None:
        """Return when an expression in the page is true."""
        wait_until(lambda: bool(self.run(script)), timeout=120, message=message)

    def _ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._asked += 1
        self._socket.send(json.dumps({"id": self._asked, "method": method, "params": parameters}))
        while True:
            told = json.loads(self._socket.recv())
            if told.get("id") == self._asked:
                assert "error" not in told, told
                result: dict[str, Any] = told["result"]
                return result


@contextmanager
def browser() -> Iterator[Page]:
    """An empty page of a fresh browser."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        missing("Chromium is not installed (Debian: apt-get install chromium)")
        raise AssertionError  # not reached
    with ExitStack() as stack:
        folder = stack.enter_context(
            # It may still write while it ends.
            tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        )
        root = ["--no-sandbox"] if os.getuid() == 0 else []
        command = [program, *OPTIONS, *root, f"--user-data-dir={folder}", "about:blank"]
        quiet = subprocess.DEVNULL
        process = stack.enter_context(subprocess.Popen(command, stdout=quiet, stderr=quiet))
        stack.callback(process.kill)
        socket = websocket.create_connection(_address(Path(folder)), suppress_origin=True)
        stack.callback(socket.shutdown)
        socket.settimeout(60)
        yield Page(socket)


def _address(folder: Path) -> str:
    """Where its first page is controlled; it writes its port into its folder."""
    told = folder / "DevToolsActivePort"
    wait_until(lambda: told.exists() and "\n" in told.read_text(), timeout=120, message="it runs")
    port = told.read_text().split("\n")[0]
    targets = httpx.get(f"http://127.0.0.1:{port}/json/list", timeout=60).json()
    page = next(each for each in targets if each["type"] == "page")
    address: str = page["webSocketDebuggerUrl"]
    return address


# --- a site --------------------------------------------------------------------------------------

Address = tuple[str, int]


class Front:
    """A site of some files, and of a server behind it, as a reverse proxy has it."""

    def __init__(self, folder: Path, behind: Address | None) -> None:
        self._folder = folder
        self._behind = behind
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._tasks: set[asyncio.Task[None]] = set()

    def __enter__(self) -> Self:
        self._thread.start()
        self._server = self._do(asyncio.start_server(self._accept, "127.0.0.1", 0))
        host, port = self._server.sockets[0].getsockname()
        self.url = f"http://{host}:{port}"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._do(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(120)

    async def _stop(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._answer(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass  # one of the two is gone
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        file = self._folder / head.split()[1].decode().partition("?")[0].lstrip("/")
        if file.is_file():
            writer.write(_file(file))
            await writer.drain()
        elif self._behind is not None:
            await self._pass_on(head, reader, writer)

    async def _pass_on(
        self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        assert self._behind is not None
        if b"upgrade: websocket" not in head.lower():
            # The browser's next request may be for a file.
            head = head.replace(b"Connection: keep-alive", b"Connection: close")
        answers, asked = await asyncio.open_connection(*self._behind)
        try:
            asked.write(head)
            copies = [_copy(reader, asked), _copy(answers, writer)]
            tasks = [asyncio.create_task(copy) for copy in copies]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            asked.close()


def _file(file: Path) -> bytes:
    media = {".html": "text/html", ".mjs": "text/javascript"}[file.suffix]
    body = file.read_bytes()
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {media}; charset=utf-8\r\n"
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while piece := await source.read(65536):
        target.write(piece)
        await target.drain()
