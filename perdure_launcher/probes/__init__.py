"""What the launcher finds out about running ranks when the agent asks for it."""
