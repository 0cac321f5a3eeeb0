"""Imported where ranks are forked from: the engine's modules that it imports only when it is built.

The first time on a machine that an architecture is wanted, vLLM looks at its class in a new process, which takes ten
seconds to import vLLM. Ranks that are forked have it imported, and no driver of a GPU that the class could wake.
"""

import vllm.v1.worker.cpu_worker  # noqa: F401
from vllm.model_executor.models import registry

registry._run_in_subprocess = lambda look: look()
