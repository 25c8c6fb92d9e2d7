"""When: reading prompts, decoding, searching, one layer alone, and storing states."""
