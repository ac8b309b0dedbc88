"""Measures how soon killed ranks train again with warm starts, for all kinds of scripts, and the cost of warm
starts."""
