"""KvoltNixlConnector: vLLM's NixlConnector for handoffs of ours. Loaded by vLLM (`kv_connector_module_path`).

Two things more than its own: decode fetches the KV of the prompt and no more, so that it can be given the first token
as well, which prefill has told already; and blocks that nobody will fetch are let go when we say so, not only when
their lease is over. Runs in vLLM's processes: imports nothing of kvolt but names.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector

RELEASE = "kvolt_release"
"""As in `prefills`, which is not imported: it is another process's."""


_LOOKS_EVERY_US = 2000


def _rest_while_idle() -> None:
    """A NIXL agent's thread keeps a core busy with looking for work, which on a CPU is taken from who computes: there
    it looks now and then. Not at all would be too little: where UCX has no memory in common it needs both sides, and
    one that has no steps to make would let the other wait for ever."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from nixl._api import nixl_agent

    bindings = nixl_agent.__init__.__globals__["nixlBind"]
    original = bindings.nixlAgent

    def looking_now_and_then(name: str, config: Any) -> Any:
        config.pthrDelay = _LOOKS_EVERY_US
        return original(name, config)

    bindings.nixlAgent = looking_now_and_then


_rest_while_idle()


class KvoltNixlConnector(NixlConnector):  # type: ignore[misc]
    """See the module."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        count, is_later = super().get_num_new_matched_tokens(request, num_computed_tokens)
        params = request.kv_transfer_params
        if params and params.get("do_remote_prefill") and params.get("remote_num_tokens"):
            count = min(count, max(params["remote_num_tokens"] - num_computed_tokens, 0))
        return (count, is_later) if count else (0, False)

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        if self._let_go(request):
            return False, None
        return super().request_finished(request, block_ids)  # type: ignore[no-any-return]

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        if self._let_go(request):
            return False, None
        return super().request_finished_all_groups(request, block_ids)  # type: ignore[no-any-return]

    def _let_go(self, request: Any) -> bool:
        """Whether the request only says whose blocks nobody will fetch. Their lease is over then: the worker lets go
        of them in the step that follows."""
        params = request.kv_transfer_params
        if not params or RELEASE not in params:
            return False
        self.connector_scheduler._reqs_need_send[params[RELEASE]] = 0.0
        return True
