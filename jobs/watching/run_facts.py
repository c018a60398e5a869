"""What a run has done and cost, as JSON data, read from its directory: for notices and for the log's last event."""

from __future__ import annotations

from typing import Any

from draftmill.jobs.driving.attempts import read_sessions
from draftmill.jobs.plan.plan import load_plan
from draftmill.jobs.watching.cost import MILLION, mean_price, purposes_of
from draftmill.jobs.watching.estimate import read_estimate, to_json
from draftmill.storage.errors import StoreError, UserError
from draftmill.storage.runs.commit import done_units, read_manifest
from draftmill.storage.stores.verbs import Store


def run_facts(store: Store) -> dict[str, Any]:
    """The facts of a run, finished or not; {} if it has no plan, or its directory can't be read."""
    try:
        return _facts(store)
    except (StoreError, UserError):
        return {}


def _facts(store: Store) -> dict[str, Any]:
    plan = load_plan(store)
    if plan is None:
        return {}
    manifest, sessions = read_manifest(store), read_sessions(store)
    sums, tally = sessions.devices, sessions.committed
    done = plan.units if manifest else len(done_units(store, conditional=False) or done_units(store))
    ok = manifest.total("ok") if manifest else tally.ok
    failed = manifest.total("failed") if manifest else tally.failed
    hours = {name: round(seconds / 3600, 6) for name, seconds in purposes_of(sums).items() if name != "in_progress"}
    return {
        "fingerprint": plan.fingerprint,
        "pass": plan.pass_,
        "finished": manifest is not None,
        "units": {"planned": plan.units, "done": done},
        "samples": {"planned": plan.rows, "ok": ok, "failed": failed},
        "tokens": tally.new_tokens,
        "prompt_tokens": tally.prompt_tokens,
        "nfe": tally.nfe,
        "drafts_proposed": tally.proposed,
        "drafts_accepted": tally.accepted,
        "decoding_s": round(sessions.wall_s, 3),
        "device_hours": {"total": round(sums.up_s / 3600, 6), **hours},
        "lost_drivers": round(sums.unended),
        "cost": round(sums.cost, 6) if sums.priced_s else None,
        "cost_per_million_tokens": round(sums.cost * MILLION / tally.new_tokens, 6)
        if sums.priced_s and tally.new_tokens
        else None,
        "estimate": to_json(read_estimate(store), sums.up_s if manifest else 0.0, mean_price(sums)),
    }
