"""transformers beside the engine, on the same random weights: its continuous batching, and plain `generate`.

Without a flash-attention package its continuous batching has `paged|sdpa` only: all sequences of a step attend to all
KV under a mask. Prefilling 256 prompts of 1k that way takes minutes, so at batch 256 the peer gets shorter contexts
(in its favour); the table says which.
"""

from __future__ import annotations

import inspect
import time
from typing import Any

import torch
from benchmarks.engine.gpu_bench import Bench, RandomWeights, spread
from benchmarks.engine.gpu_engine import (
    CONTEXT,
    PROMPTS,
    decode_rate,
    engine_of,
    prefill_seconds,
    random_prompts,
)

_NEW_TOKENS = 33
_LARGE_CONTEXT = 256


def peer_of(bench: Bench) -> Any:
    """transformers' model with our weights, built once."""
    if "peer" not in bench.shared:
        from transformers import AutoModelForCausalLM, LlamaConfig

        config = bench.config
        hf = LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            max_position_embeddings=config.context_length,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )
        with torch.device(bench.device):
            model = AutoModelForCausalLM.from_config(hf, attn_implementation="sdpa", dtype=bench.dtype)
        weights = RandomWeights(config, bench.device)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(weights.tensor(name, bench.dtype))
        bench.shared["peer"] = model.eval()
    return bench.shared["peer"]


def _same_logits(bench: Bench, model: Any) -> dict[str, Any]:
    """Do both compute the same function? Their choices after one prompt, and the distance of their logits."""
    from benchmarks.engine.gpu_checks import all_logits

    prompt = random_prompts(bench, 1, 64, "same")[0]
    ours = all_logits(engine_of(bench), prompt)
    model.set_attn_implementation("sdpa")
    with torch.inference_mode():
        theirs = model(torch.tensor([prompt], device=bench.device)).logits[0].float().cpu()
    agree = (ours.argmax(-1) == theirs.argmax(-1)).float().mean()
    return {"agree": float(agree), "distance": float((ours - theirs).std()), "spread": float(theirs.std())}


def generate_rate(bench: Bench, batch: int, context: int, new_tokens: int) -> dict[str, float]:
    """Plain `generate`: a static batch of equal prompts."""
    model = peer_of(bench)
    model.set_attn_implementation("sdpa")
    prompts = torch.tensor(random_prompts(bench, batch, context, "decode"), device=bench.device)

    def run(count: int) -> float:
        bench.sync()
        started = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
            )
        bench.sync()
        assert out.shape[1] == context + count, out.shape
        return time.perf_counter() - started

    first = run(1)
    whole = run(new_tokens)
    return {
        "tokens_per_s": batch * (new_tokens - 1) / (whole - first),
        "prefill_tokens_per_s": batch * context / first,
    }


def batching_rate(bench: Bench, batch: int, context: int, new_tokens: int, seed: object) -> dict[str, Any]:
    """Its continuous batching: the decode rate while all sequences decode, and the time to all first tokens."""
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    model = peer_of(bench)
    model.set_attn_implementation("paged|sdpa")
    prompts = random_prompts(bench, batch, context, seed)
    config = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    wanted = {
        "num_blocks": batch * (-(-(context + new_tokens) // 256) + 1) + 4,
        "max_batch_tokens": 64 if bench.is_smoke else 8192,
        "allow_block_sharing": False,
    }
    known = inspect.signature(ContinuousBatchingConfig).parameters
    batching = ContinuousBatchingConfig(**{name: value for name, value in wanted.items() if name in known})
    arguments = {
        "generation_config": config,
        "continuous_batching_config": batching,
        "warmup": False,
        "timeout": 20,
    }
    taken = inspect.signature(model.continuous_batching_context_manager).parameters
    context_manager = model.continuous_batching_context_manager(
        **{name: value for name, value in arguments.items() if name in taken}
    )
    limit = time.perf_counter() + min(120.0, max(bench.left_s - 10, 5))
    outputs = []
    with context_manager as manager:
        started = time.perf_counter()
        manager.add_requests(inputs=prompts, max_new_tokens=new_tokens, record_timestamps=True)
        while len(outputs) < batch:
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                outputs.append(result)
            elif result is None and not manager.is_running():
                raise RuntimeError("its thread ended early")
            if time.perf_counter() > limit:
                raise TimeoutError(
                    f"{len(outputs)} of {batch} sequences after {time.perf_counter() - started:.0f} s"
                )
    failed = [output.error for output in outputs if output.error]
    if failed:
        raise RuntimeError(failed[0])
    first = max(output.timestamps[0] for output in outputs)
    last = min(output.timestamps[-1] for output in outputs)
    inside = sum(first < at <= last for output in outputs for at in output.timestamps)
    return {
        "tokens_per_s": inside / (last - first) if last > first else None,
        "first_tokens_s": first - started,
        "prefill_tokens_per_s": batch * context / (first - started),
    }


def beside_transformers(bench: Bench) -> dict[str, Any]:
    """Ours and both of theirs in turn, round by round; batch 256 once."""
    results: dict[str, Any] = {}
    core, model = engine_of(bench), peer_of(bench)
    with bench.attempt("same weights", results):
        results["same weights"] = _same_logits(bench, model)
    small, large = ((2,), 4) if bench.is_smoke else ((1, 32), 256)
    context, new = (40, 6) if bench.is_smoke else (CONTEXT, _NEW_TOKENS)
    rows: dict[str, list[float]] = {}
    with bench.attempt("warm-up", results):
        batching_rate(bench, 2, 40, 4, "warm")
        generate_rate(bench, 2, 40, 4)
    for _ in range(bench.rounds):
        for batch in small:
            _one_round(bench, results, rows, core, f"{batch} x {context}", batch, context, new)
    shorter = 24 if bench.is_smoke else _LARGE_CONTEXT
    _one_round(bench, results, rows, core, f"{large} x {shorter}", large, shorter, new)
    for length in (60, 120) if bench.is_smoke else PROMPTS:
        with bench.attempt(f"prefill {length}", results):
            for seed in range(2):  # the first warms
                ours = length / prefill_seconds(bench, core, length, f"peer {seed}")
                theirs = batching_rate(bench, 1, length, 2, f"prefill {seed}")["prefill_tokens_per_s"]
            rows[f"prefill {length}, kvolt"] = [ours]
            rows[f"prefill {length}, continuous batching"] = [theirs]
        with bench.attempt(f"prefill {length}, generate", results):
            rows[f"prefill {length}, generate"] = [
                generate_rate(bench, 1, length, 2)["prefill_tokens_per_s"] for _ in range(2)
            ][1:]
    results["tokens_per_s"] = {name: spread(values) for name, values in rows.items()}
    return results


def _one_round(
    bench: Bench,
    results: dict[str, Any],
    rows: dict[str, list[float]],
    core: Any,
    case: str,
    batch: int,
    context: int,
    new: int,
) -> None:
    with bench.attempt(f"{case}, kvolt", results):
        rate = decode_rate(bench, core, batch, context, new - 1)["tokens_per_s"]
        rows.setdefault(f"{case}, kvolt", []).append(rate)
    with bench.attempt(f"{case}, continuous batching", results):
        rate = batching_rate(bench, batch, context, new, "decode")["tokens_per_s"]
        rows.setdefault(f"{case}, continuous batching", []).append(rate)
    bench.free()
    with bench.attempt(f"{case}, generate", results):
        rate = generate_rate(bench, batch, context, new)["tokens_per_s"]
        rows.setdefault(f"{case}, generate", []).append(rate)
    bench.free()
