"""A suite that proves in bytes that RL training and rollout agree."""
