"""The commands of `workers`, a module each."""
