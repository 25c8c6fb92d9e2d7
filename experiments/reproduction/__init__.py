"""Running the papers' tables: what an entry needs, how it is run, and ours beside theirs."""
