"""The built-in tasks, and the built-in episode."""
