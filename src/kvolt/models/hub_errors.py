"""Translates errors of the hub and the disk to kvolt's, each with a remedy.

ConfigError if a retry cannot help (`reason`: not_found, gated, offline, disk_full, disk), so that a supervisor gives
up; NetworkFault, or its subclass ConnectFailed, if it may.
"""

from __future__ import annotations

import errno
from pathlib import Path

from kvolt.core.errors import ConfigError, ConnectFailed, NetworkFault
from kvolt.models.fetch_progress import size_text
from kvolt.models.model_files import HubName


def translate(error: Exception, name: HubName, endpoint: str, cache_dir: Path) -> Exception:
    """Translate an error of the library or the disk; other errors are returned unchanged."""
    from huggingface_hub import errors

    text = str(error).strip().partition("\n")[0] or type(error).__name__
    page = f"{endpoint}/{name.repo}"
    match error:
        case errors.GatedRepoError():
            return _config_error(
                f"{name.repo} is gated: its authors must grant access",
                "gated",
                f"request access on {page}, then set HF_TOKEN to your token (or `hf auth login`)",
            )
        case errors.RepositoryNotFoundError():
            remedy = "check the spelling; for a private model set HF_TOKEN"
            return _config_error(f"{endpoint} has no model {name.repo}", "not_found", remedy)
        case errors.RevisionNotFoundError():
            remedy = f"see {page}/tree/main for its branches and tags"
            return _config_error(f"{name.repo} has no revision {name.revision}", "not_found", remedy)
        case errors.HFValidationError():
            return _config_error(
                f"{name.repo} is not a valid model name: {text}", "not_found", "write owner/name"
            )
        case errors.HfHubHTTPError() if error.response.status_code in (401, 403):
            remedy = "set HF_TOKEN to a token with access"
            return _config_error(f"{endpoint} denies access to {name.repo}: {text}", "gated", remedy)
        case errors.HfHubHTTPError():
            return NetworkFault(f"{endpoint} fails: {text}", address=endpoint, remedy="try again later")
        case errors.OfflineModeIsEnabled():
            remedy = "unset HF_HUB_OFFLINE, or use the path of a local folder"
            return _config_error(
                f"{name} is not in the cache, and HF_HUB_OFFLINE forbids downloads", "offline", remedy
            )
        case errors.LocalEntryNotFoundError() | errors.HTTPError():  # type: ignore[attr-defined]
            return ConnectFailed(
                f"{name} is not in the cache, and {endpoint} cannot be reached: {text}",
                address=endpoint,
                remedy="check the network and HF_ENDPOINT, or use the path of a local folder; downloaded data is kept",
            )
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            return disk_full(cache_dir, None)
        case OSError():
            remedy = "set HF_HUB_CACHE to a writable directory"
            return _config_error(f"{name} cannot be written to {cache_dir}: {text}", "disk", remedy)
    return error


def disk_full(cache_dir: Path, needed_bytes: int | None) -> ConfigError:
    size = "disk space" if needed_bytes is None else size_text(needed_bytes)
    return _config_error(
        f"the disk of {cache_dir} is full",
        "disk_full",
        f"free {size} there, or set HF_HUB_CACHE to another disk; downloaded data is kept",
    )


def _config_error(message: str, reason: str, remedy: str) -> ConfigError:
    return ConfigError(message, key="model", reason=reason, remedy=remedy)
