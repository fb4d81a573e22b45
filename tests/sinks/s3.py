"""An object storage with as much of S3 as a Delta table needs; a process of its own.

delta-rs holds Python's lock while it waits for an answer, so the storage cannot be a thread. It
keeps what S3 promises of `If-None-Match: *`: of several such puts of a key one succeeds.

    python -m tests.sinks.s3   prints its port
"""

import hashlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from headrace.sinks.lake.storage import Folder

_objects: dict[str, bytes] = {}
_uploads: dict[str, dict[int, bytes]] = {}
_lock = threading.Lock()


@contextmanager
def bucket() -> Iterator[Folder]:
    """A folder in an empty bucket."""
    command = [sys.executable, "-m", "tests.sinks.s3"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout
        port = int(server.stdout.readline())
        options = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
            "max_retries": "2",  # of delta-rs alone
        }
        yield Folder.of("s3://bucket/lake", options)
        server.terminate()


class Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"

    def handle_any(self) -> None:
        """Answer."""
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        place = urlsplit(self.path)
        _, _, key = unquote(place.path).lstrip("/").partition("/")
        query = {name: values[0] for name, values in parse_qs(place.query, True).items()}
        with _lock:
            self.answer(key, query, body)

    def answer(self, key: str, query: dict[str, str], body: bytes) -> None:
        """What S3 would answer."""
        match self.command:
            case "GET" if "list-type" in query:
                self.reply(200, _listed(query))
            case "GET" | "HEAD":
                self.read(key)
            case "PUT" if "uploadId" in query:
                _uploads[query["uploadId"]][int(query["partNumber"])] = body
                self.reply(200)
            case "PUT" if self.headers.get("If-None-Match") == "*" and key in _objects:
                self.reply(412, _error("PreconditionFailed"))
            case "PUT":
                _objects[key] = body
                self.reply(200)
            case "POST" if "uploads" in query:
                name = str(len(_uploads) + 1)
                _uploads[name] = {}
                self.reply(200, f"<R><UploadId>{name}</UploadId></R>".encode())
            case "POST" if "uploadId" in query:
                parts = _uploads.pop(query["uploadId"])
                _objects[key] = b"".join(parts[at] for at in sorted(parts))
                self.reply(200, b'<R><ETag>"1"</ETag></R>')
            case "POST":
                names = [
                    each.text or ""
                    for each in ElementTree.fromstring(body).iter()
                    if "Key" in each.tag
                ]
                for name in names:
                    _objects.pop(name, None)
                gone = "".join(f"<Deleted><Key>{escape(name)}</Key></Deleted>" for name in names)
                self.reply(200, f"<DeleteResult>{gone}</DeleteResult>".encode())
            case _:
                _objects.pop(key, None)
                self.reply(204)

    def read(self, key: str) -> None:
        """Send an object or a piece of it."""
        if key not in _objects:
            self.reply(404, _error("NoSuchKey"))
            return
        content = _objects[key]
        given = self.headers.get("Range")
        if given is None:
            self.reply(200, content)
            return
        first, _, last = given.removeprefix("bytes=").partition("-")
        start = int(first) if first else len(content) - int(last)
        end = min(int(last) + 1, len(content)) if first and last else len(content)
        spread = {"Content-Range": f"bytes {start}-{end - 1}/{len(content)}"}
        self.reply(206, content[start:end], spread)

    def reply(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        """Send a response."""
        self.send_response(status)
        tag = hashlib.md5(body, usedforsecurity=False).hexdigest()
        more = {"ETag": f'"{tag}"', "Last-Modified": formatdate(usegmt=True), **(headers or {})}
        for name, value in {**more, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("do_"):
            return self.handle_any
        raise AttributeError(name)


def _listed(query: dict[str, str]) -> bytes:
    prefix, after, cut = (query.get(name, "") for name in ("prefix", "start-after", "delimiter"))
    now = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime())
    keys = [key for key in sorted(_objects) if key.startswith(prefix) and key > after]
    folders = {
        prefix + key.removeprefix(prefix).split(cut)[0] + cut
        for key in keys
        if cut and cut in key.removeprefix(prefix)
    }
    files = "".join(
        f"<Contents><Key>{escape(key)}</Key><LastModified>{now}</LastModified>"
        f'<ETag>"1"</ETag><Size>{len(_objects[key])}</Size></Contents>'
        for key in keys
        if not cut or cut not in key.removeprefix(prefix)
    )
    common = "".join(
        f"<CommonPrefixes><Prefix>{escape(each)}</Prefix></CommonPrefixes>" for each in folders
    )
    return (
        f"<ListBucketResult><Name>bucket</Name><IsTruncated>false</IsTruncated>{files}{common}"
        "</ListBucketResult>"
    ).encode()


def _error(code: str) -> bytes:
    return f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    sys.stdout.write(f"{server.server_port}\n")
    sys.stdout.flush()
    server.serve_forever()
