"""Which: statistics of attention, scores made of them, what is protected, and how scores become a choice."""
