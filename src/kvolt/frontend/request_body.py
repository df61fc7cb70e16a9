"""JSON bodies of requests: content type, decompression, and parsing on or off the event loop.

A compressed body is never expanded beyond the limit for bodies. If it is large, or expands to a large one, it is
expanded where it is parsed, in the thread for large requests, after the requests that are parsed already: however many
arrive, few expanded bodies are in memory. Megabytes of empty blocks, which expand to nothing, do not delay others.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import TypeVar

from kvolt.core.errors import InvalidRequest, PayloadTooLarge
from kvolt.frontend.off_loop import OffLoop
from kvolt.frontend.openai_api.decoding import SMALL_BODY_BYTES
from kvolt.frontend.openai_api.errors import UnsupportedMediaType
from kvolt.frontend.openai_api.headers import check_json_type
from kvolt.runtime.http.protocol import HttpRequest

T = TypeVar("T")

_GZIP, _ZLIB = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS
_WINDOW_BITS = {"gzip": _GZIP, "x-gzip": _GZIP, "deflate": _ZLIB}


class BodyParser:
    """Parses the bodies of requests."""

    def __init__(self, off_loop: OffLoop, max_bytes: int) -> None:
        """`max_bytes`: limit of a body, expanded if it is compressed."""
        self._off_loop = off_loop
        self._max_bytes = max_bytes

    async def parse(self, http: HttpRequest, parse: Callable[[bytes], T]) -> T:
        """Check the headers and parse the body, which the request does not keep. Raises UnsupportedMediaType,
        InvalidRequest or PayloadTooLarge."""
        window_bits = _check_headers(http.headers)
        body, http.body = http.body, b""  # do not keep megabytes while the answer is generated
        if window_bits is not None:
            is_small = len(body) <= SMALL_BODY_BYTES
            expanded = _expand(body, window_bits, SMALL_BODY_BYTES) if is_small else None
            if expanded is None:
                return await self._off_loop.run_first(lambda: parse(self._expanded(body, window_bits)))
            body = expanded
        if len(body) <= SMALL_BODY_BYTES:
            return parse(body)
        return await self._off_loop.run_first(lambda: parse(body))

    def _expanded(self, body: bytes, window_bits: int) -> bytes:
        expanded = _expand(body, window_bits, self._max_bytes)
        if expanded is None:
            raise PayloadTooLarge(
                f"the body exceeds {self._max_bytes} bytes when it is expanded", limit=self._max_bytes
            )
        return expanded


def _check_headers(headers: Mapping[str, str]) -> int | None:
    """Window bits of a compressed body, else None. Raises UnsupportedMediaType."""
    check_json_type(headers)
    encoding = headers.get("content-encoding")
    if encoding is None or encoding.lower() == "identity":
        return None
    window_bits = _WINDOW_BITS.get(encoding.strip().lower())
    if window_bits is None:
        raise UnsupportedMediaType(
            f"the content encoding is {encoding[:100]!r}; send the body uncompressed, as gzip or as deflate",
            content_encoding=encoding,
        )
    return window_bits


def _expand(body: bytes, window_bits: int, limit: int) -> bytes | None:
    """Expand a body; None as soon as it exceeds the limit. Raises InvalidRequest if it is damaged."""
    stream = zlib.decompressobj(window_bits)
    try:
        expanded = stream.decompress(body, limit + 1)
    except zlib.error as error:
        raise InvalidRequest(f"the body cannot be expanded: {error}", param=None) from error
    if len(expanded) > limit:
        return None
    if not stream.eof or stream.unused_data:
        problem = "is incomplete" if not stream.eof else "is followed by other data"
        raise InvalidRequest(f"the compressed body {problem}", param=None)
    return expanded
