"""A bucket of an S3 server: moto, a process of its own.

moto looks whether a key is there and stores it in two steps. It runs here with one thread, so that
of several `If-None-Match: *` puts of a key one succeeds, as S3 promises.
"""

import http.client
import importlib.util
import sys
from pathlib import Path

import pyarrow as pa
from deltalake import DeltaTable

from headrace.sinks.lake.storage import Folder
from headrace.testing.processes import ServerProcess
from tests.deltas import stored
from tests.needs import missing

BUCKET = "lake"
SERVER = Path(__file__).with_name("moto_server.py")
KEY, SECRET = "AKIAHEADRACETESTS", "s3cret-of-the-test-bucket"


class Bucket(ServerProcess):
    """An empty bucket on a server of its own."""

    def __init__(self) -> None:
        if importlib.util.find_spec("moto") is None:
            missing("moto is not installed (pip install 'moto[s3]' flask flask-cors)")
        super().__init__()

    @property
    def options(self) -> dict[str, str]:
        """What a sink has as `storage`."""
        return {
            "AWS_ENDPOINT_URL": f"http://{self.address}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "eu-central-1",
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
        }

    def uri(self, path: str) -> str:
        """The address of a folder."""
        return f"s3://{BUCKET}/{path}"

    def folder(self, path: str) -> Folder:
        """A folder as our own code sees it."""
        return Folder.of(self.uri(path), self.options)

    def delta(self, path: str) -> DeltaTable:
        """A Delta table as anybody opens it."""
        return DeltaTable(self.uri(path), storage_options=self.options)

    def rows(self, path: str, *columns: str) -> pa.Table:
        """What a Delta table holds."""
        return stored(self.delta(path), columns)

    def command(self) -> list[str]:
        return [sys.executable, "-P", str(SERVER), str(self.port)]

    def answers(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            location = "<LocationConstraint>eu-central-1</LocationConstraint>"
            connection.request(
                "PUT",
                f"/{BUCKET}",
                f"<CreateBucketConfiguration>{location}</CreateBucketConfiguration>",
            )
            return connection.getresponse().status == http.client.OK
        finally:
            connection.close()
