"""Patches of vLLM bugs on CPUs, applied in its workers (see `worker_extension`).

- In a batch where some requests have an adapter, the others get the adapter of the last slot (index -1).
- Pipeline stages without compilation have no buffer for intermediate tensors, which only the warm-up of compiled models
  allocates; they crash at the first request.
"""

from __future__ import annotations

from typing import Any

import torch


def apply_patches() -> None:
    """Call once per process, before the model is loaded."""
    _fix_requests_without_lora()
    _allocate_intermediate_tensors()


def _fix_requests_without_lora() -> None:
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    shrink = lora_ops.bgmv_shrink

    def shrink_adapters_only(
        inputs: Any, weights: Any, output: Any, slots: torch.Tensor, scaling: float = 1.0
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
