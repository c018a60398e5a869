"""Recurring jobs: a lease on the job's name, dates, inputs that are new since the last runs, and old runs."""
