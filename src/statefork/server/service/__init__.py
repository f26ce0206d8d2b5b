"""What the daemon looks after: environments, their trees, their commands, and what they cost. Knows nothing of HTTP but
that callers have a Principal and that too much is answered with a Refused."""
