"""JSON files of a model's folder. ConfigError names a file that cannot be read or used."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from kvolt.core.errors import ConfigError

T = TypeVar("T")


def read_json(folder: Path, name: str, kind: type[T]) -> T | None:
    """A decoded JSON file; None if it does not exist."""
    document = read_bytes(folder / name)
    return None if document is None else decode_json(document, str(folder / name), kind)


def decode_json(document: bytes, name: str, kind: type[T]) -> T:
    """`name` is the file's, for the error."""
    try:
        return msgspec.json.decode(document, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{name} cannot be used: {error}", key="model") from error


def read_required(folder: Path, name: str, remedy: str) -> bytes:
    """The bytes of a file. ConfigError if it does not exist."""
    document = read_bytes(folder / name)
    if document is None:
        raise ConfigError(f"{folder} has no {name}", key="model", remedy=remedy)
    return document


def read_bytes(path: Path) -> bytes | None:
    """The bytes of a file; None if it does not exist."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}", key="model") from error
