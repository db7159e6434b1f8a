"""How many requests a server can run at once, what binds that, and what would give more."""
