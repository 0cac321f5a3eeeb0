import os

# As for the ranks of a run, see cli.library_environment; before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
