"""Evaluation on prompts that are not trained on, and the record of the best step."""
