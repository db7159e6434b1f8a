"""Proof that each guard is needed: the code without one of them, and the test that then fails."""
