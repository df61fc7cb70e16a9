"""HTTP edges under test: kvolt's and Dynamo's frontend, each with mock workers of the same speed.

An edge is every process between a client's socket and the workers, with its threads and children; mock workers are not
part of it. A sim step takes the same time whatever is in it; without a time, workers make steps as fast as their event
loop turns.

Dynamo 1.6.1 is installed into a folder of its own, without its declared dependencies, because they name a placeholder
that PyPI alone cannot supply; those that its frontend and mock workers import are named here. It needs no GPU. The
mock's decode step takes 5.74 ms divided by its speed-ups as long as few of its KV blocks are in use, hence a million of
them; prefill is a thousand times faster than real. Dynamo logs a line per request whatever DYN_LOG says, to a file.
"""

from __future__ import annotations

import json
import ssl
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from benchmarks.frontend import tiny_model
from benchmarks.frontend.tiny_model import EOS_TOKEN, TinyModel
from benchmarks.harness import Missing
from benchmarks.meters import Meter
from benchmarks.processes import (
    KVOLT,
    Processes,
    arg_flags,
    clean_environ,
    free_port,
    installed_python,
    output_of,
)

KVOLT_NAME = "kvolt"
DYNAMO_VERSION = "1.6.1"
DYNAMO_NAME = f"Dynamo {DYNAMO_VERSION}"
NUM_WORKERS = 2
BLOCK_SIZE = 16
"""Tokens, on both sides."""
DYNAMO_PLANES = ("--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq")

_DYNAMO_PACKAGES = (f"ai-dynamo=={DYNAMO_VERSION}", f"ai-dynamo-runtime=={DYNAMO_VERSION}")
_DYNAMO_NEEDS = (
    *("aiohttp>=3.14.3", "certifi", "kubernetes<33", "msgspec", "numpy", "prometheus-client"),
    *("pydantic<=2.13.5", "pyzmq", "redis<9", "tokenizers", "tqdm", "transformers", "typing-extensions"),
    *("uvloop", "zstandard"),
)
_TENANT = (
    *("--tenant", "bench", "--requests-per-second", "1000000", "--concurrency", "100000"),
    *("--input-tokens-per-minute", "1000000000000", "--output-tokens-per-minute", "1000000000000"),
)
"""A tenant with every kind of limit, none of which is reached."""
_SPEEDUP = 1000.0
_DECODE_STEP_S = 0.00574


@dataclass(slots=True)
class Edge:
    """An edge that serves."""

    name: str
    port: int
    meter: Meter
    mock_meter: Meter
    step_s: float | None
    """Step time of the mock workers, which give every stream a token per step; None: as fast as they can."""
    tls: ssl.SSLContext | None = None
    """Of a client, where the edge speaks HTTPS."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Of every request: an API key."""

    @property
    def head(self) -> str:
        return "".join(f"{name}: {value}\r\n" for name, value in self.headers.items())


class ServerCertificate(msgspec.Struct, frozen=True):
    """Files of a certificate for this machine, made for one run."""

    certificate: Path
    private_key: Path

    def client_context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.certificate))


def server_certificate(folder: Path) -> ServerCertificate:
    """Signed by itself with a P-256 key, by the program `openssl`."""
    files = ServerCertificate(folder / "certificate.pem", folder / "key.pem")
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
    ]
    command += ["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-out", str(files.certificate), "-keyout", str(files.private_key)]
    try:
        subprocess.run(command, capture_output=True, check=True)
    except FileNotFoundError:
        raise Missing("the program openssl") from None
    return files


class Dynamo(msgspec.Struct, frozen=True):
    """An installed Dynamo, and the model folder beside it."""

    python: Path
    model: TinyModel


def dynamo_python(folder: Path, *, may_install: bool = True) -> Path:
    """Interpreter of Dynamo in this folder; Missing if it cannot be installed."""
    about = f"{DYNAMO_NAME} (0.7 GB, Linux on x86-64 or arm64)"
    packages = (["--no-deps", *_DYNAMO_PACKAGES], _DYNAMO_NEEDS)
    return installed_python(folder / "dyn", "import dynamo.llm", about, packages, may_install=may_install)


def installed_dynamo(folder: Path, *, may_install: bool = True) -> Dynamo:
    return Dynamo(dynamo_python(folder, may_install=may_install), model_in(folder))


def model_in(folder: Path) -> TinyModel:
    """The model that all edges serve, made at the first use."""
    return tiny_model.tiny_model(folder / "tiny")


@contextmanager
def serve_kvolt(
    model: TinyModel,
    step_s: float | None = None,
    name: str = KVOLT_NAME,
    *,
    frontend_arguments: Sequence[str] = (),
    num_workers: int = NUM_WORKERS,
    https: bool = False,
    keys: bool = False,
    **environ: str,
) -> Iterator[Edge]:
    """A frontend and worker processes; with `keys`, requests have the key of a tenant with all limits."""
    with Processes("kvolt") as processes:
        env, port = processes.environ(**environ), free_port()
        command = [*KVOLT, "frontend", "--port", str(port), *frontend_arguments]
        tls, headers = None, {}
        if https:
            files = server_certificate(processes.folder)
            tls = files.client_context()
            command += ["--tls-cert", str(files.certificate), "--tls-key", str(files.private_key)]
        if keys:
            store = processes.folder / "api-keys.jsonl"
            key = (
                output_of(["kvolt", "key", "create", "--api-keys", str(store), *_TENANT]).decode().split()[-1]
            )
            headers = {"Authorization": f"Bearer {key}"}
            command += ["--api-keys", str(store)]
        frontend = processes.start("frontend", command, env)
        arguments = {
            **model_arguments(model),
            "latency": json.dumps({"base_s": step_s or 0.0}),
            "block_size": BLOCK_SIZE,
            "kv_blocks": 1 << 20,
            "max_num_seqs": 1024,
            "max_batch_tokens": 65536,
        }
        workers = start_workers(processes, num_workers, arguments, env)
        processes.wait_answer(port, tiny_model.NAME, tls, headers)
        mock_meter = Meter([each.pid for each in workers])
        yield Edge(name, port, Meter([frontend.pid]), mock_meter, step_s, tls, headers)


def model_arguments(model: TinyModel) -> dict[str, object]:
    """Engine arguments with which a sim worker serves the model."""
    return {
        "model_tokenizer": model.tokenizer_path,
        "eos_token": EOS_TOKEN,
        "chat_template": model.chat_template,
    }


def start_workers(
    processes: Processes, count: int, arguments: dict[str, object], env: dict[str, str]
) -> list[subprocess.Popen[bytes]]:
    command = [*KVOLT, "worker", tiny_model.NAME, "--engine", "sim", *arg_flags(arguments)]
    return [processes.start(f"worker-{number}", command, env) for number in range(count)]


@contextmanager
def serve_dynamo(
    dynamo: Dynamo,
    step_s: float | None = None,
    name: str = DYNAMO_NAME,
    *,
    router_mode: str = "round-robin",
    https: bool = False,
    **environ: str,
) -> Iterator[Edge]:
    """Its frontend and a process of mock workers."""
    decode_speedup = 1.0 if step_s is None else _DECODE_STEP_S / _SPEEDUP / step_s
    with Processes("dynamo") as processes:
        env, port = dynamo_environ(processes, **environ), free_port()
        flags, tls = ["--router-mode", router_mode], None
        if https:
            files = server_certificate(processes.folder)
            tls = files.client_context()
            flags += ["--tls-cert-path", str(files.certificate), "--tls-key-path", str(files.private_key)]
        frontend = start_dynamo_frontend(processes, dynamo, port, env, *flags)
        speed = ("--speedup-ratio", f"{_SPEEDUP:g}", "--decode-speedup-ratio", f"{decode_speedup:.9f}")
        sizes = mocker_sizes(NUM_WORKERS, BLOCK_SIZE, 1 << 20, 1024, 65536)
        [mock] = start_mockers(processes, dynamo, env, 1, sizes, *speed)
        processes.wait_answer(port, tiny_model.NAME, tls)
        yield Edge(name, port, Meter([frontend.pid]), Meter([mock.pid]), step_s, tls)


def dynamo_environ(processes: Processes, **more: str) -> dict[str, str]:
    discovery = str(processes.folder / "discovery")
    return clean_environ(DYN_FILE_KV=discovery, DYN_LOG="warn", HF_HUB_OFFLINE="1", **more)


def start_dynamo_frontend(
    processes: Processes, dynamo: Dynamo, port: int, env: dict[str, str], *flags: str
) -> subprocess.Popen[bytes]:
    command = [str(dynamo.python), "-m", "dynamo.frontend", *flags, *DYNAMO_PLANES]
    return processes.start("frontend", [*command, "--http-host", "127.0.0.1", "--http-port", str(port)], env)


def start_mockers(
    processes: Processes,
    dynamo: Dynamo,
    env: dict[str, str],
    count: int,
    sizes: Mapping[str, int],
    *flags: str,
) -> list[subprocess.Popen[bytes]]:
    """Processes of mock workers; `sizes` are numeric flags: workers of each process, blocks, sequences, tokens."""
    command = [
        *(str(dynamo.python), "-m", "dynamo.mocker", *DYNAMO_PLANES),
        *("--model-path", str(dynamo.model.path), "--model-name", tiny_model.NAME),
        *(part for name, size in sizes.items() for part in (f"--{name}", str(size))),
        *flags,
    ]
    return [processes.start(f"worker-{number}", command, env) for number in range(count)]


def mocker_sizes(num_workers: int, block_size: int, blocks: int, seqs: int, tokens: int) -> dict[str, int]:
    return {
        "num-workers": num_workers,
        "block-size": block_size,
        "num-gpu-blocks-override": blocks,
        "max-num-seqs": seqs,
        "max-num-batched-tokens": tokens,
    }
