"""The files of a run directory: units, manifest, lease."""
