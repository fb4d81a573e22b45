"""An object storage that speaks as much of S3 as a probe needs; a process of its own.

delta-rs holds Python's lock while it waits for an answer, so the storage cannot be a thread.

    python -m tests.operate.bucket FILE   prints its port, and writes every request to FILE
"""

import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

LISTED = b"<ListBucketResult><Name>lake</Name><IsTruncated>false</IsTruncated></ListBucketResult>"
BEGUN = b"<InitiateMultipartUploadResult><UploadId>1</UploadId></InitiateMultipartUploadResult>"
DONE = b'<CompleteMultipartUploadResult><ETag>"1"</ETag></CompleteMultipartUploadResult>'
DELETED = b"<DeleteResult><Deleted><Key>here</Key></Deleted></DeleteResult>"
REFUSED = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"


class Bucket(BaseHTTPRequestHandler):
    """Takes everything below /lake, and nothing elsewhere."""

    protocol_version = "HTTP/1.1"

    def handle_any(self) -> None:
        """Answer."""
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with Path(sys.argv[1]).open("a") as log:
            log.write(f"{self.command} {self.path}\n")
        if not self.path.startswith("/lake"):
            self.reply(403, REFUSED)
        elif self.command == "GET":
            self.reply(200, LISTED)
        elif self.command == "DELETE":
            self.reply(204, b"")
        elif "?delete" in self.path:
            self.reply(200, DELETED)
        else:
            self.reply(200, BEGUN if self.path.endswith("?uploads=") else DONE)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("do_"):
            return self.handle_any
        raise AttributeError(name)

    def reply(self, status: int, body: bytes) -> None:
        """Send a response."""
        self.send_response(status)
        self.send_header("ETag", '"1"')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Bucket)
    sys.stdout.write(f"{server.server_port}\n")
    sys.stdout.flush()
    server.serve_forever()
