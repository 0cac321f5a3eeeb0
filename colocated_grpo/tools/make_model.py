"""Make a model without a download: random weights in a real architecture, optionally with a supervised warm start."""

import argparse
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import yaml
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from colocated_grpo.environments.registry import EPISODES, build_episode, build_task
from colocated_grpo.environments.tasks.tool_use import ToolUse
from colocated_grpo.runtime.program import OneLineParser, check_writable
from colocated_grpo.tools import warm_start as supervised
from colocated_grpo.tools.shapes import ARCHITECTURES, SHAPES, Shape

SIZES = ("hidden", "layers", "heads", "kv_heads", "head_dim", "intermediate", "vocab", "max_positions")
OVERRIDES = ("architecture", *SIZES)
DEFAULTS = supervised.WarmStart()
WARM_START_FLAGS = (
    ("--warm-start-target", "target", "REWARD", "mean sampled reward at which the warm start on a task ends"),
    ("--slips", "slips", "FRACTION", "fraction of characters that the teacher gets wrong"),
    ("--lr", "lr", "RATE", "learning rate of the warm start"),
    ("--max-completion-tokens", "max_completion_tokens", "N", "maximum tokens of an answer or a conversation"),
    ("--steps", "max_steps", "N", "steps of the warm start, on a task at most"),
)
"""Flag, field of `WarmStart`, placeholder and description."""

PAD, BOS, END, UNKNOWN = "<|pad|>", "<|begin|>", "<|end|>", "<|unknown|>"
ROLES = ["system", "user", "assistant"]
CHARACTERS = ["\n", "\t", *map(chr, range(ord(" "), ord("~") + 1))]

# A role token opens a turn and <|end|>, the end-of-sequence token, closes it: a user prompt has three extra tokens.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' ~ message['role'] ~ ': system, user or assistant') }}"
    "{% endif %}"
    "{{ '<|' ~ message['role'] ~ '|>' ~ message['content'] ~ '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def build_char_tokenizer(vocab_size: int | None = None, max_length: int = 2048) -> PreTrainedTokenizerFast:
    """Return a tokenizer of printable ASCII, padded to `vocab_size` by unused tokens. Raises ValueError."""
    special = [PAD, BOS, END, UNKNOWN, *(f"<|{role}|>" for role in ROLES)]
    tokens = special + CHARACTERS
    if vocab_size is not None:
        if vocab_size < len(tokens):
            raise ValueError(f"vocab_size={vocab_size} is smaller than the {len(tokens)} tokens of the alphabet")
        tokens = tokens + [f"<|unused {index}|>" for index in range(len(tokens), vocab_size)]
    # BPE without merges never joins characters and, unlike a word-level model, needs no pre-tokenizer.
    backend = Tokenizer(BPE({token: index for index, token in enumerate(tokens)}, [], unk_token=UNKNOWN))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=special[len(special) - len(ROLES) :],
        model_max_length=max_length,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_model(
    shape: Shape, tokenizer: PreTrainedTokenizerFast, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """Build a model with random weights, on the GPU if there is one. Weights depend on seed and device type."""
    config = model_config(shape, tokenizer)
    torch.manual_seed(seed)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for name, buffer in model.named_buffers():
        if name in model.state_dict():  # constants of the checkpoint, which are 1 in a new model
            buffer.uniform_(0.5, 1.5)
    return model


def model_config(shape: Shape, tokenizer: PreTrainedTokenizerFast) -> PreTrainedConfig:
    """Return the transformers config. Raises ValueError for an unknown architecture."""
    if shape.architecture not in ARCHITECTURES:
        raise ValueError(f"architecture={shape.architecture!r}: must be one of {', '.join(ARCHITECTURES)}")
    entries = {
        **_size_arguments(shape),
        "vocab_size": len(tokenizer),
        "initializer_range": 0.02,
        "tie_word_embeddings": shape.tied,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        **shape.settings,
    }
    return AutoConfig.for_model(ARCHITECTURES[shape.architecture], **entries)


def _size_arguments(shape: Shape) -> dict[str, object]:
    if shape.architecture == "gpt2":
        return {
            "n_embd": shape.hidden,
            "n_layer": shape.layers,
            "n_head": shape.heads,
            "n_inner": shape.intermediate,
            "n_positions": shape.max_positions,
        }
    sizes: dict[str, object] = {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": shape.max_positions,
    }
    if shape.architecture == "deepseek_v3":
        # Every head has its own keys. The default head sizes are those of a model of 671 B parameters.
        del sizes["head_dim"]
        heads = {"qk_nope_head_dim": shape.head_dim, "v_head_dim": shape.head_dim}
        sizes |= {"num_key_value_heads": shape.heads, "q_lora_rank": None, **heads}
    if shape.architecture == "olmoe":
        del sizes["head_dim"]  # OLMoE has no head_dim: it is hidden size / heads
    if shape.architecture == "gemma4":
        # Set the sizes of the layers without a window, and of the inputs per layer: both are large by default.
        sizes |= {"global_head_dim": shape.head_dim, "hidden_size_per_layer_input": 0}
    if shape.architecture in ("gemma2", "gemma3"):
        # Attention scores are divided by the square root of this number. The default is for released checkpoints.
        sizes["query_pre_attn_scalar"] = shape.head_dim
    return sizes


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write a folder that vLLM loads offline, renamed into place when complete."""
    partial = out.with_name(f"{out.name}.partial-{os.getpid()}")
    try:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line. Sizes that are not given are absent from the namespace."""
    parser = OneLineParser(
        prog="colocated-grpo make-model",
        description="Make a model with random weights and a character tokenizer, with a warm start on --task if given.",
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write")
    parser.add_argument("--architecture", choices=ARCHITECTURES, default=argparse.SUPPRESS, help="instead of --shape's")
    parser.add_argument("--shape", choices=SHAPES, default="small", help="sizes to start from (default: small)")
    for size in SIZES:
        flag = f"--{size.replace('_', '-')}"
        parser.add_argument(flag, type=int, metavar="N", default=argparse.SUPPRESS, help=f"override {size} of --shape")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="dtype of the weights")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--task",
        help="task to warm-start on: a built-in task or episode, or a module:object whose items have an 'answer'",
    )
    parser.add_argument("--task-args", default="{}", metavar="YAML", help="its arguments, such as '{max_digits: 6}'")
    for flag, field, metavar, text in WARM_START_FLAGS:
        default = getattr(DEFAULTS, field)
        shown = f"{text} (default: {default:g})"
        parser.add_argument(flag, dest=field, type=type(default), default=default, metavar=metavar, help=shown)
    return parser.parse_args(arguments)


def warm_start_on_task(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, options: argparse.Namespace) -> None:
    """Train on the train split, then print the mean sampled reward on the held-out split. Raises ValueError."""
    fields = {field: getattr(options, field) for _, field, _, _ in WARM_START_FLAGS}
    settings, arguments = supervised.WarmStart(seed=options.seed, **fields), yaml.safe_load(options.task_args)
    if options.task in EPISODES:
        episode = build_episode(options.task, arguments)
        assert isinstance(episode, ToolUse), "the only built-in episode"
        teacher: supervised.Teacher = supervised.EpisodeTeacher(episode, tokenizer, settings)
    else:
        teacher = supervised.TaskTeacher(build_task(options.task, arguments), tokenizer, settings)

    def report(step: int, loss: float, reward: float | None) -> None:
        print(f"warm start  step {step:4d}  loss {loss:.3f}{_shown('  sampled', reward)}", flush=True)

    started = time.monotonic()
    steps = supervised.warm_start(model, teacher, report)
    seconds = time.monotonic() - started
    reward = teacher.sampled_reward(model, "held_out", 2 * supervised.EVAL_PROMPTS)
    print(f"warm start on {options.task}: {steps} steps in {seconds:.0f} s{_shown(', held-out sampled', reward)}")


def _shown(label: str, reward: float | None) -> str:
    return "" if reward is None else f"{label} reward {reward:.2f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the model. Returns exit code 0, or 2 after printing a one-line error."""
    options = parse_arguments(arguments)
    disable_progress_bar()
    shape = replace(SHAPES[options.shape], **{name: getattr(options, name) for name in OVERRIDES if name in options})
    try:
        if options.out.exists():
            raise FileExistsError(f"{options.out}: already exists; choose another folder")
        check_writable("OUT", options.out)
        tokenizer = build_char_tokenizer(shape.vocab, shape.max_positions)
        dtype = getattr(torch, options.dtype)
        model = build_model(shape, tokenizer, seed=options.seed, dtype=dtype)
        if options.task is not None:
            warm_start_on_task(model, tokenizer, options)
    except (FileExistsError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    save_model(model, tokenizer, options.out)
    print(f"{options.out}: {shape.architecture}, {model.num_parameters():,} parameters, vocabulary of {len(tokenizer)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
