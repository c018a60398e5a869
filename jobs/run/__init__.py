"""One run, from its spec to its exit code: its inputs, its session, its end; before it `validate`, after it `prune`."""
