"""Trainer on a CUDA device: the memory of a run is free after it, and a second run is refused or trains."""

from __future__ import annotations

import pytest
import torch

from colocated_grpo import RunError, Trainer
from tests.support.programs import Recorder, arguments, without_launcher
from tests.support.ranks import Ranks
from tests.support.training_runs import tiny_model

LEFT_GIB = 1.0
"""More than the CUDA context and the libraries' workspaces, far less than an engine's KV cache of 4 GiB."""


def train_twice(model, output, sleep):
    """Return what two runs came to, and the GiB in use after each."""
    with without_launcher():
        engine = {"enforce_eager": False, "max_num_seqs": 32, "kv_cache_memory_bytes": 4 << 30, "sleep": sleep}
        base = arguments(model, output, engine=engine)
        free_before = torch.cuda.mem_get_info()[0]
        seen = []
        for name in ("first", "second"):
            try:
                ending = Trainer(reward_funcs=Recorder(), **base | {"run_name": name}).train().outcome
            except RunError as error:
                ending = str(error)
            seen.append((ending, (free_before - torch.cuda.mem_get_info()[0]) / 2**30))
        return seen


@pytest.mark.gpu
@pytest.mark.parametrize(("sleep", "second"), [(True, "engine.sleep=true: vLLM has one sleeping"), (False, "finished")])
def test_a_run_leaves_no_memory_in_use_and_a_second_one_needs_an_engine_that_does_not_sleep(tmp_path, sleep, second):
    with Ranks(train_twice, 1, tiny_model(), tmp_path, sleep) as process:
        runs = process.results(300.0)[0]
    assert runs[0][0] == "finished"
    assert runs[1][0].startswith(second)
    assert all(gib < LEFT_GIB for _, gib in runs), runs
