"""The engine contract: the interface between a worker and an engine.

An engine owns its scheduling. `submit` enqueues a request; all results leave through `steps`, one StepOutput
per engine step for all sequences. Every submitted request ends exactly once: with a delta that carries a
finish reason for each of its choices, or with an entry in `StepOutput.failed`. An aborted or withdrawn
request ends without output.

End of a choice. Each choice ends at its own step; the request ends with its last choice.

- EOS (one of the card's `eos_token_ids`): finish STOP, no `stop_reason`. Ignored with `ignore_eos`.
- One of `stop_token_ids`: finish STOP, `stop_reason` is the id. An EOS id in the list counts as EOS, unless
  EOS is ignored.
- `max_tokens`: finish LENGTH, or STOP if the last token is also one of the above.

The token that ends a choice is the last of its `token_ids`. The frontend, which also handles stop strings,
removes its text from the answer. Neither EOS nor a stop token ends a choice before `min_tokens` tokens; an
engine may emit such a token and continue, or sample another one.

Usage. Only the delta with a choice's finish reason carries `Usage`. `completion_tokens` counts all tokens of
the choice, including the last one and those of `prior_tokens`. `prompt_tokens` is the same for every choice
and must be summed once per request. `reasoning_tokens` stays 0: only the frontend sees text. The first delta
of choice 0 carries `cached_tokens`, the number of prompt tokens that were not computed for this request.

Logprobs. With `sampling.logprobs` every delta has one TokenLogprobs per token. `top` has the requested number
of entries, most likely first; the chosen token need not be among them, and has the same value if it is. Such
a request has no plain tokens. `prompt_logprobs` come with the first delta of choice 0, one entry per prompt
token, None for the first. They are not repeated for a resumed request.

Resumed requests. Generation continues after the tokens that the client already has: grammar, penalties,
`min_tokens` and `max_tokens` include them. With several choices each continues after its own tokens
(`prior_tokens_by_choice`), and finished choices are not computed. An engine that cannot resume raises
Unsupported; restarting would send all tokens twice.

Determinism. The same request with the same seed produces the same tokens on any instance and in any batch.

Load. Every step reports the load while there is work. `kv_used_blocks` counts blocks held by requests, by
handoffs that were not fetched yet, and by received KV of requests that are not admitted yet. It is 0 for an
idle engine, however much is cached.

Optional capabilities are the protocols below, each with a tier of the conformance suite
(`kvolt.testing.engines.tiers`). A worker queries them with `features_of`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Literal, Protocol, runtime_checkable

import msgspec
from prometheus_client.core import Metric

from kvolt.core.block_key import KvLayout
from kvolt.core.card import EngineInfo, ModelCard
from kvolt.core.delta import StepOutput
from kvolt.core.errors import Unsupported
from kvolt.core.ids import BlockKey, RequestId, SequenceHash
from kvolt.core.kv_events import Stored
from kvolt.core.latency import LatencyModel
from kvolt.core.request import Handoff, Request, Role, Sampling
from kvolt.transfer.memory.slabs import Slab

Pooling = Literal["mean", "last"]


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Model, role and devices of an engine: everything except its engine-specific arguments."""

    model: str
    role: Role
    devices: tuple[str, ...] = ()
    has_tiers: bool = False
    """Whether blocks are offloaded to lower tiers, in any role."""


class Engine(Protocol):
    """An inference engine. Capability protocols (Prefill, KvMovable, ...) are separate and optional."""

    @property
    def sampling_fields(self) -> frozenset[str]:
        """Fields of `Sampling` that the engine implements: `COMMON_SAMPLING_FIELDS` and others by name. A worker
        refuses requests that set others (`check_sampling_fields`), and so any field that is new."""

    @property
    def card(self) -> ModelCard:
        """Card of the served model; identical on every instance. Available after `start`."""

    async def start(self) -> EngineInfo:
        """Load the model and become ready to compute."""

    def submit(self, request: Request) -> None:
        """Enqueue a request. InvalidRequest or Unsupported if it can never run here; Overloaded if the queue
        is full."""

    def abort(self, request_id: RequestId) -> None:
        """Stop a request in any state and release its blocks. Unknown ids are ignored."""

    async def withdraw(self, request_id: RequestId) -> bool:
        """Remove a request that has not started. Returns False if it has started or is unknown."""

    def steps(self) -> AsyncIterator[StepOutput]:
        """Stream of step outputs, for one reader, until `close`. An exception means that the engine is dead."""

    async def close(self) -> None:
        """Stop computing and release all resources; `steps` ends."""


@runtime_checkable
class KvEvents(Protocol):
    """Reports changes of its prefix cache.

    Changes are in `StepOutput.kv_changes`, in order, with the step that caused them; outside a step they are
    sent immediately in a separate StepOutput. Blocks are named by kvolt's sequence hashes: `core.hashing`
    over the tokens, seeded by `request_seed`. A block is reported as stored once, after its parent, and again
    only after it was removed. A request finds exactly the blocks that were reported as stored and not
    removed.
    """

    async def clear_kv(self) -> int:
        """Drop all cached blocks and report Cleared; returns their number. Running requests keep their
        blocks, which new requests no longer find."""


@runtime_checkable
class KvVisible(Protocol):
    """Read-only view of the prefix cache. Neither call changes its state, including the eviction order."""

    async def match(self, request: Request) -> int:
        """Number of leading prompt tokens in cached blocks: a multiple of the block size."""

    async def kv_contents(self) -> tuple[Stored, ...]:
        """All cached blocks, parents first: equal to a replay of all changes."""


@runtime_checkable
class KvMovable(Protocol):
    """Layout and keys of blocks. Blocks can be copied between engines with equal layouts."""

    def kv_layout(self) -> KvLayout:
        """Available after `start`."""

    def kv_keys(self, request: Request) -> tuple[BlockKey, ...]:
        """Keys of the full blocks of a request's prompt. Equal keys on two engines mean equal bytes."""


class HeldKv(msgspec.Struct, frozen=True):
    """Full blocks of a prompt that was computed for a remote decode."""

    blocks: tuple[int, ...]
    """Block numbers in the engine's slabs."""
    keys: tuple[BlockKey, ...]
    hashes: tuple[SequenceHash, ...]


class KvAllocation(msgspec.Struct, frozen=True):
    """Blocks allocated for received KV."""

    num_present: int
    """Number of leading blocks that are cached already."""
    blocks: tuple[int, ...]
    """Destinations of the blocks after those, in order; fewer if the pool is full."""


@runtime_checkable
class KvAddressable(Protocol):
    """Blocks lie in memory that other processes read and write directly, without a copy by the engine.

    Held and allocated blocks neither move nor change owner until they are released.
    """

    def kv_slabs(self) -> tuple[Slab, ...]:
        """One slab per rank, in rank order, each with the layout of its attention heads; a block has the same
        number in all of them. Available after `start`. Unsupported if the blocks are not in such memory."""

    async def held_kv(self, request_id: RequestId) -> HeldKv:
        """Blocks of a prompt computed by `prefill`. Held until `release_prefill` or until the handoff
        expires. NotFound if there are none."""

    async def computed_kv(self, request_id: RequestId, after: int) -> HeldKv:
        """Wait for more than `after` complete full blocks of a prompt that `prefill` computes, or for its
        end.

        Returns all complete full blocks from the first on (possibly no new ones at the end). Their content is
        valid and they do not move until `release_prefill`, which the caller must also call if the prompt
        failed, or until the hold time of a handoff is over. `prefill` must have been called before; calls
        keep their order. NotFound if the prompt is unknown or released, also while waiting. One caller waits
        per prompt: a later call replaces an earlier one, which raises Cancelled. Cancelling a call has no
        effect on the engine.
        """

    async def allocate_kv(self, keys: Sequence[BlockKey], hashes: Sequence[SequenceHash]) -> KvAllocation:
        """Allocate blocks for a sequence from its first block on. Must be completed by `commit_kv` unless
        `blocks` is empty; a cancelled call allocates nothing."""

    async def commit_kv(
        self, allocation: KvAllocation, num_filled: int, keep_for: RequestId | None = None
    ) -> None:
        """Commit the first `num_filled` allocated blocks to the cache and release the rest.

        Requests submitted after this call find them. With `keep_for` the committed blocks and the leading
        blocks that were present already stay reserved for that request until it is admitted, aborted or, if
        it is never submitted, until `release_prefill` of its id or the hold time of a handoff after this
        call. `clear_kv` drops them too. They are protected from eviction of cached blocks only: a running
        request, or one ahead in the queue, may take them.
        """


class AttachedKv(msgspec.Struct, frozen=True):
    """Result of attaching received blocks to a request that computes its prompt concurrently."""

    is_known: bool = False
    """Whether the request is running or waiting."""
    num_attached: int = 0
    """Number of blocks that it need not compute."""
    num_reached: int = 0
    """Number of leading prompt blocks that the request has or is computing; received blocks before that are
    useless. All blocks of the allocation if it can use none, for example because it waits for blocks that
    only the allocation holds."""


class SealedKv(msgspec.Struct, frozen=True):
    """Consecutive blocks of one sequence that are full and computed."""

    first: int
    """Position of the first block in its sequence."""
    blocks: tuple[int, ...]
    keys: tuple[BlockKey, ...]
    hashes: tuple[SequenceHash, ...]
    parent: BlockKey | None = None
    """Key of the block before the first; None at the start of the sequence."""
    parent_hash: SequenceHash | None = None
    expires_in_s: float = 0.0
    """How long they stay pinned unless released earlier."""


@runtime_checkable
class KvTierable(Protocol):
    """Reports completed blocks so that slower tiers can copy them (see `KvAddressable`)."""

    async def pin_sealed(self, name: RequestId) -> tuple[SealedKv, ...]:
        """Pin the blocks that were completed since the last call and are still cached; none on the first
        call. They do not move until `Prefill.release_prefill(name)` (a name that no request has) or until the
        hold time of a handoff is over. What would pin too many blocks is returned by the next call. A
        cancelled call pins nothing."""

    async def attach_kv(self, allocation: KvAllocation, num_last: int, request_id: RequestId) -> AttachedKv:
        """Attach the last `num_last` blocks of an allocation, including those of earlier calls, to a
        submitted request.

        The blocks must be filled. The request uses those that it has not reached: it continues behind them
        once it has computed the blocks before them. A waiting request attaches none yet. Attached blocks
        leave the allocation, which still ends with `commit_kv`, with `num_filled` 0 if any were attached.
        """


@runtime_checkable
class Prefill(Protocol):
    """Computes prompts for a remote decode, and continues prompts that were computed remotely.

    A submitted request with `handoff` continues as if its prompt had been computed here. Blocks that did not
    arrive are recomputed; an unknown or expired ticket leads to recomputation or EngineFailed, never to wrong
    tokens.

    `Handoff.first_tokens` has one token per choice. The caller of `prefill` emits them, and decode continues
    after them as after `prior_tokens`. They are None if decode must emit them: one of them ends its choice,
    or the request wants logprobs. `completion_tokens` counts them in either case.
    """

    async def prefill(self, request: Request) -> Handoff:
        """Compute the prompt, sample the first tokens, and hold the blocks until they are released or the
        ticket expires. Same errors as `submit`; a cancelled call leaves nothing."""

    async def release_prefill(self, request_id: RequestId) -> None:
        """Release held blocks. A prompt that is still being computed is stopped and its `prefill` raises
        Cancelled. Also releases blocks that `KvAddressable.commit_kv` keeps for a request that will not be
        submitted. Unknown ids are ignored."""


@runtime_checkable
class Lora(Protocol):
    """LoRA adapters, selected by `Request.lora`. `submit` rejects a request for an adapter that is not
    loaded."""

    async def load_lora(self, name: str, path: str) -> None:
        """InvalidRequest if the adapter does not fit the model or the name is in use."""

    async def unload_lora(self, name: str) -> None:
        """Ends running requests of the adapter. NotFound if the name is not loaded."""

    def loras(self) -> tuple[str, ...]:
        """Names of the loaded adapters, in loading order."""


@runtime_checkable
class Embed(Protocol):
    """Text embeddings."""

    async def embed(self, inputs: Sequence[Sequence[int]], pooling: Pooling = "mean") -> list[list[float]]:
        """One vector of unit length per token list. InvalidRequest for an empty or too long list."""


@runtime_checkable
class Sleep(Protocol):
    """Releases device memory while idle."""

    async def sleep(self, level: int) -> None:
        """1: move weights to the host, drop KV; 2: drop weights too. No request may be running."""

    async def wake(self) -> None: ...


@runtime_checkable
class MetricsProvider(Protocol):
    """Exports metrics, which the worker publishes with its own. Not listed in FEATURES: no decision depends
    on it."""

    def metrics(self, labels: Mapping[str, str]) -> Iterable[Metric]:
        """Metrics under the engine's own names, with `labels` added."""


@runtime_checkable
class Calibrated(Protocol):
    """Corrects its latency model by the steps it runs. Not listed in FEATURES: the worker registers the
    corrected model."""

    @property
    def latency(self) -> LatencyModel | None:
        """The corrected latency model; None if no model was measured."""


FEATURES: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        KvEvents,
        KvVisible,
        KvMovable,
        KvAddressable,
        KvTierable,
        Prefill,
        Lora,
        Embed,
        Sleep,
    )
}
"""Capability protocols by name."""


def features_of(engine: object) -> tuple[str, ...]:
    """Capabilities of this engine's class. `EngineInfo.features` lists fewer if the current setup does not
    support all."""
    return tuple(name for name, protocol in FEATURES.items() if isinstance(engine, protocol))


COMMON_SAMPLING_FIELDS = frozenset(
    [
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "seed",
        "num_choices",
        "logprobs",
    ]
)
"""Fields of `Sampling` that all known engines implement. A new field belongs here only when all of them do."""

_DEFAULT_SAMPLING = Sampling()


def check_sampling_fields(sampling: Sampling, supported: frozenset[str], engine: str) -> None:
    """Raise Unsupported if a field is set that the engine does not declare in `sampling_fields`."""
    for name in Sampling.__struct_fields__:
        if name not in supported and getattr(sampling, name) != getattr(_DEFAULT_SAMPLING, name):
            refusal = f"the engine {engine} does not support {name}: leave it out"
            raise Unsupported(refusal, feature=name, param=name)
