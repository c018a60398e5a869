"""Files that make other programs run a job: Kubernetes, Slurm, cron, systemd and Ray's cluster launcher. Text only, no Ray."""
