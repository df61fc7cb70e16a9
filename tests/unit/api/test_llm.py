"""LLM: batches, results, errors, threads and the end."""

from __future__ import annotations

import asyncio
import gc
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.doc_blocks import blocks
from tests.waits import unexpected_lines

from kvolt import LLM, KvoltError, SamplingParams
from kvolt.api.progress import progress
from kvolt.core.errors import ConfigError, InvalidRequest, Unavailable, Unsupported
from kvolt.testing.tiny_models import tiny_checkpoint

FAST = {"speed": 1000.0, "words": 8}
USER = {"role": "user", "content": "Hello"}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("sim-tiny", **FAST) as opened:
        yield opened


def test_results_have_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [f"prompt {number}" for number in range(50)]
    results = llm.generate(prompts, SamplingParams(max_tokens=4), progress=False)
    assert [result.prompt for result in results] == prompts
    assert {len(result.outputs[0].token_ids) for result in results} == {4}
    assert {(result.finished, result.outputs[0].finish_reason) for result in results} == {(True, "length")}


def test_one_prompt_and_token_ids_are_prompts(llm: LLM) -> None:
    (text,) = llm.generate("Hello", progress=False)
    (ids,) = llm.generate(text.prompt_token_ids, progress=False)
    assert (text.prompt, ids.prompt) == ("Hello", None)
    assert ids.outputs[0].text == text.outputs[0].text
    assert llm.generate([], progress=False) == []


def test_prompts_may_be_dicts_as_in_vllm(llm: LLM) -> None:
    plain = llm.generate([[1, 2, 3], "Hello"], progress=False)
    dicts = llm.generate([{"prompt_token_ids": [1, 2, 3]}, {"prompt": "Hello"}], progress=False)
    assert [each.outputs for each in dicts] == [each.outputs for each in plain]
    (single,) = llm.generate({"prompt_token_ids": [1, 2, 3]}, progress=False)
    assert single.outputs == plain[0].outputs
    assert dicts[1].prompt == "Hello"


def test_the_tokenizer_gives_the_token_ids_of_a_prompt(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    (result,) = llm.generate("Hello there", SamplingParams(max_tokens=4), progress=False)
    assert tokenizer.encode("Hello there") == list(result.prompt_token_ids)
    assert tokenizer.decode(tokenizer.encode("Hello there")) == "Hello there"
    assert tokenizer.decode(result.outputs[0].token_ids) == result.outputs[0].text


def test_sampling_parameters_can_differ_by_prompt(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=2), SamplingParams(max_tokens=5, n=2)]
    first, second = llm.generate(["a", "b"], params, progress=False)
    assert [len(output.token_ids) for output in first.outputs] == [2]
    assert [(output.index, len(output.token_ids)) for output in second.outputs] == [(0, 5), (1, 5)]
    with pytest.raises(InvalidRequest, match="1 sampling parameters for 2 prompts"):
        llm.generate(["a", "b"], params[:1], progress=False)


def test_a_chat_is_rendered_by_the_template(llm: LLM) -> None:
    one, two = llm.chat([[USER], [USER, {"role": "assistant", "content": "Hi"}, USER]], progress=False)
    (same,) = llm.chat([USER], progress=False)
    assert one.prompt is not None
    assert "<|im_start|>user\nHello" in one.prompt
    assert one.outputs[0].text == same.outputs[0].text
    assert len(two.prompt_token_ids) > len(one.prompt_token_ids)
    assert one.outputs[0].finish_reason == "stop"  # max_tokens of a chat is the rest of the context


def test_stop_strings_end_an_output(llm: LLM) -> None:
    (whole,) = llm.generate("Hello", SamplingParams(max_tokens=6), progress=False)
    word = whole.outputs[0].text.split()[2]
    (cut,) = llm.generate("Hello", SamplingParams(max_tokens=6, stop=word), progress=False)
    output = cut.outputs[0]
    assert (output.finish_reason, output.stop_reason) == ("stop", word)
    assert whole.outputs[0].text.startswith(output.text)
    assert word not in output.text


def test_log_probabilities_are_by_token_id(llm: LLM) -> None:
    params = SamplingParams(max_tokens=3, logprobs=2, prompt_logprobs=1)
    (result,) = llm.generate("Hello", params, progress=False)
    output = result.outputs[0]
    assert output.logprobs is not None
    assert result.prompt_logprobs is not None
    assert [next(iter(each)) for each in output.logprobs] == list(output.token_ids)
    assert (
        "".join(
            each[token].decoded_token for each, token in zip(output.logprobs, output.token_ids, strict=True)
        )
        == output.text
    )
    assert result.prompt_logprobs[0] is None
    assert len(result.prompt_logprobs) == len(result.prompt_token_ids)
    assert llm.chat([USER], SamplingParams(logprobs=1), progress=False)[0].outputs[0].logprobs


def test_tool_calls_are_parsed() -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    with LLM("sim-tiny", answer_text=call, speed=1000.0, tool_parser="hermes") as llm:
        output = llm.chat([USER], tools=[tool], progress=False)[0].outputs[0]
    assert output.finish_reason == "tool_calls"
    assert [(each.name, each.arguments) for each in output.tool_calls] == [("weather", '{"city": "Rome"}')]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplingParams(temperature=-1.0), "temperature"),
        (SamplingParams(max_tokens=10**9), "max_tokens"),
        (SamplingParams(stop=3), "stop"),  # type: ignore[arg-type]
        (SamplingParams(stop={1, 2}), "cannot be written as JSON"),  # type: ignore[arg-type]
        (SamplingParams(response_format={"type": "json_object"}), "grammar"),
    ],
)
def test_errors_are_those_of_the_http_api(llm: LLM, params: SamplingParams, message: str) -> None:
    with pytest.raises((InvalidRequest, Unsupported), match=message):
        llm.generate("Hello", params, progress=False)
    assert llm.generate("Hello", progress=False)[0].finished


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (3, "a dict of its fields, not int"),
        (None, "a dict of its fields, not NoneType"),
        ("max_tokens", "a dict of its fields, not str"),
        ([3], "a dict of its fields, not int"),
        ({"max_tokns": 2}, r"'max_tokns'; did you mean max_tokens\?"),
    ],
)
def test_wrong_sampling_params_are_refused(llm: LLM, params: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        llm.generate("Hello", params, progress=False)
    with pytest.raises(InvalidRequest, match=message):
        llm.chat([USER], params, progress=False)


def test_a_dict_of_sampling_params_is_accepted(llm: LLM) -> None:
    same = llm.generate("Hello", {"max_tokens": 2}, progress=False)
    assert len(same[0].outputs[0].token_ids) == 2
    assert llm.generate("Hello", [{"max_tokens": 2}], progress=False)[0].outputs == same[0].outputs
    assert len(llm.chat([USER], {"max_tokens": 2}, progress=False)[0].outputs[0].token_ids) == 2


@pytest.mark.parametrize(
    ("prompts", "kind"),
    [
        ({"text": "Hello"}, "a dict with the keys text"),
        ([{"prompt": "Hello", "multi_modal_data": {}}], "a dict with the keys prompt, multi_modal_data"),
        ({"prompt_token_ids": 5}, "int"),
        (b"Hello", "bytes"),
        ([b"Hello"], "bytes"),
        (5, "int"),
        (["Hello", None], "NoneType"),
        ([["Hello", "there"]], "a list of str"),
        ([[[1, 2], [3]]], "a list of list"),
        ([[1, 2.5]], "a list of float, int"),
        ([[True]], "a list of bool"),
    ],
)
def test_only_texts_and_token_ids_are_prompts(llm: LLM, prompts: Any, kind: str) -> None:
    """A dict could be read as a list of its keys, bytes as token ids, a list of texts as one prompt."""
    with pytest.raises(InvalidRequest, match=rf"list of token ids, not {kind}(\n|$)"):
        llm.generate(prompts, progress=False)


def test_arrays_of_token_ids_are_prompts(llm: LLM) -> None:
    one, several = np.array([1, 2, 3]), np.array([[1, 2, 3], [4, 5, 6]])
    params = SamplingParams(max_tokens=1)
    for prompts in (one, several, [one], list(one)):
        results = llm.generate(prompts, params, progress=False)
        assert results[0].prompt_token_ids == (1, 2, 3)
        assert len(results) == (2 if prompts is several else 1)


@pytest.mark.parametrize("messages", [None, USER, "hello", iter([USER])])
def test_messages_are_a_list(llm: LLM, messages: Any) -> None:
    with pytest.raises(InvalidRequest, match="messages is a list of messages, not"):
        llm.chat(messages, progress=False)


def test_messages_may_be_objects_of_an_sdk(llm: LLM) -> None:
    class SdkMessage:
        def model_dump(self) -> dict[str, Any]:
            return USER

    params = SamplingParams(max_tokens=4)
    (one,) = llm.chat([SdkMessage()], params, progress=False)  # type: ignore[list-item]
    (same,) = llm.chat([USER], params, progress=False)
    assert one.prompt == same.prompt


def test_an_error_names_its_prompt(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="the prompt is empty") as raised:
        llm.generate(["Hello", "", "Hello"], progress=False)
    assert raised.value.__notes__ == ["in prompt 1 of 3"]
    with pytest.raises(InvalidRequest, match="unknown fields: tool_choise"):
        llm.chat([USER], tool_choise="auto", progress=False)  # type: ignore[call-arg]


def test_a_mistake_in_all_prompts_is_one_error(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    """The others are not logged: a batch has hundreds."""
    with pytest.raises(InvalidRequest, match="temperature"):
        llm.generate(["Hello"] * 50, SamplingParams(temperature=-1.0), progress=False)
    assert not caplog.records


def test_an_engine_without_embeddings_says_which_one_has_them(llm: LLM) -> None:
    with pytest.raises(Unsupported, match="'sim' does not compute embeddings; use the native engine"):
        llm.embed("Hello")


def test_bad_engines_and_models_are_refused_without_a_thread() -> None:
    before = set(threading.enumerate())
    with pytest.raises(ConfigError, match="unknown engine 'vlm'"):
        LLM(engine="vlm")
    with pytest.raises(ConfigError, match=r"has no argument 'speeed'; did you mean 'speed'\?$"):
        LLM("sim-tiny", speeed=2)
    with pytest.raises(ConfigError, match="did you mean 'context_length'"):
        LLM(max_model_len=100)
    with pytest.raises(KvoltError, match="nowhere"):
        LLM("./nowhere.gguf")
    assert set(threading.enumerate()) == before


async def test_it_works_while_an_event_loop_is_running() -> None:
    """As in a notebook: the cell runs on the kernel's loop."""
    assert asyncio.get_running_loop().is_running()
    with LLM("sim-tiny", **FAST) as llm:
        assert llm.generate("Hello", progress=False)[0].outputs[0].text


def test_threads_share_a_model(llm: LLM) -> None:
    texts: list[str] = []

    def generate() -> None:
        texts.append(llm.generate("Hello", progress=False)[0].outputs[0].text)

    threads = [threading.Thread(target=generate) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 4
    assert len(set(texts)) == 1


def test_progress_is_on_stderr(
    llm: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvolt.api.progress.LINE_S", 0.0)
    llm.generate(["a", "b"])
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "1 of 2 prompts\n2 of 2 prompts\n")


def test_progress_lines_end_with_the_last_item(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvolt.api.progress.LINE_S", 0.0)
    with progress("prompts", 3, quiet=False) as step:
        step()
        monkeypatch.setattr("kvolt.api.progress.LINE_S", 60.0)
        step()
        step()
    with progress("prompts", 1, quiet=False) as step:  # a short one prints nothing
        step()
    assert capsys.readouterr().err == "1 of 3 prompts\n3 of 3 prompts\n"


def test_progress_needs_no_stderr(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert len(llm.generate(["a", "b"])) == 2


def test_a_closed_model_says_so() -> None:
    llm = LLM("sim-tiny", **FAST)
    llm.close()
    llm.close()
    with pytest.raises(Unavailable, match="LLM sim-tiny is closed"):
        llm.generate("Hello", progress=False)


def test_closing_ends_a_call_of_another_thread() -> None:
    llm = LLM("sim-tiny", speed=1.0)
    errors: list[BaseException] = []

    def generate() -> None:
        try:
            llm.generate("Hello", SamplingParams(max_tokens=30_000), progress=False)
        except KvoltError as error:
            errors.append(error)

    thread = threading.Thread(target=generate)
    thread.start()
    while not len(llm._server._requests):
        time.sleep(0.01)
    llm.close()
    thread.join()
    assert "is closed" in str(errors[0])


def test_garbage_ends_its_thread() -> None:
    before = set(threading.enumerate())
    llm = LLM("sim-tiny", **FAST)
    (thread,) = (each for each in set(threading.enumerate()) - before if each.name == "LLM sim-tiny")
    del llm
    gc.collect()
    assert not thread.is_alive()


INTERRUPTED = """
import signal, threading, time
from kvolt import LLM, SamplingParams
llm = LLM("sim-tiny", speed=1.0)
def interrupt():
    while not len(llm._server._requests):
        time.sleep(0.01)
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
threading.Thread(target=interrupt).start()
try:
    llm.generate(["Hello"] * 20, SamplingParams(max_tokens=30_000), progress=False)
except KeyboardInterrupt:
    worker = llm._server._worker
    print("interrupted", len(worker._open), len(llm._server._requests))
print(len(llm.generate("Hello", SamplingParams(max_tokens=2), progress=False)[0].outputs[0].token_ids))
"""


def test_ctrl_c_cancels_the_call_and_leaves_the_model_usable() -> None:
    """And the interpreter ends without `close`."""
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["interrupted", "0", "0", "2"]
    assert unexpected_lines(done.stderr) == []


FORKED = """
import os, sys
from kvolt import LLM, KvoltError
llm = LLM("sim-tiny", speed=1000.0)
child = os.fork()
if child == 0:
    try:
        llm.generate("Hello", progress=False)
    except KvoltError as error:
        print(error, flush=True)
    sys.exit()
os.waitpid(child, 0)
print(len(llm.generate("Hello", progress=False)), "answer")
"""


def test_a_forked_process_is_told_to_create_its_own() -> None:
    """It has no thread that runs the loop: a call would wait for ever."""
    done = subprocess.run(
        [sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines() == [
        "LLM sim-tiny belongs to another process: create it after the fork",
        "1 answer",
    ]


def test_the_retrieval_of_the_page_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [text] = [block.text for block in blocks() if block.page == "docs/python.md" and "scores" in block.text]
    folder = str(tiny_checkpoint(tmp_path))
    exec(text.replace('LLM("smollm2-135m")', f'LLM({folder!r}, device="cpu", kv_blocks=128, threads=1)'), {})
    assert re.match(r"\(\S+, '.+\.'\)\n", capsys.readouterr().out)


def test_the_native_engine_generates_and_embeds(tmp_path: Path) -> None:
    """From a checkpoint folder, with the steps in a process of their own."""
    arguments: dict[str, Any] = {"kv_blocks": 128, "measure_steps": False, "threads": 1}
    with LLM(str(tiny_checkpoint(tmp_path)), device="cpu", **arguments) as llm:
        greedy = SamplingParams(max_tokens=8, temperature=0.0)
        first, second = llm.generate(["Hello", "Hello"], greedy, progress=False)
        assert first.outputs[0].token_ids == second.outputs[0].token_ids
        choice = SamplingParams(max_tokens=20, structured_outputs={"choice": ["yes", "no"]})
        assert llm.chat([USER], choice, progress=False)[0].outputs[0].text in ("yes", "no")
        one, other, same = llm.embed(["Hello", "a quite different text", "Hello"], progress=False)
        assert one == same != other
        assert sum(x * x for x in one) == pytest.approx(1.0)
        assert len(llm.embed(np.array([1, 2, 3]), progress=False)) == 1
        for wrong in ([["Hello", "there"]], [[1.5]]):
            with pytest.raises(InvalidRequest, match="not a list of"):
                llm.embed(wrong, progress=False)  # type: ignore[arg-type]
