"""The code of a worker: turns rows into canvases, runs the decode loop, and turns outcomes into result rows."""
