"""The documentation site: what must not be on it fails the build."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def docs_site() -> ModuleType:
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        return importlib.import_module("docs_site")
    finally:
        sys.path.pop(0)


@pytest.mark.parametrize(
    "broken", [("missing.md", "missing.json", "#missing"), ('--8<-- "missing.py"',)], ids=["links", "include"]
)
def test_broken_link_or_include_fails_the_build(
    broken: tuple[str, ...], docs_site: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "mkdocs.yml"
    config.write_text(
        f"INHERIT: {ROOT}/mkdocs.yml\ndocs_dir: pages\nsite_dir: site\nplugins: []\nnav: [README.md]\n"
    )
    page = tmp_path / "pages" / "README.md"
    page.parent.mkdir()
    page.write_text("# Title\n\n" + "\n\n".join(each if " " in each else f"[it]({each})" for each in broken))
    assert not docs_site.build(config)
    output = capfd.readouterr().err
    assert all(each.split('"')[-2 if " " in each else 0] in output for each in broken)


def test_reference_has_every_verb_setting_and_operation(docs_site: ModuleType) -> None:
    pages = {name: generate() for name, generate in docs_site.PAGES.items()}
    assert "## kvolt twin sweep" in pages["docs/reference/cli.md"]
    assert "### `frontend.port`" in pages["docs/reference/config.md"]
    assert "### POST /v1/chat/completions" in pages["docs/reference/http.md"]
    assert "| `n` | yes |" in pages["docs/reference/http.md"]
    assert "use --kv-shared to start a pool" in pages["docs/reference/errors.md"]
