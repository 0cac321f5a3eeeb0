"""Places of a mixture's experts in vLLM's modules, whose CPU engine repacks them and so never uses these views."""

from __future__ import annotations

import torch
from torch import nn

from colocated_grpo.weights.plan import build_plan

EXPERTS, HIDDEN, INTERMEDIATE = 4, 6, 5
SHAPES = {
    "layers.0.experts.gate_up_proj": torch.Size([EXPERTS, 2 * INTERMEDIATE, HIDDEN]),
    "layers.0.experts.down_proj": torch.Size([EXPERTS, HIDDEN, INTERMEDIATE]),
    "layers.0.gate.weight": torch.Size([EXPERTS, HIDDEN]),
}


def engine_model(intermediate: int = INTERMEDIATE) -> nn.Module:
    """Modules and parameters with vLLM's names, of one rank with `intermediate` rows of each expert."""
    routed, block, model = nn.Module(), nn.Module(), nn.Module()
    routed.w13_weight = nn.Parameter(torch.zeros(EXPERTS, 2 * intermediate, HIDDEN))
    routed.w2_weight = nn.Parameter(torch.zeros(EXPERTS, HIDDEN, intermediate))
    block.experts = nn.Module()
    block.experts.routed_experts = routed
    block.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
    model.layers = nn.ModuleList([block])
    return model


def test_stacked_experts_are_copied_as_a_whole():
    model = engine_model()
    plan = build_plan(model, SHAPES, 0)
    assert plan is not None
    for name, target in plan.targets.items():
        target.view.copy_(torch.full(SHAPES[name], float(len(name))))
    routed = model.layers[0].experts.routed_experts
    assert (routed.w13_weight == len("layers.0.experts.gate_up_proj")).all()
    assert (routed.w2_weight == len("layers.0.experts.down_proj")).all()


def test_experts_that_ranks_divide_by_rows_have_no_plan():
    assert build_plan(engine_model(INTERMEDIATE // 2), SHAPES, 0) is None


def test_experts_of_another_layout_have_no_plan():
    model = engine_model()
    routed = model.layers[0].experts.routed_experts
    routed.w13_packed = nn.Parameter(routed.w13_weight.data.flatten())
    del routed.w13_weight
    assert build_plan(model, SHAPES, 0) is None
