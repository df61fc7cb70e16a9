"""Decoders of other engines' KV events, and their translation to kvolt's. Pure.

Sockets, sequence numbers and replays belong to the adapters.
"""

from kvolt.engines.kv_formats.schema import Engine
from kvolt.engines.kv_formats.translator import SALT_TAG, Translated, Translator

__all__ = ["SALT_TAG", "Engine", "Translated", "Translator"]
