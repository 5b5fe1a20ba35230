"""The main job: train tiny models and print the tables that show both papers' claims. `python train_tiny.py`

In order: the tasks, the training loop, the phases (autoregressive model -> bidirectional teacher -> D2F student),
evaluation, the tables. Finished phases are checkpoints under --out; a second run reuses them (--retrain to redo).
"""

import math
import time
from dataclasses import dataclass

import numpy as np
import torch
from tqdm import tqdm

import d2f
from tiny_models import CharTokenizer, Transformer, TransformerConfig

# -------------------------------------------------------------------------------------------------------- tasks

TRAIN, VALIDATION, TEST = "train", "validation", "test"


def split_of(problems) -> np.ndarray:
    """Which split each problem of digits [n, m] belongs to, decided by its content: no problem is in two splits.

    A weighted digit sum mod 16: 0 is the test set, 1 the validation set, the rest is for training.
    """
    code = (problems * (1 + 2 * np.arange(problems.shape[1]))).sum(1) % 16
    return np.select([code == 0, code == 1], [TEST, VALIDATION], TRAIN)


@dataclass
class Addition:
    """a + b with written carries, least significant digit first: 'a+b;' for each digit pair -> '=cd;' (carry, digit).

    Digit i's answer stands at a constant distance from its question. Most carries are decided by their own pair;
    where a_i + b_i = 9 (forced with probability `carry`) the carry travels on: easy tokens and hard ones.
    """

    digits: int = 23
    carry: float = 0.25

    def problems(self, rng, n: int) -> np.ndarray:
        a, b = rng.integers(0, 10, (2, n, self.digits))
        b = np.where(rng.random((n, self.digits)) < self.carry, 9 - a, b)
        return np.concatenate((a, b), 1)

    def write(self, problems, tokenizer) -> tuple[np.ndarray, np.ndarray]:
        """Problems [n, 2 digits] -> prompts int64 [n, 4 digits], answers int64 [n, 4 digits], without EOS."""
        a, b = problems[:, : self.digits], problems[:, self.digits :]
        carry = np.zeros_like(a)
        for i in range(self.digits):
            carry[:, i] = (a[:, i] + b[:, i] + (carry[:, i - 1] if i else 0)) > 9
        digit = (a + b + np.pad(carry, ((0, 0), (1, 0)))[:, :-1]) % 10
        return fields(tokenizer, a, "+", b, ";"), fields(tokenizer, "=", carry, digit, ";")


def fields(tokenizer, *parts) -> np.ndarray:
    """Interleave digit arrays [n, m] and single characters to token ids [n, m * len(parts)]. Digits are ids 0 to 9."""
    shape = next(p.shape for p in parts if not isinstance(p, str))
    columns = [np.full(shape, tokenizer.encode(p)[0]) if isinstance(p, str) else p for p in parts]
    return np.stack(columns, -1).reshape(shape[0], -1)


def sample(task, tokenizer, rng, n: int, split: str, answer_len: int):
    """n problems of one split: prompts int64 [n, P], answers int64 [n, answer_len], filled with EOS after their end."""
    problems = task.problems(rng, 2 * n if split == TRAIN else 40 * n + 100)
    problems = problems[split_of(problems) == split][:n]
    prompts, answers = task.write(problems, tokenizer)
    fill = np.full((len(answers), answer_len - answers.shape[1]), tokenizer.eos_id)
    return prompts, np.concatenate((answers, fill), 1)


# ---------------------------------------------------------------------------------------------------- training


def fit(model, loss_of, batches, steps: int, lr: float, name: str):
    """AdamW with warm-up and cosine decay; loss_of(tokens [B, L], P) -> scalar. Shows one bar; returns the model."""
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    warm = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min((s + 1) / warm, 0.5 + 0.5 * math.cos(math.pi * s / steps))
    )
    bar = tqdm(range(steps), name, mininterval=1.0)
    model.train()
    for step in bar:
        loss = loss_of(*next(batches))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 49:
            bar.set_postfix(loss=f"{loss.item():.3f}")
    return model.eval()


def batches(task, tokenizer, rng, batch: int, answer_len: int, device):
    """Endless training batches: tokens int64 [batch, L], prompt lengths int64 [batch]."""
    while True:
        prompts, answers = sample(task, tokenizer, rng, batch, TRAIN, answer_len)
        tokens = torch.from_numpy(np.concatenate((prompts, answers), 1)).to(device)
        yield tokens, torch.full((batch,), prompts.shape[1], device=device)


def autoregressive_loss(model, tokens, prompt_len):
    """Next-token cross-entropy of the answers."""
    P = int(prompt_len[0])
    logits = model.head(model.hidden(tokens[:, :-1])[:, P - 1 :])
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, P:].flatten())


def teacher_loss(model, tokens, prompt_len, generator=None):
    """Masked-diffusion loss of the bidirectional teacher: one ratio t ~ U(0, 1) a row, stratified over the batch."""
    B, c = len(tokens), model.config
    t = (torch.arange(B, device=tokens.device) + torch.rand(B, generator=generator, device=tokens.device)) / B
    uniform = torch.rand(tokens.shape, generator=generator, device=tokens.device)
    noisy, masked, _ = d2f.corrupt(tokens, prompt_len, tokens.shape[1], t[:, None], c.mask_id, uniform)
    return d2f.masked_cross_entropy(d2f.align(model(noisy), c.shift), tokens, masked)
