"""Evaluation: what is measured on prompts that are not trained, and which step was the best."""
