"""Recorded once by vLLM's environment (0.32.0): frames that its own block pool and publisher make.

    VENV/bin/python tests/unit/engines/external/record_vllm_events.py OUT.json

No model and no engine core: `BlockPool` tells of blocks of requests as the scheduler has it do, `ZmqEventPublisher`
publishes them. Kept: what a subscriber gets, and what the replay socket answers when asked from 1 on.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import vllm
import zmq
from vllm.distributed.kv_events import KVEventBatch, ZmqEventPublisher
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

BLOCK_SIZE = 4


def main(out: Path) -> None:
    hash_of = get_hash_fn_by_name("sha256")
    init_none_hash(hash_of)
    hasher = get_request_block_hasher(BLOCK_SIZE, hash_of)
    pool = BlockPool(6, True, BLOCK_SIZE, enable_kv_cache_events=True)  # one stands for nothing

    def request(name: str, tokens: list[int], **more: object) -> Request:
        return Request(name, tokens, SamplingParams(), None, block_hasher=hasher, **more)

    def compute(asked: Request, num_blocks: int, blocks: list, num_before: int = 0) -> list:
        blocks = [*blocks, *pool.get_new_blocks(num_blocks)]
        pool.cache_full_blocks(asked, blocks, num_before, num_before + num_blocks, BLOCK_SIZE, 0)
        return blocks

    folder = tempfile.mkdtemp()
    endpoint, replay = f"ipc://{folder}/pub", f"ipc://{folder}/replay"
    publisher = ZmqEventPublisher(0, endpoint, replay)
    context = zmq.Context()
    subscriber = context.socket(zmq.SUB)
    subscriber.setsockopt_string(zmq.SUBSCRIBE, "")
    subscriber.connect(endpoint)
    time.sleep(1.0)

    plain = request("plain", list(range(10, 22)))
    blocks = compute(plain, 2, [])
    steps = [pool.take_events()]
    blocks = compute(plain, 1, blocks, 2)
    steps.append(pool.take_events())
    pool.free_blocks(reversed(blocks))
    salted = request("salted", list(range(10, 14)), cache_salt="kvolt-salt:tenant")
    adapted = request("adapted", list(range(10, 14)), lora_request=LoRARequest("poet", 7, "/poet"))
    held = [*compute(salted, 1, []), *compute(adapted, 1, [])]
    steps.append(pool.take_events())
    held += compute(request("other", list(range(30, 34))), 1, [])  # takes the place of a block of the first
    steps.append(pool.take_events())
    pool.free_blocks(held)
    assert pool.reset_prefix_cache()
    steps.append(pool.take_events())

    for events in steps:
        publisher.publish(KVEventBatch(ts=1700000000.0, events=events))
    published = [subscriber.recv_multipart() for _ in steps]
    dealer = context.socket(zmq.DEALER)
    dealer.connect(replay)
    dealer.send_multipart((b"", (1).to_bytes(8, "big")))
    replayed = []
    while True:
        frames = dealer.recv_multipart()
        replayed.append(frames)
        if frames[-2] == ZmqEventPublisher.END_SEQ:
            break
    publisher.shutdown()
    out.write_text(
        json.dumps(
            {
                "vllm": vllm.__version__,
                "block_size": BLOCK_SIZE,
                "published": [[frame.hex() for frame in frames] for frames in published],
                "replayed_from_1": [[frame.hex() for frame in frames] for frames in replayed],
            },
            indent=1,
        )
        + "\n"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
