"""ModelHub: finds models in the local cache of the Hugging Face hub and downloads them into it.

The cache is that of huggingface_hub and shared with other tools; `HF_HOME`, `HF_HUB_CACHE`, `HF_HUB_OFFLINE`,
`HF_ENDPOINT` and `HF_TOKEN` are read by the library. Large files are downloaded over plain HTTP by `hub_file`,
which can resume downloads; small files and the links of the snapshot by the library. Raises kvolt's errors, each
with a remedy: ConfigError if a retry cannot help (`reason`: not_found, gated, offline, disk_full, disk), so that a
supervisor gives up; NetworkFault, or its subclass ConnectFailed, if it may.
"""

from __future__ import annotations

import errno
import glob
import json
import logging
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Lock
from typing import TYPE_CHECKING, Any, NamedTuple

from kvolt.core.errors import ConfigError, ConnectFailed, KvoltError, NetworkFault
from kvolt.models.fetch_progress import Progress, size_text
from kvolt.models.model_files import SMALL_FILES, HubName, ModelFiles, ModelKind, choose_files

if TYPE_CHECKING:
    from kvolt.models.hub_file import LargeFile

_NUM_DOWNLOADS = 4
_INFO_TIMEOUT_S = 20.0
_SPARE_DISK_BYTES = 64 * 1024 * 1024


class HubModel(NamedTuple):
    """A model in the cache: the folder of a snapshot, or a GGUF file in it, and the commit."""

    kind: ModelKind
    path: Path
    revision: str


class ModelHub:
    """Access to the hub with one user's settings. None: taken from the environment by the library."""

    def __init__(
        self, endpoint: str | None = None, cache_dir: Path | None = None, token: str | None = None
    ) -> None:
        self._endpoint = endpoint
        self._cache_dir = cache_dir
        self._token = token

    @property
    def endpoint(self) -> str:
        return (self._endpoint or str(_library().constants.ENDPOINT)).rstrip("/")

    @property
    def cache_dir(self) -> Path:
        return self._cache_dir or Path(_library().constants.HF_HUB_CACHE)

    def find(self, name: HubName) -> HubModel | None:
        """Find a complete model in the cache. Does not access the network."""
        library = _library()
        try:
            # Fails if one of these files of a downloaded snapshot is missing.
            snapshot_path = library.snapshot_download(
                name.repo,
                revision=name.revision,
                cache_dir=self.cache_dir,
                local_files_only=True,
                allow_patterns=[] if name.file else list(SMALL_FILES),
            )
        except (OSError, ValueError):
            return None
        snapshot = Path(snapshot_path)
        names = [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.is_file()]
        try:
            chosen = choose_files(names, name.file, str(name))
        except ConfigError:
            return None  # the hub may have the missing files
        return _model(snapshot, chosen) if _is_whole(snapshot, chosen) else None

    def download(self, name: HubName, progress: Progress) -> HubModel:
        """Download the newest revision; files that are in the cache are not downloaded again."""
        library = _library()
        with self._translated(name):
            api = library.HfApi(endpoint=self.endpoint, token=self._token)
            info = api.model_info(
                name.repo, revision=name.revision, files_metadata=True, timeout=_INFO_TIMEOUT_S
            )
            siblings = {sibling.rfilename: sibling for sibling in info.siblings or ()}
            chosen = choose_files(siblings, name.file, str(name))
            selected = [siblings[file] for file in chosen.files]
            snapshot_dir = self._repo_dir(name) / "snapshots" / str(info.sha)
            pending = [each for each in selected if not (snapshot_dir / each.rfilename).exists()]
            tally = _Tally(
                f"{name} from {self.endpoint}",
                sum(each.size or 0 for each in selected),
                sum(each.size or 0 for each in pending),
                progress if pending else _ignore_progress,
            )
            self._fetch_large(self._large_files(name, info.sha, pending), tally)
            snapshot = library.snapshot_download(
                name.repo,
                revision=name.revision,
                cache_dir=self.cache_dir,
                endpoint=self.endpoint,
                token=self._token,
                allow_patterns=[glob.escape(file) for file in chosen.files],
                tqdm_class=_silent(),
            )
            tally.finish()
        return _model(Path(snapshot), chosen)

    def cached_repos(self) -> list[tuple[HubName, int]]:
        """Models in the cache with their sizes in bytes; not all of them can be served."""
        library = _library()
        try:
            cache = library.scan_cache_dir(self.cache_dir)
        except (OSError, ValueError, library.CacheNotFound):
            return []
        models: list[tuple[HubName, int]] = []
        for repo in sorted(cache.repos, key=lambda repo: str(repo.repo_id)):
            for revision in repo.revisions if repo.repo_type == "model" else ():
                models += _cached_models(repo.repo_id, revision)
        return models

    def _repo_dir(self, name: HubName) -> Path:
        return self.cache_dir / f"models--{name.repo.replace('/', '--')}"

    def _large_files(self, name: HubName, commit: str | None, siblings: Sequence[Any]) -> list[LargeFile]:
        """Files in the hub's large file storage: only these have a known checksum."""
        from huggingface_hub import hf_hub_url

        from kvolt.models.hub_file import LargeFile

        blobs = self._repo_dir(name) / "blobs"
        return [
            LargeFile(
                hf_hub_url(name.repo, sibling.rfilename, revision=commit, endpoint=self.endpoint),
                sibling.lfs.size,
                sibling.lfs.sha256,
                blobs / sibling.lfs.sha256,
            )
            for sibling in siblings
            if sibling.lfs is not None
        ]

    def _fetch_large(self, files: list[LargeFile], tally: _Tally) -> None:
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        from kvolt.models.hub_file import fetch_large

        present = [file.num_bytes_present() for file in files]
        self._check_disk_space(sum(file.size_bytes for file in files) - sum(present))
        tally.add(sum(present))
        headers, stop = build_hf_headers(token=self._token), Event()
        with ThreadPoolExecutor(_NUM_DOWNLOADS, thread_name_prefix="kvolt-hub") as pool:
            try:
                running = [
                    pool.submit(fetch_large, file, known_bytes, headers, tally.add, stop)
                    for file, known_bytes in zip(files, present, strict=True)
                    if not file.blob.exists()
                ]
                done, _ = wait(running, return_when=FIRST_EXCEPTION)
            finally:  # after an error or Ctrl-C the other downloads stop soon
                stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
        for future in done:
            future.result()

    def _check_disk_space(self, needed_bytes: int) -> None:
        place = next(path for path in (self.cache_dir, *self.cache_dir.absolute().parents) if path.exists())
        if needed_bytes and shutil.disk_usage(place).free < needed_bytes + _SPARE_DISK_BYTES:
            raise _disk_full(self.cache_dir, needed_bytes)

    @contextmanager
    def _translated(self, name: HubName) -> Iterator[None]:
        """Translate errors of the library to kvolt's."""
        try:
            yield
        except KvoltError:
            raise
        except Exception as error:
            raise _translate(error, name, self.endpoint, self.cache_dir) from error


class _Tally:
    """Combined progress of all files of a download. Thread-safe."""

    def __init__(self, what: str, total_bytes: int, pending_bytes: int, progress: Progress) -> None:
        self._name = what
        self._total = total_bytes
        self._done = total_bytes - pending_bytes
        self._progress = progress
        self._lock = Lock()

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self._done += num_bytes
            # Completion is reported by `finish`, when all files are in place.
            self._progress(self._name, min(self._done, self._total - 1), self._total)

    def finish(self) -> None:
        self._progress(self._name, self._total, self._total)


def _ignore_progress(_name: str, _done_bytes: int, _total_bytes: int | None) -> None:
    """Progress callback for models that are complete in the cache."""


def _model(snapshot: Path, chosen: ModelFiles) -> HubModel:
    path = snapshot / chosen.files[0] if chosen.kind is ModelKind.GGUF else snapshot
    return HubModel(chosen.kind, path, snapshot.name)


def _cached_models(repo: str, revision: Any) -> list[tuple[HubName, int]]:
    """Hub names and sizes of the models in a cached revision: each GGUF file, or the folder."""
    named = None if "main" in revision.refs else min(revision.refs, default=revision.commit_hash)
    files = {
        Path(file.file_path).relative_to(revision.snapshot_path).as_posix(): int(file.size_on_disk)
        for file in revision.files
    }
    ggufs = {name: size for name, size in files.items() if name.endswith(".gguf")}
    if not ggufs:
        return [(HubName(repo, named), sum(files.values()))]
    return [(HubName(repo, named, name), ggufs[name]) for name in sorted(ggufs)]


def _is_whole(snapshot: Path, chosen: ModelFiles) -> bool:
    """Whether all shards named by the index exist. A GGUF model is one file."""
    index = snapshot / "model.safetensors.index.json"
    if chosen.kind is ModelKind.GGUF or not index.exists():
        return True
    try:
        shards = set(json.loads(index.read_bytes())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return True  # loading reports the error
    return shards <= set(chosen.files)


def _translate(error: Exception, name: HubName, endpoint: str, cache_dir: Path) -> Exception:
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
            return _disk_full(cache_dir, None)
        case OSError():
            remedy = "set HF_HUB_CACHE to a writable directory"
            return _config_error(f"{name} cannot be written to {cache_dir}: {text}", "disk", remedy)
    return error


def _disk_full(cache_dir: Path, needed_bytes: int | None) -> ConfigError:
    size = "disk space" if needed_bytes is None else size_text(needed_bytes)
    return _config_error(
        f"the disk of {cache_dir} is full",
        "disk_full",
        f"free {size} there, or set HF_HUB_CACHE to another disk; downloaded data is kept",
    )


def _config_error(message: str, reason: str, remedy: str) -> ConfigError:
    return ConfigError(message, key="model", reason=reason, remedy=remedy)


def _library() -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.constants
    except ImportError as error:
        raise ConfigError(
            f"models of the hub require huggingface_hub: {error}",
            key="model",
            reason="not_installed",
            remedy="pip install 'kvolt[native]'",
        ) from error
    for name in ("httpx", "httpx2"):
        # Its log line per request would hide others, and URLs of large files contain a signature.
        if logging.getLogger(name).level == logging.NOTSET:
            logging.getLogger(name).setLevel(logging.WARNING)
    return huggingface_hub


def _silent() -> Any:
    """A disabled progress bar for the library: progress is reported by `_Tally`."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    class Silent(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})

    return Silent
