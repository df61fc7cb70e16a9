"""Join tokens are exchanged for certificates at a join server, over real connections."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import cast

import pytest
import uvloop
from cryptography import x509
from tests.unit.runtime.security.enrollment_lab import (
    FRONTEND,
    WORKER,
    Lab,
    SteppedClock,
    ask,
    enrolled_worker,
    exchange,
    signing_request,
    stranger,
)

from kvolt.core.errors import ConfigError, ConnectFailed
from kvolt.runtime.clock import SystemClock, ThreadBlocking
from kvolt.runtime.security import enrolled, enrollment
from kvolt.runtime.security.authority import ClusterAuthority
from kvolt.runtime.security.credentials import Credentials, tls_context
from kvolt.runtime.security.enrolled import EnrolledSource
from kvolt.runtime.security.enrollment import EnrollRequest, Welcome, enrolled_identity
from kvolt.runtime.security.identity import Identity, ProcessRole
from kvolt.runtime.security.join_token import create_token, parse_token


@pytest.fixture
async def lab(tmp_path: Path) -> AsyncIterator[Lab]:
    lab = Lab(tmp_path, ClusterAuthority.create(SystemClock().wall()))
    await lab.start()
    yield lab
    await lab.close()


async def test_a_token_is_exchanged_for_membership(lab: Lab) -> None:
    token = lab.token()
    credentials = await lab.enroll(token)
    assert await lab.identity_seen(credentials) == credentials.identity == enrolled_worker(token)
    assert credentials.authority is None
    assert lab.outcomes["enrolled"] == 1


@pytest.mark.parametrize(
    "make_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)
def test_both_loops_enroll_and_renew(
    tmp_path: Path, make_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def main() -> None:
        lab = Lab(tmp_path, ClusterAuthority.create(SystemClock().wall()))
        await lab.start()
        token = lab.token()
        credentials = await lab.enroll(token)
        await cast(EnrolledSource, credentials._source).fetch()
        assert await lab.identity_seen(credentials) == enrolled_worker(token)
        assert await exchange(lab, b"hello", stranger()) == b""
        assert (lab.outcomes["enrolled"], lab.outcomes["renewed"], lab.outcomes["refused"]) == (1, 1, 1)
        await lab.close()

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(main())


async def test_the_second_use_is_refused(lab: Lab) -> None:
    token = lab.token()
    await lab.enroll(token)
    with pytest.raises(ConfigError, match="used before") as caught:
        await lab.enroll(token)
    assert "kvolt cluster token" in str(caught.value.fields["remedy"])
    assert (lab.outcomes["enrolled"], lab.outcomes["enrollment_refused"]) == (1, 1)


async def test_a_restarted_server_refuses_used_tokens(lab: Lab) -> None:
    token = lab.token()
    await lab.enroll(token)
    assert lab._listener is not None
    await lab._listener.close()
    await lab.start()
    with pytest.raises(ConfigError, match="was used before"):
        await lab.enroll(token)


async def test_a_process_whose_response_was_lost_asks_again(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, losses = enrolled._decode_response, [ConnectFailed("lost", address="")]

    def lossy(body: bytes) -> object:
        if losses:
            raise losses.pop()
        return decode(body)

    monkeypatch.setattr(enrolled, "_decode_response", lossy)
    monkeypatch.setattr(enrolled, "_RETRY_S", 0.01)
    token = lab.token()
    assert await lab.identity_seen(await lab.enroll(token, timeout_s=10.0)) == enrolled_worker(token)
    assert lab.outcomes["enrolled"] == 2


async def test_an_expired_token_is_refused(lab: Lab) -> None:
    token = lab.token()
    lab.clock.offset_s = 3600
    with pytest.raises(ConfigError, match="expired"):
        await lab.enroll(token)


async def test_a_token_of_another_cluster_is_not_shown_to_the_server(lab: Lab) -> None:
    other = create_token(
        ClusterAuthority.create(SystemClock().wall()), ProcessRole.WORKER, lab.clock.wall(), 600
    )
    with pytest.raises(ConfigError, match="not of the cluster of the join token"):
        await lab.enroll(other.text)
    assert lab.outcomes["enrollment_refused"] == 0, "the server has got no request"


async def test_a_server_that_only_shows_the_authoritys_certificate_gets_no_token(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The certificate is public; the server's own must be issued by its key."""
    now = SystemClock().wall()
    real = ClusterAuthority.create(now)
    monkeypatch.setattr(lab.server, "welcome", lambda: Welcome(real.certificate_der))
    with pytest.raises(ConfigError, match="not of the cluster of the join token"):
        await lab.enroll(create_token(real, ProcessRole.WORKER, now, 600).text)
    assert lab.outcomes["enrollment_refused"] == 0, "the server has got no request"


async def test_the_role_is_the_tokens(lab: Lab) -> None:
    with pytest.raises(ConfigError, match="is for a worker, and this process is a frontend"):
        await lab.enroll(lab.token(), FRONTEND)
    token = lab.token()
    response = await ask(lab, EnrollRequest(signing_request(), "frontend", token))
    assert isinstance(response, enrollment.Enrolled)
    leaf = x509.load_pem_x509_certificates(response.chain_pem)[0]
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == [
        enrolled_identity(parse_token(token), "frontend").uri
    ]


async def test_no_process_gets_the_name_of_another(lab: Lab) -> None:
    victim = await lab.enroll(lab.token())
    names = WORKER.process, victim.identity.process, "x" * 111 + victim.identity.process[-17:], ""
    others = [(await lab.enroll(lab.token(), Identity(ProcessRole.WORKER, name))).identity for name in names]
    assert len({victim.identity, WORKER, *others}) == 6
    assert {each.role for each in others} == {ProcessRole.WORKER}


async def test_a_worker_cannot_collect_tokens_as_join_server(tmp_path: Path) -> None:
    lab = Lab(tmp_path, ClusterAuthority.create(SystemClock().wall()))
    await lab.start(Identity(ProcessRole.WORKER, "rogue"))
    with pytest.raises(ConfigError, match="not a frontend or router"):
        await lab.enroll(lab.token())
    assert not lab.outcomes["enrolled"]
    await lab.close()


async def test_a_certificate_renews_its_own_identity_only(lab: Lab) -> None:
    credentials = await lab.enroll(lab.token())
    source = cast(EnrolledSource, credentials._source)
    before = source.load(0.0)
    await source.fetch()
    renewed = source.load(0.0)
    assert renewed.chain_pem != before.chain_pem
    assert renewed.key_pem != before.key_pem
    assert lab.outcomes["renewed"] == 1
    context = tls_context(ssl.PROTOCOL_TLS_CLIENT, renewed)
    response = await ask(lab, EnrollRequest(signing_request(), "other-name"), context)
    assert isinstance(response, enrollment.Enrolled)
    leaf = x509.load_pem_x509_certificates(response.chain_pem)[0]
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == [credentials.identity.uri]


async def test_renewal_follows_a_rotated_key(lab: Lab) -> None:
    credentials = await lab.enroll(lab.token())
    source = cast(EnrolledSource, credentials._source)
    rotated = lab.authority.rotate(SystemClock().wall())
    lab.path.write_bytes(rotated.to_pem())
    lab.credentials.reload()
    await source.fetch()
    renewed = Credentials(source, SystemClock())
    assert await lab.identity_seen(renewed) == credentials.identity
    with pytest.raises(ConfigError, match="not of the cluster"):
        await lab.enroll(lab.token())  # of the previous key


async def test_it_is_renewed_at_half_its_lifetime(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvolt.runtime.security.credentials._CHECK_S", 0.01)
    clock = SteppedClock()
    credentials = await lab.enroll(lab.token(), clock=clock)
    expires_at = credentials.expires_at
    blocking = ThreadBlocking()
    task = asyncio.ensure_future(credentials.keep_fresh(blocking))
    await asyncio.sleep(0.1)
    assert lab.outcomes["renewed"] == 0
    lab.clock.offset_s = clock.offset_s = 13 * 3600
    async with asyncio.timeout(10):
        while credentials.expires_at <= expires_at:
            await asyncio.sleep(0.01)
    task.cancel()
    blocking.close()


async def test_a_failed_renewal_keeps_the_certificate(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    clock = SteppedClock()
    credentials = await lab.enroll(lab.token(), clock=clock)
    expires_at = credentials.expires_at
    await lab.close()
    await cast(EnrolledSource, credentials._source).fetch()
    clock.offset_s = 13 * 3600
    for _ in range(3):
        credentials.reload()
    assert credentials.expires_at == expires_at
    assert sum("certificate not renewed" in each.getMessage() for each in caplog.records) == 1


@pytest.mark.parametrize("offset_s", [-500.0, 12 * 3600.0])
async def test_clocks_of_the_machines_may_differ(lab: Lab, offset_s: float) -> None:
    clock = SteppedClock()
    clock.offset_s = offset_s
    await lab.enroll(lab.token(), clock=clock)


@pytest.mark.parametrize("offset_s", [-3600.0, 48 * 3600.0])
async def test_a_wrong_clock_is_named_as_the_cause(lab: Lab, offset_s: float) -> None:
    clock = SteppedClock()
    clock.offset_s = offset_s
    with pytest.raises(ConfigError, match="check the clocks"):
        await lab.enroll(lab.token(), clock=clock)


async def test_a_server_that_is_not_there_is_retried_until_the_timeout(lab: Lab) -> None:
    await lab.close()
    with pytest.raises(ConfigError, match="no certificate from") as caught:
        await lab.enroll(lab.token())
    assert "--discovery-join-listen" in str(caught.value.fields["remedy"])
