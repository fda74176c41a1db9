"""Inject leaves the model a model: eject restores it exactly, and torch's and transformers' own tools keep working meanwhile."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from transformers import AutoModelForCausalLM

import families
import segki
from harness import assert_same_modules, assert_same_weights, compare_rounding, module_state, weights

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 10, "pad_token_id": 0}
IDS = families.prompt(2, 9)


def inject_natively(model: Any) -> Any:
    report = segki.inject(model)
    assert report.rung == 1, report.reasons
    return model


def tokens(model: Any) -> torch.Tensor:
    return model.generate(IDS, **GREEDY)


def told(model: Any) -> str:
    return " ".join(str(reason) for reason in segki.explain(model).reasons)


@pytest.fixture
def original() -> Any:
    return families.build("llama")


@pytest.fixture
def model(original: Any) -> Any:
    return inject_natively(copy.deepcopy(original))


# ------------------------------------------------------------------------------------------------- eject


@pytest.mark.parametrize("case", ["llama", "gemma3_text", "gpt_neox", "phi3", "cohere2", "qwen3_moe", "qwen3_next", "mamba"])
def test_eject_restores_every_attribute(case: str) -> None:
    model = families.build(case)
    modules, values, config = module_state(model), weights(model), model.config.to_dict()
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        logits = model(IDS).logits
    for _ in range(2):
        segki.inject(model)
        assert module_state(model) != modules or segki.explain(model).rung > 1
        tokens(model)
        segki.eject(model)
        assert_same_modules(model, modules)
    assert_same_weights(model, values)
    assert model.config.to_dict() == config
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, logits)


def test_eject_does_not_undo_training(model: Any) -> None:
    with torch.no_grad():
        model.lm_head.weight.mul_(-1)
    values = weights(model)
    want = tokens(model)
    segki.eject(model)
    assert_same_weights(model, values)
    assert torch.equal(tokens(model), want)


def test_injected_block(original: Any) -> None:
    modules, want = module_state(original), tokens(original)
    with segki.injected(original):
        assert segki.explain(original).rung == 1
        assert torch.equal(tokens(original), want)
    assert_same_modules(original, modules)


def test_injected_block_that_fails(original: Any) -> None:
    modules = module_state(original)
    with pytest.raises(KeyError, match="inside"), segki.injected(original):
        raise KeyError("inside")
    assert_same_modules(original, modules)


def test_injected_block_on_an_injected_model(model: Any) -> None:
    with pytest.raises((ValueError, RuntimeError), match="inject"), segki.injected(model):
        pass
    assert segki.explain(model).rung == 1, "the outer injection stays"


def test_explain_before_inject_changes_nothing(original: Any) -> None:
    modules = module_state(original)
    report = segki.explain(original)
    assert str(report) and report.to_json()
    assert_same_modules(original, modules)


def test_attribute_set_while_injected_stays(model: Any) -> None:
    model.note = "mine"
    model.model.layers[1].note = "mine too"
    segki.eject(model)
    assert model.note == "mine" and model.model.layers[1].note == "mine too"


def test_an_injected_model_is_freed(original: Any) -> None:
    """No registry keeps a model, its cache or its weights alive."""
    model = inject_natively(copy.deepcopy(original))
    tokens(model)
    seen = [weakref.ref(model), weakref.ref(model.lm_head.weight), weakref.ref(model.model.layers[0].mlp)]
    del model
    gc.collect()
    assert [ref() for ref in seen] == [None] * 3


def test_an_ejected_model_is_freed(model: Any) -> None:
    copied = copy.deepcopy(model)
    segki.eject(copied)
    seen = weakref.ref(copied)
    del copied
    gc.collect()
    assert seen() is None


# ------------------------------------------------------------------------------------------------- copies and files


def through_pickle(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


def through_torch_save(model: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, through_pickle, through_torch_save], ids=lambda f: f.__name__)
def test_duplicates_are_independent(model: Any, original: Any, duplicate: Callable[[Any], Any]) -> None:
    """A duplicate decodes with its own weights, and neither model follows the other."""
    want = tokens(original)
    tokens(model)
    twin = duplicate(model)
    assert torch.equal(tokens(twin), want)
    with torch.no_grad():
        for model_ in (twin, original):
            for layer in model_.model.layers:
                layer.mlp.down_proj.weight.mul_(-1.5)
    changed = tokens(original)
    assert not torch.equal(changed, want)
    assert torch.equal(tokens(twin), changed), "the duplicate does not use its own weights"
    assert torch.equal(tokens(model), want), "the model uses the duplicate's weights"
    with torch.no_grad():
        assert torch.allclose(twin(IDS).logits, original(IDS).logits, atol=1e-4)
    segki.eject(model)
    assert torch.equal(tokens(model), want)
    assert torch.equal(tokens(twin), changed)


def test_state_dict_is_that_of_the_model(model: Any, original: Any, tmp_path: Path) -> None:
    assert_same_weights(model, weights(original))
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in original.named_parameters()]
    assert [name for name, _ in model.named_modules()] == [name for name, _ in original.named_modules()]
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same_weights(loaded, weights(original))


# ------------------------------------------------------------------------------------------------- conversions


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_to_another_dtype_while_injected(original: Any, dtype: torch.dtype) -> None:
    """`.to` rounds the rotary table too, unlike loading in that dtype; the model as it is decides."""

    def inject_then_convert(model: Any) -> None:
        model.float()
        inject_natively(model)
        tokens(model)
        model.to(dtype)
        tokens(model)

    comparison = compare_rounding(original.to(dtype), inject_then_convert)
    assert comparison.rung == 1
    comparison.assert_no_worse()


def test_to_double_and_back(model: Any, original: Any) -> None:
    model.double()
    assert torch.equal(tokens(model), tokens(copy.deepcopy(original).double()))
    model.float()
    assert torch.equal(tokens(model), tokens(original))


def test_torch_compile(original: Any) -> None:
    small = families.build("llama-one-layer-multi-query")
    model = inject_natively(copy.deepcopy(small))
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        assert torch.allclose(compiled(IDS).logits, small(IDS).logits, atol=1e-4)
        assert torch.allclose(compiled(IDS, use_cache=False).logits, small(IDS).logits, atol=1e-4)
    assert torch.equal(tokens(model), tokens(small))
    torch._dynamo.reset()


def test_forward_is_that_of_the_model(model: Any, original: Any) -> None:
    """Called directly, with a mask, labels and all outputs, an injected model answers as before."""
    ids, mask = families.left_padded((9, 5))
    kwargs = {"attention_mask": mask, "labels": ids, "output_hidden_states": True}
    with torch.no_grad():
        got, want = model(ids, **kwargs), original(ids, **kwargs)
    assert type(got) is type(want) and list(got.keys()) == list(want.keys())
    assert torch.allclose(got.loss, want.loss, rtol=1e-5)
    real = mask.bool()
    assert torch.allclose(got.logits[real], want.logits[real], atol=1e-4)
    assert len(got.hidden_states) == len(want.hidden_states)
    for a, b in zip(got.hidden_states, want.hidden_states, strict=True):
        assert torch.allclose(a[real], b[real], atol=1e-4)


def test_gradient_checkpointing(model: Any, original: Any) -> None:
    for m in (model, original):
        m.train()
        m.gradient_checkpointing_enable()
        m(IDS, labels=IDS).loss.backward()
    for got, want in zip(model.parameters(), original.parameters(), strict=True):
        assert (got.grad - want.grad).abs().max() <= 1e-4 * want.grad.abs().max()


# ------------------------------------------------------------------------------------------------- hooks and wrappers

HOOKED = ("model.layers.1.mlp", "model.layers.2.self_attn", "model.layers.0.mlp.down_proj", "model.norm", "lm_head", "model", "")


class Count:
    """A forward hook that counts its calls and may change the output."""

    def __init__(self, factor: float | None = None) -> None:
        self.calls, self.factor = 0, factor

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        self.calls += 1
        if self.factor is not None and isinstance(output, torch.Tensor):
            return output * self.factor
        return None


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("where", HOOKED)
def test_hooks_are_called_as_often_as_before(original: Any, where: str, when: str) -> None:
    model = copy.deepcopy(original)
    if when == "after":
        inject_natively(model)
        tokens(model)
    hooks = [Count(), Count()]
    for hooked, hook in zip((original, model), hooks, strict=True):
        hooked.get_submodule(where).register_forward_hook(hook)
    if when == "before":
        report = segki.inject(model)
        assert report.rung != 1
        assert "hook" in told(model)
    want, got = tokens(original), tokens(model)
    assert torch.equal(got, want)
    assert hooks[0].calls == hooks[1].calls == GREEDY["max_new_tokens"]


def test_hook_that_changes_the_output_and_its_removal(model: Any, original: Any) -> None:
    free = tokens(original)
    handles = [m.get_submodule("model.layers.1.mlp").register_forward_hook(Count(-3.0)) for m in (original, model)]
    want = tokens(original)
    assert not torch.equal(want, free)
    assert torch.equal(tokens(model), want)
    for handle in handles:
        handle.remove()
    assert torch.equal(tokens(model), free)


def test_pre_hook_on_a_norm(model: Any, original: Any) -> None:
    for m in (original, model):
        m.model.layers[3].input_layernorm.register_forward_pre_hook(lambda module, args: (args[0].roll(1, -1),))
    assert torch.equal(tokens(model), tokens(original))


def test_backward_hooks_fire(model: Any) -> None:
    seen: list[int] = []
    model.model.layers[1].mlp.register_full_backward_hook(lambda module, grad_in, grad_out: seen.append(1))
    model(IDS, labels=IDS).loss.backward()
    assert seen == [1]


class LowRank(nn.Module):
    """What adapter libraries do: a module around the Linear, with a trained product of two small matrices added."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.base_layer = base_layer
        self.lora_A = nn.Parameter(torch.randn(4, base_layer.in_features, generator=generator) * 0.3)
        self.lora_B = nn.Parameter(torch.randn(base_layer.out_features, 4, generator=generator) * 0.3)

    @property
    def weight(self) -> torch.Tensor:
        return self.base_layer.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + x @ self.lora_A.T @ self.lora_B.T


class Sharpened(nn.Linear):
    """A subclass of Linear with a forward of its own; its weight alone says nothing."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 1.25


def sharpen(linear: nn.Linear) -> nn.Module:
    linear.__class__ = Sharpened
    return linear


def rebind(linear: Any) -> nn.Module:
    """A forward set on the instance, as device hooks of other libraries are."""
    linear.forward = lambda x: nn.functional.linear(x, linear.weight) * 1.25
    return linear


def weight_norm(linear: Any) -> nn.Module:
    parametrizations.weight_norm(linear)
    with torch.no_grad():
        linear.parametrizations.weight.original0.mul_(1.3)
    return linear


@pytest.mark.parametrize("wrap", [LowRank, sharpen, rebind, weight_norm], ids=lambda f: f.__name__)
@pytest.mark.parametrize("where", ["mlp.down_proj", "self_attn.q_proj"])
def test_wrapped_linear_is_declined_with_a_reason(original: Any, wrap: Callable[[nn.Linear], nn.Module], where: str) -> None:
    parent, leaf = where.split(".")
    model = families.build("llama")
    free = tokens(model)
    for m in (original, model):
        module = getattr(m.model.layers[1], parent)
        setattr(module, leaf, wrap(getattr(module, leaf)))
    want = tokens(original)
    assert not torch.equal(want, free), "the wrapper changes the result"
    modules = module_state(model)
    report = segki.inject(model)
    assert report.rung != 1
    assert leaf in told(model)
    assert torch.equal(tokens(model), want)
    segki.eject(model)
    assert_same_modules(model, modules)


@pytest.mark.parametrize("wrap", [LowRank, sharpen, rebind, weight_norm], ids=lambda f: f.__name__)
def test_linear_wrapped_while_injected_is_followed(model: Any, original: Any, wrap: Callable[[nn.Linear], nn.Module]) -> None:
    tokens(model)
    for m in (original, model):
        m.model.layers[1].mlp.down_proj = wrap(m.model.layers[1].mlp.down_proj)
    assert torch.equal(tokens(model), tokens(original))


def test_layer_replaced_or_removed_while_injected_is_followed(model: Any, original: Any) -> None:
    tokens(model)
    for m in (original, model):
        m.model.layers[0].mlp, m.model.layers[2].mlp = m.model.layers[2].mlp, m.model.layers[0].mlp
    assert torch.equal(tokens(model), tokens(original))
    for m in (original, model):
        del m.model.layers[3]
        m.config.num_hidden_layers = 3
    assert torch.equal(tokens(model), tokens(original))


def test_scalar_attribute_changed_while_injected_is_followed(model: Any, original: Any) -> None:
    tokens(model)
    for m in (original, model):
        for layer in m.model.layers:
            layer.self_attn.scaling *= 3.0
            layer.input_layernorm.variance_epsilon = 0.5
    assert torch.equal(tokens(model), tokens(original))


def test_forward_patched_after_inject_is_called(model: Any, original: Any) -> None:
    """An instance's own forward (accelerate, a user's patch) is never skipped, and its removal makes the step native again."""
    free = tokens(original)
    assert torch.equal(tokens(model), free)
    for m in (original, model):
        mlp = m.model.layers[1].mlp
        mlp.forward = lambda x, own=mlp.forward: -own(x)
    want = tokens(original)
    assert not torch.equal(want, free)
    assert torch.equal(tokens(model), want)
    for m in (original, model):
        del m.model.layers[1].mlp.forward
    assert torch.equal(tokens(model), free)


def test_global_hook_is_called_as_often_as_before(model: Any, original: Any) -> None:
    """A hook on all modules (a profiler's) is not skipped either."""
    tokens(model)
    calls: list[type] = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: calls.append(type(module)))
    try:
        want = tokens(original)
        own, calls = calls[:], []
        handle.remove()
        handle = nn.modules.module.register_module_forward_hook(lambda module, *_: calls.append(type(module)))
        assert torch.equal(tokens(model), want)
        assert calls == own
    finally:
        handle.remove()
