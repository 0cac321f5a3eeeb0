"""Decode kernels on CUDA devices against plain arithmetic, and their results as the engine sees them."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("head_size", [64, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (16, 8), (8, 1)])
@pytest.mark.parametrize("sequences", [40, 96, 200])
@pytest.mark.parametrize("cache_scales", [None, (0.5, 2.0)], ids=["16 bits", "fp8"])
def test_one_token_attention_over_the_paged_cache_equals_softmax(sequences, heads, kv_heads, head_size, cache_scales):
    from tests.support.decode_kernels import assert_attention_is_softmax

    assert_attention_is_softmax("cuda", sequences, heads, kv_heads, head_size, cache_scales=cache_scales)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 20011), (33, 20011), (3, 50), (600, 4097)])
def test_sampling_returns_log_probabilities_and_never_a_masked_token(rows, vocabulary, dtype):
    from tests.support.decode_kernels import assert_samples_are_sound

    assert_samples_are_sound("cuda", rows, vocabulary, dtype)


def test_at_temperature_zero_the_most_likely_token_is_chosen():
    from tests.support.decode_kernels import assert_greedy_takes_the_likeliest

    assert_greedy_takes_the_likeliest("cuda")


def test_sampled_tokens_are_the_inputs_of_the_next_step():
    from tests.support.decode_kernels import assert_sampled_tokens_are_the_next_inputs

    assert_sampled_tokens_are_the_next_inputs("cuda")


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(16, 8, 128), (4, 1, 64), (32, 8, 128)])
@pytest.mark.parametrize("cache_scales", [None, (0.5, 2.0)], ids=["16 bits", "fp8"])
def test_the_fused_qkv_kernel_equals_separate_layers(heads, kv_heads, size, cache_scales):
    from tests.support.decode_kernels import assert_prepared_as_by_separate_layers

    assert_prepared_as_by_separate_layers("cuda", heads, kv_heads, size, cache_scales)


def test_sampling_frequencies_follow_softmax_in_every_part_of_the_vocabulary():
    from tests.support.decode_kernels import chi_squared_of_draws

    # At the ends of parts of 24,576 tokens, of their draws of 4,096, and of the rounds of 1,024.
    likely = [0, 1, 1023, 1024, 4095, 4096, 24_575, 24_576, 25_600, 28_672, 49_151, 49_152, 59_999]
    chi_squared = chi_squared_of_draws("cuda", 60_000, likely, draws=40_000, rows=4000)
    assert chi_squared < 40, "12 degrees of freedom: above 32.9 with probability 0.001"


def test_a_sample_depends_on_seed_and_position_and_not_on_the_batch():
    from colocated_grpo.runtime.logit_kernels import sample
    from tests.support.decode_kernels import rows_of

    logits = torch.randn(1, 151_936, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    row = [part * 0 + value for part, value in zip(rows_of("cuda", 1), (0, 1, 5, 9), strict=True)]
    samples = [sample(logits, *row)[0]]
    for batch in (3, 200, 2000):
        places, temperatures, seeds, positions = rows_of("cuda", batch)
        seeds[places[1]], positions[1] = 5, 9
        samples.append(sample(logits.expand(batch, -1), places, temperatures, seeds, positions)[0][1:2])
        assert len(sample(logits.expand(batch, -1), places, temperatures, seeds, positions)[0].unique()) > 1
    assert len(torch.cat(samples).unique()) == 1


def test_the_sampler_returns_the_log_probabilities_of_its_last_samples():
    import vllm.v1.worker.gpu.sample.sampler as sampler

    from colocated_grpo.rollout.vllm import patches
    from tests.support.decode_kernels import rows_of

    patches.apply("cuda")
    logits = torch.randn(4, 5000, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    options = {"logprob_token_ids_state": None, "expanded_idx_mapping": None, "max_per_req_token_ids": 0}
    rows = rows_of("cuda", 4)
    tokens = sampler.gumbel_sample(logits, *rows, apply_temperature=False, use_fp64=False)
    for scored in (logits, logits.clone()):  # the second was not sampled from: vLLM's own path
        scores = sampler.compute_topk_scores(scored, 0, tokens, None, **options, logits_mode=False)
        expected = torch.log_softmax(logits.double(), -1).gather(1, tokens[:, None])
        torch.testing.assert_close(scores.logprobs.double(), expected, rtol=0, atol=1e-4)
        assert torch.equal(scores.logprob_token_ids, tokens[:, None])
