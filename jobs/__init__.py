"""What a job is and how it runs."""
