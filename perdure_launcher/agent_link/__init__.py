"""Talks to the agent of this node: reports that must arrive, and the state that it desires."""
