"""Policies measured on tasks: running, scoring, storing what was found, and reports of it."""
