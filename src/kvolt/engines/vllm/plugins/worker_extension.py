"""Loaded in vLLM's workers (`worker_extension_cls`): seeded sampling continues correctly for resumed requests.

vLLM draws noise for each token from the request's generator, which is new for each request. A resumed request
(migrated, or with remote prefill) skips one draw per earlier token, so that its tokens equal those of an
uninterrupted request. On a CPU vLLM crashes when it reverts the draw of a discarded token (chunked prefill); the
generator here supports it. Runs in vLLM's process: imports only `cpu_patches` of kvolt.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.worker.gpu_input_batch import InputBatch

from kvolt.engines.vllm.plugins.cpu_patches import apply_patches

RESUMED = "kvolt_resumed"
"""As in `vllm.extras`, which is not imported into vLLM's workers."""
_SEEDS = 2**31
"""Range of the number that vLLM draws per token on a CPU."""

_add_request = InputBatch.add_request


class CpuDraws(torch.Generator):
    """Generator of a request that can reset itself to the number of tokens generated."""

    def follow(self, request: Any, num_before: int) -> None:
        self._request, self._num_before = request, num_before
        self.set_offset(0)

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> torch.Generator:
        """Revert a draw whose token was discarded."""
        self.manual_seed(self._request.sampling_params.seed)
        for _ in range(self._num_before + len(self._request.output_token_ids)):
            torch.randint(0, _SEEDS, (1,), dtype=torch.long, generator=self)
        return self


def _add_resumed(self: Any, request: Any) -> int:
    params, generator = request.sampling_params, request.generator
    if generator is not None:
        # Removed: a preempted request is added again with its current generator.
        num_before = params.extra_args.pop(RESUMED, 0) if params.extra_args else 0
        if generator.device.type != "cpu":
            noise = torch.empty(self.vocab_size, dtype=torch.float32, device=generator.device)
            for _ in range(num_before):
                noise.exponential_(generator=generator)
        elif not isinstance(generator, CpuDraws):
            request.generator = CpuDraws(device="cpu")
            request.generator.follow(request, num_before)
    index: int = _add_request(self, request)
    return index


InputBatch.add_request = _add_resumed

if current_platform.is_cpu():
    apply_patches()


class KvoltWorkerExtension:
    """Mixed into vLLM's worker class. The patches are applied when this module is imported."""
