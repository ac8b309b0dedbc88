"""What every part of Perdure may use: it imports nothing above it."""
