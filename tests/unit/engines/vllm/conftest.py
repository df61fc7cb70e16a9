from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.engines.vllm import stand_in
from tests.unit.engines.vllm.lab import make_model


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The stand-in is installed, and here is a model for it."""
    stand_in.install(monkeypatch, tmp_path / "site")
    return make_model(tmp_path / "model")
