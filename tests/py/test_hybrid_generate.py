"""`generate` of hybrid (GatedDeltaNet) and mixture-of-experts models: recurrent states live in the shared cache and nobody else's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import TextIteratorStreamer
from transformers.cache_utils import DynamicCache

import families
import segki
from generation import GREEDY, Pair, new_pair, stops_apart
from segki.inject import injection_of
from segki.probe import native_logits

HYBRID = ["qwen3_5_text", "olmo_hybrid", "qwen3_next"]
EXPERTS = ["mixtral", "qwen3_moe", "qwen2_moe"]


@pytest.fixture(scope="module", params=HYBRID)
def hybrid(request: pytest.FixtureRequest) -> Pair:
    return new_pair(request.param)


@pytest.fixture(scope="module", params=HYBRID + EXPERTS)
def shared(request: pytest.FixtureRequest) -> Pair:
    return new_pair(request.param)


def engine_of(pair: Pair) -> Any:
    injection = injection_of(pair.model)
    assert injection is not None and injection.engine is not None
    return injection.engine


@pytest.mark.parametrize("length", [1, 2, 3, 13, 70])
@pytest.mark.parametrize("rows", [1, 3])
def test_plain_greedy(shared: Pair, rows: int, length: int) -> None:
    """Prompts shorter and longer than the convolution, and longer than a chunk of the scan."""
    shared.check(families.prompt(rows, length), **GREEDY)
    assert not segki.explain(shared.model).fallbacks


@pytest.mark.parametrize("lengths", [(13, 9, 4), (2, 1), (5, 5), (70, 3)])
def test_left_padded_rows_equal_transformers_and_their_solo_runs(shared: Pair, lengths: tuple[int, ...]) -> None:
    ids, mask = families.left_padded(lengths)
    together = shared.check(ids, attention_mask=mask, **GREEDY)
    for row, length in enumerate(lengths):
        alone = shared.check(ids[row : row + 1, -length:], **GREEDY)
        assert torch.equal(together[row, ids.shape[1] :], alone[0, length:])


def test_one_row_with_pads(shared: Pair) -> None:
    ids, mask = families.left_padded((9, 4))
    shared.check(ids[1:], attention_mask=mask[1:], **GREEDY)


@pytest.mark.parametrize("dictionary", [False, True])
def test_rows_stop_apart(hybrid: Pair, dictionary: bool) -> None:
    """With a dictionary also scores and the states of the returned cache are transformers' own."""
    ids, eos = stops_apart(hybrid.model.config.model_type)
    wanted: dict[str, Any] = {"return_dict_in_generate": True, "output_logits": True} if dictionary else {}
    want = hybrid.check(ids, **GREEDY, eos_token_id=eos, **wanted)
    if dictionary:
        got = hybrid.model.generate(ids, **GREEDY, eos_token_id=eos, **wanted)
        assert_same_states(got.cache, want.cache)


def test_dictionary_without_scores_keeps_exact_states(hybrid: Pair) -> None:
    """The amortised look at the stop flags must not run the state of a returned cache too far."""
    ids, eos = stops_apart(hybrid.model.config.model_type)
    outputs = [m.generate(ids, **GREEDY, eos_token_id=eos, return_dict_in_generate=True) for m in (hybrid.model, hybrid.original)]
    assert_same_states(outputs[0].cache, outputs[1].cache)


def assert_same_states(got: Any, want: Any) -> None:
    for ours, theirs in zip(got.layers, want.layers, strict=True):
        assert type(ours) is type(theirs)
        for name in ("conv_states", "recurrent_states"):
            for key, state in getattr(theirs, name, {}).items():
                torch.testing.assert_close(getattr(ours, name)[key], state, rtol=1e-4, atol=1e-5)


def test_returned_cache_continues(shared: Pair) -> None:
    """The cache of a native call is an ordinary one of its own: both models go on from it alike, whatever segki does meanwhile."""
    ids = families.prompt(2, 9)
    outputs = {}
    for name in ("original", "model"):
        model = getattr(shared, name)
        first = model.generate(ids, **GREEDY, return_dict_in_generate=True)
        model.generate(families.prompt(2, 5, seed=3), **GREEDY)
        longer = torch.cat([first.sequences, families.prompt(2, 3, seed=4)], dim=1)
        outputs[name] = model.generate(longer, cache=first.cache, **GREEDY)
    assert torch.equal(outputs["model"], outputs["original"])


def test_given_empty_cache_is_filled(hybrid: Pair) -> None:
    ids = families.prompt(1, 9)
    caches = [DynamicCache(config=hybrid.model.config) for _ in range(2)]
    want = hybrid.original.generate(ids, cache=caches[0], **GREEDY)
    assert torch.equal(hybrid.model.generate(ids, cache=caches[1], **GREEDY), want)
    assert caches[1].get_seq_length() == caches[0].get_seq_length()


def test_states_do_not_leak_between_calls(shared: Pair) -> None:
    """Batches of all sizes in turn on one kept cache, with fallbacks in between."""
    for rows, length in ((3, 9), (1, 2), (4, 1), (2, 30), (1, 1), (3, 9)):
        shared.check(families.prompt(rows, length, seed=rows), **GREEDY)
    shared.check(families.prompt(1, 4), num_beams=2, **GREEDY)
    shared.check(families.prompt(1, 4), **GREEDY)


def test_other_models_and_plain_forwards_in_turn(hybrid: Pair) -> None:
    other = new_pair("olmo_hybrid")
    ids = families.prompt(2, 6)
    for pair in (hybrid, other, hybrid):
        pair.check(ids, **GREEDY)
        want = pair.original(ids).logits
        torch.testing.assert_close(pair.model(ids).logits, want, rtol=1e-4, atol=1e-5)


def test_prefill_fills_the_native_memory(hybrid: Pair) -> None:
    """transformers' cache layer and the native cache are one memory; the step advances it."""
    ids = families.prompt(2, 9)
    hybrid.model.generate(ids, **GREEDY | {"max_new_tokens": 5})
    cache = DynamicCache(config=hybrid.original.config)
    tokens = hybrid.original.generate(ids, **GREEDY | {"max_new_tokens": 5})
    with torch.no_grad():
        hybrid.original(tokens[:, :-1], cache=cache, use_cache=True)
    engine = engine_of(hybrid)
    for index, layer in enumerate(cache.layers):
        if not getattr(layer, "recurrent_states", None):
            continue
        state = engine.cache.recurrent_state(index)
        native = engine.memory.tensor(state.address, torch.float32, (2, *state.shape[1:]))
        torch.testing.assert_close(native, layer.recurrent_states[0], rtol=1e-4, atol=1e-5)


def test_a_finished_rows_state_stands_still(hybrid: Pair) -> None:
    ids, eos = stops_apart(hybrid.model.config.model_type)
    engine = engine_of(hybrid)
    linear = next(i for i, kind in enumerate(hybrid.model.config.layer_types) if kind == "linear_attention")

    def states(rows: int) -> torch.Tensor:
        state = engine.cache.recurrent_state(linear)
        tensor: torch.Tensor = engine.memory.tensor(state.address, torch.float32, (rows, *state.shape[1:]))
        return tensor.clone()

    output = hybrid.model.generate(ids, **GREEDY, eos_token_id=eos)
    together = states(3)
    for row in range(3):
        new = output[row, ids.shape[1] :].tolist()
        steps = next((i for i, token in enumerate(new) if token in eos), len(new) - 1) + 1
        hybrid.model.generate(ids[row : row + 1], **GREEDY | {"max_new_tokens": steps})
        torch.testing.assert_close(states(1)[0], together[row], rtol=1e-4, atol=1e-5)


def test_streamer(shared: Pair) -> None:
    class Tokens(TextIteratorStreamer):
        def __init__(self) -> None:
            self.got: list[list[int]] = []

        def put(self, value: torch.Tensor) -> None:
            self.got.append(value.reshape(-1).tolist())

        def end(self) -> None:
            self.got.append([-1])

    streamers = [Tokens(), Tokens()]
    ids = families.prompt(1, 6)
    for model, streamer in zip((shared.original, shared.model), streamers, strict=True):
        model.generate(ids, streamer=streamer, **GREEDY)
    assert streamers[0].got == streamers[1].got


@pytest.mark.parametrize("case", HYBRID + EXPERTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_are_bit_identical_alone_and_in_a_batch(case: str, dtype: torch.dtype) -> None:
    """From an empty cache on, natively: a prefill is the framework's and not batch-invariant."""
    model = families.build(case, dtype)
    assert segki.inject(model).rung == 1
    injection = injection_of(model)
    assert injection is not None and injection.engine is not None
    ids = families.prompt(8, 12)
    together = native_logits(injection.engine, ids)
    assert torch.isfinite(together).all()
    for row in (0, 3, 7):
        assert torch.equal(native_logits(injection.engine, ids[row : row + 1])[0], together[row])
    three = native_logits(injection.engine, ids[2:5])
    assert torch.equal(three, together[2:5])


@pytest.mark.parametrize("case", ["qwen3_5_text", "qwen3_next", "qwen3_moe"])
def test_generate_train_generate(case: str) -> None:
    """All of the model's weights change between two generations; gradients are exactly those of the model without segki."""
    pair = new_pair(case)
    ids = families.prompt(2, 9)
    before = pair.check(ids, **GREEDY)
    for step in range(2):
        gradients = []
        for model in (pair.original, pair.model):
            model.train()
            loss = model(ids, labels=ids).loss
            loss.backward()
            gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        assert gradients[0].keys() == gradients[1].keys()
        for name, gradient in gradients[0].items():
            assert torch.equal(gradient, gradients[1][name]), f"step {step}: {name}"
        for model in (pair.original, pair.model):
            torch.optim.SGD(model.parameters(), lr=0.5).step()
            model.zero_grad()
            model.eval()
        after = pair.check(ids, **GREEDY)
    assert not torch.equal(before, after)
    assert not segki.explain(pair.model).fallbacks


def test_eject_leaves_nothing(hybrid: Pair) -> None:
    model = copy.deepcopy(hybrid.original)
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    segki.inject(model)
    model.generate(families.prompt(1, 5), **GREEDY)
    segki.eject(model)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes


def test_the_report_names_blocks_whose_prompts_are_native() -> None:
    report = segki.inject(families.build("qwen3_5_text"))
    runs = {segment.module: segment.runs for segment in report.segments if segment.kind in ("gdn", "attention")}
    assert set(runs.values()) == {"native step, prompt", "native step"}
    assert runs["model.layers.0.linear_attn"] == "native step, prompt"
