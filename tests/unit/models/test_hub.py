"""The hub against an imitation of it: what is downloaded, resume, the cache, and each error with its remedy."""

from __future__ import annotations

import json
import random
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from tests.unit.models.hub_lab import TOKEN, FakeHub, Faults, Repo

from kvolt.core.errors import ConfigError, ConnectFailed, NetworkFault
from kvolt.models.hub import ModelHub, _is_whole
from kvolt.models.model_files import HubName, ModelFiles, ModelKind

WEIGHTS = random.Random(1).randbytes(300_000)
TINY = HubName("kvolt/tiny")
INDEX = json.dumps(
    {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
)

REPOS = {
    "kvolt/tiny": Repo(
        {
            "config.json": b"{}",
            "tokenizer.json": b'{"version": "1.0"}',
            "chat_template.jinja": b"{{ messages }}",
            "model.safetensors": WEIGHTS,
            "pytorch_model.bin": b"pickle",
            "README.md": b"read me",
            "onnx/model.safetensors": b"another kind",
        },
        tags=("v1",),
    ),
    "kvolt/sharded": Repo(
        {
            "config.json": b"{}",
            "model.safetensors.index.json": INDEX.encode(),
            "model-00001-of-00002.safetensors": WEIGHTS[:1000],
            "model-00002-of-00002.safetensors": WEIGHTS[1000:3000],
        }
    ),
    "kvolt/quants": Repo(
        {
            "config.json": b"{}",
            "Tiny-Q4_K_M.gguf": b"four",
            "Tiny-Q8_0.gguf": b"eight",
            "mmproj-F16.gguf": b"eyes",
        }
    ),
    "kvolt/pickle": Repo({"config.json": b"{}", "pytorch_model.bin": b"pickle"}),
    "kvolt/gated": Repo({"config.json": b"{}", "model.safetensors": b"x"}, gated=True),
}


class Told:
    """A Progress that remembers."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int | None]] = []

    def __call__(self, what: str, done_bytes: int, total_bytes: int | None) -> None:
        self.calls.append((what, done_bytes, total_bytes))


@pytest.fixture
def server() -> Iterator[FakeHub]:
    with FakeHub(REPOS) as hub:
        yield hub


@pytest.fixture
def hub(server: FakeHub, tmp_path: Path) -> ModelHub:
    return ModelHub(server.url, tmp_path / "hub")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvolt.models.hub_file._LONGEST_PAUSE_S", 0.01)
    monkeypatch.setattr("kvolt.models.hub_file._LOCK_POLL_S", 0.01)


def test_downloads_what_serving_needs_and_no_more(hub: ModelHub, server: FakeHub) -> None:
    told = Told()
    model = hub.download(TINY, told)
    names = {path.name for path in model.path.rglob("*") if path.is_file()}
    assert names == {"config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"}
    assert (model.path / "model.safetensors").read_bytes() == WEIGHTS
    assert model.kind is ModelKind.FOLDER
    assert model.revision == REPOS["kvolt/tiny"].commit
    total = told.calls[-1][2]
    assert total is not None
    assert total > len(WEIGHTS)
    assert told.calls[-1][1] == total
    assert [done for _, done, _ in told.calls] == sorted(done for _, done, _ in told.calls)
    assert all(done < total for _, done, _ in told.calls[:-1])
    assert "kvolt/tiny" in told.calls[0][0]
    assert server.url in told.calls[0][0]


def test_a_cut_connection_goes_on_where_it_was(hub: ModelHub, server: FakeHub) -> None:
    server.faults.cut_after = [100_000, 50_000]
    told = Told()
    model = hub.download(HubName("kvolt/tiny", "v1"), told)
    assert (model.path / "model.safetensors").read_bytes() == WEIGHTS
    ranges = [asked.range for asked in server.large_asked() if asked.method == "GET"]
    assert [each for each in ranges if each] == ["bytes=100000-", "bytes=150000-"]
    assert max(done for _, done, _ in told.calls) == told.calls[-1][2]


def test_a_later_process_goes_on_where_an_earlier_one_ended(server: FakeHub, tmp_path: Path) -> None:
    server.faults.cut_always_after = 0
    server.faults.cut_after = [100_000]
    server.repos["kvolt/tiny"] = Repo({"config.json": b"{}", "model.safetensors": WEIGHTS})
    with pytest.raises(ConnectFailed, match="cannot be reached") as caught:
        ModelHub(server.url, tmp_path / "hub").download(TINY, Told())
    assert "downloaded data is kept" in str(caught.value.fields["remedy"])
    server.faults, server.asked[:] = Faults(), []
    told = Told()
    model = ModelHub(server.url, tmp_path / "hub").download(TINY, told)
    assert [asked.range for asked in server.large_asked()] == ["bytes=100000-"]
    assert (model.path / "model.safetensors").read_bytes() == WEIGHTS
    assert told.calls[0][1] >= 100_000
    assert not list((tmp_path / "hub").rglob("*.incomplete"))


def test_a_server_without_ranges_sends_all_of_it_again(hub: ModelHub, server: FakeHub) -> None:
    server.repos["kvolt/tiny"] = Repo({"config.json": b"{}", "model.safetensors": WEIGHTS})
    server.faults.cut_after = [100_000]
    server.faults.no_ranges = True
    told = Told()
    model = hub.download(TINY, told)
    assert (model.path / "model.safetensors").read_bytes() == WEIGHTS
    assert told.calls[-1][1] == told.calls[-1][2] == len(WEIGHTS) + 2


def test_a_server_that_fails_for_a_moment_is_asked_again(hub: ModelHub, server: FakeHub) -> None:
    server.faults.failing = 3
    assert (hub.download(TINY, Told()).path / "model.safetensors").read_bytes() == WEIGHTS


def test_wrong_bytes_are_dropped_and_not_taken(hub: ModelHub, server: FakeHub, tmp_path: Path) -> None:
    # One large file: of another one, what came before this one was found wrong would stay.
    server.repos["kvolt/tiny"] = Repo({"config.json": b"{}", "model.safetensors": WEIGHTS})
    server.faults.corrupt = True
    with pytest.raises(NetworkFault, match="unexpected checksum"):
        hub.download(TINY, Told())
    assert hub.find(TINY) is None
    assert sum(path.stat().st_size for path in (tmp_path / "hub").rglob("*.incomplete")) == 0
    server.faults.corrupt = False
    assert (hub.download(TINY, Told()).path / "model.safetensors").read_bytes() == WEIGHTS


def test_one_of_two_fetches_and_the_other_waits(server: FakeHub, tmp_path: Path) -> None:
    server.repos["kvolt/tiny"] = Repo({"config.json": b"{}", "model.safetensors": WEIGHTS})
    server.faults.hold = threading.Event()
    results: list[Path] = []

    def get() -> None:
        results.append(ModelHub(server.url, tmp_path / "hub").download(TINY, Told()).path)

    threads = [threading.Thread(target=get) for _ in range(3)]
    for thread in threads:
        thread.start()
    while sum(asked.path.startswith("/api/") and "?" not in asked.path for asked in server.asked) < 3:
        threading.Event().wait(0.01)
    server.faults.hold.set()
    for thread in threads:
        thread.join(30)
    assert len(results) == 3
    assert len({*results}) == 1
    assert (results[0] / "model.safetensors").read_bytes() == WEIGHTS
    assert len([asked for asked in server.large_asked() if asked.method == "GET"]) == 1


def test_what_is_in_the_cache_needs_no_network(hub: ModelHub, server: FakeHub) -> None:
    assert hub.find(TINY) is None
    model = hub.download(TINY, Told())
    hub.download(HubName("kvolt/tiny", "v1"), Told())
    server.asked.clear()
    assert hub.find(TINY) == model
    assert hub.find(HubName("kvolt/tiny", "v1")) == model
    assert hub.find(HubName("kvolt/tiny", model.revision)) == model
    assert hub.find(HubName("kvolt/tiny", "v2")) is None
    assert server.asked == []


def test_nothing_is_downloaded_or_reported_twice(hub: ModelHub, server: FakeHub) -> None:
    model = hub.download(TINY, Told())
    server.asked.clear()
    told = Told()
    assert hub.download(TINY, told) == model
    assert server.large_asked() == []
    assert told.calls == []


def test_a_newer_commit_is_fetched(hub: ModelHub, server: FakeHub) -> None:
    old = hub.download(TINY, Told())
    server.repos["kvolt/tiny"] = Repo({**REPOS["kvolt/tiny"].files, "config.json": b'{"new": 1}'})
    server.asked.clear()
    new = hub.download(TINY, Told())
    assert new.revision != old.revision
    assert (new.path / "config.json").read_bytes() == b'{"new": 1}'
    assert hub.find(TINY) == new
    assert [asked for asked in server.large_asked() if asked.method == "GET"] == [], (
        "the weights are the same"
    )


@pytest.mark.parametrize("lost", ["model-00002-of-00002.safetensors", "config.json"])
def test_half_a_snapshot_is_not_found(hub: ModelHub, lost: str) -> None:
    name = HubName("kvolt/sharded")
    model = hub.download(name, Told())
    assert hub.find(name) == model
    (model.path / lost).unlink()
    assert hub.find(name) is None
    assert hub.download(name, Told()) == model
    assert hub.find(name) == model


@pytest.mark.parametrize("file", ["Q4_K_M", "q4_k_m", "Tiny-Q4_K_M.gguf"])
def test_one_gguf_of_several(hub: ModelHub, server: FakeHub, file: str) -> None:
    name = HubName("kvolt/quants", None, file)
    assert hub.find(name) is None
    model = hub.download(name, Told())
    assert model.kind is ModelKind.GGUF
    assert model.path.read_bytes() == b"four"
    assert len([asked for asked in server.large_asked() if asked.method == "GET"]) == 1
    assert hub.find(name) == model
    assert hub.find(HubName("kvolt/quants", None, "Q8_0")) is None


def test_lists_what_the_cache_has(hub: ModelHub) -> None:
    assert hub.cached_repos() == []
    hub.download(TINY, Told())
    hub.download(HubName("kvolt/quants", None, "Q8_0"), Told())
    assert [(str(name), size) for name, size in hub.cached_repos()] == [
        ("kvolt/quants:Tiny-Q8_0.gguf", 5),
        ("kvolt/tiny", len(WEIGHTS) + 2 + 18 + 14),
    ]


def refused(hub: ModelHub, name: HubName) -> tuple[str, str, str]:
    with pytest.raises(ConfigError) as caught:
        hub.download(name, Told())
    fields = caught.value.fields
    assert fields["key"] == "model"
    assert "\n" not in caught.value.message
    return str(fields["reason"]), caught.value.message, str(fields["remedy"])


def test_wrong_names(hub: ModelHub, server: FakeHub) -> None:
    reason, message, remedy = refused(hub, HubName("kvolt/none"))
    assert (reason, message) == ("not_found", f"{server.url} has no model kvolt/none")
    assert "spelling" in remedy
    reason, message, remedy = refused(hub, HubName("kvolt/tiny", "v9"))
    assert (reason, message) == ("not_found", "kvolt/tiny has no revision v9")
    reason, message, remedy = refused(hub, HubName("kvolt/quants", None, "Q2_K"))
    assert (reason, message) == ("not_found", "kvolt/quants:Q2_K has no .gguf file 'Q2_K'")
    assert "Q4_K_M, Q8_0" in remedy
    reason, message, remedy = refused(hub, HubName("kvolt/quants"))
    assert reason == "ambiguous"
    assert "kvolt/quants:X" in remedy
    assert "a..b" in refused(hub, HubName("kvolt/a..b"))[1]


def test_pickles_are_refused_by_name(hub: ModelHub, server: FakeHub) -> None:
    reason, message, remedy = refused(hub, HubName("kvolt/pickle"))
    assert reason == "pickle"
    assert "pytorch_model.bin" in message
    assert ".safetensors" in remedy
    assert refused(hub, HubName("kvolt/tiny", None, "pytorch_model.bin"))[0] == "pickle"
    assert server.large_asked() == []


def test_a_gated_model_needs_a_token(hub: ModelHub, server: FakeHub, tmp_path: Path) -> None:
    reason, _, remedy = refused(hub, HubName("kvolt/gated"))
    assert reason == "gated"
    assert "HF_TOKEN" in remedy
    assert f"{server.url}/kvolt/gated" in remedy
    model = ModelHub(server.url, tmp_path / "hub", TOKEN).download(HubName("kvolt/gated"), Told())
    assert (model.path / "model.safetensors").read_bytes() == b"x"


def test_no_server(tmp_path: Path) -> None:
    with FakeHub({}) as gone:
        url = gone.url
    with pytest.raises(ConnectFailed, match="cannot be reached") as caught:
        ModelHub(url, tmp_path).download(TINY, Told())
    assert caught.value.fields["address"] == url
    assert "HF_ENDPOINT" in str(caught.value.fields["remedy"])


def test_offline_by_choice(hub: ModelHub, server: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    model = hub.download(TINY, Told())
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    server.asked.clear()
    assert hub.find(TINY) == model
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE") as caught:
        hub.download(HubName("kvolt/sharded"), Told())
    assert "unset HF_HUB_OFFLINE" in str(caught.value.fields["remedy"])
    assert server.asked == []


def test_a_full_disk_is_seen_before_anything_comes(
    hub: ModelHub, server: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=1000))
    reason, _, remedy = refused(hub, TINY)
    assert reason == "disk_full"
    assert "free 300 kB" in remedy
    assert "HF_HUB_CACHE" in remedy
    assert server.large_asked() == []


def test_a_disk_that_fills_up_later(hub: ModelHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvolt.models.hub_file._Download._write", full)
    assert refused(hub, TINY)[0] == "disk_full"


def test_a_cache_that_cannot_be_written(server: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    reason, _, remedy = refused(ModelHub(server.url, tmp_path / "file" / "hub"), TINY)
    assert reason == "disk"
    assert "HF_HUB_CACHE" in remedy


def test_without_the_library(hub: ModelHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match="huggingface_hub") as caught:
        hub.find(TINY)
    assert "kvolt[native]" in str(caught.value.fields["remedy"])


@pytest.mark.parametrize(
    "index", ["", "[]", "{}", '{"weight_map": 5}', '{"weight_map": {"a": [1]}}', "[" * 100_000]
)
def test_a_damaged_index_is_reported_when_the_model_is_loaded(tmp_path: Path, index: str) -> None:
    """Not by `kvolt model list`."""
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert _is_whole(tmp_path, ModelFiles(ModelKind.FOLDER, ("model.safetensors",)))
