"""The decode loop of a worker: it loads the job's models, keeps the slots full, and answers the driver."""
