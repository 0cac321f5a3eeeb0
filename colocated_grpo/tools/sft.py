"""Supervised fine-tuning on rows of prompts and completions: colocated-grpo sft ROWS --model MODEL --output FOLDER

The loss is the mean of -log p over the tokens of completions. Under torchrun every rank trains a part of each batch.
"""

import argparse
import os
from collections.abc import Iterator, Sequence
from math import ceil
from pathlib import Path
from random import Random

from colocated_grpo.batching.pack import pack
from colocated_grpo.environments.base import Item
from colocated_grpo.environments.chat import ChatCodec, Tokens
from colocated_grpo.environments.prompts import PromptEncoder, PromptTemplate, strip_nulls
from colocated_grpo.environments.rows.readers import READERS, read_file
from colocated_grpo.errors import ConfigError, RunError
from colocated_grpo.launch.cli import parse_rank_arguments
from colocated_grpo.metrics import Metrics, reduce
from colocated_grpo.policy import activations, export
from colocated_grpo.policy.model_files import ModelFiles, read_model_files
from colocated_grpo.policy.policy import Policy
from colocated_grpo.runtime import joining, program, verdict
from colocated_grpo.runtime.distributed import World, derive_seed, init_world, with_context
from colocated_grpo.servers.options import positive
from colocated_grpo.settings import config_file, inputs, rules, tree
from colocated_grpo.settings.schema import BatchConfig, Config
from colocated_grpo.tools.warm_start import NO_SCORE, taught
from colocated_grpo.types import Group, JsonObject

OBJECTIVE = {"type": "cispo", "correction": {"mode": "off"}}
"""On-policy and with an advantage of 1, this loss is the mean of -log p over the tokens."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Train and export. Returns exit code 0, 2 for wrong settings or rows, 1 if the training fails."""
    options, overrides = parse_rank_arguments(parser(), arguments)
    try:
        config, rows = read_settings(options, overrides), read_file(options.rows)
        joined = joining.join()
        world = with_context(init_world(joined.store), config.policy.context_parallel)
        fine_tune(config, rows, options, world)
        joined.watchdog.close()
        world.barrier()
    except (ConfigError, RunError) as error:
        return program.exit_code(error, shown=os.environ["RANK"] == "0")
    return 0


def parser() -> argparse.ArgumentParser:
    flags = program.OneLineParser(
        prog="colocated-grpo sft",
        description="Fine-tune a model on rows with `prompt` and `completion`, or `messages`, and export it.",
        epilog="Further arguments are settings of a run: --policy.lora.rank 16 --policy.schedule cosine.",
    )
    flags.add_argument("rows", type=Path, metavar="ROWS", help=f"file with the rows: {', '.join(READERS)}")
    flags.add_argument("--model", required=True, help="folder or Hub name of the model to start from")
    flags.add_argument("--output", required=True, type=Path, metavar="FOLDER", help="new folder of the trained model")
    flags.add_argument("--epochs", type=positive, default=3, metavar="N", help="passes over the rows (default: 3)")
    flags.add_argument("--batch-size", type=positive, default=16, metavar="N", help="rows of a step (default: 16)")
    flags.add_argument("--lr", default="1e-5", help="learning rate (default: 1e-5; use 1e-4 with --policy.lora)")
    return flags


def read_settings(options: argparse.Namespace, overrides: Sequence[str]) -> Config:
    """Return the settings of a run that trains as the options say. Raises ConfigError."""
    if options.output.exists():
        raise ConfigError(f"--output={str(options.output)!r}: already exists; choose another folder")
    program.check_writable("--output", options.output)  # else the trained model would be lost
    fixed = {
        ("loss",): OBJECTIVE,
        ("training_steps",): 10**9,  # the rows give their number, once they are encoded
        ("batch", "minibatches"): 1,  # the learning rate's schedule counts one optimizer step per batch
        ("batch", "epochs"): 1,
    }
    own = {key: tree.parse_value(text) for key, text in config_file.parse_overrides(overrides)}
    named = own.keys() | {(*key, name) for key, value in own.items() if isinstance(value, dict) for name in value}
    if refused := sorted((key for key in named if any(key[: len(known)] == known for known in fixed)), key=str):
        raise ConfigError(f"--{'.'.join(map(str, refused[0]))}: sft sets it; use --epochs, --batch-size and --lr")
    given = {
        ("model",): {"name": options.model},
        ("rollout", "prompts_per_step"): options.batch_size,
        ("policy", "lr"): tree.parse_value(options.lr),
        **own,
        **fixed,
    }
    config = config_file.build_config(None, given).config
    rules.check_world(config, int(os.environ["WORLD_SIZE"]))
    return inputs.check_inputs(config)[0]


def encode(rows: Sequence[Item], model: ModelFiles, variables: JsonObject, limit: int) -> Iterator[Group]:
    """Yield a group for each row with a prompt, with a rollout for each completion that fits into `limit` tokens.

    A completion is encoded alone, and ends with the token that ends a message, as the model samples it. variables:
    model.chat_template_kwargs; those of a row take precedence.
    """
    sources = [f"row {number}" for number in range(len(rows))]
    templates = dict.fromkeys(sources, PromptTemplate(variables=variables))
    prompts = PromptEncoder(model.tokenizer, limit, templates, getattr(model.hf_config, "vocab_size", None))
    codec = ChatCodec(model.tokenizer)
    for number, (source, row) in enumerate(zip(sources, rows, strict=True)):
        fitting = []
        for given, text in completions(row, source):
            if (prompt := prompts.encode({**row, "prompt": given}, index=number, source=source)) is not None:
                after = [*codec.observation([], -1, prompt.template)[:1], model.tokenizer.eos_token_id]
                said = [*codec.encode(text), *[token for token in after if token in model.stop_token_ids][:1]]
                tokens = Tokens.of_prompt(prompt.token_ids).sampled(taught(said))
                fitting += [(prompt, tokens)] if len(tokens.token_ids) <= limit else []
        if fitting:
            rollouts = [each.rollout(codec, NO_SCORE, 1.0, cut=False, plain=False) for _, each in fitting]
            yield Group(prompt=fitting[0][0], rollouts=rollouts)


def completions(row: Item, source: str) -> Iterator[tuple[object, str]]:
    """Yield prompt and text of each completion; in a chat, of each message of the assistant. Raises ConfigError."""
    prompt, said, messages = (strip_nulls(row.get(key)) for key in ("prompt", "completion", "messages"))
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if isinstance(messages, list):
        prompt, before, said = None, [], messages
    pairs = [(prompt, said)]
    if isinstance(said, list) and isinstance(before, list):
        chat = [message if isinstance(message, dict) else {} for message in said]
        places = [i for i, message in enumerate(chat) if message.get("role") == "assistant" and before + chat[:i]]
        pairs = [(before + chat[:i] if i else prompt, chat[i].get("content")) for i in places]
    for given, text in pairs or [(None, None)]:
        if not isinstance(text, str):
            in_chat = isinstance(said, list) and given is not None
            found = f"; an assistant's content is {text!r:.60}" if in_chat else f"; it has {', '.join(row)}"
            rule = "needs a `prompt` and a `completion` with text, or `messages` with both"
            raise ConfigError(f"{source}: {rule}{found}")
        if text != text.encode(errors="replace").decode():
            raise ConfigError(f"{source}: a completion contains a lone surrogate, which cannot be encoded")
        yield given, text


def fine_tune(config: Config, rows: Sequence[Item], options: argparse.Namespace, world: World) -> list[float]:
    """Train, print each step, and export the model or its adapter. Return the losses. Collective."""
    model, limit = read_model_files(config.model, world, config.policy), config.max_sequence_tokens
    groups = list(encode(rows, model, config.model.chat_template_kwargs, limit))
    say = print if world.is_main else lambda *_, **__: None
    if len(groups) < len(rows):
        say(f"note: {len(rows) - len(groups)} of {len(rows)} rows left out: no prompt, or over {limit} tokens")
    if not groups:
        raise ConfigError("ROWS: no row is left to train on")
    size = config.rollout.prompts_per_step
    config = config.model_copy(update={"training_steps": options.epochs * ceil(len(groups) / size)})
    rules.check(config)
    policy = Policy(config, model.hf_config, model.folder, world)
    tokens = activations.choose_micro_batch_size(policy, activations.StepSettings.of(config), world).tokens
    config = config.with_values("batch", max_tokens_per_micro_batch=tokens)
    losses = []
    for epoch in range(options.epochs):
        order = Random(derive_seed(config.seed, epoch)).sample(groups, len(groups))
        for start in range(0, len(order), size):
            row = train_step(policy, order[start : start + size], config.batch, world)
            losses.append(row["loss"])
            done = f"step {policy.version}/{config.training_steps}"
            say(f"{done}  loss {row['loss']:.4f}  grad_norm {row['grad_norm']:.3g}  lr {row['lr']:.3g}", flush=True)
    # The last export is the whole model, unless there is only an adapter.
    exports = export.build_exports(config.checkpoint, config.policy.lora, config.model.name, policy, model, world)
    exports[-1].write(options.output)
    say(f"exported {options.output}")
    return losses


def train_step(policy: Policy, groups: Sequence[Group], config: BatchConfig, world: World) -> dict[str, float]:
    """Train on all tokens of the groups, and return the metrics. Collective."""
    batch = pack(
        groups,
        [[1.0] * len(group.rollouts) for group in groups],
        [False] * len(groups),
        config,
        rank=world.rank,
        world_size=world.size,
        context=world.context,
        shuffle_seed=0,
        share_prefixes=policy.model.shares_prefixes,
    )
    metrics = Metrics(world.device)
    for minibatch in batch.minibatches:
        policy.forward_backward(minibatch, metrics)
        policy.optimizer_step(metrics)
    return reduce(metrics, world.sum_, world.max_)


if __name__ == "__main__":
    verdict.run_program(main)
