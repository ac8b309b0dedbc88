"""Watches the machines that jobs run on, and the jobs on them: `perdure cluster`, and advice to jobs that share."""
