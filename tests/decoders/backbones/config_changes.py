"""Changes the config.json of a checkpoint folder."""

import json

GONE = object()
"""Stands for a field that config.json has not."""


def change_config(folder, changes):
    """Give fields other values, or take them out."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not GONE}))
