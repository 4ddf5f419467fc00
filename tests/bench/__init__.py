"""What exactness costs: every op beside the ordinary one. A harness, not a test; nothing here asserts a time."""
