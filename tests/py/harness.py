"""Compare a patched model with the transformers original: greedy tokens, and logits step by step along given tokens.

Tokens alone hide an error of a few percent; logits along the same tokens show it at the step where it happens.

Three sources of logits are used, all (rows, steps, vocabulary) in float32, where step t is the distribution from which
continuation token t is chosen:

- `hf_forced_logits`: transformers' own generate, made to choose the given tokens;
- `native_forced_logits`: segki's native step, given the same tokens;
- the logits that generate returns beside its own greedy tokens.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LogitsProcessor, LogitsProcessorList

import segki
import segki.testing
from families import cast, left_padded

FP32_TOLERANCE = 1e-4
"""Largest difference of logits in float32, as a share of the largest logit of the step."""

JUMP = 2.5  # one run's error of a step over the other's when they chose different experts
MIN_COUNTED = 0.4  # of all steps

ERROR_RATIO = 1.2
"""Largest error in bfloat16 or float16, as a multiple of the error that transformers makes in the same dtype."""

Patch = Callable[[Any], object]


@dataclass(frozen=True)
class Decoded:
    """What generate returned: tokens (rows, steps) after the prompt, and their raw logits (rows, steps, vocabulary)."""

    tokens: torch.Tensor
    logits: torch.Tensor


class _Force(LogitsProcessor):
    """Leaves only the given continuation to choose from."""

    def __init__(self, tokens: torch.Tensor, prompt_length: int) -> None:
        self.tokens, self.prompt_length = tokens, prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        token = self.tokens[:, input_ids.shape[1] - self.prompt_length, None]
        return torch.full_like(scores, float("-inf")).scatter(1, token, 0.0)


def greedy(model: Any, input_ids: torch.Tensor, mask: torch.Tensor | None, steps: int, **arguments: Any) -> Decoded:
    """`steps` greedy tokens by model.generate, no end-of-sequence token, with their raw logits."""
    settings: dict[str, Any] = {"max_new_tokens": steps, "do_sample": False, "pad_token_id": 0} | arguments
    output = model.generate(input_ids, attention_mask=mask, return_dict_in_generate=True, output_logits=True, **settings)
    logits = torch.stack(output.logits, 1).float()
    return Decoded(output.sequences[:, input_ids.shape[1] :], logits)


def greedy_tokens(model: Any, input_ids: torch.Tensor, mask: torch.Tensor | None, steps: int) -> torch.Tensor:
    """The same tokens (rows, steps) by the plain call, which returns nothing else."""
    output = model.generate(input_ids, attention_mask=mask, max_new_tokens=steps, do_sample=False, pad_token_id=0)
    return output[:, input_ids.shape[1] :]


def hf_forced_logits(model: Any, input_ids: torch.Tensor, mask: torch.Tensor | None, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of the model's own prefill and decode steps along `tokens` (rows, steps)."""
    force = LogitsProcessorList([_Force(tokens, input_ids.shape[1])])
    decoded = greedy(model, input_ids, mask, tokens.shape[1], logits_processor=force)
    assert torch.equal(decoded.tokens, tokens), "the run left the tokens it was given"
    return decoded.logits


def native_forced_logits(model: Any, input_ids: torch.Tensor, mask: torch.Tensor | None, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of segki's native steps along `tokens` (rows, steps); RuntimeError where there is no native step."""
    attention_mask = torch.ones_like(input_ids) if mask is None else mask
    logits = segki.testing.teacher_forced_logits(model, input_ids, attention_mask, tokens)
    assert logits.shape[:2] == tokens.shape, f"logits {tuple(logits.shape)} for tokens {tuple(tokens.shape)}"
    return logits.float()


@dataclass(frozen=True)
class Comparison:
    """A patched model beside the original; tokens are (rows, steps), logits (rows, steps, vocabulary)."""

    rung: int
    reference: Decoded
    decoded: Decoded
    plain_tokens: torch.Tensor
    """Tokens of a second call of generate, which returns nothing else."""
    reference_forced: torch.Tensor
    forced: torch.Tensor

    def assert_same_tokens(self) -> None:
        """Tokens are those of transformers; after a near-tie of its two best logits a row may differ, with a warning."""
        for tokens in (self.decoded.tokens, self.plain_tokens):
            assert tokens.shape == self.reference.tokens.shape, f"{tokens.shape} against {self.reference.tokens.shape}"
            for row in range(tokens.shape[0]):
                different = (tokens[row] != self.reference.tokens[row]).nonzero()
                if not len(different):
                    continue
                step = int(different[0])
                logits = self.reference.logits[row, step]
                best = logits.topk(2).values
                margin = float((best[0] - best[1]) / logits.abs().max())
                assert margin <= 2 * FP32_TOLERANCE, (
                    f"row {row}: token {int(tokens[row, step])} at step {step}, "
                    f"transformers chose {int(self.reference.tokens[row, step])} by {margin:.1e} of the largest logit"
                )
                warnings.warn(f"row {row}, step {step}: a near-tie ({margin:.1e}) chose otherwise", stacklevel=2)

    def assert_close(self, tolerance: float = FP32_TOLERANCE) -> None:
        """Logits agree at each step, along the given tokens and along the greedy ones."""
        _assert_steps_close("given tokens", self.forced, self.reference_forced, tolerance)
        same = (self.decoded.tokens == self.reference.tokens).int().cumprod(1).bool()
        before = torch.cat((torch.ones_like(same[:, :1]), same[:, :-1]), 1)  # rows still on the reference's tokens
        keep = before[:, :, None]
        _assert_steps_close("greedy tokens", self.decoded.logits * keep, self.reference.logits * keep, tolerance)


@dataclass(frozen=True)
class RoundingComparison:
    """Logits (rows, steps, vocabulary) along the same tokens: transformers in low precision, the patched model, and float32.

    `exact` is the float32 forward of the same low-precision weights.
    """

    rung: int
    reference: torch.Tensor
    forced: torch.Tensor
    exact: torch.Tensor

    def error_ratios(self, routed: bool = False) -> tuple[float, float]:
        """Error against float32 over transformers' own: of the mean, and of the mean largest a step.

        The first step is left out: both take it from the same prefill. With `routed`, a row counts up to the first step in which
        the two low-precision runs chose different experts (two nearly equal ones: one error is several times the other), since
        what follows are two computations; most steps must come before that.
        """
        own = (self.reference - self.exact)[:, 1:].abs()
        ours = (self.forced - self.exact)[:, 1:].abs()
        assert bool(own.mean() > 0), "transformers made no rounding error: nothing to compare with"
        if routed:
            ratio = ours.mean(-1) / own.mean(-1)
            counted = ((ratio < JUMP) & (ratio > 1 / JUMP)).int().cumprod(1).bool()
            share = float(counted.float().mean())
            assert share >= MIN_COUNTED, f"only {share:.0%} of the steps come before another choice of experts"
            own, ours = own[counted], ours[counted]
        return float(ours.mean() / own.mean()), float(ours.amax(-1).mean() / own.amax(-1).mean())

    def assert_no_worse(self, limit: float = ERROR_RATIO, *, routed: bool = False) -> None:
        """The error against float32 is at most `limit` times transformers' own; `routed` for models with experts."""
        assert torch.isfinite(self.forced).all(), "logits are not finite"
        if torch.equal(self.forced, self.reference):
            return
        mean, largest = self.error_ratios(routed)
        assert mean <= limit, f"mean error {mean:.3f} times transformers' own, at most {limit}"
        assert largest <= limit, f"largest error a step {largest:.3f} times transformers' own, at most {limit}"


def _assert_steps_close(what: str, logits: torch.Tensor, reference: torch.Tensor, tolerance: float) -> None:
    assert logits.shape == reference.shape, f"{what}: {tuple(logits.shape)} against {tuple(reference.shape)}"
    assert torch.isfinite(logits).all(), f"{what}: logits are not finite"
    for step in range(reference.shape[1]):
        difference = float((logits[:, step] - reference[:, step]).abs().max())
        largest = float(reference[:, step].abs().max())
        assert difference <= tolerance * largest, (
            f"{what}, step {step}: logits differ by {difference:.3e}, "
            f"{difference / largest:.1e} of the largest ({tolerance} allowed)"
        )


@dataclass(frozen=True)
class Prompts:
    """Rows of token ids, padded on the left with id 0, and tokens to force after them."""

    input_ids: torch.Tensor
    mask: torch.Tensor | None
    forced: torch.Tensor

    @staticmethod
    def random(model: Any, lengths: tuple[int, ...], steps: int, seed: int = 1) -> Prompts:
        """Random prompts of these lengths, one a row, and `steps` random tokens to force; no mask where nothing is padded."""
        ids, mask = left_padded(lengths, seed)
        generator = torch.Generator().manual_seed(seed + 1)
        forced = torch.randint(3, model.config.vocab_size, (len(lengths), steps), generator=generator)
        return Prompts(ids, None if bool(mask.all()) else mask, forced)


def _patched(original: Any, patch: Patch) -> tuple[Any, int]:
    """A patched copy and its rung."""
    model = copy.deepcopy(original)
    patch(model)
    return model, int(segki.explain(model).rung)


def _forced(model: Any, rung: int, prompts: Prompts) -> torch.Tensor:
    if rung == 1:
        try:
            return native_forced_logits(model, prompts.input_ids, prompts.mask, prompts.forced)
        except RuntimeError as error:
            if "tables end" not in str(error):  # a prompt longer than the model's fixed tables goes down the ladder
                raise
    return hf_forced_logits(model, prompts.input_ids, prompts.mask, prompts.forced)


@torch.no_grad()
def compare_decode(
    original: Any,
    patch: Patch = segki.inject,
    lengths: tuple[int, ...] = (13,),
    steps: int = 12,
    prompts: Prompts | None = None,
) -> Comparison:
    """Decode with a model and with a patched copy of it, greedily and along given tokens.

    Parameters
    ----------
    original
        the model; it is left as it is.
    patch
        changes the copy in place.
    lengths
        prompt lengths, one a row; shorter rows are padded on the left.
    steps
        tokens decoded.
    prompts
        used in place of random ones.
    """
    model, rung = _patched(original, patch)
    prompts = prompts or Prompts.random(original, lengths, steps)
    ids, mask = prompts.input_ids, prompts.mask
    return Comparison(
        rung=rung,
        reference=greedy(original, ids, mask, steps),
        decoded=greedy(model, ids, mask, steps),
        plain_tokens=greedy_tokens(model, ids, mask, steps),
        reference_forced=hf_forced_logits(original, ids, mask, prompts.forced),
        forced=_forced(model, rung, prompts),
    )


@torch.no_grad()
def compare_rounding(
    original: Any,
    patch: Patch = segki.inject,
    lengths: tuple[int, ...] = (13, 13, 9, 13),
    steps: int = 16,
    prompts: Prompts | None = None,
) -> RoundingComparison:
    """Logits of a low-precision model, of a patched copy and of a float32 copy along the same tokens."""
    model, rung = _patched(original, patch)
    prompts = prompts or Prompts.random(original, lengths, steps)
    forced = _forced(model, rung, prompts)
    reference = hf_forced_logits(original, prompts.input_ids, prompts.mask, prompts.forced)
    exact = reference
    if not torch.equal(forced, reference):
        exact_model = cast(copy.deepcopy(original), torch.float32)
        exact = hf_forced_logits(exact_model, prompts.input_ids, prompts.mask, prompts.forced)
    return RoundingComparison(rung=rung, reference=reference, forced=forced, exact=exact)


# ------------------------------------------------------------------------------------------------- what ran


class _CountProducts(TorchDispatchMode):
    """Counts torch's own matrix products and attentions."""

    NAMES = ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "linear", "dot")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.count += name in self.NAMES or name.startswith("_scaled_dot_product")
        return func(*args, **(kwargs or {}))


def torch_products(run: Callable[[], object]) -> int:
    """Matrix products that torch computes during `run`; a native step adds none."""
    with _CountProducts() as counter:
        run()
    return counter.count


# ------------------------------------------------------------------------------------------------- what changed


def module_state(model: nn.Module) -> dict[str, tuple[type, dict[str, Any]]]:
    """Class and instance attributes of every module; containers are copied one level deep."""
    return {
        name: (type(module), {k: copy.copy(v) if isinstance(v, (dict, list, set)) else v for k, v in vars(module).items()})
        for name, module in model.named_modules()
    }


def assert_same_modules(model: nn.Module, before: dict[str, tuple[type, dict[str, Any]]]) -> None:
    """Every module has the class and the instance attributes (the same objects) that `module_state` saw."""
    after = module_state(model)
    assert list(after) == list(before), "the module tree changed"
    for name, (cls, attributes) in before.items():
        now_cls, now = after[name]
        where = f"module {name!r}"
        assert now_cls is cls, f"{where} became a {now_cls.__name__}, was a {cls.__name__}"
        assert list(now) == list(attributes), f"{where}: attributes changed: {set(now) ^ set(attributes)}"
        for key, value in attributes.items():
            assert _same(value, now[key]), f"{where}: attribute {key!r} changed"


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, (torch.Tensor, nn.Module)):
        return False
    return bool(a == b)


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of the state dict."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same_weights(model: nn.Module, before: dict[str, torch.Tensor]) -> None:
    """Names, dtypes and bits of the state dict are those of `weights`."""
    after = model.state_dict()
    assert list(after) == list(before)
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype and torch.equal(after[name], tensor), f"{name} changed"
