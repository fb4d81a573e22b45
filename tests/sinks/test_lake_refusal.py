"""What a storage says when it fails is shown, without its keys."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow as pa
import pytest

from headrace.errors import SinkUnavailable
from headrace.pipeline.failures import understood
from headrace.sinks.lake.delta import Delta
from headrace.sinks.lake.refusal import refusal
from headrace.sinks.lake.storage import Folder

KEY = "hunter2-the-key"


class Bucket(BaseHTTPRequestHandler):
    """An S3 that answers every request with the same error, in S3's own format."""

    protocol_version = "HTTP/1.1"
    status, code, message = 404, "NoSuchBucket", "The specified bucket does not exist"

    def do_GET(self) -> None:
        body = (
            '<?xml version="1.0" encoding="UTF-8"?>\n'
            f"<Error><Code>{self.code}</Code><Message>{self.message}</Message>"
            f"<AWSAccessKeyId>{KEY}</AWSAccessKeyId><RequestId>4442587FB7D0A2F9</RequestId></Error>"
        ).encode()
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


class Denying(Bucket):
    status, code, message = (
        403,
        "SignatureDoesNotMatch",
        f"Key {KEY} &amp; signature differ",
    )


@contextmanager
def serving(kind: type[Bucket]) -> Iterator[Folder]:
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        options = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": KEY,
            "AWS_REGION": "us-east-1",
        }
        yield Folder.of("s3://b/lake", options)
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Bucket, "s3://b/lake: The specified bucket does not exist (NoSuchBucket); "),
        (Denying, "s3://b/lake: Key *** & signature differ (SignatureDoesNotMatch); "),
    ],
)
def test_a_bucket_that_refuses_is_quoted(kind: type[Bucket], reason: str) -> None:
    columns = pa.schema([("id", pa.int64())])
    with serving(kind) as folder:
        for refused in (
            lambda: folder.read_text("_headrace/ledger.json"),
            lambda: Delta.open(folder, "me"),
            lambda: Delta.create(folder, columns, {}, writer="me"),
        ):
            with pytest.raises(SinkUnavailable) as raised:
                refused()
            assert str(raised.value).startswith(reason)
            assert KEY not in str(raised.value)


def test_a_storage_that_is_gone_is_reported_as_such() -> None:
    with serving(Bucket) as folder:
        pass
    with pytest.raises(SinkUnavailable, match="s3://b/lake: Connection refused"):
        folder.read_text("x")


def test_a_path_below_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SinkUnavailable, match="Not a directory"):
        Folder.of(f"{tmp_path}/file/lake", {}).read_text("x")


def test_an_error_of_the_system_names_its_place_and_its_reason() -> None:
    known = understood(OSError(28, "No space left on device", "/lake/x"))
    assert str(known) == "/lake/x: No space left on device"
    assert str(understood(OSError("Generic S3 error\n ↳ Connection refused"))) == (
        "Connection refused"
    )
    assert refusal(OSError()) == "OSError"
