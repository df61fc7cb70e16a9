"""What other engines publish about their KV blocks, in our words: decoders and the translation of names.

Pure. Sockets, sequence numbers and replays are the adapters'.
"""

from kvolt.engines.kv_formats.schema import Engine
from kvolt.engines.kv_formats.translator import SALT_TAG, Translated, Translator

__all__ = ["SALT_TAG", "Engine", "Translated", "Translator"]
