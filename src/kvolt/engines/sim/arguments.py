"""SimArguments: arguments of `engine = "sim"`, and the model and links that they describe."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvolt.core.latency import LatencyModel, OccupancyModel, scale_speed
from kvolt.engines.prefills import HOLD_S
from kvolt.engines.sim.links import SimLink
from kvolt.engines.sim.model import SimModel, generated_model, model_with_tokenizer, read_template, sim_card
from kvolt.engines.sim.transfers import NETWORK_IN
from kvolt.latency.presets import DEFAULT, find_model
from kvolt.scheduler.step_plan import Scheduling

_AtLeastOne = Annotated[int, Meta(ge=1)]


class SimArguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Arguments of `engine = "sim"`."""

    speed: Annotated[float, Meta(gt=0)] = 1.0
    """Factor by which steps and links are faster than the model. The registered latency model includes it."""
    slow_by: Annotated[float, Meta(gt=0)] = 1.0
    """Factor by which steps are slower than the registered latency model: simulates a degraded worker."""
    block_size: _AtLeastOne = 16
    kv_blocks: _AtLeastOne = 16_384
    context_length: _AtLeastOne = 32_768
    max_num_seqs: _AtLeastOne = 256
    max_waiting: _AtLeastOne = 4096
    max_batch_tokens: _AtLeastOne = 8192
    """Maximum tokens per step; at least `max_num_seqs`."""
    kv_events: bool = True
    """Report cached blocks to routers. Disable it to save the work if no router uses it (round-robin)."""
    hold_s: Annotated[float, Meta(gt=0)] = HOLD_S
    """How long blocks of a remote prefill are held until they are fetched, in seconds."""
    preset: str = DEFAULT
    """Latency model: a preset name, or a file written by `kvolt fit --out`."""
    latency: LatencyModel | None = None
    """Latency model as values, instead of a preset."""
    scheduling: Scheduling = Scheduling.VLLM
    """Step composition. vllm: prefill chunks mixed with decodes. sglang: prefills first."""
    merge_steps: bool = False
    """Simulate consecutive equal decode steps as one event, with all their tokens at its end."""
    trace_blocks: bool = False
    """For trace replay: blocks are named by the hashes of the request instead of its tokens, and have no content."""
    link_in_bytes_per_s: Annotated[float, Meta(gt=0)] | None = None
    """Bandwidth for all incoming KV, in bytes per second, multiplied by `speed`. None: unlimited."""
    link_latency_s: Annotated[float, Meta(ge=0)] = 0.0
    """Additional latency of the link, in seconds."""
    kv_bytes_per_token: _AtLeastOne = 131_072
    """KV size per token for transfer times; default: an 8B model in bfloat16. Uses no memory."""
    answer_text: str | None = None
    """Text of every answer. None: generated words."""
    words: _AtLeastOne | None = None
    """Number of generated words before EOS. None: words until max_tokens."""
    answer_from_prompt: bool = False
    """Take the answer from the last `<say>one text<or/>another for the next choice</say>` of the prompt, if
    it has one."""
    chat_template: str | None = None
    """A Jinja chat template or its path, instead of the sim model's."""
    tool_parser: str | None = None
    """Tool parser in the model card. None: the frontend derives it from the chat template."""
    reasoning_parser: str | None = None
    """Reasoning parser in the model card. None: as for `tool_parser`."""
    model_tokenizer: str | None = None
    """Path of a tokenizer.json, instead of the generated tokenizer. Answers then consist of its first words."""
    eos_token: str | None = None
    """The EOS token of `model_tokenizer`; required with it, since a tokenizer.json does not name it."""
    bos_token: str | None = None
    """The token of `model_tokenizer` that chat templates use as `bos_token`."""

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
        if self.trace_blocks and self.link_in_bytes_per_s:
            raise ValueError("trace blocks have no content to transfer: omit trace_blocks, or the link")
        if self.model_tokenizer is None and (self.eos_token is not None or self.bos_token is not None):
            raise ValueError("eos_token and bos_token require model_tokenizer")
        if self.model_tokenizer is not None and self.eos_token is None:
            raise ValueError("model_tokenizer requires eos_token, for example eos_token = '<|im_end|>'")


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
    return model_with_tokenizer(card, arguments.model_tokenizer, arguments.eos_token, arguments.bos_token)


def step_model_of(arguments: SimArguments) -> LatencyModel | OccupancyModel:
    """The latency model of an engine."""
    model = find_model(arguments.preset) if arguments.latency is None else arguments.latency
    if isinstance(model, LatencyModel):
        return scale_speed(model, arguments.speed)
    sized = msgspec.structs.replace(model, kv_tokens=arguments.kv_blocks * arguments.block_size)
    return scale_speed(sized, arguments.speed)


def links_of(arguments: SimArguments) -> list[SimLink]:
    """The configured link, scaled by the engine's speed."""
    if arguments.link_in_bytes_per_s is None:
        return []
    bytes_per_s, latency_s = (
        arguments.link_in_bytes_per_s * arguments.speed,
        arguments.link_latency_s / arguments.speed,
    )
    return [SimLink(NETWORK_IN, bytes_per_s, latency_s)]


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
