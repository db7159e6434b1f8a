"""The contract between producers and workers (design notes are completed at the end)."""
