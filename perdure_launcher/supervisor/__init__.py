"""Starts the user's command, keeps it in the state that the agent desires, and leaves no process behind."""
