"""The ground floor: the networks of both papers at any size, their KV cache, checkpoints and a tokenizer.

`Transformer` is the network of D2F (arXiv 2508.09192): the tiny models trained here, and LLaDA and Dream, are
the same class with another `TransformerConfig`. Public checkpoints load by renaming tensors
(`load_checkpoint`).

Conventions, used by every file:
- tokens are int64 [B, T]; a boolean mask is True where a query may attend to a key.
- RoPE is computed in float32 whatever the dtype of the weights.
- `shift`: output i predicts token i+1 (autoregressive models, Dream) instead of token i (LLaDA).
- The KV cache is preallocated. A forward writes the K/V of its window at the window's positions; to commit
  them a decoder moves a number of its own. Nothing is concatenated, copied or cleared.
"""

import importlib
import itertools
import json
import math
import os
import re
import shutil
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from tqdm import tqdm

# ---------------------------------------------------------------------------------------------- configuration


@dataclass
class TransformerConfig:
    """Everything that distinguishes LLaDA, Dream and the tiny models. A model is a config."""

    vocab_size: int  # rows of the embedding = columns of the logits
    n_tokens: int  # ids below this one exist in the tokenizer; the rest pads the table and is never chosen
    eos_id: int
    pad_id: int
    mask_id: int = -1  # -1: no such token; the model decodes autoregressively only
    d_model: int = 64
    n_layers: int = 3
    n_heads: int = 2
    n_kv_heads: int = 2  # fewer than n_heads: grouped-query attention
    d_mlp: int = 160
    max_len: int = 1024  # positions the model may see
    rope_base: float = 100.0
    norm_eps: float = 1e-6
    qkv_bias: bool = False
    tied_head: bool = True
    causal: bool = False  # the mask when the caller gives none
    shift: bool = True

    def __post_init__(self):
        if self.d_model % self.n_heads or self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"d_model {self.d_model}, n_heads {self.n_heads} and n_kv_heads {self.n_kv_heads}: "
                "each must be a multiple of the next"
            )

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_heads


@dataclass
class RecurrentConfig:
    """Huginn and the tiny recurrent-depth models; the same names as in TransformerConfig mean the same."""

    vocab_size: int
    n_tokens: int
    eos_id: int
    pad_id: int
    d_model: int = 64
    n_prelude: int = 1  # layers of P
    n_core: int = 1  # layers of R, run r times with the same weights
    n_coda: int = 1  # layers of C
    mean_recurrence: int = 8  # mean number of recurrences in training
    n_heads: int = 2
    d_mlp: int = 160
    max_len: int = 1024
    rope_base: float = 100.0
    norm_eps: float = 1e-6
    tied_head: bool = True

    causal = True  # not a field: the samplers rest on it

    def __post_init__(self):
        if self.d_model % (2 * self.n_heads):
            raise ValueError(f"d_model {self.d_model} must be a multiple of 2 x n_heads = {2 * self.n_heads}")

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_heads


# --------------------------------------------------------------------------------------------------- KV cache


class KVCache:
    """Keys and values of every layer: k, v [slots, batch, kv heads, max_len + 1, head_dim].

    A forward announces its window with `open`, then each layer calls `write`, which stores the window's K/V
    at its positions and returns all keys and values before `n_keys`. What a window wrote stays until another
    window writes the same positions, so a decoder commits by not writing there again. The one position past
    max_len takes what the padding of a ragged batch writes; no mask ever lets it be seen.
    """

    def __init__(self, slots, batch, kv_heads, max_len, head_dim, device="cpu", dtype=torch.float32):
        shape = (slots, batch, kv_heads, max_len + 1, head_dim)
        # zeros: a masked key must still be finite
        self.k, self.v = torch.zeros((2, *shape), device=device, dtype=dtype)
        self.max_len = max_len

    def open(self, at, n_keys: int):
        """Announce a window: at from `window_positions`; attention sees cache positions [0, n_keys)."""
        self.at, self.n_keys = at, n_keys
        if not isinstance(at, slice):
            self.rows = torch.arange(len(at), device=self.k.device)[:, None]

    def write(self, slot: int, k, v):
        """Store k, v [B, T, kv heads, D] of the open window; return keys, values [B, kv heads, n_keys, D]."""
        if isinstance(self.at, slice):
            self.k[slot, :, :, self.at] = k.transpose(1, 2)
            self.v[slot, :, :, self.at] = v.transpose(1, 2)
        else:
            self.k[slot][self.rows, :, self.at] = k
            self.v[slot][self.rows, :, self.at] = v
        return self.k[slot, :, :, : self.n_keys], self.v[slot, :, :, : self.n_keys]

    def keep(self, rows):
        """Drop every batch row but these (int array), when the others are done."""
        rows = torch.as_tensor(rows, device=self.k.device)
        self.k, self.v = self.k[:, rows], self.v[:, rows]

    @property
    def nbytes(self) -> int:
        return 2 * self.k.numel() * self.k.element_size()


def window_positions(start, length: int, max_len: int, device):
    """Where a window of `length` tokens stands: a slice when all rows agree, else int64 [B, length].

    start: int, int array [B] (first position of each row) or int array [B, length] (every position).
    Positions past max_len, the padding of a ragged batch, become max_len: the cache's scrap position.
    """
    if isinstance(start, int) and start + length <= max_len:
        return slice(start, start + length)
    at = np.asarray(start)
    if at.ndim < 2:
        at = at.reshape(-1, 1) + np.arange(length)
    first = int(at[0, 0])
    if first + length <= max_len and (at == np.arange(first, first + length)).all():
        return slice(first, first + length)
    return torch.from_numpy(np.minimum(at, max_len)).to(device)


# ----------------------------------------------------------------------------------------------------- layers


def rotary_table(head_dim: int, max_len: int, base: float, interleaved: bool, device) -> torch.Tensor:
    """[2, max_len + 1, 1, head_dim] float32: cos, and sin with the sign of the first element of each pair
    folded in.

    Pairs are (i, i + head_dim/2), or (2i, 2i + 1) when interleaved (Huginn).
    """
    inv_freq = base ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    angle = torch.arange(max_len + 1, device=device, dtype=torch.float32)[:, None] * inv_freq
    cos, sin = angle.cos(), angle.sin()
    if interleaved:
        cos, sin = cos.repeat_interleave(2, -1), torch.stack((-sin, sin), -1).flatten(-2)
    else:
        cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    return torch.stack((cos, sin))[:, :, None]


def rotate(x, rope, interleaved: bool):
    """RoPE on x [B, T, H, D] with rope = (cos, sin), each [T, 1, D] or [B, T, 1, D]; computed in float32."""
    cos, sin = rope
    y = x.float()
    partner = y.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) if interleaved else y.roll(y.shape[-1] // 2, -1)
    return torch.addcmul(y * cos, partner, sin).to(x.dtype)


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention, q, k and v in one product: [B, T, d] -> [B, T, d]."""

    def __init__(
        self, d: int, n_heads: int, n_kv_heads: int, qkv_bias=False, qk_bias=False, interleaved=False
    ):
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, d // n_heads
        self.interleaved = interleaved
        self.qkv = nn.Linear(d, (n_heads + 2 * n_kv_heads) * self.head_dim, bias=qkv_bias)
        self.qk_bias = nn.Parameter(torch.zeros(2, 1, n_heads, self.head_dim)) if qk_bias else None
        self.out = nn.Linear(d, d, bias=False)

    def forward(self, x, rope, mask, cache=None, slot=0):
        B, T, d = x.shape
        qkv = self.qkv(x).view(B, T, -1, self.head_dim)  # (B, T, q heads + k heads + v heads, D)
        qk, v = qkv.split((self.n_heads + self.n_kv_heads, self.n_kv_heads), 2)
        if self.qk_bias is not None:
            qk = qk + self.qk_bias.flatten(0, 2)
        q, k = rotate(qk, rope, self.interleaved).split((self.n_heads, self.n_kv_heads), 2)
        k, v = cache.write(slot, k, v) if cache else (k.transpose(1, 2), v.transpose(1, 2))  # (B, Hkv, S, D)
        grouped = {"enable_gqa": True} if self.n_kv_heads < self.n_heads else {}
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask, **grouped)
        return self.out(y.transpose(1, 2).reshape(B, T, d))


class SwiGLU(nn.Module):
    """Gated MLP, gate and up projection in one product: [B, T, d] -> [B, T, d]."""

    def __init__(self, d: int, d_mlp: int):
        super().__init__()
        self.gate_up = nn.Linear(d, 2 * d_mlp, bias=False)
        self.down = nn.Linear(d_mlp, d, bias=False)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """Pre-norm block of LLaDA, Dream, Llama and Qwen."""

    def __init__(self, c: TransformerConfig):
        super().__init__()
        self.attn_norm = RMSNorm(c.d_model, c.norm_eps)
        self.attn = Attention(c.d_model, c.n_heads, c.n_kv_heads, qkv_bias=c.qkv_bias)
        self.mlp_norm = RMSNorm(c.d_model, c.norm_eps)
        self.mlp = SwiGLU(c.d_model, c.d_mlp)

    def forward(self, x, rope, mask, cache=None, slot=0):
        x = x + self.attn(self.attn_norm(x), rope, mask, cache, slot)
        return x + self.mlp(self.mlp_norm(x))


# ------------------------------------------------------------------------------------------------ transformer


class Network(nn.Module):
    """What both architectures share: where a window stands, what it may attend to, and its cache."""

    rope_interleaved = False
    _rope = None  # not a buffer: it stays float32 and costs nothing until a forward needs it

    def place(self, length: int, start, mask, cache):
        """Rotary tables and additive attention mask of a window; opens it in the cache.

        start: see `window_positions`, or its result, int64 [B, length]. mask: bool, broadcastable to
        [B, 1, length, keys], True = may attend; None = config.causal decides.
        """
        c, device = self.config, self.device
        if self._rope is None or self._rope.device != device:
            self._rope = rotary_table(c.head_dim, c.max_len, c.rope_base, self.rope_interleaved, device)
        at = start
        if not isinstance(start, torch.Tensor):
            at = window_positions(start, length, cache.max_len if cache else c.max_len, device)
        if mask is None and c.causal and not isinstance(at, slice):  # rows that start apart
            host = np.asarray(start) if np.ndim(start) > 1 else np.asarray(start)[:, None] + np.arange(length)
            last = host[host < (cache.max_len if cache else c.max_len)].max()
            keys = torch.arange(int(last) + 1, device=device)
            mask = (keys <= at[:, :, None])[:, None]  # (B, 1, T, keys); padding may see everything
        elif mask is None and c.causal and length > 1:
            ones = torch.ones(length, at.stop, dtype=torch.bool, device=device)
            mask = ones.tril(at.start)
        if cache:
            cache.open(at, at.stop if mask is None else mask.shape[-1])
        if mask is not None:
            mask = torch.where(mask, 0.0, float("-inf")).to(self.dtype)
        return self._rope[:, at], mask

    @property
    def device(self):
        return self.embedding.weight.device

    @property
    def dtype(self):
        return self.embedding.weight.dtype

    def n_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())


class Transformer(Network):
    """LLaDA, Dream, Llama, Qwen2.5 and the tiny models: tokens [B, T] -> logits [B, T, vocab_size]."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.config = c = config
        self.embedding = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.n_layers))
        self.norm = RMSNorm(c.d_model, c.norm_eps)
        self.lm_head = None if c.tied_head else nn.Linear(c.d_model, c.vocab_size, bias=False)

    def hidden(self, tokens, start=0, mask=None, cache=None):
        """Final hidden states [B, T, d] of a window of tokens [B, T] that begins at position start (see
        `place`).

        With a cache, the window's K/V are written at its positions and it attends to cache[0 :
        mask.shape[-1]] (without a mask: to everything up to its own last position).
        """
        return self.layers(tokens, (*self.place(tokens.shape[1], start, mask, cache), cache))

    def layers(self, tokens, window):
        """The work of `hidden`, on tensors alone; window: (rope, mask, cache)."""
        x = self.embedding(tokens)  # (B, T, d)
        for i, block in enumerate(self.blocks):
            x = block(x, *window, i)
        return self.norm(x)

    def head(self, hidden):
        """Logits [..., vocab_size] of hidden states [..., d]. A decoder calls it where it needs a token."""
        return F.linear(hidden, self.embedding.weight if self.lm_head is None else self.lm_head.weight)

    def forward(self, tokens, start=0, mask=None, cache=None):
        return self.head(self.hidden(tokens, start, mask, cache))

    def new_cache(self, batch: int, max_len: int) -> KVCache:
        c = self.config
        return KVCache(c.n_layers, batch, c.n_kv_heads, max_len, c.head_dim, self.device, self.dtype)

    def init_weights(self, generator=None):
        """Normal weights: std 1/sqrt(fan in), output projections smaller with depth; for training from
        scratch.
        """
        for name, p in self.named_parameters():
            if p.dim() < 2:
                continue
            scale = (
                (2 * self.config.n_layers) ** -0.5 if name.endswith(("out.weight", "down.weight")) else 1.0
            )
            std = 0.02 if "embedding" in name else scale * p.shape[1] ** -0.5
            nn.init.normal_(p, 0.0, std, generator=generator)
        return self


# -------------------------------------------------------------------------------------------- recurrent depth


class SandwichBlock(nn.Module):
    """Huginn's block: a norm before and after each half; the second one normalises the residual stream
    itself.
    """

    def __init__(self, c: RecurrentConfig):
        super().__init__()
        self.norm_1, self.norm_2, self.norm_3, self.norm_4 = (
            RMSNorm(c.d_model, c.norm_eps) for _ in range(4)
        )
        self.attn = Attention(c.d_model, c.n_heads, c.n_heads, qk_bias=True, interleaved=True)
        self.mlp = SwiGLU(c.d_model, c.d_mlp)

    def forward(self, x, rope, mask, cache=None, slot=0):
        x = self.norm_2(self.attn(self.norm_1(x), rope, mask, cache, slot) + x)
        return self.norm_4(self.mlp(self.norm_3(x)) + x)


class RecurrentDepth(Network):
    """Huginn and the tiny recurrent-depth models (arXiv 2502.05171): e = P(x), s_i = R(e, s_i-1), p = C(s_r).

    A forward announces its window once, then calls `embed`, `recur` r times and `decode` on it:

        w = model.window(T, start, cache)
        e, z = model.embed(tokens, w), model.initial_state(B, T)
        for i in range(r):
            z = model.recur(z, e, w, i)
        logits = model.decode(z, w)
    """

    rope_interleaved = True

    def __init__(self, config: RecurrentConfig):
        super().__init__()
        self.config = c = config
        self.embedding = nn.Embedding(c.vocab_size, c.d_model)
        self.prelude = nn.ModuleList(SandwichBlock(c) for _ in range(c.n_prelude))
        self.adapter = nn.Linear(2 * c.d_model, c.d_model, bias=False)
        self.core = nn.ModuleList(SandwichBlock(c) for _ in range(c.n_core))
        self.coda = nn.ModuleList(SandwichBlock(c) for _ in range(c.n_coda))
        self.norm = RMSNorm(c.d_model, c.norm_eps)  # used twice: before and after the coda
        self.lm_head = None if c.tied_head else nn.Linear(c.d_model, c.vocab_size, bias=False)

    def window(self, length: int, start=0, cache=None):
        """(rope, mask, cache) of the causal window [start, start + length) of each row; see `place`."""
        return *self.place(length, start, None, cache), cache

    def embed(self, tokens, window):
        """P: tokens [B, T] -> e [B, T, d], what every recurrence is given anew (input injection)."""
        x = self.embedding(tokens) * self.config.d_model**0.5
        for layer, block in enumerate(self.prelude):
            x = block(x, *window, layer)
        return x

    def recur(self, state, e, window, i: int = 0):
        """R: states [B, T, d] -> states [B, T, d] after one more recurrence, the i-th: its K/V go to slot i
        mod n.
        """
        cache, c = window[2], self.config
        slot = c.n_prelude + (i % cache.n_recurrences * c.n_core if cache else 0)
        x = self.adapter(torch.cat((state, e), -1))
        for layer, block in enumerate(self.core):
            x = block(x, *window, slot + layer)
        return x

    def decode(self, state, window, last=None):
        """C: states [B, T, d] -> logits [B, T, vocab_size] of the tokens that follow.

        With last (int64 [B]) only those that follow position last of each row, [B, 1, vocab_size].
        """
        x = self.norm(state)
        for layer, block in enumerate(self.coda):
            x = block(x, *window, layer - len(self.coda))
        if last is not None:
            x = x[torch.arange(len(x), device=x.device), last][:, None]
        return F.linear(self.norm(x), self.embedding.weight if self.lm_head is None else self.lm_head.weight)

    def initial_state(self, batch: int, length: int, generator=None):
        """s_0 [batch, length, d]: normal, cut at 3 sigma, times sqrt(d); sigma^2 = 2 / (5 d). Drawn on the
        CPU.
        """
        sigma = 0.4**0.5  # sqrt(d) times sqrt(2 / (5 d))
        state = torch.empty(batch, length, self.config.d_model).normal_(0.0, sigma, generator=generator)
        while (far := state.abs() > 3 * sigma).any():
            again = torch.empty_like(state).normal_(0.0, sigma, generator=generator)
            state = torch.where(far, again, state)
        return state.to(self.embedding.weight)

    def forward(self, tokens, r: int, state=None):
        """Logits [B, T, vocab_size] of whole sequences [B, T] after r recurrences from a state, else a random
        one.
        """
        w = self.window(tokens.shape[1])
        e = self.embed(tokens, w)
        z = self.initial_state(*tokens.shape) if state is None else state
        for _ in range(r):
            z = self.recur(z, e, w)
        return self.decode(z, w)

    def new_cache(self, batch: int, max_len: int, n_recurrences: int = 1) -> KVCache:
        """n_recurrences = 1: a later recurrence overwrites an earlier one's K/V (shared); r: each keeps its
        own.
        """
        c = self.config
        slots = c.n_prelude + n_recurrences * c.n_core + c.n_coda
        cache = KVCache(slots, batch, c.n_heads, max_len, c.head_dim, self.device, self.dtype)
        cache.n_recurrences = n_recurrences
        return cache

    def init_weights(self, generator=None):
        """Huginn's: std sqrt(2 / (5 d)), output projections smaller with the depth at the mean recurrence."""
        c = self.config
        depth = c.n_prelude + c.mean_recurrence * c.n_core + c.n_coda
        for name, p in self.named_parameters():
            if name.endswith("weight") and p.dim() == 2:
                std = (0.4 / c.d_model) ** 0.5
                std *= (2 * depth) ** -0.5 if name.endswith(("out.weight", "down.weight")) else 1.0
                nn.init.normal_(p, 0.0, std, generator=generator)
        return self


# ------------------------------------------------------------------------- windows that can be compiled


def first_line(error) -> str:
    return str(error).strip().partition("\n")[0]


class Static:
    """The decoders' view of a model whose windows have few sizes, so that its work can be compiled.

    Windows are padded to the next of `sizes`, their keys to the whole cache; padding is written to the
    cache's scrap position. The output is the model's own. compile: how to compile a method, for example
    torch.compile; one where that fails runs as it is, with a sentence that says why. A window without a cache
    or beyond the last size runs as it is, too.
    """

    def __init__(self, model: Network, compile: Callable | None = None, sizes=(1, 8, 16, 32, 64, 128, 256)):
        self.model, self.compile, self.sizes, self.compiled = model, compile, sizes, {}

    def __getattr__(self, name):
        return getattr(self.model, name)

    def hidden(self, tokens, start=0, mask=None, cache=None):
        """See `Transformer.hidden`."""
        return self.run("layers", (tokens,), self.window(tokens.shape[1], start, cache, mask))

    def embed(self, tokens, window):
        """See `RecurrentDepth`, here and below."""
        return self.run("embed", (tokens,), window)

    def recur(self, state, e, window, i: int = 0):
        return self.run("recur", (state, e), window, i % window[2].n_recurrences if window[2] else 0)

    def decode(self, state, window, last=None):
        return self.run("decode", (state,), window, last)

    def window(self, length: int, start=0, cache=None, mask=None):
        """(rope, mask, cache) of a window of `length` tokens, padded: see `Network.place`."""
        size = next((n for n in self.sizes if n >= length), None)
        if cache is None or size is None:
            return *self.model.place(length, start, mask, cache), cache
        first = np.asarray(start)
        at = np.full((len(cache.k[0]), size), cache.max_len)  # the scrap position
        at[:, :length] = first if first.ndim == 2 else first.reshape(-1, 1) + np.arange(length)
        at = torch.from_numpy(np.minimum(at, cache.max_len)).to(self.device)
        if mask is None:  # as in `place`: everything up to the window's end, or causal
            seen = at if self.config.causal else at[:, length - 1 : length].expand(at.shape)
            mask = torch.arange(cache.max_len, device=self.device) <= seen[:, None, :, None]
        else:
            mask = F.pad(mask, (0, cache.max_len - mask.shape[-1])).expand(len(at), 1, length, -1)
            mask = F.pad(mask, (0, 0, 0, size - length), value=True)
        return *self.model.place(size, at, mask, cache), cache

    def run(self, name: str, inputs, window, *rest):
        """A method of the model on inputs [B, T, ...], padded as the window is: [B, T, ...]."""
        length, size = inputs[0].shape[1], window[0].shape[-3]
        plain = getattr(self.model, name)
        if window[2] is None or size not in self.sizes:
            return plain(*inputs, window, *rest)
        inputs = [F.pad(x, (0, 0) * (x.dim() - 2) + (0, size - length)) for x in inputs]
        run = self.compiled.get(name) or (self.compile(plain) if self.compile else plain)
        try:
            out = run(*inputs, window, *rest)
        except Exception as e:  # whatever a compiler trips over
            if run == plain:
                raise
            print(f"{name} is not compiled: {type(e).__name__}: {first_line(e)}", file=sys.stderr)
            run = plain
            out = run(*inputs, window, *rest)
        self.compiled[name] = run
        return out[:, :length]


# ------------------------------------------------------------------------------------------------ safetensors

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DTYPES |= {"I64": torch.int64, "I32": torch.int32, "U8": torch.uint8, "BOOL": torch.bool}


@dataclass
class Stored:
    """A tensor in a .safetensors file, read when its rows are asked for."""

    path: Path
    dtype: torch.dtype
    shape: list[int]
    begin: int  # its first byte in the file

    def rows(self, first: int = 0, last: int | None = None) -> torch.Tensor:
        """Elements [first, last) of its first dimension, memory-mapped for as long as the result lives."""
        n, *rest = self.shape or [1]
        last = n if last is None else min(last, n)
        row = math.prod(rest) * self.dtype.itemsize
        if (last - first) * row == 0:
            return torch.empty(self.shape, dtype=self.dtype)
        raw = torch.from_numpy(
            np.memmap(self.path, np.uint8, "c", self.begin + first * row, (last - first) * row)
        )
        raw = raw if self.begin % self.dtype.itemsize == 0 else raw.clone()  # torch wants aligned elements
        return raw.view(self.dtype).reshape([last - first, *rest] if self.shape else [])


def safetensors_header(path) -> dict[str, Stored]:
    """The tensors of a .safetensors file by name, not read yet.

    The format: 8 bytes little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, raw
    data. Raises ValueError for a file that is truncated, or whose header is damaged.
    """
    path, size, tensors, used = Path(path), os.path.getsize(path), {}, []
    with open(path, "rb") as f:
        start = 8 + int.from_bytes(f.read(8), "little")
        if start > size:
            raise ValueError(f"{path}: the header ends at byte {start} but the file has {size} bytes")
        header = parse_json(f.read(start - 8), f"the header of {path}")
    header.pop("__metadata__", None)
    for name, t in header.items():
        if t["dtype"] not in DTYPES:
            raise ValueError(f"{path}: {name} has dtype {t['dtype']}; known are {', '.join(DTYPES)}")
        dtype, (begin, end) = DTYPES[t["dtype"]], (start + offset for offset in t["data_offsets"])
        if not start <= begin <= end <= size or end - begin != math.prod(t["shape"]) * dtype.itemsize:
            raise ValueError(
                f"{path}: {name} {t['shape']} is said to be bytes {begin} to {end}, but the file has {size} "
                "bytes; it is truncated or damaged"
            )
        tensors[name] = Stored(path, dtype, t["shape"], begin)
        used.append((begin, end, name))
    for (_, end, one), (begin, _, other) in itertools.pairwise(sorted(used)):
        if begin < end:
            raise ValueError(f"{path}: {one} and {other} overlap at byte {begin}; the header is damaged")
    return tensors


def read_safetensors(path) -> dict[str, torch.Tensor]:
    """Tensors of a .safetensors file by name, memory-mapped: nothing is read until it is used."""
    return {name: stored.rows() for name, stored in safetensors_header(path).items()}


def write_safetensors(path, tensors: dict[str, torch.Tensor]):
    """Write tensors by name; the inverse of `read_safetensors`."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    header, data, offset = {}, [], 0
    for name, t in tensors.items():
        data.append(t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        end = offset + len(data[-1])
        header[name] = {"dtype": names[t.dtype], "shape": list(t.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that every float32 tensor is aligned
    with open(path, "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        f.writelines(data)


# ------------------------------------------------------------------------------------------------ checkpoints


def save_checkpoint(folder, model, **extra):
    """Write config.json (the config, and `extra`) and model.safetensors into folder, as a whole or not at
    all.
    """
    folder = Path(folder)
    fresh, old = folder.with_name(folder.name + ".new"), folder.with_name(folder.name + ".old")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    config = {"model_type": type(model).__name__, **asdict(model.config), **extra}
    (fresh / "config.json").write_text(json.dumps(config, indent=1))
    write_safetensors(fresh / "model.safetensors", model.state_dict())
    restore_checkpoint(folder)
    if folder.exists():
        folder.rename(old)
    fresh.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def restore_checkpoint(folder):
    """Undo a save that was killed between its two renames: the previous checkpoint is then FOLDER.old."""
    folder = Path(folder)
    old = folder.with_name(folder.name + ".old")
    if old.exists() and not folder.exists():
        old.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def parse_json(text, name: str):
    """The value of a JSON text, else ValueError with the name of what it was."""
    try:
        return json.loads(text)
    except ValueError as e:
        raise ValueError(f"{name} is not valid JSON: {e}") from None


def read_json(path, default=None):
    """A JSON file, or the default when there is none."""
    path = Path(path)
    return parse_json(path.read_text(), str(path)) if path.exists() else default


def read_config(folder) -> dict:
    """config.json of a checkpoint folder."""
    restore_checkpoint(folder)
    j = read_json(Path(folder) / "config.json")
    if j is None:
        raise FileNotFoundError(f"no checkpoint in {folder}: {Path(folder) / 'config.json'} does not exist")
    return j


def stored_tensors(folder) -> dict[str, Stored]:
    """All tensors of a folder: model.safetensors, or the shards that model.safetensors.index.json names."""
    folder = Path(folder)
    index = read_json(folder / "model.safetensors.index.json")
    where = index["weight_map"] if index else {}
    tensors = {}
    for shard in sorted(set(where.values())) or ["model.safetensors"]:
        if Path(shard).name != shard:
            raise ValueError(f"{folder}: the weight map names {shard!r}, which is not a file of this folder")
        if not (folder / shard).exists():
            raise FileNotFoundError(f"{folder / shard} does not exist")
        tensors.update(safetensors_header(folder / shard))
    for name, shard in where.items():
        if name not in tensors or tensors[name].path.name != shard:
            raise ValueError(f"{folder}: the weight map says that {name} is in {shard}, but it is not")
    return tensors


def read_tensors(folder) -> dict[str, torch.Tensor]:
    """All tensors of a folder, memory-mapped."""
    return {name: stored.rows() for name, stored in stored_tensors(folder).items()}


def checkpoint_name(folder) -> str:
    """The name of a folder; in the hub's cache (models--owner--name/snapshots/hash), the name there."""
    parts = Path(folder).resolve().parts
    hub = [part.split("--")[-1] for part in parts if part.startswith("models--")]
    return hub[-1] if hub else parts[-1]


def special_id(folder, j: dict, kind: str) -> int | None:
    """Token id of a kind (eos, pad, mask) as the checkpoint's files say it, the first of several, or None."""
    for source in (j, read_json(Path(folder) / "generation_config.json", {})):
        value = source.get(f"{kind}_token_id")
        value = value[0] if isinstance(value, list) else value
        if value is not None:
            return value
    tokens = read_json(Path(folder) / "tokenizer_config.json", {})
    text = tokens.get(f"{kind}_token")
    text = text["content"] if isinstance(text, dict) else text
    ids = [int(i) for i, t in tokens.get("added_tokens_decoder", {}).items() if t["content"] == text]
    return ids[0] if ids else None


def special_ids(folder, j: dict, masked: bool) -> dict:
    """eos_id, pad_id (EOS where a checkpoint has none) and, for diffusion models, mask_id."""
    ids = {f"{kind}_id": special_id(folder, j, kind) for kind in ("eos", "pad", "mask")}
    for kind in ("eos", "mask") if masked else ("eos",):
        if ids[f"{kind}_id"] is None:
            raise ValueError(
                f"{folder}: neither config.json nor the tokenizer's files give a {kind}_token_id"
            )
    if not masked:
        del ids["mask_id"]
    return ids | {"pad_id": ids["eos_id"] if ids["pad_id"] is None else ids["pad_id"]}


def refuse(j: dict, **known):
    """ValueError for a field of config.json that changes the mathematics to something we do not have."""
    for field, value in known.items():
        if j.get(field) not in (value, None):
            hint = "; scaled RoPE (Llama 3.1) is out of scope" if field == "rope_scaling" else ""
            raise ValueError(f"config.json: {field} is {j[field]!r}; only {value!r} is implemented{hint}")


def llada_layout(folder, j: dict):
    """config.json of LLaDA -> our config, and {our name: public names whose tensors are stacked}."""
    refuse(j, alibi=False, rope=True, block_type="llama", activation_type="silu", layer_norm_type="rms")
    refuse(j, attention_layer_norm=False, include_bias=False, bias_for_layer_norm=False, block_group_size=1)
    refuse(j, input_emb_norm=False, scale_logits=False, layer_norm_with_affine=True, rope_scaling=None)
    refuse(j, clip_qkv=None)
    config = TransformerConfig(
        **special_ids(folder, j, masked=True),
        vocab_size=j.get("embedding_size") or j["vocab_size"],
        n_tokens=j["vocab_size"],
        d_model=j["d_model"],
        n_layers=j["n_layers"],
        n_heads=j["n_heads"],
        n_kv_heads=j.get("n_kv_heads") or j["n_heads"],
        d_mlp=j["mlp_hidden_size"],
        max_len=j["max_sequence_length"],
        rope_base=j["rope_theta"],
        norm_eps=j["rms_norm_eps"],
        qkv_bias=bool(j.get("include_qkv_bias")),
        tied_head=j["weight_tying"],
        causal=False,
        shift=False,
    )
    top, block = "model.transformer.", "model.transformer.blocks.{}."
    names = {"embedding.weight": [top + "wte.weight"], "norm.weight": [top + "ln_f.weight"]}
    if not config.tied_head:
        names["lm_head.weight"] = [top + "ff_out.weight"]
    parts = {
        "attn_norm": ["attn_norm"],
        "attn.qkv": ["q_proj", "k_proj", "v_proj"],
        "attn.out": ["attn_out"],
        "mlp_norm": ["ff_norm"],
        "mlp.gate_up": ["ff_proj", "up_proj"],
        "mlp.down": ["ff_out"],
    }
    return config, names | block_names(config, block, parts)


def llama_layout(folder, j: dict):
    """The same for Dream, Qwen2 and Llama, which share their names. The last two are autoregressive."""
    dream, llama = j["model_type"] == "Dream", j["model_type"] == "llama"
    refuse(j, hidden_act="silu", rope_scaling=None, use_sliding_window=False, attention_bias=False)
    refuse(j, mlp_bias=False, use_mrope=False, head_dim=j["hidden_size"] // j["num_attention_heads"])
    config = TransformerConfig(
        **special_ids(folder, j, masked=dream),
        vocab_size=j["vocab_size"],
        n_tokens=j["vocab_size"],
        d_model=j["hidden_size"],
        n_layers=j["num_hidden_layers"],
        n_heads=j["num_attention_heads"],
        n_kv_heads=j.get("num_key_value_heads") or j["num_attention_heads"],
        d_mlp=j["intermediate_size"],
        max_len=j["max_position_embeddings"],
        rope_base=j.get("rope_theta", 10000.0),
        norm_eps=j["rms_norm_eps"],
        qkv_bias=not llama,
        tied_head=j.get("tie_word_embeddings", False),
        causal=not dream,
        shift=True,
    )
    names = {"embedding.weight": ["model.embed_tokens.weight"], "norm.weight": ["model.norm.weight"]}
    if not config.tied_head:
        names["lm_head.weight"] = ["lm_head.weight"]
    parts = {
        "attn_norm": ["input_layernorm"],
        "attn.qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        "attn.out": ["self_attn.o_proj"],
        "mlp_norm": ["post_attention_layernorm"],
        "mlp.gate_up": ["mlp.gate_proj", "mlp.up_proj"],
        "mlp.down": ["mlp.down_proj"],
    }
    return config, names | block_names(config, "model.layers.{}.", parts)


def huginn_layout(folder, j: dict):
    """The same for Huginn and its fine-tuned variants. Its freqs_cis is our rotary_table."""
    refuse(j, block_class_name="SandwichBlock", norm_class_name="RMSNorm_llama", mlp_class_name="GatedMLP")
    refuse(j, nonlin_name="SiLU", injection_type="linear", qk_bias=True, bias=False, state_init="like-init")
    refuse(j, test_time_noise=0)
    config = RecurrentConfig(
        **special_ids(folder, j, masked=False),
        vocab_size=j.get("padded_vocab_size") or j["vocab_size"],
        n_tokens=j["vocab_size"],
        d_model=j["n_embd"],
        n_prelude=j["n_layers_in_prelude"],
        n_core=j["n_layers_in_recurrent_block"],
        n_coda=j["n_layers_in_coda"],
        mean_recurrence=j["mean_recurrence"],
        n_heads=j["num_attention_heads"] if "num_attention_heads" in j else j["n_heads"],
        d_mlp=j["intermediate_size"],
        max_len=j["block_size"],
        rope_base=j["rope_base"],
        norm_eps=j["norm_eps"],
        tied_head=j["tie_embeddings"],
    )
    names = {"embedding.weight": ["transformer.wte.weight"], "norm.weight": ["transformer.ln_f.weight"]}
    names["adapter.weight"] = ["transformer.adapter.weight"]
    if not config.tied_head:
        names["lm_head.weight"] = ["lm_head.weight"]
    parts = {f"norm_{i}.weight": f"norm_{i}.weight" for i in (1, 2, 3, 4)}
    parts |= {"attn.qkv.weight": "attn.Wqkv.weight", "attn.qk_bias": "attn.qk_bias"}
    parts |= {"attn.out.weight": "attn.proj.weight"}
    parts |= {"mlp.gate_up.weight": "mlp.fc.weight", "mlp.down.weight": "mlp.proj.weight"}
    groups = [("prelude", "prelude", config.n_prelude), ("core", "core_block", config.n_core)]
    for ours, public, n in [*groups, ("coda", "coda", config.n_coda)]:
        for i in range(n):
            names |= {f"{ours}.{i}.{a}": [f"transformer.{public}.{i}.{b}"] for a, b in parts.items()}
    return config, names


def block_names(config, prefix: str, parts: dict[str, list[str]]) -> dict[str, list[str]]:
    """{our name: public names} of every layer; prefix has {} for the layer's number."""
    kinds = {part: ["weight"] for part in parts}
    if config.qkv_bias:
        kinds["attn.qkv"] = ["weight", "bias"]
    return {
        f"blocks.{i}.{ours}.{kind}": [f"{prefix.format(i)}{p}.{kind}" for p in public]
        for i in range(config.n_layers)
        for ours, public in parts.items()
        for kind in kinds[ours]
    }


def own_layout(folder, j: dict):
    """A tiny checkpoint of `save_checkpoint`: our fields and our names."""
    cls, config_cls = MODELS[j["model_type"]]
    config = config_cls(**{name: j[name] for name in config_cls.__dataclass_fields__ if name in j})
    with torch.device("meta"):
        return config, {name: [name] for name in cls(config).state_dict()}


MODELS = {
    "Transformer": (Transformer, TransformerConfig),
    "RecurrentDepth": (RecurrentDepth, RecurrentConfig),
}
LAYOUTS = {"llada": (Transformer, llada_layout), "Dream": (Transformer, llama_layout)}
LAYOUTS |= {"qwen2": (Transformer, llama_layout), "llama": (Transformer, llama_layout)}
LAYOUTS |= {"huginn_raven": (RecurrentDepth, huginn_layout)}
LAYOUTS |= {name: (cls, own_layout) for name, (cls, _) in MODELS.items()}


def read_layout(folder):
    """The model of a checkpoint folder, without data, and {our name: public names that are stacked}."""
    j = read_config(folder)
    kind = j.get("model_type")
    if kind not in LAYOUTS:
        raise ValueError(f"{folder}: model_type {kind!r} is unknown; known are {', '.join(LAYOUTS)}")
    cls, layout = LAYOUTS[kind]
    try:
        config, names = layout(folder, j)
    except KeyError as e:
        raise ValueError(f"{folder}: config.json lacks the field {e}") from None
    with torch.device("meta"):
        return cls(config), names


def load_checkpoint(folder, device="cpu", dtype=torch.float32, lora=None, any_base=False):
    """Model of a checkpoint folder: a tiny one of `save_checkpoint`, LLaDA, Dream, Qwen2, Llama or Huginn.

    lora: a PEFT folder whose adapter is merged, W + (alpha / r) B A in float32 before the cast. The tensors
    are copied one by one from the memory-mapped files, so that little more than the weights is ever in
    memory. In eval mode. Raises FileNotFoundError or ValueError, one sentence each: no config, unknown
    model_type or field, truncated file, missing, unexpected or mis-shaped tensors by name, an adapter for
    another base (unless any_base).
    """
    model, names = read_layout(folder)
    tensors = stored_tensors(folder)
    expected = {name for public in names.values() for name in public}
    redundant = {"freqs_cis"} | ({"lm_head.weight"} if model.config.tied_head else set())
    for what, wrong in (
        ("lacks", expected - set(tensors)),
        ("has unexpected", set(tensors) - expected - redundant),
    ):
        if wrong:
            raise ValueError(f"{folder}: the checkpoint {what} {len(wrong)} tensors: {some(wrong)}")
    deltas = read_lora(lora, folder, tensors, any_base) if lora else {}
    model = model.to(dtype).to_empty(device=device).eval()
    for name, param in model.state_dict().items():
        copy_tensors(param, names[name], tensors, deltas, folder)
    return model.requires_grad_(False)


def some(names) -> str:
    return ", ".join(sorted(names)[:8]) + (", ..." if len(names) > 8 else "")


CHUNK = 1 << 25  # bytes of a file that are mapped at a time: mapped pages count as resident memory


def copy_tensors(param, public: list[str], tensors: dict[str, Stored], deltas: dict, folder):
    """Copy the public tensors, stacked along the first dimension, into param; add their LoRA deltas."""
    parts = [tensors[name] for name in public]
    shape = [sum(p.shape[0] for p in parts), *parts[0].shape[1:]]
    if list(param.shape) != shape or any(p.shape[1:] != parts[0].shape[1:] for p in parts):
        shapes = ", ".join(str(p.shape) for p in parts)
        raise ValueError(
            f"{folder}: {', '.join(public)}: shape {shapes} found where {list(param.shape)} was expected"
        )
    for name, part, piece in zip(public, parts, param.split([p.shape[0] for p in parts]), strict=True):
        step = max(1, CHUNK // max(1, math.prod(part.shape[1:]) * part.dtype.itemsize))
        for i in range(0, part.shape[0], step):
            rows = part.rows(i, i + step)
            if name in deltas:
                scale, b, a = deltas[name]
                rows = rows.float() + scale * (b[i : i + step] @ a)
            piece[i : i + step].copy_(rows)


# ------------------------------------------------------------------------------------------------------- LoRA


def read_lora(lora, folder, tensors: dict[str, Stored], any_base: bool) -> dict:
    """{public weight name: (alpha / r, B [out, r], A [r, in])} of a PEFT folder, in float32."""
    j = read_json(Path(lora) / "adapter_config.json")
    if j is None or not (Path(lora) / "adapter_model.safetensors").exists():
        raise FileNotFoundError(f"{lora} has no adapter_config.json with an adapter_model.safetensors")
    known = dict(peft_type="LORA", use_dora=False, use_rslora=False, bias="none", lora_bias=False)
    known |= dict(fan_in_fan_out=False, modules_to_save=None, rank_pattern={}, alpha_pattern={})
    for field, value in known.items():
        if j.get(field, value) not in (value, None):
            raise ValueError(f"{lora}: adapter_config.json: {field} is {j[field]!r}; only {value!r} is known")
    check_base(lora, j.get("base_model_name_or_path"), folder, any_base)
    adapter, deltas = read_safetensors(Path(lora) / "adapter_model.safetensors"), {}
    modules = {name.rsplit(".lora_", 1)[0] for name in adapter}
    for module in sorted(modules):
        weight = module.removeprefix("base_model.model.") + ".weight"
        pair = [adapter.pop(f"{module}.lora_{x}.weight", None) for x in "BA"]
        if weight not in tensors or any(x is None for x in pair):
            raise ValueError(f"{lora}: {module} is not a pair of lora_A and lora_B for {weight} of {folder}")
        b, a = (x.float() for x in pair)
        if [len(b), a.shape[1]] != tensors[weight].shape or b.shape[1] != len(a):
            raise ValueError(
                f"{lora}: {module} has shapes {list(b.shape)} and {list(a.shape)}; {weight} is "
                f"{tensors[weight].shape}"
            )
        deltas[weight] = j["lora_alpha"] / j["r"], b, a
    if adapter:
        raise ValueError(f"{lora}: the adapter has unexpected tensors: {some(adapter)}")
    return deltas


def check_base(lora, base: str | None, folder, any_base: bool):
    """An adapter on another base loses many points without a word, so the names must agree."""
    own = [checkpoint_name(folder), read_config(folder).get("_name_or_path") or ""]
    if not any_base and base and Path(base).name.lower() not in [Path(name).name.lower() for name in own]:
        raise ValueError(
            f"{lora} is an adapter for {base}, but the checkpoint is {own[0]}; --any-base uses it anyway"
        )


# -------------------------------------------------------------------------------- what goes in and comes out


def to_host(token, *floats):
    """numpy arrays of tensors of one shape, in one synchronisation: ids below 2**24 survive as float32."""
    if token.is_cpu:
        return [t.numpy() for t in (token, *floats)]
    token, *floats = torch.stack((token.float(), *floats)).cpu().numpy()
    return [token.astype(np.int64), *floats]


def check_prompts(prompts, max_new_tokens: int, config, shortest: int = 0) -> list[np.ndarray]:
    """Prompts (token ids; one prompt or a list) as int arrays; ValueError for what cannot be decoded."""
    if isinstance(prompts, np.ndarray | torch.Tensor) or (len(prompts) and np.ndim(prompts[0]) == 0):
        prompts = [prompts] if np.ndim(prompts) == 1 else list(prompts)
    if len(prompts) == 0:
        raise ValueError("the batch is empty: give at least one prompt")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; it must be at least 1")
    prompts = [np.asarray(p, np.int64 if len(p) == 0 else None) for p in prompts]
    mask_id = getattr(config, "mask_id", -1)
    for b, p in enumerate(prompts):
        if p.dtype.kind not in "iu" or p.ndim != 1:
            raise ValueError(
                f"prompt {b} has dtype {p.dtype} and {p.ndim} dimensions; token ids are one row of integers"
            )
        if len(p) < shortest:
            raise ValueError(f"prompt {b} has {len(p)} tokens; it must have at least {shortest}")
        if len(p) and not 0 <= p.min() <= p.max() < config.n_tokens:
            raise ValueError(
                f"prompt {b} holds ids {p.min()} to {p.max()}; this model knows 0 to {config.n_tokens - 1}"
            )
        if (p == mask_id).any():
            raise ValueError(f"prompt {b} holds the mask id {mask_id}; only the decoder may place masks")
        if len(p) + max_new_tokens > config.max_len:
            raise ValueError(
                f"prompt {b} has {len(p)} tokens and max_new_tokens is {max_new_tokens}; "
                f"together at most {config.max_len}"
            )
    return prompts


def cut(answer, eos_id: int) -> list[int]:
    """The answer [A] up to and including its first EOS."""
    answer = answer.tolist()
    return answer[: answer.index(eos_id) + 1] if eos_id in answer else answer


def in_groups(decode, prompts, group: int, name: str = ""):
    """decode(prompts) -> Decoded for `group` prompts at a time, with a progress bar: yields one for each."""
    for i in tqdm(range(0, len(prompts), group), name, mininterval=0.5, disable=len(prompts) <= group):
        yield decode(list(prompts[i : i + group]))


# --------------------------------------------------------------------------------------------- tiny tokenizer


class CharTokenizer:
    """One id per character, then the mask, end-of-sequence and padding ids."""

    def __init__(self, alphabet: str = "0123456789+-=;"):
        self.alphabet = alphabet
        self.mask_id, self.eos_id, self.pad_id = (len(alphabet) + i for i in range(3))
        self.n_tokens, self.stop_ids, self.instruct = len(alphabet) + 3, {len(alphabet) + 1}, False
        self.turn_end = None  # no chat, as `Tokenizer` says it
        self.table = np.full(128, -1, np.int64)  # ASCII code -> id
        self.table[[ord(c) for c in alphabet]] = np.arange(len(alphabet))
        self.ids = dict(vocab_size=self.n_tokens, n_tokens=self.n_tokens)  # for a model's config
        self.ids |= dict(eos_id=self.eos_id, pad_id=self.pad_id)

    def encode(self, text: str) -> np.ndarray:
        """int64 [len(text)]; raises ValueError for a character outside the alphabet."""
        wrong = set(text) - set(self.alphabet)
        if wrong:
            raise ValueError(f"character {min(wrong)!r} is not in the alphabet {self.alphabet!r}")
        return self.table[np.frombuffer(text.encode(), np.uint8)]

    def decode(self, ids, mask: str = "_", eos: str = "", pad: str = "") -> str:
        symbols = [*self.alphabet, mask, eos, pad]
        return "".join(symbols[i] for i in ids)

    def chat(self, text: str) -> str:
        return text


# -------------------------------------------------------------------------------- tokenizers of checkpoints

CHAT = {  # model_type -> one user turn and the header of the answer; a checkpoint's own template goes first
    "llada": "<|startoftext|><|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "Dream": "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
    "qwen2": "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant."
    "<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
    "llama": "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "huginn_raven": "<|begin_text|><|begin_header|>user<|end_header|>\n\n{}<|end_turn|>"
    "<|begin_header|>Huginn<|end_header|>\n\n",
}
TURN_END = ("<|eot_id|>", "<|im_end|>", "<|end_turn|>")  # the text of tokens that end a turn


def optional(package: str, module: str | None = None):
    """An optional package (or a module of it), or the sentence that says how to get it."""
    try:
        return importlib.import_module(module or package)
    except ImportError:
        raise ValueError(f"this needs the package {package}: pip install {package}") from None


def raise_error(message: str):
    raise ValueError(message)


class Tokenizer:
    """The tokenizer of a public checkpoint, by the optional package tokenizers.

    stop_ids: ids that end a text or a turn. turn_end: the id that ends a turn, or None. instruct: is the
    model meant to be talked to. n_tokens: ids below this one exist.
    """

    def __init__(self, folder, family: str, eos_id: int, name: str = ""):
        folder = Path(folder)
        self.settings = read_json(folder / "tokenizer_config.json", {})
        if (folder / "chat_template.jinja").exists():
            self.settings["chat_template"] = (folder / "chat_template.jinja").read_text()
        if (folder / "tokenizer.json").exists():
            self.tokenizer = optional("tokenizers").Tokenizer.from_file(str(folder / "tokenizer.json"))
        elif (folder / "vocab.json").exists() and (folder / "merges.txt").exists():
            self.tokenizer = byte_level_bpe(folder, self.settings.get("added_tokens_decoder", {}))
        else:
            raise FileNotFoundError(f"{folder} has no tokenizer.json, and no vocab.json with merges.txt")
        self.family, self.eos_id = family, eos_id
        ids = self.tokenizer.get_vocab(with_added_tokens=True)
        self.n_tokens = max(ids.values()) + 1
        self.turn_end = next((ids[text] for text in TURN_END if text in ids), None)
        self.stop_ids = {eos_id} | ({self.turn_end} - {None})
        names = f"{checkpoint_name(folder)} {name}".lower()
        self.instruct = bool(re.search("instruct|chat|llada-1.5", names))

    def encode(self, text: str) -> np.ndarray:
        """int64 [n]. Special tokens written out in the text are recognised; the checkpoint's rule may put a
        first token before the text, unless it begins with that one.
        """
        ids = np.array(self.tokenizer.encode(text).ids, np.int64)
        plain = self.tokenizer.encode(text, add_special_tokens=False).ids
        doubled = len(ids) == len(plain) + 1 and len(plain) > 0 and ids[0] == plain[0]
        return ids[1:] if doubled else ids

    def decode(self, ids) -> str:
        """Text of token ids, special tokens left out."""
        return self.tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)

    def chat(self, text: str) -> str:
        """One user turn and the header of the answer, by the checkpoint's own template if it has one."""
        template = self.settings.get("chat_template")
        if not isinstance(template, str):
            return CHAT[self.family].format(text)
        names = {key: self.settings.get(key) for key in ("bos_token", "eos_token")}
        names = {key: x["content"] if isinstance(x, dict) else x or "" for key, x in names.items()}
        jinja = optional("jinja2", "jinja2.sandbox")
        sandbox = jinja.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        sandbox.globals["raise_exception"] = raise_error
        messages = [{"role": "user", "content": text}]
        return sandbox.from_string(template).render(messages=messages, add_generation_prompt=True, **names)


def byte_level_bpe(folder: Path, added: dict):
    """Dream's and Qwen's tokenizer, of vocab.json and merges.txt; added: id -> token that is never split."""
    tokenizers = optional("tokenizers")
    pre = tokenizers.pre_tokenizers
    regex = tokenizers.Regex(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    bpe = tokenizers.models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    t = tokenizers.Tokenizer(bpe)
    t.normalizer = tokenizers.normalizers.NFC()
    bytes_only = pre.ByteLevel(add_prefix_space=False, use_regex=False)
    t.pre_tokenizer = pre.Sequence([pre.Split(regex, "isolated"), bytes_only])
    t.decoder = tokenizers.decoders.ByteLevel()
    for i, token in sorted(added.items(), key=lambda item: int(item[0])):
        t.add_special_tokens([tokenizers.AddedToken(token["content"], normalized=False, special=True)])
        if t.token_to_id(token["content"]) != int(i):
            raise ValueError(f"{folder}: the added token {token['content']} does not get its id {i}")
    return t


def load_tokenizer(folder):
    """The tokenizer of a checkpoint folder: `Tokenizer`, or a tiny model's `CharTokenizer`."""
    j = read_config(folder)
    if j.get("model_type") in MODELS:
        return CharTokenizer(j["alphabet"]) if "alphabet" in j else CharTokenizer()
    model, _ = read_layout(folder)
    tokenizer = Tokenizer(folder, j["model_type"], model.config.eos_id, j.get("_name_or_path") or "")
    if tokenizer.n_tokens > model.config.vocab_size:
        raise ValueError(
            f"{folder}: the tokenizer has {tokenizer.n_tokens} ids, the model only {model.config.vocab_size}"
        )
    return tokenizer


def find_checkpoint(name: str) -> Path:
    """A folder as it is; else a name on the model hub, downloaded by the optional package huggingface_hub."""
    if Path(name).is_dir():
        return Path(name)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise FileNotFoundError(f"no checkpoint in {name}: neither a folder nor a name like owner/model")
    hub = optional("huggingface_hub")
    try:
        return Path(
            hub.snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.jinja"])
        )
    except Exception as e:
        raise ValueError(f"{name} is not a folder, and downloading it failed: {first_line(e)}") from None


# ------------------------------------------------------------------------------------------ sizes and floors


def describe(folder, bandwidth: float = 2000.0, dtype=torch.bfloat16) -> dict:
    """What a checkpoint needs, from config.json alone. bandwidth in GB/s.

    A forward of one position reads every weight once, those of a recurrent core r times (r: the mean
    recurrence); bandwidth / bytes read is the largest number of forwards a second at batch 1.
    """
    model, _ = read_layout(folder)
    c, size = model.config, dtype.itemsize
    recurrent = isinstance(model, RecurrentDepth)
    total = model.n_parameters()
    core = sum(p.numel() for p in [*model.core.parameters(), *model.adapter.parameters()]) if recurrent else 0
    table = 0 if c.tied_head else model.embedding.weight.numel()  # looked up, not multiplied
    used = total - table + (c.mean_recurrence - 1) * core if recurrent else total - table
    slots = c.n_prelude + c.n_core + c.n_coda if recurrent else c.n_layers
    heads = c.n_heads if recurrent else c.n_kv_heads
    return {
        "checkpoint": checkpoint_name(folder),
        "parameters": f"{total / 1e9:.2f}e9",
        "weights, GB": f"{total * size / 1e9:.1f}",
        "KV cache per 1,000 tokens, MB": f"{2000 * slots * heads * c.head_dim * size / 1e6:.0f}",
        "GFLOP a position": f"{2 * used / 1e9:.1f}",
        f"forwards/s at {bandwidth:.0f} GB/s": f"{bandwidth * 1e9 / (used * size):.1f}",
    }


def markdown(rows: list[dict]) -> str:
    """A Markdown table of rows with equal keys."""
    lines = [rows[0], ["---"] * len(rows[0]), *(row.values() for row in rows)]
    return "\n".join(f"|{'|'.join(map(str, line))}|" for line in lines)


# ---------------------------------------------------------------------------- addition, as the demos write it


def addition_prompt(a: int, b: int, digits: int) -> str:
    """'a+b;' for each digit pair, least significant first: (12, 9, 2) -> '2+9;1+0;'."""
    if not 0 <= min(a, b) or max(a, b) >= 10**digits:
        raise ValueError(f"{a} + {b}: this model was trained on numbers of 0 to {digits} digits")
    return "".join(f"{x}+{y};" for x, y in zip(f"{a:0{digits}d}"[::-1], f"{b:0{digits}d}"[::-1], strict=True))


def addition_answer(a: int, b: int, digits: int) -> str:
    """'=cd;' for each digit pair, c the carry out and d the digit of the sum: (12, 9, 2) -> '=11;=02;'."""
    carries = [(a % 10**i + b % 10**i) // 10**i for i in range(1, digits + 1)]
    return "".join(
        f"={c}{d};" for c, d in zip(carries, f"{(a + b) % 10**digits:0{digits}d}"[::-1], strict=True)
    )


def read_sum(answer: str) -> int | None:
    """The number that an addition answer spells, or None if it is not well formed."""
    fields = answer.split(";")[:-1]
    if not fields or any(len(f) != 3 or f[0] != "=" or not f[1:].isdigit() for f in fields):
        return None
    return int(fields[-1][1] + "".join(f[2] for f in reversed(fields)))


# ----------------------------------------------------------- command lines of both papers on full checkpoints


def add_checkpoint_arguments(p, methods):
    """The options that `d2f.py` and `recurrent_sampler.py` share, in an argparse parser."""
    g = p.add_argument_group("full checkpoints")
    g.add_argument("--checkpoint", help="folder of a public checkpoint, or its name on the model hub")
    g.add_argument("--prompt", help="text to answer; - reads it from standard input")
    g.add_argument("--method", choices=methods, default=next(iter(methods)), help="decoder (%(default)s)")
    g.add_argument("--chat", action="store_const", const=True, help="write the prompt as a turn of a chat")
    g.add_argument("--raw", dest="chat", action="store_const", const=False, help="give the prompt as it is")
    g.add_argument("--max-new-tokens", type=int, help="longest answer (256)")
    g.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (%(default)s)")
    g.add_argument("--top-p", type=float, help="sample from the smallest set of this probability (1)")
    g.add_argument("--seed", type=int, default=0, help="of what is random (%(default)s)")
    g.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="%(default)s")
    g.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="bfloat16 on a GPU")
    g.add_argument("--compile", action="store_true", help="torch.compile, windows padded to few sizes")
    g.add_argument("--watch", action="store_true", help="show each step instead of streaming the text")
    g.add_argument("--dry-run", nargs="*", metavar="FOLDER", help="print what checkpoints need, load nothing")
    g.add_argument("--bandwidth", type=float, default=2000.0, help="GB/s, for --dry-run (%(default)g)")
    e = p.add_argument_group("evaluation")
    e.add_argument("--eval", metavar="JSONL", help="problems: question and answer, or prompt and reference")
    e.add_argument("--few-shot", metavar="JSONL", help="solved examples to put before each problem")
    e.add_argument("--shots", type=int, default=4, help="how many of them (%(default)s)")
    e.add_argument("--limit", type=int, help="only the first so many problems")
    e.add_argument("--save", metavar="JSONL", help="results, one line a problem (beside the problems)")


def fill_in(args, **defaults):
    """Give the options that a command line leaves open their values."""
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)


def check_seed(seed: int):
    if not 0 <= seed < 2**32:  # what both numpy and torch take, with room for a seed a row
        raise ValueError(f"--seed is {seed}; it must be between 0 and {2**32 - 1}")


def check_arguments(args):
    """What can be known to be wrong before minutes are spent on loading weights."""
    if args.prompt is not None and args.eval:
        raise ValueError("--prompt and --eval exclude each other: answer one text, or the problems of a file")
    if args.prompt is not None and not args.prompt.strip():
        raise ValueError("the prompt is empty")
    for name in ("few_shot", "save", "limit"):
        if getattr(args, name) is not None and not args.eval:
            raise ValueError(f"--{name.replace('_', '-')} needs --eval, the problems to be answered")
    for name, least in (("max_new_tokens", 1), ("limit", 1), ("shots", 0)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise ValueError(f"{name} is {value}; it must be at least {least}")
    check_seed(args.seed)
    if args.bandwidth <= 0:
        raise ValueError(f"--bandwidth is {args.bandwidth:g}; it must be above 0 GB/s")
    for path in (args.eval, args.few_shot):
        if path and not Path(path).is_file():
            raise FileNotFoundError(f"{path} does not exist or is not a file")


def command_line(args, full, tiny, what: str, make: str):
    """Do what args ask for; an error becomes one sentence and exit status 1.

    full(args) works with --checkpoint; tiny(args) is the demo, None if args do not ask for it; what: what
    they would have to give; make: the command that trains the demo's model.
    """
    try:
        check_arguments(args)
        if args.dry_run is not None and (args.dry_run or args.checkpoint):
            folders = args.dry_run or [args.checkpoint]
            print(markdown([describe(find_checkpoint(x), args.bandwidth) for x in folders]))
        elif args.checkpoint and (args.prompt is not None or args.eval):
            full(args)
        elif tiny and not args.checkpoint:
            tiny(args)
        else:
            raise ValueError(f"give {what}, or --checkpoint with --prompt or --eval (-h for help)")
    except FileNotFoundError as e:
        demo = tiny and not args.checkpoint
        sys.exit(f"{e}; make it with: {make}" if demo else str(e))
    except (ValueError, OSError) as e:
        sys.exit(str(e))
    except torch.OutOfMemoryError as e:
        sys.exit(f"{args.device} has too little memory: {first_line(e)}")
    except KeyboardInterrupt:
        sys.exit("interrupted" + ("; the same command goes on from here" if args.eval else ""))


def open_checkpoint(args, kind: type, **options):
    """The model, a `kind`, and the tokenizer that a command line names. options: of `load_checkpoint`.

    Sets args.chat, args.dtype and the id that ends an answer.
    """
    folder = find_checkpoint(args.checkpoint)
    found = type(read_layout(folder)[0])
    if found is not kind:
        raise ValueError(
            f"{folder} is a {found.__name__} where a {kind.__name__} was expected: "
            "d2f.py is for Transformer, recurrent_sampler.py for RecurrentDepth"
        )
    try:
        torch.empty(1, device=args.device)
    except (RuntimeError, AssertionError, NotImplementedError) as e:
        raise ValueError(f"device {args.device!r} cannot be used here: {first_line(e)}") from None
    fill_in(args, dtype="bfloat16" if args.device.startswith("cuda") else "float32")
    tokenizer = load_tokenizer(folder)
    if options.get("lora"):
        options["lora"] = find_checkpoint(options["lora"])
    model = load_checkpoint(folder, args.device, getattr(torch, args.dtype), **options)
    model.config.n_tokens = min(model.config.n_tokens, tokenizer.n_tokens)
    fill_in(args, chat=tokenizer.instruct)
    if args.chat and model.config.causal and tokenizer.turn_end is not None:
        model.config.eos_id = tokenizer.turn_end  # a diffusion model fills its answer up with EOS
    return Static(model, torch.compile) if args.compile else model, tokenizer


def read_prompt(args, tokenizer) -> np.ndarray:
    """Token ids of --prompt, as a chat turn or as it is. The line end of standard input is not part of it."""
    text = sys.stdin.read().removesuffix("\n") if args.prompt == "-" else args.prompt
    if not text.strip():
        raise ValueError("the prompt is empty")
    return encode_prompt(text, args, tokenizer)


def encode_prompt(text: str, args, tokenizer) -> np.ndarray:
    """Token ids of a text, written as a chat turn if args.chat."""
    return tokenizer.encode(tokenizer.chat(text) if args.chat else text)


def until_stop(tokenizer, ids) -> list[int]:
    """An answer up to and including the first id that ends a text or a turn."""
    ids = [int(i) for i in ids]
    return ids[: next((n + 1 for n, i in enumerate(ids) if i in tokenizer.stop_ids), len(ids))]


def answer_text(tokenizer, ids) -> str:
    """The text of an answer, without the id that ends it."""
    return tokenizer.decode([i for i in until_stop(tokenizer, ids) if i not in tokenizer.stop_ids])


class Stream:
    """Prints an answer as it becomes final. A character whose bytes are not all there yet waits."""

    def __init__(self, tokenizer, out=None):
        self.tokenizer, self.out, self.shown = tokenizer, out or sys.stdout, ""

    def show(self, ids, last: bool = False):
        """ids: everything that is final by now."""
        text = answer_text(self.tokenizer, ids)
        new = (text if last else text.rstrip("\ufffd")).removeprefix(self.shown)
        if not text.startswith(self.shown):  # a tokenizer that rewrites what it had said
            new = "\n" + text if last else ""
        self.out.write(new + ("\n" if last else ""))
        self.out.flush()
        self.shown += new


def peak_memory(device: str) -> float:
    """GB that this process held at most: on its GPU, else in memory."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated() / 1e9
    try:
        import resource
    except ImportError:  # not on Windows
        return float("nan")
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def statistics_line(n: int, cost: dict[str, int], seconds: float, device: str) -> str:
    """Answer tokens, what they cost and how fast they came. cost: kind of call -> number."""
    calls, first = ", ".join(f"{number} {kind}" for kind, number in cost.items()), next(iter(cost.values()))
    return (
        f"{n} answer tokens, {calls}, {n / first:.1f} tokens a forward, {seconds:.2f} s, "
        f"{n / seconds:.1f} tokens/s, peak memory {peak_memory(device):.2f} GB"
    )


def answer_prompt(args, tokenizer, answer, final, show=None):
    """Answer --prompt: print the text as it becomes final, then what it cost.

    answer(ids, watch) -> answer ids and {kind of call: number}; final(step) -> the ids that are final after a
    step; show: a `watch` to use instead of streaming.
    """
    stream, ids, started = Stream(tokenizer), read_prompt(args, tokenizer), time.perf_counter()
    tokens, cost = answer(ids, show or (lambda step: stream.show(final(step))))
    seconds = time.perf_counter() - started
    stream.show(tokens, last=True)
    n = len(until_stop(tokenizer, tokens))
    print(statistics_line(n, cost, seconds, args.device), file=sys.stderr)


def read_problem(line: bytes, name: str) -> dict:
    """One line of a JSON-lines file: an object with question and answer, or prompt and reference."""
    row = parse_json(line, name)
    for pair in (("question", "answer"), ("prompt", "reference")):
        if isinstance(row, dict) and all(isinstance(row.get(x), str | int | float) for x in pair):
            return row
    raise ValueError(f"{name} has no question and answer, or prompt and reference")


def read_jsonl(path) -> tuple[dict[int, dict], list[str]]:
    """{line number: problem} of a JSON-lines file, and a sentence for each line that is none."""
    problems, broken = {}, []
    for number, line in enumerate(Path(path).read_bytes().split(b"\n"), 1):
        try:
            if line.strip():
                problems[number] = read_problem(line, f"{path}: line {number}")
        except ValueError as e:
            broken.append(str(e))
    return problems, broken


def problem_text(problem: dict, examples: list[dict]) -> str:
    """A problem after solved examples; GSM8K's questions are written as lm-evaluation-harness does."""

    def ask(x):
        return f"Question: {x['question']}\nAnswer:" if "question" in x else str(x["prompt"])

    def tell(x):
        return f" {x['answer']}" if "question" in x else str(x["reference"])

    return "".join(f"{ask(x)}{tell(x)}\n\n" for x in examples) + ask(problem)


def last_number(text: str) -> str | None:
    """The last number in a text, without $ and thousands separators: the papers' flexible extraction."""
    found = re.findall(r"-?\$?-?[0-9][0-9,]*(?:\.[0-9]+)?|(?<![.0-9])-?\.[0-9]+", text)
    if not found:
        return None
    number = re.sub(r"[$,]", "", found[-1]).replace("-.", "-0.")
    number = "0" + number if number[0] == "." else number
    return number.rstrip("0").rstrip(".") if "." in number else number


def is_right(response: str, problem: dict) -> bool:
    """Does a response end in the reference's number; if the reference has none, is it the same text."""
    reference = problem["answer"] if "question" in problem else problem["reference"]
    reference = str(reference).split("####")[-1]
    number = last_number(reference)
    return response.strip() == reference.strip() if number is None else last_number(response) == number


def finished_results(path: Path, settings: dict) -> list[dict]:
    """Results of an earlier run with the same settings. Its last line, if half-written, is dropped."""
    first, content = json.dumps({"settings": settings}) + "\n", path.read_bytes() if path.exists() else b""
    whole = content[: content.rfind(b"\n") + 1]
    if first.encode().startswith(content):  # nothing yet, or killed in the first line
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(first)
        return []
    lines = [parse_json(line, f"{path}: line {n}") for n, line in enumerate(whole.splitlines(), 1)]
    before = lines[0].get("settings") if lines and isinstance(lines[0], dict) else None
    if not isinstance(before, dict):
        raise ValueError(f"{path} holds no results of an evaluation; name another file with --save")
    for name in sorted(settings):
        if before.get(name) != settings[name]:
            raise ValueError(
                f"{path} holds results of other settings ({name} {before.get(name)}, now {settings[name]}); "
                "name another file with --save"
            )
    os.truncate(path, len(whole))  # not written anew: a kill in between must lose nothing
    return lines[1:]


def read_examples(args) -> list[dict]:
    """The solved examples that --few-shot and --shots ask for."""
    examples, broken = read_jsonl(args.few_shot) if args.few_shot else ({}, [])
    if broken:
        raise ValueError(broken[0])
    if args.few_shot and len(examples) < args.shots:
        raise ValueError(f"{args.few_shot} has {len(examples)} examples; --shots is {args.shots}")
    return list(examples.values())[: args.shots]


def solve(problem: dict, text: str, args, config, tokenizer, decode) -> dict:
    """The result of one problem: how it was answered and at what cost. What cannot be asked is wrong."""
    started = time.perf_counter()
    try:
        prompt = encode_prompt(text, args, tokenizer)
        check_prompts([prompt], args.max_new_tokens, config)
    except ValueError as e:  # above all a problem longer than the context
        return {"right": False, "tokens": 0, "seconds": 0.0, "error": str(e), "response": ""}
    ids, cost = decode(prompt)
    seconds, ids = time.perf_counter() - started, until_stop(tokenizer, ids)
    response = answer_text(tokenizer, ids).split("Question:")[0]
    right = is_right(response, problem)
    return {"right": right, "tokens": len(ids), "seconds": seconds, **cost, "response": response}


def evaluate(args, config, tokenizer, decode, settings: dict) -> str:
    """Answer the problems of --eval one by one; returns the summary. Goes on where an earlier run stopped.

    decode(ids) -> answer ids and {kind of call: number}. settings: what a result depends on. A result is
    found again by its line number and a checksum of what was asked, so that a file may be mended meanwhile.
    """
    problems, broken = read_jsonl(args.eval)
    examples, path = read_examples(args), Path(args.save or f"{args.eval}.results.jsonl")
    done = {(r.get("line"), r.get("checksum")): r for r in finished_results(path, settings)}
    for sentence in broken:
        print(sentence, file=sys.stderr)
    results, warm = [], args.device == "cpu"
    with open(path, "a") as f:
        for line, problem in tqdm(list(problems.items())[: args.limit]):
            text = problem_text(problem, examples)
            key = (line, zlib.crc32(json.dumps([text, problem]).encode()))
            if key not in done:
                for _ in range(2 - warm):  # a GPU's first calls are slow: they are not what is measured
                    result = solve(problem, text, args, config, tokenizer, decode)
                warm, done[key] = True, {"line": line, "checksum": key[1], **result}
                if "error" in result:
                    tqdm.write(f"{args.eval}: line {line} counts as wrong: {result['error']}", sys.stderr)
                f.write(json.dumps(done[key]) + "\n")
                f.flush()
            results.append(done[key])
    return summary(results, len(broken))


def summary(results: list[dict], n_broken: int = 0) -> str:
    """One line about all results. What could not be asked is wrong, but has no speed, latency or length."""
    asked = [r for r in results if "error" not in r]
    n, left_out = len(asked), f", {n_broken} broken lines left out" if n_broken else ""
    if n < len(results):
        left_out = f", {len(results) - n} of them could not be asked" + left_out
    if n == 0:
        return f"{len(results)} problems{left_out}"
    tokens, seconds = sum(r["tokens"] for r in asked), sum(r["seconds"] for r in asked)
    return (
        f"{len(results)} problems, {100 * sum(r['right'] for r in asked) / len(results):.1f}% right, "
        f"{tokens / seconds:.1f} tokens/s, latency {seconds / n:.2f} s, answers of {tokens / n:.1f} tokens"
        + left_out
    )
