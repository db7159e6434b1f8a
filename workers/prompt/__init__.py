"""One prompt in its slot: attempt after attempt, turn after turn, to a result."""
