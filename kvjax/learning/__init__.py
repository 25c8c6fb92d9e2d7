"""Budgets as an optimisation problem: relaxed policies, and families of budgets with gradients."""
