"""Output and records of a run: console, run folder, report, trackers, the Hub."""
