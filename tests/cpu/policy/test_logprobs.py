"""The fused output layer: log-probabilities, entropies and both gradients without storing the full logits."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from colocated_grpo.policy.logprobs import linear_logprobs, linear_loss

N, H, V = 13, 8, 37
SOFTCAPS = [None, 3.0]


def inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, H, generator=generator, dtype=torch.float64)
    weight = 0.4 * torch.randn(V, H, generator=generator, dtype=torch.float64)
    targets = torch.randint(V, (N,), generator=generator)
    temperature = 0.5 + torch.rand(N, generator=generator, dtype=torch.float64)
    upstream = torch.randn(N, generator=generator, dtype=torch.float64)
    return [hidden.to(dtype), weight.to(dtype), targets, temperature.to(dtype), upstream.to(dtype)]


def reference(softcap):
    """Compute (logprobs, entropy, gradient of hidden, of weight) from the full logits in plain float64."""
    hidden, weight, targets, temperature, upstream = inputs(torch.float64)
    hidden.requires_grad_(), weight.requires_grad_()
    logits = hidden @ weight.t()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_probs = torch.log_softmax(logits / temperature[:, None], dim=-1)
    chosen = log_probs[torch.arange(N), targets]
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    gradients = torch.autograd.grad((chosen * upstream).sum(), [hidden, weight])
    return chosen.detach(), entropy.detach(), *gradients


def chunked(chunk_tokens: int, softcap):
    hidden, weight, targets, temperature, upstream = inputs()
    hidden.requires_grad_(), weight.requires_grad_()
    logprobs, entropy = linear_logprobs(
        hidden, weight, targets, temperature_N=temperature, chunk_tokens=chunk_tokens, softcap=softcap
    )
    gradients = torch.autograd.grad((logprobs * upstream).sum(), [hidden, weight])
    return logprobs.detach(), entropy, *gradients


@pytest.mark.parametrize("softcap", SOFTCAPS)
@pytest.mark.parametrize("chunk_tokens", [1, 4, N, 100])
def test_values_and_both_gradients_equal_log_softmax_of_the_full_logits(chunk_tokens, softcap):
    names = ["log-probability", "entropy", "gradient of hidden", "gradient of weight"]
    for name, actual, expected in zip(names, chunked(chunk_tokens, softcap), reference(softcap), strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=3e-6, msg=lambda t, n=name: f"{n}: {t}")


def test_the_entropy_has_no_gradient():
    hidden, weight, targets, temperature, _ = inputs()
    hidden.requires_grad_()
    logprobs, entropy = linear_logprobs(hidden, weight, targets, temperature_N=temperature, chunk_tokens=4)
    assert logprobs.requires_grad
    assert not entropy.requires_grad


def test_without_scored_tokens_results_are_empty_and_gradients_zero():
    hidden = torch.zeros(0, H, requires_grad=True)
    weight = torch.randn(V, H, requires_grad=True)
    empty = torch.zeros(0)
    logprobs, entropy = linear_logprobs(hidden, weight, empty.long(), temperature_N=empty, chunk_tokens=4)
    logprobs.sum().backward()
    assert logprobs.shape == entropy.shape == (0,)
    assert weight.grad.abs().max() == 0


def test_half_precision_inputs_give_float32_log_probabilities_and_half_precision_gradients():
    hidden, weight, targets, temperature, upstream = inputs()
    hidden, weight = hidden.bfloat16().requires_grad_(), weight.bfloat16().requires_grad_()
    logprobs, entropy = linear_logprobs(hidden, weight, targets, temperature_N=temperature, chunk_tokens=3)
    (logprobs * upstream).sum().backward()
    assert logprobs.dtype == entropy.dtype == torch.float32
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16
    expected = torch.log_softmax(hidden.double() @ weight.double().t() / temperature[:, None], -1)
    torch.testing.assert_close(logprobs.double(), expected[torch.arange(N), targets], rtol=0, atol=0.05)


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation returns, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return result


@pytest.mark.parametrize("softcap", SOFTCAPS)
def test_no_tensor_is_larger_than_one_chunk_of_logits(softcap):
    tokens, chunk_tokens, hidden_size, vocabulary = 64, 8, 4, 50
    hidden = torch.randn(tokens, hidden_size, requires_grad=True)
    weight = torch.randn(vocabulary, hidden_size, requires_grad=True)
    targets = torch.zeros(tokens, dtype=torch.long)
    with LargestTensor() as largest:
        logprobs, _ = linear_logprobs(
            hidden, weight, targets, temperature_N=torch.ones(tokens), chunk_tokens=chunk_tokens, softcap=softcap
        )
        logprobs.sum().backward()
    assert largest.elements == chunk_tokens * vocabulary


def test_the_recorder_of_the_largest_tensor_sees_the_full_logits_of_a_plain_computation():
    with LargestTensor() as largest:
        torch.log_softmax(torch.randn(64, 4) @ torch.randn(4, 50), -1)
    assert largest.elements == 64 * 50


def token_loss(tokens: slice, logprobs: torch.Tensor) -> torch.Tensor:
    """Nonlinear, and different for each token."""
    _, _, _, _, upstream = inputs()
    return (upstream[tokens] * logprobs.exp() + 0.1 * logprobs.square()).sum()


@pytest.mark.parametrize("softcap", SOFTCAPS)
@pytest.mark.parametrize("chunk_tokens", [1, 4, N, 100])
def test_a_fused_loss_equals_the_same_loss_on_the_log_probabilities(chunk_tokens, softcap):
    hidden, weight, targets, temperature, _ = inputs()
    hidden.requires_grad_(), weight.requires_grad_()
    settings = {"temperature_N": temperature, "chunk_tokens": chunk_tokens, "softcap": softcap}
    logprobs, entropy = linear_logprobs(hidden, weight, targets, **settings)
    unfused = token_loss(slice(None), logprobs)
    fused, same_logprobs, same_entropy = linear_loss(hidden, weight, targets, loss_of=token_loss, **settings)
    torch.testing.assert_close([same_logprobs, same_entropy], [logprobs.detach(), entropy])
    torch.testing.assert_close(fused, unfused)
    expected = torch.autograd.grad(3.0 * unfused, [hidden, weight])
    actual = torch.autograd.grad(3.0 * fused, [hidden, weight])
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert not same_logprobs.requires_grad and not same_entropy.requires_grad
