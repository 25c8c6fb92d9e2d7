"""Learning: budgets, by relaxed policies and families with gradients; functions that predict scores."""
