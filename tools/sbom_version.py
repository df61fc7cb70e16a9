"""Set the version of the root component of an SBOM, which pyproject.toml leaves to the build.

python tools/sbom_version.py dist/sbom.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from kvolt.version import __version__


def set_version(sbom: Path) -> None:
    document = json.loads(sbom.read_text("utf-8"))
    document["metadata"]["component"]["version"] = __version__
    sbom.write_text(json.dumps(document, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    set_version(Path(sys.argv[1]))
