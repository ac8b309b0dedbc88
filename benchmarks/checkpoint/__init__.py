"""What a checkpoint in memory costs: `make bench-checkpoint`."""
