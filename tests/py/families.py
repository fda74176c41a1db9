"""Tiny seeded float32 models of every decoder family of transformers, and harder variants of the dense ones.

A family is a key of transformers' causal language model mapping. `CASES` lists what the tests run; `build(case)` makes the
model. Sizes come from one table of configuration fields, deviations from a table per family. Default initialisation hides
mistakes (unit norms, zero biases, weights too small to matter), so `spread` redraws every weight.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, LAYERS, VOCAB = 64, 4, 2, 16, 96, 4, 256
WINDOW = 8
MAX_PARAMETERS = 8_000_000

Native = Literal["required", "welcome", "declined"]

# ------------------------------------------------------------------------------------------------- the families

_GATED = (
    "cwm exaone4 gemma gemma2 gemma3_text granite hyperclovax llama ministral ministral3 mistral olmo2 olmo3 phi3 qwen2 qwen3 "
    "seed_oss smollm3 vaultgemma"
)
_INTERLEAVED = "ernie4_5 glm glm4 helium"
_LAYER_NORM = "cohere cohere2 cohere_compass_text olmo stablelm"
_PLAIN_MLP = "arcee falcon gpt_neox gptj jais2 nemotron persimmon phi starcoder2"

_GDN = "olmo_hybrid qwen3_5_text"

DENSE_NATIVE = tuple(sorted(f"{_GATED} {_INTERLEAVED} {_LAYER_NORM} {_PLAIN_MLP} {_GDN}".split()))
"""Dense families whose whole step must be native."""

_SOFTMAX_MOE = "flex_olmo granitemoe granitemoeshared mellum mixtral olmoe qwen3_moe"
_SHARED_MOE = "aria_text lara_mini qwen2_moe qwen3_5_moe_text qwen3_next"
_SIGMOID_MOE = "afmoe dots1 exaone_moe glm4_moe hy_v3 kolibri1 minimax_m2 solar_open"
_OTHER_MOE = "beam cohere2_moe ernie4_5_moe"

MOE_NATIVE = tuple(sorted(f"{_SOFTMAX_MOE} {_SHARED_MOE} {_SIGMOID_MOE} {_OTHER_MOE}".split()))
"""Families with mixtures of experts whose whole step must be native."""

FLOAT32_NORMS = ("afmoe",)
"""Families whose norms stay in float32 when the model is in float16; they are declined then."""

WELCOME = ("gpt2", "gpt_bigcode", "gpt_neo", "hunyuan_v1_dense", "hunyuan_v1_moe", "nanochat")
"""Families that may be native; if not, they are declined with a reason."""

DECLINED = tuple(
    """
    apertus apertus1p5_text axk1 axk2 bailing_hybrid bamba biogpt bitnet bloom blt codegen ctrl dbrx deepseek_v2
    deepseek_v3 deepseek_v32 deepseek_v4 diffllama doge dory dots3_note_text falcon_h1 falcon_mamba flint gemma3n_text
    gemma4_text gemma4_unified_text glm4_moe_lite glm_moe_dsa gpt_neox_japanese gpt_oss granite_swa granitemoe_swa
    granitemoehybrid hrm_text hy_v4 inkling2_loop_text inkling2_text inkling_text jamba jetmoe kimi_linear laguna lfm2
    lfm2_moe lfm3 llama4_text longcat_flash mamba mamba2 mimo_v2_flash minicpm3 minimax minimax_m3_vl_text
    modernbert-decoder mpt nemotron_h openai-gpt opt phimoe qwen4_exp_text recurrent_gemma rwkv xglm xlstm youtu zamba
    zamba2 zaya
    """.split()
)
"""Families whose results may not change; what is not native says why."""

FAMILIES = tuple(sorted(DENSE_NATIVE + MOE_NATIVE + WELCOME + DECLINED))

# ------------------------------------------------------------------------------------------------- tiny configurations


def _table(*groups: tuple[Any, str]) -> dict[str, Any]:
    return {name: value for value, names in groups for name in names.split()}


_TINY = _table(
    (VOCAB, "vocab_size vocab_size_per_layer_input unpadded_vocab_size"),
    (
        HIDDEN,
        "hidden_size d_model n_embd dim embedding_dim word_embed_proj_dim embedding_size input_embedding_size "
        "output_embedding_size attention_hidden_size lru_width router_hidden_size hidden_size_global",
    ),
    (LAYERS, "num_hidden_layers n_layer n_layers num_layers num_blocks"),
    (HEADS, "num_attention_heads n_head n_heads num_heads swa_num_attention_heads linear_num_heads linear_num_value_heads"),
    (KV_HEADS, "num_key_value_heads num_kv_heads swa_num_key_value_heads num_query_groups linear_num_key_heads"),
    (HEAD_DIM, "head_dim swa_head_dim kv_channels attention_head_dim d_head linear_head_dim linear_key_head_dim"),
    (24, "linear_value_head_dim q_lora_rank qk_head_dim"),
    (
        FFN,
        "intermediate_size ffn_dim ffn_hidden_size dff d_inner n_inner intermediate_size_mlp dense_intermediate_size",
    ),
    (
        48,
        "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size "
        "shared_experts_intermediate_size moe_shared_expert_intermediate_size",
    ),
    (8, "num_experts num_local_experts n_routed_experts moe_num_experts qk_rope_head_dim index_head_dim"),
    (2, "num_experts_per_tok num_experts_per_token moe_topk moe_k index_n_heads"),
    (
        1,
        "n_shared_experts num_shared_experts n_group num_expert_group topk_group moe_num_shared_experts "
        "first_k_dense_replace num_dense_layers moe_layer_start_index mamba_n_groups n_groups mamba_ngroups",
    ),
    (32, "kv_lora_rank o_lora_rank"),
    (16, "qk_nope_head_dim v_head_dim mamba_d_state ssm_state_size state_size"),
    (
        512,
        "max_position_embeddings n_positions n_ctx max_seq_len context_length original_max_position_embeddings index_topk",
    ),
    (WINDOW, "sliding_window window_size attention_window_size local_attention sliding_window_size attention_chunk_size"),
    (0, "pad_token_id"),
    (1, "bos_token_id"),
    (None, "eos_token_id forced_eos_token_id"),
    (
        0.0,
        "attention_dropout hidden_dropout dropout resid_pdrop embd_pdrop hidden_dropout_prob attn_pdrop activation_dropout "
        "attention_probs_dropout_prob residual_dropout emb_pdrop embed_dropout resid_dropout",
    ),
)

# scalars whose default does nothing: any other value makes a forgotten one visible
_SCALARS: dict[str, Any] = {
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 4.0,
    "attention_multiplier": 0.2,
    "mup_enabled": True,
    "lm_head_multiplier": 0.5,
    "key_multiplier": 0.5,
    "attention_out_multiplier": 0.8,
    "attention_in_multiplier": 1.2,
    "ssm_in_multiplier": 0.8,
    "ssm_out_multiplier": 1.2,
}

_PATTERNS = ("layer_types", "layers_block_type", "mlp_layer_types", "indexer_types")
"""Fields with one kind a layer; the tiny model keeps each kind of the default configuration once or more."""

_LOCAL_GLOBAL = ["sliding_attention", "full_attention"] * (LAYERS // 2)
_CONV_GLOBAL = ["conv", "full_attention"] * (LAYERS // 2)
_MAMBA_HYBRID = ["mamba", "hybrid"] * (LAYERS // 2)
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_MAMBA2_SIZES = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_expand": 2}

# what the generic table gets wrong; None removes the field, a mapping is merged into a mapping
_FIXES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3], **_MAMBA2_SIZES},
    "blt": {"encoder_hash_byte_group_vocab": 64, "num_hidden_layers": LAYERS},
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {
        "layer_types": _LOCAL_GLOBAL,
        "num_key_value_heads": KV_HEADS,
        "logit_scale": 0.0625,
        "rope_parameters": {"sliding_attention": _ROPE, "full_attention": {**_ROPE, "rope_theta": 1e5}},
    },
    "dbrx": {
        "attn_config": {"rope_theta": 1e4, "kv_n_heads": KV_HEADS, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": FFN, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 8, "n_shared_experts": 1},
    "dory": {"layer_types": _LOCAL_GLOBAL, "n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    "dots3_note_text": {
        "num_key_value_heads": HEADS,
        "head_dim": 24,
        "layer_types": _LOCAL_GLOBAL,
        "index_head_dim": 16,
        "swa_num_attention_heads": HEADS,
        "swa_num_key_value_heads": HEADS,
        "swa_q_lora_rank": 24,
        "swa_kv_lora_rank": 32,
        "swa_head_dim": 24,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 16,
    },
    "falcon_h1": {"mamba_d_ssm": 2 * HIDDEN, "mamba_n_heads": 8, "mamba_d_head": 16},
    "gemma3n_text": {
        "layer_types": _LOCAL_GLOBAL,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0],
        "hidden_size_per_layer_input": 16,
        "laurel_rank": 16,
        "intermediate_size": [FFN] * LAYERS,
    },
    "gemma4_text": {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], LAYERS // 2]]},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * (LAYERS // 2), **_MAMBA2_SIZES},
    "hunyuan_v1_dense": {"head_dim": HEAD_DIM},
    "hunyuan_v1_moe": {"head_dim": HEAD_DIM, "moe_topk": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 8, "use_mamba_kernels": False},
    "lfm2": {"layer_types": _CONV_GLOBAL},
    "lfm2_moe": {"layer_types": _CONV_GLOBAL},
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "ministral": {"head_dim": HEAD_DIM},
    "mpt": {"attn_config": {"attn_pdrop": 0}},
    "nemotron": {"head_dim": HEAD_DIM, "num_key_value_heads": KV_HEADS},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
        "hc_lowrank": 16,
    },
    "xlstm": {"qk_dim_factor": 1.0},
    "zamba": {
        "attention_hidden_size": 2 * HIDDEN,
        "attention_head_dim": 32,
        "num_key_value_heads": HEADS,
        "layers_block_type": _MAMBA_HYBRID,
        "n_mamba_heads": 2,
        "use_mamba_kernels": False,
    },
    "zamba2": {
        "attention_hidden_size": 2 * HIDDEN,
        "attention_head_dim": 32,
        "num_key_value_heads": HEADS,
        "layer_types": None,
        "layers_block_type": _MAMBA_HYBRID,
        "mamba_headdim": 16,
        "adapter_rank": 8,
        "num_mem_blocks": 1,
    },
    "zaya": {"num_experts_per_tok": 1},
}


def _shrink(default: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments that make the configuration with these defaults tiny."""
    tiny: dict[str, Any] = {}
    for name, value in default.items():
        if isinstance(value, dict):
            if "model_type" in value or name in ("attn_config", "ffn_config"):
                tiny[name] = _shrink(value) | ({"model_type": value["model_type"]} if value.get("model_type") else {})
        elif name in _PATTERNS and isinstance(value, list) and value:
            kinds = list(dict.fromkeys(value))
            tiny[name] = [kinds[layer % len(kinds)] for layer in range(LAYERS)]
        elif isinstance(value, list):
            continue
        elif name in _TINY and value is not None:
            tiny[name] = _TINY[name]
        elif name in _SCALARS:
            tiny[name] = _SCALARS[name]
    if "kv_lora_rank" in default:  # latent attention: as many key heads as query heads, head_dim is the rotary part
        tiny.pop("head_dim", None)
        if "num_key_value_heads" in default:
            tiny["num_key_value_heads"] = HEADS
    return tiny


def _merge(base: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in changes.items():
        if value is None:
            merged.pop(name, None)
        elif isinstance(value, dict) and isinstance(merged.get(name), dict):
            merged[name] = merged[name] | value
        else:
            merged[name] = value
    return merged


def tiny_config(family: str, overrides: Mapping[str, Any] | None = None) -> Any:
    """The family's configuration, tiny; `overrides` are set as given, None included."""
    cls = CONFIG_MAPPING[family]
    try:
        default = cls().to_dict()
    except (TypeError, ValueError):  # a family without usable defaults: its fixes say everything
        default = {}
    tiny = _merge(_shrink(default), _FIXES.get(family, {}))
    if overrides and "num_hidden_layers" in overrides:
        tiny |= {name: tiny[name][: overrides["num_hidden_layers"]] for name in _PATTERNS if name in tiny}
    arguments = tiny | dict(overrides or {})
    if "rope_parameters" in arguments and "rope_parameters" not in default:  # transformers 4
        rope = dict(arguments.pop("rope_parameters"))
        arguments["rope_theta"] = rope.pop("rope_theta", 1e4)
        arguments["rope_scaling"] = rope
    return cls(**arguments)


# ------------------------------------------------------------------------------------------------- weights


@torch.no_grad()
def spread(model: Any, seed: int) -> None:
    """Redraw the weights so that each one is visible in the logits.

    Matrices get unit gain, vectors (norm weights, biases) a fifth of a standard deviation around their initial value. A tied
    embedding is kept small, or every token would predict itself.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn: set[int] = set()
    for name, parameter in model.named_parameters():
        if parameter.data_ptr() in drawn or not parameter.is_floating_point() or parameter.numel() == 0:
            continue
        drawn.add(parameter.data_ptr())
        noise = torch.randn(parameter.shape, generator=generator)
        leaf = name.rpartition(".")[2]
        if leaf == "A_log":
            if parameter.dim() == 1:
                parameter.copy_(torch.log(0.02 + 0.3 * torch.rand(parameter.shape, generator=generator)))
        elif parameter.dim() == 1:
            parameter.add_(0.2 * noise)
        elif leaf not in ("dt_bias", "D"):
            parameter.copy_(noise / math.sqrt(max(_fan_in(name, parameter), 1)))
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if isinstance(embedding, nn.Embedding) and isinstance(head, nn.Linear) and embedding.weight is head.weight:
        embedding.weight.mul_(0.03 / embedding.weight.std())


def _fan_in(name: str, weight: torch.Tensor) -> int:
    if weight.dim() == 2:
        return weight.shape[1]
    if "conv" in name and weight.dim() == 3:
        return weight.shape[1] * weight.shape[2]
    return weight.shape[-1]


# ------------------------------------------------------------------------------------------------- cases


@dataclass(frozen=True)
class Case:
    """One tiny model: a family, what differs from its tiny configuration, and what segki owes it."""

    name: str
    family: str
    native: Native
    overrides: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def available(self) -> bool:
        return self.family in CONFIG_MAPPING


_ODD = {"hidden_size": 60, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 20, "intermediate_size": 50}
_SHORT_WINDOW = {"sliding_window": 5}
_TWO = {"num_hidden_layers": 2}


def _rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **parameters}}


_LLAMA3 = _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
_YARN = _rope("yarn", factor=4.0, original_max_position_embeddings=32)
_LONGROPE = _rope(
    "longrope",
    factor=4.0,
    short_factor=[1.0 + 0.1 * i for i in range(HEAD_DIM // 2)],
    long_factor=[2.0 + 0.3 * i for i in range(HEAD_DIM // 2)],
    original_max_position_embeddings=16,
)
_MINISTRAL_SCALE = _rope(
    "yarn",
    factor=4.0,
    original_max_position_embeddings=6,
    beta_fast=32.0,
    beta_slow=1.0,
    mscale=1.0,
    mscale_all_dim=1.0,
    llama_4_scaling_beta=0.5,
)

# name: (family, overrides); a full native step is required for each
_REQUIRED_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-odd": ("llama", {**_ODD, **_TWO}),
    "llama-odd-tied-biased": ("llama", {**_ODD, **_TWO, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama-one-layer-multi-query": ("llama", {"num_hidden_layers": 1, "num_key_value_heads": 1}),
    "llama-every-head": ("llama", {**_TWO, "num_key_value_heads": HEADS}),
    "llama-odd-vocabulary": ("llama", {**_TWO, "vocab_size": 257}),
    "llama-llama3-rope": ("llama", {**_TWO, **_LLAMA3}),
    "llama-yarn": ("llama", {**_TWO, **_YARN}),
    "llama-linear-rope": ("llama", {**_TWO, **_rope("linear", factor=3.0)}),
    "llama-gelu": ("llama", {**_TWO, "hidden_act": "gelu"}),
    "llama-gelu-tanh": ("llama", {**_TWO, "hidden_act": "gelu_pytorch_tanh"}),
    "llama-relu": ("llama", {**_TWO, "hidden_act": "relu"}),
    "llama-relu2": ("llama", {**_TWO, "hidden_act": "relu2"}),
    "mistral-short-window": ("mistral", {**_SHORT_WINDOW, **_TWO}),
    "mistral-no-window": ("mistral", {"sliding_window": None, **_TWO}),
    "qwen2-mixed-windows": ("qwen2", {"use_sliding_window": True, **_SHORT_WINDOW, "max_window_layers": 2}),
    "qwen3-odd-tied": ("qwen3", {**_ODD, **_TWO, "head_dim": 24, "tie_word_embeddings": True}),
    "qwen3-biased": ("qwen3", {**_TWO, "attention_bias": True}),
    "phi3-window": ("phi3", {**_TWO, **_SHORT_WINDOW}),
    "phi3-partial-rotary": ("phi3", {**_TWO, **_rope("default", partial_rotary_factor=0.5)}),
    "gemma-odd-untied": ("gemma", {**_ODD, **_TWO, "tie_word_embeddings": False}),
    "gemma2-small-caps": (
        "gemma2",
        {"attn_logit_softcapping": 0.7, "final_logit_softcapping": 0.4, "query_pre_attn_scalar": 7, **_SHORT_WINDOW},
    ),
    "gemma2-no-caps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3-small-cap-odd": ("gemma3_text", {**_ODD, "final_logit_softcapping": 0.4, "query_pre_attn_scalar": 7}),
    "vaultgemma-small-caps": ("vaultgemma", {"attn_logit_softcapping": 0.7, "final_logit_softcapping": 0.4}),
    "granite-odd-tied-biased": (
        "granite",
        {**_TWO, "hidden_size": 60, "num_attention_heads": 3, "num_key_value_heads": 1, "intermediate_size": 50}
        | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}
        | {"embedding_multiplier": 3.0, "residual_multiplier": 0.22, "attention_multiplier": 0.4, "logits_scaling": 0.3},
    ),
    "hyperclovax-no-post-norm": ("hyperclovax", {**_TWO, "use_post_norm": False}),
    "smollm3-untied-biased": ("smollm3", {"attention_bias": True, "tie_word_embeddings": False, "no_rope_layers": [1, 0, 1, 0]}),
    "exaone4-no-window": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * LAYERS}),
    "olmo2-odd": (
        "olmo2",
        {**_TWO, "hidden_size": 60, "num_attention_heads": 3, "num_key_value_heads": 3, "intermediate_size": 50},
    ),
    "olmo3-short-window": ("olmo3", {**_SHORT_WINDOW}),
    "seed_oss-odd": ("seed_oss", {**_ODD, **_TWO}),
    "ministral3-scaled-queries": ("ministral3", {**_TWO, **_MINISTRAL_SCALE}),
    "ernie4_5-biased-untied": ("ernie4_5", {**_TWO, "use_bias": True, "tie_word_embeddings": False}),
    "glm-no-bias-odd": ("glm", {**_ODD, **_TWO, "attention_bias": False}),
    "glm4-full-rotary": ("glm4", {**_TWO, **_rope("default", partial_rotary_factor=1.0)}),
    "helium-odd": ("helium", {**_ODD, **_TWO}),
    "cohere-qk-norm": ("cohere", {**_TWO, "use_qk_norm": True, "logit_scale": 0.7}),
    "cohere-biased": ("cohere", {**_TWO, "attention_bias": True, "logit_scale": 1.7}),
    "cohere2-short-window": ("cohere2", {**_SHORT_WINDOW, "logit_scale": 0.7, "head_dim": 20}),
    "olmo-tied": ("olmo", {**_TWO, "tie_word_embeddings": True}),
    "stablelm-parallel": ("stablelm", {**_TWO, "use_parallel_residual": True}),
    "arcee-biased": ("arcee", {**_TWO, "attention_bias": True, "mlp_bias": True}),
    "falcon-new-decoder": ("falcon", {**_TWO, "new_decoder_architecture": True, "num_kv_heads": KV_HEADS}),
    "falcon-new-decoder-one-norm": (
        "falcon",
        {**_TWO, "new_decoder_architecture": True, "num_kv_heads": KV_HEADS, "num_ln_in_parallel_attn": 1},
    ),
    "falcon-every-head": ("falcon", {**_TWO, "multi_query": False, "num_kv_heads": HEADS}),
    "falcon-biased": ("falcon", {**_TWO, "bias": True}),
    "falcon-serial": ("falcon", {**_TWO, "parallel_attn": False}),
    "gpt_neox-serial": ("gpt_neox", {**_TWO, "use_parallel_residual": False}),
    "gpt_neox-no-bias-tied": ("gpt_neox", {**_TWO, "attention_bias": False, "tie_word_embeddings": True}),
    "gptj-odd-rotary": ("gptj", {"n_layer": 2, "rotary_dim": 6}),
    "jais2-no-bias": ("jais2", {**_TWO, "attention_bias": False, "mlp_bias": False}),
    "nemotron-biased": ("nemotron", {**_TWO, "attention_bias": True, "mlp_bias": True}),
    "persimmon-no-qk-norm": ("persimmon", {**_TWO, "qk_layernorm": False}),
    "phi-qk-norm": ("phi", {**_TWO, "qk_layernorm": True}),
    "starcoder2-window-untied": ("starcoder2", {**_TWO, **_SHORT_WINDOW, "tie_word_embeddings": False}),
    "starcoder2-no-bias": ("starcoder2", {**_TWO, "use_bias": False}),
    "qwen3_5-wide-convolution": ("qwen3_5_text", {"linear_conv_kernel_dim": 8, "linear_num_key_heads": 4, "linear_num_value_heads": 4}),
    "qwen3_5-narrow-convolution": ("qwen3_5_text", {"linear_conv_kernel_dim": 2, "linear_num_key_heads": 1, "linear_num_value_heads": 3}),
    "qwen3_5-odd-heads": ("qwen3_5_text", {"linear_key_head_dim": 20, "linear_value_head_dim": 36, "tie_word_embeddings": True}),
    "qwen3_5-full-rotary": ("qwen3_5_text", {**_rope("default", partial_rotary_factor=1.0, mrope_section=[3, 3, 2])}),
    "olmo_hybrid-positive": ("olmo_hybrid", {"linear_allow_neg_eigval": False}),
    "qwen3_next-dense-layer": ("qwen3_next", {"mlp_only_layers": [1]}),
    "qwen3_moe-normalised": ("qwen3_moe", {**_TWO, "norm_topk_prob": True}),
    "qwen3_moe-dense-layer": ("qwen3_moe", {**_TWO, "mlp_only_layers": [0]}),
    "mixtral-one-expert": ("mixtral", {**_TWO, "num_experts_per_tok": 1}),
    "glm4_moe-groups": ("glm4_moe", {**_TWO, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7}),
    "beam-groups": ("beam", {**_TWO, "n_group": 4, "topk_group": 2, "final_logit_softcapping": 0.4, "attention_bias": True}),
    "beam-no-cap": ("beam", {**_TWO, "final_logit_softcapping": None, "norm_topk_prob": False, "hidden_act": "gelu_pytorch_tanh"}),
    "cohere2_moe-average": ("cohere2_moe", {**_TWO, "num_shared_experts": 2, "shared_expert_combination_strategy": "average"}),
    "cohere2_moe-sigmoid": ("cohere2_moe", {**_TWO, "expert_selection_fn": "sigmoid", "norm_topk_prob": True}),
}

# more than issue 2 asks for: same results, native or not
_WELCOME_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "stablelm-qk-norm-biased": ("stablelm", {**_TWO, "qk_layernorm": True, "use_qkv_bias": True}),
    "llama-dynamic-rope": ("llama", {**_TWO, **_rope("dynamic", factor=4.0), "max_position_embeddings": 16}),
    "phi3-longrope": (
        "phi3",
        {**_TWO, **_LONGROPE, "max_position_embeddings": 64, "original_max_position_embeddings": 16},
    ),
    "olmo-clipped": ("olmo", {**_TWO, "clip_qkv": 0.8}),
    "falcon-alibi": ("falcon", {**_TWO, "alibi": True, "parallel_attn": False}),
    "gpt2-scaled-by-layer": ("gpt2", {"n_layer": 2, "scale_attn_by_inverse_layer_idx": True}),
    "gpt_bigcode-every-head": ("gpt_bigcode", {"n_layer": 2, "multi_query": False}),
}


def _duty(family: str) -> Native:
    if family in DENSE_NATIVE + MOE_NATIVE:
        return "required"
    return "welcome" if family in WELCOME else "declined"


BASE_CASES = tuple(Case(family, family, _duty(family)) for family in FAMILIES)
VARIANT_CASES = tuple(
    [Case(name, family, "required", overrides) for name, (family, overrides) in _REQUIRED_VARIANTS.items()]
    + [Case(name, family, "welcome", overrides) for name, (family, overrides) in _WELCOME_VARIANTS.items()]
)
CASES = {case.name: case for case in BASE_CASES + VARIANT_CASES}


def select(*native: Native) -> list[Case]:
    """The cases with one of these duties, those of the installed transformers only."""
    return [case for case in CASES.values() if case.native in native and case.available]


@functools.lru_cache(maxsize=4)
def _pristine(name: str, seed: int) -> Any:
    case = CASES[name]
    config = tiny_config(case.family, case.overrides)
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(copy.deepcopy(config)).parameters())
    if size > MAX_PARAMETERS:
        raise ValueError(f"case {name}: {size} parameters, at most {MAX_PARAMETERS} are tiny")
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    spread(model, seed)
    model.generation_config.eos_token_id = None
    model.generation_config.forced_eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def build(case: str | Case, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """A fresh tiny model of the case in evaluation mode."""
    model = copy.deepcopy(_pristine(case if isinstance(case, str) else case.name, seed))
    return model if dtype == torch.float32 else cast(model, dtype)


@torch.no_grad()
def cast(model: Any, dtype: torch.dtype) -> Any:
    """Convert a model in place to what loading its checkpoint in `dtype` gives, and return it.

    This is not `model.to(dtype)`: rotary tables, and modules that transformers keeps in float32, stay as they are.
    """
    config = copy.deepcopy(model.config)
    config.dtype = dtype
    with torch.device("meta"):
        loaded = type(model)._from_config(config, dtype=dtype)
    dtypes = {name: tensor.dtype for name, tensor in (*loaded.named_parameters(), *loaded.named_buffers())}
    kept = set(model._keep_in_fp32_modules_strict or ())
    if dtype == torch.float16:
        kept |= set(model._keep_in_fp32_modules or ())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point() and not any(f".{part}." in f".{name}." for part in kept):
            tensor.data = tensor.data.to(dtypes[name])
    model.config.dtype = dtype
    return model


def prompt(rows: int = 1, length: int = 13, vocab: int = VOCAB, seed: int = 1) -> torch.Tensor:
    """Random token ids (rows, length), never a pad, bos or eos id of the tiny configurations."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab - 2, (rows, length), generator=generator)


def left_padded(lengths: tuple[int, ...], seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Random rows of these lengths, padded on the left with id 0: `input_ids` and `attention_mask`, (rows, longest)."""
    longest = max(lengths)
    ids = prompt(len(lengths), longest, seed=seed)
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        mask[row, : longest - length] = 0
    return ids.masked_fill(mask == 0, 0), mask
