"""One page of results: what was found where, the numbers it comes to, and how they are shown."""
