"""How a world comes to be: its members and ranks, stages, entering, and that no two worlds train at once."""
