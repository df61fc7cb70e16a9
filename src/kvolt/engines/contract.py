"""The engine contract: what a worker asks of whatever computes.

Engines own their scheduling. `submit` only hands a request over; everything that comes of it leaves
through `steps`, one StepOutput for all sequences of a step. Each submitted request ends exactly once:
with a delta that has a finish reason for each of its choices, or in `StepOutput.failed`; an aborted or
withdrawn one just stops.

How a choice ends. Each choice ends by itself, at its own step; the request ends with the last of them.

- EOS, one of the card's `eos_token_ids`: finish STOP, no `stop_reason`. Not with `ignore_eos`.
- One of `stop_token_ids`: finish STOP, and the id is the `stop_reason`. An EOS among them counts as EOS, unless
  EOS is ignored.
- `max_tokens`: finish LENGTH, but STOP when that token is also one of the above.

The token that ends a choice is the last of its `token_ids`. Its text is no part of the answer: to leave it
out is up to the edge, which also knows stop strings. Neither EOS nor a stop token ends a choice with fewer than
`min_tokens` tokens before it; whether such a token is said and passed over or another one is taken in its place
is the engine's affair.

What is told. The delta with a choice's finish reason carries the `Usage` of that choice, and no other does:
`completion_tokens` counts all its tokens, the last and those of `resume` included; `prompt_tokens` is the same for
every choice, and is counted once by who adds them up. `reasoning_tokens` stays 0: only the edge sees text. The first
delta of choice 0 says by `cached_tokens` how many tokens of the prompt were not computed for it.

With `sampling.logprobs` every delta has one TokenLogprobs per token. `top` has as many as were asked for, the
most likely first; the chosen token need not be among them, and has the same figure if it is. Such a request has no
plain tokens. `prompt_logprobs` come with the first delta of choice 0, one per token of the prompt, None for the
first; not for a request that resumes, whose client has them.

A request that resumes goes on after the tokens that its client has, as if nothing had happened: grammar, penalties,
`min_tokens` and `max_tokens` go by all of them. Of several choices each goes on after its own (`resume_choices`), and
those that are over are not computed. An engine that cannot refuses it with Unsupported: to begin anew would tell the
client everything twice.

The same request with the same seed has the same tokens, wherever and with whatever else it runs.

Load. While there is work every step tells it; `kv_used_blocks` counts blocks that requests (and handoffs not yet
taken, and KV that came for requests not yet admitted) hold, so an engine at rest has 0, however much it keeps cached.

What an engine may offer besides is in the capability protocols below, each with a tier of the conformance suite
(`kvolt.testing.engines.tiers`). A worker asks with `features_of`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Literal, Protocol, runtime_checkable

import msgspec
from prometheus_client.core import Metric

from kvolt.core.card import EngineInfo, ModelCard
from kvolt.core.delta import StepOutput
from kvolt.core.ids import BlockKey, RequestId, SequenceHash
from kvolt.core.kv_block import KvBlock, KvLayout
from kvolt.core.kv_events import Stored
from kvolt.core.latency import LatencyModel
from kvolt.core.request import Handoff, Request, Role
from kvolt.transfer.memory.slabs import Slab

__all__ = [
    "FEATURES",
    "Embed",
    "Encode",
    "Engine",
    "EngineSpec",
    "KvBlock",
    "KvEvents",
    "KvHeld",
    "KvLayout",
    "KvMovable",
    "KvPlaced",
    "KvRoom",
    "KvTaken",
    "KvTierable",
    "KvVisible",
    "Lora",
    "Measured",
    "Pooling",
    "Prefill",
    "SealedKv",
    "Sleep",
    "features_of",
]

Pooling = Literal["mean", "last"]


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The model, role and devices of an engine: everything but the arguments of its own kind."""

    model: str
    role: Role
    devices: tuple[str, ...] = ()
    has_tiers: bool = False
    """Whether its blocks are offloaded to lower tiers, whatever its role."""


class Engine(Protocol):
    """The port. Capability protocols (Prefill, KvMovable, ...) are separate and optional."""

    @property
    def card(self) -> ModelCard:
        """The model served; the same for every instance that serves it. Known once started."""
        ...

    async def start(self) -> EngineInfo:
        """Load and be ready to compute."""
        ...

    def submit(self, request: Request) -> None:
        """Take a request. InvalidRequest or Unsupported when it can never run here; Overloaded when full."""
        ...

    def abort(self, request_id: RequestId) -> None:
        """Stop a request wherever it is and free what it holds. Unknown ids are no error."""
        ...

    async def withdraw(self, request_id: RequestId) -> bool:
        """Take a request back if it has not started; whether that was so."""
        ...

    def steps(self) -> AsyncIterator[StepOutput]:
        """The engine's output, without end. One reader. When it raises, the engine is dead."""
        ...

    async def close(self) -> None:
        """Stop computing and free everything; `steps` ends."""
        ...


@runtime_checkable
class KvEvents(Protocol):
    """Tells which blocks it has, as they change.

    Changes leave in `StepOutput.kv_changes`, in order, with the step that made them or, when there is none, at once
    in a step with nothing else. They name blocks by our hashes: `core.hashing` over the tokens, seeded by
    `request_seed`. A block is told once: it is stored again only after it was removed, and its parent is there when
    it is stored. A request finds what was told stored, and nothing that was told removed.
    """

    async def clear_kv(self) -> int:
        """Forget every cached block; how many. Running requests go on with what they hold, which others no
        longer find. Told by Cleared."""
        ...


@runtime_checkable
class KvVisible(Protocol):
    """Can be asked what it holds. Neither call changes anything, not even what would be evicted next."""

    async def match(self, request: Request) -> int:
        """Tokens of the prompt in blocks held here, from its start: a whole number of blocks."""
        ...

    async def kv_contents(self) -> tuple[Stored, ...]:
        """Every block that a request would find, parents first: what a replay of all changes gives."""
        ...


@runtime_checkable
class KvMovable(Protocol):
    """Gives blocks away and takes them in. For engines with equal layouts and equal keys."""

    def kv_layout(self) -> KvLayout:
        """Known after `start`."""
        ...

    def kv_keys(self, request: Request) -> tuple[BlockKey, ...]:
        """Names of the full blocks of a request's prompt. Equal here and elsewhere: the same bytes."""
        ...

    async def export_kv(self, keys: Sequence[BlockKey]) -> tuple[KvBlock, ...]:
        """The blocks of these keys up to the first that is not held, each sealed by its checksum."""
        ...

    async def import_kv(self, blocks: Sequence[KvBlock]) -> int:
        """Take blocks in, parents first, as cached; how many of them are here now.

        One that is not intact, has the wrong size, an unknown parent or no room is a miss, and so is what follows
        it: never an error, never wrong tokens. What is here already counts and is told only once.
        """
        ...


class KvHeld(msgspec.Struct, frozen=True):
    """Where the full blocks of a prompt lie that was computed for others."""

    blocks: tuple[int, ...]
    """Numbers in the engine's slabs."""
    keys: tuple[BlockKey, ...]
    hashes: tuple[SequenceHash, ...]


class KvRoom(msgspec.Struct, frozen=True):
    """Where blocks go that come from elsewhere."""

    num_present: int
    """Of the blocks asked for, from the first on, those that are here already."""
    blocks: tuple[int, ...]
    """For those after them, in order; fewer where there is no room."""


@runtime_checkable
class KvPlaced(Protocol):
    """Its blocks lie in a memory that others read and fill: what travels is copied once, and not by the engine.

    Blocks that are held or given room for do not move and are nobody else's until they are let go.
    """

    def kv_slabs(self) -> tuple[Slab, ...]:
        """One for each rank that shares the model's heads, in their order, with a layout that says which heads: a block
        has the same number in all of them. Known after `start`. Unsupported where the blocks lie in no such memory in
        this setup."""
        ...

    async def hold_kv(self, request_id: RequestId) -> KvHeld:
        """Of a prompt that `prefill` has computed; held until `release_prefill`, or the handoff expires. NotFound."""
        ...

    async def computed_kv(self, request_id: RequestId, after: int) -> KvHeld:
        """Of a prompt that `prefill` is computing or has computed: its complete full blocks from the first on, once
        there are more than `after` of them or all are there (then perhaps no more). They hold what they should and do
        not move until `release_prefill`, which whoever was told of them calls also when the prompt has failed, or the
        time of a handoff is over.

        `prefill` must have been called before: calls keep their order. NotFound for a prompt that is unknown or let go,
        or that is let go or fails while this waits. One waits for a prompt at a time: a later call takes the place of
        an earlier one, which is Cancelled. A call that is cancelled leaves nothing."""
        ...

    async def make_room(self, keys: Sequence[BlockKey], hashes: Sequence[SequenceHash]) -> KvRoom:
        """For blocks from the first of a sequence on. Ends with `settle_kv`, unless `blocks` is empty; a call that is
        cancelled leaves nothing."""
        ...

    async def settle_kv(self, room: KvRoom, num_filled: int, keep_for: RequestId | None = None) -> None:
        """So many of the room's blocks hold what they should, and what is submitted from now on finds them; the rest is
        let go.

        `keep_for`: they, and those that were here already, stay for this request until it is admitted, so that it need
        not compute its prompt. They do so until it is aborted, or is not submitted: `release_prefill` of its id, or
        the time of a handoff after this call; `clear_kv` forgets them as well. They are kept from what is merely
        cached, not from who computes: where a running request, or one that comes before this one, is in need of
        blocks, they may go."""
        ...


class KvTaken(msgspec.Struct, frozen=True):
    """Of blocks that came for a request which computes its prompt meanwhile."""

    is_here: bool = False
    """Whether it runs or waits."""
    num_taken: int = 0
    """Blocks that it need not compute."""
    num_reached: int = 0
    """Blocks of its prompt, from the first on, that it has or computes now: others for these are of no use. All of the
    room's where it has no use for any, as where it waits for blocks that only the room has."""


class SealedKv(msgspec.Struct, frozen=True):
    """Blocks one below the other that are full and computed."""

    first: int
    """Position of the first in its sequence."""
    blocks: tuple[int, ...]
    keys: tuple[BlockKey, ...]
    hashes: tuple[SequenceHash, ...]
    parent: BlockKey | None = None
    """Of the block before the first; None where that begins the sequence."""
    parent_hash: SequenceHash | None = None
    expires_in_s: float = 0.0
    """They stay where they are for so long, unless they are let go before."""


@runtime_checkable
class KvTierable(Protocol):
    """Says which of its blocks are complete, so that who has slower memory can copy them there (see `KvPlaced`)."""

    async def pin_sealed(self, name: RequestId) -> tuple[SealedKv, ...]:
        """Blocks that were completed since the last call and are still here; none the first time. They do not move
        until `Prefill.release_prefill` of that name, which no request has, or the time of a handoff is over. What
        would be too much to hold comes with the next call. Cancelled, it leaves nothing."""
        ...

    async def take_kv(self, room: KvRoom, num_last: int, request_id: RequestId) -> KvTaken:
        """The last `num_last` blocks of a room for its prompt (`KvPlaced.make_room`), those of earlier calls among
        them, hold what they should, and a request that was submitted may have those that it has not reached: it goes on
        behind them once it has computed what lies before them. One that waits takes none yet. What was taken is the
        room's no more; the room ends with `settle_kv` all the same, with none filled if some were taken."""
        ...


@runtime_checkable
class Prefill(Protocol):
    """Computes prompts for others to go on with; takes such prompts over.

    A submitted request with `handoff` set goes on as if its prompt had been computed here. Blocks that did not
    arrive are computed again; a ticket that is unknown or expired is that, or an EngineFailed, never wrong tokens.

    `Handoff.first_tokens` has one token for each choice: who called `prefill` tells them, and decode goes on after
    them, as after `resume`. They are None when decode has to tell them: one of them ends its choice, or the request
    wants logprobs. `completion_tokens` counts them in either case.
    """

    async def prefill(self, request: Request) -> Handoff:
        """Compute the prompt, sample the first tokens, keep the blocks until they are released or the ticket
        expires. Errors as of `submit`; a call that is cancelled leaves nothing."""
        ...

    async def release_prefill(self, request_id: RequestId) -> None:
        """The blocks were taken, or nobody wants them: let go. A prompt that is still computed is so no more, and its
        `prefill` is Cancelled. Also those that `KvPlaced.settle_kv` keeps for a request that was not submitted, and
        will not be. Unknown ids are no error."""
        ...


@runtime_checkable
class Lora(Protocol):
    """Adapters that requests choose by `Request.lora`; one that is not loaded is refused by `submit`."""

    async def load_lora(self, name: str, path: str) -> None:
        """InvalidRequest when it does not fit the model, or the name is taken by another one."""
        ...

    async def unload_lora(self, name: str) -> None:
        """Running requests end with it. NotFound when there is none of that name."""
        ...

    def loras(self) -> tuple[str, ...]:
        """Names of the loaded ones, in order of loading."""
        ...


@runtime_checkable
class Embed(Protocol):
    """Vectors of texts."""

    async def embed(self, inputs: Sequence[Sequence[int]], pooling: Pooling = "mean") -> list[list[float]]:
        """One vector of unit length for each list of tokens. InvalidRequest for one that is empty or too long."""
        ...


@runtime_checkable
class Encode(Protocol):
    """Turns media into what a language model reads."""

    async def encode(self, request: Request) -> Handoff:
        """Encode the request's media; the handoff has the expanded tokens, its ticket names the embeddings."""
        ...


@runtime_checkable
class Sleep(Protocol):
    """Gives its memory back for a while."""

    async def sleep(self, level: int) -> None:
        """1: weights to the host, KV dropped; 2: weights dropped as well. Nothing may be running."""
        ...

    async def wake(self) -> None: ...


@runtime_checkable
class Measured(Protocol):
    """Keeps metrics of its own, which a worker tells with its others. No feature: nobody decides by it."""

    def metrics(self, labels: Mapping[str, str]) -> Iterable[Metric]:
        """Under the engine's names; `labels` say whose they are."""
        ...


@runtime_checkable
class Calibrated(Protocol):
    """Corrects its step model by the steps it runs. No feature: the worker registers the corrected model."""

    @property
    def latency(self) -> LatencyModel | None:
        """The step model as corrected now; None where none was measured."""
        ...


FEATURES: dict[str, type] = {
    kind.__name__: kind
    for kind in (KvEvents, KvVisible, KvMovable, KvPlaced, KvTierable, Prefill, Lora, Embed, Encode, Sleep)
}
"""The capability protocols by name."""


def features_of(engine: object) -> tuple[str, ...]:
    """What this engine's class offers. An engine that cannot do all of it in its present setup says less in
    `EngineInfo.features`."""
    return tuple(name for name, protocol in FEATURES.items() if isinstance(engine, protocol))
