"""Build the documentation site in build/site: `make docs`.

    python tools/docs_site.py [--pages]      --pages: only collect and generate the pages, in build/docs

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
_PAGES = ("*.md", "docs/**/*.md", "benchmarks/**/*.md")
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


def main() -> int:
    collect(_ROOT / "build" / "docs")
    if sys.argv[1:] == ["--pages"]:
        return 0
    # The notice that Material for MkDocs ends in May 2027 waits five seconds; docs/adr/0026 is aware of it.
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    return subprocess.run(command, cwd=_ROOT, env=environ, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
