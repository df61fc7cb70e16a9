"""How vLLM's processes wait on a CPU, on stand-ins of what is changed in them."""

from __future__ import annotations

import sys
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import pytest
from tests.unit.engines.vllm.plugins.tier_lab import stood_in

from kvolt.engines.vllm.plugins import cpu_patches
from kvolt.engines.vllm.plugins.cpu_patches import patch_waits


class Poller:
    def __init__(self, *, is_notified: bool) -> None:
        self.is_notified = is_notified
        self.limits_ms: list[int] = []

    def poll(self, limit_ms: int) -> list[tuple[object, int]]:
        self.limits_ms.append(limit_ms)
        return [(NOTIFICATIONS, 1)] if self.is_notified else []


class Notifications:
    num_read = 0

    def recv(self, flags: int, copy: bool) -> None:
        self.num_read += 1


NOTIFICATIONS = Notifications()


class Installed:
    """vLLM's and NIXL's classes, after `patch_waits`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, is_cpu: bool) -> None:
        self.condition: Any = type("SpinCondition", (), {"wait": lambda self, timeout_ms=None: "spins"})
        self.platform: Any = type(
            "CpuPlatform", (), {"discover_numa_topology": classmethod(lambda cls: [[0, 1]])}
        )
        self.agents: list[Any] = []
        bindings = SimpleNamespace(nixlAgent=lambda name, config: self.agents.append(config))
        code = (lambda self: None).__code__
        agent = type("nixl_agent", (), {"__init__": FunctionType(code, {"nixlBind": bindings})})
        for name in ("nixl", "nixl._api"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        sys.modules["nixl._api"].nixl_agent = agent  # type: ignore[attr-defined]
        modules = {
            "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: is_cpu)},
            "vllm.platforms.cpu": {"CpuPlatform": self.platform},
            "vllm.distributed.device_communicators.shm_broadcast": {"SpinCondition": self.condition},
        }
        with stood_in(modules):
            patch_waits()
            patch_waits()  # both halves of a connector do, where they share a process
        bindings.nixlAgent("agent", SimpleNamespace(pthrDelay=0))

    def waiter(self, *, is_notified: bool, since_s: float) -> Any:
        condition = self.condition()
        condition.busy_loop_s = 1.0
        condition.last_read = cpu_patches._now() - since_s
        condition.local_notify_socket = NOTIFICATIONS
        condition.poller = Poller(is_notified=is_notified)
        return condition


@pytest.mark.parametrize(
    ("since_s", "timeout_ms", "limit_ms"), [(0.0, None, 2), (60.0, None, 20), (60.0, 5000, 20), (60.0, 7, 7)]
)
def test_a_reader_sleeps_and_looks_again_soon(
    monkeypatch: pytest.MonkeyPatch, since_s: float, timeout_ms: int | None, limit_ms: int
) -> None:
    """Notifications are lost now and then."""
    waiter = Installed(monkeypatch, is_cpu=True).waiter(is_notified=False, since_s=since_s)
    waiter.wait(timeout_ms)
    assert waiter.poller.limits_ms == [limit_ms]


def test_a_notification_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    waiter = Installed(monkeypatch, is_cpu=True).waiter(is_notified=True, since_s=0.0)
    num_before = NOTIFICATIONS.num_read
    waiter.wait()
    assert NOTIFICATIONS.num_read == num_before + 1


def test_workers_are_not_pinned_and_nixl_polls_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = Installed(monkeypatch, is_cpu=True)
    assert installed.platform.discover_numa_topology() == []
    assert [config.pthrDelay for config in installed.agents] == [2000]


def test_a_device_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = Installed(monkeypatch, is_cpu=False)
    assert installed.waiter(is_notified=False, since_s=0.0).wait() == "spins"
    assert installed.platform.discover_numa_topology() == [[0, 1]]
    assert [config.pthrDelay for config in installed.agents] == [0]
