"""Loaded by vLLM's own workers (`worker_extension_cls`): a seeded request that resumes draws on where it had stopped.

vLLM draws noise for each token from the request's generator, which begins anew with each request. One that has tokens
behind it (migrated, or its prompt computed elsewhere) skips as many draws, so that its answer is the one that it would
have had in one piece. On a CPU vLLM cannot take back the draw of a step whose token it discards (a part of a prompt):
it dies, with all its requests. There the generator can. Runs in vLLM's process: imports nothing of kvolt but
`cpu_mends`, which does too.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.worker.gpu_input_batch import InputBatch

from kvolt.engines.vllm.plugins.cpu_mends import mend

RESUMED = "kvolt_resumed"
"""As in `requests`, which is not imported: it is another process's."""
_SEEDS = 2**31
"""What vLLM draws one of for each token on a CPU."""

_add_request = InputBatch.add_request


class CpuDraws(torch.Generator):
    """A request's generator that knows how many draws it should have behind it: those of its tokens."""

    def follow(self, request: Any, num_before: int) -> None:
        self._request, self._num_before = request, num_before
        self.set_offset(0)

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> torch.Generator:
        """One draw too many was made, by a step that gave no token."""
        self.manual_seed(self._request.sampling_params.seed)
        for _ in range(self._num_before + len(self._request.output_token_ids)):
            torch.randint(0, _SEEDS, (1,), dtype=torch.long, generator=self)
        return self


def _add_resumed(self: Any, request: Any) -> int:
    params, generator = request.sampling_params, request.generator
    if generator is not None:
        # Taken away: a request that is preempted comes here again, with its generator as it was.
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
    mend()


class KvoltWorkerExtension:
    """Mixed into vLLM's worker class; what it is for happens when this module is imported."""
