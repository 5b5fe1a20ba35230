"""The wavefront sampler for recurrent-depth models (arXiv 2510.14961), from the training loss to the parallel
decoder.

In order: the training loss, what all samplers share, the samplers that the paper compares (autoregressive at
a fixed number of recurrences, adaptive compute, self-speculative), the wavefront (Algorithms 1 and 2), a
demo. The rows it compares: `python train_tiny.py --only recurrent`.

Symbols: P prelude, R one recurrence, C coda; e = P(y) the embedded tokens, z the latent states; r recurrences
of a whole forward, r' (`inner`) those of one sampler step; delta distance of a state to itself one step
earlier; eps (tau) its threshold; eta momentum of e; beta noise in z; W the largest wavefront; h headway.

Where the released code and the text differ, the default is the released code:
- the wave freezes up to the LAST position with delta < eps (Algorithm 2); `freeze="prefix"` is the paper's
  equation, which also asks it of every position before;
- a settled position's own prediction stays open until the position behind it settles too;
- the prompt runs r recurrences first and its next token is frozen from the start;
- a position that is new to the wave has no earlier e: it enters as (1 - eta) P(y).
Where the released code is mistaken, we are not, but `released_alignment=True` is, for the reference vectors:
- after a freeze it compares each state with the previous state of ANOTHER position;
- its fixed exit waits two steps longer than Algorithm 1, so r' = r is not autoregressive decoding;
- it opens positions behind the end of the answer.
Further: with W = 1 the released wave can never move; ours then is adaptive compute, as the paper says. An EOS
ends its row as soon as it is frozen (released: only after r steps). Several prompts may run as one batch.

The network runs on the device. The book - a token buffer and a few integers per row - is kept on the host in
numpy: one synchronisation a step, and an operation on a few dozen numbers costs a fifth of what it would in
torch.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F

from tiny_models import (
    CharTokenizer,
    RecurrentDepth,
    add_checkpoint_arguments,
    answer_prompt,
    check_prompts,
    command_line,
    cut,
    evaluate,
    fill_in,
    load_checkpoint,
    open_checkpoint,
    read_config,
    to_host,
)

# ---------------------------------------------------------------------- training (arXiv 2502.05171, Sec. 3.3)


def sample_recurrences(mean: float, n: int = 1, generator=None) -> torch.Tensor:
    """Numbers of recurrences to train with, int64 [n]: 1 + Poisson(tau), log tau ~ Normal(log(mean) - 1/8,
    1/2).

    Mean: mean + 1. Variance: mean + mean^2 (e^(1/4) - 1).
    """
    tau = torch.exp(torch.randn(n, generator=generator) / 2 + math.log(mean) - 0.125)
    return torch.poisson(tau, generator=generator).long() + 1


def training_loss(model, tokens, labels, r: int, k: int, state=None):
    """Cross-entropy after r recurrences, with gradients through the last k of them only (truncated
    backpropagation).

    tokens, labels: int64 [B, T]; labels[:, i] follows tokens[:, i], -100 is not scored. state: s_0 [B, T, d],
    else random. P is reached through the input that each of the last k recurrences is given.
    """
    w = model.window(tokens.shape[1])
    e = model.embed(tokens, w)  # (B, T, d)
    z = model.initial_state(*tokens.shape) if state is None else state
    with torch.no_grad():
        for _ in range(r - k):
            z = model.recur(z, e, w)
    for _ in range(min(r, k)):
        z = model.recur(z, e, w)
    return F.cross_entropy(model.decode(z, w).flatten(0, 1), labels.flatten())


# ------------------------------------------------------------------------------------ what all samplers share


@dataclass
class Sampling:
    """How tokens are chosen and states begin. temperature 0 is argmax.

    init_scale multiplies the random initial states; 0 begins with zeros. Row b of a batch draws from seed +
    b, so what it becomes does not depend on the rows beside it.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    init_scale: float = 1.0
    seed: int = 0

    def __post_init__(self):
        check(self.temperature >= 0, f"temperature is {self.temperature}; it must be at least 0")
        check(0 < self.top_p <= 1, f"top_p is {self.top_p}; it must be above 0 and at most 1")
        check(self.init_scale >= 0, f"init_scale is {self.init_scale}; it must be at least 0")


@dataclass
class Step:
    """What one step did, handed to `watch`. Arrays are live: copy what you keep.

    [b] are the rows still decoding.
    """

    rows: np.ndarray  # [b] index of each row in the list of prompts
    tokens: np.ndarray  # [b, L + 1] after this step: frozen, then provisional ones
    prompt_len: np.ndarray  # [b]
    start: np.ndarray  # [b] the step ran over positions [start, stop)
    stop: np.ndarray  # [b]
    n_before: np.ndarray  # [b] tokens [0, n_before) were frozen before the step,
    n_frozen: np.ndarray  # [b] tokens [0, n_frozen) are after it
    recurrences: int | np.ndarray  # recurrences of this step (adaptive: of each row)
    n_open: np.ndarray | None = None  # [b] wavefront: positions [n_frozen - 1, n_open) run next
    spent: np.ndarray | None = None  # [b, L + 1] wavefront: recurrences spent on each position so far
    distance: np.ndarray | None = None  # [b, stop - start] delta, not a number where nothing was compared


@dataclass
class Decoded:
    """Answers up to and including their first EOS, and what they cost."""

    answers: list[list[int]] = field(default_factory=list)
    steps: int = 0  # calls of P and C, the prompt's included
    core_passes: int = 0  # calls of R
    row_passes: np.ndarray | None = None  # [number of prompts] calls of R that each row needed
    positions: int = 0  # positions that went through R, summed over its calls
    cache_bytes: int = 0
    core_cache_bytes: int = 0  # the part that the shared cache makes independent of r
    row_steps: int = 0  # steps, each counted once a row; here and below without the prompt's step
    row_positions: int = 0  # positions of all rows in all steps
    max_wave: int = 0  # the most positions of a row in a step

    @property
    def mean_wave(self) -> float:
        """Positions of a row in a step."""
        return self.row_positions / max(self.row_steps, 1)


Watch = Callable[[Step], None]


def check(fine: bool, message: str):
    if not fine:
        raise ValueError(message)


class Book:
    """The host's side of a decode: token buffer, lengths and the calls of the network. Rows that are done
    leave it.

    tokens int64 [B, L + 1]; prompt_len, end, n, rows, spared int64 [B]: the answer's bounds, how many tokens
    are frozen, the row's index in the caller's list, calls of R that it did not need. states [B, L + 1, d],
    on the device: the latent state of every position, initial states to begin with, so that opening a
    position costs nothing. Position L takes what pads short rows.
    """

    def __init__(self, model, prompts, max_new_tokens, sampling, watch, n_slots=1, whole_context=False):
        self.model, self.c, self.watch, self.s = model, model.config, watch, sampling or Sampling()
        self.device, self.dtype = model.device, model.dtype
        check(n_slots >= 1, f"the cache has {n_slots} slots for recurrences; it needs at least 1")
        prompts = check_prompts(prompts, max_new_tokens, self.c, shortest=1)
        self.prompt_len = np.array([len(p) for p in prompts])
        self.end = self.prompt_len + max_new_tokens
        self.limit = (
            np.full_like(self.end, self.c.max_len) if whole_context else self.end
        )  # of the positions of a row
        self.n, self.rows, self.L = self.prompt_len.copy(), np.arange(len(prompts)), int(self.limit.max())
        self.tokens = np.full((len(prompts), self.L + 1), self.c.pad_id, np.int64)
        for row, prompt in zip(self.tokens, prompts, strict=True):
            row[: len(prompt)] = prompt
        self.generators = [torch.Generator().manual_seed(self.s.seed + b) for b in range(len(prompts))]
        self.spared, self.column = np.zeros_like(self.n), np.arange(self.L + 1)
        self.inside_answer = (self.column >= self.prompt_len[:, None]) & (self.column < self.end[:, None])
        self.last_of_answer = self.column == self.end[:, None] - 1
        self.states = self.draw_states(self.limit + 1) * self.s.init_scale
        self.cache = model.new_cache(len(prompts), self.L, n_slots)
        self.per_row = ["prompt_len", "end", "limit", "n", "rows", "spared", "tokens", "states"]
        self.per_row += ["inside_answer", "last_of_answer"]
        self.banned = torch.zeros(self.c.vocab_size, device=self.device)
        self.banned[self.c.n_tokens :] = float("-inf")
        if self.c.pad_id != self.c.eos_id:
            self.banned[self.c.pad_id : self.c.pad_id + 1] = float("-inf")
        share = self.c.n_core * n_slots / len(self.cache.k)
        self.out = Decoded([[]] * len(prompts), cache_bytes=self.cache.nbytes)
        self.out.row_passes = np.zeros(len(prompts), np.int64)
        self.out.core_cache_bytes = round(share * self.cache.nbytes)

    def draw_states(self, counts):
        """Random states [B, max(counts), d]: row b draws counts[b] from its own generator, zeros behind."""
        counts = counts.tolist()
        states = torch.zeros(len(counts), max(counts), self.c.d_model, device=self.device, dtype=self.dtype)
        for row, n, generator in zip(states, counts, self.generators, strict=True):
            row[:n] = self.model.initial_state(1, n, generator)
        return states

    def open(self, start, stop):
        """Open the window [start, stop) of each row, int [B] each: its tokens [B, T] on the device, and the
        window.

        Sets sizes [B], their sum n_positions, inside (bool [B, T], True = no padding) and the window's place
        in arrays [B, L + 1, ...]: on the host (place) and on the device (index).
        """
        self.start, self.stop, self.sizes, a = start, stop, stop - start, int(start[0])
        sizes = self.sizes.tolist()
        length, self.n_positions = max(sizes), sum(sizes)
        self.inside = self.column[:length] < self.sizes[:, None]
        if len(start) == 1 or (start == a).all() and (self.sizes == length).all():
            self.place = self.index = slice(None), slice(a, a + length)
            window = self.model.window(length, a, self.cache)
        else:
            self.place = np.arange(len(start))[:, None], self.positions()
            window = self.model.window(length, self.place[1], self.cache)
            self.index = self.cache.rows, self.cache.at[:, :length]
        return torch.from_numpy(self.tokens[self.place]).to(self.device), window

    def positions(self):
        """int [B, T]: the positions of the open window, L where a short row is padded."""
        return np.where(self.inside, self.start[:, None] + self.column[: self.inside.shape[1]], self.L)

    def recur(self, z, e, window, r: int):
        """r recurrences of the open window, counted."""
        self.out.core_passes += r
        self.out.positions += r * self.n_positions
        for i in range(r):
            z = self.model.recur(z, e, window, i)
        return z

    def run(self, start, stop, r: int):
        """A whole forward over [start, stop): P, r recurrences of initial states, C -> logits [B, T, V]."""
        tokens, window = self.open(start, stop)
        z = self.recur(self.states[self.index], self.model.embed(tokens, window), window, r)
        self.out.steps += 1
        return self.model.decode(z, window)

    def prefill(self, r: int, eps: float | None = None, norm: str = "mean"):
        """The prompt's forward and the first token of each answer. With eps it may end early (`settle`)."""
        check(r >= 1, f"r is {r}; at least 1 recurrence is needed")
        tokens, window = self.open(np.zeros_like(self.n), self.prompt_len)
        e, spent = self.model.embed(tokens, window), r
        if eps is None:
            z = self.recur(self.states[self.index], e, window, r)
        else:
            z, spent = settle(self, e, window, r, eps, norm)
        self.out.steps += 1
        last = torch.from_numpy(self.prompt_len - 1).to(self.device)
        self.append(self.choose(self.model.decode(z, window, last), 1)[0][:, 0], spent)

    def choose(self, logits, counts, distance=None):
        """Tokens of logits [B, T, V], and the distances [B, T] beside them, to the host: the one
        synchronisation.

        counts: how many of each row's T positions are real, int or int [B]. Returns int64 [B, T], float [B,
        T] or None.
        """
        logits = logits.float() + self.banned
        token = logits.argmax(-1) if self.s.temperature == 0 else self.draw(logits, counts)
        return to_host(token) + [None] if distance is None else to_host(token, distance)

    def draw(self, logits, counts):
        """One token for each of logits [B, T, V]: the inverse cumulative distribution at uniform draws."""
        B, T, _ = logits.shape
        uniform = torch.zeros(B, T, 1)
        for row, n, generator in zip(uniform, np.broadcast_to(counts, B), self.generators, strict=True):
            row[:n] = torch.rand(int(n), 1, generator=generator)
        p, token = (logits / self.s.temperature).softmax(-1).sort(-1, descending=True)
        before = p.cumsum(-1) - p
        total = torch.where(before < self.s.top_p, p, 0.0).cumsum(-1)  # the token that crosses top_p is kept
        which = torch.searchsorted(total, uniform.to(total) * total[..., -1:], right=True)
        return token.gather(-1, which.clamp(max=p.shape[-1] - 1))[..., 0]

    def append(self, token, recurrences):
        """Freeze one more token [B] a row."""
        self.tokens[np.arange(len(token)), self.n] = token
        self.advance(self.n + 1, recurrences)

    def advance(self, n, recurrences, **seen):
        """Freeze tokens [0, n) of each row, n int [B]. The cache commits by moving this number."""
        before, self.n = self.n, n
        if self.out.steps > 1:
            self.out.row_steps += len(n)
            self.out.row_positions += self.n_positions
            self.out.max_wave = max(self.out.max_wave, self.inside.shape[1])
        if self.watch:
            live = self.rows, self.tokens, self.prompt_len, self.start, self.stop
            self.watch(Step(*live, before, n, recurrences, **seen))

    def unfinished(self, stop=False) -> bool:
        """Take out the rows whose answer is full or holds a frozen EOS (with stop: all). Are any left?"""
        ending = (self.tokens == self.c.eos_id) & self.inside_answer | self.last_of_answer
        done = ending.argmax(1) < self.n
        if stop:
            done[:] = True
        if not any(done.tolist()):
            return True
        for b in np.flatnonzero(done):
            answer = self.tokens[b, self.prompt_len[b] : min(self.n[b], self.end[b])]
            self.out.answers[self.rows[b]] = cut(answer, self.c.eos_id)
            self.out.row_passes[self.rows[b]] = self.out.core_passes - self.spared[b]
        keep = np.flatnonzero(~done)
        if len(keep):
            self.generators = [self.generators[b] for b in keep]
            self.cache.keep(keep)
            for name in self.per_row:
                setattr(self, name, getattr(self, name)[keep])
        return len(keep) > 0


def relative_distance(z, before):
    """delta = ||z - before|| / ||z|| of states [B, T, d] -> float32 [B, T]."""
    z = z.float()
    step = z - before
    return torch.linalg.vector_norm(step, dim=-1) / torch.linalg.vector_norm(z, dim=-1)


# ----------------------------------------------------------------------------- the samplers it is compared to


@torch.inference_mode()
def autoregressive_decode(
    model,
    prompts,
    max_new_tokens: int,
    r: int = 32,
    n_slots: int = 1,
    sampling=None,
    watch: Watch | None = None,
) -> Decoded:
    """One token a forward of r recurrences.

    n_slots of the core's KV cache: 1 is shared (a recurrence overwrites the one before), r is full.
    """
    book = Book(model, prompts, max_new_tokens, sampling, watch, n_slots)
    book.prefill(r)
    while book.unfinished():
        logits = book.run(book.n - 1, book.n, r)
        book.append(book.choose(logits, 1)[0][:, 0], r)
    return book.out


@torch.inference_mode()
def adaptive_decode(
    model,
    prompts,
    max_new_tokens: int,
    r: int = 32,
    eps: float = 0.03,
    prefill_exit: bool = True,
    sampling=None,
    watch: Watch | None = None,
) -> Decoded:
    """One token a forward, which ends when the state has settled (delta < eps) and after r recurrences at the
    latest.

    The prompt ends by the mean delta of its positions, or runs r recurrences without prefill_exit. Shared
    cache. Rows of a batch leave a forward at their own time.
    """
    check(eps >= 0, f"eps is {eps}; it must be at least 0")
    book = Book(model, prompts, max_new_tokens, sampling, watch)
    book.prefill(r, eps if prefill_exit else None)
    while book.unfinished():
        tokens, window = book.open(book.n - 1, book.n)
        z, spent = settle(book, model.embed(tokens, window), window, r, eps)
        book.out.steps += 1
        book.append(book.choose(model.decode(z, window), 1)[0][:, 0], spent)
    return book.out


def settle(book, e, window, r: int, eps: float, norm: str = "mean"):
    """Recurrences of the open window until each row's delta is below eps: states [B, T, d], number [B].

    norm: the "mean" delta of the row's positions (as released), or the largest, "max". A row that has settled
    keeps its state; what it computes further goes to the cache's scrap position.
    """
    cache, z = book.cache, book.states[book.index]
    running, spent = np.ones(len(e), bool), np.zeros(len(e), np.int64)
    at, n_keys, still = cache.at, cache.n_keys, None
    for _ in range(r):
        new = book.model.recur(z, e, window)
        delta = np.where(book.inside, relative_distance(new, z).cpu().numpy(), 0)
        z = new if still is None else torch.where(still[:, None, None], new, z)
        spent += running
        running &= ~((delta.max(1) if norm == "max" else delta.sum(1) / book.sizes) < eps)
        n_running = np.count_nonzero(running)
        if n_running == 0:
            break
        if n_running < len(running):
            still = torch.from_numpy(running).to(z.device)
            there = at if isinstance(at, torch.Tensor) else torch.from_numpy(book.positions()).to(z.device)
            cache.open(torch.where(still[:, None], there, book.L), n_keys)
    cache.open(at, n_keys)
    calls = int(spent.max())
    book.spared += calls - spent
    book.out.core_passes += calls
    book.out.positions += int((book.sizes * spent).sum())
    return z, spent


@torch.inference_mode()
def speculative_decode(
    model,
    prompts,
    max_new_tokens: int,
    r: int = 32,
    draft_r: int = 4,
    lookahead: int = 4,
    threshold: float = 1.0,
    sampling=None,
    watch: Watch | None = None,
) -> Decoded:
    """Draft `lookahead` tokens with draft_r recurrences each, verify them in one forward of r (greedy only).

    Tokens are kept while p(draft) >= threshold * max p; the first that is not is replaced. With threshold 1
    the output is autoregressive_decode's at r with the full cache, which this sampler uses: with the shared
    one, a position would see its neighbour's K/V of another recurrence in the verification than in decoding.
    """
    check(1 <= draft_r <= r, f"draft_r is {draft_r}; it must be between 1 and r = {r}")
    check(lookahead >= 1, f"lookahead is {lookahead}; it must be at least 1")
    check(0 < threshold <= 1, f"threshold is {threshold}; it must be above 0 and at most 1")
    book = Book(model, prompts, max_new_tokens, sampling, watch, n_slots=r)
    check(book.s.temperature == 0, f"temperature is {book.s.temperature}; speculative decoding is greedy")
    book.prefill(r)
    while book.unfinished():
        n, draft = book.n, []
        for i in range(lookahead):
            here = np.minimum(n + i, book.end)
            draft.append(book.choose(book.run(here - 1, here, draft_r), 1)[0])
            book.tokens[np.arange(len(n)), here] = draft[-1][:, 0]
        verify(book, n, np.concatenate(draft, 1), r, threshold)
    return book.out


def verify(book, n, draft, r: int, threshold: float):
    """One forward of r over drafts [B, lookahead] that follow n [B] tokens; freezes what it accepts."""
    stop = np.minimum(n - 1 + draft.shape[1], book.end - 1)  # behind the answer's end nothing is needed
    logits = book.run(n - 1, stop, r) + book.banned
    draft = draft[:, : logits.shape[1]]
    mine = logits.gather(-1, torch.from_numpy(draft).to(logits.device)[..., None])[..., 0]
    best = logits.max(-1)
    accepted = (mine >= best.values + math.log(threshold)).cpu().numpy() & book.inside
    count = np.logical_and.accumulate(accepted, 1).sum(1)
    taken = np.minimum(count + 1, stop - n + 1)  # the first rejected draft is replaced by the verified token
    tokens = np.where(np.arange(draft.shape[1]) < count[:, None], draft, best.indices.cpu().numpy())
    for b, t in enumerate(taken):
        book.tokens[b, n[b] : n[b] + t] = tokens[b, :t]
    book.advance(n + taken, r)


# ------------------------------------------------------------------------- the wavefront (Algorithms 1 and 2)


@dataclass
class Wave:
    """Settings of the wavefront, with the paper's defaults.

    exit: "distance" (delta < eps), "fixed" (after r recurrences, Algorithm 1), "stability" (a token that was
    predicted again in more than r // inner steps). freeze: "last" or "prefix", see the top of this file.
    noise: how beta falls with the recurrences n spent on a position: "linear" beta / (1 + n), "sqrt" the same
    with square roots of the weights, "constant". continuous: a new position starts from its left neighbour's
    state. prefill_exit: the prompt's recurrences, too, end when every delta is below eps.
    """

    inner: int = 4
    exit: str = "distance"
    freeze: str = "last"
    eps: float = 0.03
    eta: float = 0.1
    beta: float = 0.0
    noise: str = "linear"
    max_wave: int = 128
    headway: int = 1
    continuous: bool = False
    prefill_exit: bool = False
    released_alignment: bool = False
    max_steps: int = 4096

    def __post_init__(self):
        for name, known in (
            ("exit", ("distance", "fixed", "stability")),
            ("freeze", ("last", "prefix")),
            ("noise", ("linear", "sqrt", "constant")),
        ):
            check(
                getattr(self, name) in known, f"{name} {getattr(self, name)!r} is unknown; known are {known}"
            )
        for name in ("inner", "max_wave", "headway", "max_steps"):
            check(getattr(self, name) >= 1, f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("eta", "beta"):
            check(
                0 <= getattr(self, name) <= 1, f"{name} is {getattr(self, name)}; it must be between 0 and 1"
            )
        check(self.eps >= 0, f"eps is {self.eps}; it must be at least 0")


@torch.inference_mode()
def wavefront_decode(
    model,
    prompts,
    max_new_tokens: int,
    wave: Wave | None = None,
    r: int = 32,
    n_slots: int = 1,
    sampling=None,
    watch: Watch | None = None,
) -> Decoded:
    """Algorithms 1 and 2: every open position is refined by r' recurrences a step, while new ones open
    behind.

    Row b has n[b] frozen tokens and works on positions [n - 1, n_open): the last frozen token and those
    behind it. The output of position p proposes token p + 1. r: recurrences of the prompt and of the fixed
    exit. Stops a row at its first frozen EOS, at max_new_tokens, and all after max_steps with what is frozen
    by then.
    """
    s = wave or Wave()
    book = Book(model, prompts, max_new_tokens, sampling, watch, n_slots, s.released_alignment)
    book.prefill(r, s.eps if s.prefill_exit else None, "max")
    start_wave(book, r)
    left = book.unfinished()
    for _ in range(s.max_steps):
        if not left:
            break
        tokens, window = book.open(book.n - 1, book.n_open)
        e = torch.lerp(model.embed(tokens, window), book.momentum[book.index], s.eta)
        z = book.states[book.index]
        before, compared = previous_states(book, s, z)
        z = book.recur(add_noise(book, s, z), e, window, s.inner)
        proposed, delta = book.choose(model.decode(z, window), book.sizes, relative_distance(z, before))
        book.states[book.index], book.momentum[book.index] = z, e
        propose(book, s, proposed)
        settled = settled_positions(book, s, r, delta, compared)
        move(book, s, *freeze(book, s, settled), delta, compared)
        left = book.unfinished()
    book.unfinished(stop=True)
    return book.out


def start_wave(book, r: int):
    """After the prompt: what the wave keeps, [B] for a row, [B, L + 1] for a position.

    n_open: positions [0, n_open) have been opened. given: recurrences that a position had before the wave, r
    for the prompt (however soon it exited) and its next token. age: the wave's steps spent on it. stable:
    steps in which its token was predicted again. moved: by how much the last step moved the head. momentum
    [B, L + 1, d]: e of the last step.
    """
    book.n_open, book.moved = book.n.copy(), np.ones_like(book.n)
    book.given = r * (book.column <= book.prompt_len[:, None])
    book.age, book.stable = np.zeros_like(book.tokens), np.zeros_like(book.tokens)
    book.momentum = torch.zeros_like(book.states)
    book.per_row += ["n_open", "moved", "given", "age", "stable", "momentum"]
    tokens, window = book.open(book.n - 1, book.n)
    book.momentum[book.index] = book.model.embed(tokens, window)


def previous_states(book, s: Wave, z):
    """The states [B, T, d] that new ones, from z, are compared with, and where there is one, bool [B, T]."""
    if not s.released_alignment:
        return z, book.inside
    at = (book.start + book.moved)[:, None] + np.arange(book.inside.shape[1])
    return book.states[np.arange(len(at))[:, None], np.minimum(at, book.L)], at < book.stop[:, None]


def add_noise(book, s: Wave, z):
    """(1 - beta_t) z + beta_t noise, where beta_t falls with the recurrences spent on the position."""
    if s.beta == 0:
        return z
    spent = book.given[book.place] + s.inner * book.age[book.place]  # (B, T)
    if s.noise == "constant":
        spent = 0 * spent
    share = torch.from_numpy((s.beta / (1 + spent[..., None])).astype(np.float32)).to(z)
    noise = book.draw_states(book.sizes)
    if s.noise == "sqrt":
        return (1 - share).sqrt() * z + share.sqrt() * noise
    return torch.lerp(z, noise, share)


def propose(book, s: Wave, proposed):
    """The prediction [B, T] of every open position becomes the provisional token behind it."""
    rows, at = book.place
    behind = slice(at.start + 1, at.stop + 1) if isinstance(at, slice) else np.minimum(at + 1, book.L)
    before = book.tokens[book.place].copy() if s.exit == "stability" else None
    book.tokens[rows, behind] = proposed
    if s.exit == "stability":
        book.stable[book.place] += book.tokens[book.place] == before
    book.age[book.place] += 1


def settled_positions(book, s: Wave, r: int, delta, compared):
    """bool [B, T]: the open positions that the exit rule lets go. delta means something where compared."""
    if s.exit == "distance":
        return (delta < s.eps) & compared
    if s.exit == "stability":
        return book.inside & (book.stable[book.place] > r // s.inner)
    steps = r // s.inner + 2 if s.released_alignment else -(-r // s.inner)
    return book.inside & (book.age[book.place] >= steps)


def freeze(book, s: Wave, settled):
    """The new n [B] and n_open [B] when the positions settled [B, T] let go (Algorithm 2, and the paper's
    k*).

    Positions open before any freeze, h of them, if the wave of W has room. If position p is the last settled
    one (of the unbroken run of settled ones, with "prefix"), the tokens up to p freeze and p itself stays the
    head of the wave, unless nothing will be open behind it or it has had its r recurrences: then its
    prediction freezes too.
    """
    last_wanted = book.limit - (0 if s.released_alignment else 1)  # the answer's last token predicts nothing
    room = np.minimum(book.start + s.max_wave, last_wanted)
    n_open = np.minimum(book.n_open + s.headway, room)  # never less than before: room only grows
    hit = np.empty((len(settled), settled.shape[1] + 1), bool)
    hit[:, 0], hit[:, 1:] = True, settled  # in case there is none
    if s.freeze == "prefix":
        hit = np.logical_and.accumulate(hit, 1)
    behind = book.start + settled.shape[1] - hit[:, ::-1].argmax(1)  # p + 1, or the head: n - 1
    alone = s.max_wave == 1 or s.exit == "fixed" or behind == last_wanted
    n = np.maximum(book.n, behind + alone)
    return n, np.maximum(n_open, n)


def move(book, s: Wave, n, n_open, delta, compared):
    """Advance the head to n and the front to n_open; fill what is new there."""
    book.moved, opened, book.n_open = n - book.n, book.n_open, n_open
    if s.headway > 1 or s.continuous:
        for b, (old, new) in enumerate(zip(opened, n_open, strict=True)):
            if new > old + 1:  # headway: nothing predicts these tokens yet
                fillers = random_tokens(book.generators[b], new - old - 1, book.c.n_tokens)
                book.tokens[b, old + 1 : new] = fillers
            if new > old and s.continuous:
                book.states[b, old:new] = book.states[b, old - 1]
    seen = {}
    if book.watch:
        distance = np.where(compared, delta, np.nan)
        seen = {"n_open": n_open, "spent": book.given + s.inner * book.age, "distance": distance}
    book.out.steps += 1
    book.advance(n, s.inner, **seen)


def random_tokens(generator, n: int, n_tokens: int):
    """int64 [n]: the fillers of a headway above 1."""
    return torch.randint(n_tokens, (int(n),), generator=generator).numpy()


# ------------------------------------------------------------------------------------------------------- demo


def draw_wave(step: Step, eps: float, tokenizer, colour: bool) -> str:
    """Row 0: frozen | refining > the newest prediction. In colour darker where a state still moves."""
    head, n, n_open = int(step.start[0]), int(step.n_frozen[0]), int(step.n_open[0])
    cuts = (n, n_open) - step.prompt_len[0]
    parts = np.split(step.tokens[0, step.prompt_len[0] : n_open + 1], cuts)
    frozen, refining, newest = (
        [tokenizer.decode([t]).replace("\n", "\u21b5") or "$" for t in part] for part in parts
    )
    if not colour:
        return f"{''.join(frozen)}|{''.join(refining)}>{''.join(newest)}"
    delta = step.distance[0][n - head :]
    delta = np.append(delta, [1.0] * (len(refining) - len(delta)))  # opened in this step
    far = np.clip(np.log(np.maximum(delta, eps) / eps) / math.log(1 / eps), 0, 1)  # 0 settled, 1 fresh
    grey = [f"\033[38;5;{round(249 - 12 * f)}m{c}" for f, c in zip(far, refining, strict=False)]
    return f"\033[1m{''.join(frozen)}\033[0m{''.join(grey)}\033[0m\033[2m{''.join(newest)}\033[0m"


def run_program(program: str, top: int = 5) -> str:
    """The truth: values 0 to `top` of the counter after each instruction, the last one first."""
    value, values = 0, []
    for x in program:
        changed = {"+": min(value + 1, top), "-": max(value - 1, 0), "~": top - value}
        value = int(x) if x.isdigit() else changed[x]
        values.append(str(value))
    return "".join(reversed(values))


def program_prompt(program: str, longest: int, tokenizer) -> np.ndarray:
    """The question as the model learned it: instructions, then '='."""
    check(program[:1].isdigit(), f"program {program!r} must begin with a digit, which sets the counter")
    check(len(program) <= longest, f"the program has {len(program)} instructions; at most {longest}")
    return tokenizer.encode(program.rstrip("=") + "=")


METHODS = ("wavefront", "ar", "adaptive", "speculative")


def settle_options(args):
    """What the command line leaves open."""
    fill_in(args, max_new_tokens=256, inner=4)


def decode(args, model, prompts, watch=None) -> Decoded:
    """Call the sampler that --method names, with the settings of the command line."""
    A, top_p = args.max_new_tokens, 1.0 if args.top_p is None else args.top_p
    sampling = Sampling(args.temperature, top_p, seed=args.seed)
    if args.method == "ar":
        return autoregressive_decode(model, prompts, A, args.r, sampling=sampling, watch=watch)
    if args.method == "adaptive":
        return adaptive_decode(model, prompts, A, args.r, args.eps, sampling=sampling, watch=watch)
    if args.method == "speculative":
        return speculative_decode(model, prompts, A, args.r, sampling=sampling, watch=watch)
    names = ("inner", "eps", "eta", "beta", "max_wave", "prefill_exit")
    wave = Wave(**{name: getattr(args, name) for name in names})
    return wavefront_decode(model, prompts, A, wave, args.r, sampling=sampling, watch=watch)


def parse_args(argv=None):
    p = argparse.ArgumentParser(
        description="Run a program on the tiny recurrent-depth model's counter and watch the wave move "
        "(train it first: python train_tiny.py), or answer a prompt with a full Huginn checkpoint.",
    )
    p.add_argument(
        "program", nargs="?", help="0 to 5 set the counter, + adds 1, - takes 1, ~ turns it: 3++-~1++"
    )
    p.add_argument(
        "--model", default="out/counter-32/recurrent", help="folder of the tiny model (%(default)s)"
    )
    p.add_argument(
        "--r", type=int, default=32, help="recurrences of the prompt, and of a token with --method ar (32)"
    )
    p.add_argument("--inner", type=int, help="recurrences of a step, r' (4, the tiny model 1)")
    p.add_argument("--eps", type=float, default=0.03, help="a state that moves less has settled (0.03)")
    p.add_argument("--eta", type=float, default=0.1, help="momentum of the embedded input (0.1)")
    p.add_argument("--beta", type=float, default=0.0, help="noise mixed into the states (0)")
    p.add_argument("--max-wave", type=int, default=128, help="largest wavefront, W (128)")
    p.add_argument(
        "--prefill-exit", action="store_true", help="the prompt's recurrences end once it has settled"
    )
    add_checkpoint_arguments(p, METHODS)
    return p.parse_args(argv)


def watcher(args, tokenizer):
    """A `watch` that prints each step of the wave."""

    def watch(step):
        if step.n_open is not None:
            picture = draw_wave(step, args.eps, tokenizer, sys.stdout.isatty())
            print(f"positions {step.start[0]:3d} to {step.stop[0]:3d}  {picture}")

    return watch


def run_counter(args):
    """The demo: the tiny model runs a program, step by step; then the time of this and of autoregression."""
    config, model = read_config(args.model), load_checkpoint(args.model)
    tokenizer, args.max_new_tokens = CharTokenizer(config["alphabet"]), len(args.program) + 1
    fill_in(args, inner=1)
    prompt = program_prompt(args.program, config["digits"], tokenizer)
    print(f"{tokenizer.decode(prompt)}  ({model.n_parameters():,} parameters)")
    answer = tokenizer.decode(decode(args, model, prompt, watcher(args, tokenizer)).answers[0])
    print(f"values, last first: {answer}  ({'right' if answer == run_program(args.program) else 'wrong'})")
    for method in dict.fromkeys((args.method, "ar")):
        args.method, started = method, time.perf_counter()
        out = decode(args, model, prompt)
        speed = len(out.answers[0]) / (time.perf_counter() - started)
        print(f"{method:12} {out.steps:3d} steps {out.core_passes:5d} core passes {speed:8.1f} tokens/s")


def run_checkpoint(args):
    """Answer --prompt, or the problems of --eval, with a full checkpoint."""
    model, tokenizer = open_checkpoint(args, RecurrentDepth)
    settle_options(args)
    names = "checkpoint dtype method chat max_new_tokens temperature top_p seed few_shot shots".split()
    names += "r inner eps eta beta max_wave prefill_exit".split()

    def answer(ids, watch=None):
        out = decode(args, model, ids, watch)
        return out.answers[0], {"forwards": out.steps, "core passes": out.core_passes}

    if args.eval:
        print(evaluate(args, model.config, tokenizer, answer, {name: getattr(args, name) for name in names}))
        return

    def final(step):
        return step.tokens[0, step.prompt_len[0] : step.n_frozen[0]]

    answer_prompt(args, tokenizer, answer, final, watcher(args, tokenizer) if args.watch else None)


def main(argv=None):
    args = parse_args(argv)
    tiny = run_counter if args.program else None
    command_line(args, run_checkpoint, tiny, "a program to run", "python train_tiny.py --only recurrent")


if __name__ == "__main__":
    main()
