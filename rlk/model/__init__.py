"""One definition of Qwen3 for both engines."""
