"""Models of text and vision: the text tower decodes natively after the model's own multimodal prefill."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import families
import segki
from generation import GREEDY, Pair
from segki import reference
from segki.detect import detect

transformers = pytest.importorskip("transformers")
if not hasattr(transformers, "Qwen3_5ForConditionalGeneration"):
    pytest.skip("this transformers has no Qwen3.5", allow_module_level=True)

IMAGE, START, END = 250, 252, 253


def build(experts: bool = False) -> Any:
    """A tiny Qwen3.5, dense or with experts, with a vision tower that has more parameters and blocks than the text tower."""
    text = {
        "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
        "linear_value_head_dim": 24, "max_position_embeddings": 512, "eos_token_id": None, "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1], "mrope_interleaved": True,
            "partial_rotary_factor": 0.5,
        },
    }  # fmt: skip
    vision = {
        "depth": 6, "hidden_size": 128, "intermediate_size": 512, "num_heads": 4, "out_hidden_size": 64, "patch_size": 4,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 64,
    }  # fmt: skip
    if experts:
        text |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 48}
    kind = transformers.Qwen3_5MoeConfig if experts else transformers.Qwen3_5Config
    config = kind(
        text_config=text, vision_config=vision, image_token_id=IMAGE, video_token_id=251, vision_start_token_id=START,
        vision_end_token_id=END,
    )  # fmt: skip
    torch.manual_seed(0)
    own = transformers.Qwen3_5MoeForConditionalGeneration if experts else transformers.Qwen3_5ForConditionalGeneration
    model = own(config).eval()
    families.spread(model, 0)
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module")
def pair() -> Pair:
    original = build()
    model = copy.deepcopy(original)
    report = segki.inject(model)
    assert report.rung == 1, report.reasons
    return Pair(original, model)


def image_prompt(height: int, width: int, rows: int = 1) -> dict[str, Any]:
    """A prompt with one image of `height` x `width` patches (2 x 2 of them make a token) a row."""
    count = height * width // 4
    generator = torch.Generator().manual_seed(3)
    ids = torch.tensor([[5, 6, START, *[IMAGE] * count, END, 7, 8, 9]]).repeat(rows, 1)
    ids[:, -1] += torch.arange(rows)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == IMAGE).long(),
        "pixel_values": torch.randn(rows * height * width, 3 * 2 * 4 * 4, generator=generator),
        "image_grid_thw": torch.tensor([[1, height, width]] * rows),
    }


WANTED: dict[str, Any] = {"return_dict_in_generate": True, "output_logits": True}


@pytest.mark.parametrize("rows", [1, 3])
def test_text_alone(pair: Pair, rows: int) -> None:
    pair.check(families.prompt(rows, 9).clamp(max=240), **GREEDY, **WANTED)
    assert not segki.explain(pair.model).fallbacks


def test_left_padded_text(pair: Pair) -> None:
    ids, mask = families.left_padded((9, 4))
    pair.check(ids.clamp(max=240), attention_mask=mask, **GREEDY, **WANTED)


@pytest.mark.parametrize("size", [(4, 4), (4, 8), (8, 6)])
@pytest.mark.parametrize("rows", [1, 2])
def test_image_prompts(pair: Pair, size: tuple[int, int], rows: int) -> None:
    """The image's tokens share positions, so that text goes on at a position lower than the number of tokens."""
    inputs = image_prompt(*size, rows=rows)
    pair.check(**inputs, **GREEDY, **WANTED)
    assert not segki.explain(pair.model).fallbacks
    deltas = pair.model.model.rope_deltas
    assert bool((deltas < 0).all()), deltas


def test_text_after_an_image(pair: Pair) -> None:
    """The offset of one call must not leak into the next."""
    pair.check(**image_prompt(8, 6), **GREEDY)
    pair.check(families.prompt(1, 6).clamp(max=240), **GREEDY, **WANTED)


def test_prompt_that_ends_inside_an_image(pair: Pair) -> None:
    inputs = image_prompt(4, 4)
    keep = 6
    cut = {name: inputs[name][:, :keep] for name in ("input_ids", "attention_mask", "mm_token_type_ids")}
    position_ids = torch.stack([torch.arange(keep)[None] + axis for axis in range(3)])
    for model in (pair.original, pair.model):
        model.model.rope_deltas = None
    text = {name: value for name, value in cut.items() if name != "mm_token_type_ids"}
    text["input_ids"] = text["input_ids"].clamp(max=240)
    pair.check(**text, position_ids=position_ids, **GREEDY)
    assert any("inside of an image" in reason for reason in segki.explain(pair.model).fallbacks)


def test_unused_vision_parameters_may_be_anything() -> None:
    """A vision tower in another state of mind (an adapter's extra parameter) does not stop the text tower."""
    model = build()
    model.model.visual.register_parameter("extra", torch.nn.Parameter(torch.ones(3)))
    assert segki.inject(model).rung == 1


def test_a_parameter_that_text_depends_on_is_not_overlooked() -> None:
    model = build()

    class Scaled(type(model)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            answer = super().forward(*args, **kwargs)
            answer.logits = answer.logits * self.temper.mean()
            return answer

    model.__class__ = Scaled
    model.register_parameter("temper", torch.nn.Parameter(torch.ones(2)))
    report = segki.inject(model)
    assert report.rung == 4 and "temper" in report.reasons[0]


# ------------------------------------------------------------------------------------------------- detection of the text tower


def logits_error(model: Any) -> float:
    """Largest difference between the logits of the detected plan and of the model, over the largest logit."""
    plan = detect(model).plan
    assert plan is not None
    assert all(layer.module.startswith("model.language_model.layers.") for layer in plan.layers)
    ids = families.prompt(2, 21).clamp(max=240)
    with torch.no_grad():
        want = model(input_ids=ids).logits.float()
    got = reference.forward(model, plan, ids).float()
    return float((got - want).abs().max() / want.abs().max())


@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
def test_a_plan_of_the_text_tower(experts: bool) -> None:
    assert logits_error(build(experts)) < 1e-4


def test_a_hooked_vision_tower_does_not_matter() -> None:
    model, seen = build(), []
    model.model.visual.register_forward_pre_hook(lambda *_: seen.append("before"))
    model.model.visual.blocks[2].register_forward_hook(lambda *_: seen.append("after"))
    hooks = [[*m._forward_pre_hooks, *m._forward_hooks] for m in model.modules()]
    assert logits_error(model) < 1e-4
    assert not seen
    assert hooks == [[*m._forward_pre_hooks, *m._forward_hooks] for m in model.modules()]


def test_a_vision_tower_hooked_after_inject_does_not_matter() -> None:
    model = build()
    report = segki.inject(model)
    model.model.visual.register_forward_hook(lambda *_: None)
    model.generate(torch.tensor([[5, 6, 7]]), do_sample=False, max_new_tokens=3, pad_token_id=0)
    assert report.rung == 1 and not report.fallbacks


def test_an_unusual_vision_tower_does_not_matter() -> None:
    """In another dtype, with packed weights, patched, with dropout in training mode."""
    model = build()
    model.model.language_model.to(torch.bfloat16)
    model.lm_head.to(torch.bfloat16)
    visual = model.model.visual
    visual.register_parameter("packed", torch.nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False))
    visual.blocks[1].forward = visual.blocks[1].forward
    visual.blocks[0].add_module("dropout", torch.nn.Dropout(0.5))
    visual.train()
    assert logits_error(model) < 4e-2


@pytest.mark.parametrize("place", ["model", "model.language_model", "model.language_model.layers.1.mlp", "lm_head"])
def test_a_hook_on_the_way_of_text_matters(place: str) -> None:
    model, seen = build(), []
    model.get_submodule(place).register_forward_hook(lambda *_: seen.append("after"))
    detection = detect(model)
    assert detection.plan is None and detection.reasons == (f"{place} has forward hooks",)
    assert not seen


def test_a_hooked_module_that_text_passes_through_is_found_without_calling_its_hook() -> None:
    model, seen = build(), []

    class Through(type(model)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            answer = super().forward(*args, **kwargs)
            answer.logits = self.last(answer.logits)
            return answer

    model.__class__ = Through
    model.add_module("last", torch.nn.Identity())
    assert detect(model).plan is not None
    model.last.register_forward_hook(lambda *_: seen.append("after"))
    detection = detect(model)
    assert detection.plan is None and "last has forward hooks, and text passes through it" in detection.reasons[0]
    assert not seen
