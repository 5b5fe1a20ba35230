"""D2F, Discrete Diffusion Forcing (arXiv 2508.09192), from the mask to the pipelined decoder.

In the paper's order: block-causal attention (Eq. 2), noise schedules and corruption (Eq. 1), asymmetric
distillation (Eq. 3), token choice, the decoders that the paper compares, pipelined decoding (Algorithm 2), a
demo. Expected results: the tables in README.md, printed by `python train_tiny.py`.

Symbols: k block size; t, p mask ratio; P prompt length; N number of blocks; tau_add, tau_act, tau_conf the
thresholds that open a block, fully activate it, accept a token.

Where the released code and the text differ, the default is the released code:
- distillation is KL(teacher || student), each term divided by its block's mask ratio (paper: KL(student ||
  teacher));
- mask ratios start in [0.2, 0.7] and never exceed 0.7 (paper: 0.3 to 0.7);
- a block opens at decoded fraction >= tau_add (paper: >), and is promoted before the forward (paper: after).
Where the released code is mistaken, we are not: an answer ends at its first EOS whatever is decided behind
it; the answer length need not be a multiple of k; mask, padding and unknown ids are never chosen.

The network runs on the device. The book - a token buffer and two integers per row - is kept on the host in
numpy: one synchronisation a forward, and an operation on a few dozen numbers costs a fifth of what it would
in torch.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.nn.functional as F

from tiny_models import CharTokenizer, addition_prompt, load_checkpoint, read_config, read_sum

# ----------------------------------------------------------------------------- block-causal attention (Eq. 2)


def block_end(position, prompt_len, k: int):
    """First position after the block that holds `position`; the prompt is one block. For numpy and torch."""
    return prompt_len + ((position - prompt_len) // k + 1).clip(0) * k


def block_causal_mask(length: int, prompt_len, k: int) -> torch.Tensor:
    """bool [B, 1, length, length], True = may attend: bidirectional inside a block, causal across blocks.

    prompt_len: int64 [B] (or [1]). The last block may be cut short by `length`.
    """
    position = torch.arange(length, device=prompt_len.device)
    return (position < block_end(position, prompt_len[:, None], k)[:, :, None])[:, None]


# --------------------------------------------------------------------- noise schedules and corruption (Eq. 1)


def mask_ratios(
    batch: int, n_blocks: int, schedule: str = "released", generator=None, device="cpu"
) -> torch.Tensor:
    """Mask ratio t of each block, float32 [batch, n_blocks].

    released: t_1 ~ U(0.2, 0.7), then increments U(0, 1) * (0.7 - t_1)/(N - 1): non-decreasing, at most 0.7.
    paper: N sorted draws of U(0.3, 0.7). random: independent U(0.2, 0.7), the control of Table 4 (only order
    differs).
    """

    def rand(n):
        return torch.rand((batch, n), generator=generator, device=device)

    if schedule == "released":
        first = rand(1) / 2 + 0.2
        if n_blocks == 1:
            return first
        steps = rand(n_blocks - 1) * (0.7 - first) / (n_blocks - 1)
        return torch.cat((first, first + steps.cumsum(1)), 1).clamp(max=1.0)
    if schedule == "paper":
        return (rand(n_blocks) * 0.4 + 0.3).sort(1).values
    if schedule == "random":
        return rand(n_blocks) / 2 + 0.2
    raise ValueError(f"schedule {schedule!r} is unknown; known are released, paper, random")


def corrupt(tokens, prompt_len, k: int, ratios, mask_id: int, uniform):
    """Mask each answer token with its block's ratio; the prompt stays.

    tokens int64 [B, L], prompt_len int64 [B], ratios [B, N], uniform [B, L] draws of U(0, 1).
    Returns noisy tokens, masked (bool, True = is masked) and p (the ratio at each position), all [B, L].
    """
    position = torch.arange(tokens.shape[1], device=tokens.device)
    block = (position - prompt_len[:, None]) // k
    p = ratios.gather(1, block.clip(0, ratios.shape[1] - 1))
    masked = (uniform < p) & (block >= 0)
    return torch.where(masked, mask_id, tokens), masked, p


# ----------------------------------------------------------------------------------------------------- losses


def align(logits, shift: bool):
    """Logits [B, L, V] such that row i predicts token i. Nothing predicts token 0 of a shifted model:
    uniform.
    """
    return torch.cat((torch.ones_like(logits[:, :1]), logits[:, :-1]), 1) if shift else logits


def mean_over(terms, p):
    """Mean of the masked tokens' terms [M], each divided by its mask ratio p [M] if given; 0 when M = 0."""
    return (terms if p is None else terms / p).sum() / max(len(terms), 1)


def masked_cross_entropy(logits, tokens, masked, p=None):
    """Masked-diffusion loss (the teacher's): cross-entropy of the true tokens at masked positions."""
    terms = F.cross_entropy(logits[masked].float(), tokens[masked], reduction="none")
    return mean_over(terms, None if p is None else p[masked])


def distillation_loss(student_logits, teacher_logits, masked, p=None, direction: str = "forward"):
    """Asymmetric distillation, Eq. 3: KL over the masked tokens; no gradient reaches the teacher.

    Logits [B, L, V] aligned to the tokens they predict, masked bool [B, L], p [B, L] divides each term.
    direction: "forward" = KL(teacher || student) as released, "reverse" = KL(student || teacher) as in the
    paper.
    """
    student = student_logits[masked].float().log_softmax(-1)  # (M, V)
    teacher = teacher_logits.detach()[masked].float().log_softmax(-1)
    if direction not in ("forward", "reverse"):
        raise ValueError(f"direction {direction!r} is unknown; known are forward, reverse")
    of, to = (teacher, student) if direction == "forward" else (student, teacher)
    return mean_over((of.exp() * (of - to)).sum(-1), None if p is None else p[masked])


def d2f_loss(
    student, teacher, tokens, prompt_len, k, schedule="released", direction="forward", weighted=True, gen=None
):
    """One step of D2F training: the same noisy sequence, seen block-causally by the student, whole by the
    teacher.
    """
    B, L = tokens.shape
    n_blocks = max(1, -(-(L - int(prompt_len.min())) // k))
    ratios = mask_ratios(B, n_blocks, schedule, gen, tokens.device)
    uniform = torch.rand(tokens.shape, generator=gen, device=tokens.device)
    noisy, masked, p = corrupt(tokens, prompt_len, k, ratios, student.config.mask_id, uniform)
    with torch.no_grad():
        target = align(teacher(noisy), teacher.config.shift)
    logits = align(student(noisy, mask=block_causal_mask(L, prompt_len, k)), student.config.shift)
    return distillation_loss(logits, target, masked, p if weighted else None, direction)


# ---------------------------------------------------------------------------- token choice and its confidence


@dataclass
class Sampling:
    """How a token and its confidence are taken from logits. temperature 0 is argmax.

    confidence ranks positions: "probability", "margin" (top-1 minus top-2), "entropy" (negative entropy) or
    "random". Thresholds always test the probability. forbidden: further ids never chosen. deferred: ids whose
    probability counts as 0, so that they are decided last. seed: row b of a batch draws from a generator
    seeded with seed + b.
    """

    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    confidence: str = "probability"
    forbidden: tuple[int, ...] = ()
    deferred: tuple[int, ...] = ()
    seed: int = 0

    def __post_init__(self):
        if self.temperature < 0:
            raise ValueError(f"temperature is {self.temperature}; it must be at least 0")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be above 0 and at most 1")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}; it must be at least 1")
        if self.confidence not in ("probability", "margin", "entropy", "random"):
            raise ValueError(
                f"confidence {self.confidence!r} is unknown: probability, margin, entropy or random"
            )


class Chooser:
    """Turns the logits of a batch's open positions into tokens; holds what one decode call needs for it."""

    def __init__(self, model, sampling: Sampling, batch: int):
        self.s, c = sampling, model.config
        never = [c.mask_id, *range(c.n_tokens, c.vocab_size), *sampling.forbidden]
        never += [c.pad_id] if c.pad_id != c.eos_id else []
        self.bias = torch.zeros(c.vocab_size, device=model.device)
        self.bias[never] = float("-inf")
        self.generators = [torch.Generator(model.device).manual_seed(sampling.seed + b) for b in range(batch)]

    def __call__(self, logits, rows):
        """logits [M, V]; rows: int array [M], ascending, the prompt that each belongs to.

        Returns host arrays [M]: token, its probability (under all ids, chosen or forbidden), its confidence.
        """
        logits = logits.float()
        if self.s.temperature > 0:
            logits = keep_top(logits / self.s.temperature, self.s.top_p, self.s.top_k)
            token = self.sample(logits, rows)
            value = logits.gather(1, token[:, None])[:, 0]
        else:
            value, token = (logits + self.bias).max(-1)
        if self.s.deferred:
            logits = logits.index_fill(1, torch.tensor(self.s.deferred, device=logits.device), float("-inf"))
            value = logits.gather(1, token[:, None])[:, 0]
        probability = (value - logits.logsumexp(-1)).exp()
        confidence = self.confidence(logits, probability, rows)
        picked = (
            torch.stack((token.float(), probability, confidence)).cpu().numpy()
        )  # the one synchronisation
        return picked[0].astype(np.int64), picked[1], picked[2]

    def confidence(self, logits, probability, rows):
        """[M]: what ranks the positions."""
        if self.s.confidence == "margin":
            top = (logits + self.bias).topk(2).values
            top = (top - logits.logsumexp(-1, keepdim=True)).exp()
            return top[:, 0] - top[:, 1]
        if self.s.confidence == "entropy":
            p = logits.softmax(-1)
            return (p * (p + 1e-10).log()).sum(-1)
        if self.s.confidence == "random":
            return self.draws(rows, lambda n, g: torch.rand(n, generator=g, device=g.device))
        return probability

    def sample(self, logits, rows):
        """One draw from each row of logits [M, V]: the argmax of p / Exp(1)."""
        wide = (
            torch.float32 if logits.device.type == "mps" else torch.float64
        )  # low precision would favour the top
        p = (logits + self.bias).to(wide).softmax(-1)
        shape = p.shape[1:]
        noise = self.draws(rows, lambda n, g: p.new_empty((n, *shape)).exponential_(generator=g))
        return (p / noise).argmax(-1)

    def draws(self, rows, draw):
        """draw(n, generator) for the n positions of each batch row, from its own generator; concatenated [M,
        ...].
        """
        counts = np.bincount(rows, minlength=len(self.generators))
        return torch.cat([draw(int(n), g) for n, g in zip(counts, self.generators, strict=True)])


def keep_top(logits, top_p: float | None, top_k: int | None):
    """-inf outside the smallest set of probability top_p, and outside the top_k most probable."""
    if top_k is not None and top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[..., -1:], float("-inf"))
    if top_p is not None and top_p < 1:
        ranked, order = logits.sort(-1, descending=True)
        p = ranked.softmax(-1)
        beyond = p.cumsum(-1) - p >= top_p  # the token that crosses top_p is kept
        logits = logits.masked_fill(beyond.scatter(-1, order, beyond), float("-inf"))
    return logits


# ---------------------------------------------------------------------------------------- what decoders share


@dataclass
class Step:
    """What one forward did, handed to `watch`. Arrays are live: copy what you keep. Rows are those still
    decoding.
    """

    rows: np.ndarray  # [b] index of each row in the list of prompts
    tokens: np.ndarray  # [b, L] after the commits of this step
    prompt_len: np.ndarray  # [b]
    start: np.ndarray  # [b] the forward ran over positions [start, stop)
    stop: np.ndarray  # [b]
    n_cached: np.ndarray  # [b] positions in the cache before this forward
    n_final: np.ndarray  # [b] positions whose K/V are final after it
    commits: np.ndarray  # [c, 3] batch row (in `rows`), position, token
    full: np.ndarray | None = None  # [b, N] pipelined: is block i fully activated
    n_open: np.ndarray | None = None  # [b] pipelined: how many blocks are open


@dataclass
class Decoded:
    """Answers up to and including their first EOS, and what they cost."""

    answers: list[list[int]] = field(default_factory=list)
    raw: list[np.ndarray] = field(default_factory=list)  # whole answers, as they stood at the end
    row_forwards: list[int] = field(default_factory=list)  # forwards in which each row took part
    forwards: int = 0  # calls of the network
    positions: int = 0  # positions the network ran over, padding of ragged batches included
    cache_bytes: int = 0


Watch = Callable[[Step], None]


class Book:
    """The host's side of a decode: the token buffer, lengths, and the calls of the network. Rows that are
    done leave it.

    tokens int64 [B, L], the prompt, then mask ids; prompt_len [B]; n_cached [B] positions in the cache; rows
    [B] the index of each row in the caller's list. Answer coordinates count from the end of the prompt: [B,
    A].
    """

    def __init__(
        self, model, prompts, max_new_tokens: int, sampling, watch: Watch | None, cached: bool = True
    ):
        self.model, self.config, self.watch, self.A = model, model.config, watch, max_new_tokens
        prompts = check_prompts(prompts, max_new_tokens, model.config)
        B = len(prompts)
        self.prompt_len = np.array([len(p) for p in prompts])
        self.tokens = np.full((B, self.prompt_len.max() + max_new_tokens), model.config.mask_id, np.int64)
        for row, prompt in zip(self.tokens, prompts, strict=True):
            row[: len(prompt)] = prompt
        self.n_cached, self.rows = np.zeros(B, np.int64), np.arange(B)
        self.cache = model.new_cache(*self.tokens.shape) if cached else None
        self.choose = Chooser(model, sampling or Sampling(), B)
        self.out = Decoded(
            [[]] * B, [None] * B, np.zeros(B, np.int64), cache_bytes=self.cache.nbytes if cached else 0
        )

    @property
    def end(self):
        """[B] the position after each row's answer."""
        return self.prompt_len + self.A

    def answer(self) -> np.ndarray:
        """[B, A] the answers as they stand."""
        return np.take_along_axis(self.tokens, self.prompt_len[:, None] + np.arange(self.A), 1)

    def forward(self, start, stop, attend):
        """Run the network over positions [start, stop) of each row, for `predict` to read.

        start, stop: int [B]. attend(position [B, T]) is the first key position that a query there may not
        see.
        """
        at = start[:, None] + np.arange((stop - start).max())  # (B, T)
        inside = np.minimum(at, stop[:, None] - 1)
        window, see = np.take_along_axis(self.tokens, inside, 1), attend(inside)
        n_keys, mask, device = int(see.max()), None, self.model.device
        same = start.min() == start.max() and stop.min() == stop.max()
        if not same or see.min() < n_keys or n_keys > stop[0] or self.config.causal and at.shape[1] > 1:
            see = torch.from_numpy(see).to(device)
            mask = (torch.arange(n_keys, device=device) < see[:, :, None])[:, None]  # (B, 1, T, n_keys)
        # what pads a short row is written to the cache's scrap position
        at = int(start[0]) if same else np.where(at < stop[:, None], at, self.tokens.shape[1])
        self.hidden = self.model.hidden(torch.from_numpy(window).to(device), at, mask, self.cache)
        self.start, self.stop = start, stop
        self.out.forwards += 1
        self.out.row_forwards[self.rows] += 1
        self.out.positions += window.size

    def everything(self, at):
        """The `attend` of a bidirectional model: each query sees its whole row."""
        return np.zeros_like(at) + self.end[:, None]

    def predict(self, wanted):
        """Predictions at answer positions: wanted bool [B, n], n <= A -> token, probability, confidence [B,
        n].

        Where nothing is wanted the probability is 0 and the confidence -inf.
        """
        rows, i = np.nonzero(wanted)
        at = (
            self.prompt_len[rows] + i - self.start[rows] - self.config.shift
        )  # index of the output in the window
        flat = torch.from_numpy(rows * self.hidden.shape[1] + at).to(self.model.device)
        logits = self.model.head(self.hidden.flatten(0, 1)[flat])  # (M, V)
        token, probability, confidence = (
            np.zeros(wanted.shape, np.int64),
            np.zeros(wanted.shape),
            np.zeros(wanted.shape),
        )
        confidence[:] = -np.inf
        token[rows, i], probability[rows, i], confidence[rows, i] = self.choose(logits, self.rows[rows])
        return token, probability, confidence

    def commit(self, chosen, token, n_final=None, **seen):
        """Write token [B, n] at the answer positions where chosen [B, n]. The cache commits by moving a
        number.
        """
        rows, i = np.nonzero(chosen)
        self.tokens[rows, self.prompt_len[rows] + i] = token[rows, i]
        before, self.n_cached = self.n_cached, self.n_cached if n_final is None else n_final
        if self.watch:
            commits = np.stack((rows, self.prompt_len[rows] + i, token[rows, i]), 1)
            live = self.rows, self.tokens, self.prompt_len, self.start, self.stop
            self.watch(Step(*live, before, self.n_cached, commits, **seen))

    def finish(self, done, state=None):
        """Take the rows where done [B] out of the batch. state [B] is the decoder's own number; returns the
        rest of it.
        """
        if not done.any():
            return state
        for b in np.flatnonzero(done):
            answer = self.tokens[b, self.prompt_len[b] : self.prompt_len[b] + self.A]
            self.out.raw[self.rows[b]] = answer.copy()
            self.out.answers[self.rows[b]] = cut(answer, self.config.eos_id)
        keep = np.flatnonzero(~done)
        self.tokens, self.prompt_len = self.tokens[keep], self.prompt_len[keep]
        self.n_cached, self.rows = self.n_cached[keep], self.rows[keep]
        if self.cache is not None and len(keep):
            self.cache.keep(keep)
        return None if state is None else state[keep]


def check_prompts(prompts, max_new_tokens: int, config) -> list[np.ndarray]:
    """Prompts (token ids; one prompt or a list of them) as int arrays; ValueError for what cannot be decoded.

    A shifted model needs a token before the first one, so an empty prompt becomes its EOS, as Dream begins a
    text.
    """
    if isinstance(prompts, np.ndarray | torch.Tensor) or (len(prompts) and np.ndim(prompts[0]) == 0):
        prompts = [prompts] if np.ndim(prompts) == 1 else list(prompts)
    if len(prompts) == 0:
        raise ValueError("the batch is empty: give at least one prompt")
    prompts = [np.asarray(p, np.int64 if len(p) == 0 else None) for p in prompts]
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; it must be at least 1")
    for b, p in enumerate(prompts):
        if p.dtype.kind not in "iu" or p.ndim != 1:
            raise ValueError(
                f"prompt {b} has dtype {p.dtype} and {p.ndim} dimensions; token ids are one row of integers"
            )
        if len(p) and not 0 <= p.min() <= p.max() < config.n_tokens:
            raise ValueError(
                f"prompt {b} holds ids {p.min()} to {p.max()}; this model knows 0 to {config.n_tokens - 1}"
            )
        if (p == config.mask_id).any():
            raise ValueError(
                f"prompt {b} holds the mask id {config.mask_id}; only the decoder may place masks"
            )
        if len(p) + max_new_tokens > config.max_len:
            raise ValueError(
                f"prompt {b} has {len(p)} tokens and max_new_tokens is {max_new_tokens}; "
                f"together at most {config.max_len}"
            )
    return [np.array([config.eos_id]) if config.shift and len(p) == 0 else p for p in prompts]


def cut(answer, eos_id: int) -> list[int]:
    """The answer [A] up to and including its first EOS."""
    ends = np.flatnonzero(answer == eos_id)
    answer = answer[: ends[0] + 1] if len(ends) else answer
    return [int(t) for t in answer]


def check_thresholds(block_size: int, **thresholds):
    if block_size < 1:
        raise ValueError(f"the block size is {block_size}; it must be at least 1")
    for name, value in thresholds.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{name} is {value}; it must be between 0 and 1")


NOISE = 1e-5  # confidences closer than this are equal: the leftmost goes first, whatever the batch rounds to


def ranks(confidence):
    """Rank of each position in its row of [B, n], 0 the most confident."""
    confidence = confidence.clip(-1e9)  # finite, so that two absent positions have a difference
    order = (-confidence).argsort(1, kind="stable")
    step = np.diff(np.take_along_axis(confidence, order, 1), axis=1, prepend=np.inf) < -NOISE
    group = np.empty_like(order)
    np.put_along_axis(group, order, step.cumsum(1), 1)
    return (group * confidence.shape[1] + np.arange(confidence.shape[1])).argsort(1).argsort(1)


def accept(probability, confidence, tau_conf: float, must):
    """Which positions of each block to commit: bool [..., k].

    Those of probability > tau_conf; where must [...] and there is none, the single one of highest confidence.
    """
    chosen = probability > tau_conf
    none = must & ~chosen.any(-1)
    best = confidence[none]
    chosen[none, (best >= best.max(-1, keepdims=True) - NOISE).argmax(-1)] = True
    return chosen


# ----------------------------------------------------------------------------- the decoders it is compared to


@torch.inference_mode()
def autoregressive_decode(model, prompts, max_new_tokens: int, sampling=None, watch=None) -> Decoded:
    """One token a forward, left to right, with a KV cache. model must be causal and shifted."""
    if not (model.config.causal and model.config.shift):
        raise ValueError(
            "autoregressive decoding needs a model that is causal and predicts the next token (shift)"
        )
    book = Book(model, prompts, max_new_tokens, sampling, watch)
    n = np.zeros(len(book.rows), np.int64)  # answer tokens of each row
    while len(book.rows):
        length = book.prompt_len + n
        book.forward(book.n_cached, length, lambda at: at + 1)
        here = np.arange(book.A) == n[:, None]
        token, _, _ = book.predict(here)
        book.commit(here, token, n_final=length)
        n = n + 1
        n = book.finish((token[here] == model.config.eos_id) | (n == book.A), n)
    return book.out


ORDERS = {  # order of vanilla decoding -> confidence that ranks the positions
    "low_confidence": "probability",
    "maskgit_plus": "probability",
    "topk_margin": "margin",
    "entropy": "entropy",
    "origin": "random",
}


def transfer_plan(order: str, A: int, k: int, steps: int):
    """For each step of vanilla decoding: the answer positions [lo, hi) it may decide, and how many.

    LLaDA decides a count a step, an even share of its block; Dream a share 1 - s/t of what is masked, all at
    the end.
    """
    if order == "low_confidence":
        each = steps // -(-A // k)
        if each < 1:
            raise ValueError(f"steps is {steps}; {-(-A // k)} blocks of {k} need at least one step each")
        for lo in range(0, A, k):
            m = min(k, A - lo)
            yield from ((lo, lo + m, m // each + (i < m % each), None) for i in range(each))
    else:
        t = torch.linspace(1, 1e-3, steps + 1)
        share = (1 - t[1:] / t[:-1]).numpy()
        share[-1] = 1
        yield from ((0, A, None, x) for x in share)


@torch.inference_mode()
def vanilla_decode(
    model,
    prompts,
    max_new_tokens: int,
    block_length: int | None = None,
    steps: int | None = None,
    order: str = "low_confidence",
    cfg_scale: float = 0.0,
    sampling=None,
    watch=None,
) -> Decoded:
    """Decoding as LLaDA and Dream were released: every step runs the whole sequence, nothing is cached.

    order "low_confidence" is LLaDA: blocks of block_length from left to right, steps / blocks steps each; a
    step keeps its share of the most confident predictions and masks the others again. "maskgit_plus",
    "topk_margin", "entropy" are Dream: one block; at time t a share 1 - s/t of the masks is decided, the most
    confident first; "origin" decides each with that probability. steps defaults to one token a step.
    cfg_scale > 0 is LLaDA's classifier-free guidance.
    """
    if order not in ORDERS:
        raise ValueError(f"order {order!r} is unknown; known are {', '.join(ORDERS)}")
    sampling = replace(sampling or Sampling(), confidence=ORDERS[order])
    book = Book(model, prompts, max_new_tokens, sampling, watch, cached=False)
    k = max_new_tokens if block_length is None else block_length
    check_thresholds(k)
    for lo, hi, count, share in transfer_plan(order, max_new_tokens, k, steps or max_new_tokens):
        run_whole(book, cfg_scale)
        masked = book.answer() == model.config.mask_id
        masked[:, :lo], masked[:, hi:] = False, False
        token, _, confidence = book.predict(masked)
        if order == "origin":
            chosen = masked & (confidence < share)
        else:
            n = masked.sum(1) if count is None else count
            n = np.floor(n.astype(np.float32) * share) if count is None else count  # in float32, as released
            chosen = masked & (ranks(confidence) < np.reshape(n, (-1, 1)))
        book.commit(chosen, token)
    book.finish(np.ones(len(book.rows), bool))
    return book.out


def run_whole(book: Book, cfg_scale: float = 0.0):
    """A forward of the whole sequence; with guidance, another one that does not see the prompt."""
    book.forward(np.zeros_like(book.end), book.end, book.everything)
    if cfg_scale > 0:
        tokens, conditional = book.tokens, book.hidden
        in_prompt = np.arange(tokens.shape[1]) < book.prompt_len[:, None]
        book.tokens = np.where(in_prompt, book.config.mask_id, tokens)
        book.forward(np.zeros_like(book.end), book.end, book.everything)
        book.tokens = tokens
        # logits = u + (cfg + 1)(c - u); the head is linear, so the same mix of hidden states gives them
        book.hidden = torch.lerp(book.hidden, conditional, cfg_scale + 1)


@torch.inference_mode()
def cached_decode(
    model,
    prompts,
    max_new_tokens: int,
    block_length: int | None = None,
    cache: str = "prefix",
    tau_conf: float = 0.9,
    sampling=None,
    watch=None,
) -> Decoded:
    """Fast-dLLM: a bidirectional model, blocks from left to right, every prediction above tau_conf accepted.

    Each block begins with a forward of the whole sequence, whose K/V are kept. Until the block is done,
    "prefix" then re-runs the block and all behind it, "dual" the block alone; what is not re-run is
    approximate, for its K/V are those of the block's first forward. "none" re-runs everything (with one
    block: threshold-parallel decoding, no cache).
    """
    if cache not in ("none", "prefix", "dual"):
        raise ValueError(f"cache {cache!r} is unknown; known are none, prefix, dual")
    k = max_new_tokens if block_length is None else block_length
    check_thresholds(k, tau_conf=tau_conf)
    book = Book(model, prompts, max_new_tokens, sampling, watch, cached=cache != "none")
    previous = np.full(len(book.rows), -1)  # the block that each row's last forward worked on
    while len(book.rows):
        masked = book.answer() == model.config.mask_id
        block = masked.argmax(1) // k  # the first that is not done
        whole = (block != previous) | (cache == "none")
        low = book.prompt_len + block * k
        high = np.minimum(low + k, book.end)
        start = np.where(whole, 0, np.maximum(low - model.config.shift, 0))
        stop = np.where(whole | (cache == "prefix"), book.end, high)
        book.forward(start, stop, book.everything)
        token, probability, confidence = book.predict(masked & (np.arange(book.A) // k == block[:, None]))
        book.commit(accept(probability, confidence, tau_conf, np.ones(len(block), bool)), token)
        previous = book.finish(answer_settled(book.answer(), model.config), block)
    return book.out


def answer_settled(answer, config):
    """bool [B]: nothing is masked before the first EOS of answer [B, A] (or anywhere), so the text cannot
    change.
    """
    A = answer.shape[1]
    first = [
        np.where(hit.any(1), hit.argmax(1), A) for hit in (answer == config.mask_id, answer == config.eos_id)
    ]
    return (first[0] > first[1]) | (first[0] == A)


# --------------------------------------------------------------------------- pipelined decoding (Algorithm 2)


@torch.inference_mode()
def pipelined_decode(
    model,
    prompts,
    max_new_tokens: int,
    block_size: int,
    tau_add: float = 0.1,
    tau_act: float = 0.95,
    tau_conf: float = 0.9,
    sampling=None,
    watch=None,
    stop_at_eos: bool = True,
    use_cache: bool = True,
) -> Decoded:
    """Algorithm 2: blocks are decoded in a pipeline, each opened while the ones before it are still in work.

    A semi-activated block commits only predictions above tau_conf; a fully activated one at least its best in
    each forward. tau_add 1 opens a block only when the last is complete: one block at a time ("cache only",
    Tables 5, 7). tau_add = tau_act leaves a single state (Table 3). stop_at_eos False decodes on behind an
    EOS, as released; the text is the same. use_cache False re-runs the whole sequence in each forward; the
    output is the same.
    """
    k, A, c = block_size, max_new_tokens, model.config
    check_thresholds(k, tau_add=tau_add, tau_act=tau_act, tau_conf=tau_conf)
    book = Book(model, prompts, A, sampling, watch, cached=use_cache)
    N = -(-A // k)
    size = np.minimum(k, A - k * np.arange(N))  # positions of each block: the last may be short
    n_open = np.zeros(len(book.rows), np.int64)
    while len(book.rows):
        answer = book.answer()
        masked = np.zeros((len(answer), N * k), bool)
        masked[:, :A] = answer == c.mask_id
        left = masked.reshape(-1, N, k).sum(-1)  # (B, N)
        decoded = np.pad(
            (size - left) / size, ((0, 0), (1, 0)), constant_values=1.0
        )  # (B, N + 1), the prompt first

        # lines 3-5: open a block when the last open one is decoded to tau_add, until an EOS is committed
        # anywhere
        eos = answer == c.eos_id
        may_open = (n_open < N) & ~eos.any(1) & (decoded[np.arange(len(answer)), n_open] >= tau_add)
        opened = n_open + may_open
        if stop_at_eos:  # a block behind one that holds EOS changes nothing that is kept
            opened = np.where(eos.any(1), np.minimum(opened, eos.argmax(1) // k + 1), opened)
        is_open = np.arange(N) < opened[:, None]
        done = ~(is_open & (left > 0)).any(1) | (stop_at_eos & answer_settled(answer, c))
        if done.any():
            n_open = book.finish(done, n_open)
            continue
        n_open = opened

        # lines 6-8: a block is fully activated when its predecessor is decoded to tau_act (it stays so: masks
        # only go)
        full = is_open & (decoded[:, :-1] >= tau_act)

        # line 9: one forward over what is not cached; blocks complete before it are final after it
        n_final = book.prompt_len + masked.argmax(1) // k * k
        start = (
            np.maximum(book.n_cached - c.shift, 0) * use_cache
        )  # the output before the first mask predicts it
        stop = np.minimum(book.prompt_len + n_open * k, book.end)
        see = book.prompt_len[:, None], book.end[:, None]
        book.forward(start, stop, lambda at, see=see: np.minimum(block_end(at, see[0], k), see[1]))

        # lines 10-16: commit what is above tau_conf, in a fully activated block at least one
        wanted = masked & np.repeat(is_open, k, 1)
        token, probability, confidence = book.predict(wanted)
        chosen = accept(
            probability.reshape(-1, N, k), confidence.reshape(-1, N, k), tau_conf, full & (left > 0)
        )
        book.commit(chosen.reshape(-1, N * k), token, n_final, full=full, n_open=n_open)
    return book.out


# ------------------------------------------------------------------------------------------------------- demo

METHODS = {  # --method -> the phase of `train_tiny.py` whose model it uses
    "pipelined": "student",
    "ar": "autoregressive",
    "vanilla": "teacher",
    "cached": "teacher",
}
COLOURS = {"cached": "\033[90m", "full": "\033[1;32m", "semi": "\033[33m", "decoded": "\033[0m"}
BRACKETS = {"cached": "  ", "full": "[]", "semi": "()", "decoded": "  "}


def draw(step: Step, tokenizer, k: int, colour: bool) -> str:
    """One line of text for the first row of a step: its open blocks, each marked by its state."""
    P, blocks = step.prompt_len[0], []
    n_open = step.n_open[0] if step.n_open is not None else -(-(step.tokens.shape[1] - P) // k)
    for i in range(n_open):
        text = tokenizer.decode(step.tokens[0, P + i * k : P + (i + 1) * k], mask="\u00b7", eos="$")
        state = "decoded"
        if step.full is not None:
            state = "cached" if P + (i + 1) * k <= step.n_final[0] else "full" if step.full[0, i] else "semi"
        left, right = BRACKETS[state]
        text = left + text + right
        blocks.append(COLOURS[state] + text + "\033[0m" if colour else text)
    return "".join(blocks)


def demo_decode(args, config: dict, model, prompt, watch):
    """Call the decoder that --method names, with the settings of the command line."""
    A, k = config["max_new_tokens"], args.block_size
    if args.method == "pipelined":
        return pipelined_decode(model, prompt, A, k, args.tau_add, args.tau_act, args.tau_conf, watch=watch)
    if args.method == "ar":
        return autoregressive_decode(model, prompt, A, watch=watch)
    if args.method == "vanilla":
        return vanilla_decode(model, prompt, A, watch=watch)
    return cached_decode(model, prompt, A, k, args.cache, args.tau_conf, watch=watch)


def parse_args(argv=None):
    p = argparse.ArgumentParser(
        description="Watch a tiny D2F student add two numbers. Train it first: python train_tiny.py",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    p.add_argument("a", type=int, help="first number")
    p.add_argument("b", type=int, help="second number")
    p.add_argument(
        "--method", choices=METHODS, default="pipelined", help="decoder; each uses the model made for it"
    )
    p.add_argument("--out", default="out/addition", help="folder of trained models, from train_tiny.py")
    p.add_argument("--block-size", type=int, help="k, positions per block (default: as in training)")
    p.add_argument(
        "--tau-add", type=float, default=0.1, help="open a block when the last is decoded to this share"
    )
    p.add_argument(
        "--tau-act", type=float, default=0.95, help="fully activate when the previous block is this decoded"
    )
    p.add_argument("--tau-conf", type=float, default=0.9, help="accept a token above this probability")
    p.add_argument(
        "--cache", choices=("none", "prefix", "dual"), default="prefix", help="for --method cached"
    )
    p.add_argument(
        "--trace", action="store_true", help="print numbers instead of the picture, one line a forward"
    )
    return p.parse_args(argv)


def main(argv=None):
    args = parse_args(argv)
    folder = f"{args.out}/{METHODS[args.method]}"
    try:
        config = read_config(folder)
        model = load_checkpoint(folder)
        prompt = addition_prompt(args.a, args.b, config["digits"])
        args.block_size = args.block_size or config["block_size"]
        tokenizer = CharTokenizer(config["alphabet"])
        print(f"{prompt}  ({args.method}, {model.n_parameters():,} parameters)")
        forwards = itertools.count(1)

        def watch(step):
            ran = f"positions {step.start[0]:3d} to {step.stop[0]:3d}"
            if args.trace:
                commits = " ".join(f"{p}:{tokenizer.decode([t], eos='$')}" for _, p, t in step.commits)
                print(f"{next(forwards):3d}  {ran}  cached {step.n_final[0]:3d}  commits {commits}")
            else:
                picture = draw(step, tokenizer, args.block_size, sys.stdout.isatty())
                print(f"{next(forwards):3d}  {ran} {picture}")

        started = time.perf_counter()
        out = demo_decode(args, config, model, tokenizer.encode(prompt), watch)
    except FileNotFoundError as e:
        sys.exit(f"{e}; make it with: python train_tiny.py")
    except ValueError as e:
        sys.exit(str(e))
    seconds, n = time.perf_counter() - started, len(out.answers[0])
    if args.method == "pipelined" and not args.trace:
        print("\n  cached   [fully activated]   (semi-activated)   \u00b7 masked   $ end of sequence")
    total = read_sum(tokenizer.decode(out.answers[0]))
    print(f"{args.a} + {args.b} = {total}  ({'right' if total == args.a + args.b else 'wrong'})")
    per = n / out.forwards
    print(f"{n} answer tokens, {out.forwards} forwards, {per:.1f} tokens a forward, {seconds:.3f} s")


if __name__ == "__main__":
    main()
