"""What is changed on a model around `inject` that is no parameter: methods, buffers, configuration, classes, modes."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationMixin, LlamaForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import families
import segki
from generation import GREEDY, Pair, new_pair

LOGITS: dict[str, Any] = {"return_dict_in_generate": True, "output_logits": True}


def subclassed(kind: type) -> Pair:
    """A pair whose class is changed to a subclass before `inject`."""
    original = families.build("llama")
    original.__class__ = kind
    model = copy.deepcopy(original)
    segki.inject(model)
    return Pair(original, model)


def binding(model: Any) -> Any:
    """The engine of a model; another one after it was bound again."""
    return model.generate.owner.engine


# ------------------------------------------------------------------------------------------------- methods of generation


def shift_single(inputs: dict[str, Any]) -> dict[str, Any]:
    """Another token in each decode step."""
    if inputs.get("input_ids") is not None and inputs["input_ids"].shape[1] == 1:
        inputs["input_ids"] = (inputs["input_ids"] + 1) % families.VOCAB
    return inputs


class Prepares(LlamaForCausalLM):
    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        return shift_single(super().prepare_inputs_for_generation(*args, **kwargs))


class Samples(LlamaForCausalLM):
    def _sample(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return input_ids


class DecoratedSamples(LlamaForCausalLM):
    @torch.no_grad()
    def _sample(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return input_ids


class Updates(LlamaForCausalLM):
    def _update_model_kwargs_for_generation(self, outputs: Any, model_kwargs: dict[str, Any], **kwargs: Any) -> Any:
        updated = super()._update_model_kwargs_for_generation(outputs, model_kwargs, **kwargs)
        updated["attention_mask"][:, :5] = 0
        return updated


@pytest.mark.parametrize("kind", [Prepares, Samples, DecoratedSamples, Updates])
def test_overridden_generation_methods_are_called(kind: type) -> None:
    pair = subclassed(kind)
    report = segki.explain(pair.model)
    assert report.rung == 4 and kind.__name__ in report.reasons[0]
    ids, mask = families.left_padded((9, 6))
    pair.check(ids, attention_mask=mask, **GREEDY)


@pytest.mark.parametrize("name", ["prepare_inputs_for_generation", "_sample"])
def test_generation_methods_patched_after_inject_are_called(name: str) -> None:
    pair = new_pair()
    pair.check(families.prompt(1, 9), **GREEDY)
    for model in (pair.original, pair.model):
        own = getattr(model, name)
        if name == "_sample":
            model._sample = types.MethodType(lambda self, input_ids, **kwargs: input_ids, model)
        else:
            model.prepare_inputs_for_generation = lambda *args, own=own, **kwargs: shift_single(own(*args, **kwargs))
    pair.check(families.prompt(1, 9), **GREEDY)
    assert any(name in reason for reason in segki.explain(pair.model).fallbacks)
    for model in (pair.original, pair.model):
        del vars(model)[name]
    engine, fallbacks = binding(pair.model), len(segki.explain(pair.model).fallbacks)
    pair.check(families.prompt(1, 9), **GREEDY)
    assert binding(pair.model) is engine and len(segki.explain(pair.model).fallbacks) == fallbacks


def test_a_patched_library_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = new_pair()
    monkeypatch.setattr(GenerationMixin, "_sample", lambda self, input_ids, **kwargs: input_ids)
    assert pair.check(families.prompt(1, 9), **GREEDY).shape == (1, 9)


def test_generate_patched_before_inject_is_called_as_it_was() -> None:
    model = families.build("llama")
    calls: list[tuple[Any, Any]] = []
    own = model.generate

    def patched(prompt: torch.Tensor, *, tokens: int) -> Any:
        calls.append((prompt, tokens))
        return own(prompt, **GREEDY | {"max_new_tokens": tokens})

    model.generate = patched
    report = segki.inject(model)
    assert report.rung == 4 and "generate" in report.reasons[0]
    ids = families.prompt(1, 9)
    assert model.generate(ids, tokens=3).shape == (1, 12)
    assert len(calls) == 1 and calls[0][0] is ids
    segki.eject(model)
    assert model.generate is patched


class Signature(LlamaForCausalLM):
    def generate(self, prompt: Any = None, pixel_values: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        return super().generate(prompt, **kwargs)


def test_a_class_with_a_generate_of_its_own_is_left_alone() -> None:
    pair = subclassed(Signature)
    pair.check(prompt=families.prompt(1, 9), pixel_values=torch.ones(1), **GREEDY)
    assert segki.explain(pair.model).rung == 4


# ------------------------------------------------------------------------------------------------- values that are no parameters


def scale_in_place(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.3)


def replace_buffer(model: Any) -> None:
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 0.3


def embedding_scale(model: Any) -> None:
    model.model.embed_tokens.embed_scale.fill_(1.0)


def softcap(model: Any) -> None:
    model.config.final_logit_softcapping = 0.5


def logits_scale(model: Any) -> None:
    model.config.logits_scaling = 1.5


@pytest.mark.parametrize(
    ("case", "change"),
    [
        ("llama", scale_in_place),
        ("llama", replace_buffer),
        ("gemma3_text", embedding_scale),
        ("gemma2", softcap),
        ("granite", logits_scale),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_changed_values_are_followed(case: str, change: Callable[[Any], None]) -> None:
    pair = new_pair(case)
    ids = families.prompt(2, 9)
    before = pair.check(ids, **GREEDY, **LOGITS)
    for model in (pair.original, pair.model):
        change(model)
    after = pair.check(ids, **GREEDY, **LOGITS)
    assert not torch.equal(before.logits[-1], after.logits[-1]), "the change has no effect in transformers"
    assert segki.explain(pair.model).rung == 1


@pytest.mark.parametrize("between", [{"do_sample": True}, {"output_attentions": True, "return_dict_in_generate": True}], ids=str)
def test_changed_values_are_followed_after_a_call_of_the_models_own_loop(between: dict[str, Any]) -> None:
    """Only what a forward changed while nobody else did may go unwatched."""
    pair = new_pair()
    ids = families.prompt(2, 9)
    pair.check(ids, **GREEDY)
    for model in (pair.original, pair.model):
        scale_in_place(model)
        model.model.layers[0].self_attn.scaling *= 1.5
        model.generate(ids, **GREEDY | between)
    pair.check(ids, **GREEDY, **LOGITS)


def test_buffers_replaced_by_equal_ones_cost_nothing() -> None:
    pair = new_pair()
    pair.check(families.prompt(1, 9), **GREEDY)
    engine = binding(pair.model)
    rotary = pair.model.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq.clone()
    pair.check(families.prompt(1, 9), **GREEDY)
    assert binding(pair.model) is engine


def test_training_a_router_correction_costs_nothing() -> None:
    pair = new_pair("glm4_moe")
    ids = families.prompt(1, 9)
    pair.check(ids, **GREEDY, **LOGITS)
    engine = binding(pair.model)
    for model in (pair.original, pair.model):
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(torch.linspace(-1.0, 1.0, buffer.numel()))
    pair.check(ids, **GREEDY, **LOGITS)
    assert binding(pair.model) is engine


def test_settings_that_generation_does_not_read_cost_nothing() -> None:
    pair = new_pair()
    pair.check(families.prompt(1, 9), **GREEDY)
    engine = binding(pair.model)
    pair.model.config.use_cache = False
    pair.model.config.use_cache = True
    pair.model.config.pad_token_id = 1
    pair.model.gradient_checkpointing_enable()
    pair.model.enable_input_require_grads()
    pair.check(families.prompt(1, 9), **GREEDY)
    pair.model.gradient_checkpointing_disable()
    pair.check(families.prompt(1, 9), **GREEDY)
    assert binding(pair.model) is engine and not segki.explain(pair.model).fallbacks


def test_a_forward_set_to_the_classs_own_is_no_patch() -> None:
    pair = new_pair()
    layer = pair.model.model.layers[0]
    layer.forward = layer.forward
    pair.check(families.prompt(1, 9), **GREEDY)
    assert not segki.explain(pair.model).fallbacks
    layer.forward = pair.model.model.layers[1].forward
    pair.original.model.layers[0].forward = pair.original.model.layers[1].forward
    pair.check(families.prompt(1, 9), **GREEDY)
    assert any("patched" in reason for reason in segki.explain(pair.model).fallbacks)


def test_a_custom_attention_set_after_inject_is_called() -> None:
    own = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def mine(*args: Any, **kwargs: Any) -> Any:
        out, weights = own(*args, **kwargs)
        return out * -2, weights

    ALL_ATTENTION_FUNCTIONS.register("segki-test", mine)
    ALL_MASK_ATTENTION_FUNCTIONS.register("segki-test", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    pair = new_pair()
    pair.check(families.prompt(1, 9), **GREEDY)
    for model in (pair.original, pair.model):
        model.set_attn_implementation("segki-test")
    pair.check(families.prompt(1, 9), **GREEDY)
    assert segki.explain(pair.model).rung == 4


def test_a_forward_patched_on_the_class_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = new_pair()
    before = pair.check(families.prompt(1, 9), **GREEDY)
    kind = type(pair.model.model.layers[0].mlp)
    own = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: -2 * own(self, x))
    after = pair.check(families.prompt(1, 9), **GREEDY)
    assert not torch.equal(before, after)
    monkeypatch.undo()
    assert torch.equal(pair.check(families.prompt(1, 9), **GREEDY), before)
    assert segki.explain(pair.model).rung == 1


def test_modules_that_count_their_calls_are_bound_once() -> None:
    original = families.build("llama")
    kind = type(original.model.layers[0].mlp)

    class Counting(kind):  # type: ignore[misc,valid-type]
        def forward(self, x: torch.Tensor) -> Any:
            self.calls += 1
            return super().forward(x)

    original.model.layers[0].mlp.__class__ = Counting
    original.model.layers[0].mlp.calls = 0
    model = copy.deepcopy(original)
    assert segki.inject(model).rung == 1
    pair = Pair(original, model)
    engines = []
    for _ in range(3):
        pair.check(families.prompt(1, 9), **GREEDY)
        engines.append(binding(model))
    assert engines[1] is engines[2] is engines[0]


# ------------------------------------------------------------------------------------------------- passing reasons


def test_declined_for_dropout_in_training_is_native_in_evaluation() -> None:
    original = families.build("gpt2")
    original.transformer.drop.p = 0.1
    model = copy.deepcopy(original).train()
    report = segki.inject(model)
    assert report.rung == 4 and "dropout" in report.reasons[0]
    model.eval()
    Pair(original, model).check(families.prompt(2, 9), **GREEDY)
    assert segki.explain(model).rung == 1 and segki.explain(model) is report


def test_declined_for_a_hook_is_native_without_it() -> None:
    original = families.build("llama")
    model = copy.deepcopy(original)
    handle = model.model.register_forward_hook(lambda *args: None)
    assert segki.inject(model).rung == 4
    handle.remove()
    Pair(original, model).check(families.prompt(2, 9), **GREEDY)
    assert segki.explain(model).rung == 1


def test_gradient_checkpointing_in_training_keeps_no_cache() -> None:
    pair = new_pair()
    for model in (pair.original, pair.model):
        model.gradient_checkpointing_enable()
        model.train()
    pair.check(families.prompt(2, 9), **GREEDY)
    for model in (pair.original, pair.model):
        model.eval()
    fallbacks = len(segki.explain(pair.model).fallbacks)
    pair.check(families.prompt(2, 9), **GREEDY)
    assert len(segki.explain(pair.model).fallbacks) == fallbacks


def test_reasons_that_differ_in_numbers_alone_are_kept_once() -> None:
    pair = new_pair("gpt2")
    for rows in (65, 66, 67):
        pair.model.generate(families.prompt(rows, 3), **GREEDY | {"max_new_tokens": 1})
    assert len(segki.explain(pair.model).fallbacks) == 1


# ------------------------------------------------------------------------------------------------- the process around the model


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("case", ["llama", "qwen3_5_text", "qwen3_moe"])
def test_default_dtype(case: str, dtype: torch.dtype) -> None:
    original = families.build(case)
    model = copy.deepcopy(original)
    try:
        torch.set_default_dtype(dtype)
        assert segki.inject(model).rung == 1, segki.explain(model).reasons
        got = model.generate(families.prompt(2, 9), **GREEDY)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(got, original.generate(families.prompt(2, 9), **GREEDY))


# ------------------------------------------------------------------------------------------------- forwards that keep no cache


class Forgetful(LlamaForCausalLM):
    """Long prompts leave nothing in the cache."""

    def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        if input_ids.shape[1] > 20:
            kwargs |= {name: DynamicCache() for name in ("cache", "past_key_values") if name in kwargs}
        return super().forward(input_ids, **kwargs)


def test_prompts_that_leave_the_cache_empty_are_transformers_matter() -> None:
    pair = subclassed(Forgetful)
    assert segki.explain(pair.model).rung == 1
    pair.check(families.prompt(2, 9), **GREEDY)
    assert not segki.explain(pair.model).fallbacks
    pair.check(families.prompt(2, 30), **GREEDY)
    assert any("empty" in reason for reason in segki.explain(pair.model).fallbacks)
    pair.check(families.prompt(2, 9), **GREEDY)


# ------------------------------------------------------------------------------------------------- models that are declined


@pytest.mark.parametrize("case", ["mamba", "bloom"])
def test_inputs_of_declined_models_are_judged_by_transformers(case: str) -> None:
    original = families.build(case)
    model = copy.deepcopy(original)
    assert segki.inject(model).rung == 4
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 7:] = 0
    Pair(original, model).check(families.prompt(2, 9), attention_mask=mask, **GREEDY)
