"""A GatedDeltaNet block written out token by token, with rules to vary and tricks that detection must notice."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import families
from families import HIDDEN
from segki import reference

AUTO: Any = AutoModelForCausalLM


@dataclass(frozen=True)
class Rule:
    """What a block of this file does; see `OwnGdn.forward`."""

    layout: str = "split"  # of the projections: split, numbers-swapped, separate, interleaved
    biased: bool = False  # projections and convolution
    width: int = 4
    beta: float = 1.0
    l2_eps: float = 1e-6
    norm_eps: float = 1e-6
    norm_fp32: bool = False
    conv_activation: str = "silu"
    trick: str = ""


class OwnNorm(nn.Module):
    def __init__(self, rule: Rule, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.rule, self.norm_eps = rule, rule.norm_eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        trick = self.rule.trick
        if trick == "norm-after-gate":
            x = (x.float() * F.silu(gate.float())).to(x.dtype)
        n = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.norm_eps)
        n = self.weight.float() * n if self.rule.norm_fp32 else self.weight * n.to(x.dtype)
        if trick == "norm-after-gate":
            return n.to(x.dtype)
        if trick == "half-gate":
            return n.to(x.dtype) * F.silu(gate)
        return (n * (gate.float().sigmoid() if trick == "sigmoid-gate" else F.silu(gate.float()))).to(x.dtype)


class OwnGdn(nn.Module):
    """A GatedDeltaNet block that does what its rule says, token by token."""

    def __init__(self, rule: Rule, key_heads: int = 2, value_heads: int = 4, key_dim: int = 16, value_dim: int = 24) -> None:
        super().__init__()
        self.rule = rule
        if rule.trick != "unnamed-eps":
            self.l2_epsilon = rule.l2_eps
        self.key_heads, self.value_heads, self.key_dim, self.value_dim = key_heads, value_heads, key_dim, value_dim
        keys, values = key_heads * key_dim, value_heads * value_dim
        linear = functools.partial(nn.Linear, HIDDEN, bias=rule.biased)
        if rule.layout == "interleaved":
            self.qkvz, self.ba = linear(2 * keys + 2 * values), linear(2 * value_heads)
        elif rule.layout == "separate":
            self.q_proj, self.k_proj, self.v_proj = linear(keys), linear(keys), linear(values)
            self.a_proj, self.b_proj, self.g_proj = linear(value_heads), linear(value_heads), linear(values)
        else:
            self.qkv, self.z, self.first, self.second = linear(2 * keys + values), linear(values), linear(value_heads), linear(value_heads)
        channels = 2 * keys + values
        self.conv = nn.Conv1d(channels, channels, rule.width, groups=channels, padding=rule.width - 1, bias=rule.biased)
        self.dt_bias = nn.Parameter(torch.ones(value_heads))
        self.A_log = nn.Parameter(torch.zeros(value_heads))
        if rule.trick == "skip":
            self.D = nn.Parameter(torch.zeros(value_heads))
        if rule.trick == "buffer":
            self.register_buffer("added", torch.zeros(values))
        self.norm = OwnNorm(rule, value_dim)
        self.out = nn.Linear(values, HIDDEN, bias=rule.biased)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q|k|v, z, b, a with values and numbers by key head, then by its value heads."""
        group = self.value_heads // self.key_heads
        if self.rule.layout == "interleaved":
            wide = self.qkvz(x).unflatten(-1, (self.key_heads, -1))
            sizes = [self.key_dim, self.key_dim, group * self.value_dim, group * self.value_dim]
            q, k, v, z = (part.flatten(2) for part in wide.split(sizes, -1))
            b, a = (part.flatten(2) for part in self.ba(x).unflatten(-1, (self.key_heads, -1)).chunk(2, -1))
            return torch.cat([q, k, v], -1), z, b, a
        if self.rule.layout == "separate":
            return torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1), self.g_proj(x), self.b_proj(x), self.a_proj(x)
        numbers = self.first(x), self.second(x)
        b, a = numbers[::-1] if self.rule.layout == "numbers-swapped" else numbers
        return self.qkv(x), self.z(x), b, a

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        rule, trick = self.rule, self.rule.trick
        x = hidden_states.clamp(-2.0, 2.0) if trick == "input-clamp" else hidden_states
        rows, tokens, _ = x.shape
        mixed, z, b, a = self.project(x)
        if trick == "wide-convolution":
            weight, bias = self.conv.weight.float(), None if self.conv.bias is None else self.conv.bias.float()
            mixed = F.conv1d(mixed.float().transpose(1, 2), weight, bias, padding=rule.width - 1, groups=weight.shape[0])
        else:
            mixed = self.conv(mixed.transpose(1, 2))
        mixed = mixed[..., :tokens].transpose(1, 2)
        mixed = reference.ACTIVATIONS[rule.conv_activation](mixed)  # type: ignore[index]
        keys = self.key_heads * self.key_dim
        q, k, v = mixed.split([keys, keys, self.value_heads * self.value_dim], -1)
        if trick == "scaled-values":
            v = v * 1.01
        if trick == "keys-first":
            q, k = k, q
        group = self.value_heads // self.key_heads
        q, k = (t.unflatten(-1, (self.key_heads, -1)) for t in (q, k))
        if trick != "half-l2":
            q, k = q.float(), k.float()
        v = v.unflatten(-1, (self.value_heads, -1)).float()
        if trick != "no-l2":
            q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + rule.l2_eps) for t in (q, k))
        q, k = q.float(), k.float()
        if trick == "normalize":
            q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        q = q * (1.0 if trick == "no-scale" else self.key_dim**-0.5)
        if trick == "tiled-heads":
            q, k = q.repeat(1, 1, group, 1), k.repeat(1, 1, group, 1)
        else:
            q, k = q.repeat_interleave(group, 2), k.repeat_interleave(group, 2)
        beta = (b.float() if trick == "wide-beta" else b).sigmoid()
        beta = beta * rule.beta if rule.beta != 1.0 else beta
        a = a.float() + self.dt_bias
        soft = {
            "softplus-threshold": lambda: F.softplus(a, threshold=1.0),
            "softplus-beta": lambda: F.softplus(a, beta=2.0),
            "relu-decay": lambda: F.relu(a),
            "decay-floor": lambda: F.softplus(a).clamp(min=1e-2),
            "decay-limit": lambda: F.softplus(a).clamp(max=4.0),
        }.get(trick, lambda: F.softplus(a))()
        decay = (-self.A_log.float().exp() * soft).exp()
        out = self.scan(q, k, v, decay, beta.float()).to(x.dtype)
        if trick == "skip":
            out = out + (self.D[:, None] * v).to(x.dtype)
        out = self.norm(out.reshape(-1, self.value_dim), z.reshape(-1, self.value_dim)).reshape(rows, tokens, -1)
        if trick == "buffer":
            out = out + self.added
        if trick == "inner-clamp":
            out = out.clamp(-30.0, 30.0)
        if trick == "inner-factor":
            out = out * 1.001
        out = self.out(out)
        return out.clamp(-60.0, 60.0) if trick == "output-clamp" else out

    def scan(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        trick = self.rule.trick
        state = torch.zeros(q.shape[0], self.value_heads, self.key_dim, self.value_dim)
        outs = []
        for t in range(q.shape[1]):
            if trick == "forgets" and t % (self.rule.width + 2) == 0:
                state = torch.zeros_like(state)
            if trick == "decay-after":
                seen = (state * k[:, t, ..., None]).sum(-2)
                state = state * decay[:, t, :, None, None]
            else:
                state = state * decay[:, t, :, None, None]
                seen = (state * k[:, t, ..., None]).sum(-2)
            if trick == "no-delta":
                seen = torch.zeros_like(seen)
            state = state + k[:, t, ..., None] * ((v[:, t] - seen) * beta[:, t, :, None])[..., None, :]
            if trick == "half-state":
                state = state.to(torch.bfloat16).float()
            outs.append((state * q[:, t, ..., None]).sum(-2))
        return torch.stack(outs, 1)


@torch.no_grad()
def with_blocks(rule: Rule, dtype: torch.dtype = torch.float32, *, weights: str = "spread", seed: int = 0, **sizes: int) -> Any:
    """A tiny Llama with these blocks in place of its attention.

    Weights are "spread", or left as they were initialised and "fading": every state is gone after one token.
    """
    torch.manual_seed(seed)
    model = AUTO.from_config(families.tiny_config("llama", {"num_hidden_layers": 2}), dtype=torch.float32).eval()
    for layer in model.model.layers:
        block = OwnGdn(rule, **sizes)
        if weights == "fading":
            block.A_log.fill_(2.77)
        layer.self_attn = Wrapped(block)
    if weights == "spread":
        families.spread(model, seed)
    return model.to(dtype).eval()


class Wrapped(nn.Module):
    """Llama's layer expects attention weights beside the output."""

    def __init__(self, block: OwnGdn) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        return self.block(hidden_states), None
