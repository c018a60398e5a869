"""Files that make other programs run a job: Kubernetes, Slurm and cron. Text only, no Ray."""
