"""The rebound forward of GatedDeltaNet blocks: prompts, states, packed sequences and gradients are the model's own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers.cache_utils import DynamicCache

import families
from harness import ERROR_RATIO, FP32_TOLERANCE
from segki import gdn
from segki.detect import detect
from segki.packed import packing_notes, sequence_starts, spans_of
from segki.plan import GdnPlan
from segki.rebind import Rebound

HYBRID = ["qwen3_5_text", "qwen3_next", "olmo_hybrid"]


def plans_of(model: Any) -> dict[str, GdnPlan]:
    plans = {s.module: s.plan for s in detect(model).segments if isinstance(s.plan, GdnPlan)}
    assert plans
    return plans


def rebind(model: Any) -> list[Rebound]:
    rebounds = gdn.rebind_gdn(model, plans_of(model))
    for rebound in rebounds:
        rebound.install()
    return rebounds


class Both:
    """A model and a copy of it whose GatedDeltaNet blocks are rebound; counts the prompts that run on the native op."""

    def __init__(self, family: str, dtype: torch.dtype = torch.float32) -> None:
        self.original = families.build(family, dtype)
        self.model = families.build(family, dtype)
        self.rebounds = rebind(self.model)
        self.native = 0

    def layers(self) -> list[int]:
        return [i for i, kind in enumerate(self.original.config.layer_types) if kind == "linear_attention"]


@pytest.fixture
def both(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Both:
    """Of the family that the test is parametrised with."""
    pair = Both(request.param)
    run = gdn.Block.run

    def counted(*args: Any) -> Any:
        pair.native += 1
        return run(*args)

    monkeypatch.setattr(gdn.Block, "run", counted)
    return pair


each_family = pytest.mark.parametrize("both", HYBRID, indirect=True)


def assert_near(got: torch.Tensor, want: torch.Tensor, tolerance: float = FP32_TOLERANCE) -> None:
    assert got.shape == want.shape and got.dtype == want.dtype
    error = (got.double() - want.double()).abs().max()
    assert float(error) <= tolerance * float(want.double().abs().max()), float(error)


def forward(model: Any, ids: torch.Tensor, cache: Any = None, **kwargs: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, cache=cache, use_cache=cache is not None, **kwargs).logits  # type: ignore[no-any-return]


def new_cache(model: Any) -> DynamicCache:
    return DynamicCache(config=model.config)


def assert_same_states(got: DynamicCache, want: DynamicCache, layers: list[int]) -> None:
    for layer in layers:
        assert_near(got.get_conv_state(layer), want.get_conv_state(layer))
        assert_near(got.get_recurrent_state(layer), want.get_recurrent_state(layer))


@each_family
@pytest.mark.parametrize("length", [2, 3, 64, 65, 150])
@pytest.mark.parametrize("rows", [1, 3])
def test_prompts_and_states(both: Both, rows: int, length: int) -> None:
    ids = families.prompt(rows, length)
    assert_near(forward(both.model, ids), forward(both.original, ids))
    caches = new_cache(both.original), new_cache(both.original)
    assert_near(forward(both.model, ids, caches[0]), forward(both.original, ids, caches[1]))
    assert_same_states(*caches, both.layers())
    assert both.native == 2 * len(both.layers())


@each_family
def test_left_padded_rows(both: Both) -> None:
    ids, mask = families.left_padded((90, 70, 3, 1))
    caches = new_cache(both.original), new_cache(both.original)
    got = forward(both.model, ids, caches[0], attention_mask=mask)
    want = forward(both.original, ids, caches[1], attention_mask=mask)
    assert_near(got[mask == 1], want[mask == 1])
    assert_same_states(*caches, both.layers())
    assert both.native == len(both.layers())
    for row, length in enumerate((90, 70, 3, 1)):
        assert_near(got[row, -length:], forward(both.original, ids[row : row + 1, -length:])[0])


@each_family
@pytest.mark.parametrize("side", ["right", "middle"])
def test_other_masks_run_on_the_own_forward(both: Both, side: str) -> None:
    ids = families.prompt(2, 12)
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    if side == "middle":
        mask = mask.roll(-4, 1)
    assert_near(forward(both.model, ids, attention_mask=mask), forward(both.original, ids, attention_mask=mask), 1e-7)
    assert both.native == 0


@each_family
def test_a_prompt_in_pieces(both: Both) -> None:
    """Pieces longer and shorter than the convolution, single tokens among them."""
    ids = families.prompt(2, 100)
    caches = new_cache(both.original), new_cache(both.original)
    begin = 0
    for end in (2, 5, 6, 75, 77, 100):
        piece = ids[:, begin:end]
        assert_near(forward(both.model, piece, caches[0]), forward(both.original, piece, caches[1]))
        assert_same_states(*caches, both.layers())
        assert int(caches[0].get_seq_length()) == int(caches[1].get_seq_length()) == end
        begin = end
    assert both.native == 5 * len(both.layers())  # the single token is the own forward's


@each_family
def test_pads_in_a_continued_piece(both: Both) -> None:
    ids, mask = families.left_padded((20, 5))
    caches = new_cache(both.original), new_cache(both.original)
    for begin, end in ((0, 10), (10, 20)):
        arguments = {"attention_mask": mask[:, :end], "position_ids": torch.arange(begin, end).expand(2, -1)}
        got = forward(both.model, ids[:, begin:end], caches[0], **arguments)
        want = forward(both.original, ids[:, begin:end], caches[1], **arguments)
        assert_near(got[mask[:, begin:end] == 1], want[mask[:, begin:end] == 1])
    assert_same_states(*caches, both.layers())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", HYBRID)
def test_half_precision_errs_as_little_as_transformers(family: str, dtype: torch.dtype) -> None:
    """Of one block on the same inputs, output and both states; over several inputs, since one is a matter of luck."""
    original = families.build(family, dtype)
    model, exact = families.build(family, dtype), families.build(family, dtype).float()
    rebind(model)
    name = next(iter(plans_of(exact)))
    layer = exact.get_submodule(name).layer_idx
    errors: list[list[torch.Tensor]] = [[], []]
    for seed in range(8):
        torch.manual_seed(seed)
        x = torch.randn(2, 130, exact.config.hidden_size).to(dtype)
        want = block_values(exact, name, layer, x.float())
        for several, one in zip(errors, (model, original), strict=True):
            values = block_values(one, name, layer, x)
            several.append(torch.stack([(v.float() - w).square().mean() for v, w in zip(values, want, strict=True)]))
    ours, theirs = (torch.stack(several).mean(0).sqrt() for several in errors)
    assert bool((ours <= ERROR_RATIO * theirs + 1e-7).all()), (ours, theirs)


def block_values(model: Any, name: str, layer: int, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        out = model.get_submodule(name)(x, cache=cache)
    return out, cache.get_conv_state(layer), cache.get_recurrent_state(layer)


# --- Packed sequences

LENGTHS = (5, 1, 70, 2, 9)


def packed_arguments(way: str, lengths: tuple[int, ...] = LENGTHS) -> dict[str, Any]:
    """The ways of saying where the sequences of one row lie; full attention knows position_ids only."""
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    cumulative = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    index = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])[None].to(torch.int32)
    extra = {
        "cu_seq_lens_q": {"cu_seq_lens_q": cumulative, "cu_seq_lens_k": cumulative},
        "seq_idx": {"seq_idx": index},
        "all": {"seq_idx": index, "cu_seq_lens_q": cumulative, "cu_seq_lens_k": cumulative},
    }
    if way.startswith("mrope"):
        return {"position_ids": positions.expand(int(way[-1]), 1, -1)}
    return {"position_ids": positions} | extra.get(way, {})


WAYS = ["position_ids", "cu_seq_lens_q", "seq_idx", "all"]
FAMILY_WAYS = [(family, way) for family in HYBRID for way in WAYS] + [("qwen3_5_text", "mrope3"), ("qwen3_5_text", "mrope4")]
packed_ways = pytest.mark.parametrize(("both", "way"), FAMILY_WAYS, indirect=["both"])


def separate(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return torch.cat([model(piece, use_cache=False).logits for piece in ids.split(LENGTHS, 1)], 1)


@packed_ways
def test_packed_outputs_equal_separate_rows(both: Both, way: str) -> None:
    ids = families.prompt(1, sum(LENGTHS))
    with torch.no_grad():
        want = separate(both.original, ids)
    assert_near(forward(both.model, ids, **packed_arguments(way)), want)
    assert both.native == len(both.layers())


@packed_ways
@pytest.mark.parametrize("checkpointing", [False, True])
def test_packed_gradients_equal_separate_rows(both: Both, way: str, checkpointing: bool) -> None:
    ids = families.prompt(1, sum(LENGTHS))
    weights = torch.randn(1, sum(LENGTHS), both.original.config.vocab_size)
    if checkpointing:
        both.model.gradient_checkpointing_enable({"use_reentrant": False})
    both.model.train()
    got = both.model(ids, use_cache=False, **packed_arguments(way)).logits
    (got * weights).sum().backward()
    want = separate(both.original, ids)
    (want * weights).sum().backward()
    assert_near(got.detach(), want.detach())
    for (name, ours), theirs in zip(both.model.named_parameters(), both.original.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        if theirs.grad is not None:
            assert_near(ours.grad, theirs.grad)


@each_family
def test_packed_rows_of_a_batch(both: Both) -> None:
    """Each row has its own boundaries."""
    ids = families.prompt(2, 20)
    lengths = ((5, 15), (12, 1, 7))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    got = forward(both.model, ids, position_ids=positions)
    for row, row_lengths in enumerate(lengths):
        want = torch.cat([forward(both.original, piece) for piece in ids[row : row + 1].split(row_lengths, 1)], 1)
        assert_near(got[row : row + 1], want)
    assert both.native == len(both.layers())


@each_family
@pytest.mark.parametrize("gradients", [False, True])
def test_a_cache_gets_the_last_sequence(both: Both, gradients: bool) -> None:
    name = next(iter(plans_of(both.original)))
    layer = both.original.get_submodule(name).layer_idx
    x = torch.randn(1, 20, both.original.config.hidden_size)
    caches = new_cache(both.original), new_cache(both.original)
    with torch.set_grad_enabled(gradients):
        got = both.model.get_submodule(name)(x, cache=caches[0], cu_seq_lens_q=torch.tensor([0, 9, 18, 20]))
        want = both.original.get_submodule(name)(x[:, 18:], cache=caches[1])
    assert_near(got[:, 18:].detach(), want.detach())
    assert_same_states(*caches, [layer])


@each_family
def test_packed_sequences_are_not_recorded(both: Both) -> None:
    """A cache that may go back needs every input of the packed row; the sequences' own states do not tell them."""
    cache = new_cache(both.original)
    if not hasattr(cache, "get_recurrent_states_to_keep"):
        pytest.skip("recurrent states are recorded since transformers 5.25")
    cache.activate_past_recording(recurrent_states_to_keep=1)
    block = both.model.get_submodule(next(iter(plans_of(both.original))))
    with pytest.raises(NotImplementedError, match="records its past"):
        block(torch.randn(1, 20, both.original.config.hidden_size), cache=cache, cu_seq_lens_q=torch.tensor([0, 9, 20]))


def test_spans() -> None:
    assert spans_of({}, 2, 5) is None
    assert spans_of({"cu_seqlens": torch.tensor([0, 5, 10])}, 2, 5) is None
    assert spans_of({"cu_seqlens": [0, 2, 5, 8, 10]}, 2, 5) == [[(0, 2), (2, 5)], [(0, 3), (3, 5)]]
    assert spans_of({"seq_idx": torch.tensor([[0, 0, 1, 1, 2]])}, 2, 5) == [[(0, 2), (2, 4), (4, 5)]] * 2


def test_images_are_not_boundaries() -> None:
    """An image's patches share a temporal position; only a fresh start or a fall is a boundary."""
    image = torch.tensor([[0, 1, 2, 2, 2, 2, 4, 5], [0, 1, 2, 2, 3, 3, 4, 5], [0, 1, 2, 3, 2, 3, 4, 5]])[:, None]
    assert not sequence_starts(image).any()
    two = torch.cat([image, image], -1)
    assert sequence_starts(two).nonzero().tolist() == [[0, 8]]
    notes = packing_notes({"position_ids": two})
    assert notes["position_ids"][0].tolist() == [[*range(8), *range(8)]]


def test_masked_positions_are_not_boundaries() -> None:
    """generate's positions of a left-padded row fall once."""
    positions = torch.tensor([[1, 1, 0, 1, 2]])
    assert sequence_starts(positions).any()
    assert not packing_notes({"position_ids": positions, "attention_mask": torch.tensor([[0, 0, 1, 1, 1]])})


# --- Training, submodules and undoing


@each_family
def test_gradients_are_exactly_the_models_own(both: Both) -> None:
    ids = families.prompt(2, 21)
    for model in (both.model.train(), both.original.train()):
        model(ids, labels=ids).loss.backward()
    for (name, ours), theirs in zip(both.model.named_parameters(), both.original.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        assert theirs.grad is None or torch.equal(ours.grad, theirs.grad), name
    assert both.native == 0


@each_family
def test_weights_are_read_where_they_are(both: Both) -> None:
    ids = families.prompt(1, 30)
    for model in (both.model, both.original):
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + 0.1 * torch.rand(parameter.shape, generator=generator))
    assert_near(forward(both.model, ids), forward(both.original, ids))


@each_family
def test_hooks_and_adapters_of_projections_run(both: Both) -> None:
    """A wrapped projection is called; a hooked convolution sends the block to its own forward."""
    ids = families.prompt(1, 30)
    name, plan = next(iter(plans_of(both.original).items()))
    path = plan.projections[0].weight.name.rpartition(".")[0]
    calls = []

    class Adapter(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base_layer = base

        def forward(self, x: torch.Tensor) -> Any:
            calls.append(1)
            return self.base_layer(x) * 1.5

    for model in (both.model, both.original):
        model.set_submodule(path, Adapter(model.get_submodule(path)))
    assert_near(forward(both.model, ids), forward(both.original, ids))
    assert len(calls) == 2 and both.native == len(both.layers())
    both.model.get_submodule(f"{name}.conv1d").register_forward_hook(lambda *_: None)
    assert_near(forward(both.model, ids), forward(both.original, ids))
    assert both.native == 2 * len(both.layers()) - 1


@each_family
def test_autocast_and_other_dtypes_run_on_the_own_forward(both: Both) -> None:
    ids = families.prompt(1, 20)
    with torch.autocast("cpu", torch.bfloat16):
        assert_near(forward(both.model, ids), forward(both.original, ids), 1e-7)
    assert both.native == 0


@each_family
def test_undo(both: Both) -> None:
    before = {name: dict(vars(module)) for name, module in both.original.named_modules()}
    for rebound in reversed(both.rebounds):
        rebound.remove()
    for name, module in both.model.named_modules():
        assert vars(module).keys() == before[name].keys(), name
    ids = families.prompt(1, 20)
    assert torch.equal(forward(both.model, ids), forward(both.original, ids))
    assert both.native == 0


@each_family
def test_a_copy_is_a_plain_model(both: Both) -> None:
    twin = copy.deepcopy(both.model)
    ids = families.prompt(1, 20)
    assert torch.equal(forward(twin, ids), forward(both.original, ids))
    assert both.native == 0


def test_sequences_outside_of_the_tokens_are_refused() -> None:
    model = families.build("qwen3_5_text")
    name, plan = next(iter(plans_of(model).items()))
    block = gdn.Block(model.get_submodule(name), name, plan)
    with torch.no_grad(), pytest.raises(ValueError, match="'begins'"):
        block.run(torch.randn(1, 5, model.config.hidden_size), [[(0, 6)]], None)
