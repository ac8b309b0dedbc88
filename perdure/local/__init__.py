"""The embedded default: a Temporal dev server, a worker and local nodes under one command, in one state folder."""
