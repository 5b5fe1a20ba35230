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

from tiny_models import (
    CharTokenizer,
    Transformer,
    add_checkpoint_arguments,
    addition_prompt,
    answer_prompt,
    check_prompts,
    command_line,
    cut,
    evaluate,
    fill_in,
    load_checkpoint,
    open_checkpoint,
    read_config,
    read_sum,
    to_host,
)

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

    def __init__(self, config, device, sampling: Sampling, batch: int):
        self.s, bias = sampling, np.zeros(config.vocab_size, np.float32)
        bias[[*sampling.forbidden]] = bias[config.n_tokens :] = -np.inf
        for i in {config.mask_id, config.pad_id} - {-1, config.eos_id}:
            bias[i] = -np.inf
        self.bias = torch.from_numpy(bias).to(device)
        self.usual = (sampling.temperature, sampling.confidence, sampling.deferred) == (0, "probability", ())
        self.generators = []
        if sampling.temperature > 0 or sampling.confidence == "random":
            self.generators = [torch.Generator(device).manual_seed(sampling.seed + b) for b in range(batch)]

    def __call__(self, logits, rows):
        """logits [M, V]; rows: int array [M], ascending, the row of the batch that each belongs to.

        Returns host arrays [M]: token, its probability (among all ids, chosen or forbidden), its confidence.
        """
        logits = logits.float()
        if self.usual:
            token, probability = best(logits.softmax(-1) + self.bias)
            return token, probability, probability
        if self.s.temperature > 0:
            logits = keep_top(logits / self.s.temperature, self.s.top_p, self.s.top_k)
        p = logits.softmax(-1)
        token = self.sample(p, rows) if self.s.temperature > 0 else (p + self.bias).argmax(-1)
        if self.s.deferred:
            deferred = torch.tensor(self.s.deferred, device=p.device)
            p = logits.index_fill(1, deferred, float("-inf")).softmax(-1)
        probability = p.gather(1, token[:, None])[:, 0]
        if self.s.confidence == "probability":
            return to_host(token, probability, probability)
        return to_host(token, probability, self.confidence(p, rows))

    def confidence(self, p, rows):
        """What ranks the positions, [M], when it is not the probability, from distributions p [M, V]."""
        if self.s.confidence == "margin":
            top = (p + self.bias).topk(2).values
            return top[:, 0] - top[:, 1]
        if self.s.confidence == "entropy":
            return (p * (p + 1e-10).log()).sum(-1)
        return self.draws(rows, lambda n, g: torch.rand(n, generator=g, device=g.device))

    def sample(self, p, rows):
        """One draw from each distribution of p [M, V], forbidden ids left out: the argmax of p / Exp(1)."""
        low = p.device.type == "mps"  # which has no float64; in low precision the noise favours the top
        p = (p + self.bias).clamp(min=0).to(torch.float32 if low else torch.float64)
        shape = p.shape[1:]
        noise = self.draws(rows, lambda n, g: p.new_empty((n, *shape)).exponential_(generator=g))
        return (p / noise + self.bias).argmax(-1)

    def draws(self, rows, draw):
        """draw(n, generator) for the n positions of each row, from its own generator: [M, ...]."""
        counts = np.bincount(rows, minlength=len(self.generators))
        return torch.cat([draw(int(n), g) for n, g in zip(counts, self.generators, strict=True)])


def best(p):
    """Index and value of the largest of each row of p [M, V], on the host. On a CPU numpy finds it sooner."""
    if p.is_cpu:
        p = p.numpy()
        index = p.argmax(-1)
        return index, p.take(index + np.arange(0, p.size, p.shape[1]))
    value, index = p.max(-1)
    return to_host(index, value)


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
LOGITS = 1 << 27  # logits that are held at a time


def see_before(at, prompt_len, end):
    """Causal attention: each position sees up to itself."""
    return at + 1


def see_all(at, prompt_len, end):
    """Bidirectional attention: each position sees its whole row."""
    return np.zeros_like(at) + end


def see_blocks(k: int):
    """Block-causal attention: each position sees up to the end of its block."""
    return lambda at, prompt_len, end: np.minimum(block_end(at, prompt_len, k), end)


class Book:
    """The host's side of a decode: the token buffer, lengths, and the network's calls. Done rows leave it.

    tokens int64 [B, L]: the prompt, then masks, then -1 beyond the answer. see [B, L]: the first position out
    of each position's sight. prompt_len, n_cached (positions in the cache) [B]. rows [B]: the index of each
    row in the caller's list. Answer coordinates count from the end of the prompt; there are width of them.
    """

    def __init__(self, model, prompts, max_new_tokens, see, sampling, watch, cached=True, width=None):
        self.model, self.config, self.watch, self.A = model, model.config, watch, max_new_tokens
        if self.config.mask_id < 0 and see is not see_before:
            raise ValueError("this model has no mask token, so it can only decode autoregressively")
        self.device, self.on_host = model.device, model.device.type == "cpu"
        prompts = check_prompts(prompts, max_new_tokens, self.config)
        if self.config.shift:  # nothing predicts a first token: an empty prompt becomes EOS, as Dream begins
            prompts = [p if len(p) else np.array([self.config.eos_id]) for p in prompts]
        B, self.width = len(prompts), width or max_new_tokens
        self.prompt_len = np.array([len(p) for p in prompts])
        self.tokens = np.full((B, self.prompt_len.max() + self.width), -1)
        for row, prompt in zip(self.tokens, prompts, strict=True):
            row[: len(prompt)] = prompt
            row[len(prompt) : len(prompt) + max_new_tokens] = model.config.mask_id
        at = np.zeros_like(self.tokens) + np.arange(self.tokens.shape[1])
        self.see = see(at, self.prompt_len[:, None], self.end[:, None])
        self.cache = model.new_cache(B, int(self.end.max())) if cached else None
        self.choose = Chooser(model.config, self.device, sampling or Sampling(), B)
        self.out = Decoded([[]] * B, [None] * B, np.zeros(B, np.int64))
        self.out.cache_bytes = self.cache.nbytes if cached else 0
        self.n_cached, self.rows = np.zeros(B, np.int64), np.arange(B)
        self.events = np.array([self.config.mask_id, self.config.eos_id])[:, None, None]
        self.index()

    def index(self):
        """What follows from which rows are left: where their answers lie in memory, [B, width], and whether
        they are alike, so that one mask serves them all.
        """
        self.origin = np.arange(0, self.tokens.size, self.tokens.shape[1])[:, None]
        self.answer_at = self.origin + self.prompt_len[:, None] + np.arange(self.width)
        self.batch, self.masks = np.arange(len(self.tokens)), None
        self.offset = self.prompt_len - self.config.shift - self.width * self.batch
        self.alike = len(set(self.prompt_len.tolist())) == 1
        self.hit = np.ones((2, len(self.tokens), self.width + 1), bool)  # `look`: the last column stays

    @property
    def end(self):
        """[B] the position after each row's answer."""
        return self.prompt_len + self.A

    def to_device(self, array):
        """A tensor of a host array: its own memory where that is the device's."""
        tensor = torch.from_numpy(array)
        return tensor if self.on_host else tensor.to(self.device)

    def look(self):
        """The answers as they stand: masked, bool [B, width] (until the next look), and where the first mask
        and the first EOS are, int [B] each, width where there is none.
        """
        np.equal(self.tokens.take(self.answer_at), self.events, out=self.hit[:, :, :-1])
        return self.hit[0, :, :-1], *self.hit.argmax(-1)

    def forward(self, start, stop, where, cfg_scale: float = 0.0):
        """Run the network over positions [start, stop) of each row, int [B].

        where: int [M], ascending, places in the answers laid end to end, [B * width]. Returns the predictions
        there: token, probability, confidence, each [M]. cfg_scale: see `vanilla_decode`.
        """
        self.start, self.stop, rows = start, stop, where // self.width
        window = self.window(self.tokens, start, stop)
        # token P + i is predicted by output P + i - shift: from its place among B x width to that among B x T
        offset = self.offset - start + window[0].shape[1] * self.batch
        at = self.to_device(where + offset.take(rows))
        hidden = self.run(*window)
        if cfg_scale > 0:  # logits = u + (cfg + 1)(c - u), u without the prompt; the head is linear
            in_prompt = np.arange(self.tokens.shape[1]) < self.prompt_len[:, None]
            unseen = np.where(in_prompt, self.config.mask_id, self.tokens)
            hidden = torch.lerp(self.run(*self.window(unseen, start, stop)), hidden, cfg_scale + 1)
        return self.read(hidden.flatten(0, 1), at, rows)

    def window(self, tokens, start, stop):
        """Tokens [B, T], positions and mask of the window [start, stop) of each row."""
        a, b = int(start[0]), int(stop[0])
        if self.alike and (len(start) == 1 or bool((start == a).all() and (stop == b).all())):
            return tokens[:, a:b], a, self.mask(a, b)
        at = start[:, None] + np.arange((stop - start).max())
        flat = self.origin + np.minimum(at, stop[:, None] - 1)
        see = self.to_device(self.see.take(flat))
        mask = torch.arange(int(see[:, -1].max()), device=self.device) < see[:, None, :, None]
        # what pads a short row is written to the cache's scrap position
        return tokens.take(flat), np.where(at < stop[:, None], at, tokens.shape[1]), mask

    def run(self, tokens, at, mask):
        """Hidden states [B, T, d] of a window."""
        self.out.forwards += 1
        self.out.positions += tokens.size
        return self.model.hidden(self.to_device(tokens), at, mask, self.cache)

    def mask(self, a: int, b: int):
        """bool [b - a, keys], True = may attend, of positions [a, b) of rows that are alike. All positions'
        masks are made once. None where each position sees [0, b) and nothing else.
        """
        # sight never shrinks from left to right, so its extremes are those of the window's ends
        least, n_keys = self.see.item(a), self.see.item(b - 1)
        if least == n_keys == b and not (self.config.causal and b - a > 1):
            return None
        if self.masks is None:
            self.masks = np.arange(self.see.shape[1]) < self.see[0][:, None]
        return self.to_device(self.masks[a:b, :n_keys])

    def read(self, hidden, at, rows):
        """What `Chooser` makes of the outputs at (int [M]) for rows [M], so many at a time as fit."""
        if len(at) > (most := max(1, LOGITS // self.config.vocab_size)):
            parts = [self.read(hidden, at[i : i + most], rows[i : i + most]) for i in range(0, len(at), most)]
            return map(np.concatenate, zip(*parts, strict=True))
        return self.choose(self.model.head(hidden.index_select(0, at)), rows)  # of logits (M, V)

    def commit(self, where, token, n_final=None, full=None, n_open=None):
        """Write token [M] at where [M], as in `forward`. The cache commits by moving a number."""
        self.tokens.put(self.answer_at.take(where), token)
        before, n_final = self.n_cached, self.n_cached if n_final is None else n_final
        if self.cache:
            self.n_cached = n_final
        if self.watch:
            rows, i = np.divmod(where, self.width)
            commits = np.stack((rows, self.prompt_len[rows] + i, token), 1)
            live = self.rows, self.tokens, self.prompt_len, self.start, self.stop
            if full is not None:
                full = full & (np.arange(full.shape[1]) < n_open[:, None])
            self.watch(Step(*live, before, n_final, commits, full, n_open))

    def finish(self, done, state=None):
        """Take the rows where done [B] out of the batch; returns the rest of the decoder's own state [B]."""
        if not np.count_nonzero(done):
            return state
        for b in np.flatnonzero(done):
            answer = self.tokens[b, self.prompt_len[b] : self.prompt_len[b] + self.A]
            self.out.raw[self.rows[b]] = answer.copy()
            self.out.answers[self.rows[b]] = cut(answer, self.config.eos_id)
            self.out.row_forwards[self.rows[b]] = self.out.forwards
        keep = np.flatnonzero(~done)
        self.tokens, self.prompt_len, self.see = self.tokens[keep], self.prompt_len[keep], self.see[keep]
        self.n_cached, self.rows = self.n_cached[keep], self.rows[keep]
        if self.choose.generators:
            self.choose.generators = [self.choose.generators[b] for b in keep]
        if self.cache is not None and len(keep):
            self.cache.keep(keep)
        self.index()
        return None if state is None else state[keep]


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


def accept(probability, confidence, tau_conf: float, block, must):
    """Which predictions to commit: bool [M], of those with these probabilities and confidences [M].

    Those of probability > tau_conf; in a block that must (bool [blocks]) and has none, the single one of
    highest confidence. block: int [M], ascending, the block of each.
    """
    chosen = probability > tau_conf
    lacking = must.flatten()  # a copy
    lacking[block[chosen]] = False
    at = lacking[block].nonzero()[0]
    if len(at):
        block, confidence = block[at], confidence[at]
        best, leftmost = np.empty(lacking.shape, confidence.dtype), np.empty(lacking.shape, int)
        best[block] = confidence  # any of the block's, to begin with
        np.maximum.at(best, block, confidence)
        near = (confidence >= best[block] - NOISE).nonzero()[0][::-1]
        leftmost[block[near]] = at[near]  # from right to left: what is written last stays
        chosen[leftmost[block]] = True
    return chosen


def masks_left(size, *taus: float):
    """The most masks that the prompt and blocks of `size` positions (int [N]) may have left at a decoded
    fraction >= tau: int [taus, 1, N + 1].
    """
    m, few = np.arange(size.max() + 1), np.zeros((len(taus), 1, len(size) + 1), np.int64)
    decoded = (size[:, None] - m) / size[:, None]  # in double precision
    few[:, 0, 1:] = [(decoded >= tau).sum(1) - 1 for tau in taus]
    return few


# ----------------------------------------------------------------------------- the decoders it is compared to


@torch.inference_mode()
def autoregressive_decode(model, prompts, max_new_tokens: int, sampling=None, watch=None) -> Decoded:
    """One token a forward, left to right, with a KV cache. model must be causal and shifted."""
    if not (model.config.causal and model.config.shift):
        raise ValueError(
            "autoregressive decoding needs a model that is causal and predicts the next token (shift)"
        )
    book = Book(model, prompts, max_new_tokens, see_before, sampling, watch)
    n = np.zeros(len(book.rows), np.int64)  # answer tokens of each row
    while len(book.rows):
        length = book.prompt_len + n
        here = book.batch * book.A + n
        token, _, _ = book.forward(book.n_cached, length, here)
        book.commit(here, token, n_final=length)
        n = n + 1
        n = book.finish((token == model.config.eos_id) | (n == book.A), n)
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
    book = Book(model, prompts, max_new_tokens, see_all, sampling, watch, cached=False)
    k = max_new_tokens if block_length is None else block_length
    check_thresholds(k)
    for lo, hi, count, share in transfer_plan(order, max_new_tokens, k, steps or max_new_tokens):
        masked, _, _ = book.look()
        masked[:, :lo], masked[:, hi:] = False, False
        where = masked.ravel().nonzero()[0]
        token, _, confidence = book.forward(np.zeros_like(book.end), book.end, where, cfg_scale)
        if order == "origin":
            chosen = confidence < share
        else:
            n = masked.sum(1) if count is None else count
            n = np.floor(n.astype(np.float32) * share) if count is None else count  # in float32, as released
            score = np.full(masked.shape, -np.inf)
            score.put(where, confidence)
            chosen = (ranks(score) < np.reshape(n, (-1, 1))).take(where)
        book.commit(where[chosen], token[chosen])
    book.finish(np.ones(len(book.rows), bool))
    return book.out


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
    book = Book(model, prompts, max_new_tokens, see_all, sampling, watch, cached=cache != "none")
    previous = np.full(len(book.rows), -1)  # the block that each row's last forward worked on
    while len(book.rows):
        masked, first_mask, _ = book.look()
        block = first_mask // k  # the first that is not done
        whole = (block != previous) | (cache == "none")
        low = book.prompt_len + block * k
        high = np.minimum(low + k, book.end)
        start = np.where(whole, 0, np.maximum(low - model.config.shift, 0))
        stop = np.where(whole | (cache == "prefix"), book.end, high)
        where = (masked & (np.arange(book.A) // k == block[:, None])).ravel().nonzero()[0]
        token, probability, confidence = book.forward(start, stop, where)
        chosen = accept(probability, confidence, tau_conf, where // book.A, np.ones(len(block), bool))
        book.commit(where[chosen], token[chosen])
        _, first_mask, first_eos = book.look()
        previous = book.finish(first_mask >= first_eos, block)  # both A where there is neither
    return book.out


def first(hit):
    """Index of the first True in each row of hit [..., n], or n: [...]."""
    return np.where(hit.any(-1), hit.argmax(-1), hit.shape[-1])


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
    """Algorithm 2: blocks are decoded in a pipeline, each opened while those before it are still in work.

    A semi-activated block commits only what is above tau_conf; a fully activated one at least its best in
    each forward. tau_add 1: one block at a time ("cache only", Tables 5, 7). tau_add = tau_act: single state
    (Table 3). stop_at_eos False decodes on behind an EOS, as released; the text is the same. use_cache False
    re-runs the whole sequence in each forward; the output is the same.
    """
    check_thresholds(block_size, tau_add=tau_add, tau_act=tau_act, tau_conf=tau_conf)
    k, A, N, c = block_size, max_new_tokens, -(-max_new_tokens // block_size), model.config
    book = Book(model, prompts, A, see_blocks(k), sampling, watch, use_cache, N * k)
    size = np.minimum(k, A - k * np.arange(N))  # positions of each block: the last may be short
    few = masks_left(size, tau_add, tau_act)
    few[0, 0, N] = -1  # there is nothing to open behind the last block
    n_open, column = np.zeros(len(book.rows), np.int64), np.arange(N * k)
    while len(book.rows):
        B, (masked, first_mask, first_eos) = len(book.rows), book.look()
        left = np.zeros((B, N + 1), np.int64)  # masks of the prompt and of each block
        np.add.reduce(masked.reshape(B, N, k), -1, out=left[:, 1:])

        # lines 3-5: open a block when the last open one is decoded to tau_add, unless an EOS is committed
        decoded_to_add, decoded_to_act = left <= few
        may_open = decoded_to_add[book.batch, n_open]
        if stop_at_eos:  # a block behind one that holds EOS changes nothing that is kept
            opened = np.minimum(n_open + may_open, first_eos // k + 1)
        else:
            opened = n_open + (may_open & (first_eos == N * k))
        done = first_mask >= (first_eos if stop_at_eos else opened * k)
        if any(done.tolist()):
            n_open = book.finish(done, n_open)
            continue
        n_open = opened

        # lines 6-8: a block is fully activated when the one before is decoded to tau_act (and stays so)
        full = decoded_to_act[:, :-1]

        # line 9: one forward over what is not cached; blocks complete before it are final after it
        stop = np.minimum(n_open * k, A)
        where = (masked & (column < stop[:, None])).ravel().nonzero()[0]
        block, n_final = where // k, book.prompt_len + first_mask // k * k
        start = np.maximum(book.n_cached - c.shift, 0)  # output i - 1 predicts token i
        token, probability, confidence = book.forward(start, book.prompt_len + stop, where)

        # lines 10-16: commit what is above tau_conf; a fully activated block at least its best
        chosen = accept(probability, confidence, tau_conf, block, full)
        book.commit(where[chosen], token[chosen], n_final, full, n_open)
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


def spell(ids, tokenizer, config) -> str:
    """One line of text of token ids, masks as dots, the end of a sequence as a dollar."""
    special = {-1: "", config.mask_id: "\u00b7", config.eos_id: "$"}  # -1: behind the answer
    text = "".join(special[i] if i in special else tokenizer.decode([i]) for i in map(int, ids))
    return text.replace("\n", "\u21b5")


def draw(step: Step, tokenizer, config, k: int, colour: bool) -> str:
    """One line of text for the first row of a step: its open blocks, each marked by its state."""
    P, blocks = step.prompt_len[0], []
    n_open = step.n_open[0] if step.n_open is not None else -(-(step.tokens.shape[1] - P) // k)
    for i in range(n_open):
        text = spell(step.tokens[0, P + i * k : P + (i + 1) * k], tokenizer, config)
        state = "decoded"
        if step.full is not None:
            state = "cached" if P + (i + 1) * k <= step.n_final[0] else "full" if step.full[0, i] else "semi"
        left, right = BRACKETS[state]
        text = left + text + right
        blocks.append(COLOURS[state] + text + "\033[0m" if colour else text)
    return "".join(blocks)


PRESETS = {  # Table 8: (family, benchmark) -> settings; tau_act .95 and tau_conf .9 where nothing is said
    ("LLaDA", "gsm8k"): dict(max_new_tokens=512, block_size=64, tau_add=0.7),
    ("LLaDA", "mbpp"): dict(max_new_tokens=512, block_size=32, tau_add=0.9),
    ("LLaDA", "humaneval"): dict(max_new_tokens=512, block_size=32, tau_add=0.1),
    ("LLaDA", "math"): dict(max_new_tokens=512, block_size=32, tau_add=0.1),
    ("Dream", "gsm8k"): dict(max_new_tokens=256, block_size=32, tau_add=0.1),
    ("Dream", "mbpp"): dict(max_new_tokens=256, block_size=48, tau_add=0.1),
    ("Dream", "humaneval"): dict(max_new_tokens=256, block_size=32, tau_add=0.9, tau_conf=0.95),
    ("Dream", "math"): dict(max_new_tokens=256, block_size=64, tau_add=0.1),
}
DEFAULTS = dict(max_new_tokens=256, block_size=32, tau_add=0.1, tau_act=0.95, tau_conf=0.9)


def settle_options(args, shift: bool, **defaults):
    """What the command line leaves open comes from the preset, then from the defaults."""
    preset = PRESETS[("Dream" if shift else "LLaDA", args.preset)] if args.preset else {}
    fill_in(args, **(DEFAULTS | defaults | preset))


def decode(args, model, prompts, watch=None) -> Decoded:
    """Call the decoder that --method names, with the settings of the command line."""
    A, k = args.max_new_tokens, args.block_size
    sampling = Sampling(args.temperature, args.top_p, seed=args.seed)
    if args.method == "pipelined":
        thresholds = args.tau_add, args.tau_act, args.tau_conf
        return pipelined_decode(model, prompts, A, k, *thresholds, sampling, watch)
    if args.method == "ar":
        return autoregressive_decode(model, prompts, A, sampling, watch)
    if args.method == "vanilla":
        order = dict(order="entropy") if model.config.shift else dict(block_length=k)
        return vanilla_decode(model, prompts, A, steps=args.steps, sampling=sampling, watch=watch, **order)
    return cached_decode(model, prompts, A, k, args.cache, args.tau_conf, sampling, watch)


def parse_args(argv=None):
    p = argparse.ArgumentParser(
        description="Watch a tiny D2F student add two numbers (train it first: python train_tiny.py), or "
        "answer a prompt with a full LLaDA, Dream, Qwen2 or Llama checkpoint."
    )
    p.add_argument("numbers", type=int, nargs="*", help="two numbers for the tiny student to add")
    p.add_argument("--out", default="out/addition-23", help="folder of trained tiny models")
    p.add_argument(
        "--block-size", type=int, help="k, positions per block (default: 32, tiny: as in training)"
    )
    p.add_argument("--tau-add", type=float, help="open a block when the last is decoded to this share (0.1)")
    p.add_argument("--tau-act", type=float, help="fully activate when the one before is this decoded (0.95)")
    p.add_argument("--tau-conf", type=float, help="accept a token above this probability (0.9)")
    p.add_argument(
        "--cache", choices=("none", "prefix", "dual"), default="prefix", help="for --method cached"
    )
    p.add_argument("--steps", type=int, help="for --method vanilla (default: one a token)")
    p.add_argument("--trace", action="store_true", help="numbers instead of the picture, one line a forward")
    p.add_argument("--preset", choices=sorted({name for _, name in PRESETS}), help="settings of Table 8")
    p.add_argument("--lora", help="PEFT folder, or its name on the hub, to merge")
    p.add_argument("--any-base", action="store_true", help="merge it although it names another base")
    add_checkpoint_arguments(p, METHODS)
    return p.parse_args(argv)


def watcher(args, tokenizer, config):
    """A `watch` that prints each step: a picture of the blocks, or with --trace numbers."""
    forwards = itertools.count(1)

    def watch(step):
        ran = f"{next(forwards):3d}  positions {step.start[0]:3d} to {step.stop[0]:3d} "
        if args.trace:
            commits = " ".join(f"{p}:{spell([t], tokenizer, config)}" for _, p, t in step.commits)
            print(f"{ran} cached {step.n_final[0]:3d}  commits {commits}")
        else:
            print(ran + draw(step, tokenizer, config, args.block_size, sys.stdout.isatty()))

    return watch


def add_numbers(args):
    """The demo: a tiny model adds two numbers, step by step."""
    folder = f"{args.out}/{METHODS[args.method]}"
    config, model = read_config(folder), load_checkpoint(folder)
    tokenizer = CharTokenizer(config["alphabet"])
    settle_options(
        args, True, block_size=config["recipe"]["block_size"], max_new_tokens=config["max_new_tokens"]
    )
    a, b = args.numbers
    prompt = addition_prompt(a, b, config["digits"])
    print(f"{prompt}  ({args.method}, {model.n_parameters():,} parameters)")
    started = time.perf_counter()
    out = decode(args, model, tokenizer.encode(prompt), watcher(args, tokenizer, model.config))
    seconds, n = time.perf_counter() - started, len(out.answers[0])
    if args.method == "pipelined" and not args.trace:
        print("\n  cached   [fully activated]   (semi-activated)   \u00b7 masked   $ end of sequence")
    total = read_sum(tokenizer.decode(out.answers[0]))
    print(f"{a} + {b} = {total}  ({'right' if total == a + b else 'wrong'})")
    per = n / out.forwards
    print(f"{n} answer tokens, {out.forwards} forwards, {per:.1f} tokens a forward, {seconds:.3f} s")


def run_checkpoint(args):
    """Answer --prompt, or the problems of --eval, with a full checkpoint."""
    model, tokenizer = open_checkpoint(args, Transformer, lora=args.lora, any_base=args.any_base)
    settle_options(args, model.config.shift)
    names = "checkpoint lora dtype method chat temperature top_p seed cache steps few_shot shots".split()
    settings = {name: getattr(args, name) for name in [*names, *DEFAULTS]}

    def answer(ids, watch=None):
        out = decode(args, model, ids, watch)
        return out.answers[0], {"forwards": out.forwards}

    if args.eval:
        print(evaluate(args, model.config, tokenizer, answer, settings))
        return

    def final(step):
        row = step.tokens[0, step.prompt_len[0] :][: args.max_new_tokens]
        return row[: first(row == model.config.mask_id)]

    show = watcher(args, tokenizer, model.config) if args.watch or args.trace else None
    answer_prompt(args, tokenizer, answer, final, show)


def main(argv=None):
    args = parse_args(argv)
    tiny = add_numbers if len(args.numbers) == 2 else None
    command_line(args, run_checkpoint, tiny, "two numbers to add", "python train_tiny.py")


if __name__ == "__main__":
    main()
