"""The root component of the SBOM has the version of the release."""

from __future__ import annotations

import json
from pathlib import Path

from tools.sbom_version import set_version

from kvolt.version import __version__


def test_the_root_component_gets_the_version(tmp_path: Path) -> None:
    sbom = tmp_path / "sbom.json"
    component = {"name": "kvolt", "type": "application"}
    sbom.write_text(json.dumps({"metadata": {"component": component}, "components": [{"name": "msgspec"}]}))
    set_version(sbom)
    document = json.loads(sbom.read_text())
    assert document["metadata"]["component"] == {**component, "version": __version__}
    assert document["components"] == [{"name": "msgspec"}]
