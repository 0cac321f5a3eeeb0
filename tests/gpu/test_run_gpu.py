"""Full runs on CUDA devices: they finish, stay fresh, stop on SIGTERM and resume."""

from __future__ import annotations

import signal

import pytest

from colocated_grpo.tracking import files
from tests.support.training_runs import LaunchedRun, Settings, TrainingRun, launch, settings, tiny_model

STEPS = 12

EIGHT_TURNS_AND_ONE = """
class Talk:
    def prompts(self, seed, split):
        number = 0
        while True:
            yield {"prompt": f"say {number % 10}", "turns": 1 if number % 2 else 8}
            number += 1

    async def run(self, item, model):
        for turn in range(item["turns"]):
            if turn:
                model.observe("on")
            said = (await model.generate(4)).text
        return {"reward": float(any(character.isdigit() for character in said)), "turns": float(model.turns)}
"""


def gpu_settings(**changes: object) -> Settings:
    """Settings with bfloat16, CUDA graphs and sleep, as in real runs."""
    engine = {"enforce_eager": False, "max_num_seqs": 32}
    return settings(tiny_model(), training_steps=STEPS, engine=engine, **changes)


def check_finished(run: TrainingRun) -> None:
    rows = run.rows(files.TRAIN)
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert all(row["staleness"] == 0 and row["seconds/sleep"] > 0 for row in rows)
    assert (run.folder / "final_model/model.safetensors").exists()
    assert (run.folder / "report.html").exists()


@pytest.mark.gpu
@pytest.mark.parametrize("weights", ["copied", "shared"])
def test_a_run_on_one_device_stops_on_sigterm_and_resumes(tmp_path, weights):
    config = gpu_settings(weights=weights, checkpoint={"every": 0})
    with LaunchedRun(tmp_path, config, gpus=1) as run:
        run.wait_for_step(3)
        run.launcher.send_signal(signal.SIGTERM)
        assert run.wait() == 143, run.tail()
        assert run.processes() == []
    done = len(run.rows(files.TRAIN))
    assert 3 < done < STEPS
    resumed = launch(tmp_path, config, "--resume", "auto", gpus=1)
    assert [start["first_step"] for start in files.read_environment(resumed.folder)] == [0, done]
    check_finished(resumed)


@pytest.mark.gpu
def test_the_engine_keeps_its_weights_between_syncs(tmp_path):
    run = launch(tmp_path, gpu_settings(sync_frequency=3, evaluation={"every": 0}), gpus=1)
    assert [row["staleness"] for row in run.rows(files.TRAIN)] == [0, 1, 2] * (STEPS // 3)


@pytest.mark.multigpu(2)
def test_a_killed_run_on_two_devices_resumes(tmp_path):
    config = gpu_settings(checkpoint={"every": 2})
    with LaunchedRun(tmp_path, config, gpus=2) as run:
        run.wait_for_step(5)
        run.ranks()[1].kill()
        assert run.wait() != 0
        assert run.processes() == []
    check_finished(launch(tmp_path, config, "--resume", "auto", gpus=2))


@pytest.mark.multigpu(2)
def test_ranks_with_episodes_of_different_length_sleep_and_wake_together(tmp_path):
    (tmp_path / "talk.py").write_text(EIGHT_TURNS_AND_ONE)
    config = gpu_settings(
        environments=[{"type": "episode", "name": f"{tmp_path / 'talk.py'}:Talk"}],
        rollout={"max_prompt_tokens": 32, "max_completion_tokens": 96},
        deterministic=True,  # prompts alternate between the devices
        evaluation={"every": 0},
    )
    run = launch(tmp_path, config, gpus=2)
    check_finished(run)
    assert all(row["reward/turns"] == 4.5 for row in run.rows(files.TRAIN))
