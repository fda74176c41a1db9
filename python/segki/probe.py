"""The last check before a model is bound: its own forward and the native step on the same tokens."""

from __future__ import annotations

from typing import Any

import torch

from segki.engine import Decode, Engine, StopSpec

TOKENS = 6

# Largest difference of the logits over their largest magnitude. fp32 differs by reduction order alone; in bf16 and fp16 a rounding that
# falls the other way in one layer is carried through the next ones, while a wrong formula shows at the size of the logits themselves.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 6e-2, torch.float16: 1e-2}


def native_logits(engine: Engine, ids: torch.Tensor) -> torch.Tensor:
    """Logits of the native step for each position of `ids`, i64 `[rows, T]`, from an empty cache: f32 `[rows, T, V]`."""
    rows, tokens = ids.shape
    step = engine.step(rows, tokens + 1)
    state = step.state
    for tensor in (state.lengths, state.positions, state.frozen):
        tensor.zero_()
    assert engine.cache is not None
    for slot in range(rows):
        engine.cache.reset(slot)
    result = []
    for t in range(tokens):
        state.next.copy_(ids[:, t])
        step.program.run()
        result.append(state.logits.clone())
        state.lengths.add_(1)
        state.positions.add_(1)
    return torch.stack(result, 1)


@torch.no_grad()
def native_problem(model: Any, engine: Engine) -> str | None:
    """Why the native step must not be used, or None when it agrees with the model's own forward."""
    generator = torch.Generator().manual_seed(20)
    ids = torch.randint(0, engine.plan.vocab_size, (1, TOKENS), generator=generator)
    training = model.training
    model.eval()
    try:
        own = model(input_ids=ids, use_cache=False).logits.float()
    finally:
        model.train(training)
    ours = native_logits(engine, ids)
    scale = own.abs().max()
    errors = (ours - own).abs().amax(dim=(0, 2)) / scale if scale > 0 else ours.abs().amax(dim=(0, 2))
    # In half precision a router with two nearly equal experts may choose the other one: a token here and there.
    routed = engine.dtype != torch.float32 and any(node.moe for layer in engine.plan.layers for node in layer.nodes)
    error = float(errors.median() if routed else errors.max())
    if not bool(torch.isfinite(ours).all()) or error > TOLERANCE[engine.dtype]:
        return f"the native step's logits differ from the model's by {error:.2g} of their size (accepted {TOLERANCE[engine.dtype]:g})"
    return None


def forced_decode(engine: Engine, step_logits: torch.Tensor, forced: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Logits of each decode step when the given tokens are taken instead of chosen ones.

    Parameters
    ----------
    step_logits
        The prompt's last logits, f32 `[rows, V]`.
    forced
        i64 `[rows, T]`.
    lengths
        i64 `[rows]`, prompt tokens of each row in the cache.

    Returns
    -------
    f32 `[rows, T, V]`: the logits from which each of the T tokens would have been chosen.
    """
    rows, tokens = forced.shape
    step = engine.step(rows, int(lengths.max()) + tokens)
    rule = StopSpec(max_new_tokens=tokens, check_every=1)
    decode = Decode(engine, step, lengths.to(torch.int32), rule, forced=forced.contiguous())
    result = [step_logits.clone()]
    decode.first(step_logits)

    def keep(begin: int, count: int) -> bool:
        result.append(step.state.logits.clone())
        return True

    if tokens > 1:
        decode.run(keep)
    return torch.stack(result, 1)
