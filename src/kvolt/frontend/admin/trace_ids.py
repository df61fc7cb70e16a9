"""Anonymized block ids of recorded prompts: equal prefixes have equal ids that do not reveal the text. Pure.

SequenceHashes are unkeyed, so a file that contained them would allow guesses of prompts to be verified. Each is hashed
with BLAKE2 under a key that exists only during the recording and is never stored.
"""

from __future__ import annotations

from hashlib import blake2b

from kvolt.core.hashing import request_seed, token_bytes
from kvolt.core.request import Request

MIN_KEY_BYTES = 16
MAX_KEY_BYTES = 64

_ID_BITS = 53
"""Integers that JSON readers keep exact. Ten million distinct blocks collide with probability 1 in 180."""
_HASH_BYTES = 8
_SHIFT = 8 * _HASH_BYTES - _ID_BITS


class TraceIds:
    """Ids of one recording."""

    def __init__(self, key: bytes) -> None:
        assert MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES
        self._key = key

    def blocks(self, request: Request) -> tuple[int, ...]:
        """One id per block of the prompt, including a partial last one. Models, adapters and tenants share no ids."""
        key = blake2b(request.model.encode(), key=self._key, digest_size=32).digest()
        hashes, block_size = request.sequence_hashes, request.block_size
        assert block_size is not None, "the frontend hashes what it sends"
        ids = [
            _short(blake2b(each.to_bytes(8, "little"), key=key, digest_size=8).digest()) for each in hashes
        ]
        rest = request.token_ids[len(hashes) * block_size :]
        if (
            rest
        ):  # engines have no hash of a partial block: derive its id from the previous hash and its tokens
            before = hashes[-1] if hashes else request_seed(request.lora, request.salt)
            partial = before.to_bytes(8, "little") + token_bytes(rest)
            ids.append(_short(blake2b(partial, key=key, digest_size=8).digest()))
        return tuple(ids)

    def name(self, text: str | None) -> str | None:
        """Anonymized name of a session or tenant."""
        if text is None:
            return None
        return blake2b(text.encode(errors="surrogatepass"), key=self._key, digest_size=8).hexdigest()


def _short(digest: bytes) -> int:
    return int.from_bytes(digest, "little") >> _SHIFT
