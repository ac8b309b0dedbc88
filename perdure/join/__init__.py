"""The implementation of `perdure join`, which keeps this machine in a job as one of its nodes."""
