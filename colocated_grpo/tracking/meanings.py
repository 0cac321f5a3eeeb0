"""One line on each metric, for the report. docs/guides/metrics.md says the same words, and a test compares both."""

from __future__ import annotations

MEANINGS = {
    "reward": "mean total reward (the weighted sum of the reward functions); completions without a reward are excluded",
    "reward/<name>": (
        "mean of one reward function before its weight, of one part of a score, or of a value passed to log_metric"
    ),
    "reward_std": "standard deviation of the reward, or of one part, over all completions of the step (unbiased)",
    "reward_errors": "completions without a reward because scoring failed",
    "groups/constant": "fraction of groups whose rewards are all equal, or all missing; they give no learning signal",
    "sequences": "mean number of training sequences of an episode",
    "truncated": "fraction of completions cut at rollout.max_completion_tokens",
    "prompts_dropped": "prompts that are empty or longer than rollout.max_prompt_tokens",
    "staleness": "optimizer steps between the weights that sampled and the weights being trained",
    "loss": "the minimized objective; close to 0 because advantages cancel within a group, and no measure of progress",
    "loss/load_balancing": (
        "load-balancing loss of a mixture of experts, without its coefficient; the experts per token if all are used "
        "equally, higher if some are preferred"
    ),
    "kl": "KL estimate (k3) to the reference, or to the rollout policy with loss.kl.target: rollout",
    "ratio": "mean importance ratio, policy over the policy before this batch; 1 with one optimizer step per batch",
    "clip_fraction/low": "fractions of tokens that lose their gradient to a clip bound",
    "logprob/positive": "mean log-probability of the tokens with a positive, and with a negative advantage",
    "grad_norm": "gradient norm before clipping",
    "mismatch/kl": "KL estimate (k3) between the engine that sampled and the trainer",
    "mismatch/mean": "mean of trainer minus engine log-probability; close to 0 on-policy",
    "mismatch/max": "mean and largest absolute difference of log-probabilities",
    "mismatch/plain": "mean absolute difference over plainly sampled tokens",
    "mismatch/worst": "largest mean absolute difference over the plainly sampled tokens of one completion",
    "mismatch/routes": "fraction of tokens, over the layers of the backward pass, whose experts the policy would have "
    "chosen otherwise",
    "mismatch/outside": "fraction of tokens that one side finds more than twice as likely as the other",
    "mismatch/ess": "effective sample size of the importance weights as a fraction; 1 is ideal",
    "correction/weight": "mean token weight applied by loss.correction",
    "tokens_per_second": "prompt and completion tokens of all ranks over the whole step",
    "memory/generate_gib": "memory in use on rank 0's device by all processes, at the end of the phase",
    "prefix_reuse": "fraction of tokens saved because a prompt prefix common to several completions is computed once",
}


def meaning(key: str) -> str:
    """Return the line on a metric; '' if there is none."""
    key = key.removeprefix("held_out/")
    return MEANINGS.get(key) or MEANINGS.get(f"{key.partition('/')[0]}/<name>", "")
