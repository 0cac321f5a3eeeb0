"""Modules that the fork server preloads because the engine would import them only when it is built.

vLLM inspects a model class in a new process when it first sees the architecture on a machine, and that process takes
ten seconds to import vLLM. Forked CPU ranks have vLLM imported and no CUDA driver to protect, so they inspect in place.
"""

import vllm.v1.worker.cpu_worker  # noqa: F401
from vllm.model_executor.models import registry

registry._run_in_subprocess = lambda inspect_model: inspect_model()
