"""After inject, model.generate keeps the signature and the results of transformers, on the native path and down the ladder."""

from __future__ import annotations

import copy
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
)

import families
import segki
import segki.testing
from generation import GREEDY, Pair, assert_same_output, new_pair, stops_apart
from harness import torch_products


@pytest.fixture(scope="module")
def shared() -> Pair:
    """A pair for the tests that change nothing in it."""
    return new_pair()


@pytest.fixture
def pair() -> Pair:
    return new_pair()


# ------------------------------------------------------------------------------------------------- lengths and stopping


@pytest.mark.parametrize("length", [1, 2, 13, 40])
@pytest.mark.parametrize("rows", [1, 3])
def test_plain_greedy(shared: Pair, rows: int, length: int) -> None:
    shared.check(families.prompt(rows, length), **GREEDY)


@pytest.mark.parametrize("steps", [1, 2, 15, 16, 17, 33, 150])
def test_numbers_of_new_tokens(shared: Pair, steps: int) -> None:
    assert shared.check(families.prompt(2, 5), **GREEDY | {"max_new_tokens": steps}).shape[1] == 5 + steps


def test_lengths_by_default_and_in_total(shared: Pair) -> None:
    ids = families.prompt(1, 6)
    assert shared.check(ids, do_sample=False).shape[1] == 26
    assert shared.check(ids, do_sample=False, max_length=15).shape[1] == 15
    shared.check(ids, do_sample=False, max_length=9, max_new_tokens=4)


def test_rows_stop_apart_and_are_padded_with_id_0(shared: Pair) -> None:
    ids, eos = stops_apart()
    output = shared.check(ids, **GREEDY, eos_token_id=eos)
    new = output[:, ids.shape[1] :]
    assert new.shape[1] < 12, "all rows stopped, so the output is shorter"
    assert (new[:, -1] == 0).any(), "a row that stopped early is padded"


@pytest.mark.parametrize("pad", [0, 7, None])
def test_pad_ids(shared: Pair, pad: int | None) -> None:
    ids, eos = stops_apart()
    config = GenerationConfig(do_sample=False, max_new_tokens=12, eos_token_id=eos, pad_token_id=pad)
    shared.check(ids, generation_config=config)


def test_single_end_id_and_first_token_ends(shared: Pair) -> None:
    ids = families.prompt(2, 9)
    first = shared.original.generate(ids, **GREEDY)[:, 9].tolist()
    shared.check(ids, **GREEDY, eos_token_id=first[0])
    assert shared.check(ids, **GREEDY, eos_token_id=sorted(set(first))).shape[1] == 10


@pytest.mark.parametrize("kwargs", [{"min_new_tokens": 8}, {"min_length": 17}, {"min_new_tokens": 12}], ids=str)
def test_minimum_lengths(shared: Pair, kwargs: dict[str, int]) -> None:
    ids, eos = stops_apart()
    shared.check(ids, **GREEDY, eos_token_id=eos, **kwargs)


def test_end_id_from_the_models_configuration(pair: Pair) -> None:
    ids, eos = stops_apart()
    for model in (pair.original, pair.model):
        model.generation_config.eos_token_id = eos
    assert pair.check(ids, **GREEDY).shape[1] < ids.shape[1] + 12


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 50),
    rows=st.integers(1, 4),
    chosen=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 19)), max_size=4),
    others=st.lists(st.integers(0, families.VOCAB - 1), max_size=3),
    most=st.integers(1, 20),
    least=st.integers(0, 20),
    pad=st.sampled_from([0, 5]),
)
def test_stop_rule(
    shared: Pair,
    seed: int,
    rows: int,
    chosen: list[tuple[int, int]],
    others: list[int],
    most: int,
    least: int,
    pad: int,
) -> None:
    """Any set of end ids, most of them met, with any minimum and maximum: transformers' output."""
    ids = families.prompt(rows, 7, seed=seed)
    free = shared.original.generate(ids, do_sample=False, max_new_tokens=20, pad_token_id=0)[:, 7:]
    eos = sorted({int(free[row % rows, step]) for row, step in chosen} | set(others))
    kwargs: dict[str, Any] = {"eos_token_id": eos} if eos else {}
    if least:
        kwargs["min_new_tokens"] = min(least, most)
    shared.check(ids, do_sample=False, max_new_tokens=most, pad_token_id=pad, **kwargs)


# ------------------------------------------------------------------------------------------------- inputs


def test_left_padded_rows(shared: Pair) -> None:
    ids, mask = families.left_padded((13, 1, 7, 12))
    shared.check(ids, attention_mask=mask, **GREEDY)


def test_one_row_with_pads(shared: Pair) -> None:
    ids, mask = families.left_padded((6, 9))
    output = shared.check(ids[:1], attention_mask=mask[:1], **GREEDY)
    alone = shared.check(ids[:1, 3:], **GREEDY)
    assert torch.equal(output[:, 9:], alone[:, 6:])


def test_pads_without_a_mask(shared: Pair) -> None:
    """transformers infers the mask from the pad id."""
    ids, _ = families.left_padded((13, 5))
    shared.check(ids, **GREEDY)


def test_mask_of_ones_and_boolean_mask(shared: Pair) -> None:
    ids, mask = families.left_padded((9, 4))
    shared.check(ids[:1], attention_mask=mask[:1], **GREEDY)
    shared.check(ids, attention_mask=mask.bool(), **GREEDY)


def test_input_as_keyword_and_non_contiguous(shared: Pair) -> None:
    ids = families.prompt(9, 3).T
    assert not ids.is_contiguous()
    shared.check(input_ids=ids, **GREEDY)
    shared.check(inputs=ids, **GREEDY)


@pytest.mark.parametrize("lengths", [(9,), (9, 4)], ids=str)
def test_inputs_embeds(shared: Pair, lengths: tuple[int, ...]) -> None:
    ids, mask = families.left_padded(lengths)
    embeds = shared.original.get_input_embeddings()(ids).detach()
    output = shared.check(inputs_embeds=embeds, attention_mask=mask, **GREEDY)
    assert output.shape[1] == 12, "without ids only new tokens come back"
    shared.check(ids, inputs_embeds=embeds, attention_mask=mask, **GREEDY)


def test_generation_config_object(shared: Pair) -> None:
    ids, eos = stops_apart()
    config = GenerationConfig(max_new_tokens=11, do_sample=False, eos_token_id=eos, pad_token_id=0, min_new_tokens=5)
    before = config.to_dict()
    shared.check(ids, config)
    shared.check(ids, generation_config=config, max_new_tokens=6)
    shared.model.generate(ids, generation_config=config)
    assert config.to_dict() == before


class Puts:
    """A streamer that keeps what it receives."""

    def __init__(self) -> None:
        self.received: list[list[Any]] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        assert not self.ended
        self.received.append(value.tolist())

    def end(self) -> None:
        self.ended += 1


@pytest.mark.parametrize("rows", [1, 3])
def test_streamer_receives_the_same(shared: Pair, rows: int) -> None:
    ids, eos = stops_apart()
    for kwargs in (GREEDY, GREEDY | {"eos_token_id": eos}, GREEDY | {"max_new_tokens": 1}):
        puts = [Puts(), Puts()]
        for model, streamer in zip((shared.original, shared.model), puts, strict=True):
            model.generate(ids[:rows], streamer=streamer, **kwargs)
        assert puts[1].received == puts[0].received
        assert puts[1].ended == puts[0].ended == 1


def test_streamer_failure_leaves_the_model_usable(shared: Pair) -> None:
    class Broken(Puts):
        def put(self, value: torch.Tensor) -> None:
            super().put(value)
            if len(self.received) == 4:
                raise KeyboardInterrupt

    ids = families.prompt(1, 9)
    with pytest.raises(KeyboardInterrupt):
        shared.model.generate(ids, streamer=Broken(), **GREEDY)
    shared.check(ids, **GREEDY)


# ------------------------------------------------------------------------------------------------- outputs


@pytest.mark.parametrize("scores", [False, True])
@pytest.mark.parametrize("logits", [False, True])
def test_dictionary_output(shared: Pair, scores: bool, logits: bool) -> None:
    ids, eos = stops_apart()
    output = shared.check(
        ids, **GREEDY, eos_token_id=eos, return_dict_in_generate=True, output_scores=scores, output_logits=logits
    )
    assert (output.scores is not None) == scores and (output.logits is not None) == logits


def test_scores_with_a_minimum_length_differ_from_logits(shared: Pair) -> None:
    """Scores are what the end ids were suppressed in, logits are raw."""
    ids, eos = stops_apart()
    output = shared.check(
        ids,
        **GREEDY,
        eos_token_id=eos,
        min_new_tokens=6,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
    )
    assert torch.isinf(output.scores[0][:, eos]).all() and torch.isfinite(output.logits[0]).all()


def test_logits_belong_to_the_caller(shared: Pair) -> None:
    """A later call may not change what an earlier one returned."""
    kwargs = GREEDY | {"return_dict_in_generate": True, "output_logits": True}
    first = shared.model.generate(families.prompt(1, 9), **kwargs)
    kept = [logits.clone() for logits in first.logits]
    shared.model.generate(families.prompt(1, 9, seed=5), **kwargs)
    assert all(torch.equal(a, b) for a, b in zip(first.logits, kept, strict=True))


def test_returned_cache_continues(shared: Pair) -> None:
    """A conversation: the second call starts from the cache that the first one returned."""
    ids = families.prompt(1, 9)
    full = {}
    for name in ("original", "model"):
        model = getattr(shared, name)
        first = model.generate(ids, **GREEDY, return_dict_in_generate=True)
        longer = torch.cat((first.sequences, families.prompt(1, 4, seed=8)), 1)
        full[name] = model.generate(longer, past_key_values=first.past_key_values, **GREEDY)
    assert_same_output(full["model"], full["original"])


def test_given_cache_is_filled(shared: Pair) -> None:
    from transformers import DynamicCache

    ids = families.prompt(2, 9)
    caches: list[Any] = [DynamicCache(), DynamicCache()]
    for model, cache in zip((shared.original, shared.model), caches, strict=True):
        model.generate(ids, past_key_values=cache, **GREEDY)
    assert int(caches[1].get_seq_length()) == int(caches[0].get_seq_length()) > 9
    for got, want in zip(caches[1].layers, caches[0].layers, strict=True):
        assert torch.allclose(got.keys, want.keys, atol=1e-4) and torch.allclose(got.values, want.values, atol=1e-4)


# ------------------------------------------------------------------------------------------------- down the ladder


class _PreferEven(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + 0.5 * (torch.arange(scores.shape[1]) % 2 == 0)


class _StopAtLength(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= 14)


LADDER: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 2},
    "beams-returned": {"num_beams": 3, "num_return_sequences": 2},
    "sampling": {"do_sample": True},
    "sampling-warped": {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 20},
    "samples-a-prompt": {"do_sample": True, "num_return_sequences": 3},
    "logits-processor": {"logits_processor": LogitsProcessorList([_PreferEven()])},
    "stopping-criteria": {"stopping_criteria": StoppingCriteriaList([_StopAtLength()])},
    "repetition-penalty": {"repetition_penalty": 1.7},
    "no-repeated-pairs": {"no_repeat_ngram_size": 2},
    "suppressed": {"suppress_tokens": list(range(0, 256, 3))},
    "suppressed-first": {"begin_suppress_tokens": list(range(3, 250))},
    "bad-words": {"bad_words_ids": [[i] for i in range(3, 200)]},
    "forced-end": {"forced_eos_token_id": 9, "eos_token_id": 9},
    "allowed-tokens": {"prefix_allowed_tokens_fn": lambda row, ids: [3 + row, 11, 12 + len(ids)]},
    "no-cache": {"use_cache": False},
    "static-cache": {"cache_implementation": "static"},
    "attentions": {"return_dict_in_generate": True, "output_hidden_states": True},
    "renormalised": {"renormalize_logits": True, "return_dict_in_generate": True, "output_scores": True},
}


@pytest.mark.parametrize("name", LADDER)
def test_what_is_not_native_equals_transformers(shared: Pair, name: str) -> None:
    ids, mask = families.left_padded((9, 6))
    shared.check(ids, attention_mask=mask, seed=3, **GREEDY | LADDER[name])


@pytest.mark.parametrize("name", ["beams", "logits-processor", "repetition-penalty", "sampling", "suppressed-first"])
def test_ladder_cases_have_an_effect(shared: Pair, name: str) -> None:
    """Ignoring the argument would be noticed: it changes transformers' own result."""
    ids, _ = families.left_padded((9, 6))
    torch.manual_seed(3)
    assert not torch.equal(
        shared.original.generate(ids, **GREEDY | LADDER[name]),
        shared.original.generate(ids, **GREEDY),
    )


def test_assistant_model(shared: Pair) -> None:
    assistant = families.build("llama-one-layer-multi-query")
    shared.check(families.prompt(1, 9), assistant_model=assistant, **GREEDY)


def test_injected_assistant_model(shared: Pair) -> None:
    assistant = families.build("llama-one-layer-multi-query")
    segki.inject(assistant)
    shared.check(families.prompt(1, 9), assistant_model=assistant, **GREEDY)


def test_prompt_lookup(shared: Pair) -> None:
    ids = families.prompt(1, 5).repeat(1, 3)
    shared.check(ids, prompt_lookup_num_tokens=2, **GREEDY)


def test_processor_that_repeats_a_rule(shared: Pair) -> None:
    """A caller's own processor goes down the ladder even where segki knows the rule."""
    ids, eos = stops_apart()
    processor = LogitsProcessorList([MinLengthLogitsProcessor(ids.shape[1] + 7, eos)])
    shared.check(ids, logits_processor=processor, **GREEDY, eos_token_id=eos)


def test_default_sampling_configuration(pair: Pair) -> None:
    """A checkpoint whose generation_config samples by default must sample."""
    for model in (pair.original, pair.model):
        model.generation_config.do_sample = True
        model.generation_config.temperature = 1.3
    pair.check(families.prompt(2, 9), seed=11, max_new_tokens=12)


def test_fallback_is_logged_once_with_its_reason(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    ids = families.prompt(1, 9)
    with caplog.at_level(logging.DEBUG, logger="segki"):
        pair.model.generate(ids, **GREEDY)
        native = [record for record in caplog.records if record.levelno >= logging.WARNING]
        for _ in range(3):
            pair.model.generate(ids, num_beams=2, **GREEDY)
    records = [record for record in caplog.records if record.levelno >= logging.INFO and "beam" in record.getMessage()]
    assert not native, "the native path falls back silently or warns about nothing"
    assert len(records) == 1, [record.getMessage() for record in records]
    assert records[0].name.startswith("segki")


# ------------------------------------------------------------------------------------------------- calls in a row


def test_repeated_calls(shared: Pair) -> None:
    ids = families.prompt(2, 9)
    first = shared.model.generate(ids, **GREEDY)
    for _ in range(3):
        assert torch.equal(shared.model.generate(ids, **GREEDY), first)
    shared.check(ids, **GREEDY)


def test_smaller_and_larger_batches_and_lengths_in_turn(shared: Pair) -> None:
    for rows, length, steps in ((1, 3, 4), (8, 20, 12), (2, 9, 30), (5, 1, 3), (1, 60, 20), (8, 2, 5), (1, 1, 1)):
        shared.check(families.prompt(rows, length, seed=rows), **GREEDY | {"max_new_tokens": steps})


def test_many_rows(shared: Pair) -> None:
    shared.check(families.prompt(70, 5), **GREEDY | {"max_new_tokens": 4})


def test_fallback_between_native_calls(shared: Pair) -> None:
    ids = families.prompt(2, 9)
    for kwargs in ({}, {"num_beams": 2}, {}, {"use_cache": False}, {}):
        shared.check(ids, **GREEDY | kwargs)


def test_two_injected_models_in_turn(shared: Pair) -> None:
    other = new_pair("qwen3")
    for _ in range(2):
        shared.check(families.prompt(2, 9), **GREEDY)
        other.check(families.prompt(3, 7), **GREEDY)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_gradient_modes(shared: Pair, context: Any) -> None:
    with context():
        assert not shared.check(families.prompt(2, 9), **GREEDY).requires_grad


def test_random_state_is_left_alone(shared: Pair) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    shared.model.generate(families.prompt(2, 9), **GREEDY)
    assert torch.equal(torch.get_rng_state(), before)


def test_generate_without_touching_the_model() -> None:
    original = families.build("llama")
    model = copy.deepcopy(original)
    ids, mask = families.left_padded((9, 4))
    got = segki.generate(model, ids, attention_mask=mask, **GREEDY)
    assert_same_output(got, original.generate(ids, attention_mask=mask, **GREEDY))
    assert "generate" not in vars(model)
    assert not any("forward" in vars(module) for module in model.modules())


# ------------------------------------------------------------------------------------------------- the model's weights


def test_weights_changed_in_place_are_followed(pair: Pair) -> None:
    ids = families.prompt(2, 9)
    first = pair.check(ids, **GREEDY)
    with torch.no_grad():
        for model in (pair.original, pair.model):
            generator = torch.Generator().manual_seed(9)
            for parameter in model.parameters():
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator) * parameter.std())
    assert not torch.equal(pair.check(ids, **GREEDY), first)


@pytest.mark.parametrize("how", ["parameter", "data", "load_state_dict", "assign"])
def test_weights_replaced_are_followed(pair: Pair, how: str) -> None:
    """A stale weight is never used: each way to give a module another tensor shows in the next call."""
    ids = families.prompt(2, 9)
    first = pair.check(ids, **GREEDY)
    other = families.build("llama", seed=4).state_dict()
    for model in (pair.original, pair.model):
        if how in ("load_state_dict", "assign"):
            model.load_state_dict(copy.deepcopy(other), assign=how == "assign")
            continue
        for name in ("model.layers.2.mlp.gate_proj", "model.layers.0.self_attn.q_proj", "model.norm", "lm_head"):
            module = model.get_submodule(name)
            if how == "data":
                module.weight.data = other[f"{name}.weight"].clone()
            else:
                module.weight = torch.nn.Parameter(other[f"{name}.weight"].clone())
    assert not torch.equal(pair.check(ids, **GREEDY), first)


def test_training_step_between_generations(pair: Pair) -> None:
    ids = families.prompt(2, 9)
    first = pair.check(ids, **GREEDY)
    for model in (pair.original, pair.model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(2):
            optimizer.zero_grad()
            model(ids, labels=ids).loss.backward()
            optimizer.step()
    assert not torch.equal(pair.check(ids, **GREEDY), first)


def test_tied_weights_stay_tied() -> None:
    pair = new_pair("llama-odd-tied-biased")
    ids = families.prompt(2, 9)
    with torch.no_grad():
        for model in (pair.original, pair.model):
            model.get_input_embeddings().weight.mul_(-1.5)
    assert pair.model.lm_head.weight is pair.model.get_input_embeddings().weight
    pair.check(ids, **GREEDY)


def test_gradients_are_the_same(pair: Pair) -> None:
    ids = families.prompt(3, 11)
    losses = []
    for model in (pair.original, pair.model):
        model.train()
        loss = model(ids, labels=ids).loss
        loss.backward()
        losses.append(loss.detach())
    assert torch.allclose(losses[1], losses[0], rtol=1e-5)
    for (name, want), got in zip(pair.original.named_parameters(), pair.model.parameters(), strict=True):
        assert want.grad is not None and got.grad is not None, name
        assert (got.grad - want.grad).abs().max() <= 1e-4 * want.grad.abs().max(), name


def test_generation_in_training_mode_keeps_the_mode(pair: Pair) -> None:
    pair.original.train()
    pair.model.train()
    pair.check(families.prompt(2, 9), **GREEDY)
    assert all(module.training for module in pair.model.modules())


# ------------------------------------------------------------------------------------------------- batch invariance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_are_bit_identical_alone_and_in_a_batch(dtype: torch.dtype) -> None:
    """A row's tokens and logits do not depend on what else is in the batch.

    The prefill is torch's: its products must themselves be independent of the batch for these sizes, which is checked first.
    """
    pair = new_pair("llama", dtype)
    ids = families.prompt(8, 13)
    alone_ids = [ids[row : row + 1] for row in range(8)]
    with torch.no_grad():
        prefill = torch.cat([pair.original(row).logits for row in alone_ids])
        if not torch.equal(pair.original(ids).logits, prefill):
            pytest.skip("torch's own prefill depends on the batch on this machine")
    kwargs = GREEDY | {"return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 20}
    batch = pair.model.generate(ids, **kwargs)
    forced = families.prompt(8, 20, seed=77)
    forced_batch = segki.testing.teacher_forced_logits(pair.model, ids, torch.ones_like(ids), forced)
    for row, row_ids in enumerate(alone_ids):
        alone = pair.model.generate(row_ids, **kwargs)
        assert torch.equal(alone.sequences[0], batch.sequences[row])
        # The first logits come from the prefill's one-row product with the LM head, which torch sums in another order in a batch.
        for step, (a, b) in list(enumerate(zip(alone.logits, batch.logits, strict=True)))[1:]:
            assert torch.equal(a[0], b[row]), f"row {row}, step {step}: logits differ by {(a[0] - b[row]).abs().max()}"
        one = segki.testing.teacher_forced_logits(pair.model, row_ids, torch.ones_like(row_ids), forced[row : row + 1])
        assert torch.equal(one[0, 1:], forced_batch[row, 1:]), f"row {row}: forced logits differ"


def test_equal_rows_are_bit_identical_at_every_place_of_a_batch(shared: Pair) -> None:
    ids = families.prompt(1, 13).repeat(11, 1)
    forced = families.prompt(1, 20, seed=77).repeat(11, 1)
    logits = segki.testing.teacher_forced_logits(shared.model, ids, torch.ones_like(ids), forced)
    assert all(torch.equal(logits[row], logits[0]) for row in range(1, 11))


def test_two_runs_are_bit_identical(shared: Pair) -> None:
    kwargs = GREEDY | {"return_dict_in_generate": True, "output_logits": True}
    first, second = (shared.model.generate(families.prompt(3, 9), **kwargs) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.logits, second.logits, strict=True))


@pytest.mark.parametrize("kwargs", [{}, {"eos_token_id": [5, 6]}, {"min_new_tokens": 2, "eos_token_id": 5}], ids=str)
@pytest.mark.parametrize("dictionary", [False, True])
def test_greedy_calls_are_native(shared: Pair, kwargs: dict[str, Any], dictionary: bool) -> None:
    """None of torch's products runs after the prefill."""
    ids, mask = families.left_padded((5, 3))
    extra = {"return_dict_in_generate": True, "output_logits": True, "output_scores": True} if dictionary else {}

    def products(steps: int) -> int:
        arguments = GREEDY | kwargs | extra | {"max_new_tokens": steps}
        return torch_products(lambda: shared.model.generate(ids, attention_mask=mask, **arguments))

    assert products(3) == products(9) > 0


# ------------------------------------------------------------------------------------------------- positions


def given_positions(case: str) -> torch.Tensor:
    """Positions of 2 prompts of 7 tokens: far from 0, with a jump, or restarting."""
    counted = torch.arange(7).expand(2, 7)
    if case == "shifted":
        return counted + torch.tensor([[5], [90]])
    if case == "one row for all":
        return counted[:1] + 3
    if case == "with a jump":
        return torch.cat([counted[:, :4], counted[:, 4:] + 20], dim=1)
    return torch.cat([counted[:, :4], counted[:, :3]], dim=1)


@pytest.mark.parametrize("case", ["shifted", "one row for all", "with a jump", "restarting"])
@pytest.mark.parametrize("model", ["llama", "gpt2", "gemma3_text"])
def test_given_position_ids(model: str, case: str) -> None:
    pair = new_pair(model)
    ids = families.prompt(2, 7)
    output = pair.check(ids, **GREEDY, position_ids=given_positions(case), return_dict_in_generate=True, output_logits=True)
    assert not segki.explain(pair.model).fallbacks
    if case == "with a jump":
        plain = pair.original.generate(ids, **GREEDY, return_dict_in_generate=True, output_logits=True)
        assert (output.logits[3] - plain.logits[3]).abs().max() > 1e-3, "positions matter"


# ------------------------------------------------------------------------------------------------- one generation at a time


def test_threads_on_one_model(shared: Pair) -> None:
    prompts = [families.prompt(1, 5 + i, seed=i) for i in range(4)]
    wanted = [shared.original.generate(ids, **GREEDY) for ids in prompts]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            got = list(pool.map(lambda ids: shared.model.generate(ids, **GREEDY), prompts))
            assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))


def test_a_streamer_that_generates(shared: Pair) -> None:
    class Nested:
        def __init__(self, model: Any) -> None:
            self.model, self.got = model, []

        def put(self, value: torch.Tensor) -> None:
            self.got.append(value.tolist())
            self.got.append(self.model.generate(families.prompt(1, 4, seed=9), **GREEDY).tolist())

        def end(self) -> None:
            pass

    streamers = [Nested(model) for model in (shared.original, shared.model)]
    for streamer in streamers:
        streamer.model.generate(families.prompt(1, 6), streamer=streamer, **GREEDY)
    assert streamers[0].got == streamers[1].got


@pytest.mark.parametrize("case", ["llama", "qwen3_5_text"])
def test_inference_mode_first_and_none_later(case: str) -> None:
    pair = new_pair(case)
    with torch.inference_mode():
        pair.check(families.prompt(1, 5), **GREEDY)
    pair.check(families.prompt(1, 5), **GREEDY)
    with torch.no_grad():
        pair.check(families.prompt(2, 7), **GREEDY)
