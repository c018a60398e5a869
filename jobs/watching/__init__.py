"""Watching a run from outside: metrics, logs, notifications, and what it costs."""
