"""A stand-in for a server of Unity Catalog: schemas and tables, no more than is used.

It is as strict as the server that the requests were tried with: a field that the API does not have,
one that is missing, or a column whose JSON differs from its name is refused.
"""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote
from uuid import uuid4

TOKEN = "token-of-the-test-catalog"
_API = "/api/2.1/unity-catalog"
_TABLE = {"name", "catalog_name", "schema_name", "table_type", "data_source_format", "columns"}
_TABLE |= {"storage_location", "comment", "properties"}
_COLUMN = {"name", "type_text", "type_json", "type_name", "position", "nullable"}
_OPTIONAL = {"comment", "partition_index"}


class UnityServer(ThreadingHTTPServer):
    """The catalog `main`, for who has the token."""

    daemon_threads = True

    def __init__(self, *, delta_api: bool = True) -> None:
        super().__init__(("127.0.0.1", 0), _Requests)
        self.delta_api = delta_api
        self.down = False
        self.page: bytes | None = None  # what it answers to everything
        self.schemas: set[str] = set()
        self.tables: dict[str, dict[str, Any]] = {}
        self.requests: list[str] = []
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def answer(self, method: str, path: list[str], body: Any) -> tuple[int, dict[str, Any]]:
        match method, path:
            case "GET", ["catalogs", name]:
                return (200, {"name": name}) if name == "main" else _absent(name)
            case "POST", ["schemas"]:
                if body["catalog_name"] != "main":
                    return _absent(body["catalog_name"])
                self.schemas.add(body["name"])
                return 200, body
            case "POST", ["tables"]:
                return self._create(body)
            case "GET", ["tables", name] if name in self.tables:
                return 200, self.tables[name]
            case "DELETE", ["tables", name] if name in self.tables:
                del self.tables[name]
                return 200, {}
            case "POST", ["delta", "v1", "catalogs", "main", "schemas", schema, "tables", table]:
                return self._update(self.tables[f"main.{schema}.{table}"], body)
        return _absent("/".join(path))

    def _create(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if body["schema_name"] not in self.schemas:
            return _absent(body["schema_name"])
        assert set(body) == _TABLE, body
        assert (body["table_type"], body["data_source_format"]) == ("EXTERNAL", "DELTA")
        for at, column in enumerate(body["columns"]):
            assert _COLUMN <= set(column) <= _COLUMN | _OPTIONAL, column
            field = json.loads(column["type_json"])
            assert set(field) == {"name", "type", "nullable", "metadata"}
            assert (field["name"], field["nullable"]) == (column["name"], column["nullable"])
            assert column["position"] == at
        name = ".".join(body[each] for each in ("catalog_name", "schema_name", "name"))
        self.tables[name] = {**body, "table_id": str(uuid4())}
        return 200, self.tables[name]

    def _update(self, table: dict[str, Any], body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if not self.delta_api:
            return _absent("delta")
        [required] = body["requirements"]
        assert required == {"type": "assert-table-uuid", "uuid": table["table_id"]}
        updates = {each["action"]: each for each in body["updates"]}
        table["comment"] = updates["set-table-comment"]["comment"]
        assert updates["set-columns"]["columns"]["type"] == "struct"
        table["columns"] = [
            {
                "name": field["name"],
                "type_text": {"long": "bigint"}.get(field["type"], field["type"]),
                "nullable": field["nullable"],
                "comment": field["metadata"].get("comment"),
                "position": at,
            }
            for at, field in enumerate(updates["set-columns"]["columns"]["fields"])
        ]
        return 200, {}


class _Requests(BaseHTTPRequestHandler):
    server: UnityServer

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def do_DELETE(self) -> None:
        self._serve()

    def _serve(self) -> None:
        length = int(self.headers.get("content-length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        path = unquote(self.path).removeprefix(f"{_API}/")
        self.server.requests.append(f"{self.command} {path}")
        given = self.headers.get("authorization")
        if self.server.down:
            status, answer = 503, {"message": "down for maintenance"}
        elif given != f"Bearer {TOKEN}":
            status, answer = 401, {"error_code": "UNAUTHENTICATED", "message": f"not {given}"}
        else:
            status, answer = self.server.answer(self.command, path.split("/"), body)
        content = json.dumps(answer).encode()
        if self.server.page is not None:
            status, content = 200, self.server.page
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        return


def _absent(what: str) -> tuple[int, dict[str, Any]]:
    return 404, {"error_code": "NOT_FOUND", "message": f"{what} does not exist"}
