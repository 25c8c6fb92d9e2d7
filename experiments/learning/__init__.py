"""What `experiments/learn.py` learns and measures, and the loop of gradient steps that trainings share."""
