"""Work of the fork server that each engine would repeat when it is built or closed.

It is two of the three seconds of CPU time that a forked run of two steps takes:

- vLLM imports some modules late.
- vLLM inspects a model class in a new process when it first sees the architecture on a machine, and that process takes
  ten seconds to import vLLM. Forked CPU ranks have vLLM imported and no CUDA driver to protect, so they inspect in
  place.
- vLLM sets the level of each of its loggers, and logging then clears the caches of all loggers, each time.
- transformers compiles the patterns of all weights that it renames, of every architecture.
- vLLM searches every module for the kernels that it replaces on the CPU.
- vLLM unfreezes the heap when an engine is closed and collects it twice, with every imported module.
"""

import gc

import vllm.entrypoints.launchers.cli_args
import vllm.model_executor.layers.quantization.online.base
import vllm.v1.worker.cpu_worker  # noqa: F401
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from vllm.config.logging import LoggingConfig
from vllm.logger import configure_logging_if_needed
from vllm.model_executor.models import registry
from vllm.platforms import current_platform

import colocated_grpo.settings.config_file  # noqa: F401

registry._run_in_subprocess = lambda inspect_model: inspect_model()

current_platform.register_triton_kernel_overrides()
type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)

configure_logging_if_needed(LoggingConfig())
get_checkpoint_conversion_mapping("qwen3")

gc.collect()
gc.freeze()
gc.unfreeze = lambda: None  # modules are never freed
