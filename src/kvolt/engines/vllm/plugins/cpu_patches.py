"""Patches of vLLM on CPUs, applied in its processes.

`apply_patches` repairs its workers (see `worker_extension`):

- In a batch where some requests have an adapter, the others get the adapter of the last slot (index -1).
- Pipeline stages without compilation have no buffer for intermediate tensors, which only the warm-up of compiled models
  allocates; they crash at the first request.

`patch_waits` ends busy waiting, which takes cores from computation:

- vLLM's workers and scheduler spin on shared memory for a second after each message. Here they sleep until notified.
- vLLM pins the main thread of each worker with a NIXL connector, which is the thread that computes, to the last core of
  the host: all such workers of a host compute on one core. Here they run where the operating system puts them.
- The progress thread of a NIXL agent keeps a core busy. Here it polls every two milliseconds. It is still needed:
  without shared memory UCX needs progress on both sides, and an idle side would block the other.
"""

from __future__ import annotations

from typing import Any

import zmq

from kvolt.runtime.clock import SystemClock

_now = SystemClock().monotonic
_POLL_US = 2000
_BUSY_RECHECK_MS, _IDLE_RECHECK_MS = 2, 20
"""Poll interval of shared memory, within a second of the last message and later."""


def apply_patches() -> None:
    """Call once per process, before the model is loaded."""
    _fix_requests_without_lora()
    _allocate_intermediate_tensors()


def _fix_requests_without_lora() -> None:
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    shrink = lora_ops.bgmv_shrink

    def shrink_adapters_only(
        inputs: Any, weights: Any, output: Any, slots: Any, scaling: float = 1.0
    ) -> None:
        """First of the adapter's two products: a zero here makes the second add nothing."""
        shrink(inputs, weights, output, slots, scaling)
        output[slots < 0] = 0.0

    lora_ops.bgmv_shrink = punica_cpu.bgmv_shrink = shrink_adapters_only


def _allocate_intermediate_tensors() -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    gather = GPUModelRunner.sync_and_gather_intermediate_tensors

    def with_buffer(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.intermediate_tensors is None:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )
        return gather(self, *args, **kwargs)

    GPUModelRunner.sync_and_gather_intermediate_tensors = with_buffer


def patch_waits() -> None:
    """Call once per process, before its connector is created. No-op if vLLM uses an accelerator."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    _sleep_between_messages()
    _disable_core_pinning()
    _poll_nixl_rarely()


def _sleep_between_messages() -> None:
    """Notifications may be lost; vLLM polls again after five seconds, which is too late here."""
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    def wait(self: Any, timeout_ms: int | None = None) -> None:
        is_busy = _now() <= self.last_read + self.busy_loop_s
        limit_ms = _BUSY_RECHECK_MS if is_busy else _IDLE_RECHECK_MS
        events = dict(self.poller.poll(limit_ms if timeout_ms is None else min(timeout_ms, limit_ms)))
        if self.local_notify_socket in events:
            self.local_notify_socket.recv(zmq.NOBLOCK, copy=False)

    SpinCondition.wait = wait


def _disable_core_pinning() -> None:
    """Disable pinning: only the pinning code reads the topology."""
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.discover_numa_topology = classmethod(lambda cls: [])


def _poll_nixl_rarely() -> None:
    from nixl._api import nixl_agent

    bindings = nixl_agent.__init__.__globals__["nixlBind"]
    original = bindings.nixlAgent
    if getattr(original, "is_kvolt_patch", False):
        return

    def polling_rarely(name: str, config: Any) -> Any:
        config.pthrDelay = _POLL_US
        return original(name, config)

    polling_rarely.is_kvolt_patch = True  # type: ignore[attr-defined]
    bindings.nixlAgent = polling_rarely
