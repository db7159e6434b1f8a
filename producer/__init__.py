"""The producer commands: prompts into Redis, and all that a user asks about a run."""
