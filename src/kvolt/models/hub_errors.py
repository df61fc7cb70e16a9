"""What goes wrong with the hub, in kvolt's errors, each with its remedy.

ConfigError where another try cannot help (its `reason`: not_found, gated, offline, disk_full, disk), so that a
supervisor gives up; NetworkFault, ConnectFailed among them, where it may.
"""

from __future__ import annotations

import errno
from pathlib import Path

from kvolt.core.errors import ConfigError, ConnectFailed, NetworkFault
from kvolt.models.fetch_progress import size_text
from kvolt.models.model_files import HubName


def translate(error: Exception, name: HubName, endpoint: str, cache_dir: Path) -> Exception:
    """An error of the library or of the disk as ours; one that is neither, unchanged."""
    from huggingface_hub import errors

    text = str(error).strip().partition("\n")[0] or type(error).__name__
    page = f"{endpoint}/{name.repo}"
    match error:
        case errors.GatedRepoError():
            return _wrong(
                f"{name.repo} is gated: the hub gives it only to those let in",
                "gated",
                f"ask for access on {page}, then set HF_TOKEN to your token (or `hf auth login`)",
            )
        case errors.RepositoryNotFoundError():
            remedy = "check the spelling; for a private model set HF_TOKEN"
            return _wrong(f"{endpoint} has no model {name.repo}", "not_found", remedy)
        case errors.RevisionNotFoundError():
            remedy = f"see {page}/tree/main for its branches and tags"
            return _wrong(f"{name.repo} has no revision {name.revision}", "not_found", remedy)
        case errors.HFValidationError():
            return _wrong(f"{name.repo} cannot be a model's name: {text}", "not_found", "write owner/name")
        case errors.HfHubHTTPError() if error.response.status_code in (401, 403):
            remedy = "set HF_TOKEN to a token that may read it"
            return _wrong(f"{endpoint} refuses {name.repo}: {text}", "gated", remedy)
        case errors.HfHubHTTPError():
            return NetworkFault(f"{endpoint} fails: {text}", address=endpoint, remedy="try again later")
        case errors.OfflineModeIsEnabled():
            remedy = "unset HF_HUB_OFFLINE, or give the path of a folder that has it"
            return _wrong(
                f"{name} is not in the cache, and HF_HUB_OFFLINE forbids to fetch it", "offline", remedy
            )
        case errors.LocalEntryNotFoundError() | errors.HTTPError():  # type: ignore[attr-defined]
            return ConnectFailed(
                f"{name} is not here, and {endpoint} cannot be reached: {text}",
                address=endpoint,
                remedy="check the network and HF_ENDPOINT, or give the path of a folder; what came is kept",
            )
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            return disk_full(cache_dir, None)
        case OSError():
            remedy = "name a directory that can be written with HF_HUB_CACHE"
            return _wrong(f"{name} cannot be kept in {cache_dir}: {text}", "disk", remedy)
    return error


def disk_full(cache_dir: Path, needed_bytes: int | None) -> ConfigError:
    room = "room" if needed_bytes is None else size_text(needed_bytes)
    return _wrong(
        f"the disk of {cache_dir} is full",
        "disk_full",
        f"free {room} there, or name a place on another disk with HF_HUB_CACHE; what came is kept",
    )


def _wrong(message: str, reason: str, remedy: str) -> ConfigError:
    return ConfigError(message, key="model", reason=reason, remedy=remedy)
