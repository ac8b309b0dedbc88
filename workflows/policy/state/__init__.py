"""The state of a job, all that its workflow carries: what is known of nodes, world, checkpoints and budgets."""
