"""A model's name to files: the order of the sources, and one clear line for what is wrong."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from tests.unit.models.package_lab import DATA, WEIGHTS

from kvolt.core.errors import ConfigError, ConnectFailed, KvoltError, NetworkFault
from kvolt.models import package_weights
from kvolt.models.fetch_progress import Progress
from kvolt.models.hub import HubModel, ModelHub
from kvolt.models.model_files import HubName, ModelKind
from kvolt.models.package_weights import PackageWeights
from kvolt.models.resolve import (
    BUILT_IN,
    DEFAULT_MODEL,
    Origin,
    Resolved,
    Sources,
    fetch,
    locate,
    resolve,
)

STAND_IN = "HuggingFaceTB/SmolLM2-135M-Instruct"


class ScriptedHub(ModelHub):
    """Has what it was given, and remembers what it was asked."""

    def __init__(
        self,
        cached: dict[str, HubModel] | None = None,
        remote: dict[str, HubModel] | None = None,
        error: KvoltError | None = None,
    ) -> None:
        super().__init__("http://hub.invalid", Path("/nowhere"))
        self._cached, self._remote, self._error = cached or {}, remote or {}, error
        self.downloads: list[str] = []

    def find(self, name: HubName) -> HubModel | None:
        return self._cached.get(str(name))

    def download(self, name: HubName, progress: Progress) -> HubModel:
        self.downloads.append(str(name))
        if self._error is not None:
            raise self._error
        return self._remote[str(name)]


def silent(_what: str, _done_bytes: int, _total_bytes: int | None) -> None:
    pass


@pytest.fixture(autouse=True)
def built_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> PackageWeights:
    """In place of the real built-in model, whose package may or may not be installed; fetched without pip."""

    def fetch_it(weights: PackageWeights, cache_dir: Path, progress: Progress) -> Path:
        path = cache_dir / "models" / weights.file
        if not path.exists():
            progress(weights.file, 0, 10)
            path.parent.mkdir(parents=True)
            path.write_bytes(DATA)
        return path

    monkeypatch.setitem(BUILT_IN, DEFAULT_MODEL, WEIGHTS)
    monkeypatch.setattr(package_weights, "fetch", fetch_it)
    monkeypatch.chdir(tmp_path)
    return WEIGHTS


@pytest.fixture
def sources(tmp_path: Path) -> Sources:
    return Sources(tmp_path / "cache", ScriptedHub(error=HubAsked("it was")))


class HubAsked(KvoltError):
    """The hub must not be asked."""


def model_folder(path: Path, *names: str) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for name in names:
        (path / name).write_bytes(b"")
    return path


def at(found: Resolved | None) -> tuple[ModelKind, Path, Origin]:
    assert found is not None
    return found.kind, Path(found.path), found.origin


def test_paths(tmp_path: Path, sources: Sources, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model_folder(tmp_path / "m", "config.json", "model.safetensors")
    one = model_folder(tmp_path / "one", "a.gguf", "README.md")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in (str(folder), "./m", "m", "m/", "~/m"):
        assert at(resolve(name, silent, sources)) == (ModelKind.FOLDER, folder, Origin.PATH)
        assert at(fetch(name, silent, sources)) == (ModelKind.FOLDER, folder, Origin.PATH)
    for name in ("one", "one/a.gguf", str(one / "a.gguf"), "~/one/a.gguf"):
        assert at(locate(name, sources)) == (ModelKind.GGUF, one / "a.gguf", Origin.PATH)


def test_a_folder_of_that_name_goes_before_the_hub(tmp_path: Path, sources: Sources) -> None:
    folder = model_folder(tmp_path / "owner" / "model", "config.json", "model.safetensors")
    assert at(resolve("owner/model", silent, sources)) == (ModelKind.FOLDER, folder, Origin.PATH)


def test_a_folder_of_something_else_is_no_model(tmp_path: Path, sources: Sources) -> None:
    model_folder(tmp_path / DEFAULT_MODEL, "notes.txt")
    assert at(resolve(DEFAULT_MODEL, silent, sources))[2] is Origin.PACKAGE


def test_a_shape_without_weights_is_left_to_who_loads_it(tmp_path: Path, sources: Sources) -> None:
    folder = model_folder(tmp_path / "shape", "config.json")
    assert at(resolve("./shape", silent, sources)) == (ModelKind.FOLDER, folder, Origin.PATH)


@pytest.mark.parametrize(
    ("name", "reason", "says"),
    [
        ("/no/such/model", "not_found", "/no/such/model does not exist"),
        ("./gone", "not_found", "./gone does not exist"),
        ("../gone", "not_found", "does not exist"),
        ("a/b/c", "not_found", "a/b/c does not exist"),
        ("models/x.gguf", "not_found", "models/x.gguf does not exist"),
        ("gone.gguf", "not_found", "does not exist"),
        ("empty/", "no_weights", "has no weights"),
        ("./two", "ambiguous", "2 such .gguf files"),
        ("./pickled", "pickle", "pytorch_model.bin is a pickle"),
        ("pickled/pytorch_model.bin", "pickle", "is a pickle"),
        ("gone/pytorch_model.bin", "pickle", "is a pickle"),
        ("./note.txt", "no_weights", "is not a model"),
        ("smollm-135m", "not_found", "did you mean smollm2-135m?"),
        ("llama", "not_found", "unknown model 'llama'"),
        ("a b/c", "not_found", "unknown model"),
        ("", None, "empty"),
        ("x\0y", "not_found", "unknown model"),
        ("x" * 5000, None, "too long"),
    ],
)
def test_what_is_wrong_is_one_clear_line(
    name: str, reason: str | None, says: str, tmp_path: Path, sources: Sources
) -> None:
    model_folder(tmp_path / "empty")
    model_folder(tmp_path / "two", "a-Q4_0.gguf", "b-Q8_0.gguf")
    model_folder(tmp_path / "pickled", "config.json", "pytorch_model.bin")
    (tmp_path / "note.txt").write_text("note")
    with pytest.raises(ConfigError) as caught:
        resolve(name, silent, sources)
    assert says in caught.value.message
    assert caught.value.fields.get("reason") == reason
    assert caught.value.fields["key"] == "model"
    assert caught.value.fields["remedy"]
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 200


@pytest.mark.parametrize("name", [DEFAULT_MODEL, "SmolLM2-135M", "smollm2-135m-instruct"])
def test_a_built_in_name_is_fetched_once(name: str, sources: Sources) -> None:
    told: list[str] = []
    assert locate(name, sources) is None
    found = resolve(name, lambda what, *_: told.append(what), sources)
    assert found == Resolved(
        DEFAULT_MODEL,
        ModelKind.GGUF,
        str(sources.cache_dir / "models" / "tiny.gguf"),
        Origin.PACKAGE,
        "kvolt-test-weights==1.0",
    )
    assert locate(name, sources) == found
    assert resolve(name, lambda what, *_: told.append(what), sources) == found
    assert told == ["tiny.gguf"]


def cached_at(path: str) -> HubModel:
    return HubModel(ModelKind.FOLDER, Path(path), "c0ffee")


def test_the_cache_goes_before_the_hub(tmp_path: Path) -> None:
    hub = ScriptedHub(
        cached={"a/b": cached_at("/cached")}, remote={"a/b": cached_at("/new"), "c/d@v1": cached_at("/d")}
    )
    sources = Sources(tmp_path, hub)
    assert resolve("a/b", silent, sources) == Resolved(
        "a/b", ModelKind.FOLDER, "/cached", Origin.HUB_CACHE, "c0ffee"
    )
    assert hub.downloads == []
    assert locate("c/d@v1", sources) is None
    assert resolve("c/d@v1", silent, sources) == Resolved(
        "c/d@v1", ModelKind.FOLDER, "/d", Origin.HUB, "c0ffee"
    )
    assert fetch("a/b", silent, sources).path == "/new", "fetch looks for what is newer"
    assert hub.downloads == ["c/d@v1", "a/b"]


def test_errors_of_the_hub_are_passed_on(tmp_path: Path) -> None:
    for error in (ConfigError("gated", key="model"), ConnectFailed("no net"), NetworkFault("busy")):
        with pytest.raises(type(error)) as caught:
            resolve("a/b", silent, Sources(tmp_path, ScriptedHub(error=error)))
        assert caught.value is error


def test_the_built_in_stands_in_only_if_nothing_else_has_the_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cached = ScriptedHub(cached={STAND_IN: cached_at("/cached")})
    assert resolve(STAND_IN, silent, Sources(tmp_path, cached)).path == "/cached"
    remote = ScriptedHub(remote={STAND_IN: cached_at("/remote")})
    assert resolve(STAND_IN, silent, Sources(tmp_path, remote)).path == "/remote"
    caplog.set_level(logging.WARNING)
    offline = ScriptedHub(error=ConnectFailed("no way to the hub"))
    found = resolve(STAND_IN, silent, Sources(tmp_path, offline))
    assert (found.name, found.origin) == (DEFAULT_MODEL, Origin.PACKAGE)
    assert caplog.messages == [
        "hub unreachable, using a built-in model: model=smollm2-135m error=no way to the hub"
    ]
    for name in (f"{STAND_IN}@v1", f"{STAND_IN}:Q8_0"):
        with pytest.raises(ConnectFailed):
            resolve(name, silent, Sources(tmp_path, offline))
    gated = ScriptedHub(error=ConfigError("gated", key="model"))
    with pytest.raises(ConfigError):
        resolve(STAND_IN, silent, Sources(tmp_path, gated))
