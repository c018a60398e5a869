"""Changes the config.json of a checkpoint folder."""

import json

GONE = object()
"""Stands for a field that config.json has not."""
YARN = {"factor": 4.0, "original_max_position_embeddings": 16}
TYPES = ["sliding_attention", "full_attention", "sliding_attention"]


def change_config(folder, changes):
    """Give fields other values, or take them out."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not GONE}))


def old_rope(scaling):
    """As config.json wrote it before transformers 5."""
    return {"rope_parameters": GONE, "rope_theta": 300.0, "rope_scaling": scaling}
