"""The tests. A regular package: some distributions install a `tests` of their own beside ours."""
