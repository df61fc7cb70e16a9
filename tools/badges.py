"""Badges of README, from pyproject.toml and the package: `python tools/badges.py` writes docs/badges/*.svg.

Files of the repository instead of pictures of another host: a reader's browser contacts no other host, and a
test checks that they are true.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from kvolt.version import __version__

_ROOT = Path(__file__).parents[1]
FOLDER = _ROOT / "docs" / "badges"

_CHARACTER_PX, _PADDING_PX = 6.6, 12
_COLOURS = {"version": "#3b6ea5", "python": "#3b6ea5", "licence": "#4c7a3f"}
_SVG = """<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="20" role="img" aria-label="{name}: {value}">
<rect width="{width}" height="20" rx="3" fill="#555"/>
<rect x="{left}" width="{right}" height="20" rx="3" fill="{colour}"/>
<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11" text-anchor="middle">
<text x="{name_x}" y="14">{name}</text>
<text x="{value_x}" y="14">{value}</text>
</g>
</svg>
"""


def badges() -> dict[str, str]:
    """SVG by file name."""
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    python = project["requires-python"].removeprefix(">=") + "+"
    values = {"version": __version__, "python": python, "licence": project["license"]}
    return {f"{name}.svg": _badge(name, value) for name, value in values.items()}


def _badge(name: str, value: str) -> str:
    left, right = (round(len(text) * _CHARACTER_PX + _PADDING_PX) for text in (name, value))
    return _SVG.format(
        name=name,
        value=value,
        colour=_COLOURS[name],
        width=left + right,
        left=left,
        right=right,
        name_x=left / 2,
        value_x=left + right / 2,
    )


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for file_name, svg in badges().items():
        (FOLDER / file_name).write_text(svg, "utf-8")
