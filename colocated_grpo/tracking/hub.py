"""Background pushes of a run's exports, with a model card, to the Hugging Face Hub. A failed push ends no run."""

import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from huggingface_hub import ModelCardData

from colocated_grpo.errors import RunError, visible
from colocated_grpo.settings.schema import HubConfig
from colocated_grpo.settings.sources import DATA_SUFFIXES, TRAIN_DATASET
from colocated_grpo.tracking import files
from colocated_grpo.tracking.text import Note, figure
from colocated_grpo.types import JsonObject

STAGING = "hub"
"""Folder in the run folder for the files being pushed."""
LONGEST_ERROR = 300
CURVES = re.compile(r"reward|held_out/reward|eval/[^/]+/(mean|(pass|maj)@\d+)")
SETTINGS = (
    "loss.type", "policy.lr", "policy.lora.rank", "policy.train_layers", "rollout.prompts_per_step",
    "rollout.group_size", "rollout.max_completion_tokens", "rollout.temperature", "loss.kl.coef", "seed",
)  # fmt: skip
"""Settings that the card shows, if the run has them."""


class Hub:
    """The run's repository. Only rank 0 pushes, by `hf upload` in a process of its own, so training is not delayed."""

    def __init__(self, settings: HubConfig, run_dir: Path, final: int | None, text_part: bool, note: Note) -> None:
        """final: the step whose export is pushed at the end. text_part: the adapter is for the base's text part."""
        self._settings = settings
        self._run_dir = run_dir
        self._final = final
        self._text_part = text_part
        self._note = note
        self._private = ["--private"] if settings.private else []
        self._process: subprocess.Popen[str] | None = None
        self._command: list[str] = []
        """Arguments of `hf` in the process."""
        self._folder: Path | None = None
        """Files that the process pushes; None: it creates the repository."""
        self._deadline = 0.0
        self._failed = 0

    def due(self, step: int) -> bool:
        """Return whether a push is due after `step` steps. The push at the end of the run does not count."""
        every = self._settings.every
        return bool(every) and step % every == 0 and (self._final is None or step < self._final)

    def start(self) -> None:
        """Create the repository, so that a wrong token is noted at the start of the run."""
        self._begin(["repos", "create", self._settings.repo, *self._private, "--exist-ok"], None)

    def free(self, step: int) -> bool:
        """Return whether a push can begin; False, with a note, while the previous push is incomplete."""
        busy = self.pending(0.0, stopped=False) and self._folder is not None
        if busy:
            self._note(f"hub: step {step} is not pushed, as {self._title} is still being pushed")
        return not busy

    def staging(self, step: int) -> Path:
        """Return the folder into which the weights after `step` steps are exported for a push."""
        return self._run_dir / STAGING / f"step_{step}"

    def push(self, folder: Path, step: int) -> None:
        """Push an export of the weights after `step` steps in the background, with a card. No push may be pending."""
        repo = self._settings.repo
        try:
            config, rows = files.read_config(self._run_dir), files.read_metrics(self._run_dir, may_be_empty=True)
            text = card(repo, config, [row for row in rows if row["step"] <= step], step, self._text_part)
            (folder / "README.md").write_text(text, encoding="utf-8")
        except (OSError, RunError, ValueError, LookupError, TypeError) as error:  # a user may have changed these files
            self._note(f"hub: {folder.name} is pushed without a card: {error}")
        command = ["upload", repo, str(folder), ".", *self._private, "--exclude", "checksums.json"]
        self._begin([*command, "--commit-message", f"{folder.name} of {self._run_dir.name}"], folder)

    def pending(self, seconds: float, *, stopped: bool) -> bool:
        """Wait up to `seconds`, and return whether a push is not complete yet. stopped: end the push instead."""
        if self._process is not None:
            left = self._deadline - time.monotonic()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(0.0 if stopped else max(0.0, min(seconds, left)))
            if stopped or left <= 0 or self._process.returncode is not None:
                self._end("the run ended first" if stopped else f"longer than hub.timeout={self._settings.timeout:g} s")
        return self._process is not None

    def metrics(self) -> dict[str, float]:
        """Return the metrics of a step; collects the result of a push that has completed."""
        self.pending(0.0, stopped=False)
        return {"hub/failed": float(self._failed)}

    def close(self) -> None:
        """End the running push."""
        self.pending(0.0, stopped=True)

    @property
    def _title(self) -> str:
        return f"repository {self._settings.repo}" if self._folder is None else self._folder.name

    def _begin(self, command: list[str], folder: Path | None) -> None:
        if self._process is not None:
            assert self._folder is None, "the push before has ended"
            self._process.kill()  # the push creates the repository too
            self._process.communicate()
        self._command, self._folder = command, folder
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "huggingface_hub.cli.hf", *command, "--quiet"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,  # Ctrl-C is for the run, which then ends the push
            )
            self._deadline = time.monotonic() + self._settings.timeout
        except OSError as error:  # no memory for a process
            self._process = None
            self._fail(str(error))

    def _end(self, late: str) -> None:
        """Record the result of the process. late: cause of the failure, if the process must be killed."""
        assert self._process is not None
        killed = self._process.poll() is None
        self._process.kill()
        printed, errors = self._process.communicate()
        code, self._process = self._process.returncode, None
        if code:
            cause = " ".join(errors.rpartition("Error: ")[2].split()) or f"exit code {code}"
            self._fail(late if killed else cause[:LONGEST_ERROR])
        elif self._folder is not None:
            self._note(f"hub: pushed {self._title}: {printed.strip()}")
        shutil.rmtree(self._run_dir / STAGING, ignore_errors=True)

    def _fail(self, reason: str) -> None:
        self._failed += 1
        final = self._folder is not None and self._folder.parent == self._run_dir  # other folders are temporary
        by_hand = f"; push it with: {shlex.join(['hf', *self._command])}" if final else ""
        self._note(f"warning: hub: {self._title}: failed, number {self._failed} in this run: {reason}{by_hand}")


def card(repo: str, config: JsonObject, rows: Sequence[files.Row], step: int, text_part: bool) -> str:
    """Return the card of the weights after `step` steps as Markdown. config, rows: read from the run folder's files."""
    settings = dict(files.flatten(config))
    base, adapter = hub_name(settings["model.name"]), "policy.lora.rank" in settings
    shown = base or Path(settings["model.name"]).name
    environments = config["environments"]
    metadata = ModelCardData(
        base_model=base,
        datasets=[name for one in environments if one["type"] == "dataset" and (name := hub_name(one["name"]))] or None,
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["grpo", "reinforcement-learning", "colocated_grpo", *(["lora"] if adapter else [])],
    )
    found = {key: files.first_and_last(rows, key) for row in rows for key in row if CURVES.fullmatch(key)}
    ends = [(key, *(f"{figure(row, key)} (step {row['step']})" for row in pair)) for key, pair in found.items() if pair]
    sources = [
        (one["type"], _local_name(one["name"]), ", ".join(_local_name(r["name"]) for r in one.get("rewards", ())))
        for one in environments
    ]
    return "\n\n".join(
        [
            f"---\n{metadata.to_yaml()}\n---",
            f"# {repo.rpartition('/')[2]}",
            f"{'A LoRA adapter for' if adapter else 'Trained from'} `{shown}`: {step} of {settings['training_steps']} "
            f"steps of reinforcement learning ({settings['loss.type']}) with colocated_grpo.",
            f"## Use\n\n{_use(repo, shown, adapter, text_part)}",
            _table("Reward", ("Metric", "First", "Last"), ends),
            _table("Data", ("Type", "Name", "Rewards"), sources),
            _table("Settings", ("Setting", "Value"), [(k, v) for k in SETTINGS if (v := settings.get(k)) is not None]),
        ]
    )


def hub_name(name: str) -> str | None:
    """Return a name on the Hub; None for a local file or folder, whose path is not published."""
    local = Path(name).exists() or Path(name).suffix.lower() in DATA_SUFFIXES or name.startswith((".", "/"))
    return None if local or name.count("/") > 1 or name.startswith(TRAIN_DATASET) else name


def _local_name(name: str) -> str:
    return hub_name(name) or Path(name).name


def _use(repo: str, base: str, adapter: bool, text_part: bool) -> str:
    if adapter and text_part:
        return f"This adapter fits the text-only model in {base}: docs/models.md of colocated_grpo says how to load it."
    serve = f"{base} --enable-lora --lora-modules adapter={repo}" if adapter else repo
    load = f'AutoModelForCausalLM.from_pretrained("{base if adapter else repo}")'
    load = f'PeftModel.from_pretrained({load}, "{repo}")' if adapter else load
    return f"```bash\nvllm serve {serve}\n```\n\n```python\nmodel = {load}\n```"


def _table(title: str, head: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> str:
    cells = [[f"`{visible(str(cell))}`".replace("|", "/") if cell != "" else "" for cell in row] for row in rows]
    body = [head, ["---"] * len(head), *cells]
    return f"## {title}\n\n" + "\n".join(f"| {' | '.join(row)} |" for row in body)
