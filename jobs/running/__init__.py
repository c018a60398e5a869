"""The session of a run, from its spec to its verdict; commands are built on it."""
