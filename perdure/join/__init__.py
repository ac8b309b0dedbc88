"""`perdure join`: keeps this machine in a job as one of its nodes."""
