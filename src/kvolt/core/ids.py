"""Names for numbers and strings that must not be mixed up."""

from __future__ import annotations

from typing import NewType

RequestId = NewType("RequestId", str)
"""One request, from the edge to the engine; chosen at the edge, also the `x-request-id`."""

InstanceId = NewType("InstanceId", str)
"""One live copy of an endpoint; new at each start of its process."""

LocalBlockHash = NewType("LocalBlockHash", int)
"""xxh3-64 of one block's tokens: equal content at any position."""

SequenceHash = NewType("SequenceHash", int)
"""Chained 64-bit hash of a block and all before it: routing and events only, never for stored bytes."""

BlockKey = NewType("BlockKey", bytes)
"""128-bit keyed chained hash: a block's identity wherever its bytes are stored or shared."""

CardHash = NewType("CardHash", str)
"""Content address of a ModelCard (hex)."""
