"""Build the documentation site in build/site: `make docs`.

The pages are collected in the layout of the repository, so that a link works here and on the site, and a broken
one fails the build. Files that a page links to are copied too. The reference is generated (`docs_reference`).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from docs_reference import PAGES

_ROOT = Path(__file__).parents[1]
_PAGES = ("*.md", "docs/**/*.md", "examples/*.md", "benchmarks/**/*.md")
_LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")


def collect(target: Path) -> None:
    """Write all pages below `target`."""
    shutil.rmtree(target, ignore_errors=True)
    files = {path for pattern in _PAGES for path in _ROOT.glob(pattern)}
    for page in list(files):
        links = (page.parent / link for link in _LINK.findall(page.read_text("utf-8")))
        files |= {Path(os.path.abspath(link)) for link in links if link.is_file()}
    for file in files:
        copy = target / file.relative_to(_ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
    for name, generate in PAGES.items():
        page = target / name
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(generate(), "utf-8")


def build(config: Path) -> bool:
    """Build a site; False if it has a broken link or another problem, which is printed."""
    # Material for MkDocs announces its end in May 2027 for five seconds; docs/adr/0026 takes that into account.
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    # Not --quiet: --strict counts the warnings that it would hide.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(config)]
    return subprocess.run(command, cwd=_ROOT, env=environ, check=False).returncode == 0


def main() -> int:
    collect(_ROOT / "build" / "docs")
    return 0 if build(_ROOT / "mkdocs.yml") else 1


if __name__ == "__main__":
    sys.exit(main())
