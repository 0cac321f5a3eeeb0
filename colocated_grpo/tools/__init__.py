import os

from colocated_grpo.runtime.program import OPENMP_SETTINGS

os.environ.update({**OPENMP_SETTINGS, **os.environ})  # read when torch is imported
