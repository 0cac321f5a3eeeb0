"""The card of a pushed model: README.md and a figure, made from a run's settings and metrics."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from colocated_grpo import __version__
from colocated_grpo.settings.config_json import has_text_part, read_config_json
from colocated_grpo.settings.errors import ConfigError
from colocated_grpo.settings.schema import Config
from colocated_grpo.settings.sources import DATA_SUFFIXES, TRAIN_DATASET, DatasetSourceConfig, RowsSourceConfig
from colocated_grpo.tracking import files
from colocated_grpo.tracking.files import TRAIN, Row
from colocated_grpo.tracking.page import DARK, LIGHT
from colocated_grpo.tracking.svg import Point, Series, line_chart
from colocated_grpo.tracking.text import number, visible

CARD, FIGURE = "README.md", "reward.svg"
SETTINGS = (
    "loss.type",
    "advantage.scale",
    "policy.lr",
    "policy.schedule",
    "policy.lora.rank",
    "policy.lora.alpha",
    "policy.train_layers",
    "rollout.prompts_per_step",
    "rollout.group_size",
    "rollout.max_prompt_tokens",
    "rollout.max_completion_tokens",
    "rollout.temperature",
    "batch.minibatches",
    "batch.epochs",
    "loss.kl.coef",
    "seed",
)
"""Settings that the card shows, if the run has them."""


def write_card(folder: Path, config: Config, repo: str, run_dir: Path, step: int) -> None:
    """Write the card of the weights after `step` steps into the folder that is pushed. Raises OSError or RunError."""
    rows = [row for row in files.read_metrics(run_dir, may_be_empty=True) if row["step"] <= step]
    curves = _curves(rows)
    if curves:
        (folder / FIGURE).write_text(figure(curves), encoding="utf-8")
    (folder / CARD).write_text(card(config, repo, rows, step, with_figure=bool(curves)), encoding="utf-8")


def card(config: Config, repo: str, rows: list[Row], step: int, *, with_figure: bool) -> str:
    """Return the card as Markdown. rows: of metrics.jsonl."""
    base, adapter = hub_name(config.model.name), config.policy.lora is not None
    shown = base or Path(config.model.name).name
    kind = "A LoRA adapter for" if adapter else "Trained from"
    parts = [
        f"---\n{yaml.safe_dump(_metadata(config, base, adapter), sort_keys=False)}---",
        f"# {repo.rpartition('/')[2]}",
        f"{kind} {_link_to(shown, base)}: {step} of {config.training_steps} steps of reinforcement learning "
        f"({config.loss.type}) with colocated_grpo {__version__}.",
        f"## Use\n\n{_use(config, repo, shown, adapter)}",
        "## Reward" + (f"\n\n![Reward by step]({FIGURE})" if with_figure else ""),
        _table(("Metric", "First", "Last"), _rewards(rows)),
        "## Data\n\n" + _table(("Type", "Name", "Rewards", "Weight"), _sources(config)),
        "## Settings\n\n" + _table(("Setting", "Value"), _settings(config)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def hub_name(name: str) -> str | None:
    """Return a name on the Hub; None for a local file or folder, whose path is not published."""
    local = Path(name).exists() or Path(name).suffix.lower() in DATA_SUFFIXES or name.startswith((".", "/"))
    return None if local or name.count("/") > 1 or name.startswith(TRAIN_DATASET) else name


def figure(curves: list[Series]) -> str:
    """Return a chart as a file of its own, with the colours that the page of a report would give it."""

    def colors(values: tuple[str, ...], ink: str, edge: str) -> str:
        lines = "".join(f".l{index}{{stroke:{color}}}.f{index}{{fill:{color}}}" for index, color in enumerate(values))
        return f"text{{fill:{ink}}}.grid{{stroke:{edge}}}{lines}"

    style = (
        "text{font:12px sans-serif}polyline{fill:none;stroke-width:2}.raw{stroke-width:1;opacity:.35}.hit{fill:none}"
        f"{colors(LIGHT, '#66707f', '#e2e6eb')}"
        f"@media (prefers-color-scheme:dark){{{colors(DARK, '#93a0b0', '#2b333f')}}}"
    )
    names = "".join(
        f'<text class="f{line.color}" x="{80 + 110 * place}" y="22">{line.name}</text>'
        for place, line in enumerate(curves)
    )
    begin, _, rest = line_chart(curves).partition(">")
    return f'{begin} xmlns="http://www.w3.org/2000/svg"><style>{style}</style>{names}{rest}'


def _curves(rows: list[Row]) -> list[Series]:
    wanted = (("reward", "training", False), ("held_out/reward", "held-out", True))
    points: dict[str, list[Point]] = {
        key: [(float(row["step"]), float(row[key])) for row in rows if row.get(key) is not None] for key, _, _ in wanted
    }
    return [
        Series(name=name, points=points[key], color=color, dots=dots)
        for color, (key, name, dots) in enumerate(wanted)
        if points[key]
    ]


def _metadata(config: Config, base: str | None, adapter: bool) -> dict[str, Any]:
    names = [entry.name for entry in config.environments if isinstance(entry, RowsSourceConfig)]
    datasets = [name for name in map(hub_name, names) if name]
    return {
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "text-generation",
        **({"base_model": base} if base else {}),
        **({"datasets": datasets} if datasets else {}),
        "tags": ["grpo", "reinforcement-learning", "colocated_grpo", *(["lora"] if adapter else [])],
    }


def _link_to(shown: str, base: str | None) -> str:
    return f"[{shown}](https://huggingface.co/{base})" if base else f"`{shown}`"


def _use(config: Config, repo: str, base: str, adapter: bool) -> str:
    if adapter and _has_text_part(config):
        return (
            f"The adapter's layers are named as in the text part of {base} alone. The page of models of colocated_grpo "
            "(docs/models.md) shows how to load it beside that part."
        )
    return f"```bash\n{_serving(repo, base, adapter)}\n```\n\n```python\n{_loading(repo, base, adapter)}\n```"


def _has_text_part(config: Config) -> bool:
    try:
        return has_text_part(read_config_json(config.model))
    except ConfigError:  # the folder has been removed since the run started
        return False


def _serving(repo: str, base: str, adapter: bool) -> str:
    return f"vllm serve {base} --enable-lora --lora-modules adapter={repo}" if adapter else f"vllm serve {repo}"


def _loading(repo: str, base: str, adapter: bool) -> str:
    model = "AutoModelForCausalLM.from_pretrained"
    if not adapter:
        lines = [
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            f'model = {model}("{repo}")',
        ]
    else:
        lines = [
            "from peft import PeftModel",
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            f'model = PeftModel.from_pretrained({model}("{base}"), "{repo}")',
        ]
    return "\n".join([*lines, f'tokenizer = AutoTokenizer.from_pretrained("{repo}")'])


def _rewards(rows: list[Row]) -> Iterator[tuple[str, ...]]:
    """Yield the first and the last value of the reward, and of each evaluation's."""
    keys = dict.fromkeys(key for row in rows for key in row)
    for key in keys:
        kinds = [row for row in rows if row["kind"] == TRAIN] if key == "reward" else rows
        ends = key.rpartition("/")[2]
        evaluated = key.startswith("eval/") and (ends == "mean" or ends.startswith(("pass@", "maj@")))
        if key not in ("reward", "held_out/reward") and (not evaluated or ends.endswith("_stderr")):
            continue
        if (found := files.first_and_last(kinds, key)) is not None:
            yield f"`{key}`", *(f"{number(row[key])} (step {row['step']})" for row in found)


def _sources(config: Config) -> Iterator[tuple[str, ...]]:
    for entry in config.environments:
        rewards = [reward.name for reward in entry.rewards] if isinstance(entry, DatasetSourceConfig) else []
        name = hub_name(entry.name) or Path(entry.name).name
        yield entry.type, f"`{name}`", ", ".join(f"`{Path(reward).name}`" for reward in rewards), f"{entry.weight:g}"


def _settings(config: Config) -> Iterator[tuple[str, ...]]:
    values = dict(files.flatten(config.model_dump(mode="json")))
    for key in SETTINGS:
        if values.get(key) is not None:
            yield f"`{key}`", f"`{values[key]}`"


def _table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    body = [f"| {' | '.join(visible(cell).replace('|', '/') for cell in row)} |" for row in rows]
    return "\n".join([f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}", *body]) if body else ""
