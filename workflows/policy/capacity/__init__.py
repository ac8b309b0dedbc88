"""Which nodes a job has: how many it waits for, which machines it avoids, who joins and who leaves as planned."""
