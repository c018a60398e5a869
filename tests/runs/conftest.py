"""A model that several files of whole jobs use as it is."""

import pytest

from tests.runs.causal_jobs import World, make_world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("causal"))
