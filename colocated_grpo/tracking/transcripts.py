"""Stored rollouts and games, split into passages by speaker, for the report and the tools."""

from collections.abc import Sequence

from colocated_grpo.errors import shortened
from colocated_grpo.tracking import files, page
from colocated_grpo.tracking.text import as_html, number

POLICY, PROMPT, ENVIRONMENT, ANSWER = "policy", "prompt", "environment", "reference answer"
HELD_OUT_SHOWN = 8
TRAINING_ROLLOUTS_SHOWN = 6
GAMES_SHOWN = 6
MAX_TEXT_LENGTH = 6000
"""Characters shown of a message; rollouts.jsonl has the full text."""
MAX_GAME_LENGTH = 30_000
"""Characters shown of a transcript; games.jsonl has the full text."""

Passage = tuple[str, str]
"""Speaker, and text with the tokens of its chat template. The policy has sampled its own text, and read all other."""


def passages(row: files.Row) -> list[Passage]:
    """Return the policy's turns of a rollout and the observations between them."""
    turns = row.get("turns") or [{"sampled": True, "text": row["completion"]}]
    return [(POLICY if turn["sampled"] else ENVIRONMENT, turn["text"]) for turn in turns]


def question(row: files.Row) -> list[Passage]:
    """Return the prompt as the model reads it, and the reference answer if the row has one."""
    answer = [] if row.get("answer") is None else [(ANSWER, row["answer"])]
    return [(PROMPT, row["prompt"]), *answer]


def one_line(text: str, limit: int) -> str:
    """Return text on one line of at most `limit` characters."""
    return shortened(" ".join(text.split()), limit)


def before_and_after(rollouts: Sequence[files.Row]) -> str:
    """Show the first HELD_OUT_SHOWN held-out prompts, in prompt order, at the first and the last evaluation."""
    held_out = [row for row in rollouts if row["kind"] == files.EVALUATION]
    if not held_out:
        return ""
    first, last = held_out[0]["step"], held_out[-1]["step"]
    before = {row["prompt_index"]: row for row in held_out if row["step"] == first}
    after = {row["prompt_index"]: row for row in held_out if row["step"] == last}
    prompts = sorted(before.keys() & after.keys())[:HELD_OUT_SHOWN]
    shown = [[before[index]] if first == last else [before[index], after[index]] for index in prompts]
    when = f"at step {first}" if first == last else f"before and after (steps {first} and {last})"
    return page.section(f"Held-out rollouts {when}", "".join(map(_card, shown)))


def last_training_rollouts(rollouts: Sequence[files.Row]) -> str:
    """Show rollouts of the last training step, the best first."""
    train = [row for row in rollouts if row["kind"] == files.TRAIN]
    if not train:
        return ""
    step = train[-1]["step"]
    shown = [row for row in train if row["step"] == step][::-1][:TRAINING_ROLLOUTS_SHOWN]
    cards = "".join(_card([row]) for row in shown)
    return page.section(f"Training rollouts of step {step}, from best to worst", cards)


def latest_games(games: Sequence[files.Row]) -> str:
    """Show the latest games, newest first: seats, winner and transcript."""
    if not games:
        return ""
    shown = games[::-1][:GAMES_SHOWN]
    parts = "".join(
        f"<details><summary>{as_html(files.game_title(game))}</summary>{_seats(game.get('seats', []))}"
        f'<pre class="game">{_shortened(game.get("transcript", ""), MAX_GAME_LENGTH)}</pre></details>'
        for game in shown
    )
    return page.section(f"Games (latest {len(shown)} of {len(games)})", parts)


def _seats(seats: list[files.Row]) -> str:
    if not seats:
        return ""
    head = "".join(f"<th>{as_html(name)}</th>" for name in seats[0])
    lines = ("".join(f"<td>{as_html(value)}</td>" for value in seat.values()) for seat in seats)
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _card(rollouts: Sequence[files.Row]) -> str:
    """Show one prompt and one or two rollouts of it, side by side."""
    row = rollouts[0]
    label = f'<div class="label">{as_html(row["source"])}, prompt {row["prompt_index"]}</div>'
    sides = "".join(f"<div>{_label(rollout)}{_bubbles(passages(rollout))}</div>" for rollout in rollouts)
    prompt = _bubbles(question(row))
    return f'<article class="card">{label}{prompt}<div class="sides n{len(rollouts)}">{sides}</div></article>'


def _label(row: files.Row) -> str:
    facts = [f"step {row['step']}", f"{row['completion_tokens']} tokens", row["finish_reason"]]
    facts += [f"{name}\N{NO-BREAK SPACE}{number(value)}" for name, value in row["parts"].items()]
    if row.get("advantage") is not None:
        facts.insert(0, f"advantage {number(row['advantage'])}")
    if row["error"]:
        facts.append(row["error"])
    return f'<div class="label"><b class="reward">{number(row["reward"])}</b> {as_html(" | ".join(facts))}</div>'


def _bubbles(messages: Sequence[Passage]) -> str:
    bubbles = "".join(
        f'<div class="bubble {"sampled" if speaker == POLICY else "observed"}"><span>{as_html(speaker)}</span>'
        f"<pre>{_shortened(text)}</pre></div>"
        for speaker, text in messages
    )
    return f'<div class="chat">{bubbles}</div>'


def _shortened(text: str, limit: int = MAX_TEXT_LENGTH) -> str:
    omitted = len(text) - limit
    if omitted <= 0:
        return as_html(text)
    return f'{as_html(text[:limit])}<i class="quiet"> ... {omitted} more characters</i>'
