"""What vLLM's workers do wrong on a CPU, mended in their processes (see `worker_extension`).

- Of a batch in which some have an adapter, the others are given that of the last slot: it is what an index of -1 takes.
- A stage of a pipeline that runs without compiling has no room for what the stage before hands it: only the warm-up of
  compiled models makes it. It dies of its first request.
"""

from __future__ import annotations

from typing import Any

import torch


def mend() -> None:
    """Once for a process, before its model is loaded."""
    _leave_the_base_alone()
    _make_room_between_stages()


def _leave_the_base_alone() -> None:
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    shrink = lora_ops.bgmv_shrink

    def only_adapters(
        inputs: Any, weights: Any, output: Any, slots: torch.Tensor, scaling: float = 1.0
    ) -> None:
        """The first of an adapter's two products: where it is nothing the second adds nothing."""
        shrink(inputs, weights, output, slots, scaling)
        output[slots < 0] = 0.0

    lora_ops.bgmv_shrink = punica_cpu.bgmv_shrink = only_adapters


def _make_room_between_stages() -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    gather = GPUModelRunner.sync_and_gather_intermediate_tensors

    def with_room(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.intermediate_tensors is None:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )
        return gather(self, *args, **kwargs)

    GPUModelRunner.sync_and_gather_intermediate_tensors = with_room
