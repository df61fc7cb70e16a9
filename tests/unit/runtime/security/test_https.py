"""HTTPS of the frontend: certificates, their reload, client certificates, and clients that leave."""

import asyncio
import logging
import os
import socket
import ssl
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import uvloop
from tests.waits import MUST_HAPPEN_S

from kvolt.core.errors import ConfigError
from kvolt.runtime.clock import SystemClock, ThreadBlocking
from kvolt.runtime.http.client import HttpClient
from kvolt.runtime.http.server import HttpLimits, HttpRequest, HttpServer, Response, Routes
from kvolt.runtime.http.server_url import ServerUrl
from kvolt.runtime.network import SocketNetwork, split_address
from kvolt.runtime.security.authority import Certificate, ClusterAuthority
from kvolt.runtime.security.credentials import ServerCertificate
from kvolt.runtime.security.identity import Identity, ProcessRole
from kvolt.runtime.security.secure_network import HttpsNetwork

WAIT_S = 30.0
IDENTITY = Identity(ProcessRole.FRONTEND, "edge")


class Lab:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = SystemClock()
        self.authority = ClusterAuthority.create(self.clock.wall())
        self.outcomes: list[str] = []
        self.cancelled = asyncio.Event()
        self.started = asyncio.Event()
        self.install()

    def issue(self) -> Certificate:
        return self.authority.issue(IDENTITY, self.clock.wall())

    def install(self) -> Certificate:
        issued = self.issue()
        for name, content in (
            ("chain", issued.chain_pem),
            ("key", issued.key_pem),
            ("ca", issued.trusted_pem),
        ):
            (self.folder / name).write_bytes(content)
        return issued

    def certificate(self, clients: bool = False) -> ServerCertificate:
        ca = self.folder / "ca" if clients else None
        return ServerCertificate(self.folder / "chain", self.folder / "key", ca)

    async def echo(self, request: HttpRequest) -> Response:
        return Response(200, request.body, content_type="text/plain")

    async def wait(self, request: HttpRequest) -> Response:
        self.started.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()
        raise AssertionError

    async def start(self, certificate: ServerCertificate) -> tuple[HttpServer, str]:
        routes = Routes()
        routes.add("POST", "/echo", self.echo)
        routes.add("GET", "/wait", self.wait)
        server = HttpServer(HttpsNetwork(certificate, self.outcomes.append), routes, self.clock)
        return server, await server.start("127.0.0.1:0")

    def client_context(self, *, has_certificate: bool = False) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(self.folder / "ca"))
        context.check_hostname = False
        if has_certificate:
            (self.folder / "both").write_bytes(
                (self.folder / "chain").read_bytes() + (self.folder / "key").read_bytes()
            )
            context.load_cert_chain(self.folder / "both")
        return context

    def client(self, address: str, context: ssl.SSLContext) -> HttpClient:
        return HttpClient(ServerUrl.parse(f"https://{address}"), network=SocketNetwork(tls=context))


@pytest.fixture
async def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


async def test_requests_and_large_bodies(lab: Lab) -> None:
    server, address = await lab.start(lab.certificate())
    body = b"kv" * 1_000_000
    async with lab.client(address, lab.client_context()) as client:
        for _ in range(3):
            response = await client.fetch("/echo", WAIT_S, body)
            assert (response.status, response.body) == (200, body)
    await server.close()
    assert set(lab.outcomes) == {"accepted"}


def test_the_same_on_uvloop(tmp_path: Path) -> None:
    async def main() -> None:
        lab = Lab(tmp_path)
        await test_requests_and_large_bodies(lab)
        lab.outcomes.clear()
        await test_a_client_that_leaves_cancels_its_request(lab)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


async def test_a_client_that_leaves_cancels_its_request(lab: Lab) -> None:
    server, address = await lab.start(lab.certificate())
    _, writer = await asyncio.open_connection(*split_address(address), ssl=lab.client_context())
    writer.write(b"GET /wait HTTP/1.1\r\nhost: a\r\n\r\n")
    async with asyncio.timeout(WAIT_S):
        await lab.started.wait()
        writer.close()
        await lab.cancelled.wait()
    await server.close()


async def test_a_changed_certificate_is_used_for_new_connections(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvolt.runtime.security.credentials._CHECK_S", 0.01)
    caplog.set_level(logging.INFO)
    certificate, blocking = lab.certificate(), ThreadBlocking()
    server, address = await lab.start(certificate)

    async def logged(text: str) -> None:
        async with asyncio.timeout(MUST_HAPPEN_S):
            while text not in caplog.text:
                await asyncio.sleep(0.01)

    async def serial() -> str:
        _, writer = await asyncio.open_connection(*split_address(address), ssl=lab.client_context())
        peer = writer.get_extra_info("peercert")
        writer.transport.abort()
        return str(peer["serialNumber"])

    first = await serial()
    lab.install()
    assert await serial() == first
    following = asyncio.ensure_future(certificate.keep_fresh(blocking))
    await logged("HTTPS certificate reloaded")
    second = await serial()
    assert second != first
    (lab.folder / "chain").write_bytes(b"damaged")
    await logged("HTTPS certificate not reloaded")
    assert await serial() == second, "a file that cannot be used changes nothing"
    following.cancel()
    blocking.close()
    await server.close()


async def test_files_that_cannot_be_read_now_occupy_one_thread(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the threads that requests need as well."""
    monkeypatch.setattr("kvolt.runtime.security.credentials._CHECK_S", 0.01)
    monkeypatch.setattr("kvolt.runtime.security.credentials._READ_TIMEOUT_S", 0.05)
    certificate, blocking, is_back = lab.certificate(), ThreadBlocking(), threading.Event()
    monkeypatch.setattr(certificate, "_reload", is_back.wait)
    following = asyncio.ensure_future(certificate.keep_fresh(blocking))
    async with asyncio.timeout(MUST_HAPPEN_S):
        while caplog.text.count("HTTPS certificate not reloaded") < 5:
            await asyncio.sleep(0.01)
    assert blocking._num_threads == 1
    is_back.set()
    following.cancel()
    blocking.close()


@pytest.mark.parametrize("name", ["chain", "key", "ca"])
def test_files_are_regular_and_bounded(lab: Lab, name: str) -> None:
    (lab.folder / name).unlink()
    os.mkfifo(lab.folder / name)  # a read would wait for its writer for ever
    with pytest.raises(ConfigError, match="not a regular file"):
        lab.certificate(clients=True)
    (lab.folder / name).unlink()
    (lab.folder / name).write_bytes(b"x" * (2 << 20))
    with pytest.raises(ConfigError, match="larger than"):
        lab.certificate(clients=True)


async def test_client_certificates_are_required_if_an_authority_is_set(lab: Lab) -> None:
    server, address = await lab.start(lab.certificate(clients=True))
    async with lab.client(address, lab.client_context(has_certificate=True)) as client:
        assert (await client.fetch("/echo", WAIT_S, b"x")).status == 200
    reader, writer = await asyncio.open_connection(*split_address(address), ssl=lab.client_context())
    writer.write(b"POST /echo HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n")
    async with asyncio.timeout(WAIT_S):
        with suppress(ssl.SSLError):  # the alert may get lost with the connection
            assert await reader.read() == b""
    writer.transport.abort()
    await server.close()
    assert lab.outcomes.count("refused") == 1


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    (tmp_path / "chain").write_bytes(b"nothing")
    (tmp_path / "key").write_bytes(b"nothing")
    for chain, key in (("chain", "key"), ("none", "key")):
        with pytest.raises(ConfigError, match="cannot be used") as caught:
            ServerCertificate(tmp_path / chain, tmp_path / key, None)
        assert "frontend.tls_key" in caught.value.fields["remedy"]


async def test_a_refused_client_that_does_not_close_is_disconnected(lab: Lab) -> None:
    server = HttpServer(
        HttpsNetwork(lab.certificate()),
        Routes(),
        lab.clock,
        HttpLimits(max_connections=1, write_timeout_s=60),
    )
    address = split_address(await server.start("127.0.0.1:0"))

    def last_words() -> bytes:
        with (
            socket.create_connection(address) as first,
            lab.client_context().wrap_socket(first),
            socket.create_connection(address) as second,
        ):
            tls = lab.client_context().wrap_socket(second)
            head = tls.recv(1 << 16)
            with socket.socket(fileno=tls.detach()) as raw:  # no close_notify is sent
                raw.settimeout(10)
                while raw.recv(1 << 16):
                    pass
            return head

    assert (await asyncio.to_thread(last_words)).startswith(b"HTTP/1.1 503")
    await server.close()
