"""From the result streams to the store."""
