"""Public traces: source, licence, and verification of local copies."""

from __future__ import annotations

import hashlib
from enum import StrEnum
from pathlib import Path

import msgspec

from kvolt.core.errors import ConfigError


class PublicTrace(msgspec.Struct, frozen=True, kw_only=True):
    """A published trace file."""

    name: str
    about: str
    repository: str
    path: str
    """Path in the repository."""
    url: str
    licence: str
    sha256: str
    size_bytes: int
    requests: int


PUBLIC_TRACES = (
    PublicTrace(
        name="mooncake-conversation",
        about="chats of a public service: times, lengths, hash ids of 512-token blocks",
        repository="github.com/kvcache-ai/Mooncake",
        path="FAST25-release/traces/conversation_trace.jsonl",
        url="https://raw.githubusercontent.com/kvcache-ai/Mooncake/main/FAST25-release/traces/conversation_trace.jsonl",
        licence="Apache-2.0",
        sha256="b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df",
        size_bytes=3_029_533,
        requests=12_031,
    ),
    PublicTrace(
        name="azure-conversation-2023",
        about="chats of cloud customers: times and lengths",
        repository="github.com/Azure/AzurePublicDataset",
        path="data/AzureLLMInferenceTrace_conv.csv",
        url="https://raw.githubusercontent.com/Azure/AzurePublicDataset/master/data/AzureLLMInferenceTrace_conv.csv",
        licence="CC-BY-4.0",
        sha256="2f1e5b666d4e3055fdbba98598ce2ec307767b9064e03e2fa46676dbcc7d0bf8",
        size_bytes=719_188,
        requests=19_366,
    ),
)


class FileState(StrEnum):
    SAME = "same"
    """Equal to the published file."""
    DIFFERS = "differs"
    MISSING = "missing"


class FoundTrace(msgspec.Struct, frozen=True):
    """A public trace and the state of its local copy."""

    trace: PublicTrace
    state: FileState
    path: str | None = None


def find_public(folder: str | Path) -> list[FoundTrace]:
    """Find each public trace in `folder` by size and sha256 under any name, or by its own name."""
    try:
        files = sorted(path for path in Path(folder).iterdir() if path.is_file())
    except OSError as error:
        raise ConfigError(
            f"{folder}: {error.strerror or error}",
            key="KVOLT_TRACES",
            remedy="choose a directory with traces",
        ) from error
    return [_find(trace, files) for trace in PUBLIC_TRACES]


def _find(trace: PublicTrace, files: list[Path]) -> FoundTrace:
    for path in files:
        if path.stat().st_size == trace.size_bytes and _sha256(path) == trace.sha256:
            return FoundTrace(trace, FileState.SAME, str(path))
    for path in files:
        if path.name == Path(trace.path).name:
            return FoundTrace(trace, FileState.DIFFERS, str(path))
    return FoundTrace(trace, FileState.MISSING)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
