"""What the learning scripts share: what later rows read of prompts, and reports."""
