"""Distinct types of ids and hashes."""

from __future__ import annotations

from typing import NewType

RequestId = NewType("RequestId", str)
"""Id of a request in all processes; chosen by the frontend, also sent as `x-request-id`."""

InstanceId = NewType("InstanceId", str)
"""Id of a running instance of an endpoint; new at each process start."""

LocalBlockHash = NewType("LocalBlockHash", int)
"""xxh3-64 of one block's tokens, independent of its position."""

SequenceHash = NewType("SequenceHash", int)
"""Chained 64-bit hash of a block and its predecessors, for routing and events only, never for stored bytes."""

BlockKey = NewType("BlockKey", bytes)
"""128-bit keyed chained hash that identifies a block wherever its bytes are stored or shared."""

CardHash = NewType("CardHash", str)
"""Content hash of a ModelCard (hex)."""
