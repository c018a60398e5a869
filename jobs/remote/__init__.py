"""Jobs elsewhere: on a cluster through Ray's job API, or from files for Kubernetes, Slurm and cron."""
