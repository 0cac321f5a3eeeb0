"""Only as many blocks are checkpointed as free memory requires, and training then fits."""

from __future__ import annotations

import gc
import re
from collections.abc import Generator
from contextlib import contextmanager

import pytest
import torch

from colocated_grpo.batching.pack import Minibatch
from colocated_grpo.errors import RunError
from colocated_grpo.losses.inputs import Counts
from colocated_grpo.metrics import Metrics
from colocated_grpo.policy.activations import (
    StepSettings,
    dummy_micro_batch,
    fit_to_memory,
    measure,
    out_of_memory_in_one_line,
    run_trial_step,
)
from colocated_grpo.policy.blocks import num_checkpointed, set_checkpointed
from colocated_grpo.tools.shapes import Shape
from tests.support.random_models import make_model
from tests.support.small_policy import config_of, policy_of

pytestmark = pytest.mark.gpu

SHAPE = Shape(hidden=1024, layers=12, heads=16, kv_heads=8, head_dim=128, intermediate=3072, max_positions=4096)
TOKENS = 16_384


@contextmanager
def occupied_but_for(size: float) -> Generator[None]:
    """Leave `size` bytes of device memory free inside the block; release the rest afterwards, for other tests."""
    gc.collect()
    torch.cuda.empty_cache()
    ballast = torch.empty(int(torch.cuda.mem_get_info()[0] - size), dtype=torch.uint8, device="cuda")
    try:
        yield
    finally:
        del ballast
        gc.collect()
        torch.cuda.empty_cache()


def test_training_fits_into_free_memory_with_as_few_checkpointed_blocks_as_needed(world, tmp_path):
    folder = make_model(tmp_path / "model", shape=SHAPE)
    lengths = {"max_prompt_tokens": 256, "max_completion_tokens": 768}
    config = config_of(folder, batch={"max_tokens_per_micro_batch": TOKENS}, rollout=lengths)
    policy, step = policy_of(config, world), StepSettings.of(config)
    policy.update.init_state()

    fit_to_memory(policy, step, world)
    assert num_checkpointed(policy.model) == 0

    with occupied_but_for(0.6 * measure(policy, step).bytes_needed(TOKENS, SHAPE.layers)):
        fit_to_memory(policy, step, world)
        count = num_checkpointed(policy.model)
        assert 0 < count < SHAPE.layers

        sizes = (TOKENS, TOKENS - 1500, TOKENS - 200, TOKENS)
        micro_batches = [dummy_micro_batch(step, tokens) for tokens in sizes]
        counts = Counts(tokens=4 * TOKENS, sequences=64, batch_tokens=4 * TOKENS, minibatches=1)
        for _ in range(2):
            policy.forward_backward(Minibatch(micro_batches=micro_batches, counts=counts), Metrics(policy.device))
            policy.optimizer_step(Metrics(policy.device))
        assert policy.version == 2

        set_checkpointed(policy.model, 0)
        with pytest.raises(RunError) as raised, out_of_memory_in_one_line(TOKENS):
            run_trial_step(policy, step, TOKENS)
        assert isinstance(raised.value.__cause__, torch.OutOfMemoryError)
        assert re.fullmatch(
            rf"batch\.max_tokens_per_micro_batch={TOKENS}: a training step does not fit into device memory "
            r"\(OutOfMemoryError: CUDA out of memory\. Tried to allocate [^\n]*\); lower it, [^\n]*",
            str(raised.value),
        )
        assert "ALLOC_CONF" not in str(raised.value)
