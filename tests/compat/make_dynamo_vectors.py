"""Regenerate data/dynamo_hashes.json: block hashes as NVIDIA Dynamo itself computes them.

usage: python make_dynamo_vectors.py OUT.json

Run it with the Python of an environment that holds ai-dynamo 1.6.1 (no GPU, no network). It starts
Dynamo's frontend and mock workers on loopback, on free ports, in a temporary folder, and stops them before
it ends (the mock workers' event publishers listen on every interface all the same). It
takes a few seconds, and its output is the same on every run. No hash is computed here, only asked for:

local           per-block hashes, from `dynamo.llm.compute_block_hash_for_seq`.
sequence        chained hashes of the full blocks. "source" says who wrote them: "router" is the prefix index
                of Dynamo's KV router, "trace" is the frontend's request trace (`input_sequence_hashes`).
sequence_media  chained hashes of prompts with media, from the router.
trace           what the request trace writes where it departs from "sequence": it adds one hash for a partial
                last block, and it leaves the salt out. "salt" and "tenant" are what the request carried
                (`nvext.cache_salt`, header `x-tenant-id`).

"media" lists, per full block, the hashes of the media objects in it, in the order given to Dynamo.
"""

import asyncio
import contextlib
import importlib.metadata
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

PEER = "1.6.1"
TRACED_BLOCK_SIZES = (2, 16, 64)  # the mock worker refuses block size 1
VOCABULARY = 16000  # the frontend refuses token ids at or above it
TOP_TOKEN = 2**32 - 1
TOP_HASH = 2**64 - 1
START_SECONDS = 90
REPLY_SECONDS = 20
STOP_SECONDS = 10
PLANES = ("--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq")


def tokens(count, start=0, bound=2**32):
    """Distinct-looking token ids below `bound`, the same on every run."""
    return [((start + i) * 2654435761 + 12345) % 2**32 % bound for i in range(count)]


def vector(tokens, block_size, lora=None, salt=None, media=None):
    return {"tokens": tokens, "block_size": block_size, "lora": lora, "salt": salt, "media": media}


def media_argument(media):
    """Dynamo's per-block media description; the offsets of an object are required but not hashed."""
    if media is None:
        return None
    return [
        {"mm_objects": [{"mm_hash": h, "offsets": [[0, 1]]} for h in block]} if block else None
        for block in media
    ]


# ---- per-block hashes ----------------------------------------------------------------------------


def local_cases():
    for size in (1, 16, 64):
        for count in sorted({0, size - 1, size, size + 1, 3 * size, 3 * size + size // 2}):
            yield vector(tokens(count, start=size), size)
        yield vector([0] * size + [TOP_TOKEN] * size, size)
        yield vector(([0, TOP_TOKEN] * size)[: 2 * size], size)
    for size in (2, 3, 4, 5, 32, 33, 60, 61, 128, 512):  # every length class of xxh3 (8 to 2048 bytes)
        yield vector(tokens(size + 1, start=7 * size), size)
    names = ("a", "my-adapter", "org/adapter:v2", "適応", "adapter " * 40)
    for size in (1, 16, 64):
        prompt = tokens(2 * size + size // 2, start=31)
        for name in names:
            yield vector(prompt, size, lora=name)
            yield vector(prompt, size, salt=name)
        yield vector(prompt, size, lora="")
        yield vector(prompt, size, salt="")
        yield vector(prompt, size, lora="", salt="")
        yield vector(prompt, size, lora="my-adapter", salt="tenant-a")
        yield vector(prompt, size, lora="same", salt="same")
        for media in media_lists():
            yield vector(prompt, size, media=media)
        yield vector(prompt, size, lora="my-adapter", media=[[9, 5], [7]])
        yield vector(prompt, size, salt="tenant-a", media=[[9, 5], [7]])
        yield vector(prompt, size, lora="my-adapter", salt="tenant-a", media=[[9, 5], [7]])


def media_lists():
    """Media of two blocks: one object, several out of order, extremes, the same object twice, none."""
    return [
        [[0x1234567890ABCDEF], []],
        [[], [42]],
        [[3, 1, 2], [TOP_HASH, 0]],
        [[2**63, 2**63 - 1, 256, 255, 65536, 1], [7]],
        [[5, 5], [5]],
        [[], []],
    ]


def local_hashes(case):
    from dynamo.llm import compute_block_hash_for_seq

    return compute_block_hash_for_seq(
        case["tokens"],
        case["block_size"],
        block_mm_infos=media_argument(case["media"]),
        lora_name=case["lora"],
        cache_namespace=case["salt"],
    )


# ---- chained hashes from the router's prefix index -----------------------------------------------


def router_cases():
    for size in (1, 16, 64):
        prompt = tokens(4 * size + size // 2, start=1000 + size)
        yield vector(prompt, size)
        yield vector(prompt[: 2 * size] + tokens(size, start=5), size)  # shares a prefix with the one before
        yield vector([0] * (2 * size) + [TOP_TOKEN] * (2 * size), size)
        yield vector([1] * (5 * size), size)  # equal blocks at different positions
        for salt in ("tenant-a", "tenant-b", "sél"):
            yield vector(prompt, size, salt=salt)
        yield vector(prompt, size, lora="my-adapter")
        yield vector(prompt, size, lora="my-adapter", salt="tenant-a")
        yield vector(prompt, size, media=[[9, 5], [], [TOP_HASH], [0, 1]])
        yield vector(prompt, size, lora="my-adapter", salt="tenant-a", media=[[], [9, 5], [7], []])
    yield vector(tokens(40 * 16, start=77), 16)


async def router_hashes(cases, endpoint):
    """Let Dynamo's router book each prompt in its index, and read the chained hashes out of the index."""
    from dynamo.llm import KvRouter, KvRouterConfig
    from dynamo.runtime import DistributedRuntime

    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp", event_plane="zmq")
    routers = {}
    hashes = []
    try:
        for case in cases:
            size = case["block_size"]
            if size not in routers:
                config = KvRouterConfig(use_kv_events=False, router_ttl_secs=3600.0)
                routers[size] = KvRouter(runtime.endpoint(endpoint), size, config)
            await routers[size].best_worker(
                case["tokens"],
                update_indexer=True,
                block_mm_infos=media_argument(case["media"]),
                lora_name=case["lora"],
                cache_namespace=case["salt"],
            )
            hashes.append(await booked_path(routers[size], local_hashes(case)))
    finally:
        runtime.shutdown()
    return hashes


async def booked_path(router, locals_):
    """The index's chained hashes along the path of these per-block hashes, once the booking is visible."""
    deadline = time.monotonic() + REPLY_SECONDS
    while time.monotonic() < deadline:
        children = {}
        for record in json.loads(await router.dump_events()):
            stored = record["event"]["data"]["stored"]
            parent = stored["parent_hash"]
            for block in stored["blocks"]:
                children[parent, block["tokens_hash"]] = parent = block["block_hash"]
        path, parent = [], None
        for local in locals_:
            parent = children.get((parent, local))
            path.append(parent)
        if None not in path:
            return path
        await asyncio.sleep(0.05)
    raise TimeoutError("the router's index does not show a booked prompt")


# ---- chained hashes from the frontend's request trace --------------------------------------------


def trace_cases():
    """(block size, tokens, salt, tenant) of each request."""
    for size in TRACED_BLOCK_SIZES:
        prompt = tokens(4 * size, start=500 + size, bound=VOCABULARY)
        yield size, prompt, None, None
        yield size, prompt[:size], None, None
        yield size, prompt[: 2 * size] + tokens(2 * size, start=9, bound=VOCABULARY), None, None
        yield size, [0] * size + [VOCABULARY - 1] * size, None, None
        yield size, prompt[: 2 * size + 1], None, None
        yield size, prompt[:1], None, None
        yield size, prompt, "tenant-a", None
        yield size, prompt, None, "tenant-b"
        yield size, prompt[: 2 * size + 1], "tenant-a", "tenant-b"


def traced_hashes(cases, port, trace):
    ids = [send(port, *case) for case in cases]
    deadline = time.monotonic() + REPLY_SECONDS
    while time.monotonic() < deadline:
        replays = {}
        for line in trace.read_text().splitlines(keepends=True) if trace.exists() else ():
            event = json.loads(line)["event"] if line.endswith("\n") else {}
            if event.get("event_type") == "request_end":
                assert event["schema"] == "dynamo.request.trace.v1", event["schema"]
                replays[event["request"]["request_id"]] = event["request"]["replay"]
        if all(i in replays for i in ids):
            break
        time.sleep(0.1)
    else:
        raise TimeoutError("the request trace lacks a request that was answered")
    for i, (size, prompt, _, _) in zip(ids, cases, strict=True):
        assert (replays[i]["trace_block_size"], replays[i]["input_length"]) == (size, len(prompt)), replays[i]
    return [replays[i]["input_sequence_hashes"] for i in ids]


def send(port, size, prompt, salt, tenant):
    """One completion over token ids; returns the request's id."""
    body = {"model": f"mock-{size}", "prompt": prompt, "max_tokens": 1}
    headers = {"Content-Type": "application/json"}
    if salt is not None:
        body["nvext"] = {"cache_salt": salt}
    if tenant is not None:
        headers["x-tenant-id"] = tenant
    url = f"http://127.0.0.1:{port}/v1/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=REPLY_SECONDS) as reply:
        return json.load(reply)["id"].removeprefix("cmpl-")


# ---- Dynamo's processes --------------------------------------------------------------------------


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def write_model(folder):
    """The least that the frontend and the mock worker accept as a model: a configuration and a tokenizer."""
    from tokenizers import Tokenizer, models

    folder.mkdir()
    vocabulary = {"<eos>": 0} | {f"w{i}": i for i in range(1, VOCABULARY)}
    Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>")).save(str(folder / "tokenizer.json"))
    files = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<eos>",
            "chat_template": "{{ messages[0]['content'] }}",
        },
        "generation_config.json": {"eos_token_id": 0},
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32768,
            "eos_token_id": 0,
            "bos_token_id": 0,
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))


@contextlib.contextmanager
def dynamo(folder, port):
    """The frontend and one mock worker per traced block size, for the length of the block."""
    write_model(folder / "model")
    commands = {"frontend": ["dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port)]}
    for size in TRACED_BLOCK_SIZES:
        worker = ["dynamo.mocker", "--model-name", f"mock-{size}", "--model-path", str(folder / "model")]
        worker += ["--endpoint", f"dyn://vectors.mock{size}.generate", "--block-size", str(size)]
        worker += ["--num-gpu-blocks-override", "4096", "--speedup-ratio", "1000"]
        commands[f"mock-{size}"] = worker
    with contextlib.ExitStack() as stack:
        children = {}
        for name, command in commands.items():
            log = stack.enter_context(open(folder / f"{name}.log", "wb"))
            argv = [sys.executable, "-m", *command, *PLANES]
            env = os.environ | {"DYN_LOG": "warn"}
            child = subprocess.Popen(
                argv, stdout=log, stderr=log, cwd=folder, env=env, start_new_session=True
            )
            children[name] = child
            stack.callback(stop, child)
        wait_for_models(folder, port, children)
        yield


def wait_for_models(folder, port, children):
    wanted = {f"mock-{size}" for size in TRACED_BLOCK_SIZES}
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        for name, child in children.items():
            if child.poll() is not None:
                raise RuntimeError(f"{name} ended:\n{last_words(folder, name)}")
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5) as r,
        ):
            if wanted <= {model["id"] for model in json.load(r)["data"]}:
                return
        time.sleep(0.25)
    raise TimeoutError(f"the frontend does not list every mock model:\n{last_words(folder, 'frontend')}")


def last_words(folder, name):
    return (folder / f"{name}.log").read_text(errors="replace")[-4000:]


def stop(child):
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(STOP_SECONDS)
            return


def set_environment(folder):
    """Settings of Dynamo that have no flag, for the children and for the router in this process."""
    for name in [n for n in os.environ if n.startswith("DYN_")]:
        del os.environ[name]
    os.environ |= {
        "DYN_LOG": "off",
        "DYN_FILE_KV": str(folder / "discovery"),
        "DYN_TCP_RPC_HOST": "127.0.0.1",
        "DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1",
        "DYN_EVENT_PLANE_HOST": "127.0.0.1",
        "DYN_REQUEST_TRACE": "1",
        "DYN_REQUEST_TRACE_RECORDS": "request_end",
        "DYN_REQUEST_TRACE_SINKS": "file",
        "DYN_REQUEST_TRACE_FILE_FORMAT": "jsonl",
        "DYN_REQUEST_TRACE_FILE_PATH": str(folder / "trace.jsonl"),
        "DYN_REQUEST_TRACE_FILE_FLUSH_INTERVAL_MS": "100",
        "HF_HUB_OFFLINE": "1",
    }
    (folder / "discovery").mkdir()


# ---- the file ------------------------------------------------------------------------------------


def make_vectors(folder):
    port = free_port()
    set_environment(folder)
    out = {"peer": f"ai-dynamo {PEER}", "local": [], "sequence": [], "sequence_media": [], "trace": []}
    for case in local_cases():
        out["local"].append(case | {"hashes": local_hashes(case)})
    with dynamo(folder, port):
        requests = list(trace_cases())
        traced = traced_hashes(requests, port, folder / "trace.jsonl")
        cases = list(router_cases())
        routed = asyncio.run(router_hashes(cases, f"vectors.mock{TRACED_BLOCK_SIZES[0]}.generate"))
    for case, hashes in zip(cases, routed, strict=True):
        media = case.pop("media")
        if media is None:
            out["sequence"].append(case | {"source": "router", "hashes": hashes})
        else:
            out["sequence_media"].append(case | {"media": media, "source": "router", "hashes": hashes})
    for (size, prompt, salt, tenant), hashes in zip(requests, traced, strict=True):
        case = {"tokens": prompt, "block_size": size}
        if salt is None and tenant is None and len(prompt) % size == 0:
            out["sequence"].append(case | {"lora": None, "salt": None, "source": "trace", "hashes": hashes})
        else:
            out["trace"].append(case | {"salt": salt, "tenant": tenant, "hashes": hashes})
    return out


def dump(vectors):
    """JSON with one vector per line."""
    parts = []
    for key, value in vectors.items():
        if isinstance(value, list):
            lines = ",\n".join(json.dumps(v, separators=(",", ":")) for v in value)
            parts.append(f"{json.dumps(key)}: [\n{lines}\n]")
        else:
            parts.append(f"{json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: python make_dynamo_vectors.py OUT.json")
    found = importlib.metadata.version("ai-dynamo")
    if found != PEER:
        sys.exit(f"needs ai-dynamo {PEER}, found {found}")
    target = Path(sys.argv[1]).resolve()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that the children are stopped
    with tempfile.TemporaryDirectory(prefix="dynamo-vectors-", ignore_cleanup_errors=True) as folder:
        vectors = make_vectors(Path(folder))
    target.write_text(dump(vectors))
    counts = ", ".join(f"{len(v)} {k}" for k, v in vectors.items() if isinstance(v, list))
    print(f"{target}: {counts}; {target.stat().st_size} bytes")


if __name__ == "__main__":
    main()
