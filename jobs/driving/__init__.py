"""Running workers on Ray or in this process: the driver's loop, its lease, and its progress display."""
