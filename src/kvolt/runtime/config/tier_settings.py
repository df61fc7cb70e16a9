"""The `tiers` of a `[[workers]]` entry: where KV goes that leaves a worker's device."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class TierSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where KV goes that leaves a worker's device, to be brought back when a prompt can use it."""

    host: Annotated[
        str,
        Meta(
            description="Memory of the host: 4GiB, 1000blocks, or 2x what the device holds. Empty for no tiers."
        ),
    ] = ""
    host_high_water: Annotated[
        float,
        Meta(
            ge=0,
            le=0.5,
            description="Share of it for blocks that wait for a tier below: the next ones stay until they are there.",
        ),
    ] = 0.25
    disk: Annotated[
        str, Meta(description="Room on a disk below that, which survives restarts. Empty for none.")
    ] = ""
    disk_dir: Annotated[
        str,
        Meta(
            description="Folder for it; each worker has a part of its own. Empty: in the user's cache folder."
        ),
    ] = ""
    disk_touches: Annotated[
        int,
        Meta(ge=1, le=15, description="How often a block is to be seen before it is written to the disk."),
    ] = 1
    disk_compression: Annotated[
        Literal["none", "fp8"],
        Meta(
            description="fp8: eight bits for each value there, lossy, for two to four times as many blocks."
        ),
    ] = "none"
    disk_low_water: Annotated[
        float,
        Meta(
            ge=0,
            le=0.5,
            description="Share of the disk's slots: with fewer free, room is made ahead of what is written next.",
        ),
    ] = 0.01
    disk_high_water: Annotated[
        float,
        Meta(ge=0, le=0.5, description="And as many are free then as this share. 0: none ahead of need."),
    ] = 0.02
    disk_direct: Annotated[
        bool,
        Meta(
            description="Bring blocks from the disk straight into the engine's memory by NIXL, which takes GPUDirect "
            "Storage where the system has it."
        ),
    ] = False
    object: Annotated[
        str,
        Meta(
            description="A store that all workers share: s3://bucket/folder, gs://, az://, or a folder. Empty for none."
        ),
    ] = ""
    object_touches: Annotated[
        int,
        Meta(ge=1, le=15, description="How often a block is to be seen before it is written to that store."),
    ] = 2
    object_compression: Annotated[
        Literal["none", "zstd"], Meta(description="How blocks are written there. Read is whatever there is.")
    ] = "none"
    pool: Annotated[
        str,
        Meta(description="Socket of a `kvolt cache serve` on this host, whose pool is used. Empty for none."),
    ] = ""
    peers: Annotated[
        bool,
        Meta(
            description="Fetch blocks from the tiers of other workers, where a router knows of more there, and give "
            "them ours. For all workers of a model."
        ),
    ] = False
    shared: Annotated[
        bool,
        Meta(
            description="`kvolt serve` keeps all of this in one pool for its workers, in place of one for each."
        ),
    ] = False
    depth: Annotated[
        int, Meta(ge=0, description="Keep of a prompt the first so many blocks only; 0 keeps all of it.")
    ] = 0
    min_priority: Annotated[
        int | None, Meta(description="Keep only KV of requests with this priority or a higher one.")
    ] = None
    tenants: Annotated[
        tuple[str, ...], Meta(description="Keep only KV of these tenants' requests. Empty: of all.")
    ] = ()
    eviction: Annotated[
        Literal["lru", "s3fifo", "tinylfu"], Meta(description="Which blocks go when a tier is full.")
    ] = "lru"
