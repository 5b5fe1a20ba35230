"""The main job: train tiny models and print the tables that show the papers' claims. `python train_tiny.py`

In order: the tasks, the training loop, the phases of D2F (autoregressive model, bidirectional teacher made
from it, block-causal student distilled from that), evaluation, D2F's tables, then the recurrent-depth model
and its table. A finished phase is a checkpoint folder under --out; a second run reuses it (--retrain to
redo), so an interrupt loses at most the phase that was running.
"""

import argparse
import functools
import itertools
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

import d2f
import recurrent_sampler
from tiny_models import (
    CharTokenizer,
    RecurrentConfig,
    RecurrentDepth,
    Static,
    Transformer,
    TransformerConfig,
    check_seed,
    cut,
    in_groups,
    load_checkpoint,
    markdown,
    read_config,
    save_checkpoint,
)

# ------------------------------------------------------------------------------------------------------ tasks

SPLITS = ("test", "validation")  # the rest is for training


def split_of(problems) -> np.ndarray:
    """0 (test), 1 (validation) or more (training) for each problem [n, m] of digits: decided by its content.

    So no held-out problem ever appears in training, whatever the seeds.
    """
    return (problems * (1 + 2 * np.arange(problems.shape[1]))).sum(1) % 16


@dataclass(frozen=True)
class Addition:
    """a + b with written carries, least significant digit first: 'a+b;' a digit pair -> '=cd;' (carry,
    digit).

    An answer stands at a constant distance from its question. Most carries are decided by their own pair;
    where a_i + b_i = 9 (forced with probability `carry`) the carry travels on. Easy tokens can go in
    parallel, hard ones cannot.
    """

    digits: int = 23
    carry: float = 0.25
    name = "addition"

    def problems(self, rng, n: int, training: bool) -> np.ndarray:
        """Digits of a and b, int64 [n, 2 * digits]. One training problem in eight has shorter numbers."""
        a, b = rng.integers(0, 10, (2, n, self.digits))
        b = np.where(rng.random((n, self.digits)) < self.carry, 9 - a, b)
        length = np.where(
            training & (rng.random(n) < 1 / 8), rng.integers(1, self.digits + 1, n), self.digits
        )
        inside = np.arange(self.digits) < length[:, None]
        return np.concatenate((a * inside, b * inside), 1)

    def write(self, problems, tokenizer) -> tuple[np.ndarray, np.ndarray]:
        """Problems -> prompts int64 [n, 4 * digits], answers int64 [n, 4 * digits] (without EOS)."""
        a, b = problems[:, : self.digits], problems[:, self.digits :]
        carry, out = np.zeros(len(a), np.int64), []
        for i in range(self.digits):
            total = a[:, i] + b[:, i] + carry
            carry = total // 10
            out.append((carry, total % 10))
        carries, digits = np.array(out).transpose(1, 2, 0)
        return fields(tokenizer, a, "+", b, ";"), fields(tokenizer, "=", carries, digits, ";")


@dataclass(frozen=True)
class Ledger:
    """A running balance mod 100 after each gain or loss: '+37;' an entry -> '=45;'. Every answer needs the
    one before.
    """

    digits: int = 23  # entries
    carry: float = 0.0
    name = "ledger"

    def problems(self, rng, n: int, training: bool) -> np.ndarray:
        """Sign (0 gain, 1 loss), tens and ones of each entry, int64 [n, 3 * entries]."""
        sign = rng.integers(0, 2, (n, self.digits))
        return np.concatenate((sign, *rng.integers(0, 10, (2, n, self.digits))), 1)

    def write(self, problems, tokenizer) -> tuple[np.ndarray, np.ndarray]:
        """Problems -> prompts int64 [n, 4 * entries], answers int64 [n, 4 * entries] (without EOS)."""
        sign, tens, ones = np.split(problems, 3, axis=1)
        balance = np.cumsum((1 - 2 * sign) * (10 * tens + ones), 1) % 100
        signs = tokenizer.encode("+-")[sign]
        return fields(tokenizer, signs, tens, ones, ";"), fields(
            tokenizer, "=", balance // 10, balance % 10, ";"
        )


TASKS = {"addition": Addition, "ledger": Ledger}


@dataclass(frozen=True)
class Counter:
    """Run a program on a counter of 0 to 5, and give its values last first: 3+++-~= is 145543.

    A digit sets the counter, + adds one and - takes one, but not beyond the ends, ~ turns it over (5 minus
    it). A value depends on the program back to the digit before it, one instruction after another, so it
    takes depth; and little on the answer so far, so several values can be thought about at once.
    """

    digits: int = 32  # instructions
    carry: float = 0.25  # probability that an instruction is a digit
    name = "counter"
    alphabet = "012345+-~="

    def problems(self, rng, n: int, training: bool) -> np.ndarray:
        """Instructions as token ids, int64 [n, digits]. The first one is a digit."""
        digit, change = rng.integers(0, 6, (n, self.digits)), rng.integers(6, 9, (n, self.digits))
        is_digit = (rng.random((n, self.digits)) < self.carry) | (np.arange(self.digits) == 0)
        return np.where(is_digit, digit, change)

    def write(self, problems, tokenizer) -> tuple[np.ndarray, np.ndarray]:
        """Problems -> prompts int64 [n, digits + 1], answers int64 [n, digits] (without EOS)."""
        value, values = problems[:, 0], []
        for x in problems.T:
            up, down, over = np.minimum(value + 1, 5), np.maximum(value - 1, 0), 5 - value
            value = np.where(x < 6, x, np.choose(x.clip(6) - 6, (up, down, over)))
            values.append(value)
        equals = np.full((len(problems), 1), tokenizer.encode("=")[0])
        return np.concatenate((problems, equals), 1), np.stack(values[::-1], 1)


def fields(tokenizer, *parts) -> np.ndarray:
    """Interleave id arrays [n, m] and single characters to tokens [n, m * len(parts)]. A digit's id is its
    value.
    """
    shape = next(p.shape for p in parts if not isinstance(p, str))
    columns = [np.full(shape, tokenizer.encode(p)[0]) if isinstance(p, str) else p for p in parts]
    return np.stack(columns, -1).reshape(shape[0], -1)


def sample(task, tokenizer, rng, n: int, split: str, answer_len: int, shots: int = 0):
    """n problems of a split: prompts int64 [n, P], answers int64 [n, answer_len], EOS from their end on.

    Each prompt begins with `shots` solved examples from the training split, as a few-shot prompt does.
    """
    found, wanted = [], n if split == "train" else 20 * n
    while sum(map(len, found)) < n:
        problems = task.problems(rng, wanted, training=split == "train")
        code = split_of(problems)
        found.append(problems[code >= 2 if split == "train" else code == SPLITS.index(split)])
    prompts, answers = task.write(np.concatenate(found)[:n], tokenizer)
    for _ in range(shots):
        question, solution = sample(task, tokenizer, rng, n, "train", answers.shape[1])
        prompts = np.concatenate((question, solution, prompts), 1)
    fill = np.full((n, answer_len - answers.shape[1]), tokenizer.eos_id)
    return prompts, np.concatenate((answers, fill), 1)


def batches(task, tokenizer, rng, batch: int, answer_len: int, device, shots: int = 0, steps: int = 0):
    """Endless training batches: tokens int64 [B, P + answer_len], prompt lengths int64 [B].

    In the second half of `steps` every other batch has examples in its prompts, 1 to `shots` of them, and as
    many fewer rows as it is longer: first the task, then what not to look at.
    """
    for step in itertools.count():
        s = int(rng.integers(1, shots + 1)) if shots and 2 * step >= steps and step % 2 else 0
        prompts, answers = sample(task, tokenizer, rng, batch // (1 + s), "train", answer_len, s)
        tokens = torch.from_numpy(np.concatenate((prompts, answers), 1)).to(device, non_blocking=True)
        yield tokens, torch.full((len(tokens),), prompts.shape[1], device=device)


# --------------------------------------------------------------------------------------------------- training


def fit(model, loss_of, data, steps: int, lr: float, name: str, probe: Callable[[], float], low=None):
    """AdamW with warm-up and cosine decay. loss_of(*batch) -> scalar; probe() -> accuracy for the bar.

    bfloat16 on a GPU, unless `low` says otherwise.
    """
    low = model.device.type == "cuda" if low is None else low
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    warm = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min((s + 1) / warm, 0.5 + 0.5 * math.cos(math.pi * s / steps))
    )
    bar = tqdm(range(1, steps + 1), name, mininterval=0.5)
    shown = {}
    model.train()
    for step in bar:
        with torch.autocast(model.device.type, torch.bfloat16, enabled=low):
            loss = loss_of(*next(data))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        schedule.step()
        if step % max(1, steps // 8) == 0:
            model.eval()
            shown["exact"] = f"{100 * probe():.0f}%"
            model.train()
        if step % 20 == 0:  # reading the loss is a synchronisation
            bar.set_postfix(loss=f"{loss.item():.4f}", **shown)
    return model.eval().requires_grad_(False)


def autoregressive_loss(model, tokens, prompt_len):
    """Next-token cross-entropy of the answers."""
    P = int(prompt_len[0])
    logits = model.head(model.hidden(tokens[:, :-1])[:, P - 1 :])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, P:].flatten())


def teacher_loss(model, tokens, prompt_len):
    """Masked-diffusion loss of the bidirectional teacher: a ratio t ~ U(0, 1) a row, stratified over the
    batch.
    """
    B, c = len(tokens), model.config
    t = (torch.arange(B, device=tokens.device) + torch.rand(B, device=tokens.device)) / B
    uniform = torch.rand(tokens.shape, device=tokens.device)
    noisy, masked, _ = d2f.corrupt(tokens, prompt_len, tokens.shape[1], t[:, None], c.mask_id, uniform)
    return d2f.masked_cross_entropy(d2f.align(model(noisy), c.shift), tokens, masked)


# ------------------------------------------------------------------------------------------ recipe and phases


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what a run of the D2F phases trains and measures."""

    task: Addition | Ledger
    block_size: int = 8
    steps: tuple[int, ...] = (1200, 1500, 1800)  # autoregressive, teacher, student
    lr: tuple[float, ...] = (3e-3, 2e-3, 1e-3)
    batch: int = 16
    d_model: int = 64
    n_layers: int = 3
    n_heads: int = 2
    rope_base: float = 100.0
    from_scratch: bool = False  # LLaDA's way: no shift, and the teacher starts from random weights
    shots: int = 2  # solved examples before a problem, at most
    seed: int = 0

    @property
    def answer_len(self) -> int:
        """Answer tokens up to the block boundary, at least one EOS among them."""
        return -(-(4 * self.task.digits + 1) // self.block_size) * self.block_size

    def config(self, tokenizer, causal: bool) -> TransformerConfig:
        return TransformerConfig(
            **tokenizer.ids,
            mask_id=tokenizer.mask_id,
            d_model=self.d_model,
            n_layers=self.n_layers,
            n_heads=self.n_heads,
            n_kv_heads=self.n_heads,
            d_mlp=5 * self.d_model // 2,
            rope_base=self.rope_base,
            causal=causal,
            shift=causal or not self.from_scratch,
        )


class Lab:
    """One recipe at work: its tokenizer, device and output folder, and its phases in order."""

    PHASES = ("autoregressive", "teacher", "student")

    def __init__(self, recipe: Recipe, out: str, device: str, retrain=False, threads: int | None = None):
        self.r, self.device, self.retrain, self.threads = recipe, device, retrain, threads
        if threads:
            torch.set_num_threads(threads)
        self.tokenizer = CharTokenizer()
        self.out = Path(out) / f"{recipe.task.name}-{recipe.task.digits}"

    def phase(self, name: str):
        """The model of a phase: from its checkpoint when that was made by this recipe, else trained and
        saved.
        """
        folder, recipe = self.out / name, asdict(self.r)
        recipe = {
            key: list(v) if isinstance(v, tuple) else v for key, v in recipe.items()
        }  # as JSON gives it back
        if not self.retrain and folder.exists():
            if read_config(folder).get("recipe") == recipe:
                print(f"{name}: reusing {folder}")
                return load_checkpoint(folder, self.device)
            print(f"{name}: {folder} was made by another recipe; training anew")
        torch.manual_seed(self.r.seed)
        started = time.perf_counter()
        model = getattr(self, name)()
        extra = dict(recipe=recipe, alphabet=self.tokenizer.alphabet, digits=self.r.task.digits)
        save_checkpoint(folder, model, **extra, max_new_tokens=self.r.answer_len)
        print(f"{name}: trained in {time.perf_counter() - started:.0f} s, saved in {folder}")
        return model

    def fit(self, model, loss_of, number: int, decode):
        """Train phase `number` with its own stream of problems; decode(prompts, A) is what its bar's accuracy
        tests.
        """
        r, data = self.r, self.data(number)
        prompts, answers = self.problems("validation", 32)

        def probe():
            return exact(decode(list(prompts), r.answer_len).answers, answers, self.tokenizer).mean()

        if self.threads is None and self.device == "cpu":
            batch = next(Lab.data(self, number))
            fastest_threads(lambda: loss_of(*batch).backward())
        return fit(model, loss_of, data, r.steps[number], r.lr[number], self.PHASES[number], probe)

    def data(self, number: int):
        """The batches of a phase, from its own stream of problems."""
        r, rng = self.r, np.random.default_rng((self.r.seed, number))
        return batches(
            r.task, self.tokenizer, rng, r.batch, r.answer_len, self.device, r.shots, r.steps[number]
        )

    def problems(self, split: str, n: int, shots: int = 0):
        rng = np.random.default_rng((self.r.seed, 100 + SPLITS.index(split)))
        return sample(self.r.task, self.tokenizer, rng, n, split, self.r.answer_len, shots)

    def fresh(self, causal: bool):
        return Transformer(self.r.config(self.tokenizer, causal)).init_weights().to(self.device)

    def autoregressive(self):
        model = self.fresh(causal=True)
        decode = functools.partial(d2f.autoregressive_decode, model)
        return self.fit(model, functools.partial(autoregressive_loss, model), 0, decode)

    def teacher(self):
        """Dream's way: start from the autoregressive weights and keep the shift. From scratch needs far more
        steps.
        """
        model = self.fresh(causal=False)
        if not self.r.from_scratch:
            model.load_state_dict(self.phase("autoregressive").state_dict())
        decode = functools.partial(d2f.cached_decode, model, cache="none", tau_conf=0.99)
        return self.fit(model, functools.partial(teacher_loss, model), 1, decode)

    def student(self):
        teacher, model, k = self.phase("teacher"), self.fresh(causal=False), self.r.block_size
        model.load_state_dict(teacher.state_dict())
        decode = functools.partial(d2f.pipelined_decode, model, block_size=k)
        return self.fit(model, lambda tokens, P: d2f.d2f_loss(model, teacher, tokens, P, k), 2, decode)


# ----------------------------------------------------------------------------------------------- measurements


def exact(answers, truth, tokenizer) -> np.ndarray:
    """bool [n]: is the whole answer right, up to and including its EOS. truth int64 [n, A]."""
    return np.array([a == cut(t, tokenizer.eos_id) for a, t in zip(answers, truth, strict=True)])


@dataclass
class Row:
    """One line of a table: a decoder with its settings, and what was measured of it."""

    name: str
    decode: Callable  # (prompts, max_new_tokens) -> Decoded
    cost: str = "row_forwards"  # what is counted of Decoded; of recurrent models "row_passes", core passes
    exact: float = 0.0
    tokens: float = 0.0  # answer tokens, mean
    forwards: float = 0.0  # mean cost per problem
    out: object = None  # what decode returned last
    speed: float = 0.0  # answer tokens a second at batch 1, median over problems
    throughput: float = 0.0  # answer tokens a second in batches of `group`

    def measure(self, prompts, answers, tokenizer, group: int = 16):
        """Accuracy, answer tokens, forwards and throughput over all problems, in batches of `group`."""
        answers_of = functools.partial(self.decode, max_new_tokens=answers.shape[1])
        found, tokens, forwards, started = [], [], [], time.perf_counter()
        for out in in_groups(answers_of, prompts, group, self.name):
            found += out.answers
            tokens += map(len, out.answers)
            forwards.extend(getattr(out, self.cost))
        right = exact(found, answers, tokenizer)
        self.throughput = sum(tokens) / (time.perf_counter() - started)
        self.exact, self.tokens, self.forwards = (float(np.mean(x)) for x in (right, tokens, forwards))
        return self


def time_rows(rows: list[Row], prompts, answer_len: int, device: str):
    """Answer tokens a second of every row, at batch 1: in turn on each problem, so that noise falls on all
    alike.
    """
    times = {id(row): [] for row in rows}
    for i, prompt in enumerate(tqdm([prompts[0], *prompts], "speed", mininterval=0.5)):
        for row in rows:
            started = time.perf_counter()
            row.out = row.decode([prompt], answer_len)
            if device.startswith("cuda"):
                torch.cuda.synchronize()
            if i > 0:  # the first round warms up
                times[id(row)].append(len(row.out.answers[0]) / (time.perf_counter() - started))
    for row in rows:
        row.speed = statistics.median(times[id(row)])


def tune(name: str, settings: list[dict], decode, prompts, answers, tokenizer) -> Row:
    """Choose settings on validation problems: the highest accuracy, then the fewest forwards.

    decode(prompts, A, **setting). Returns a fresh row, its name with the chosen setting written out.
    """
    print(f"choosing settings: {name}")
    rows = [Row(name, functools.partial(decode, **s)).measure(prompts, answers, tokenizer) for s in settings]
    i = max(range(len(rows)), key=lambda i: (rows[i].exact, -rows[i].forwards))
    chosen = ", ".join(f"{key} {value}" for key, value in settings[i].items())
    return Row(f"{name} ({chosen})", rows[i].decode)


def fastest_threads(work: Callable[[], object]) -> int:
    """1 or 2 CPU threads, whichever runs work() faster here; sets it. Tiny tensors may be slower on two."""
    took = {}
    for n in (1, 2, 1, 2):
        torch.set_num_threads(n)
        work()
        started = time.perf_counter()
        work()
        took[n] = min(took.get(n, math.inf), time.perf_counter() - started)
    torch.set_num_threads(min(took, key=took.get))
    return torch.get_num_threads()


@torch.inference_mode()
def network_time(model, decode, prompts, methods: tuple[str, ...]) -> np.ndarray:
    """Seconds an answer token at batch 1: in these methods of the model; in the steps (from the start of the
    first call of the network to the end of the last); in the whole decode, which also sets up and hands over.
    A CUDA device is synchronised after each call.
    """
    calls, stock = [], {name: getattr(model, name) for name in methods}

    def timed(call):
        def run(*args):
            started = time.perf_counter()
            out = call(*args)
            if model.device.type == "cuda":
                torch.cuda.synchronize()
            calls.append((started, time.perf_counter()))
            return out

        return run

    decode(prompts[:1])
    for name, call in stock.items():
        setattr(model, name, timed(call))
    try:
        inside, steps, whole, tokens = 0.0, 0.0, 0.0, 0
        for prompt in prompts:
            calls.clear()
            started = time.perf_counter()
            tokens += len(decode([prompt]).answers[0])
            whole += time.perf_counter() - started
            steps += calls[-1][1] - calls[0][0]
            inside += sum(end - start for start, end in calls)
        return np.array((inside, steps, whole)) / tokens
    finally:
        for name in stock:
            delattr(model, name)


# -------------------------------------------------------------------------------------------------- the table


def d2f_rows(lab: Lab, ar, teacher, student, n_validation: int) -> list[Row]:
    """The decoders that the paper compares, their thresholds chosen on validation problems."""
    k, A, part = lab.r.block_size, lab.r.answer_len, functools.partial
    problems = lab.problems("validation", n_validation)

    def tuned(name, decode, **choices):
        choices["tau_conf"] = (0.9, 0.95, 0.98, 0.99, 0.995)
        settings = [
            dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())
        ]
        return tune(name, settings, decode, *problems, lab.tokenizer)

    def one_block(row):
        return Row(
            f"{row.name[:-1]}, tau_add 1)".replace("pipelined", "one block at a time"),
            part(row.decode, tau_add=1.0),
        )

    vanilla, cached = part(d2f.vanilla_decode, teacher), part(d2f.cached_decode, teacher)
    pipelined = part(d2f.pipelined_decode, student)
    larger = [k * m for m in (2, 4) if k * m <= A] or [k]
    at_k = tuned(f"D2F, pipelined, k {k}", part(pipelined, block_size=k), tau_act=(0.5, 0.95))
    best = tuned("D2F, pipelined, larger blocks", pipelined, block_size=larger, tau_act=(0.5, 0.95))
    return [
        Row("autoregressive, KV cache", part(d2f.autoregressive_decode, ar)),
        Row("teacher, vanilla, one token a step", vanilla),
        Row("teacher, vanilla, half the steps", part(vanilla, steps=max(1, A // 2))),
        Row("teacher, vanilla, a quarter of the steps", part(vanilla, steps=max(1, A // 4))),
        tuned("teacher, threshold-parallel, no cache", part(cached, cache="none")),
        tuned("teacher, Fast-dLLM prefix cache", part(cached, cache="prefix"), block_length=(2 * k, 4 * k)),
        tuned("teacher, Fast-dLLM dual cache", part(cached, cache="dual"), block_length=(2 * k, 4 * k)),
        Row(
            best.name.replace("D2F, pipelined", "D2F without distillation"),
            part(d2f.pipelined_decode, teacher, **best.decode.keywords),
        ),
        one_block(at_k),
        one_block(best),
        at_k,
        best,
    ]


def d2f_table(rows: list[Row], title: str, against: dict[str, Row]) -> str:
    """The table in Markdown; `against` names the rows that every speed is also divided by."""
    table = []
    for r in rows:
        cells = {"method": r.name, "exact match": f"{100 * r.exact:.1f}%", "answer tokens": f"{r.tokens:.1f}"}
        cells |= {"forwards": f"{r.forwards:.1f}", "tokens per forward": f"{r.tokens / r.forwards:.1f}"}
        cells |= {"tokens/s": f"{r.speed:.0f}"}
        cells |= {f"x {name}": f"{r.speed / base.speed:.2f}" for name, base in against.items()}
        table.append(cells | {"tokens/s, batch 16": f"{r.throughput:.0f}"})
    return f"{title}\n\n{markdown(table)}"


@dataclass
class Claim:
    """One line under a table: a figure of it against the bound that this project sets itself."""

    name: str
    value: float
    bound: float
    of: str = ""  # which rows, where that may differ from run to run

    @property
    def missed(self) -> str:
        return "" if self.value >= self.bound else "NOT MET"

    def __str__(self):
        of, missed = self.of and f" ({self.of})", self.missed and f"; {self.missed}"
        return f"- {self.name}{of}: {self.value:.2f} (claim: at least {self.bound:.2f}{missed})"


def lines(claims: list[Claim]) -> str:
    return "\n".join(map(str, claims)) + "\n"


def rivals(best: Row, others: list[Row]) -> list[Claim]:
    """D2F's speed against the fastest other row that is at most 2 points less accurate."""
    fair, claims = [r for r in others if r.exact >= best.exact - 0.02], []
    for what, speed in (("tokens/s", "speed"), ("tokens/s, batch 16", "throughput")):
        rival = max(fair or others, key=lambda r: getattr(r, speed))
        ratio = getattr(best, speed) / getattr(rival, speed)
        claims.append(Claim(f"{what}, D2F / fastest other row within 2 points", ratio, 1, rival.name))
    return claims


def d2f_claims(rows: list[Row]) -> list[Claim]:
    """The paper's claims in the table's own figures."""
    ar, vanilla, undistilled = rows[0], rows[1], rows[7]
    best, alone = max(((rows[11], rows[9]), (rows[10], rows[8])), key=lambda pair: pair[0].speed)
    return [
        Claim("exact match, autoregressive", ar.exact, 0.98),
        Claim("exact match, teacher, vanilla", vanilla.exact, 0.97),
        Claim("exact match, D2F minus teacher", best.exact - vanilla.exact, -0.02),
        Claim("exact match, D2F minus undistilled, same settings", best.exact - undistilled.exact, 0.05),
        Claim("tokens per forward, D2F", best.tokens / best.forwards, 5),
        Claim("forwards, one block at a time / pipelined", alone.forwards / best.forwards, 1 / 0.7),
        Claim("tokens/s, D2F / autoregressive", best.speed / ar.speed, 3.5),
        Claim("tokens/s, D2F / vanilla", best.speed / vanilla.speed, 10),
        *rivals(best, rows[:7]),
    ]


def machine(device: str) -> str:
    """The line above a table: hardware, threads, versions."""
    if device.startswith("cuda"):
        name = torch.cuda.get_device_name()
    else:
        info = Path("/proc/cpuinfo")
        names = (
            [line for line in info.read_text().splitlines() if "model name" in line] if info.exists() else []
        )
        name = names[0].split(":")[1].strip() if names else platform.processor() or platform.machine()
        name += f", {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    return f"{name}; torch {torch.__version__}"


def write_text(path: Path, text: str):
    """Write a file under a temporary name, then rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(text)
    fresh.replace(path)


def measure_rows(lab, rows: list[Row], n_accuracy: int, n_speed: int, shots: int = 0) -> np.ndarray:
    """Accuracy and speed of every row on test problems; returns their prompts."""
    prompts, answers = lab.problems("test", n_accuracy, shots)
    for row in rows:
        row.measure(prompts, answers, lab.tokenizer)
    if lab.threads is None and lab.device == "cpu":
        fastest_threads(lambda: [rows[-1].decode([p], lab.r.answer_len) for p in prompts[:5]])
    time_rows(rows, prompts[:n_speed], lab.r.answer_len, lab.device)
    return prompts


def caption(lab, model, prompts, n_speed: int) -> str:
    """The line above a table: task, lengths, sizes, what was measured on what."""
    return (
        f"{lab.r.task}: prompt {prompts.shape[1]} tokens, answer {lab.r.answer_len} positions; "
        f"{model.n_parameters():,} parameters; exact match on {len(prompts)} held-out problems; tokens/s at "
        f"batch 1, median of {n_speed}, unless said otherwise; {machine(lab.device)}"
    )


def profile_rows(model, rows: list[Row], prompts, answer_len: int, methods: tuple[str, ...]):
    """Print how much of each row's time is not spent in these methods of the model."""
    for row in rows:
        decode = functools.partial(row.decode, max_new_tokens=answer_len)
        inside, steps, whole = network_time(model, decode, list(prompts), methods)
        print(
            f"{row.name}: {100 - 100 * inside / steps:.1f}% of a step at batch 1 is outside the network, "
            f"{100 - 100 * inside / whole:.1f}% of the whole decode"
        )


def d2f_job(lab: Lab, n_accuracy: int, n_speed: int, n_validation: int, profile: bool) -> list[Claim]:
    """Evaluate the three models of a recipe; print their tables and write them to table.md.

    The second table has the same models and settings, on prompts with solved examples before the question.
    """
    ar, teacher, student = (lab.phase(name) for name in Lab.PHASES)
    rows = d2f_rows(lab, ar, teacher, student, n_validation)
    prompts = measure_rows(lab, rows, n_accuracy, n_speed)
    text = d2f_table(rows, caption(lab, student, prompts, n_speed), {"AR": rows[0], "vanilla": rows[1]})
    claims = d2f_claims(rows)
    text += "\n\n" + lines(claims)
    print(f"\n{text}")
    if profile:
        profile_rows(student, rows[-2:], prompts[:n_speed], lab.r.answer_len, ("hidden", "head"))
    if lab.r.shots:  # the vanilla rows would take minutes, and the threshold-parallel one is faster
        many = [Row(r.name, r.decode) for i, r in enumerate(rows) if i not in (1, 2, 3)]
        prompts = measure_rows(lab, many, n_accuracy // 2, n_speed // 3, lab.r.shots)
        more = f"{lab.r.shots} solved examples before each problem. "
        more = d2f_table(many, more + caption(lab, student, prompts, n_speed // 3), {"AR": many[0]})
        beyond = rivals(max(many[-2:], key=lambda r: r.speed), many[:4])
        more += "\n\n" + lines(beyond)
        print(f"\n{more}")
        text += f"\n\n{more}"
        claims += [replace(c, name=f"{lab.r.shots} examples: {c.name}") for c in beyond]
    write_text(lab.out / "table.md", text)
    return claims


# -------------------------------------------------------------------------------- recurrent depth (2nd paper)


@dataclass(frozen=True)
class RecurrentRecipe:
    """Everything that decides what the recurrent-depth run trains."""

    task: Counter = Counter()
    steps: tuple[int, ...] = (2000,)
    lr: tuple[float, ...] = (3e-3,)
    batch: int = 32
    shots: int = 0
    shortest: int = 4  # instructions of the first programs
    backprop: int = 4  # recurrences that gradients pass through, k
    d_model: int = 64
    n_heads: int = 2
    mean_recurrence: int = 8
    rope_base: float = 100.0
    seed: int = 0

    @property
    def answer_len(self) -> int:
        return self.task.digits + 1  # the values, and the EOS

    def config(self, tokenizer) -> RecurrentConfig:
        return RecurrentConfig(
            **tokenizer.ids,
            d_model=self.d_model,
            n_heads=self.n_heads,
            n_prelude=1,
            n_core=1,
            n_coda=1,
            mean_recurrence=self.mean_recurrence,
            d_mlp=5 * self.d_model // 2,
            rope_base=self.rope_base,
        )


class RecurrentLab(Lab):
    """The second paper's only phase: the recurrent-depth model."""

    PHASES = ("recurrent",)

    def __init__(self, recipe, *rest):
        super().__init__(recipe, *rest)
        self.tokenizer = CharTokenizer(recipe.task.alphabet)

    def data(self, number: int):
        """Programs that grow to their full length in the first half of training: short ones teach faster.

        A batch has as many more rows as its programs are shorter, which costs little: with a fixed number of
        rows some seeds never learned. In the second half one batch in four is still short: both are kept.
        """
        r, rng = self.r, np.random.default_rng((self.r.seed, number))
        for step in itertools.count():
            longest = min(r.task.digits, r.shortest + 2 * step * (r.task.digits - r.shortest) // r.steps[0])
            short = 2 * step > r.steps[0] and rng.random() < 0.25
            digits = int(rng.integers(min(r.shortest, longest), longest + 1)) if short else longest
            task, rows = replace(r.task, digits=digits), r.batch * (r.task.digits + 1) // (digits + 1)
            yield next(batches(task, self.tokenizer, rng, rows, digits + 1, self.device))

    def recurrent(self):
        r = self.r
        model = RecurrentDepth(r.config(self.tokenizer)).init_weights().to(self.device)
        decode = functools.partial(recurrent_sampler.autoregressive_decode, model, r=r.mean_recurrence)
        return self.fit(model, functools.partial(recurrent_loss, model, k=r.backprop), 0, decode)


def recurrent_loss(model, tokens, prompt_len, k: int):
    """The recurrent training loss on the answers, with a new random number of recurrences."""
    P, r = int(prompt_len[0]), int(recurrent_sampler.sample_recurrences(model.config.mean_recurrence))
    labels = tokens[:, 1:].clone()
    labels[:, : P - 1] = -100
    return recurrent_sampler.training_loss(model, tokens[:, :-1], labels, r, k)


def recurrent_rows(model, eps: float = 0.03) -> list[Row]:
    """The samplers that the paper compares."""
    part, rs = functools.partial, recurrent_sampler
    static = part(rs.autoregressive_decode, model)
    rows = [Row(f"static, r {r}", part(static, r=r)) for r in (1, 2, 4, 6, 8, 16, 32, 64)]
    rows.append(Row("static, r 32, full cache", part(static, r=32, n_slots=32)))
    rows.append(Row(f"adaptive, eps {eps}", part(rs.adaptive_decode, model, eps=eps)))
    rows.append(Row("speculative, 4 drafts of r 4", part(rs.speculative_decode, model)))
    for inner, beta in ((1, 0.0), (2, 0.0), (2, 0.5), (4, 0.0)):
        wave = rs.Wave(inner=inner, eps=eps, beta=beta)
        rows.append(Row(f"wave, r' {inner}, beta {beta}", part(rs.wavefront_decode, model, wave=wave)))
    wave = rs.Wave(inner=1, eps=eps, prefill_exit=True)
    rows.append(Row("wave, r' 1, the prompt exits too", part(rs.wavefront_decode, model, wave=wave)))
    wave = rs.Wave(inner=2, eps=eps, released_alignment=True)
    rows.append(Row("wave, r' 2, released distances", part(rs.wavefront_decode, model, wave=wave)))
    return [replace(row, cost="row_passes") for row in rows]


def recurrent_table(rows: list[Row], title: str) -> str:
    """The table in Markdown; forwards are core passes (calls of R) here."""
    base, table = next(r for r in rows if r.name == "static, r 32"), []
    for r in rows:
        cells = {"sampler": r.name, "exact match": f"{100 * r.exact:.1f}%", "tokens/s": f"{r.speed:.0f}"}
        cells |= {"x static r 32": f"{r.speed / base.speed:.2f}"}
        cells |= {"core passes a token": f"{r.forwards / r.tokens:.1f}"}
        cells |= {"mean wave": f"{r.out.mean_wave:.1f}", "largest wave": r.out.max_wave}
        table.append(cells | {"core cache, kB": f"{r.out.core_cache_bytes / 1024:.0f}"})
    return f"{title}\n\n{markdown(table)}"


def recurrent_claims(rows: list[Row]) -> list[Claim]:
    """The paper's claims in the table's own figures: the fastest wave against what it is compared to."""
    named = {r.name: r for r in rows}
    base, full = named["static, r 32"], named["static, r 32, full cache"]
    adaptive = next(r for r in rows if r.name.startswith("adaptive"))
    waves = [r for r in rows if r.name.startswith("wave") and r.exact >= base.exact - 0.01]
    best = max(waves or rows[-1:], key=lambda r: r.speed)
    static = [r for r in rows if r.name.startswith("static") and r.exact >= best.exact - 0.01]
    cheap = max(static or [base], key=lambda r: r.speed)
    return [
        Claim("exact match, static r 32", base.exact, 0.97),
        Claim("exact match, static r 32 minus r 1", base.exact - named["static, r 1"].exact, 0.2),
        Claim("exact match, wave minus static r 32", best.exact - base.exact, -0.01, best.name),
        Claim("tokens/s, wave / static r 32", best.speed / base.speed, 4.5, best.name),
        Claim("tokens/s, wave / adaptive", best.speed / adaptive.speed, 1),
        Claim("tokens/s, wave / fastest static row as accurate", best.speed / cheap.speed, 1, cheap.name),
        Claim("exact match, shared minus full cache", base.exact - full.exact, -0.01),
        Claim("core cache, full / shared", full.out.core_cache_bytes / base.out.core_cache_bytes, 32),
    ]


def recurrent_job(lab: RecurrentLab, n_accuracy: int, n_speed: int, profile: bool) -> list[Claim]:
    """Evaluate the recurrent-depth model; print its table and write it to table.md."""
    model = lab.phase("recurrent")
    rows = recurrent_rows(model)
    prompts = measure_rows(lab, rows, n_accuracy, n_speed)
    text = recurrent_table(rows, caption(lab, model, prompts, n_speed))
    claims = recurrent_claims(rows)
    text += "\n\n" + lines(claims)
    print(f"\n{text}")
    write_text(lab.out / "table.md", text)
    if profile:
        waves, methods = [r for r in rows if "wave" in r.name], ("window", "embed", "recur", "decode")
        profile_rows(model, waves, prompts[:n_speed], lab.r.answer_len, methods)
    return claims


def seeds_table(runs: list[list[Claim]]) -> str:
    """Every claim under each seed, in Markdown."""
    table = []
    for claims in zip(*runs, strict=True):
        cells = {f"seed {i}": f"{c.value:.2f} {c.missed}".strip() for i, c in enumerate(claims)}
        table.append({"claim": claims[0].name, "at least": f"{claims[0].bound:.2f}"} | cells)
    return markdown(table)


# -------------------------------------------------------------------------------------------- bench (--bench)


def throughput_rows(rows: list[Row], prompts, answer_len: int, batches: list[int], device) -> list[dict]:
    """Answer tokens a second of each row in batches of each size, in turn on the same problems."""
    table = [{"tokens/s at batch": row.name} for row in rows]
    for batch in batches:
        for row, line in zip(rows, table, strict=True):
            row.decode(list(prompts[:batch]), answer_len)  # warm-up
            decode, some = (
                functools.partial(row.decode, max_new_tokens=answer_len),
                max(batch, len(prompts) // 4),
            )
            groups, outs = in_groups(decode, prompts[:some], batch, row.name), []
            seconds = timed(lambda outs=outs, groups=groups: outs.extend(groups), device)
            line[batch] = round(sum(len(a) for out in outs for a in out.answers) / seconds)
    return table


def equal_answers(row: Row, prompts, answer_len: int, group: int = 16) -> int:
    """How many prompts get the same answer in a batch as alone."""
    decode = functools.partial(row.decode, max_new_tokens=answer_len)
    together = [a for out in in_groups(decode, prompts, group, "batched") for a in out.answers]
    alone = [a for out in in_groups(decode, prompts, 1, "single") for a in out.answers]
    return sum(a == b for a, b in zip(together, alone, strict=True))


def untrained(causal: bool, device: str, max_len: int, **changes) -> Transformer:
    """A random transformer of the tiny size whose confidences vary, as a trained one's do."""
    ids = dict(vocab_size=64, n_tokens=64, eos_id=62, pad_id=62, mask_id=63, tied_head=False)
    config = TransformerConfig(**ids | dict(max_len=max_len, causal=causal) | changes)
    model = Transformer(config).init_weights(torch.Generator().manual_seed(0))
    with torch.no_grad():
        model.embedding.weight.mul_(50)
        model.lm_head.weight.mul_(6)
    return model.to(device).eval().requires_grad_(False)


def growth(prompt_len: int, lengths: list[int], device: str) -> list[dict]:
    """Milliseconds and positions a token of each decoder, on untrained weights, by answer length.

    Untrained weights are so unsure that each D2F decoder decides about one token a forward: the pace is
    equal, and what is compared is the cost of a forward.
    """
    part, free = functools.partial, dict(sampling=d2f.Sampling(forbidden=(62,)))  # no answer ends early
    model, causal = (untrained(c, device, prompt_len + max(lengths)) for c in (False, True))
    core = RecurrentConfig(65, 64, 64, 64, max_len=prompt_len + max(lengths))
    core = RecurrentDepth(core).init_weights().to(device).eval().requires_grad_(False)
    wave, rs = recurrent_sampler.Wave(inner=2, exit="fixed"), recurrent_sampler
    cached = part(d2f.cached_decode, model, tau_conf=0.9, **free)
    decoders = {
        "autoregressive, KV cache": part(d2f.autoregressive_decode, causal, **free),
        "threshold-parallel, no cache": part(cached, cache="none"),
        "Fast-dLLM dual cache": part(cached, cache="dual", block_length=32),
        "D2F, k 32": part(d2f.pipelined_decode, model, block_size=32, tau_conf=0.9, **free),
        "static, r 8": part(rs.autoregressive_decode, core, r=8),
        "wave, r 8, r' 2, fixed exit": part(rs.wavefront_decode, core, wave=wave, r=8),
    }
    prompt = np.random.default_rng(0).integers(0, 60, prompt_len)
    table = [{f"ms a token (positions a token), prompt {prompt_len}": name} for name in decoders]
    for n in lengths:
        for decode, line in zip(decoders.values(), table, strict=True):
            decode(prompts=[prompt], max_new_tokens=min(16, n))  # warm-up
            started = time.perf_counter()
            out = decode(prompts=[prompt], max_new_tokens=n)
            tokens = len(out.answers[0])
            ms = (time.perf_counter() - started) * 1e3 / tokens
            line[n] = f"{ms:.2f} ({out.positions / tokens:.1f})"
    return table


def crossing(table: list[dict], lengths: list[int]) -> str:
    """From which answer length on D2F beats threshold-parallel decoding without a cache."""
    _, parallel, _, ours, *_ = ([float(line[n].split()[0]) for n in lengths] for line in table)
    wins = [
        n for i, n in enumerate(lengths) if all(a < b for a, b in zip(ours[i:], parallel[i:], strict=True))
    ]
    return f"{wins[0]} tokens" if wins else f"no answer of up to {lengths[-1]} tokens"


def bench_rows(lab: Lab, core) -> tuple[list[Row], list[Row]]:
    """The decoders to bench, those of D2F and those of recurrent depth; ours last."""
    ar, teacher, student = (lab.phase(name) for name in Lab.PHASES)
    part, rs, k = functools.partial, recurrent_sampler, lab.r.block_size
    larger = min(4 * k, lab.r.answer_len)
    cached = part(d2f.cached_decode, teacher, tau_conf=0.95)
    ours = part(d2f.pipelined_decode, student, tau_act=0.5, tau_conf=0.95)
    quarter = max(1, lab.r.answer_len // 4)
    wave = rs.Wave(inner=1, prefill_exit=True)
    return [
        Row("autoregressive, KV cache", part(d2f.autoregressive_decode, ar)),
        Row("vanilla, a quarter of the steps", part(d2f.vanilla_decode, teacher, steps=quarter)),
        Row("threshold-parallel, no cache", part(cached, cache="none")),
        Row("Fast-dLLM dual cache", part(cached, cache="dual", block_length=larger)),
        Row(f"D2F, k {k}", part(ours, block_size=k)),
        Row(f"D2F, k {larger}", part(ours, block_size=larger)),
    ], [
        Row("static, r 8", part(rs.autoregressive_decode, core, r=8)),
        Row("static, r 32", part(rs.autoregressive_decode, core, r=32)),
        Row("adaptive", part(rs.adaptive_decode, core)),
        Row("speculative", part(rs.speculative_decode, core)),
        Row("wave, r' 1", part(rs.wavefront_decode, core, wave=wave)),
    ]


def time_split(rows: list[Row], prompts, answer_len: int, methods: tuple[str, ...]):
    """Where each row's time at batch 1 goes, a table, and the share of its steps that the network has."""
    table, shares = [], []
    for row in rows:
        decode = functools.partial(row.decode, max_new_tokens=answer_len)
        inside, steps, whole = 1e3 * network_time(row.decode.args[0], decode, list(prompts), methods)
        parts = {"network": inside, "sampler": steps - inside, "before and after": whole - steps}
        cells = {name: f"{ms:.3f}" for name, ms in parts.items()}
        table.append({"ms a token at batch 1": row.name} | cells)
        shares.append(inside / steps)
    return table, shares


def bench_job(lab: Lab, recurrent: RecurrentLab, quick: bool):
    """Batches, overhead and growth with length, as ratios measured in one run; written to bench.md."""
    core, n, batches = recurrent.phase("recurrent"), 8 if quick else 200, [1, 4] if quick else [1, 4, 16, 64]
    lengths = [32, 64] if quick else [64, 128, 256, 512, 1024]
    text, claims = [f"{machine(lab.device)}; {lab.r.task}; {recurrent.r.task}", ""], []
    methods = ("hidden", "head"), ("window", "embed", "recur", "decode")
    for here, rows, ours, inside, bound in zip(
        (lab, recurrent), bench_rows(lab, core), (2, 1), methods, (2.5, 4), strict=True
    ):
        (prompts, _), A, batch = here.problems("test", n), here.r.answer_len, min(16, batches[-1])
        if lab.threads is None and lab.device == "cpu":
            fastest_threads(lambda row=rows[-1], A=A, some=prompts[:5]: [row.decode([p], A) for p in some])
        table = throughput_rows(rows, prompts, A, batches, lab.device)
        text += [markdown(table), ""]
        ratio, name = table[-1][batch] / table[-1][1], rows[-1].name
        claims.append(Claim(f"tokens/s, batch {batch} / batch 1, {name}", ratio, bound))
        equal = equal_answers(rows[-1], prompts, A)
        claims.append(Claim(f"answers of a batch equal to single ones, of {n}, {name}", equal, n))
        table, shares = time_split(rows, prompts[:50], A, inside)
        text += [markdown(table), ""]
        for row, share in list(zip(rows, shares, strict=True))[-ours:]:
            claims.append(Claim(f"share of a step in the network, batch 1, {row.name}", share, 0.85))
    claims.append(llada_shape_claim(lab.device, 1 if quick else 5))
    claims.append(training_claim(lab, 4 if quick else 40))
    for prompt_len in (32, 512):
        table = growth(prompt_len, lengths, lab.device)
        text += [
            markdown(table),
            "",
            f"D2F beats threshold-parallel decoding from {crossing(table, lengths)} on.",
            "",
        ]
        first, last = (float(table[3][m].split()[0]) for m in (lengths[1], lengths[-1]))
        claims.append(
            Claim(f"ms a token, D2F, answers of {lengths[1]} / {lengths[-1]}", first / last, 1 / 1.5)
        )
    text = "\n".join([*text, lines(claims)])
    print(f"\n{text}")
    write_text(lab.out.parent / "bench.md", text)


def llada_shape_claim(device: str, repeats: int) -> Claim:
    """A pipelined step of a wider random model against the bare forward on the same window."""
    size = dict(d_model=256, n_layers=8, n_heads=4, n_kv_heads=4, d_mlp=768, vocab_size=4096, n_tokens=4096)
    model = untrained(False, device, 256, **size, shift=False)
    decode = functools.partial(d2f.pipelined_decode, model, max_new_tokens=128, block_size=32)
    prompt = np.random.default_rng(0).integers(0, 60, 64)
    inside, steps, _ = network_time(model, decode, [prompt] * repeats, ("hidden", "head"))
    name = "bare forward / pipelined step, random LLaDA shape of d 256, 8 layers"
    return Claim(name, inside / steps, 1 / 1.25)


def training_claim(lab: Lab, steps: int) -> Claim:
    """A training step of the teacher against its bare loss and gradient on one batch."""
    data, low = lab.data(1), lab.device.startswith("cuda")

    def train(n):
        model = lab.fresh(causal=False)
        fit(model, functools.partial(teacher_loss, model), data, n, 0.0, "training steps", lambda: 0.0, low)

    def bare():
        for _ in range(steps):
            with torch.autocast(model.device.type, torch.bfloat16, enabled=low):
                loss = teacher_loss(model, *batch)
            loss.backward()

    train(2)  # warm-up
    whole, model, batch = timed(lambda: train(steps), lab.device), lab.fresh(causal=False), next(data)
    return Claim("bare loss and gradient / training step, teacher", timed(bare, lab.device) / whole, 0.9)


def full_shape_job(device: str, compile: bool, quick: bool):
    """Forwards a second of a random model of LLaDA-8B's shape, against what memory bandwidth allows."""
    ids = dict(vocab_size=126464, n_tokens=126349, eos_id=126081, pad_id=126081, mask_id=126336)
    size = dict(d_model=4096, n_layers=32, n_heads=32, n_kv_heads=32, d_mlp=12288, max_len=4096)
    if quick:
        size = dict(d_model=64, n_layers=2, n_heads=2, n_kv_heads=2, d_mlp=160, max_len=512)
    elif not device.startswith("cuda"):
        raise ValueError(f"--full-shape needs a GPU with 20 GB of memory; the device is {device}")
    with torch.device("meta"):
        model = Transformer(
            TransformerConfig(**ids, **size, tied_head=False, shift=False, rope_base=500000.0)
        )
    model = model.to(torch.bfloat16).to_empty(device=device).eval().requires_grad_(False)
    for p in model.parameters():
        p.fill_(1.0) if p.dim() == 1 else p.normal_(std=p.shape[1] ** -0.5)
    block = torch.empty(2**20 if quick else 2**30, dtype=torch.bfloat16, device=device)
    copied = min(timed(lambda: block.clone(), device) for _ in range(5))
    bandwidth = 2 * block.numel() * block.element_size() / copied
    floor = bandwidth / (2 * (model.n_parameters() - model.embedding.weight.numel()))
    decoders = {"eager": model} | ({"compiled": Static(model, torch.compile)} if compile else {})
    prompt, A = np.random.default_rng(0).integers(0, 1000, 128), 32 if quick else 128
    for name, net in decoders.items():
        decode = functools.partial(d2f.pipelined_decode, net, [prompt], A, 32)
        decode()
        seconds = timed(decode, device)
        forwards = decode().forwards
        print(
            f"{name}: {forwards / seconds:.1f} forwards/s, {100 * forwards / seconds / floor:.0f}% of the "
            f"{floor:.1f} that {bandwidth / 1e9:.0f} GB/s allow; {machine(device)}"
        )


def timed(work: Callable[[], object], device: str) -> float:
    """Seconds that work() takes, the device synchronised."""
    started = time.perf_counter()
    work()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter() - started


# ------------------------------------------------------------------------------------------------------- main


def parse_args(argv=None):
    p = argparse.ArgumentParser(
        description="Train tiny models of both papers and print the tables of their claims.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    p.add_argument("--task", choices=TASKS, default="addition", help="what the models learn")
    p.add_argument(
        "--digits", type=int, default=23, help="digits (addition) or entries (ledger) of a problem"
    )
    p.add_argument(
        "--carry", type=float, default=0.25, help="addition: how often a digit pair is forced to sum to 9"
    )
    p.add_argument("--block-size", type=int, default=8, help="k, positions per block in training")
    p.add_argument("--steps", type=int, nargs=4, help="training steps of the four phases")
    p.add_argument("--shots", type=int, default=2, help="solved examples before a problem, at most")
    p.add_argument(
        "--from-scratch",
        action="store_true",
        help="LLaDA's way: a teacher without shift, not started from the autoregressive model",
    )
    p.add_argument(
        "--only",
        choices=(*Lab.PHASES, "d2f", "recurrent"),
        help="train one phase (and what it needs), or only one paper's models and tables",
    )
    p.add_argument("--retrain", action="store_true", help="train again what is already in --out")
    p.add_argument(
        "--quick", action="store_true", help="everything at toy scale in under a minute: a first look"
    )
    p.add_argument("--profile", action="store_true", help="also print the share of time outside the network")
    p.add_argument("--bench", action="store_true", help="batches, overhead, growth with length: out/bench.md")
    p.add_argument(
        "--full-shape", action="store_true", help="with --bench: LLaDA-8B's shape on a GPU instead"
    )
    p.add_argument("--compile", action="store_true", help="with --full-shape: also by torch.compile")
    p.add_argument("--out", default="out", help="folder of checkpoints and tables")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--threads", type=int, help="CPU threads (default: measured, the faster of 1 and 2)")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--seeds", type=int, help="so many seeds from 0, and their claims in out/seeds.md")
    return p.parse_args(argv)


def recipes_of(args) -> tuple[Recipe, RecurrentRecipe]:
    """The recipes that the command line asks for; larger models and batches on a GPU."""
    if args.digits < 1 or args.block_size < 1:
        raise ValueError(
            f"--digits is {args.digits} and --block-size {args.block_size}; both must be at least 1"
        )
    if not 0 <= args.carry <= 1:
        raise ValueError(f"--carry is {args.carry}; it must be between 0 and 1")
    if not 0 <= args.shots <= 4:
        raise ValueError(f"--shots is {args.shots}; it must be between 0 and 4")
    check_seed(args.seed)
    task = Ledger(args.digits) if args.task == "ledger" else Addition(args.digits, args.carry)
    r = Recipe(task, args.block_size, shots=args.shots, from_scratch=args.from_scratch, seed=args.seed)
    recurrent = RecurrentRecipe(seed=args.seed)
    if args.digits > 30:  # longer distances need finer positions
        r = replace(r, rope_base=200.0)
    if args.device.startswith("cuda"):
        r = replace(r, batch=128, d_model=128, n_layers=4, n_heads=4)
        recurrent = replace(recurrent, batch=128, d_model=128, n_heads=4)
    if args.quick:
        r = replace(r, task=replace(task, digits=3), block_size=4, steps=(200, 300, 200), shots=1)
        recurrent = replace(recurrent, task=Counter(4), steps=(200,))
    if args.steps:
        r, recurrent = replace(r, steps=tuple(args.steps[:3])), replace(recurrent, steps=(args.steps[3],))
    return r, recurrent


def labs(args, out: str) -> tuple[Lab, RecurrentLab]:
    """Both papers' recipes at work, in one folder."""
    recipe, recurrent = recipes_of(args)
    where = (out, args.device, args.retrain, args.threads)
    return Lab(recipe, *where), RecurrentLab(recurrent, *where)


def tables(args, out: str) -> list[Claim]:
    """Train what is not there, measure, print the tables."""
    lab, recurrent = labs(args, out)
    n, n_validation = dict(n_accuracy=200, n_speed=50, profile=args.profile), 64
    if args.quick:
        n, n_validation = n | dict(n_accuracy=20, n_speed=3), 10
    claims = []
    if args.only in (None, "d2f"):
        claims += d2f_job(lab, **n, n_validation=n_validation)
    if args.only in (None, "recurrent"):
        claims += recurrent_job(recurrent, **n)
    return claims


def main(argv=None):
    args = parse_args(argv)
    out = f"{args.out}/quick" if args.quick else args.out
    try:
        if args.bench and args.full_shape:
            full_shape_job(args.device, args.compile, args.quick)
        elif args.bench:
            bench_job(*labs(args, out), args.quick)
        elif args.only in Lab.PHASES:
            labs(args, out)[0].phase(args.only)
        elif args.seeds is None:
            tables(args, out)
        else:
            if args.seeds < 1:
                raise ValueError(f"--seeds is {args.seeds}; it must be at least 1")
            runs = []
            for seed in range(args.seeds):
                print(f"\nseed {seed}")
                args.seed = seed
                runs.append(tables(args, f"{out}/seed-{seed}"))
            print(f"\n{seeds_table(runs)}")
            write_text(Path(out) / "seeds.md", seeds_table(runs) + "\n")
    except ValueError as e:
        sys.exit(str(e))
    except KeyboardInterrupt:
        sys.exit(
            f"\ninterrupted: finished phases are kept in {args.out}; the same command goes on from there"
        )


if __name__ == "__main__":
    main()
