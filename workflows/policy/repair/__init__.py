"""What is done about a broken world: the smallest repair that works, or the reason to stop."""
