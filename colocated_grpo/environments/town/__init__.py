"""Town: an original social-deduction game as a turn environment. The game itself needs the standard library only."""
