"""Running workers: Ray or this process, the driver's loop, the lease, progress."""
