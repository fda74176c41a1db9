"""`generate` on the native step, behind transformers' own `generate`.

transformers prepares everything (configuration, masks, special tokens, processors, criteria, cache) and calls a decoding method; segki
hands in its own through `custom_generate`. What the native step cannot do goes to the model's own decoding method with the reason in
the log, so that signature, results and errors stay those of transformers.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import DynamicCache
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.utils import GENERATION_MODES_MAPPING, GenerateDecoderOnlyOutput

from segki.cache import Decline, Prompt, divert, restore
from segki.engine import Decode, Engine, StopSpec
from segki.native import MAX_ROWS
from segki.parallel import follow_torch
from segki.plan import has_linear_state
from segki.program import Step
from segki.validate import CACHE_NAMES, left_padding

INT32_MAX = 2**31 - 1
# Inputs of the model that only its prefill reads.
VISION_INPUTS = (
    "image_grid_thw",
    "mm_encoder_outputs",
    "mm_token_type_ids",
    "pixel_values",
    "pixel_values_videos",
    "second_per_grid_ts",
    "video_grid_thw",
)
KNOWN_INPUTS = frozenset(
    {"attention_mask", "position_ids", "cache_position", "inputs_embeds", "logits_to_keep", "use_cache", *CACHE_NAMES, *VISION_INPUTS}
)


@dataclasses.dataclass
class Request:
    """A request of `generate` in segki's terms."""

    rule: StopSpec
    cache_name: str
    first: torch.Tensor  # i64 [rows], padding tokens on the left
    prompt_tokens: int  # positions of the prompt, padding included
    positions: torch.Tensor  # i64 [rows], rotary position of each row's first new token

    @property
    def tokens(self) -> int:
        """Room that a row needs: tokens of its cache and entries of position tables."""
        return int(torch.maximum(self.prompt_tokens - self.first, self.positions).max()) + self.rule.max_new_tokens


def stop_spec(logits_processor: Any, stopping_criteria: Any, config: Any, prompt_ids: int, vocab: int) -> StopSpec:
    """The stop rule that processors and criteria amount to; `prompt_ids` is the width of `input_ids`, ids are below `vocab`.

    Raises
    ------
    Decline
        If there is one that the native step does not know.
    """
    eos: tuple[int, ...] = ()
    max_length: int | None = None
    min_new = 0
    for criterion in stopping_criteria or ():
        if type(criterion) is MaxLengthCriteria:
            max_length = criterion.max_length
        elif type(criterion) is EosTokenCriteria:
            eos = tuple(int(token) for token in criterion.eos_token_id.reshape(-1))
        else:
            raise Decline(f"stopping criterion {type(criterion).__name__} is not known to the native loop")
    for processor in logits_processor or ():
        if type(processor) is MinNewTokensLengthLogitsProcessor:
            wanted = processor.min_new_tokens
        elif type(processor) is MinLengthLogitsProcessor:
            wanted = processor.min_length - prompt_ids
        else:
            raise Decline(f"logits processor {type(processor).__name__} is not known to the native loop")
        if {int(token) for token in processor.eos_token_id.reshape(-1)} != set(eos):
            raise Decline("a minimum length with end-of-sequence ids other than those that stop a row")
        min_new = max(min_new, int(wanted))
    if max_length is None:
        raise Decline("no maximum length is set")
    padding = getattr(config, "_pad_token_tensor", None)
    pad = 0 if padding is None else int(padding.reshape(-1)[0])
    if not 0 <= pad < vocab:
        if eos:
            raise Decline(f"pad id {pad} is outside of the vocabulary")
        pad = 0  # no row stops before the others
    return StopSpec(
        max_new_tokens=int(max_length) - prompt_ids,
        min_new_tokens=min_new,
        eos=tuple(token for token in eos if 0 <= token < vocab),
        pad=pad,
    )


def plan_request(
    engine: Engine, model: Any, input_ids: torch.Tensor, logits_processor: Any, stopping_criteria: Any, config: Any, inputs: dict[str, Any]
) -> Request:
    """Check that the native step can serve a request; raises `Decline` with the reason if not."""
    rule = stop_spec(logits_processor, stopping_criteria, config, input_ids.shape[1], engine.plan.vocab_size)
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name, False):
            raise Decline(f"{name} asks for values that the native step does not keep")
    if getattr(config, "use_cache", True) is False:
        raise Decline("use_cache=False")
    if getattr(config, "prefill_chunk_size", None) is not None:
        raise Decline("prefill_chunk_size is set")
    if torch.is_autocast_enabled("cpu"):
        raise Decline("autocast is on")
    cache_name = next((name for name in CACHE_NAMES if inputs.get(name) is not None), None)
    if cache_name is None:
        raise Decline("transformers prepared no cache")
    cache = inputs[cache_name]
    if type(cache) is not DynamicCache or cache.get_seq_length() > 0:
        raise Decline(f"a {type(cache).__name__} by cache_implementation")
    if other := sorted(name for name, value in inputs.items() if value is not None and name not in KNOWN_INPUTS):
        raise Decline(f"model inputs {', '.join(other)} are not known to the native step")
    embeds = inputs.get("inputs_embeds")
    rows, tokens = input_ids.shape if embeds is None else embeds.shape[:2]
    if embeds is not None and input_ids.shape[1] not in (0, tokens):
        raise Decline("input_ids and inputs_embeds of different lengths")
    if rows > MAX_ROWS:
        raise Decline(f"{rows} rows, the native step takes up to {MAX_ROWS}")
    mask = inputs.get("attention_mask")
    first = left_padding(mask, rows, tokens)
    if first is None:
        raise Decline("the attention mask has holes")
    positions = next_positions(inputs.get("position_ids"), first, tokens, steady=hasattr(model, "_prefill"))
    request = Request(rule, cache_name, first, tokens, positions)
    limit = engine.max_positions
    if request.tokens > (INT32_MAX if limit is None else limit):
        raise Decline(f"{request.tokens} positions, accepted up to {INT32_MAX if limit is None else limit}")
    return request


def room(engine: Engine, rows: int, request: Request) -> Step:
    """A step with room for a request; raises `Decline` when its cache does not fit into memory."""
    try:
        return engine.step(rows, request.tokens)
    except MemoryError:
        raise Decline(f"a cache of {rows} rows of {request.tokens} tokens does not fit into memory") from None


def next_positions(position_ids: torch.Tensor | None, first: torch.Tensor, tokens: int, *, steady: bool) -> torch.Tensor:
    """Rotary position of each row's first new token, i64 `[rows]`.

    transformers 5 counts on from the last column of `position_ids` (`[rows or 1, T]`; multimodal rotary embedding `[3, rows, T]`, or
    `[4, rows, T]` with text positions first), whatever the columns before it are; 4.57 counts the real tokens (`steady` False).
    """
    rows = first.shape[0]
    counted = tokens - first
    if position_ids is None:
        return counted
    if position_ids.dim() == 3 and position_ids.shape[0] in (3, 4) and steady:
        last = position_ids[-3:, :, -1]
        if not bool((last == last[:1]).all()):
            raise Decline("position_ids that end inside of an image")
        last = last[0]
    elif position_ids.dim() == 2 and position_ids.shape[1] == tokens:
        last = position_ids[:, -1]
    else:
        raise Decline(f"position_ids of shape {list(position_ids.shape)}")
    if last.shape[0] not in (1, rows):
        raise Decline(f"position_ids of {last.shape[0]} rows")
    following = (last.to(torch.int64) + 1).expand(rows)
    if bool((following < 0).any()) or (not steady and not torch.equal(following, counted)):
        raise Decline("position_ids that do not count the real tokens from 0")
    return following


def prefill(model: Any, input_ids: torch.Tensor, config: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """The model's own forward over the prompt: its last logits, f32 `[rows, V]`."""
    if hasattr(model, "_prefill"):
        outputs = model._prefill(input_ids, config, inputs, is_first_iteration=True)
    else:  # transformers 4.57
        inputs = model._get_initial_cache_position(input_ids.shape[1], input_ids.device, inputs)
        outputs = model(**model.prepare_inputs_for_generation(input_ids, **inputs), return_dict=True)
    logits: torch.Tensor = outputs.logits[:, -1].to(dtype=torch.float32)
    return logits


class Recorder:
    """Keeps what the caller asked to see of each step and feeds the streamer."""

    def __init__(self, decode: Decode, input_ids: torch.Tensor, processors: Any, config: Any, streamer: Any) -> None:
        wants = bool(config.return_dict_in_generate)
        self.scores: list[torch.Tensor] | None = [] if wants and config.output_scores else None
        self.logits: list[torch.Tensor] | None = [] if wants and config.output_logits else None
        self._decode, self._ids, self._processors, self._streamer = decode, input_ids, processors, streamer

    @property
    def every_step(self) -> bool:
        """Whether each step must be looked at by itself."""
        return self.scores is not None or self.logits is not None or self._streamer is not None

    def logits_of(self, logits: torch.Tensor, column: int) -> None:
        """Record the logits from which new token `column` was chosen."""
        if self.logits is not None:
            self.logits.append(logits.clone())
        if self.scores is not None:
            ids: Any = torch.cat([self._ids, self._decode.state.history[:, :column]], dim=1)
            self.scores.append((self._processors or LogitsProcessorList())(ids, logits.clone()))

    def stream(self, begin: int, count: int) -> None:
        """Give new columns to the streamer."""
        if self._streamer is not None:
            for column in range(begin, begin + count):
                self._streamer.put(self._decode.state.history[:, column].clone())

    def __call__(self, begin: int, count: int) -> bool:
        """Called by the loop after its steps."""
        if self.every_step:
            self.logits_of(self._decode.state.logits, begin)
            self.stream(begin, count)
        return True


def decode(
    engine: Engine,
    step: Step,
    model: Any,
    input_ids: torch.Tensor,
    request: Request,
    processors: Any,
    config: Any,
    streamer: Any,
    inputs: dict[str, Any],
    settle: Callable[[], None],
) -> Any:
    """Prefill by the model, then `settle()`, decode by the native step; returns what transformers' `_sample` returns."""
    follow_torch()
    rule = request.rule
    assert engine.cache is not None
    prompt = Prompt(engine.cache, engine.memory, request.first)
    cache = inputs[request.cache_name]
    own = divert(cache, engine.plan, prompt)
    try:
        logits = prefill(model, input_ids, config, dict(inputs))
        if not prompt.complete(engine.plan):
            raise Decline("the model's forward left cache layers empty")
    except Decline:
        cache.layers = own
        raise
    settle()
    wanted = bool(config.return_dict_in_generate)
    if streamer is not None or (wanted and (config.output_scores or config.output_logits or has_linear_state(engine.plan))):
        rule = dataclasses.replace(rule, check_every=1)  # a recurrent state that is handed back cannot take a step back
    lengths = request.prompt_tokens - request.first
    run = Decode(engine, step, lengths.to(torch.int32), rule, advance_finished=wanted, positions=request.positions)
    recorder = Recorder(run, input_ids, processors, config, streamer)
    run.first(logits)
    recorder.logits_of(logits, 0)
    recorder.stream(0, 1)
    result = run.run(recorder if recorder.every_step else None)
    if streamer is not None:
        streamer.end()
    sequences = torch.cat([input_ids, run.state.history[:, : result.columns]], dim=1)
    if not wanted:
        return sequences
    total = request.prompt_tokens + result.columns - 1
    held = torch.minimum(run.state.lengths, total - request.first)  # steps past the last row's end do not count
    restore(cache, prompt, held.tolist(), total, engine.dtype)
    fields = {field.name for field in dataclasses.fields(GenerateDecoderOnlyOutput)}
    values: dict[str, Any] = {
        "sequences": sequences,
        "scores": None if recorder.scores is None else tuple(recorder.scores),
        "logits": None if recorder.logits is None else tuple(recorder.logits),
        "cache" if "cache" in fields else "past_key_values": cache,
    }
    return GenerateDecoderOnlyOutput(**values)


def decoding_method(
    ready: Callable[[], Engine], settle: Callable[[], None], log: Callable[[str], None], streamer: Any, turn: threading.Lock
) -> Callable[..., Any]:
    """What `generate` calls instead of `_sample`; requests that the native step cannot serve go to the model's own method.

    `ready` gives the engine, checked against the model as it is now, or raises `Decline`; `settle` is called once the model's own forward
    has run after that, and before anybody else's code does. `turn` is held while the native step runs: its
    cache and buffers serve one generation at a time, a second one (another thread, or a streamer that generates) is the model's own.
    """

    def native_decode(
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        generation_config: Any = None,
        **inputs: Any,
    ) -> Any:
        mode = generation_config.get_generation_mode()
        mine = turn.acquire(blocking=False)
        try:
            if not mine:
                raise Decline("another generation runs on this model at the moment")
            if mode.name != "GREEDY_SEARCH":
                raise Decline(f"{mode.value} is left to the model's own generate")
            engine = ready()
            request = plan_request(engine, model, input_ids, logits_processor, stopping_criteria, generation_config, inputs)
            step = room(engine, input_ids.shape[0], request)
            return decode(engine, step, model, input_ids, request, logits_processor, generation_config, streamer, inputs, settle)
        except Decline as reason:
            log(str(reason))
        finally:
            if mine:
                turn.release()
        own = getattr(type(model), GENERATION_MODES_MAPPING[mode])
        return own(
            model,
            input_ids,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            **({} if streamer is None else {"streamer": streamer}),
            **inputs,
        )

    return native_decode


# Arguments of generate that are left to transformers as soon as they are given.
LEFT_ARGUMENTS = (
    "assistant_model",
    "custom_generate",
    "negative_prompt_ids",
    "prefix_allowed_tokens_fn",
    "synced_gpus",
    "tokenizer",
    "trust_remote_code",
    *CACHE_NAMES,
)
LEFT_SETTINGS = (
    "assistant_early_exit",
    "constraints",
    "dola_layers",
    "force_words_ids",
    "penalty_alpha",
    "prompt_lookup_num_tokens",
)


def own_mode(model: nn.Module, config: Any, kwargs: dict[str, Any]) -> str | None:
    """A reason to leave a call to transformers before anything is prepared, or None."""
    for name in LEFT_ARGUMENTS:
        if kwargs.get(name) is not None:
            return f"{name} is left to the model's own generate"
    configs = [config, getattr(model, "generation_config", None)]
    for name in LEFT_SETTINGS:
        if any(value is not None for value in [kwargs.get(name), *(getattr(c, name, None) for c in configs)]):
            return f"{name} is left to the model's own generate"
    return None
