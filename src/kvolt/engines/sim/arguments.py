"""SimArguments: what `engine = "sim"` can be told, and the model that comes of it."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvolt.core.latency import LatencyModel, OccupancyModel, at_speed
from kvolt.engines.prefills import HOLD_S
from kvolt.engines.sim.links import Link
from kvolt.engines.sim.model import SimModel, foreign_model, generated_model, read_template, sim_card
from kvolt.engines.sim.transfers import NETWORK_IN, NETWORK_OUT
from kvolt.latency.presets import DEFAULT, find_model
from kvolt.scheduler.step_plan import Scheduling

_AtLeastOne = Annotated[int, Meta(ge=1)]


class SimArguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Arguments of `engine = "sim"`."""

    speed: Annotated[float, Meta(gt=0)] = 1.0
    """Times faster than the step model says; others are told the time that it then takes."""
    slow_by: Annotated[float, Meta(gt=0)] = 1.0
    """Steps take so many times as long as others are told: a worker in trouble."""
    block_size: _AtLeastOne = 16
    kv_blocks: _AtLeastOne = 16_384
    context_length: _AtLeastOne = 32_768
    max_num_seqs: _AtLeastOne = 256
    max_waiting: _AtLeastOne = 4096
    max_batch_tokens: _AtLeastOne = 8192
    """Tokens that a step computes at most; it has room for one of each sequence."""
    kv_events: bool = True
    """Tell routers which blocks come and go; false saves the work where none of them asks (round-robin)."""
    hold_s: Annotated[float, Meta(gt=0)] = HOLD_S
    """How long blocks of a prompt that was computed for others wait to be fetched."""
    preset: str = DEFAULT
    """How long steps take: a name of those below, or a file that `kvolt fit --out` wrote."""
    latency: LatencyModel | None = None
    """The step model itself, in the place of a preset."""
    scheduling: Scheduling = Scheduling.VLLM
    """What goes into a step: vllm mixes chunks of prompts with decodes, sglang computes all prompts first."""
    merge_steps: bool = False
    """Decode steps between which nothing comes or goes are one event: their tokens come together, at the end."""
    paper: bool = False
    """For traces: blocks are named by the hashes that come with a request, its tokens are not looked at, and blocks
    hold nothing that could travel."""
    link_in_bytes_per_s: Annotated[float, Meta(gt=0)] | None = None
    """How fast KV of others comes in, all of it together; None: at once. `speed` makes links faster, too."""
    link_out_bytes_per_s: Annotated[float, Meta(gt=0)] | None = None
    """How fast KV goes out to others. KV from one worker to another takes the one's time, then the other's."""
    link_latency_s: Annotated[float, Meta(ge=0)] = 0.0
    """Of each of these links, besides."""
    kv_bytes_per_token: _AtLeastOne = 131_072
    """What links move for each token of a block; the default is an 8B model's in bfloat16. Memory takes none of it."""
    say: str | None = None
    """The text of every answer; None for words."""
    words: _AtLeastOne | None = None
    """After so many words an answer ends by itself, where EOS may end it; None for words until max_tokens."""
    say_from_prompt: bool = False
    """Let a prompt say what its answer is: `<say>one text<or/>another for the next choice</say>`, the last
    such span. Other prompts are answered as ever."""
    chat_template: str | None = None
    """A Jinja template, or the path of one, in place of the sim model's own."""
    tool_parser: str | None = None
    """Goes into the card; None lets the frontend find it by the template. So does the next."""
    reasoning_parser: str | None = None
    model_tokenizer: str | None = None
    """Path of a tokenizer.json in place of the generated one. Answers are then made of its first words."""
    eos_token: str | None = None
    """The token of `model_tokenizer` that ends an answer. It has to be told: a tokenizer.json does not say."""
    bos_token: str | None = None
    """The token of `model_tokenizer` that chat templates know as `bos_token`."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, str) and not _is_unicode(value):
                raise ValueError(f"{name} is not valid Unicode")
        if self.max_num_seqs > self.max_batch_tokens:
            raise ValueError(
                f"max_batch_tokens is {self.max_batch_tokens}; it must be max_num_seqs, which is "
                f"{self.max_num_seqs}, or more"
            )
        if self.latency is None:
            find_model(self.preset)
        if self.paper and (self.link_in_bytes_per_s or self.link_out_bytes_per_s):
            raise ValueError("on paper blocks hold nothing that could travel: leave out paper, or the links")
        if self.model_tokenizer is None and (self.eos_token is not None or self.bos_token is not None):
            raise ValueError("eos_token and bos_token are those of a model_tokenizer: name one")
        if self.model_tokenizer is not None and self.eos_token is None:
            raise ValueError("a model_tokenizer needs its eos_token, for example eos_token = '<|im_end|>'")


def model_of(name: str, arguments: SimArguments) -> SimModel:
    card = msgspec.structs.replace(
        sim_card(name, arguments.context_length, arguments.block_size),
        tool_parser=arguments.tool_parser,
        reasoning_parser=arguments.reasoning_parser,
    )
    if arguments.chat_template is not None:
        card = msgspec.structs.replace(card, chat_template=read_template(arguments.chat_template))
    if arguments.model_tokenizer is None or arguments.eos_token is None:
        return generated_model(card)
    return foreign_model(card, arguments.model_tokenizer, arguments.eos_token, arguments.bos_token)


def step_model_of(arguments: SimArguments) -> LatencyModel | OccupancyModel:
    """How long this engine's steps take."""
    model = find_model(arguments.preset) if arguments.latency is None else arguments.latency
    if isinstance(model, LatencyModel):
        return at_speed(model, arguments.speed)
    sized = msgspec.structs.replace(model, kv_tokens=arguments.kv_blocks * arguments.block_size)
    return at_speed(sized, arguments.speed)


def links_of(arguments: SimArguments) -> list[Link]:
    """The links that there are, in this engine's time."""
    speeds = {NETWORK_IN: arguments.link_in_bytes_per_s, NETWORK_OUT: arguments.link_out_bytes_per_s}
    return [
        Link(name, bytes_per_s * arguments.speed, arguments.link_latency_s / arguments.speed)
        for name, bytes_per_s in speeds.items()
        if bytes_per_s is not None
    ]


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
