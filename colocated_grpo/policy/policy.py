"""The trained model on this rank: forward, backward, optimizer step, and its weights under checkpoint names."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from colocated_grpo.batching.micro_batch import MicroBatch, PackedRoutes, PackedTokens, PrefixKeys
from colocated_grpo.batching.pack import Batch, Minibatch
from colocated_grpo.errors import RunError
from colocated_grpo.losses.inputs import ChunkedLoss, LossFn, LossInputs
from colocated_grpo.losses.objectives import make_chunked_loss, make_denominator, make_loss
from colocated_grpo.losses.parts import apply_mask, mismatch, weighted_mean
from colocated_grpo.metrics import Metrics, Stat
from colocated_grpo.policy import graphs, model_loader, optimizers
from colocated_grpo.policy.blocks import blocks_of, num_checkpointed
from colocated_grpo.policy.context_parallel import with_group_sums
from colocated_grpo.policy.logprobs import linear_loss
from colocated_grpo.policy.lora.linear import AdaptedLinear
from colocated_grpo.policy.masters import Weights
from colocated_grpo.policy.model import PackedLM, compiler_errors_in_one_line
from colocated_grpo.policy.routing import LoadBalancing
from colocated_grpo.runtime.distributed import World
from colocated_grpo.settings.losses import LossConfig
from colocated_grpo.settings.schema import Config
from colocated_grpo.types import shallow

T = TypeVar("T")


@compiler_errors_in_one_line()
@torch.no_grad()
def score(weights: Weights, micro_batch: MicroBatch, device: torch.device) -> Tensor:
    """Return the log-probabilities [N] of a micro-batch's scored tokens, without gradient. Collective."""
    logprobs_N, _ = weights.model(_on_device(micro_batch.tokens, device))
    weights.release()
    return logprobs_N


def fill_missing(given_N: Tensor | None, scored_N: Tensor) -> Tensor:
    """Return `given_N` with NaN replaced by `scored_N`, or `scored_N` if `given_N` is None; on `scored_N`'s device."""
    if given_N is None:
        return scored_N
    given_N = given_N.to(scored_N.device)
    return torch.where(given_N.isnan(), scored_N, given_N)


class Policy:
    """Owns the model's weights, their optimizer and the learning-rate schedule.

    Every method that runs the model is collective: all ranks call it with equally many micro-batches.
    """

    def __init__(self, config: Config, hf_config: PretrainedConfig, folder: Path, world: World) -> None:
        loader = model_loader.ModelLoader(config, hf_config, folder, world)
        self.weights = loader.weights()
        self.model = self.weights.model
        self.device = world.device
        self.context = world.context
        assert config.policy.context_parallel == (1 if world.context is None else world.context.size)
        self.dtype = loader.dtype
        trained = list(self.parameters().values())
        optimizer = optimizers.build_optimizer(trained, config.policy.optimizer, config.policy.lr)
        self.update = optimizers.Update(optimizer, trained, self.weights.publish, config.policy.grad_clip, self.device)
        self.version = 0
        """Completed optimizer steps."""
        self.fixed_lr: float | None = None
        """Learning rate that replaces the schedule's, the same on every rank. None: use the schedule."""
        self.is_exact = config.numerics == "exact"
        """True if log-probabilities equal the engine's to the last bit."""
        self._config = config.policy
        self._world_size = world.size
        self._sum_over_ranks = world.sum_
        self._total_steps = config.optimizer_steps
        self._objective = make_objective(config.loss)
        self._gradient: Callable[[MicroBatch, float], graphs.Result] = self._plain_gradient
        self._measure_norm: Callable[[], None] = self.update.measure_norm
        self._apply_update: Callable[[], None] = self.update.apply
        self._denominator = make_denominator(config.loss, config.rollout.max_completion_tokens)
        offloads = config.policy.offload_optimizer and self.device.type == "cuda"
        self.offload = optimizers.OptimizerOffload(self.optimizer) if offloads else None

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the trained fp32 parameters by name, in the same order on every rank."""
        return self.weights.masters()

    def num_parameters(self) -> int:
        """Return the number of the model's parameters, not counting those of an adapter."""
        in_4_bits = [one for one in self.model.modules() if isinstance(one, AdaptedLinear) and one.in_4_bits]
        packed = sum(layer.lora_A.shape[1] * len(layer.lora_B) for layer in in_4_bits)
        return packed + sum(parameter.numel() for parameter in self.model.hf_parameters().values())

    def num_trained(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters().values())

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.update.optimizer

    @property
    def optimizer_state_is_local(self) -> bool:
        """True if plain tensors in the optimizer's state differ from rank to rank."""
        return isinstance(self.optimizer, optimizers.LocalShardOptimizer)

    def optimizer_states(self) -> dict[str, dict[str, Any]]:
        """Return the optimizer's state by parameter name. Callers may replace the values of the inner dicts."""
        parameters, optimizer = self.parameters(), self.optimizer
        keys = optimizer.shards if isinstance(optimizer, optimizers.LocalShardOptimizer) else parameters.values()
        return {name: optimizer.state[key] for name, key in zip(parameters, keys, strict=True)}

    def with_old_logprobs(self, batch: Batch) -> Batch:
        """Return the batch with `old_logprobs_N` from the current weights. Call before the first of several updates."""
        return batch.map(lambda micro_batch: micro_batch.with_inputs(old_logprobs_N=self.score(micro_batch)))

    def mismatch(self, minibatch: Minibatch) -> Metrics:
        """Return this rank's statistics of |old_logprobs_N - sampling_logprobs_N|, without a forward pass.

        They are those that `forward_backward` adds for the same minibatch. Collective with context parallelism.
        """
        found = Metrics(self.device)
        for micro_batch in minibatch.micro_batches:
            inputs = _on_device(with_group_sums(micro_batch).loss_inputs, self.device)
            assert inputs.old_logprobs_N is not None
            found.add(mismatch(apply_mask(inputs.old_logprobs_N, inputs)[1]))
        return found

    def first_difference(self, minibatch: Minibatch) -> str:
        """Describe this rank's first token whose log-probability is not the sampler's; "" if there is none. Collective.

        Costs a forward pass.
        """
        found = ""
        for number, micro_batch in enumerate(minibatch.micro_batches):
            inputs, logprobs_N = micro_batch.loss_inputs, self.score(micro_batch).cpu()
            differing = torch.nonzero((logprobs_N != inputs.sampling_logprobs_N) & (inputs.loss_mask_N != 0))[:, 0]
            if not found and len(differing):
                at = int(differing[0])
                own, sampled = logprobs_N[at].item(), inputs.sampling_logprobs_N[at].item()
                sequence, token = int(inputs.sequence_N[at]), int(micro_batch.tokens.targets_N[at])
                place = f"{len(differing)} of {len(logprobs_N)} in micro-batch {number}"
                found = f"first: token {token} of sequence {sequence}, policy {own:.7g}, engine {sampled:.7g} ({place})"
        return found

    def with_sampling_logprobs(self, batch: Batch) -> Batch:
        """Return the batch with the current policy's log-probabilities where the sampler gave none."""

        def fill(micro_batch: MicroBatch) -> MicroBatch:
            given_N = micro_batch.loss_inputs.sampling_logprobs_N
            return micro_batch.with_inputs(sampling_logprobs_N=fill_missing(given_N, self.score(micro_batch)))

        return batch.map(fill)

    def score(self, micro_batch: MicroBatch) -> Tensor:
        """Return the log-probabilities [N] of the scored tokens under the current weights, without gradient."""
        return score(self.weights, micro_batch, self.device)

    @compiler_errors_in_one_line()
    def forward_backward(self, minibatch: Minibatch, metrics: Metrics) -> None:
        """Accumulate the minibatch's gradient and add this rank's statistics to `metrics`.

        Raises RunError if torch cannot compile the blocks.
        """
        denominator = self._denominator(minibatch.counts)
        parts = len(minibatch.micro_batches)
        if self.model.balancing is not None:
            metrics.add({"loss/load_balancing": self._balance(self.model.balancing, minibatch)})
        for index, micro_batch in enumerate(minibatch.micro_batches):
            self.weights.before_forward(last=index == parts - 1)
            loss, stats = self._gradient(micro_batch, denominator)
            # All ranks have equally many micro-batches, so the weights of a minibatch add up to 1.
            metrics.add({**stats, "loss": Stat.mean(loss, 1 / (parts * self._world_size))})
            if index == 0:
                metrics.add(minibatch.left_out.stats(stats, self._world_size))
        if self.model.replay is not None:
            metrics.add({"mismatch/routes": self.model.replay.take_mismatch()})
        self.weights.reduce_gradients()
        self.weights.release()

    def _plain_gradient(self, micro_batch: MicroBatch, denominator: Tensor | float) -> graphs.Result:
        """Add a micro-batch's gradient to the gradients. Returns its loss and statistics."""
        inputs = with_group_sums(_on_device(micro_batch, self.device))
        loss, stats = self._objective(self.model, inputs, denominator)
        loss.backward()
        return loss.detach(), stats

    def use_graphs(self) -> bool:
        """Run small micro-batches as CUDA graphs from now on, and with AdamW also the updates of the weights.

        Returns False if the model does not allow it. Gradient tensors and a graph's activations then stay allocated
        between steps. Call when the micro-batch size and the checkpointed blocks are decided.
        """
        model = self.model
        if not graphs.has_static_shapes(model, self.device, self.dtype) or num_checkpointed(model):
            return False
        graphed = graphs.GraphedGradient(
            self._plain_gradient,
            list(self.parameters().values()),
            partial(_on_device, device=self.device),
            model_parameters=self.num_parameters(),
            blocks=len(blocks_of(model)),
        )
        self._gradient = graphed
        base_on_host = self._config.lora is not None and self._config.lora.base_on_host
        if isinstance(self.optimizer, torch.optim.AdamW) and self.offload is None and not base_on_host:
            update, stay = self.update, graphed.keeps_gradients
            for group in self.optimizer.param_groups:
                group.update(lr=torch.zeros((), device=self.device), capturable=True)
            self._measure_norm = graphs.Replayed(update.measure_norm, update.gradients, stay)
            self._apply_update = graphs.Replayed(update.apply, update.moving_tensors, stay)
        return True

    @torch.no_grad()
    def _balance(self, balancing: LoadBalancing, minibatch: Minibatch) -> Stat:
        """Set the loss of the routers for this minibatch, and return it. The output layer is skipped."""
        balancing.reset()
        for micro_batch in minibatch.micro_batches:
            self.model(_on_device(micro_batch.tokens, self.device), head=lambda hidden_NH, *_, **__: (hidden_NH,))
        self.weights.release()
        return balancing.set_loss(self._sum_over_ranks)

    def optimizer_step(self, metrics: Metrics) -> None:
        """Clip the gradient and update. Raises RunError before the update if the gradient norm is not finite."""
        self._measure_norm()
        grad_norm = self.update.norm.item()
        if not math.isfinite(grad_norm):
            problem = f"the gradient norm is {grad_norm}; no weight was changed"
            advice = "Resume from the last checkpoint with a lower policy.lr or policy.grad_clip"
            raise RunError(f"optimizer step {self.version}: {problem}. {advice}")
        scheduled = optimizers.learning_rate(self._config, self.version, self._total_steps)
        lr = scheduled if self.fixed_lr is None else self.fixed_lr
        self.update.set_lr(lr)
        self._apply_update()
        self.optimizer.zero_grad(set_to_none=True)
        self.version += 1
        metrics.add({"grad_norm": Stat.mean(grad_norm, 1.0), "lr": Stat.mean(lr, 1.0)})

    def resume_at(self, version: int) -> None:
        """Continue from `version`. Call after loading that version's parameters and optimizer state."""
        self.weights.publish()
        self.version = version


def _on_device(value: T, device: torch.device) -> T:
    """Return a copy of inputs with all tensors on the device, nested ones included. The copy is asynchronous."""
    if isinstance(value, MicroBatch | PackedTokens | LossInputs):
        return replace(value, **{name: _on_device(part, device) for name, part in shallow(value).items()})
    if isinstance(value, PrefixKeys | PackedRoutes):
        return type(value)(*(_on_device(part, device) for part in value))
    if not isinstance(value, Tensor):
        return value
    # From pageable memory, the copy would first wait for all queued device work.
    tensor: Any = value.pin_memory() if device.type == "cuda" and value.device.type == "cpu" else value
    return tensor.to(device, non_blocking=True)


Objective = Callable[[PackedLM, MicroBatch, Tensor | float], graphs.Result]
"""(model, micro-batch on the device, denominator) -> (loss to call backward on, metrics)."""


def make_objective(config: LossConfig) -> Objective:
    """Return the fused objective if the loss can be computed in chunks, else the unfused objective."""
    loss_fn, chunked_loss = make_loss(config), make_chunked_loss(config)
    return unfused_objective(loss_fn) if chunked_loss is None else fused_objective(loss_fn, chunked_loss)


def unfused_objective(loss_fn: LossFn) -> Objective:
    """Return an objective that applies the loss to the log-probabilities of all scored tokens.

    The backward pass computes the logits again.
    """

    def objective(model: PackedLM, micro_batch: MicroBatch, denominator: Tensor | float) -> graphs.Result:
        logprobs_N, entropy_N = model(micro_batch.tokens)
        output = loss_fn(logprobs_N, micro_batch.loss_inputs)
        return output.loss_sum / denominator, output.metrics | _entropy(entropy_N, micro_batch)

    return objective


def fused_objective(loss_fn: LossFn, chunked_loss: ChunkedLoss) -> Objective:
    """Return an objective that applies the loss chunk by chunk inside the output layer.

    The forward pass then also computes the gradients.
    """

    def objective(model: PackedLM, micro_batch: MicroBatch, denominator: Tensor | float) -> graphs.Result:
        chunk_loss = chunked_loss(micro_batch.loss_inputs)
        head = partial(linear_loss, loss_of=lambda tokens, logprobs_C: chunk_loss(tokens, logprobs_C) / denominator)
        loss, logprobs_N, entropy_N = model(micro_batch.tokens, head)
        with torch.no_grad():
            metrics = loss_fn(logprobs_N, micro_batch.loss_inputs).metrics
        return loss, metrics | _entropy(entropy_N, micro_batch)

    return objective


def _entropy(entropy_N: Tensor, micro_batch: MicroBatch) -> dict[str, Stat]:
    return {"entropy": weighted_mean(entropy_N, micro_batch.loss_inputs.loss_mask_N)}
