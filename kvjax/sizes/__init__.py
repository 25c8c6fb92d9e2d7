"""How much: counts of tokens, their division over layers and heads, and when an eviction is due."""
