"""Carries out what the scheduler decides: workers on Ray or in this process, leases, the log, progress, metrics, notices."""
