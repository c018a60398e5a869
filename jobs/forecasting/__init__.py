"""What a job will take, before it runs: a few rows are read and decoded, and earlier runs are looked at."""
