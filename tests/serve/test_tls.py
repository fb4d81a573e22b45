"""TLS: asked for by other people's clients, with certificates that come and go."""

import asyncio
import errno
import json
import logging
import shutil
import socket
import ssl
import subprocess
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import websocket

from headrace.client import AsyncClient, Client, TlsTrust
from headrace.config import ServerSection, TlsSection, parse
from headrace.errors import ConfigError, ServerError
from headrace.operate.commands import connect
from headrace.pipeline import remote
from headrace.pipeline.options import Options
from headrace.serve import BackgroundServer, ServerSettings, create_app, tls
from headrace.serve.settings import exposure
from headrace.testing import wait_until
from headrace.v1 import changefeed_pb2 as v1
from headrace.v1.changefeed_pb2_grpc import ChangeFeedStub
from tests.changes import Writer, opened_writer
from tests.serve.certificates import Authority, PemFiles


class SecureSite:
    """A server that speaks TLS, and who signed its certificate."""

    def __init__(self, folder: Path, stack: ExitStack, *, mutual: bool = False) -> None:
        self.authority = Authority(folder, "authority")
        self.files = self.authority.issue("server", "localhost", "127.0.0.1")
        self.section = TlsSection(
            certificate=self.files.certificate,
            key=self.files.key,
            client_ca=self.authority.file if mutual else None,
        )
        settings = ServerSettings(port=0, grpc_port=0, tls=self.section)
        self.writer: Writer = stack.enter_context(opened_writer(folder / "log"))
        app = create_app(self.writer.log, statuses=list, copy_again=None, settings=settings)
        self.server = stack.enter_context(BackgroundServer(app, settings))
        self.url = self.server.url
        self.writer.put("users", "1")

    @property
    def address(self) -> tuple[str, int]:
        url = httpx.URL(self.url)
        assert url.port is not None
        return url.host, url.port

    def renew(self, files: PemFiles) -> None:
        """Put other files in place of the server's."""
        shutil.copy(files.key, self.files.key)
        shutil.copy(files.certificate, self.files.certificate)


@pytest.fixture
def secure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(tls, "LOOK_SECONDS", 0.1)
    with ExitStack() as stack:
        yield SecureSite(tmp_path, stack)


@pytest.fixture
def mutual(tmp_path: Path) -> Any:
    with ExitStack() as stack:
        yield SecureSite(tmp_path, stack, mutual=True)


def run(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=False, input=""
    )


def s_client(site: SecureSite, *options: str) -> str:
    host, port = site.address
    done = run("openssl", "s_client", "-connect", f"{host}:{port}", "-CAfile",
               site.authority.file, *options)  # fmt: skip
    return done.stdout + done.stderr


def serial(site: SecureSite) -> int:
    """Of the certificate that a new connection gets."""
    context = ssl.create_default_context(cafile=str(site.authority.file))
    with (
        socket.create_connection(site.address, timeout=30) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as connection,
    ):
        shown = connection.getpeercert()
        assert shown is not None
        return int(str(shown["serialNumber"]), 16)


def test_curl_reads_over_tls_and_not_without(secure: SecureSite) -> None:
    assert secure.url.startswith("https://")
    trusting = run("curl", "-sS", "--cacert", secure.authority.file, f"{secure.url}/v1/changes")
    assert json.loads(trusting.stdout)["count"] == 1
    assert run("curl", "-sS", f"{secure.url}/v1/changes").returncode == 60  # not trusted
    plain = secure.url.replace("https:", "http:")
    assert run("curl", "-sS", f"{plain}/v1/changes").returncode != 0


def test_openssl_agrees_on_tls_1_2_and_1_3_only(secure: SecureSite) -> None:
    for version in ("-tls1_2", "-tls1_3"):
        assert "Verify return code: 0 (ok)" in s_client(secure, version)
    old = s_client(secure, "-tls1_1", "-cipher", "ALL:@SECLEVEL=0")
    assert "Cipher is (NONE)" in old


def test_every_transport_of_our_clients_speaks_tls(secure: SecureSite) -> None:
    trust = TlsTrust(ca_file=str(secure.authority.file))
    target = f"https://{secure.server.grpc_target}"
    client = Client(secure.url, grpc=target, tls=trust)
    assert client.get("/v1/changes")["count"] == 1
    assert next(iter(client.changes(["users"]))).sequence == 1
    assert next(iter(client.changes(["users"], transport="grpc"))).sequence == 1
    threading.Timer(0.5, secure.writer.put, ["users", "2"]).start()
    assert next(iter(client.changes(["users"], transport="websocket"))).id

    async def first(transport: str) -> int:
        other = AsyncClient(secure.url, grpc=target, tls=trust)
        async for event in other.changes(["users"], transport=transport):
            return event.sequence
        raise AssertionError

    assert asyncio.run(first("sse")) == asyncio.run(first("grpc")) == 1
    with pytest.raises(ServerError, match="is not trusted"):
        Client(secure.url).get("/v1/changes")
    with pytest.raises(ConfigError, match="TLS files cannot be used"):
        Client(secure.url, tls=TlsTrust(ca_file="/nowhere"))


def test_other_peoples_websocket_and_grpc_clients_speak_tls(secure: SecureSite) -> None:
    address = secure.url.replace("https:", "wss:") + "/v1/stream"
    talk = websocket.create_connection(address, sslopt={"ca_certs": str(secure.authority.file)})
    talk.send(json.dumps({"type": "auth", "apiKey": "cdc_" + "0" * 64}))
    assert json.loads(talk.recv())["type"] == "auth_success"
    talk.close()
    credentials = grpc.ssl_channel_credentials(secure.authority.file.read_bytes())
    with grpc.secure_channel(secure.server.grpc_target, credentials) as channel:
        assert len(ChangeFeedStub(channel).Poll(v1.PollRequest(), timeout=30).events) == 1
    with (
        grpc.insecure_channel(secure.server.grpc_target) as channel,
        pytest.raises(grpc.RpcError),
    ):
        ChangeFeedStub(channel).Poll(v1.PollRequest(), timeout=30)


def test_a_new_certificate_is_used_and_streams_stay_open(
    secure: SecureSite, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    context = ssl.create_default_context(cafile=str(secure.authority.file))
    before = serial(secure)
    with (
        httpx.Client(verify=context, timeout=60) as client,
        client.stream("GET", f"{secure.url}/v1/changes/stream") as stream,
    ):
        lines = stream.iter_lines()
        assert any(line.startswith("data:") for line in lines)
        secure.renew(secure.authority.issue("newer", "localhost", "127.0.0.1"))
        wait_until(lambda: serial(secure) != before, timeout=60, message="it is reloaded")
        secure.writer.put("users", "2")
        assert any(line.startswith("data:") for line in lines)
    newer = serial(secure)
    # gRPC shows the same one.
    host, _, port = secure.server.grpc_target.partition(":")
    shown = ssl.get_server_certificate((host, int(port)), ca_certs=str(secure.authority.file))
    assert shown.strip() == secure.files.certificate.read_text().strip()
    # A broken file changes nothing.
    secure.files.certificate.write_text("nonsense")
    wait_until(lambda: "tls not reloaded" in caplog.text, timeout=60, message="it is noticed")
    assert serial(secure) == newer


@pytest.mark.parametrize("known", [True, False])
def test_clients_need_a_certificate_where_an_authority_is_set(
    mutual: SecureSite, tmp_path: Path, known: bool
) -> None:
    stranger = tmp_path / "strangers"
    stranger.mkdir()
    signer = mutual.authority if known else Authority(stranger, "stranger")
    files = signer.issue("billing", file="client")
    curl = ["curl", "-sS", "--cacert", mutual.authority.file, f"{mutual.url}/v1/changes"]
    assert run(*curl).returncode != 0
    shown = run(*curl, "--cert", files.certificate, "--key", files.key)
    assert (shown.returncode == 0) is known
    trust = TlsTrust(
        ca_file=str(mutual.authority.file),
        certificate=str(files.certificate),
        key=str(files.key),
    )
    target = f"https://{mutual.server.grpc_target}"
    client = Client(mutual.url, grpc=target, tls=trust, sleep=_give_up)
    if known:
        assert client.get("/v1/changes")["count"] == 1
        assert next(iter(client.changes(transport="grpc"))).sequence == 1
    else:
        for transport in ("sse", "grpc"):
            with pytest.raises(TimeoutError):
                next(iter(client.changes(transport=transport)))


def _give_up(seconds: float) -> None:
    raise TimeoutError


@pytest.mark.parametrize("site", ["secure", "mutual"])
def test_commands_of_this_machine_reach_the_server(
    site: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    running: SecureSite = request.getfixturevalue(site)
    # For other names than the commands ask for: they know the certificate itself.
    running.renew(running.authority.issue("public", "headrace.example.com"))
    files = running.server._server._tls
    assert files is not None
    files.refresh()
    port = httpx.URL(running.url).port
    tls_files = {"certificate": str(running.files.certificate), "key": str(running.files.key)}
    if site == "mutual":
        tls_files["client_ca"] = str(running.authority.file)
    content = {
        "sources": {"shop": {"type": "sqlite", "path": "shop.db"}},
        "server": {"port": port, "tls": tls_files},
    }
    config = parse(content, folder=tmp_path, environment={})
    assert config.server.url == f"https://127.0.0.1:{port}"
    client = connect(config)
    assert client is not None
    assert client.get("/changefeed/stats")["latest_sequence"] == 1


def test_spark_reads_over_tls_with_the_file_of_an_authority(secure: SecureSite) -> None:
    given = {"url": secure.url, "caFile": str(secure.authority.file)}
    log = remote.reading(Options.read(given))
    assert log.ranges(0).latest_sequence == 1
    for _, kept in remote._connections.values():  # for the next request, which does not come
        kept.close()
    remote._connections.clear()
    with pytest.raises(ConfigError, match="caFile goes with a url"):
        Options.read({"url": "http://127.0.0.1:3000", "caFile": "ca.pem"})


def test_a_handshake_that_never_comes_holds_nobody_up(secure: SecureSite) -> None:
    with ExitStack() as stack:
        for _ in range(50):
            stack.enter_context(socket.create_connection(secure.address, timeout=30))
        assert serial(secure)
        (acceptor,) = secure.server._server._acceptors
        assert len(acceptor._opening) >= 50
    wait_until(lambda: not acceptor._opening, timeout=60, message="they are gone")


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    one = Authority(tmp_path, "one").issue("a", "localhost")
    other = Authority(tmp_path, "two").issue("b", "localhost")
    missing = tmp_path / "missing.pem"
    for section, name in (
        (TlsSection(certificate=missing, key=one.key), "server.tls.certificate"),
        (TlsSection(certificate=one.certificate, key=missing), "server.tls.key"),
        (TlsSection(certificate=one.certificate, key=other.key), "server.tls.key"),
        (TlsSection(certificate=one.certificate), "server.tls.certificate"),
        (
            TlsSection(certificate=one.certificate, key=one.key, client_ca=missing),
            "server.tls.client_ca",
        ),
    ):
        with pytest.raises(ConfigError, match=name):
            tls.CertificateFiles(section)


def test_files_that_could_not_be_read_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    authority = Authority(tmp_path, "one")
    pair = authority.issue("a", "localhost")
    files = tls.CertificateFiles(TlsSection(certificate=pair.certificate, key=pair.key))
    before = files.context()
    authority.issue("a", "localhost")
    with monkeypatch.context() as patched:
        patched.setattr(ssl.SSLContext, "load_cert_chain", _no_file)
        files.refresh()
        files.refresh()
    assert files.context() is before
    assert caplog.text.count("tls not reloaded") == 1
    files.refresh()
    assert files.context() is not before


def _no_file(*_: object, **__: object) -> None:
    raise OSError(errno.EMFILE, "Too many open files")


def test_a_key_that_others_may_read_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = Authority(tmp_path, "one").issue("a", "localhost")
    section = TlsSection(certificate=files.certificate, key=files.key)
    tls.CertificateFiles(section)
    assert not caplog.text
    files.key.chmod(0o644)
    tls.CertificateFiles(section)
    assert "can be read by every user" in caplog.text


def test_an_address_that_others_reach_is_warned_of(tmp_path: Path) -> None:
    section = TlsSection(certificate=tmp_path)
    assert exposure(ServerSettings(port=0)) == []
    (plain,) = exposure(ServerSettings(port=0, host="0.0.0.0"))
    assert "without TLS" in plain
    assert exposure(ServerSettings(port=0, host="0.0.0.0", tls=section)) == []
    (open_to_all,) = exposure(
        ServerSettings(port=0, host="0.0.0.0", tls=section, allow_remote=True)
    )
    assert "server.allow_remote" in open_to_all
    assert ServerSection(host="0.0.0.0", tls=section).url == "https://127.0.0.1:3000"
