"""The step loop, and the processes it owns: Ray, the trainer ranks, the engines."""
