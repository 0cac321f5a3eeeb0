"""The doctor: checks a machine and the run that a command line describes, and says how to fix what fails."""
