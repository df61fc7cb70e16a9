"""Our routing hashes are those that NVIDIA Dynamo computes: vectors recorded from its own library."""

import json
from pathlib import Path

import pytest

from kvolt.core.hashing import SequenceHasher, local_hashes, request_seed, sequence_hashes

RECORDED = json.loads((Path(__file__).parent / "data" / "dynamo_hashes.json").read_text())


def test_the_recording_covers_what_changes_a_hash() -> None:
    local = RECORDED["local"]
    assert {bool(vector["lora"]) for vector in local} == {True, False}
    assert {bool(vector["salt"]) for vector in local} == {True, False}
    assert {vector["media"] is not None for vector in local} == {True, False}
    assert any(len(vector["tokens"]) % vector["block_size"] for vector in local)
    assert any(len(vector["hashes"]) > 1 for vector in RECORDED["sequence"])


@pytest.mark.parametrize("vector", RECORDED["local"])
def test_local_hashes(vector: dict) -> None:
    seed = request_seed(vector["lora"], vector["salt"])
    assert local_hashes(vector["tokens"], vector["block_size"], seed, vector["media"]) == vector["hashes"]


@pytest.mark.parametrize("vector", RECORDED["sequence"] + RECORDED["sequence_media"])
def test_sequence_hashes(vector: dict) -> None:
    seed = request_seed(vector["lora"], vector["salt"])
    local = local_hashes(vector["tokens"], vector["block_size"], seed, vector.get("media"))
    assert sequence_hashes(local) == vector["hashes"]


@pytest.mark.parametrize("vector", RECORDED["sequence"])
def test_sequence_hashes_of_a_growing_sequence(vector: dict) -> None:
    hasher = SequenceHasher(vector["block_size"], request_seed(vector["lora"], vector["salt"]))
    for token in vector["tokens"]:
        hasher.extend((token,))
    assert hasher.sequence == vector["hashes"]
