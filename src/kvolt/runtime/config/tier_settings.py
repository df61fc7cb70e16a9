"""The `tiers` table of a `[[workers]]` entry: KV tiers below the device."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class TierSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """KV cache tiers of a worker: blocks evicted from the device are kept here for reuse."""

    host: Annotated[
        str,
        Meta(
            description="Host memory for KV blocks: 4GiB, 1000blocks, or 2x the device capacity. Empty: no host tier."
        ),
    ] = ""
    host_high_water: Annotated[
        float,
        Meta(
            ge=0,
            le=0.5,
            description="Maximum fraction of the host tier for blocks that wait to be written to a lower tier.",
        ),
    ] = 0.25
    disk: Annotated[
        str, Meta(description="Disk space for KV blocks, which survive restarts. Empty: no disk tier.")
    ] = ""
    disk_dir: Annotated[
        str,
        Meta(
            description="Directory of the disk tier; each worker uses its own subdirectory. Empty: the user's cache"
            " directory."
        ),
    ] = ""
    disk_touches: Annotated[
        int,
        Meta(ge=1, le=15, description="Write a block to disk after it has been used this many times."),
    ] = 1
    disk_compression: Annotated[
        Literal["none", "fp8"],
        Meta(
            description="`fp8` stores KV on disk with 8 bits per value: lossy, two to four times the capacity."
        ),
    ] = "none"
    disk_low_water: Annotated[
        float,
        Meta(
            ge=0,
            le=0.5,
            description="Start evicting when less than this fraction of the disk slots is free.",
        ),
    ] = 0.01
    disk_high_water: Annotated[
        float,
        Meta(
            ge=0,
            le=0.5,
            description="Evict until this fraction of the disk slots is free. 0 evicts only when the disk tier is "
            "full.",
        ),
    ] = 0.02
    disk_direct: Annotated[
        bool,
        Meta(
            description="Onboard blocks from disk to the device by NIXL, bypassing host memory where GPUDirect "
            "Storage is available."
        ),
    ] = False
    object: Annotated[
        str,
        Meta(
            description="Object store shared by all workers: s3://BUCKET/PREFIX, gs://, az:// or a directory. "
            "Empty: none."
        ),
    ] = ""
    object_touches: Annotated[
        int,
        Meta(
            ge=1,
            le=15,
            description="Write a block to the object store after it has been used this many times.",
        ),
    ] = 2
    object_compression: Annotated[
        Literal["none", "zstd"],
        Meta(description="Compression of blocks written to the object store. Both formats can be read."),
    ] = "none"
    pool: Annotated[
        str,
        Meta(description="Socket of a `kvolt cache serve` on this host whose pool to use. Empty: none."),
    ] = ""
    peers: Annotated[
        bool,
        Meta(
            description="Onboard blocks from the tiers of other workers, and serve blocks to them. Set it for all "
            "workers of a model."
        ),
    ] = False
    shared: Annotated[
        bool,
        Meta(
            description="`kvolt serve` creates one pool for all workers of this machine instead of one per worker."
        ),
    ] = False
    depth: Annotated[
        int,
        Meta(
            ge=0, description="Offload only the first blocks of each prompt, at most this many. 0: no limit."
        ),
    ] = 0
    min_priority: Annotated[
        int | None,
        Meta(description="Offload only KV of requests with at least this priority. Default: all requests."),
    ] = None
    tenants: Annotated[
        tuple[str, ...], Meta(description="Offload only KV of these tenants. Empty: all tenants.")
    ] = ()
    eviction: Annotated[
        Literal["lru", "s3fifo", "tinylfu"], Meta(description="Eviction policy of the tiers.")
    ] = "lru"
