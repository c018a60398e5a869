"""A cache of its own for each test."""

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTMILL_CACHE", str(tmp_path / "cache"))
