"""examples/notebook.ipynb: its cells run one after another, and the file holds no outputs."""

import json

import pytest

from tests.conftest import ROOT

NOTEBOOK = json.loads((ROOT / "examples" / "notebook.ipynb").read_text())


@pytest.mark.slow
def test_the_cells_run_in_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for cell in NOTEBOOK["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
    assert len(names["rows"]) == 3 and len(names["frame"]) == 8
    assert names["run"].summary["samples"] == {"planned": 8, "ok": 8, "failed": 0}
    assert "forwards: [24, 24, 24] -> " in capsys.readouterr().out


def test_it_is_stored_without_outputs():
    assert (NOTEBOOK["nbformat"], NOTEBOOK["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in NOTEBOOK["cells"]}) == len(NOTEBOOK["cells"])
    for cell in NOTEBOOK["cells"]:
        assert cell.get("outputs", []) == [] and cell.get("execution_count") is None
