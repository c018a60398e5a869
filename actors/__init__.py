"""What runs inside of a worker: rows to canvases, the decode loop, outcomes to rows."""
