"""The forward of a GatedDeltaNet block: prompts on the native op, training on the block's own forward, packed sequences kept apart."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from segki import _segki
from segki.blocks import conv_channels, fill_gdn
from segki.detect import resolve
from segki.detect.guard import module_problem, tensor_problem
from segki.native import MODEL_DTYPES, view
from segki.packed import KEYWORDS, Spans, own_forward, spans_of, text_forward, text_model_of, without
from segki.plan import GdnPlan, LinearPlan, ParamRef
from segki.rebind import Rebound

CACHES = ("cache", "cache_params")


def rebind_gdn(model: nn.Module, plans: Mapping[str, GdnPlan], owner: object = None) -> list[Rebound]:
    """Forwards for the GatedDeltaNet blocks of a model and for the text models around them; `install()` and `remove()` each.

    Parameters
    ----------
    model
        The model that the plans' parameters are named in.
    plans
        The plan of each block, by the block's qualified name.
    owner
        Noted in each `Rebound`.
    """
    blocks = [Rebound(model.get_submodule(name), "forward", gdn_forward(model, name, plan), owner) for name, plan in plans.items()]
    around = [text for name in plans if (text := text_model_of(model, name)) is not None]
    return blocks + [Rebound(text, "forward", text_forward(text), owner) for text in dict.fromkeys(around)]


def gdn_forward(model: nn.Module, name: str, plan: GdnPlan) -> Callable[..., Any]:
    """A forward for the GatedDeltaNet block `name` of a model, with the arguments and results of the block's own.

    Without gradients, more than one token at once (with or without a past, left-padded or packed) run on the native op; its projections
    are called as the block's submodules and what is a parameter is read where it is. All else is the block's own forward, called once
    for each packed sequence.
    """
    module = model.get_submodule(name)
    previous = vars(module).get("forward")
    block = Block(module, name, plan)

    @functools.wraps(type(module).forward)
    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        own = own_forward(module, previous)
        if args or hidden_states.dim() != 3 or torch.compiler.is_compiling():
            return own(hidden_states, *args, **kwargs)
        spans = spans_of(kwargs, *hidden_states.shape[:2])
        if not torch.is_grad_enabled() and block.knows(hidden_states):
            places = places_of(hidden_states, kwargs, spans, block)
            if places is not None:
                return block.run(hidden_states, places, cache_of(kwargs))
        if spans is None:
            return own(hidden_states, **kwargs)
        return piecewise(own, hidden_states, spans, kwargs, block)

    return forward


def cache_of(kwargs: Mapping[str, Any]) -> Any:
    """The cache that a block is given, or None."""
    return next((kwargs[name] for name in CACHES if kwargs.get(name) is not None), None)


def places_of(x: Tensor, kwargs: Mapping[str, Any], spans: Spans | None, block: Block) -> Spans | None:
    """Where the sequences of a prompt `x` `[rows, tokens, H]` lie, one or more a row; None where the native op does not apply."""
    rows, tokens = x.shape[:2]
    mask, cache = kwargs.get("attention_mask"), cache_of(kwargs)
    past = False
    if tokens == 1:
        return None
    if cache is not None:
        if not hasattr(cache, "get_recurrent_state") or cache.is_recording_past(block.layer):
            return None
        past = cache.get_conv_state(block.layer) is not None
    if mask is None or bool((mask == 1).all()):
        return [[(0, tokens)] for _ in range(rows)] if spans is None else spans
    # The block runs over pads with zeros for hidden states, which moves a past; and it moves an empty one where there are biases.
    if past or spans is not None or block.biased or mask.shape != (rows, tokens):
        return None
    if not bool(((mask == 0) | (mask == 1)).all()):
        return None  # the block multiplies with it
    counts = (mask != 0).sum(-1).tolist()
    places = [[(tokens - int(count), tokens)] for count in counts]
    left = torch.arange(tokens, device=mask.device) >= torch.tensor([[place[0][0]] for place in places], device=mask.device)
    return places if bool((left == mask.bool()).all()) else None


class Block:
    """The native side of one GatedDeltaNet block."""

    def __init__(self, module: nn.Module, name: str, plan: GdnPlan) -> None:
        self.module, self.plan, self._prefix = module, plan, f"{name}."
        self.layer: int = getattr(module, "layer_idx", 0)
        called = {self._path(linear) for linear in (*plan.projections, plan.out)}
        # Submodules whose parameters are read instead of their being called.
        self._read = [
            child for path, child in module.named_modules() if path and not any(f"{path}.".startswith(f"{c}.") for c in called)
        ]

    @property
    def biased(self) -> bool:
        """Whether zeros at the block's input are anything else than zeros at its convolution's output."""
        return self.plan.conv_bias is not None or any(linear.bias is not None for linear in self.plan.projections)

    def lookup(self, ref: ParamRef) -> Tensor:
        """The live parameter that the plan names."""
        return resolve(self.module, ParamRef(ref.name.removeprefix(self._prefix), ref.rows))

    def _path(self, linear: LinearPlan) -> str:
        return linear.weight.name.removeprefix(self._prefix).rpartition(".")[0]

    def knows(self, x: Tensor) -> bool:
        """Whether the block can run natively on this input: everything on the CPU, of one known dtype, and nothing patched or hooked."""
        if type(x) is not Tensor or x.device.type != "cpu" or x.dtype not in MODEL_DTYPES or torch.is_autocast_enabled("cpu"):
            return False
        if any(module_problem("", child) is not None for child in self._read):
            return False
        assert self.plan.norm.weight is not None
        vectors = [self.plan.conv_weight, self.plan.norm.weight, *([self.plan.conv_bias] if self.plan.conv_bias else [])]
        numbers = [self.plan.a_log, self.plan.dt_bias]
        try:
            found = [(self.lookup(ref), (x.dtype,)) for ref in vectors] + [(self.lookup(ref), (x.dtype, torch.float32)) for ref in numbers]
        except ValueError:  # a submodule was exchanged
            return False
        return all(
            tensor_problem("", tensor) is None and tensor.dtype in dtypes and tensor.device.type == "cpu" for tensor, dtypes in found
        )

    def project(self, x: Tensor) -> list[Tensor]:
        """Outputs `[rows * tokens, width]` of the projections, each submodule called once."""
        outputs: dict[str, Tensor] = {}
        projected = []
        for linear in self.plan.projections:
            path = self._path(linear)
            if path not in outputs:
                outputs[path] = self.module.get_submodule(path)(x).flatten(0, 1).to(x.dtype).contiguous()
            wanted = linear.weight.rows
            projected.append(outputs[path] if wanted is None else outputs[path][:, wanted[0] : wanted[1]])
        return projected

    def run(self, x: Tensor, places: Spans, cache: Any) -> Any:
        """The block on `[rows, tokens, H]`; `places` are the sequences of each row, and a row's past goes into its first one."""
        rows, tokens = x.shape[:2]
        plan = self.plan
        projected = self.project(x)
        spans = [(row * tokens + begin, row * tokens + end) for row, row_places in enumerate(places) for begin, end in row_places]
        counts = [len(row_places) for row_places in places]
        args = _segki.GatedDeltaPrefillArgs()
        fill_gdn(args, plan, projected, self.lookup)
        begins, ends = torch.tensor(spans, dtype=torch.int32).t().contiguous()
        out = x.new_empty(rows * tokens, plan.value_heads * plan.value_dim)
        args.begins, args.ends, args.out = view(begins), view(ends), view(out)
        conv, state = None, None
        if cache is not None:
            conv, state, args.continued = self._states(x, counts, cache)
            args.conv_state, args.state = view(conv), view(state)
        _segki.gated_delta_prefill(_cpu(), args)
        if conv is not None and state is not None:
            last = torch.tensor(counts).cumsum(0) - 1
            keep_states(cache, self.layer, conv[last], state[last], tokens)
        return self.module.get_submodule(self._path(plan.out))(out.view(rows, tokens, -1))

    def _states(self, x: Tensor, counts: list[int], cache: Any) -> tuple[Tensor, Tensor, int]:
        """Convolution inputs and recurrent states of all sequences, and whether they hold a past."""
        plan, sequences = self.plan, sum(counts)
        conv = x.new_zeros(sequences, conv_channels(plan), plan.conv_width)
        state = torch.zeros(sequences, plan.value_heads, plan.key_dim, plan.value_dim, dtype=torch.float32)
        past_conv, past = cache.get_conv_state(self.layer), cache.get_recurrent_state(self.layer)
        if past_conv is None:
            return conv, state, 0
        first = torch.tensor(counts).cumsum(0) - torch.tensor(counts)
        conv[first] = past_conv[..., -plan.conv_width :].to(conv.dtype)
        state[first] = past.float()
        return conv, state, 1


def keep_states(cache: Any, layer: int, conv: Tensor, state: Tensor, tokens: int) -> None:
    """Give a cache of transformers the states after `tokens` more positions: the last inputs `[rows, C, width]` and the recurrent ones.

    Since transformers 5.25 linear layers count positions, by the inputs that they are given.
    """
    width = conv.shape[-1]
    cache.update_conv_state(conv, layer, conv_kernel_size=width)
    cache.update_recurrent_state(state, layer)
    counted = getattr(cache.layers[layer], "cumulative_length_linear", None) if hasattr(cache, "layers") else None
    if counted is not None:
        counted.add_(tokens - width)


@functools.lru_cache(maxsize=1)
def _cpu() -> _segki.Backend:
    return _segki.backend("cpu")


class PieceCache:
    """What a block's own forward asks of a cache, for one piece of one row."""

    def __init__(self, conv: Tensor | None, recurrent: Tensor | None) -> None:
        self.conv, self.recurrent = conv, recurrent

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Inputs before the piece, `[1, C, n]`."""
        return self.conv

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """State before the piece, `[1, heads, Dk, Dv]`."""
        return self.recurrent

    def is_recording_past(self, layer_idx: int) -> bool:
        """Never: pieces are not taken back."""
        return False

    def get_recurrent_states_to_keep(self, layer_idx: int | None = None) -> int:
        """None besides the newest."""
        return 0

    def increase_count(self, layer_idx: int, state_idx: int = 0) -> None:
        """Pieces are not counted."""

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Keep all inputs so far."""
        self.conv = conv_states if self.conv is None else torch.cat([self.conv, conv_states], -1)
        return self.conv

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Keep the state after the piece."""
        self.recurrent = recurrent_states
        return recurrent_states


def piecewise(own: Callable[..., Any], x: Tensor, spans: Spans, kwargs: Mapping[str, Any], block: Block) -> Tensor:
    """The block's own forward for each packed sequence of each row; a cache gets the states of each row's last one."""
    cache, mask = cache_of(kwargs), kwargs.get("attention_mask")
    name = next((n for n in CACHES if n in kwargs), CACHES[0])
    rest = without(kwargs, (*KEYWORDS, *CACHES, "attention_mask"))
    known = cache is not None and hasattr(cache, "get_recurrent_state")
    if known and cache.is_recording_past(block.layer):
        raise NotImplementedError("packed sequences with a cache that records its past: their last states alone are kept")
    past = (cache.get_conv_state(block.layer), cache.get_recurrent_state(block.layer)) if known else (None, None)
    outputs, convs, states = [], [], []
    width = block.plan.conv_width
    for row, row_spans in enumerate(spans):
        pieces = []
        for begin, end in row_spans:
            before = [None if p is None or begin > 0 else p[row : row + 1].clone() for p in past]
            piece_cache = PieceCache(*before) if known else None
            piece_mask = mask[row : row + 1, begin:end] if mask is not None and mask.dim() == 2 else None
            pieces.append(own(x[row : row + 1, begin:end], **{name: piece_cache}, attention_mask=piece_mask, **rest))
        outputs.append(torch.cat(pieces, 1))
        if piece_cache is not None and piece_cache.conv is not None and piece_cache.recurrent is not None:
            inputs = piece_cache.conv
            convs.append(torch.nn.functional.pad(inputs, (max(width - inputs.shape[-1], 0), 0))[..., -width:])
            states.append(piece_cache.recurrent)
    if known:
        keep_states(cache, block.layer, torch.cat(convs), torch.cat(states), x.shape[1])
    return torch.cat(outputs)
