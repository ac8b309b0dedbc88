"""How soon killed ranks train again when they start warm, for all kinds of scripts, and what that costs."""
