"""The rungs of the ladder, each a pure function of a case: a verdict, or None where another rung decides."""
