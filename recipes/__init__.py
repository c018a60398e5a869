"""Training recipes for the models that ship with the project."""

import os

# Before torch loads its thread pool: workers that wait for each other by spinning lose nine tenths of their speed as
# soon as another process wants one of the cores, workers that sleep lose only that core.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
