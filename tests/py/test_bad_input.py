"""Bad input: a clear error that names what was given and what is accepted, and a model left as it was."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import families
import segki
from harness import assert_same_modules, assert_same_weights, module_state, weights

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 4, "pad_token_id": 0}
ERRORS = (ValueError, RuntimeError)


class Unchanged:
    """Asserts at the end of the block that a model has the same modules, weights, results, and rung as before."""

    def __init__(self, model: Any, ids: torch.Tensor | None = None) -> None:
        self.model = model
        self.ids = families.prompt(2, 6) if ids is None else ids

    def _results(self) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            return self.model(self.ids).logits, self.model.generate(self.ids, **GREEDY)

    def __enter__(self) -> None:
        self.before = self._results()
        self.modules, self.weights = module_state(self.model), weights(self.model)
        self.training = [module.training for module in self.model.modules()]

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            return
        assert_same_modules(self.model, self.modules)
        assert_same_weights(self.model, self.weights)
        assert [module.training for module in self.model.modules()] == self.training
        after = self._results()
        assert torch.equal(after[0], self.before[0]), "the forward gives other logits than before"
        assert torch.equal(after[1], self.before[1]), "generate gives other tokens than before"


@pytest.fixture
def model() -> Any:
    model = families.build("llama")
    report = segki.inject(model)
    assert report.rung == 1, report.reasons
    return model


def fails(model: Any, call: Callable[[], object], *words: str) -> str:
    """The call raises ValueError or RuntimeError, the message holds all words, and the model stays as it was."""
    with Unchanged(model), pytest.raises(ERRORS) as caught:
        call()
    message = str(caught.value)
    for word in words:
        assert word in message, f"{word!r} is not in: {message}"
    return message


# ------------------------------------------------------------------------------------------------- arguments of generate


def test_empty_batch(model: Any) -> None:
    ids = torch.empty((0, 5), dtype=torch.long)
    fails(model, lambda: model.generate(ids, **GREEDY), "input_ids", "0")
    fails(model, lambda: segki.generate(model, ids, **GREEDY), "input_ids", "0")


def test_zero_new_tokens(model: Any) -> None:
    ids = families.prompt(1, 5)
    fails(model, lambda: model.generate(ids, **GREEDY | {"max_new_tokens": 0}), "max_new_tokens", "0")
    fails(model, lambda: model.generate(ids, **GREEDY | {"max_new_tokens": -3}), "max_new_tokens", "-3")


def test_prompt_longer_than_the_total_length(model: Any) -> None:
    ids = families.prompt(1, 9)
    fails(model, lambda: model.generate(ids, do_sample=False, max_length=9, pad_token_id=0), "9", "max_length")
    fails(model, lambda: model.generate(ids, do_sample=False, max_length=4, pad_token_id=0), "9", "max_length")


def test_prompt_longer_than_a_given_cache(model: Any) -> None:
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=8)
    with Unchanged(model), pytest.raises(ERRORS):
        model.generate(families.prompt(1, 12), past_key_values=cache, **GREEDY)


@pytest.mark.parametrize("bad", [families.VOCAB, families.VOCAB + 100, -1, 2**40])
def test_ids_outside_the_vocabulary(model: Any, bad: int) -> None:
    ids = families.prompt(2, 5)
    ids[1, 3] = bad
    message = fails(model, lambda: model.generate(ids, **GREEDY), "input_ids", str(bad))
    assert str(families.VOCAB) in message or str(families.VOCAB - 1) in message


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int16], ids=str)
def test_ids_of_a_wrong_dtype(model: Any, dtype: torch.dtype) -> None:
    ids = families.prompt(1, 5).to(dtype)
    fails(model, lambda: model.generate(ids, **GREEDY), "input_ids", str(dtype).removeprefix("torch."))


def test_ids_of_a_wrong_rank(model: Any) -> None:
    fails(model, lambda: model.generate(families.prompt(1, 5)[0], **GREEDY), "input_ids")
    fails(model, lambda: model.generate(families.prompt(1, 5)[None], **GREEDY), "input_ids")


def test_ids_on_another_device(model: Any) -> None:
    ids = families.prompt(1, 5).to("meta")
    fails(model, lambda: model.generate(ids, **GREEDY), "input_ids", "meta", "cpu")


def test_embeddings_of_a_wrong_dtype_or_width(model: Any) -> None:
    half = torch.zeros(1, 5, families.HIDDEN, dtype=torch.float16)
    fails(model, lambda: model.generate(inputs_embeds=half, **GREEDY), "inputs_embeds", "float16", "float32")
    narrow = torch.zeros(1, 5, families.HIDDEN - 4)
    message = fails(model, lambda: model.generate(inputs_embeds=narrow, **GREEDY), "inputs_embeds")
    assert str(families.HIDDEN) in message and str(families.HIDDEN - 4) in message


def test_right_padded_mask(model: Any) -> None:
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[1, 4:] = 0
    fails(model, lambda: model.generate(families.prompt(2, 6), attention_mask=mask, **GREEDY), "attention_mask", "1", "left")


def test_mask_with_a_hole_keeps_its_results(model: Any) -> None:
    """transformers accepts it, so it goes down the ladder."""
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[0, 3] = 0
    got = model.generate(families.prompt(2, 6), attention_mask=mask, **GREEDY)
    assert torch.equal(got, type(model).generate(model, families.prompt(2, 6), attention_mask=mask, **GREEDY))
    assert any("holes" in reason for reason in segki.explain(model).fallbacks)


def test_mask_of_zeros(model: Any) -> None:
    mask = torch.ones(3, 6, dtype=torch.long)
    mask[2] = 0
    fails(model, lambda: model.generate(families.prompt(3, 6), attention_mask=mask, **GREEDY), "attention_mask", "2")


def test_mask_of_another_shape(model: Any) -> None:
    mask = torch.ones(2, 5, dtype=torch.long)
    fails(model, lambda: model.generate(families.prompt(2, 6), attention_mask=mask, **GREEDY), "attention_mask", "5", "6")


def test_unknown_argument(model: Any) -> None:
    fails(model, lambda: model.generate(families.prompt(1, 5), no_such_setting=3, **GREEDY), "no_such_setting")


def test_end_and_pad_ids_outside_the_vocabulary(model: Any) -> None:
    """transformers accepts an end id that cannot occur; a pad id that cannot be embedded is as good as an end."""
    ids = families.prompt(1, 5)
    original = families.build("llama")
    kwargs = GREEDY | {"eos_token_id": [families.VOCAB + 7, 5]}
    assert torch.equal(model.generate(ids, **kwargs), original.generate(ids, **kwargs))


# ------------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize("where", ["lm_head", "model.layers.3.mlp.down_proj", "model.norm"])
def test_nan_in_the_logits(where: str) -> None:
    """A broken weight is reported with the row and the step, not decoded into silent rubbish."""
    model = families.build("llama")
    segki.inject(model)
    with torch.no_grad():
        model.get_submodule(where).weight.view(-1)[3] = float("nan")
    before, values = module_state(model), weights(model)
    with pytest.raises(ERRORS, match=r"(?i)nan"):
        model.generate(families.prompt(2, 6), **GREEDY)
    assert_same_modules(model, before)
    for name, value in model.state_dict().items():
        assert torch.equal(torch.nan_to_num(value), torch.nan_to_num(values[name]))
    with torch.no_grad():
        model.get_submodule(where).weight.nan_to_num_(0.0)
    healed = families.build("llama")
    healed.load_state_dict(model.state_dict())
    ids = families.prompt(2, 6)
    assert torch.equal(model.generate(ids, **GREEDY), healed.generate(ids, **GREEDY))


# ------------------------------------------------------------------------------------------------- models


def test_already_injected(model: Any) -> None:
    fails(model, lambda: segki.inject(model), "inject")
    inside = model.model.layers
    assert len(inside) == families.LAYERS


def test_eject_without_inject() -> None:
    model = families.build("llama")
    fails(model, lambda: segki.eject(model), "inject")


@pytest.mark.parametrize("thing", [None, 3, "llama", nn.Linear(4, 4), nn.Sequential()], ids=lambda t: type(t).__name__)
def test_not_a_model(thing: Any) -> None:
    for call in (segki.inject, segki.explain, segki.eject):
        with pytest.raises((*ERRORS, TypeError), match=type(thing).__name__):
            call(thing)


def declines(model: Any, *words: str) -> None:
    """Inject works or refuses, the results stay, and the report says why the step is not native."""
    untouched = copy.deepcopy(model)
    modules, values = module_state(model), weights(model)
    ids = families.prompt(2, 6)
    with torch.no_grad():
        want = untouched.generate(ids, **GREEDY)
    report = segki.inject(model)
    assert report.rung != 1, "a native step for weights that it cannot read"
    told = " ".join(str(reason) for reason in segki.explain(model).reasons)
    for word in words:
        assert word in told, f"{word!r} is not in: {told}"
    assert torch.equal(model.generate(ids, **GREEDY), want)
    segki.eject(model)
    assert_same_modules(model, modules)
    assert_same_weights(model, values)


def test_non_contiguous_weights() -> None:
    model = families.build("llama")
    layer = model.model.layers[1].mlp.up_proj
    layer.weight.data = layer.weight.data.t().contiguous().t()
    assert not layer.weight.is_contiguous()
    declines(model, "up_proj", "contiguous")


def test_weights_of_two_dtypes() -> None:
    model = families.build("llama", torch.bfloat16)
    head = model.lm_head
    head.weight.data = head.weight.data.float()
    head.forward = lambda x: nn.functional.linear(x.float(), head.weight)  # what such models do
    untouched = copy.deepcopy(model)
    untouched.lm_head.forward = lambda x: nn.functional.linear(x.float(), untouched.lm_head.weight)
    segki.inject(model)
    ids = families.prompt(2, 6)
    assert torch.equal(model.generate(ids, **GREEDY), untouched.generate(ids, **GREEDY))


def test_double_precision_model() -> None:
    declines(families.build("llama").double(), "float64")


class _Int8Linear(nn.Module):
    """A quantised layer as quantisers make them: integer codes and a scale a row."""

    scale: torch.Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, None
        self.weight = nn.Parameter((linear.weight.detach() / scale).round().to(torch.int8), requires_grad=False)
        self.register_buffer("scale", scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.float() * self.scale)


def test_quantised_weights() -> None:
    model = families.build("llama")
    for layer in model.model.layers:
        layer.mlp.gate_proj = _Int8Linear(layer.mlp.gate_proj)
    declines(model, "gate_proj", "int8")


def test_weights_on_the_meta_device() -> None:
    model = families.build("llama").to("meta")
    modules = module_state(model)
    with pytest.raises(ERRORS, match="meta"):
        segki.inject(model)
    assert_same_modules(model, modules)


@pytest.mark.parametrize("what", ["dtype", "shape", "contiguity"])
def test_weights_made_unreadable_after_inject(model: Any, what: str) -> None:
    """A bound weight that changes into something else declines; results are those of transformers."""
    ids = families.prompt(2, 6)
    model.generate(ids, **GREEDY)
    if what == "dtype":
        model.double()
    elif what == "contiguity":
        weight = model.model.layers[0].mlp.gate_proj.weight
        weight.data = weight.data.t().contiguous().t()
    else:
        model.resize_token_embeddings(families.VOCAB + 8)
    original = families.build("llama")
    if what == "dtype":
        original.double()
    elif what == "shape":
        original.resize_token_embeddings(families.VOCAB + 8)
    original.load_state_dict(model.state_dict())
    assert torch.equal(model.generate(ids, **GREEDY), original.generate(ids, **GREEDY))


# ------------------------------------------------------------------------------------------------- the command line


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from segki.cli import main; main()", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def refused(result: subprocess.CompletedProcess[str], *words: str) -> None:
    """A non-zero exit status and one short message, no traceback."""
    assert result.returncode != 0
    told = " ".join((result.stderr + result.stdout).split())
    assert "Traceback" not in told, told
    for word in words:
        assert word in told, f"{word!r} is not in: {told}"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    families.build("llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_command_line_accepts_a_good_directory(saved: Path) -> None:
    """The refusals below are about what is broken, not about the command."""
    result = command("explain", str(saved), "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["rung"] == 1


def test_unknown_directory(tmp_path: Path) -> None:
    refused(command("explain", str(tmp_path / "nowhere")), "nowhere")
    refused(command("generate", str(tmp_path / "nowhere"), "--prompt", "hello"), "nowhere")


def test_directory_without_a_model(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    refused(command("explain", str(tmp_path / "empty")), "empty", "config.json")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_broken_file(saved: Path, name: str) -> None:
    path = saved / name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    refused(command("explain", str(saved)), name)


def test_unknown_command_line_option(saved: Path) -> None:
    refused(command("explain", str(saved), "--no-such-option"), "no-such-option")


@pytest.mark.parametrize("keep", [(0, 2, 3), (1, 2, 3), (1, 0, 2, 3)], ids=str)
def test_layers_that_were_removed_or_moved_are_declined(keep: tuple[int, ...]) -> None:
    model = families.build("llama")
    model.model.layers = torch.nn.ModuleList([model.model.layers[i] for i in keep])
    report = segki.inject(model)
    assert report.rung == 4 and "cache layer" in report.reasons[0]


@pytest.mark.parametrize(
    "settings",
    [
        {"pad_token_id": -1},
        {"pad_token_id": families.VOCAB},
        {"eos_token_id": -1},
        {"eos_token_id": [-1, families.VOCAB + 7]},
        {"pad_token_id": -1, "eos_token_id": list(range(0, families.VOCAB, 2))},
        {"eos_token_id": [-1, *range(0, families.VOCAB, 2)], "min_new_tokens": 2},
    ],
    ids=str,
)
def test_ids_of_end_and_padding_outside_the_vocabulary_are_transformers_matter(model: Any, settings: dict[str, Any]) -> None:
    original = families.build("llama")
    outcomes = []
    for each in (original, model):
        try:
            outcomes.append(each.generate(families.prompt(2, 6), **GREEDY | settings))
        except (ValueError, RuntimeError, IndexError) as error:
            outcomes.append(type(error))
    want, got = outcomes
    assert torch.equal(got, want) if isinstance(want, torch.Tensor) else got is want


@pytest.mark.parametrize("tokens", [10**6, 10**9, 10**10, 10**30])
def test_limits_that_no_memory_holds(model: Any, tokens: int) -> None:
    """transformers grows its cache as it goes; segki's own would not fit."""
    settings = GREEDY | {"max_new_tokens": tokens, "eos_token_id": list(range(families.VOCAB))}
    original = families.build("llama")
    ids = families.prompt(2, 6)
    assert torch.equal(model.generate(ids, **settings), original.generate(ids, **settings))
    assert torch.equal(model.generate(ids, **GREEDY), original.generate(ids, **GREEDY))


def test_one_long_row_and_many_short_ones_do_not_multiply(model: Any) -> None:
    stop = {"eos_token_id": list(range(families.VOCAB)), "do_sample": False, "pad_token_id": 0}
    model.generate(families.prompt(1, 9), max_new_tokens=50_000, **stop)
    model.generate(families.prompt(64, 9), max_new_tokens=20, **stop)
    cache = model.generate.owner.engine.cache
    assert cache.rows * cache.max_len <= 2 * 64 * 512
    model.generate(families.prompt(2, 9), max_new_tokens=400, **stop)
    assert model.generate.owner.engine.cache.rows == 64, "a request of about the same size keeps the others' room"


@pytest.mark.parametrize("shape", [(1, 6), (1, 9, 9)], ids=str)
def test_masks_that_transformers_broadcasts(model: Any, shape: tuple[int, ...]) -> None:
    ids = families.prompt(2, 6)
    original = families.build("llama")
    outcomes = []
    for each in (original, model):
        try:
            outcomes.append(each.generate(ids, attention_mask=torch.ones(shape, dtype=torch.long), **GREEDY))
        except (ValueError, RuntimeError, IndexError) as error:
            outcomes.append(type(error))
    want, got = outcomes
    assert torch.equal(got, want) if isinstance(want, torch.Tensor) else got is want
