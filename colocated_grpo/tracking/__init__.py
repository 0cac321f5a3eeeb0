"""Output and records of a run: console, run folder, report, trackers, the Hub."""

from colocated_grpo.tracking.ending import RunOutput, make_output
from colocated_grpo.tracking.tracker import NullTracker, Tracker

__all__ = ["NullTracker", "RunOutput", "Tracker", "make_output"]
