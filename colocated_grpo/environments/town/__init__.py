"""A town with secrets: an original social-deduction game as a turn environment. Standard library only."""
