"""What concerns several roles of a job: when each starts, how far a failure reaches, and when the job ends."""
