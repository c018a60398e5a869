"""Result tables for tests."""

import pyarrow as pa

from draftmill.storage.runs.records import table_from_rows


def result_row(index: int, *, unit: int = 0, **changes) -> dict:
    row: dict = {
        "id": f"file.jsonl:{index}",
        "unit": unit,
        "pass": 1,
        "attempt": 1,
        "status": "ok",
        "text": f"text {index} é\n",
        "fills": [{"start": 1, "end": 3, "text": "ab"}],
        "tokens": [1, 2, index],
        "prompt_tokens": 7,
        "new_tokens": 3,
        "finish": "filled",
        "logprob": -1.5 - index,
        "decoder": "assd",
        "model": "builtin:asarm-tiny",
        "drafter": "self",
        "key": 2**64 - 1 - index,
        "nfe": 3,
        "nfe_draft": 0,
        "iterations": 2,
        "proposed": 4,
        "accepted": 2,
        "accept_hist": [0, 1, 1],
        "wait_s": 0.1,
        "total_s": 1.0,
        "batch_rows": 2.0,
        "pad_fraction": 0.0,
        "worker": "w0",
        "node": "n0",
        "metrics": {"bits_per_byte": 1.0},
    }
    return row | changes


def failed_row(index: int, *, unit: int = 0) -> dict:
    """A row whose sample failed before it was decoded."""
    row = {"id": f"file.jsonl:{index}", "unit": unit, "pass": 1, "attempt": 1, "status": "failed"}
    return row | {"error_kind": "bad_json", "error_stage": "read", "error": "line 3"}


def unit_table(rows: int = 4, *, unit: int = 0, failed: int = 1, **changes) -> pa.Table:
    """A unit's results, the last `failed` rows of them failed."""
    ok = [result_row(index, unit=unit, **changes) for index in range(rows - failed)]
    return table_from_rows(ok + [failed_row(index, unit=unit) for index in range(rows - failed, rows)])
