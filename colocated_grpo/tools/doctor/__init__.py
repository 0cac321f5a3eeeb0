"""The doctor: checks a machine and the run that a command line describes, and prints a fix for each failure."""
