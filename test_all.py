"""Every test of the project. `python test_all.py` (-h for a choice of tests)

No framework: a test is a function `test_...` whose docstring says which property it checks. It passes if it
returns, fails if it raises, is skipped if it raises Skip. The last line counts them: N passed, N failed, N
skipped.
"""

import argparse
import contextlib
import functools
import io
import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import traceback
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

import d2f
import recurrent_sampler as rs
import tiny_models
import train_tiny
from d2f import Sampling
from tiny_models import (
    CharTokenizer,
    Transformer,
    TransformerConfig,
    load_checkpoint,
    read_safetensors,
    save_checkpoint,
)

HERE = Path(__file__).resolve().parent
FIXTURES = HERE / "fixtures"
TESTS = []  # (section, function), in order


class Skip(Exception):
    """Raised by a test that cannot run here; the message says why."""


def section(name: str):
    """Register a test under a section for `--only`."""

    def register(f):
        TESTS.append((name, f))
        return f

    return register


def raises(message: str, call, *args, **kwargs):
    """call must raise ValueError or FileNotFoundError, one sentence that matches the regular expression."""
    try:
        call(*args, **kwargs)
    except (ValueError, FileNotFoundError) as e:
        assert re.search(message, str(e)), f"{str(e)!r} does not match {message!r}"
        return
    raise AssertionError(f"no error was raised; expected {message!r}")


def start(line, **options):
    """A command in the background, to be interrupted. A shell's own background jobs ignore interrupts, and so
    would all that they start.
    """

    def listen():
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(line, cwd=HERE, env=env, preexec_fn=listen, **options)


def run(*args, timeout=300, **kwargs):
    """Run a Python command of the project in a subprocess, on one thread; returns the finished process."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", **kwargs.pop("env", {})}
    command = [sys.executable, *map(str, args)]
    return subprocess.run(
        command, cwd=HERE, env=env, capture_output=True, text=True, timeout=timeout, **kwargs
    )


def random_model(seed: int = 0, spread: float = 4.0, **changes) -> Transformer:
    """An untrained transformer with logits of standard deviation about `spread`, so that confidences vary."""
    fields = dict(
        vocab_size=24, n_tokens=20, mask_id=17, eos_id=18, pad_id=19, d_model=32, n_layers=2, d_mlp=48
    )
    fields.update(max_len=256, tied_head=False, shift=False)
    g = torch.Generator().manual_seed(seed)
    model = Transformer(TransformerConfig(**{**fields, **changes})).init_weights(g)
    with torch.no_grad():
        model.embedding.weight *= 50
        for block in model.blocks:  # sharp and strong attention: masks at different places must differ
            block.attn.qkv.weight *= 2
            block.attn.out.weight *= 12
        model.lm_head.weight *= spread
    return model.eval().requires_grad_(False)


def random_prompts(seed: int, lengths, n_tokens: int = 17) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, n_tokens, n) for n in lengths]


def decoders(model, A: int) -> dict:
    """Every D2F decoder that runs on this model, by name: prompts -> Decoded."""
    part = functools.partial
    some = {
        "pipelined": part(d2f.pipelined_decode, model, max_new_tokens=A, block_size=4, tau_conf=0.6),
        "pipelined low": part(
            d2f.pipelined_decode, model, max_new_tokens=A, block_size=5, tau_act=0.3, tau_conf=0.3
        ),
        "vanilla": part(d2f.vanilla_decode, model, max_new_tokens=A, block_length=4),
        "vanilla entropy": part(d2f.vanilla_decode, model, max_new_tokens=A, order="entropy"),
        "vanilla origin": part(d2f.vanilla_decode, model, max_new_tokens=A, order="origin"),
        "cached none": part(
            d2f.cached_decode, model, max_new_tokens=A, block_length=4, cache="none", tau_conf=0.6
        ),
        "cached prefix": part(
            d2f.cached_decode, model, max_new_tokens=A, block_length=4, cache="prefix", tau_conf=0.6
        ),
        "cached dual": part(
            d2f.cached_decode, model, max_new_tokens=A, block_length=4, cache="dual", tau_conf=0.6
        ),
    }
    if model.config.causal and model.config.shift:
        some["autoregressive"] = part(d2f.autoregressive_decode, model, max_new_tokens=A)
    return some


# ----------------------------------------------------------- golden vectors of the released LLaDA, Dream, D2F

CASES = ("llada_mha", "llada_gqa_sharded", "llada_tied", "dream_gqa", "dream_mha_sharded")
CONFIDENCE = {"default": "probability", "neg_entropy": "entropy", "margin_confidence": "margin"}


@functools.cache
def golden_model(case: str):
    """A released-layout checkpoint. Its samplers may emit every row of the table, so ours may here too."""
    model = load_checkpoint(FIXTURES / case / "model")
    model.config.n_tokens = model.config.vocab_size
    return model


def golden(case: str, name: str):
    return json.loads((FIXTURES / case / f"{name}.json").read_text())


@section("golden")
def test_golden_logits_bidirectional_and_block_causal():
    """Logits equal the released models': names, norms, RoPE, grouped heads, biases, tied and untied heads,
    shards.
    """
    for case in CASES:
        t, model = read_safetensors(FIXTURES / case / "logits.safetensors"), golden_model(case)
        for e in golden(case, "logits"):
            i = e["index"]
            ids = t[f"ids_{i}"]
            P = torch.full((len(ids),), e["prompt_length"])
            mask = d2f.block_causal_mask(ids.shape[1], P, e["block_size"])
            assert (mask[0, 0] == t[f"block_mask_{i}"]).all(), f"{case} {i}: mask"
            for name, got in (("bidirectional", model(ids)), ("block_causal", model(ids, mask=mask))):
                worst = (got[..., ::4] - t[f"logits_{name}_{i}"]).abs().max().item()
                assert worst < 1e-3, f"{case} {i} {name}: {worst}"


@section("golden")
def test_golden_logits_through_the_cache():
    """A prefix written to the cache and the rest run on top of it give the block-causal logits."""
    for case in CASES:
        t, model = read_safetensors(FIXTURES / case / "logits.safetensors"), golden_model(case)
        for e in golden(case, "logits"):
            i, P, k, n = e["index"], e["prompt_length"], e["block_size"], e["cached_prefix"]
            ids = t[f"ids_{i}"]
            mask = d2f.block_causal_mask(ids.shape[1], torch.full((len(ids),), P), k)
            cache = model.new_cache(len(ids), ids.shape[1])
            model(ids[:, :n], 0, mask[:, :, :n, :n], cache)
            worst = (
                (model(ids[:, n:], n, mask[:, :, n:], cache)[..., ::4] - t[f"logits_block_causal_{i}"][:, n:])
                .abs()
                .max()
            )
            assert worst < 1e-3, f"{case} {i}: {worst}"


@section("golden")
def test_golden_masks():
    """The released training and inference masks, for rows of different prompt lengths."""
    t = read_safetensors(FIXTURES / "d2f_schedule" / "schedule.safetensors")
    j = golden("d2f_schedule", "schedule")
    for e in j["build_custom_float_attention_mask"]:
        mask = d2f.block_causal_mask(e["length"], torch.tensor(e["prompt_lengths"]), e["block_size"])
        assert torch.equal(mask[:, 0], t[f"train_mask_{e['index']}"]), e
    for e in j["extract_attention_mask"]:
        full = d2f.block_causal_mask(e["max_length"], torch.tensor([e["prompt_length"]]), e["block_size"])[
            0, 0
        ]
        assert torch.equal(full, t[f"infer_full_{e['index']}"]), e
        rows = slice(e["start_pos"], e["start_pos"] + e["input_length"])
        part = full[rows, : e["cache_length"] + e["input_length"]]
        assert torch.equal(part, t[f"infer_mask_{e['index']}"]), e


@section("golden")
def test_golden_schedule_and_corruption():
    """The released mask ratios, draw for draw, and the released forward process from its own uniforms."""
    t = read_safetensors(FIXTURES / "d2f_schedule" / "schedule.safetensors")
    j = golden("d2f_schedule", "schedule")
    for e in j["generate_monotonic_pmasks"]:
        g = torch.Generator().manual_seed(e["torch_manual_seed"])
        ratios = d2f.mask_ratios(e["batch"], e["blocks"], "released", g)
        assert torch.allclose(ratios, t[f"pmask_{e['index']}"], atol=1e-6), e
    for e in j["forward_process_length"]:
        i, P, k = e["index"], torch.tensor(e["prompt_lengths"]), e["block_size"]
        g = torch.Generator().manual_seed(e["torch_manual_seed"])
        ratios = d2f.mask_ratios(len(P), -(-(e["length"] - min(e["prompt_lengths"])) // k), "released", g)
        noisy, masked, p = d2f.corrupt(
            t[f"fpl_input_ids_{i}"], P, k, ratios, e["mask_id"], t[f"fpl_u_token_{i}"]
        )
        assert torch.equal(noisy, t[f"fpl_noisy_{i}"]) and torch.equal(masked, t[f"fpl_masked_{i}"]), e
        assert torch.allclose(p[masked], t[f"fpl_p_mask_{i}"][masked], atol=1e-6), e


@section("golden")
def test_golden_shift():
    """The released shift of Dream's logits."""
    t = read_safetensors(FIXTURES / "d2f_schedule" / "schedule.safetensors")
    assert torch.equal(d2f.align(t["shift_in"], True), t["shift_out"])
    assert torch.equal(d2f.align(t["shift_in"], False), t["shift_in"])


@section("golden")
def test_golden_losses():
    """Both released losses from their own logits. Ours is a KL: the released soft one adds the teacher's
    entropy.
    """
    for case in ("llada_mha", "dream_gqa"):
        t, j = read_safetensors(FIXTURES / case / "loss.safetensors"), golden(case, "loss")
        masked, logits = t["masked_indices"], []
        for who in ("student", "teacher"):
            full = torch.zeros(*masked.shape, t["student_logits_at_masked"].shape[-1])
            full[masked] = t[f"{who}_logits_at_masked"]
            logits.append(full)
        hard = d2f.masked_cross_entropy(logits[0], t["input_ids"], masked, t["p_mask"]).item()
        assert abs(hard - j["loss_hard_labels"]) < 1e-3, (case, hard, j["loss_hard_labels"])
        log_q = logits[1][masked].log_softmax(-1)
        entropy = (-(log_q.exp() * log_q).sum(-1) / t["p_mask"][masked]).mean().item()
        soft = d2f.distillation_loss(*logits, masked, t["p_mask"]).item() + entropy
        assert abs(soft - j["loss_self_align"]) < 1e-3, (case, soft, j["loss_self_align"])


@section("golden")
def test_golden_pipelined_decoding():
    """Released D2F runs: tokens, forwards, and what each forward runs, caches and commits."""
    for case in CASES:
        model = golden_model(case)
        for i, run in enumerate(golden(case, "d2f_sampler")):
            s, trace = run["settings"], []

            def watch(step, trace=trace):
                n_cached, stop, n_final = int(step.n_cached[0]), int(step.stop[0]), int(step.n_final[0])
                trace.append((n_cached, stop, n_final - n_cached, sorted(step.commits[:, 1:].tolist())))

            model.config.eos_id = model.config.pad_id = s["eos_token_id"]
            k = s["block_size"]
            out = d2f.pipelined_decode(
                model,
                run["prompt"],
                s["max_new_tokens"] // k * k,  # the released code drops the rest
                k,
                s["block_add_threshold"],
                s["decoded_token_threshold"],
                s["skip_threshold"],
                Sampling(confidence=CONFIDENCE[s["sampling_strategy"]]),
                watch,
                stop_at_eos=False,
            )
            n = len(run["generated"])
            want = [
                (x["cache_len"], x["input_start"] + x["input_len"], x["newly_cached"], sorted(x["commits"]))
                for x in run["steps"]
            ]
            assert out.raw[0][:n].tolist() == run["generated"], f"{case} run {i}: tokens"
            assert out.forwards == run["num_forwards"], f"{case} run {i}: {out.forwards} forwards"
            assert trace == want, f"{case} run {i}: trace"


@section("golden")
def test_golden_vanilla_decoding():
    """Released LLaDA and Dream samplers: the positions and tokens that each step commits, batches and
    guidance too.
    """
    for case in CASES:
        model, llada = golden_model(case), case.startswith("llada")
        for i, run in enumerate(golden(case, "llada_generate" if llada else "dream_generate")):
            s, steps = run["settings"], []

            def watch(step, steps=steps):
                rows = range(len(step.rows))
                steps.append([[c[1:] for c in step.commits.tolist() if c[0] == b] for b in rows])

            if llada:
                ends = s.get("eos_token_id"), s.get("eot_token_id")
                forbidden = ends[:1] if s.get("logits_eos_inf") else ()
                deferred = ends if s.get("confidence_eos_eot_inf") else ()
                settings = dict(
                    max_new_tokens=s["gen_length"], block_length=s["block_length"], cfg_scale=s["cfg_scale"]
                )
                settings.update(sampling=Sampling(forbidden=forbidden, deferred=deferred))
            else:
                seed = s.get("torch_manual_seed", run.get("torch_manual_seed")) or 0
                settings = dict(
                    max_new_tokens=s["max_new_tokens"], order=s["alg"], sampling=Sampling(seed=seed)
                )
            out = d2f.vanilla_decode(model, run["prompts"], steps=s["steps"], watch=watch, **settings)
            got = [p + r.tolist() for p, r in zip(run["prompts"], out.raw, strict=True)]
            assert got == run["sequences"], f"{case} run {i}: tokens"
            assert steps == run["commits_per_step_per_row"], f"{case} run {i}: commits"
            assert out.forwards == run["num_forwards"] * (2 if settings.get("cfg_scale") else 1), (
                f"{case} run {i}"
            )


# ------------------------------------------------------------------------------------- block-causal attention


@section("mask")
def test_mask_equals_its_definition():
    """True = may attend: own block, earlier blocks, the prompt; a prompt row sees the prompt. Ragged last
    blocks.
    """
    for L, P, k in ((7, 3, 2), (9, 0, 4), (10, 10, 3), (12, 1, 5), (6, 2, 9), (5, 0, 1)):
        mask = d2f.block_causal_mask(L, torch.tensor([P, 0]), k)
        for b, p in enumerate((P, 0)):
            block = [0 if i < p else (i - p) // k + 1 for i in range(L)]
            want = [[block[j] <= block[i] for j in range(L)] for i in range(L)]
            assert mask[b, 0].tolist() == want, (L, p, k)


@section("mask")
def test_block_size_one_is_causal_and_one_block_is_bidirectional():
    """The two ends of block-causal attention on the answer."""
    P, L = 3, 9
    answer = slice(P, L)
    one = d2f.block_causal_mask(L, torch.tensor([P]), 1)[0, 0, answer, answer]
    assert torch.equal(one, torch.ones(6, 6, dtype=torch.bool).tril())
    whole = d2f.block_causal_mask(L, torch.tensor([P]), 6)[0, 0]
    assert whole[answer].all() and not whole[:P, P:].any()


@section("mask")
def test_later_blocks_have_no_gradient_on_earlier_outputs():
    """Causality by gradient: through every layer, an output depends on its own and earlier blocks and on
    nothing else.
    """
    model, P, k, L = random_model(1), 3, 4, 14
    mask = d2f.block_causal_mask(L, torch.tensor([P]), k)
    rope, additive = model.place(L, 0, mask, None)
    for position in (0, 2, 3, 6, 7, 13):
        x = torch.randn(1, L, 32, generator=torch.Generator().manual_seed(0), requires_grad=True)
        h = x
        for block in model.blocks:
            h = block(h, rope, additive)
        h[0, position].sum().backward()
        touched = x.grad[0].abs().sum(-1) > 0
        assert torch.equal(touched, mask[0, 0, position]), position


# ------------------------------------------------------------------------------------------------------- loss


@section("loss")
def test_schedules():
    """released: non-decreasing, 0.2 to 0.7; paper: increasing, 0.3 to 0.7; random: 0.2 to 0.7, unordered."""
    g = torch.Generator().manual_seed(0)
    for schedule, low in (("released", 0.2), ("paper", 0.3), ("random", 0.2)):
        t = d2f.mask_ratios(2000, 6, schedule, g)
        assert low <= t.min() and t.max() <= 0.7 + 1e-6, schedule
        ordered = (t.diff(dim=1) >= 0).all(1).float().mean().item()
        assert ordered == 1 if schedule != "random" else ordered < 0.05, (schedule, ordered)
    raises("schedule 'linear' is unknown", d2f.mask_ratios, 1, 2, "linear")


@section("loss")
def test_corruption_masks_each_block_at_its_ratio():
    """The share of masks in a block is its ratio; the prompt is never masked; other tokens stay."""
    P, k, n = torch.tensor([5] * 4000), 4, 4000
    tokens = torch.randint(0, 17, (n, 13))
    ratios = torch.tensor([0.2, 0.7]).expand(n, 2)
    noisy, masked, p = d2f.corrupt(tokens, P, k, ratios, 17, torch.rand(n, 13))
    share = masked.float().mean(0)
    assert (
        share[:5].sum() == 0
        and (share[5:9] - 0.2).abs().max() < 0.03
        and (share[9:] - 0.7).abs().max() < 0.03
    )
    assert torch.equal(noisy == 17, masked) and torch.equal(noisy[~masked], tokens[~masked])


@section("loss")
def test_distillation_loss_against_a_direct_formula():
    """forward = KL(teacher || student), reverse = KL(student || teacher), over masked tokens, each divided by
    p.
    """
    g = torch.Generator().manual_seed(0)
    s, t = (torch.randn(2, 7, 11, generator=g, dtype=torch.float32) for _ in range(2))
    masked, p = torch.rand(2, 7, generator=g) < 0.5, torch.rand(2, 7, generator=g) * 0.5 + 0.2
    for direction, weights in (("forward", p), ("reverse", p), ("forward", None), ("reverse", None)):
        total, count = 0.0, 0
        for b, i in masked.nonzero().tolist():
            P, Q = t[b, i].softmax(0).tolist(), s[b, i].softmax(0).tolist()
            if direction == "reverse":
                P, Q = Q, P
            total += sum(x * np.log(x / y) for x, y in zip(P, Q, strict=True)) / (
                1 if weights is None else p[b, i].item()
            )
            count += 1
        got = d2f.distillation_loss(s, t, masked, weights, direction).item()
        assert abs(got - total / count) < 1e-5, (direction, got, total / count)
    raises("direction 'both' is unknown", d2f.distillation_loss, s, t, masked, None, "both")


@section("loss")
def test_loss_is_zero_when_the_student_equals_the_teacher():
    """Under the same mask (one block, no prompt) the student is the teacher: no loss; under a block mask
    there is one.
    """
    model = random_model(3)
    tokens, P = torch.randint(0, 17, (3, 12)), torch.zeros(3, dtype=torch.int64)
    for direction in ("forward", "reverse"):
        assert abs(d2f.d2f_loss(model, model, tokens, P, 12, direction=direction)) < 1e-5
    assert d2f.d2f_loss(model, model, tokens, P, 3, "random") > 1e-3


@section("loss")
def test_loss_is_finite_without_masks_and_on_eos_blocks():
    """A block, a row or a whole batch without a masked token gives a finite loss and finite gradients."""
    s = torch.randn(2, 6, 5, requires_grad=True)
    none = torch.zeros(2, 6, dtype=torch.bool)
    loss = d2f.distillation_loss(s, torch.randn(2, 6, 5), none, torch.full((2, 6), 0.3))
    loss.backward()
    assert loss == 0 and s.grad.isfinite().all()
    assert d2f.masked_cross_entropy(s, torch.zeros(2, 6, dtype=torch.int64), none) == 0
    model = random_model(4)
    tokens = torch.full((2, 9), model.config.eos_id)
    assert d2f.d2f_loss(model, random_model(5), tokens, torch.tensor([9, 1]), 4).isfinite()


@section("loss")
def test_no_gradient_reaches_the_teacher():
    """Distillation moves the student only."""
    student, teacher = random_model(6).requires_grad_(True), random_model(7).requires_grad_(True)
    d2f.d2f_loss(student, teacher, torch.randint(0, 17, (2, 10)), torch.tensor([2, 4]), 3).backward()
    assert all(p.grad is None for p in teacher.parameters())
    assert sum(p.grad.abs().sum() for p in student.parameters() if p.grad is not None) > 0


# --------------------------------------------------------------------------------------------------- choosing


@section("choose")
def test_choice_never_takes_a_forbidden_id():
    """Mask, padding and ids beyond the tokenizer are never chosen, greedy or sampled."""
    model = random_model()
    logits = torch.zeros(50, 24)
    logits[:, [17, 19, 20, 23]] = 30.0  # mask, pad, beyond
    logits[:, 4] = 1.0
    for temperature in (0.0, 1.0):
        token, p, _ = d2f.Chooser(model.config, model.device, Sampling(temperature), 1)(
            logits, np.zeros(50, np.int64)
        )
        assert not set(token) & {17, 19, 20, 21, 22, 23}, token
        assert (
            p.max() < 1e-9 if temperature == 0 else True
        )  # the probability is that of the whole distribution


@section("choose")
def test_confidence_measures_against_their_formulas():
    """probability, margin and negative entropy of a small distribution, by hand."""
    model = random_model()
    p = torch.full((1, 24), 1e-30)
    p[0, 2], p[0, 5], p[0, 7] = 0.6, 0.3, 0.1
    want = {
        "probability": 0.6,
        "margin": 0.3,
        "entropy": 0.6 * np.log(0.6) + 0.3 * np.log(0.3) + 0.1 * np.log(0.1),
    }
    for name, value in want.items():
        token, prob, conf = d2f.Chooser(model.config, model.device, Sampling(confidence=name), 1)(
            p.log(), np.zeros(1, np.int64)
        )
        assert token[0] == 2 and abs(prob[0] - 0.6) < 1e-5 and abs(conf[0] - value) < 1e-5, (name, conf)


@section("choose")
def test_the_usual_choice_equals_the_general_one():
    """Greedy choice by probability takes a short way; the long one gives the same tokens and figures."""
    logits = torch.randn((40, 24), generator=torch.Generator().manual_seed(0)) * 3
    logits[7] = logits[7, 0]  # all equal: the first that is allowed
    chooser, rows = d2f.Chooser(random_model().config, torch.device("cpu"), Sampling(), 1), np.zeros(40, int)
    short, chooser.usual = chooser(logits, rows), False
    assert all((a == b).all() for a, b in zip(short, chooser(logits, rows), strict=True))


@section("choose")
def test_sampling_frequencies_and_filters():
    """At temperature 1 draws follow the softmax; top-k and top-p keep the smallest sets, and at least one
    token.
    """
    model, n = random_model(), 20000
    p = torch.tensor([0.5, 0.25, 0.15, 0.1])
    logits = torch.full((n, 24), -100.0)
    logits[:, :4] = p.log()
    rows = np.zeros(n, np.int64)
    for top_p, top_k, want in (
        (None, None, p),
        (0.7, None, p[:2]),
        (0.5, None, p[:1]),
        (None, 3, p[:3]),
        (0.01, 1, p[:1]),
    ):
        token, prob, _ = d2f.Chooser(model.config, model.device, Sampling(1.0, top_p, top_k), 1)(logits, rows)
        got = np.bincount(token, minlength=4)[:4] / n
        want = torch.nn.functional.pad(want / want.sum(), (0, 4 - len(want))).numpy()
        assert np.abs(got - want).max() < 0.02, (top_p, top_k, got)
        assert np.abs(prob - want[token]).max() < 1e-4  # the confidence is the filtered probability


# --------------------------------------------------------------------------------------------------- decoding


@section("decode")
def test_cached_pipelined_decoding_equals_uncached():
    """The block-causal cache is exact: at every step the same window of the answer, the same commits, the
    same book.
    """
    for seed in range(6):
        for shift in (False, True):
            model, traces = random_model(seed, shift=shift), []
            for use_cache in (True, False):
                trace = []

                def watch(s, trace=trace):
                    trace.append(
                        (s.n_final.tolist(), s.n_open.tolist(), s.commits.tolist(), s.tokens.tolist())
                    )

                prompts = random_prompts(seed, (5, 0, 9))
                settings = dict(tau_act=0.5, tau_conf=0.5, watch=watch, use_cache=use_cache)
                d2f.pipelined_decode(model, prompts, 18, 4, **settings)
                traces.append(trace)
            assert traces[0] == traces[1], (seed, shift)


@section("decode")
def test_pipelined_tokens_are_those_of_the_whole_sequence():
    """Each token committed is the argmax of an uncached forward of what stood before, at block boundaries too
    (shift).
    """
    P, k, boundaries = 6, 4, 0
    for seed in range(6):
        model = random_model(seed, shift=bool(seed % 2))
        before = [np.full((1, P + 20), 17)]
        before[0][0, :P] = random_prompts(seed, [P])[0]

        committed = []

        def watch(step, model=model, before=before, committed=committed):
            mask = d2f.block_causal_mask(P + 20, torch.tensor([P]), k)
            logits = d2f.align(model(torch.from_numpy(before[0]), mask=mask), model.config.shift)
            for _, position, token in step.commits:
                assert token == logits[0, position, :19].index_fill(0, torch.tensor(17), -9e9).argmax(), (
                    position
                )
            before[0] = step.tokens.copy()
            committed.extend((step.commits[:, 1] - P) % k)

        d2f.pipelined_decode(model, before[0][0, :P], 20, k, tau_conf=0.5, watch=watch, stop_at_eos=False)
        boundaries += committed.count(0)
    assert boundaries > 10, boundaries


@section("decode")
def test_batched_decoding_equals_single():
    """Each row of a ragged batch decodes as if alone, greedy and (with its own generator) sampled, in every
    decoder.
    """
    for seed in range(4):
        causal = seed % 2 == 1
        model = random_model(seed, causal=causal, shift=causal)
        prompts = random_prompts(seed, (4, 11, 1, 0, 7, 4))
        for temperature in (0.0, 0.8):
            for name, decode in decoders(model, 13).items():
                together = decode(prompts, sampling=Sampling(temperature, seed=10))
                alone = [
                    decode(p, sampling=Sampling(temperature, seed=10 + b)) for b, p in enumerate(prompts)
                ]
                assert together.answers == [a.answers[0] for a in alone], (seed, temperature, name)
                assert together.row_forwards.tolist() == [a.forwards for a in alone], (
                    seed,
                    temperature,
                    name,
                )


@section("decode")
def test_confidence_ties_go_to_the_left():
    """Without a prompt all masks look alike; rounding must not decide which comes first, or batches would
    differ.
    """
    c = np.array([[0.5, 0.7, -np.inf, 0.7 + 1e-7, 0.1, -np.inf], [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]])
    assert d2f.ranks(c).tolist() == [[2, 0, 4, 1, 3, 5], [5, 4, 3, 2, 1, 0]]
    block, must = np.repeat([0, 1], 6), np.array([True, True])
    assert d2f.accept(np.zeros(12), c.ravel(), 0.9, block, must).nonzero()[0].tolist() == [1, 11]


@section("decode")
def test_any_prompt_and_answer_length():
    """Prompts of 0, 1 and odd lengths; answers of 1, k-1, k, k+1; k larger than the answer: all end, of the
    right length.
    """
    for shift in (False, True):
        model = random_model(5, shift=shift, causal=shift)
        for P in (0, 1, 5):
            for A in (1, 3, 4, 5, 9):
                for name, decode in decoders(model, A).items():
                    out = decode(random_prompts(P, [P]))
                    a = out.answers[0]
                    assert len(a) == A or a[-1] == model.config.eos_id, (shift, P, A, name, a)
    out = d2f.pipelined_decode(random_model(5), random_prompts(0, [3]), 5, 64)
    assert len(out.raw[0]) == 5 and (out.raw[0] != 17).sum() >= len(out.answers[0])


@section("decode")
def test_untrained_models_terminate_without_masks():
    """Thresholds of 0, 0.5 and 1 at temperature 0 and 1 on untrained weights: decoding ends, no mask, pad or
    unknown id.
    """
    flat, peaked = random_model(8, spread=0.01), random_model(9, spread=30.0)
    for model in (flat, peaked, random_model(10, shift=True)):
        for tau in (0.0, 0.5, 1.0):
            for temperature in (0.0, 1.0):
                out = d2f.pipelined_decode(
                    model, random_prompts(1, (3, 6)), 11, 4, tau, tau, tau, Sampling(temperature)
                )
                assert out.forwards <= 3 * 11 + 3, out.forwards
                for a in out.answers:
                    assert not set(a) & {17, 19, 20, 21, 22, 23} and len(a) > 0, a


@section("decode")
def test_one_block_at_a_time_and_single_state():
    """tau_add 1 never has two unfinished blocks; tau_add = tau_act has no semi-activated block; the default
    has both.
    """

    def most(**thresholds):
        """Over several models, the most blocks that were unfinished, and semi-activated, in one forward."""
        unfinished, semi = [], []

        def watch(step):
            P, n = step.prompt_len[0], step.n_open[0]
            before = step.tokens.copy()
            before[0, step.commits[:, 1]] = 17
            unfinished.append((before[0, P : P + n * 4].reshape(n, 4) == 17).any(1).sum())
            semi.append(n - step.full[0, :n].sum())

        for seed in range(10):
            settings = dict(tau_conf=0.6, watch=watch, stop_at_eos=False, **thresholds)
            d2f.pipelined_decode(random_model(seed), random_prompts(seed, [5]), 24, 4, **settings)
        return max(unfinished), max(semi)

    assert most(tau_add=1.0) == (1, 0)
    assert most(tau_add=0.5, tau_act=0.5)[1] == 0
    unfinished, semi = most(tau_add=0.1, tau_act=1.0)
    assert unfinished > 1 and semi > 0


@section("decode")
def test_committed_and_cached_tokens_never_change():
    """A token is decided once; what is final is a prefix without masks; at most one block opens a step."""
    for seed in range(5):
        model, history = random_model(seed, shift=bool(seed % 2)), []

        def watch(step, history=history):
            history.append((step.tokens[0].copy(), int(step.n_final[0]), int(step.n_open[0])))
            assert step.full[0, 0] and not step.full[0, step.n_open[0] :].any()

        settings = dict(tau_conf=0.5, tau_act=0.5, stop_at_eos=False, watch=watch)
        d2f.pipelined_decode(model, random_prompts(seed, [5]), 21, 4, **settings)
        for (t0, f0, o0), (t1, f1, o1) in zip(history, history[1:], strict=False):
            assert (t0[t0 != 17] == t1[t0 != 17]).all() and f1 >= f0 and o1 - o0 in (0, 1)
            assert not (t1[:f1] == 17).any()


@section("decode")
def test_autoregressive_equals_a_loop_without_cache():
    """The cached baseline is greedy decoding: the argmax of the whole sequence, one token at a time."""
    model = random_model(12, causal=True, shift=True)
    for prompt in random_prompts(3, (1, 6)):
        tokens = list(prompt)
        for _ in range(9):
            logits = model(torch.tensor([tokens]))[0, -1]
            logits[[17, 19, 20, 21, 22, 23]] = -np.inf
            tokens.append(int(logits.argmax()))
            if tokens[-1] == 18:
                break
        assert d2f.autoregressive_decode(model, prompt, 9).answers[0] == tokens[len(prompt) :]
    raises("needs a model that is causal", d2f.autoregressive_decode, random_model(), prompt, 3)


@section("decode")
def test_caches_of_one_block_refresh_agree_with_no_cache():
    """While every forward re-runs everything that can change, the approximate caches are exact: one step a
    block.
    """
    model = random_model(13)
    for cache in ("prefix", "dual"):
        runs = [
            d2f.cached_decode(model, random_prompts(4, (6, 3)), 12, 4, c, tau_conf=0.0)
            for c in ("none", cache)
        ]
        assert runs[0].answers == runs[1].answers and runs[0].forwards == runs[1].forwards, cache


@section("decode")
def test_watching_changes_nothing():
    """A decode that is watched returns what it returns unwatched."""
    model = random_model(14, causal=True, shift=True)
    for name, decode in decoders(model, 12).items():
        steps = []
        a, b = decode(random_prompts(5, (4, 2))), decode(random_prompts(5, (4, 2)), watch=steps.append)
        assert a.answers == b.answers and a.forwards == b.forwards == len(steps), name


# -------------------------------------------------------------------------------------------------------- EOS


@section("decode")
def test_a_window_of_unlike_rows_has_each_rows_own_mask():
    """Rows of different prompts may happen to run over the same positions: each keeps its own sight."""
    prompts = random_prompts(0, (5, 9))
    book = d2f.Book(random_model(), prompts, 8, d2f.see_blocks(4), None, None, width=8)
    tokens, at, mask = book.window(book.tokens, np.array([0, 0]), np.array([13, 13]))
    expected = d2f.block_causal_mask(13, torch.tensor([5, 9]), 4)
    assert tokens.shape == (2, 13) and (np.asarray(at) == np.arange(13)).all()
    assert mask.shape == expected.shape and (mask == expected).all()


@section("decode")
def test_padded_windows_change_nothing():
    """Static pads windows to few sizes, so that they can be compiled: the same answers and forwards of every
    decoder, without a compiler and with torch.compile's own front end.
    """
    for shift, causal in ((False, False), (True, False), (True, True)):
        model = random_model(3, shift=shift, causal=causal)
        for compile in (None, functools.partial(torch.compile, backend="eager")):
            static = tiny_models.Static(model, compile, sizes=(1, 4, 8, 16, 64))
            for prompts in (random_prompts(1, (5, 9, 1)), random_prompts(2, (6,))):
                for name, decode in decoders(model, 19).items():
                    plain = decode(prompts)
                    padded = decode.func(static, prompts, **decode.keywords)
                    assert padded.answers == plain.answers and padded.forwards == plain.forwards, name


@section("decode")
def test_compiled_windows_change_nothing():
    """The same with torch.compile's default compiler; a compiler that fails is named and done without."""
    model, prompts = random_model(3, shift=True), random_prompts(2, (6,))
    plain = d2f.pipelined_decode(model, prompts, 19, 4, tau_conf=0.6)

    def broken(f):
        def run(*args):
            raise RuntimeError("no compiler here\nand more")

        return run

    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        out = d2f.pipelined_decode(tiny_models.Static(model, broken), prompts, 19, 4, tau_conf=0.6)
    assert said.getvalue() == "layers is not compiled: RuntimeError: no compiler here\n"
    assert out.answers == plain.answers
    if not (shutil.which("g++") or shutil.which("clang++")):
        raise Skip("torch.compile needs a C++ compiler")
    static = tiny_models.Static(model, torch.compile, sizes=(64,))
    out = d2f.pipelined_decode(static, prompts, 19, 4, tau_conf=0.6)
    assert out.answers == plain.answers and static.compiled["layers"] != model.layers, "it fell back"


@section("decode")
def test_logits_in_parts_change_nothing():
    """However few logits may be held at a time, answers are the same, greedy and sampled."""
    model, prompts, most = random_model(4), random_prompts(3, (7, 2)), d2f.LOGITS
    try:
        answers = []
        for d2f.LOGITS in (most, 24 * 3, 1):
            answers.append(d2f.pipelined_decode(model, prompts, 13, 4, tau_conf=0.6).answers)
        assert answers[0] == answers[1] == answers[2]
    finally:
        d2f.LOGITS = most


@section("decode")
def test_cost_of_a_token_by_answer_length():
    """In positions, not seconds: an answer eight times as long costs D2F, the wave and autoregression about
    as much a token, and the uncached decoder eight times as much.
    """
    model, causal = random_model(5, max_len=600), random_model(5, max_len=600, causal=True, shift=True)
    core = tiny_models.RecurrentConfig(25, 24, 24, 24, d_model=32, max_len=600)
    core = tiny_models.RecurrentDepth(core).init_weights(torch.Generator().manual_seed(0))
    free, wave = Sampling(forbidden=(18,)), rs.Wave(inner=2, exit="fixed")
    costs = {}
    for n in (64, 512):
        for name, out in {
            "ar": d2f.autoregressive_decode(causal, [[1]], n, free),
            "none": d2f.cached_decode(model, [[1]], n, cache="none", tau_conf=1.0, sampling=free),
            "d2f": d2f.pipelined_decode(model, [[1]], n, 8, tau_conf=1.0, sampling=free),
            "wave": rs.wavefront_decode(core, [[1]], n, wave, r=4),
        }.items():
            assert len(out.answers[0]) == n, name
            costs.setdefault(name, []).append(out.positions / n)
    ratio = {name: long / short for name, (short, long) in costs.items()}
    assert all(0.8 < ratio[name] < 1.2 for name in ("ar", "d2f", "wave")) and ratio["none"] > 7.5, ratio


@section("eos")
def test_stopping_at_eos_changes_no_text_and_saves_forwards():
    """Blocks behind an EOS are not computed; the text is that of the run that decodes on."""
    saved = 0
    for seed in range(40):
        model = random_model(seed, shift=bool(seed % 2))
        prompts = random_prompts(seed, (5, 2, 8))
        runs = [
            d2f.pipelined_decode(model, prompts, 24, 4, 0.1, 0.5, 0.4, stop_at_eos=stop)
            for stop in (True, False)
        ]
        assert runs[0].answers == runs[1].answers, seed
        saved += runs[1].forwards - runs[0].forwards
        assert (runs[0].row_forwards <= runs[1].row_forwards).all(), seed
        assert runs[0].positions <= runs[1].positions, seed
    assert saved > 0, "no seed saved a forward"


@section("eos")
def test_no_block_opens_behind_a_committed_eos():
    """From the forward after an EOS was committed on, nothing behind its block is run."""
    seen = 0
    for seed in range(40):
        model, limit = random_model(seed, shift=bool(seed % 2)), [99]

        def watch(step, limit=limit):
            nonlocal seen
            assert step.n_open[0] <= limit[0], (step.n_open, limit)
            answer = step.tokens[0, step.prompt_len[0] :]
            if (answer == 18).any():
                limit[0] = int((answer == 18).argmax()) // 4 + 1
                seen += (answer[limit[0] * 4 :] == 17).any() and (answer[: limit[0] * 4] == 17).any()

        d2f.pipelined_decode(model, random_prompts(seed, [5]), 24, 4, 0.0, 0.5, 0.4, watch=watch)
    assert seen > 0, "no seed committed an EOS with work left on both sides of it"


@section("eos")
def test_eos_in_a_later_block_does_not_stop_earlier_blocks():
    """Everything before the first EOS is decided, even when that EOS was committed first."""
    late = 0
    for seed in range(40):
        model, first = random_model(seed), []

        def watch(step, first=first):
            P = step.prompt_len[0]
            if not first and (step.tokens[0, P:] == 18).any():
                e = (step.tokens[0, P:] == 18).argmax()
                first.append(bool((step.tokens[0, P : P + e] == 17).any()))

        out = d2f.pipelined_decode(model, random_prompts(seed, [5]), 24, 4, 0.1, 0.5, 0.4, watch=watch)
        assert 17 not in out.answers[0] and 18 not in out.answers[0][:-1], seed
        late += first == [True]
    assert late > 0, "no seed committed an EOS ahead of undecided tokens"


# -------------------------------------------------------------------------------------------------- bad input


@section("errors")
def test_bad_input_gives_one_sentence():
    """Each wrong argument is refused with its value and the limit."""
    model, p = random_model(), [1, 2, 3]
    decode = functools.partial(d2f.pipelined_decode, model)
    raises("the batch is empty", decode, [], 8, 4)
    raises(
        r"prompt 0 has 250 tokens and max_new_tokens is 8; together at most 256", decode, [[1] * 250], 8, 4
    )
    raises("tau_add is 1.5; it must be between 0 and 1", decode, p, 8, 4, tau_add=1.5)
    raises("tau_act is -1", decode, p, 8, 4, tau_act=-1)
    raises("tau_conf is nan", decode, p, 8, 4, tau_conf=float("nan"))
    raises("the block size is 0", decode, p, 8, 0)
    raises("max_new_tokens is 0", decode, p, 0, 4)
    raises("dtype float64", decode, [[0.5, 1.0]], 8, 4)
    raises("holds the mask id 17", decode, [1, 17], 8, 4)
    raises("holds ids 1 to 22; this model knows 0 to 19", decode, [1, 22], 8, 4)
    raises("temperature is -1", Sampling, -1)
    raises("top_p is 0", Sampling, 1, 0)
    raises("top_k is 0", Sampling, 1, None, 0)
    raises("confidence 'x' is unknown", Sampling, confidence="x")
    raises("order 'best' is unknown", d2f.vanilla_decode, model, p, 8, order="best")
    raises("steps is 1; 2 blocks of 4 need at least one step each", d2f.vanilla_decode, model, p, 8, 4, 1)
    raises("cache 'both' is unknown", d2f.cached_decode, model, p, 8, cache="both")
    raises("each must be a multiple", TransformerConfig, 24, 20, 17, 18, 19, n_heads=3)


# ------------------------------------------------------------------------------------------------------ files


@section("files")
def test_safetensors_round_trip_and_damage():
    """What is written is read; truncated, overlong-header and unknown-dtype files are refused by name."""
    with tempfile.TemporaryDirectory() as d:
        path = Path(d) / "x.safetensors"
        tensors = {
            "a": torch.randn(3, 5),
            "b": torch.arange(7),
            "c": torch.tensor([True, False]),
            "d": torch.randn(2).bfloat16(),
        }
        tiny_models.write_safetensors(path, tensors)
        got = read_safetensors(path)
        assert all(torch.equal(got[n], t) and got[n].dtype == t.dtype for n, t in tensors.items())
        data = path.read_bytes()
        path.write_bytes(data[:-3])
        raises("truncated or damaged", read_safetensors, path)
        path.write_bytes((10**6).to_bytes(8, "little") + data[8:])
        raises("the header ends at byte 1000008 but the file has", read_safetensors, path)
        path.write_bytes(data.replace(b'"F32"', b'"F99"'))
        raises("a has dtype F99", read_safetensors, path)


@section("files")
def test_checkpoint_round_trip():
    """A tiny checkpoint gives back config and weights, and the caller's extra fields."""
    with tempfile.TemporaryDirectory() as d:
        model = random_model(3, qkv_bias=True, n_kv_heads=1)
        save_checkpoint(f"{d}/m", model, alphabet="01")
        again = load_checkpoint(f"{d}/m")
        assert again.config == model.config and tiny_models.read_config(f"{d}/m")["alphabet"] == "01"
        assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))
        save_checkpoint(f"{d}/m", random_model(4))
        assert sorted(os.listdir(d)) == ["m"], "a save leaves nothing else behind"


KILLED_SAVES = {  # where the process dies: Python that arranges it
    "while writing": """
        def write(path, tensors):
            open(path, "wb").write(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
        tiny_models.write_safetensors = write
    """,
    "between the renames": """
        stock, calls = pathlib.Path.rename, []
        def rename(old, new):
            calls.append(1)
            if len(calls) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            stock(old, new)
        pathlib.Path.rename = rename
    """,
}


@section("files")
def test_a_killed_save_leaves_the_previous_checkpoint():
    """Killed while writing or between the two renames, the folder still loads as it was."""
    with tempfile.TemporaryDirectory() as d:
        model, path = random_model(3), Path(d) / "m"
        save_checkpoint(path, model)
        for where, arrange in KILLED_SAVES.items():
            code = "import os, pathlib, signal, sys, tiny_models, test_all\n" + textwrap.dedent(arrange)
            code += "tiny_models.save_checkpoint(sys.argv[1], test_all.random_model(9))\n"
            assert run("-c", code, path).returncode == -signal.SIGKILL, where
            assert torch.equal(load_checkpoint(path).lm_head.weight, model.lm_head.weight), where


@section("files")
def test_wrong_checkpoints_are_refused_by_name():
    """No folder, unknown type, missing, unexpected, mis-shaped tensors, a missing or truncated file."""
    with tempfile.TemporaryDirectory() as d:
        folder = Path(d) / "m"
        raises("no checkpoint in", load_checkpoint, folder)
        save_checkpoint(folder, random_model(3))
        config, weights = json.loads((folder / "config.json").read_text()), folder / "model.safetensors"
        tensors = {n: t.clone() for n, t in read_safetensors(weights).items()}

        def rewrite(change):
            tiny_models.write_safetensors(weights, change(dict(tensors)))

        rewrite(lambda t: {n: x for n, x in t.items() if n != "norm.weight"})
        raises("lacks 1 tensors: norm.weight", load_checkpoint, folder)
        rewrite(lambda t: {**t, "extra": torch.zeros(1)})
        raises("has unexpected 1 tensors: extra", load_checkpoint, folder)
        rewrite(lambda t: {**t, "norm.weight": torch.zeros(3)})
        raises(r"norm.weight: shape \[3\] found where \[32\] was expected", load_checkpoint, folder)
        rewrite(lambda t: t)
        weights.write_bytes(weights.read_bytes()[:-9])
        raises("truncated or damaged", load_checkpoint, folder)
        weights.unlink()
        raises("model.safetensors does not exist", load_checkpoint, folder)
        (folder / "config.json").write_text(json.dumps({**config, "model_type": "mystery"}))
        raises("model_type 'mystery' is unknown", load_checkpoint, folder)
        (folder / "config.json").write_text("{")
        raises("is not valid JSON", load_checkpoint, folder)


# ----------------------------------------------------------------------------------------- tasks and training


@section("tasks")
def test_addition_problems_are_right_and_held_out():
    """Answers are the sums, written as the demo writes them; no problem of one split is in another."""
    tokenizer, rng = CharTokenizer(), np.random.default_rng(0)
    task = train_tiny.Addition(5, 0.3)
    for split in ("train", "validation", "test"):
        prompts, answers = train_tiny.sample(task, tokenizer, rng, 200, split, 24)
        for prompt, answer in zip(prompts, answers, strict=True):
            text = tokenizer.decode(prompt)
            a, b = (int("".join(f[i] for f in reversed(text.split(";")[:-1]))) for i in (0, 2))
            assert text == tiny_models.addition_prompt(a, b, 5)
            assert tokenizer.decode(answer, eos="$") == tiny_models.addition_answer(a, b, 5) + "$$$$"
            assert tiny_models.read_sum(tokenizer.decode(answer)) == a + b
            digits = np.array([[int(f[i]) for f in text.split(";")[:-1]] for i in (0, 2)]).reshape(1, -1)
            code = train_tiny.split_of(digits)[0]
            assert {"test": code == 0, "validation": code == 1, "train": code > 1}[split]
    raises("trained on numbers of 0 to 5 digits", tiny_models.addition_prompt, 123456, 1, 5)


@section("tasks")
def test_ledger_problems_are_right():
    """Each answer field is the running balance mod 100."""
    tokenizer = CharTokenizer()
    prompts, answers = train_tiny.sample(
        train_tiny.Ledger(6), tokenizer, np.random.default_rng(0), 50, "train", 28
    )
    for prompt, answer in zip(prompts, answers, strict=True):
        balance, fields = 0, []
        for entry in tokenizer.decode(prompt).split(";")[:-1]:
            balance = (balance + int(entry)) % 100
            fields.append(f"={balance:02d};")
        assert tokenizer.decode(answer, eos="$") == "".join(fields) + "$$$$"


@section("tasks")
def test_counter_programs_are_right():
    """The answers are what the demo's own interpreter says, last value first; no split shares a program."""
    task, rng, seen = train_tiny.Counter(6), np.random.default_rng(0), {}
    tokenizer = CharTokenizer(task.alphabet)
    assert rs.run_program("3+++-~") == "145543" and rs.run_program("0--4") == "4000"
    for split in ("train", "validation", "test"):
        prompts, answers = train_tiny.sample(task, tokenizer, rng, 100, split, 7)
        seen[split] = {tokenizer.decode(p) for p in prompts}
        for prompt, answer in zip(prompts, answers, strict=True):
            program = tokenizer.decode(prompt)
            assert program[0].isdigit() and program[-1] == "="
            assert tokenizer.decode(answer, eos="$") == rs.run_program(program[:-1]) + "$"
    assert not seen["train"] & seen["test"] and not seen["validation"] & seen["test"]


@section("tasks")
def test_examples_stand_before_the_problem():
    """A few-shot prompt is solved training problems, then the question; shots 0 is the question alone."""
    task, tokenizer = train_tiny.Addition(3), CharTokenizer()
    prompts, answers = train_tiny.sample(task, tokenizer, np.random.default_rng(0), 20, "test", 16, shots=2)
    assert prompts.shape == (20, 2 * 24 + 12) and answers.shape == (20, 16)
    for prompt, answer in zip(prompts, answers, strict=True):
        text = tokenizer.decode([*prompt, *answer], eos="$").rstrip("$")
        for i in range(3):
            question, solution = text[24 * i : 24 * i + 12], text[24 * i + 12 : 24 * i + 24]
            a, b = (int(question[j::4][::-1]) for j in (0, 2))
            assert tiny_models.addition_answer(a, b, 3) == solution, (question, solution)


ROWS = """autoregressive, KV cache
teacher, vanilla, one token a step
teacher, vanilla, half the steps
teacher, vanilla, a quarter of the steps
teacher, threshold-parallel, no cache
teacher, Fast-dLLM prefix cache
teacher, Fast-dLLM dual cache
D2F without distillation, larger blocks
D2F, one block at a time, k 4
D2F, one block at a time, larger blocks
D2F, pipelined, k 4
D2F, pipelined, larger blocks""".splitlines()


@section("tasks")
def test_programs_grow_and_their_batches_shrink():
    """From the first length to the full one by half of training, equal tokens a step; then some are short."""
    r = train_tiny.RecurrentRecipe(train_tiny.Counter(12), steps=(80,), batch=8)
    with tempfile.TemporaryDirectory() as d:
        batches = list(itertools.islice(train_tiny.RecurrentLab(r, d, "cpu").data(0), 80))
    lengths, rows = (
        [f(tokens, P) for tokens, P in batches] for f in (lambda t, P: int(P[0]) - 1, lambda t, P: len(t))
    )
    assert lengths[0] == r.shortest and lengths[:41] == sorted(lengths[:41]) and lengths[40] == 12
    assert min(lengths[41:]) >= r.shortest and 4 < sum(n < 12 for n in lengths[41:]) < 20
    for n, m, (tokens, P) in zip(lengths, rows, batches, strict=True):
        assert m == 8 * 13 // (n + 1) and tokens.shape == (m, 2 * (n + 1)) and len(P) == m


@section("tasks")
def test_training_in_bfloat16_learns():
    """What a GPU does: every loss under autocast is finite and falls, and weights stay in float32."""
    r = train_tiny.Recipe(train_tiny.Addition(2), 4, shots=1, batch=8)
    with tempfile.TemporaryDirectory() as d:
        lab = train_tiny.Lab(r, d, "cpu", threads=1)
        teacher, seen = lab.fresh(causal=False), {}
        losses = {
            "autoregressive": (lab.fresh(causal=True), train_tiny.autoregressive_loss),
            "teacher": (lab.fresh(causal=False), train_tiny.teacher_loss),
            "student": (lab.fresh(causal=False), lambda m, x, P: d2f.d2f_loss(m, teacher, x, P, 4)),
        }
        for name, (model, loss) in losses.items():
            values = seen[name] = []

            def noted(*batch, model=model, loss=loss, values=values):
                values.append(loss(model, *batch))
                return values[-1]

            data = lab.data(0)
            train_tiny.fit(model, noted, data, 30, 3e-3, name, lambda: 0.0, low=True)
            assert all(p.dtype == torch.float32 for p in model.parameters())
            early, late = (torch.stack(v).mean().item() for v in (values[:5], values[-5:]))
            assert np.isfinite(late) and late < early, (name, early, late)


@section("cli")
def test_quick_run_prints_every_row_and_a_second_run_reuses_its_phases():
    """`train_tiny.py --quick` end to end: every row of both papers, the written tables, reuse; then the demos
    decode with its models.
    """
    with tempfile.TemporaryDirectory() as d:
        first = run("train_tiny.py", "--quick", "--out", d, "--threads", 1)
        assert first.returncode == 0, first.stderr[-2000:]
        table = (Path(d) / "quick" / "addition-3" / "table.md").read_text()
        assert table in first.stdout
        for row in ROWS:
            assert row in table, row
        second = run("train_tiny.py", "--quick", "--out", d, "--threads", 1, "--only", "student")
        assert second.returncode == 0 and "student: reusing" in second.stdout, second.stdout
        other = run(
            "train_tiny.py", "--quick", "--out", d, "--threads", 1, "--only", "autoregressive", "--seed", 1
        )
        assert "was made by another recipe; training anew" in other.stdout, other.stdout
        models = f"{d}/quick/addition-3"
        for method in d2f.METHODS:
            demo = run("d2f.py", 12, 9, "--out", models, "--method", method)
            assert demo.returncode == 0 and "12 + 9 =" in demo.stdout and "\033" not in demo.stdout, (
                demo.stderr
            )
        trace = run("d2f.py", 12, 9, "--out", models, "--trace")
        assert re.search(r"1  positions +0 to +16  cached +12  commits", trace.stdout), trace.stdout
        wrong = run("d2f.py", 1234, 9, "--out", models)
        assert wrong.returncode == 1 and "trained on numbers of 0 to 3 digits" in wrong.stderr
        check_recurrent_half(d, first.stdout)
        bench = run("train_tiny.py", "--quick", "--bench", "--out", d, "--threads", 1)
        text = (Path(d) / "quick" / "bench.md").read_text()
        assert bench.returncode == 0 and text in bench.stdout, bench.stderr[-2000:]
        for line in (
            "answers of a batch equal to single ones, of 8, D2F, k 16: 8.00",
            "answers of a batch equal to single ones, of 8, wave, r' 1: 8.00",
            "D2F beats threshold-parallel decoding from",
            "bare forward / pipelined step",
            "bare loss and gradient / training step, teacher",
            "|ms a token at batch 1|network|sampler|before and after|",
        ):
            assert line in text, line
        shape = run("train_tiny.py", "--quick", "--bench", "--full-shape", "--device", "cpu")
        assert re.search(r"eager: \d+\.\d forwards/s, \d+% of the", shape.stdout), shape.stderr[-2000:]


@section("cli")
def test_a_table_over_seeds_lists_every_claim_and_marks_what_is_missed():
    """train_tiny.seeds_table: one line a claim, one column a seed; --seeds 0 is refused in one sentence."""
    runs = [[train_tiny.Claim("exact", x, 0.98), train_tiny.Claim("speed", 4, 3.5, "k 8")] for x in (1, 0.5)]
    assert train_tiny.seeds_table(runs).splitlines()[2:] == [
        "|exact|0.98|1.00|0.50 NOT MET|",
        "|speed|3.50|4.00|4.00|",
    ]
    assert str(runs[1][1]) == "- speed (k 8): 4.00 (claim: at least 3.50)"
    assert str(runs[1][0]) == "- exact: 0.50 (claim: at least 0.98; NOT MET)"
    for option, value, limit in (("--seeds", 0, "at least 1"), ("--seed", -1, "between 0 and 4294967295")):
        p = run("train_tiny.py", "--quick", option, value)
        assert p.returncode == 1 and p.stderr.strip() == f"{option} is {value}; it must be {limit}", p.stderr


def check_recurrent_half(d: str, printed: str):
    """The second paper's rows, and its demo, of a quick run under d."""
    table = (Path(d) / "quick" / "counter-4" / "table.md").read_text()
    assert table in printed
    rows = [f"|static, r {r}|" for r in (1, 2, 4, 6, 8, 16, 32, 64)]
    rows += ["full cache", "adaptive", "speculative", "wave, r' 1", "wave, r' 2, beta 0.5", "wave, r' 4"]
    for row in rows:
        assert row in table, row
    model = f"{d}/quick/counter-4/recurrent"
    demo = run("recurrent_sampler.py", "3+-", "--model", model)
    assert demo.returncode == 0 and "values, last first: " in demo.stdout, demo.stderr
    wrong = run("recurrent_sampler.py", "3+-++", "--model", model)
    assert wrong.returncode == 1 and "5 instructions; at most 4" in wrong.stderr, wrong.stderr
    missing = run("recurrent_sampler.py", "3+-", "--model", f"{d}/none")
    assert missing.returncode == 1 and "train_tiny.py --only recurrent" in missing.stderr


@section("cli")
def test_an_interrupt_loses_at_most_the_current_phase():
    """Ctrl-C in the second phase: a clear last line, and the next run goes on from the first."""
    with tempfile.TemporaryDirectory() as d:
        args = ["train_tiny.py", "--quick", "--out", d, "--threads", "1"]
        steps = ["--steps", "20", "5000", "20", "20"]
        line = [sys.executable, *args, *steps]
        p = start(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        saved = Path(d) / "quick" / "addition-3" / "autoregressive"
        deadline = time.time() + 120
        while not saved.exists() and time.time() < deadline:
            time.sleep(0.05)
        time.sleep(1)
        p.send_signal(signal.SIGINT)
        text = p.communicate(timeout=60)[0]
        assert p.returncode == 1 and text.strip().splitlines()[-1].startswith(
            "interrupted: finished phases are kept"
        ), text
        again = run(*args, "--only", "autoregressive", *steps)
        assert "autoregressive: reusing" in again.stdout, again.stdout + again.stderr


@section("cli")
def test_the_demo_without_models_names_the_command_that_makes_them():
    """One sentence, exit status 1."""
    p = run("d2f.py", 1, 2, "--out", "no/such/folder")
    assert p.returncode == 1 and "python train_tiny.py" in p.stderr and "Traceback" not in p.stderr


# ------------------------------------------------------------------------ recurrent depth and the wavefront

HUGINN = ("huginn_a",)
ZERO = rs.Sampling(init_scale=0.0)


@functools.cache
def huginn(case):
    """(model, samplers.json, its tensors, forward's tensors) of a reference case."""
    folder = FIXTURES / case
    runs = json.loads((folder / "samplers.json").read_text())
    tensors = [
        tiny_models.read_safetensors(folder / f"{name}.safetensors") for name in ("samplers", "forward")
    ]
    return tiny_models.load_checkpoint(folder / "model"), runs, *tensors


class patched:
    """with patched(thing, name, value): the attribute has another value inside."""

    def __init__(self, thing, name, value):
        self.thing, self.name, self.value = thing, name, value

    def __enter__(self):
        self.old = getattr(self.thing, self.name)
        setattr(self.thing, self.name, self.value)

    def __exit__(self, *_):
        setattr(self.thing, self.name, self.old)


def fixed_start(model, settings, vector):
    """Every initial state (and noise) of the model is the reference run's: zeros, or one vector."""
    vector = torch.zeros_like(vector) if settings["initial_state"] == "zeros" else vector
    return patched(model, "initial_state", lambda B, T, generator=None: vector.expand(B, T, -1))


def tiny_recurrent(seed=0, **changes):
    """A random RecurrentDepth whose predictions vary: larger embeddings, biases that are not zero."""
    sizes = dict(vocab_size=24, n_tokens=22, eos_id=20, pad_id=21, d_model=32, d_mlp=48, max_len=64)
    generator = torch.Generator().manual_seed(seed)
    model = tiny_models.RecurrentDepth(tiny_models.RecurrentConfig(**(sizes | changes))).init_weights(
        generator
    )
    for name, p in model.named_parameters():
        p.requires_grad_(False)
        if "qk_bias" in name:
            p.normal_(0.0, 0.5, generator=generator)
        else:
            p.mul_(3.0 if "norm" not in name else 1.0)
    model.adapter.weight[:, : model.config.d_model] *= 0.3  # so that states settle, as trained ones do
    return model.eval()


def recurrent_prompts(seed=0, lengths=(5, 1, 9, 3)):
    return random_prompts(seed, lengths, 20)


def run_decoder(name, model, prompts, n, sampling=None, watch=None):
    """One of the four samplers with settings small enough for a test."""
    if name == "wavefront":
        return rs.wavefront_decode(model, prompts, n, rs.Wave(inner=2, eps=0.1), 6, 1, sampling, watch)
    if name == "noisy wavefront":
        wave = rs.Wave(inner=1, eps=0.2, beta=0.5, headway=2, max_wave=5, continuous=True)
        return rs.wavefront_decode(model, prompts, n, wave, 6, 1, sampling, watch)
    if name == "adaptive":
        return rs.adaptive_decode(model, prompts, n, 8, 0.1, True, sampling, watch)
    if name == "speculative":
        return rs.speculative_decode(model, prompts, n, 6, 2, 3, 1.0, sampling, watch)
    return rs.autoregressive_decode(model, prompts, n, 5, 1, sampling, watch)


DECODERS = ("autoregressive", "adaptive", "speculative", "wavefront", "noisy wavefront")


def refuses(message, call, *args, **kwargs):
    """The call must raise a ValueError that holds this text."""
    raises(re.escape(message), call, *args, **kwargs)


# ---------------------------------------------------------------------------------- against the released code


@section("recurrent")
def test_huginn_forward_matches_released():
    """P, R and C agree with the released model at several depths: norms, ln_f twice, interleaved RoPE."""
    for case in HUGINN:
        model, _, _, t = huginn(case)
        w = model.window(t["ids_0"].shape[1])
        e, z = model.embed(t["ids_0"], w), t["s0_0"]
        assert torch.allclose(e, t["prelude_out_0"], atol=1e-4), case
        for r in range(1, 33):
            z = model.recur(z, e, w)
            if r == 1:
                assert torch.allclose(z, t["state_0_after_1"], atol=1e-4), case
            if f"logits_0_r{r}" not in t:
                continue
            error = (model.decode(z, w) - t[f"logits_0_r{r}"]).abs().max()
            assert error < 3e-3, f"{case}, r = {r}: logits differ by {error}"
            if f"latents_0_r{r}" in t:
                assert torch.allclose(model.norm(z), t[f"latents_0_r{r}"], atol=1e-3), f"{case}, r = {r}"


@section("recurrent")
def test_huginn_loss_and_gradients_match_released():
    """The truncated loss and its gradients, through the last recurrences and P, agree with the release."""
    for case in HUGINN:
        _, runs, _, t = huginn(case)
        model, loss = (
            tiny_models.load_checkpoint(FIXTURES / case / "model").requires_grad_(True),
            runs["loss"],
        )
        k = loss["num_steps_with_grad"]
        value = rs.training_loss(
            model, t["ids_0"], t["loss_labels"], loss["num_steps_no_grad"] + k, k, t["s0_0"]
        )
        value.backward()
        assert abs(value.item() - loss["value"]) < 1e-4, f"{case}: {value.item()} instead of {loss['value']}"
        for ours, public in (
            (model.adapter.weight, "adapter.weight"),
            (model.core[1].attn.qk_bias, "core_block.1.attn.qk_bias"),
            (model.prelude[0].norm_1.weight, "prelude.0.norm_1.weight"),
        ):
            expected = t.get(f"grad.transformer.{public}")
            assert expected is None or torch.allclose(ours.grad, expected, rtol=1e-3, atol=1e-3), public


@section("recurrent")
def test_autoregressive_matches_released():
    """Greedy decoding at fixed r, full and shared cache: which slot recurrence i reads and writes."""
    for case in HUGINN:
        model, runs, t, _ = huginn(case)
        for run in runs["autoregressive"]:
            s = run["settings"]
            n_slots = s["num_steps"] if s["cache_lookup_strategy"] == "full" else 1
            with fixed_start(model, s, t["init_vec_autoregressive"]):
                got = rs.autoregressive_decode(
                    model, run["prompt"], s["max_new_tokens"], s["num_steps"], n_slots
                )
            assert got.answers[0] == run["sequence"][s["prompt_length"] :], f"{case}: {s}"


@section("recurrent")
def test_autoregressive_logits_match_released():
    """The logits that tokens are taken from, not only the tokens, agree with the released cached decoding."""
    for case in HUGINN:
        model, runs, t, _ = huginn(case)
        for kind, cache_kind in (("full", "full"), ("shared", "latest-m4-compress-s4")):
            fits = [r for r in runs["autoregressive"] if r["settings"]["cache_lookup_strategy"] == cache_kind]
            s, seen, decode = fits[0]["settings"], [], model.decode
            keep = patched(model, "decode", lambda *a: seen.append(decode(*a)) or seen[-1])  # noqa: B023
            with fixed_start(model, s, t["init_vec_autoregressive"]), keep:
                n_slots = s["num_steps"] if kind == "full" else 1
                rs.autoregressive_decode(
                    model, fits[0]["prompt"], s["max_new_tokens"], s["num_steps"], n_slots
                )
            error = (torch.cat(seen)[:, -1] - t[f"logits_{kind}"]).abs().max()
            assert error < 5e-3, f"{case}, {kind} cache: logits differ by {error}"


@section("recurrent")
def test_adaptive_matches_released():
    """Adaptive compute: tokens, and at which recurrence each token's state had settled.

    Out of scope here: other cache look-ups than the shared one and other criteria than the latent distance.
    """
    model, runs, t, _ = huginn("huginn_a")
    for run in runs["adaptive"]:
        s, spent = run["settings"], []
        with fixed_start(model, s, t["init_vec_autoregressive"]):
            got = rs.adaptive_decode(
                model,
                run["prompt"],
                s["max_new_tokens"],
                s["num_steps"],
                s["effective_threshold"],
                watch=lambda step: spent.append(int(step.recurrences[0])),  # noqa: B023
            )
        assert got.answers[0] == run["sequence"][s["prompt_length"] :], s
        assert spent == run["compute_steps_per_token"], s


@section("recurrent")
def test_speculative_matches_released():
    """Self-speculative decoding: tokens, and how many each round accepted (the last may be cut)."""
    for case in HUGINN:
        model, runs, t, _ = huginn(case)
        for run in runs["speculative"]:
            s, accepted = run["settings"], []
            got = rs.speculative_decode(
                model,
                run["prompt"],
                s["max_new_tokens"],
                s["num_steps"],
                s["draft_steps"],
                s["lookahead_for_draft"],
                s["verification_threshold"],
                ZERO,
                lambda step: accepted.append(int(step.n_frozen[0] - step.n_before[0])),  # noqa: B023
            )
            answer = run["sequence"][s["prompt_length"] :][: s["max_new_tokens"]]
            assert got.answers[0] == answer, f"{case}: {s}"
            expected = run["accepted_per_round"]
            assert accepted[1:-1] == expected[: len(accepted) - 2] and len(accepted) - 1 == len(expected), s


def released_wave(settings):
    """Our settings of a released wavefront run."""
    s = settings
    return rs.Wave(
        inner=s["inner_recurrence"],
        exit={"latent-diff": "distance", "fixed": "fixed", "token-stability": "stability"}[
            s["freeze_strategy"]
        ],
        eps=s["exit_t"],
        eta=s["ema_embeds"],
        beta=s["state_noise_mixing"],
        noise="sqrt" if s["sqrt_mixer"] else "linear" if s["dampened_state_mixer"] else "constant",
        max_wave=s["max_wavefront"] or 10**6,
        headway=s["headway"],
        continuous=s["continuous_compute"],
        released_alignment=True,
        max_steps=min(4096, s["max_diffusion_steps"] + 2),  # it counts so
    )


@section("recurrent")
def test_wavefront_matches_released():
    """The wave step by step: windows, provisional tokens, frozen counts, every distance, recurrence counters.

    19 runs: r', eps, eta, W, headway, noise, continuous compute, both other exits, both caches, EOS, step
    limit. A run that meets an EOS stops earlier in ours, and is compared up to there.
    """
    for case in HUGINN:
        model, runs, t, _ = huginn(case)
        for number, run in enumerate(runs["wavefront"]):
            s, name, seen = run["settings"], f"{case} run {number}", []
            wave, n_slots = released_wave(s), s["num_steps"] if s["cache_lookup_strategy"] == "full" else 1
            filler = patched(rs, "random_tokens", lambda g, n, top: s["headway_filler_token"])  # noqa: B023
            eos = patched(model.config, "eos_id", model.config.eos_id if s["eos_token_id"] is None else 61)
            with filler, eos, fixed_start(model, s, t["init_vec_wavefront"]):
                got = rs.wavefront_decode(
                    model,
                    run["prompt"],
                    s["max_new_tokens"],
                    wave,
                    s["num_steps"],
                    n_slots,
                    watch=lambda step: seen.append(trace(step)),  # noqa: B023
                )
            answer = np.array(run["sequence"][s["prompt_length"] :][: s["max_new_tokens"]])
            assert got.answers[0] == tiny_models.cut(np.array(answer), 61 if s["eos_token_id"] else -1), name
            steps = seen[1:]  # the first one is the prompt's
            assert len(steps) == len(run["steps"]) or s["eos_token_id"], f"{name}: {len(steps)} steps"
            for j, (ours, theirs) in enumerate(zip(steps, run["steps"], strict=False)):
                compare_step(ours, theirs, f"{name}, step {j}")
            if not s["eos_token_id"]:
                expected = run["recurrence_per_position"]
                assert steps[-1].spent[: len(expected)].tolist() == expected, name


def trace(step):
    """What a later comparison needs of row 0 of a live Step."""
    start, stop = int(step.start[0]), int(step.stop[0])
    tokens = spent = distance = None
    if step.n_open is not None:
        tokens = step.tokens[0, start : step.n_open[0]].tolist()
        spent, distance = step.spent[0].copy(), step.distance[0][~np.isnan(step.distance[0])]
    frozen = int(step.n_before[0]), int(step.n_frozen[0])
    return SimpleNamespace(
        start=start, stop=stop, frozen=frozen, tokens=tokens, spent=spent, distance=distance
    )


def compare_step(ours, theirs, name):
    assert (ours.start, ours.stop - ours.start) == (theirs["cache_index"], theirs["positions"]), name
    assert ours.frozen == (theirs["frozen_before"], theirs["frozen_after"]), name
    assert ours.tokens == theirs["sequence_after"], name
    if "criterion" in theirs:
        assert len(ours.distance) == len(theirs["criterion"]), name
        assert np.allclose(ours.distance, theirs["criterion"], rtol=3e-3, atol=1e-5), name


@section("recurrent")
def test_wavefront_states_match_released():
    """The latent states after each step's recurrences, so that no error hides behind equal tokens."""
    for case in HUGINN:
        model, runs, t, _ = huginn(case)
        run, seen, decode = runs["wavefront"][0], [], model.decode
        s = run["settings"]
        keep = patched(model, "decode", lambda z, *a: seen.append(z[0]) or decode(z, *a))  # noqa: B023
        with fixed_start(model, s, t["init_vec_wavefront"]), keep:
            rs.wavefront_decode(model, run["prompt"], s["max_new_tokens"], released_wave(s), s["num_steps"])
        for j in range(6):
            assert torch.allclose(seen[j + 1], t[f"states_step{j}"], atol=2e-3), f"{case}, step {j}"


# -------------------------------------------------------------------------------------- the wave's properties


@section("recurrent")
def test_wave_with_all_recurrences_is_autoregressive():
    """Algorithm 1 with r' = r is autoregressive decoding, token for token and pass for pass."""
    for seed in range(4):
        model, prompts = tiny_recurrent(seed), recurrent_prompts(seed)
        slow = rs.autoregressive_decode(model, prompts, 12, r=4)
        fast = rs.wavefront_decode(model, prompts, 12, rs.Wave(inner=4, exit="fixed", eta=0.0), r=4)
        assert fast.answers == slow.answers, f"seed {seed}"
        assert fast.core_passes == slow.core_passes and fast.max_wave == 1, f"seed {seed}"


@section("recurrent")
def test_wave_of_one_is_adaptive():
    """W = 1 with r' = 1 is per-token adaptive compute (the released wave of one never moves)."""
    for seed in range(4):
        model, prompts = tiny_recurrent(seed), recurrent_prompts(seed)
        slow = rs.adaptive_decode(model, prompts, 12, r=200, eps=0.05, prefill_exit=False)
        wave = rs.Wave(inner=1, eps=0.05, eta=0.0, max_wave=1)
        fast = rs.wavefront_decode(model, prompts, 12, wave, r=200)
        assert fast.answers == slow.answers and fast.core_passes >= slow.steps, f"seed {seed}"
        assert (fast.row_passes == slow.row_passes).all() and fast.max_wave == 1, f"seed {seed}"


@section("recurrent")
def test_the_prompt_exits_once_it_has_settled():
    """Adaptive compute ends the prompt by the mean distance of its positions, the wave by the largest."""
    for seed in range(3):
        model, prompt = tiny_recurrent(seed), np.arange(7)
        sampling, eps, spent = rs.Sampling(init_scale=0.0), 0.05, {}
        with torch.no_grad():
            w, z = model.window(7), torch.zeros(1, 7, model.config.d_model)
            e = model.embed(torch.from_numpy(prompt)[None], w)
            for i in range(1, 100):
                before, z = z, model.recur(z, e, w)
                delta = rs.relative_distance(z, before)
                for name, value in (("mean", delta.mean()), ("max", delta.max())):
                    if value < eps:
                        spent.setdefault(name, i)
        assert spent["mean"] <= spent["max"]
        slow = rs.adaptive_decode(model, [prompt], 1, r=100, eps=eps, sampling=sampling)
        wave = rs.Wave(inner=1, eps=eps, prefill_exit=True)
        fast = rs.wavefront_decode(model, [prompt], 1, wave, r=100, sampling=sampling)
        assert (slow.core_passes, fast.core_passes) == (spent["mean"], spent["max"]), seed


@section("recurrent")
def test_prefix_rule_never_freezes_beyond_last():
    """The paper's k* asks for an unbroken run of settled positions, Algorithm 2 only for the last one."""
    rng = np.random.default_rng(0)
    for _ in range(100):
        settled = rng.random((3, 6)) < 0.6
        book = SimpleNamespace(
            n=np.array([4, 7, 5]),
            start=np.array([3, 6, 4]),
            n_open=np.array([9, 12, 10]),
            limit=np.full(3, 60),
        )
        last, _ = rs.freeze(book, rs.Wave(freeze="last"), settled.copy())
        prefix, _ = rs.freeze(book, rs.Wave(freeze="prefix"), settled.copy())
        for row in range(3):
            unbroken = np.append(settled[row], False).argmin()
            assert prefix[row] == book.n[row] + max(0, unbroken - 1)
            where = np.flatnonzero(settled[row])
            assert last[row] == book.n[row] + (where[-1] if len(where) else 0)
            assert prefix[row] <= last[row]


@section("recurrent")
def test_frozen_tokens_never_change_and_the_wave_keeps_its_limit():
    """Whatever the settings: frozen tokens stay, the head never moves back, at most W positions run."""
    for seed, changes in enumerate(
        (
            {},
            {"max_wave": 3},
            {"headway": 3, "max_wave": 7},
            {"exit": "stability", "inner": 1},
            {"freeze": "prefix", "eta": 0.5},
            {"beta": 0.5, "noise": "constant", "continuous": True},
            {"released_alignment": True},
        )
    ):
        model, prompts, frozen = tiny_recurrent(seed), recurrent_prompts(seed), {}
        wave = rs.Wave(**({"inner": 2, "eps": 0.1, "max_steps": 200} | changes))

        def watch(step, frozen=frozen, wave=wave):
            assert (step.n_frozen >= step.n_before).all()
            if step.n_open is not None:
                assert (step.stop - step.start).max() <= wave.max_wave
                assert (step.n_open - step.n_frozen + 1).max() <= wave.max_wave
                assert (step.start == step.n_before - 1).all() and (step.n_open >= step.n_frozen).all()
            for row, tokens, n in zip(step.rows, step.tokens, step.n_frozen, strict=True):
                before = frozen.get(row, tokens[:0])
                assert (tokens[: len(before)] == before).all(), f"row {row}: a frozen token changed"
                frozen[row] = tokens[:n].copy()

        rs.wavefront_decode(model, prompts, 14, wave, r=6, watch=watch)


@section("recurrent")
def test_contractive_wave_converges_to_autoregressive():
    """With a contractive core and eps -> 0 the wave is autoregressive decoding at large r."""
    for seed in range(5):
        model, prompts = tiny_recurrent(seed), recurrent_prompts(seed)
        model.adapter.weight[:, : model.config.d_model] *= 0.5  # less of the old state remains
        a, b = (model.initial_state(1, 8, torch.Generator().manual_seed(i)) for i in (1, 2))
        w = model.window(8)
        e = model.embed(torch.arange(8)[None], w)
        shrink = (model.recur(a, e, w) - model.recur(b, e, w)).norm() / (a - b).norm()
        assert shrink < 0.8, f"seed {seed}: not a contraction, factor {shrink}"
        slow = rs.autoregressive_decode(model, prompts, 16, r=60)
        for inner in (1, 3):
            fast = rs.wavefront_decode(
                model, prompts, 16, rs.Wave(inner=inner, eps=1e-5, freeze="prefix"), r=60
            )
            assert fast.answers == slow.answers, f"seed {seed}, r' = {inner}"


@section("recurrent")
def test_headway_opens_that_many_positions():
    """Headway h opens h positions a step while the wave has room."""
    for headway in (1, 2, 3):
        sizes, model = [], tiny_recurrent(3, eos_id=23, pad_id=22)
        rs.wavefront_decode(
            model,
            recurrent_prompts()[0],
            30,
            rs.Wave(headway=headway, eps=0.0, max_steps=4),
            watch=lambda step: sizes.append(int((step.stop - step.start)[0])),  # noqa: B023
        )
        assert sizes[1:] == [1 + headway * j for j in range(4)], f"headway {headway}: {sizes}"


@section("recurrent")
def test_momentum_follows_its_formula():
    """e = eta e_prev + (1 - eta) P(y) per position, (1 - eta) P(y) for new ones; eta = 0 is P(y) itself."""
    for eta in (0.0, 0.3):
        model, fresh, mixed = tiny_recurrent(1, eos_id=23, pad_id=22), [], []
        embed, recur = model.embed, model.recur
        record = patched(model, "embed", lambda *a: fresh.append(embed(*a)) or fresh[-1])  # noqa: B023
        spy = patched(model, "recur", lambda z, e, *a: mixed.append(e) or recur(z, e, *a))  # noqa: B023
        with record, spy:
            rs.wavefront_decode(
                model, recurrent_prompts()[0], 20, rs.Wave(inner=1, eps=0.0, eta=eta, max_steps=5), r=2
            )
        fresh, mixed = fresh[1:], mixed[2:]  # without the prompt's
        before = fresh.pop(0)
        for new, e in zip(fresh, mixed, strict=True):
            expected = (1 - eta) * new
            expected[:, : before.shape[1]] += eta * before
            assert torch.allclose(e, expected, atol=1e-6), f"eta {eta}"
            before = e


@section("recurrent")
def test_padded_and_compiled_windows_change_nothing_in_recurrent_samplers():
    """Static pads the windows of every sampler, ragged batches included: the same answers and core passes,
    without a compiler, with torch.compile's own front end and with its default compiler.
    """
    model, compilers = tiny_recurrent(3), [None, functools.partial(torch.compile, backend="eager")]
    if shutil.which("g++") or shutil.which("clang++"):
        compilers.append(torch.compile)
    for compile in compilers:
        sizes = (1, 4, 16) if compile is None else (16,)
        static = tiny_models.Static(model, compile, sizes)
        for prompts in (recurrent_prompts(), recurrent_prompts(1, (6,))):
            for name in DECODERS:
                plain, padded = (run_decoder(name, m, prompts, 12) for m in (model, static))
                assert padded.answers == plain.answers, (compile, name)
                assert (padded.row_passes == plain.row_passes).all(), (compile, name)
        fell_back = [part for part, f in static.compiled.items() if compile and f == getattr(model, part)]
        assert set(static.compiled) == {"embed", "recur", "decode"} and not fell_back, (compile, fell_back)


@section("recurrent")
def test_padded_windows_keep_a_slot_for_each_recurrence():
    """With a full cache Static writes recurrence i to slot i, as the model does: equal logits behind it."""
    model, logits, generator = tiny_recurrent(5), [], torch.Generator()
    for m in (model, tiny_models.Static(model, sizes=(4, 8))):
        cache = m.new_cache(1, 12, 3)
        for start, stop in ((0, 5), (5, 8)):
            w = m.window(stop - start, start, cache)
            e = m.embed(torch.arange(start, stop)[None], w)
            z = m.initial_state(1, stop - start, generator.manual_seed(start))
            for i in range(3):
                z = m.recur(z, e, w, i)
        logits.append(m.decode(z, w))
    assert logits[0].shape == logits[1].shape and (logits[0] - logits[1]).abs().max() < 1e-4


@section("recurrent")
def test_initial_states_are_normal_within_three_sigma():
    """Variance 2/5 cut at 3 sigma: what lies beyond is drawn again, not clipped; bfloat16 rounds."""
    model, sigma = tiny_recurrent(0), 0.4**0.5
    state = model.initial_state(40, 200, torch.Generator().manual_seed(0)).flatten().double()
    again = model.initial_state(40, 200, torch.Generator().manual_seed(0)).flatten().double()
    assert (state == again).all() and len(state) == 40 * 200 * model.config.d_model
    density = math.exp(-4.5) / math.sqrt(2 * math.pi)
    std = sigma * math.sqrt(1 - 6 * density / math.erf(3 / math.sqrt(2)))  # of a normal cut at 3 sigma
    assert abs(state.std() - std) < 0.004 and abs(state.mean()) < 0.006
    assert 2.97 * sigma < state.abs().max() <= 3 * sigma + 1e-6
    assert (state.abs() > 2.999 * sigma).double().mean() < 1e-4, "values heap up at the edge"
    wide = model.initial_state(1, 9, torch.Generator().manual_seed(3))
    low = tiny_recurrent(0).to(torch.bfloat16).initial_state(1, 9, torch.Generator().manual_seed(3))
    assert low.dtype == torch.bfloat16 and (low == wide.bfloat16()).all()


@section("recurrent")
def test_noise_falls_with_the_recurrences_spent():
    """beta_t = beta / (1 + count), constant, or with square-root weights; beta = 0 draws nothing at all."""
    for noise, weight in (
        ("linear", lambda n: 0.5 / (1 + n)),
        ("constant", lambda n: 0.5 + 0 * n),
        ("sqrt", lambda n: (0.5 / (1 + n)) ** 0.5),
    ):
        model = tiny_recurrent(0)
        book = rs.Book(model, [[1, 2, 3]], 10, ZERO, None)
        book.n += 1
        rs.start_wave(book, 7)
        book.age[0, 3:6] = (4, 2, 0)
        book.open(np.array([3]), np.array([6]))
        with patched(model, "initial_state", lambda B, T, g=None: torch.ones(B, T, 32)):
            z = rs.add_noise(book, rs.Wave(inner=2, beta=0.5, noise=noise), book.states[book.index])
        expected = weight(
            np.array([4 * 2 + 7, 2 * 2, 0])
        )  # states were zero; the first counts the prompt's r too
        assert np.allclose(z[0, :, 0].numpy(), expected, atol=1e-6), noise
    draws, model = [], tiny_recurrent(0)
    draw = model.initial_state
    with patched(model, "initial_state", lambda *a: draws.append(a) or draw(*a)):
        rs.wavefront_decode(model, [1, 2, 3], 10, rs.Wave(beta=0.0), r=4)
    assert len(draws) == 1, "noise was drawn although beta is 0"


@section("recurrent")
def test_distance_matches_its_formula():
    """delta = ||z - z_prev|| / ||z|| for each position, not over the window."""
    rng = np.random.default_rng(0)
    z, before = rng.normal(size=(2, 2, 3, 8))
    expected = np.linalg.norm(z - before, axis=-1) / np.linalg.norm(z, axis=-1)
    got = rs.relative_distance(torch.tensor(z), torch.tensor(before))
    assert np.allclose(got, expected, atol=1e-6)


@section("recurrent")
def test_distances_compare_a_position_with_itself():
    """After a freeze each state is compared with its own previous one (released: with another position's)."""
    model, kept, steps = tiny_recurrent(2, eos_id=23, pad_id=22), [], []
    decode = model.decode
    keep = patched(model, "decode", lambda z, *a: kept.append(z[0].clone()) or decode(z, *a))
    with keep:
        rs.wavefront_decode(
            model, [1, 2], 24, rs.Wave(inner=2, eps=0.2), r=6, watch=lambda s: steps.append(trace(s))
        )
    moved = 0
    for (old, new), z_old, z_new in zip(
        zip(steps[1:], steps[2:], strict=False), kept[1:], kept[2:], strict=False
    ):
        skip = new.start - old.start
        n = len(z_old) - skip  # positions in both windows
        expected = rs.relative_distance(z_new[None, :n], z_old[None, skip:])[0].numpy()
        assert np.allclose(new.distance[:n], expected, atol=1e-5)
        moved += skip
    assert moved > 5, "the wave never moved, so nothing was tested"


@section("recurrent")
def test_core_passes_match_the_closed_form():
    """Costs: autoregressive r w passes; the fixed exit r + r' (w - 2 + ceil(r / r')), so about r' w."""
    model = tiny_recurrent(0, eos_id=23, pad_id=22)
    for w, r, inner in ((10, 8, 2), (7, 8, 3), (5, 6, 6), (2, 8, 4)):
        slow = rs.autoregressive_decode(model, [1, 2, 3], w, r)
        fast = rs.wavefront_decode(model, [1, 2, 3], w, rs.Wave(inner=inner, exit="fixed"), r)
        assert slow.core_passes == r * w and slow.steps == w
        ceil = -(-r // inner)
        assert fast.core_passes == r + inner * (w - 2 + ceil), f"w {w}, r {r}, r' {inner}"
        assert fast.positions == 3 * r + inner * ceil * (w - 1), "each position is refined ceil(r / r') times"
        assert fast.max_wave == min(ceil, w - 1)


# -------------------------------------------------------------------------------------------------- KV caches


@section("recurrent")
def test_cached_recurrent_decoding_equals_uncached():
    """Decoding with the full cache gives the tokens of whole forwards without any cache."""
    model, prompt = tiny_recurrent(5), list(recurrent_prompts(5)[0])
    got = rs.autoregressive_decode(model, prompt, 10, r=3, n_slots=3, sampling=ZERO).answers[0]
    tokens = list(prompt)
    for token in got:
        x = torch.tensor(tokens)[None]
        logits = model(x, 3, torch.zeros(1, len(tokens), 32))[0, -1]
        logits[21:] = float("-inf")
        assert int(logits.argmax()) == token
        tokens.append(token)


@section("recurrent")
def test_shared_cache_does_not_grow_with_r():
    """The shared cache holds one entry a core layer, the full one r of them."""
    model = tiny_recurrent(0, n_core=2)
    shared = [rs.autoregressive_decode(model, [1, 2], 3, r, 1) for r in (2, 8)]
    full = [rs.autoregressive_decode(model, [1, 2], 3, r, r) for r in (2, 8)]
    assert shared[0].cache_bytes == shared[1].cache_bytes
    assert full[1].core_cache_bytes == 4 * full[0].core_cache_bytes == 8 * shared[0].core_cache_bytes


@section("recurrent")
def test_second_recurrence_overwrites_the_first():
    """Two recurrences at one position leave one entry, the second's; one that appends gives other states."""
    model = tiny_recurrent(0)
    cache, tokens = model.new_cache(1, 8), torch.tensor([[1, 2, 3]])
    w = model.window(3, 0, cache)
    e, z = model.embed(tokens, w), model.initial_state(1, 3, torch.Generator().manual_seed(0))
    z = model.recur(z, e, w, 0)
    first = cache.k.clone()
    model.recur(z, e, w, 1)
    assert not torch.equal(cache.k[1, :, :, :3], first[1, :, :, :3]), "the second recurrence wrote nothing"
    assert (cache.k[1, :, :, 3:] == 0).all(), "something was appended"

    class Appending(tiny_models.KVCache):
        """What the shared cache must not be: every recurrence of a position stays visible."""

        def write(self, slot, k, v):
            self.old = getattr(self, "old", {})
            old = self.old.get(slot, (k[:, :0].transpose(1, 2), v[:, :0].transpose(1, 2)))
            self.old[slot] = [torch.cat((a, b.transpose(1, 2)), 2) for a, b in zip(old, (k, v), strict=True)]
            return self.old[slot]

    c = model.config
    appending = Appending(3, 1, c.n_heads, 8, c.head_dim)
    appending.n_recurrences = 1
    w, plain = model.window(1, 0, appending), model.window(1, 0, model.new_cache(1, 8))
    e, z = model.embed(tokens[:, :1], plain), model.initial_state(1, 1, torch.Generator().manual_seed(0))
    a = model.recur(model.recur(z, e, w, 0), e, w, 1)
    b = model.recur(model.recur(z, e, plain, 0), e, plain, 1)
    assert (a - b).abs().max() > 1e-3


@section("recurrent")
def test_speculative_is_lossless():
    """Greedy self-speculation gives autoregressive decoding's tokens at full r, whatever the draft."""
    for seed in range(4):
        model, prompts = tiny_recurrent(seed), recurrent_prompts(seed)
        slow = rs.autoregressive_decode(model, prompts, 13, r=6, n_slots=6)
        for draft_r, lookahead in ((1, 2), (3, 5), (6, 4)):
            fast = rs.speculative_decode(model, prompts, 13, 6, draft_r, lookahead)
            assert fast.answers == slow.answers, f"seed {seed}, draft {draft_r} x {lookahead}"
        assert fast.steps < slow.steps * 1.6, "drafts of full depth must all be accepted"


# -------------------------------------------------------------------------- batches, ends, randomness, limits


@section("recurrent")
def test_recurrent_batches_equal_singles():
    """Every sampler gives a row the same answer in a batch as alone: ragged prompts, early ends."""
    for seed in range(3):
        model, prompts = tiny_recurrent(seed), recurrent_prompts(seed, (5, 1, 9, 3, 5, 12))
        for name in DECODERS:
            batch = run_decoder(name, model, prompts, 15).answers
            for b, prompt in enumerate(prompts):
                alone = run_decoder(name, model, [prompt], 15, rs.Sampling(seed=b)).answers[0]
                assert batch[b] == alone, f"{name}, seed {seed}, row {b}"


@section("recurrent")
def test_recurrent_batches_equal_singles_when_sampling():
    """The same at temperature above 0: each row draws from its own generator."""
    model, prompts = tiny_recurrent(7), recurrent_prompts(7)
    for name in ("autoregressive", "adaptive", "wavefront", "noisy wavefront"):
        batch = run_decoder(name, model, prompts, 12, rs.Sampling(0.9, 0.9, seed=3)).answers
        for b, prompt in enumerate(prompts):
            alone = run_decoder(name, model, [prompt], 12, rs.Sampling(0.9, 0.9, seed=3 + b)).answers[0]
            assert batch[b] == alone, f"{name}, row {b}"
        assert batch == run_decoder(name, model, prompts, 12, rs.Sampling(0.9, 0.9, seed=3)).answers
        assert batch != run_decoder(name, model, prompts, 12, rs.Sampling(0.9, 0.9, seed=30)).answers


@section("recurrent")
def test_zero_states_make_greedy_decoding_deterministic():
    """Zero initial states: no draw is left, so the seed does not matter."""
    model, prompts = tiny_recurrent(2), recurrent_prompts(2)
    for name in ("autoregressive", "adaptive", "speculative", "wavefront"):
        a, b = (
            run_decoder(name, model, prompts, 10, rs.Sampling(init_scale=0.0, seed=s)).answers for s in (0, 9)
        )
        assert a == b, name


@section("recurrent")
def test_recurrent_answers_end_and_hold_no_foreign_ids():
    """Answers end at their first EOS or at their length, and hold no padding or id beyond the tokenizer."""
    for seed in range(3):
        model = tiny_recurrent(seed)
        model.embedding.weight[21:] *= 4  # the padding id and those beyond the tokenizer would often win
        for name in DECODERS:
            for n in (1, 2, 9):
                for answer in run_decoder(name, model, recurrent_prompts(seed), n).answers:
                    assert 1 <= len(answer) <= n, f"{name}: {len(answer)} tokens of {n}"
                    assert max(answer) < 21, f"{name}: {answer}"
                    assert 20 not in answer[:-1] and (len(answer) == n or answer[-1] == 20), (
                        f"{name}: {answer}"
                    )


@section("recurrent")
def test_nothing_is_computed_after_a_frozen_eos():
    """A row leaves the batch in the step that freezes its EOS; its text is what it was without the stop."""
    ended = 0
    for seed in range(3):
        model, prompts, last = tiny_recurrent(seed, eos_id=23, pad_id=22), recurrent_prompts(seed), {}
        free = run_decoder("wavefront", model, prompts, 20)
        for eos in {answer[5] for answer in free.answers}:
            with patched(model.config, "eos_id", eos):
                got = run_decoder(
                    "wavefront",
                    model,
                    prompts,
                    20,
                    watch=lambda s: last.update(zip(s.rows, trace_ends(s))),  # noqa: B023, B905
                )
            for b, answer in enumerate(got.answers):
                assert answer == tiny_models.cut(np.array(free.answers[b]), eos), (
                    f"seed {seed}, eos {eos}, row {b}"
                )
                if eos in answer:
                    ended += 1
                    before, after = last[b]
                    assert before <= len(prompts[b]) + len(answer) - 1 < after
    assert ended > 5, "no answer ended early, so nothing was tested"


def trace_ends(step):
    return [(int(a), int(b)) for a, b in zip(step.n_before, step.n_frozen, strict=True)]


@section("recurrent")
def test_untrained_recurrent_models_terminate():
    """Weights that never settle (eps 0): the step limit ends decoding, and what was frozen is returned."""
    model = tiny_recurrent(0)
    got = rs.wavefront_decode(model, recurrent_prompts(), 10, rs.Wave(eps=0.0, max_wave=4, max_steps=7), r=4)
    assert got.steps == 1 + 7 and all(len(a) == 1 for a in got.answers)
    full = rs.autoregressive_decode(model, list(range(10)), 54, r=2)  # prompt and answer fill the context
    assert len(full.answers[0]) <= 54


@section("recurrent")
def test_top_p_keeps_the_nucleus():
    """rs.Sampling stays in the smallest set of probability top_p and follows the probabilities inside it."""
    model = tiny_recurrent(0, vocab_size=8, n_tokens=8, eos_id=7, pad_id=7)
    book = rs.Book(model, [[1]], 4, rs.Sampling(temperature=1.0, top_p=0.8), None)
    p = torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15, 0.0, 0.0, 0.0])
    tokens, _ = book.choose(p.log().expand(1, 4000, 8), 4000)
    share = np.bincount(tokens[0], minlength=8) / 4000
    assert np.allclose(share, [0, 0.4 / 0.85, 0, 0.3 / 0.85, 0.15 / 0.85, 0, 0, 0], atol=0.04), share


@section("recurrent")
def test_bad_input_to_recurrent_samplers():
    """Each mistake gives one sentence that names the value and the limit."""
    model = tiny_recurrent(0)
    for prompts, n, message in (
        ([], 4, "the batch is empty"),
        ([[1], []], 4, "prompt 1 has 0 tokens; it must have at least 1"),
        ([[1.5, 2.0]], 4, "prompt 0 has dtype float64"),
        ([[1, 22]], 4, "prompt 0 holds ids 1 to 22; this model knows 0 to 21"),
        ([[1] * 60], 5, "prompt 0 has 60 tokens and max_new_tokens is 5; together at most 64"),
        ([[1]], 0, "max_new_tokens is 0"),
    ):
        for name in DECODERS:
            refuses(message, run_decoder, name, model, prompts, n)
    refuses("r is 0", rs.autoregressive_decode, model, [[1]], 4, 0)
    refuses("draft_r is 9; it must be between 1 and r = 8", rs.speculative_decode, model, [[1]], 4, 8, 9)
    for changes, message in (
        ({"inner": 0}, "inner is 0"),
        ({"eps": -1.0}, "eps is -1.0"),
        ({"eta": 1.5}, "eta is 1.5"),
        ({"exit": "never"}, "exit 'never' is unknown"),
        ({"max_wave": 0}, "max_wave is 0"),
    ):
        refuses(message, rs.Wave, **changes)
    refuses("temperature is -1", rs.Sampling, temperature=-1)
    refuses("top_p is 0", rs.Sampling, top_p=0)


# --------------------------------------------------------------------------------------------------- training


@section("recurrent")
def test_recurrence_counts_have_the_right_distribution():
    """r = 1 + Poisson(LogNormal): mean m + 1 and variance m + m^2 (e^(1/4) - 1) over 20,000 draws."""
    for mean in (8, 32):
        r = rs.sample_recurrences(mean, 20000, torch.Generator().manual_seed(0)).double()
        variance = mean + mean**2 * (np.exp(0.25) - 1)
        assert abs(r.mean() - mean - 1) < 5 * (variance / 20000) ** 0.5, f"mean {r.mean()}"
        assert abs(r.var() / variance - 1) < 0.1, f"variance {r.var()} instead of {variance}"
        assert r.min() >= 1


@section("recurrent")
def test_gradient_reaches_the_last_recurrences_only():
    """Truncated backpropagation: what the first r - k recurrences contribute is a constant."""
    model = tiny_recurrent(0).requires_grad_(True)
    tokens, labels = torch.randint(0, 20, (2, 2, 7), generator=torch.Generator().manual_seed(0))
    for r, k, reached in ((5, 2, False), (2, 2, True), (1, 4, True)):
        z = model.initial_state(2, 7, torch.Generator().manual_seed(1)).requires_grad_(True)
        rs.training_loss(model, tokens, labels, r, k, z).backward()
        assert (z.grad is not None) == reached, f"r {r}, k {k}"
    model.zero_grad()
    z = model.initial_state(2, 7, torch.Generator().manual_seed(1))
    rs.training_loss(model, tokens, labels, 5, 2, z).backward()
    got = model.adapter.weight.grad.clone()
    model.zero_grad()
    with torch.no_grad():
        w = model.window(7)
        e = model.embed(tokens, w)
        for _ in range(3):
            z = model.recur(z, e, w)
    rs.training_loss(model, tokens, labels, 2, 2, z).backward()
    assert torch.allclose(got, model.adapter.weight.grad, atol=1e-6)


# ------------------------------------------------------------------------------------------------ checkpoints


@section("recurrent")
def test_huginn_with_an_untied_head_in_shards():
    """Huginn in two shards with a head of its own loads; without that tensor it is refused by name."""
    source = FIXTURES / "huginn_a" / "model"
    tensors = {name: t.clone() for name, t in read_safetensors(source / "model.safetensors").items()}
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"].flip(0)
    with tempfile.TemporaryDirectory() as d:
        folder, names = Path(d), list(tensors)
        config = json.loads((source / "config.json").read_text()) | {"tie_embeddings": False}
        (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 125}))
        shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
        for shard, inside in shards.items():
            tiny_models.write_safetensors(folder / shard, {n: tensors[n] for n in inside})
        index = {"weight_map": {n: shard for shard, inside in shards.items() for n in inside}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        ids, state = torch.arange(9)[None], torch.zeros(1, 9, 64)
        tied, untied = load_checkpoint(source), load_checkpoint(folder)
        assert torch.allclose(untied(ids, 3, state), tied(ids, 3, state).flip(-1), atol=1e-4)
        del tensors["lm_head.weight"], index["weight_map"]["lm_head.weight"]
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        for shard, inside in shards.items():
            tiny_models.write_safetensors(folder / shard, {n: tensors[n] for n in inside if n in tensors})
        raises("lacks 1 tensors: lm_head.weight", load_checkpoint, folder)


@section("recurrent")
def test_recurrent_checkpoints_round_trip():
    """save_checkpoint and load_checkpoint give the same model back; a tied head on disk is ignored."""
    folder = Path(tempfile.mkdtemp())
    try:
        model = tiny_recurrent(0)
        tiny_models.save_checkpoint(folder / "a", model)
        again = tiny_models.load_checkpoint(folder / "a")
        x = torch.arange(6)[None]
        assert again.config == model.config
        assert torch.equal(model(x, 3, torch.zeros(1, 6, 32)), again(x, 3, torch.zeros(1, 6, 32)))
        shutil.copytree(FIXTURES / "huginn_a" / "model", folder / "b")
        tensors = {k: v.clone() for k, v in tiny_models.read_tensors(folder / "b").items()}
        tensors["lm_head.weight"] = tensors["transformer.wte.weight"]
        tiny_models.write_safetensors(folder / "b" / "model.safetensors", tensors)
        assert torch.equal(
            tiny_models.load_checkpoint(folder / "b").embedding.weight, huginn("huginn_a")[0].embedding.weight
        )
    finally:
        shutil.rmtree(folder)


# ------------------------------------------------------------------------------ full checkpoints: their files

PUBLIC = {  # config.json of the public checkpoints, the fields that matter
    "LLaDA-8B-Instruct": dict(
        model_type="llada", d_model=4096, n_layers=32, n_heads=32, n_kv_heads=32, mlp_hidden_size=12288,
        vocab_size=126464, embedding_size=126464, max_sequence_length=4096, rope_theta=500000.0,
        rms_norm_eps=1e-5, weight_tying=False, mask_token_id=126336, eos_token_id=126081, pad_token_id=126081,
        alibi=False, rope=True, block_type="llama", activation_type="silu", layer_norm_type="rms",
        attention_layer_norm=False, include_bias=False, include_qkv_bias=False, scale_logits=False,
        rope_full_precision=True, multi_query_attention=None,
    ),
    "Dream-v0-Base-7B": dict(
        model_type="Dream", hidden_size=3584, num_hidden_layers=28, num_attention_heads=28,
        num_key_value_heads=4, intermediate_size=18944, vocab_size=152064, max_position_embeddings=131072,
        rope_theta=1000000.0, rms_norm_eps=1e-6, tie_word_embeddings=False, mask_token_id=151666,
        eos_token_id=151643, pad_token_id=151643, hidden_act="silu", rope_scaling=None,
        use_sliding_window=False, sliding_window=None,
    ),
    "Qwen2.5-7B": dict(
        model_type="qwen2", hidden_size=3584, num_hidden_layers=28, num_attention_heads=28,
        num_key_value_heads=4, intermediate_size=18944, vocab_size=152064, max_position_embeddings=131072,
        rope_theta=1000000.0, rms_norm_eps=1e-6, tie_word_embeddings=False, eos_token_id=151643,
        hidden_act="silu", use_sliding_window=False, sliding_window=131072, max_window_layers=28,
    ),
    "Meta-Llama-3-8B-Instruct": dict(
        model_type="llama", hidden_size=4096, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, intermediate_size=14336, vocab_size=128256, max_position_embeddings=8192,
        rope_theta=500000.0, rms_norm_eps=1e-5, tie_word_embeddings=False, eos_token_id=128009,
        hidden_act="silu", attention_bias=False, rope_scaling=None,
    ),
    "huginn-0125": dict(
        model_type="huginn_raven", n_embd=5280, n_heads=55, num_attention_heads=55, intermediate_size=17920,
        n_layers_in_prelude=2, n_layers_in_recurrent_block=4, n_layers_in_coda=2, mean_recurrence=32,
        vocab_size=65536, block_size=4096, rope_base=50000, norm_eps=1e-6, tie_embeddings=True, qk_bias=True,
        eos_token_id=65505, pad_token_id=65509, block_class_name="SandwichBlock", nonlin_name="SiLU",
        norm_class_name="RMSNorm_llama", mlp_class_name="GatedMLP", injection_type="linear", bias=False,
    ),
}  # fmt: skip
TOTALS = {"LLaDA-8B-Instruct": 8.02e9, "Dream-v0-Base-7B": 7.62e9, "Qwen2.5-7B": 7.62e9}
TOTALS |= {"Meta-Llama-3-8B-Instruct": 8.03e9, "huginn-0125": 3.5e9}


def public_shapes(j: dict) -> dict[str, list[int]]:
    """Tensor names and shapes of a public checkpoint, written down without the loader's tables."""
    if j["model_type"] == "llada":
        d, m, v = j["d_model"], j["mlp_hidden_size"], j["embedding_size"]
        kv = d // j["n_heads"] * j["n_kv_heads"]
        block = {"attn_norm": [d], "q_proj": [d, d], "k_proj": [kv, d], "v_proj": [kv, d], "attn_out": [d, d]}
        block |= {"ff_norm": [d], "ff_proj": [m, d], "up_proj": [m, d], "ff_out": [d, m]}
        shapes = {"wte": [v, d], "ln_f": [d], "ff_out": [v, d]}
        shapes |= {f"blocks.{i}.{n}": s for i in range(j["n_layers"]) for n, s in block.items()}
        return {f"model.transformer.{n}.weight": s for n, s in shapes.items()}
    if j["model_type"] == "huginn_raven":
        d, m, h = j["n_embd"], j["intermediate_size"], j["num_attention_heads"]
        block = {f"norm_{i}.weight": [d] for i in (1, 2, 3, 4)}
        block |= {"attn.Wqkv.weight": [3 * d, d], "attn.qk_bias": [2, 1, h, d // h]}
        block |= {"attn.proj.weight": [d, d], "mlp.fc.weight": [2 * m, d], "mlp.proj.weight": [d, m]}
        shapes = {"wte.weight": [j["vocab_size"], d], "adapter.weight": [d, 2 * d], "ln_f.weight": [d]}
        for group, layers in (("prelude", "prelude"), ("core_block", "recurrent_block"), ("coda", "coda")):
            for i in range(j[f"n_layers_in_{layers}"]):
                shapes |= {f"{group}.{i}.{n}": s for n, s in block.items()}
        return {f"transformer.{n}": s for n, s in shapes.items()}
    d, m, v = j["hidden_size"], j["intermediate_size"], j["vocab_size"]
    kv = d // j["num_attention_heads"] * j["num_key_value_heads"]
    block = {"input_layernorm.weight": [d], "post_attention_layernorm.weight": [d]}
    for name, rows in (("q", d), ("k", kv), ("v", kv)):
        block[f"self_attn.{name}_proj.weight"] = [rows, d]
        if j["model_type"] != "llama":
            block[f"self_attn.{name}_proj.bias"] = [rows]
    block |= {"self_attn.o_proj.weight": [d, d], "mlp.down_proj.weight": [d, m]}
    block |= {"mlp.gate_proj.weight": [m, d], "mlp.up_proj.weight": [m, d]}
    shapes = {"model.embed_tokens.weight": [v, d], "model.norm.weight": [d], "lm_head.weight": [v, d]}
    return shapes | {
        f"model.layers.{i}.{n}": s for i in range(j["num_hidden_layers"]) for n, s in block.items()
    }


SMALL = {  # sizes that make any of the five small: bytes, special tokens, and some padding of the table
    "llada": dict(d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, mlp_hidden_size=48, vocab_size=270)
    | dict(
        embedding_size=272, max_sequence_length=256, mask_token_id=257, eos_token_id=256, pad_token_id=256
    ),
    "llama": dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    | dict(intermediate_size=48, vocab_size=272, max_position_embeddings=256, eos_token_id=256)
    | dict(pad_token_id=256, mask_token_id=257),
    "huginn_raven": dict(n_embd=32, n_heads=4, num_attention_heads=4, intermediate_size=48, vocab_size=272)
    | dict(block_size=256, mean_recurrence=4, eos_token_id=256, pad_token_id=259),
}


def public_checkpoint(folder: Path, name: str, shards: int = 1, dtype=torch.float32, **sizes) -> Path:
    """A random checkpoint of a public layout, made small, with a byte-level tokenizer.json."""
    j = {**PUBLIC[name], **SMALL.get(PUBLIC[name]["model_type"], SMALL["llama"]), **sizes}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(j))
    g, shapes = torch.Generator().manual_seed(0), public_shapes(j)

    def tensor(name, shape):
        return (
            torch.ones(shape, dtype=dtype)
            if len(shape) == 1 and "bias" not in name
            else torch.randn(shape, generator=g).mul_(shape[-1] ** -0.5).to(dtype)
        )

    names = [list(shapes)[s::shards] for s in range(shards)]
    if shards == 1:
        files = ["model.safetensors"]
    else:
        files = [f"model-{s + 1:05d}-of-{shards:05d}.safetensors" for s in range(shards)]
        where = {n: file for file, inside in zip(files, names, strict=True) for n in inside}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    for file, inside in zip(files, names, strict=True):
        tiny_models.write_safetensors(folder / file, {n: tensor(n, shapes[n]) for n in inside})
    special = ["<|endoftext|>", "<|mask|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"]
    (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer([*special, "<|startoftext|>"])))
    return folder


def byte_alphabet() -> list[str]:
    """The printable character that stands for each byte in byte-level BPE, by byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b if b in printable else next(others)) for b in range(256)]


def byte_tokenizer(special: list[str]) -> dict:
    """tokenizer.json of a tokenizer whose ids are bytes, then special tokens."""
    added = [dict(id=256 + i, content=s, special=True, normalized=False) for i, s in enumerate(special)]
    added = [a | dict(single_word=False, lstrip=False, rstrip=False) for a in added]
    bytes_only = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=False)
    return dict(
        version="1.0", added_tokens=added, normalizer=None, pre_tokenizer=bytes_only, post_processor=None,
        decoder=bytes_only, truncation=None, padding=None,
        model=dict(
            type="BPE", vocab={c: i for i, c in enumerate(byte_alphabet())}, merges=[], dropout=None,
            unk_token=None, continuing_subword_prefix=None, end_of_word_suffix=None, fuse_unk=False,
            byte_fallback=False,
        ),
    )  # fmt: skip


def needs(*packages):
    """Skip where an optional package is absent."""
    for package in packages:
        try:
            __import__(package)
        except ImportError:
            raise Skip(f"the optional package {package} is not installed") from None


@section("public")
def test_public_names_and_shapes_at_full_size():
    """The five public layouts, instantiated without data: every tensor's name and shape, and the totals."""
    for name, j in PUBLIC.items():
        with tempfile.TemporaryDirectory() as d:
            (Path(d) / "config.json").write_text(json.dumps(j))
            model, names = tiny_models.read_layout(d)
        ours, shapes = model.state_dict(), public_shapes(j)
        assert sorted(n for public in names.values() for n in public) == sorted(shapes), name
        for mine, public in names.items():
            rows = sum(shapes[n][0] for n in public)
            assert list(ours[mine].shape) == [rows, *shapes[public[0]][1:]], (name, mine)
        total = sum(np.prod(s, dtype=np.int64) for s in shapes.values())
        assert total == model.n_parameters(), name
        assert abs(total / TOTALS[name] - 1) < (0.12 if "huginn" in name else 0.002), (name, total)


@section("public")
def test_every_public_layout_loads_and_decodes():
    """Small random checkpoints of the five layouts, in one file and in three shards, decode alike."""
    with tempfile.TemporaryDirectory() as d:
        for name in PUBLIC:
            answers = []
            for shards in (1, 3):
                folder = public_checkpoint(Path(d) / f"{name}-{shards}", name)
                model = load_checkpoint(folder)
                if PUBLIC[name]["model_type"] == "huginn_raven":
                    out = rs.wavefront_decode(model, [[1, 2, 3]], 9, r=4)
                elif model.config.causal:
                    out = d2f.autoregressive_decode(model, [[1, 2, 3]], 9)
                    raises("no mask token", d2f.pipelined_decode, model, [[1]], 8, 4)
                else:
                    out = d2f.pipelined_decode(model, [[1, 2, 3]], 9, 4)
                answers.append(out.answers)
            assert answers[0] == answers[1], name


@section("public")
def test_qwen_and_llama_are_dreams_network():
    """The same tensors as Dream's under a causal mask; Llama is that without biases."""
    with tempfile.TemporaryDirectory() as d:
        x = torch.randint(0, 256, (2, 11), generator=torch.Generator().manual_seed(0))
        dream = load_checkpoint(public_checkpoint(Path(d) / "a", "Dream-v0-Base-7B"))
        qwen = load_checkpoint(public_checkpoint(Path(d) / "b", "Qwen2.5-7B"))
        mask = torch.ones(11, 11, dtype=torch.bool).tril()
        same = dict(rope_theta=1000000.0, rms_norm_eps=1e-6)
        llama = load_checkpoint(public_checkpoint(Path(d) / "c", "Meta-Llama-3-8B-Instruct", **same))
        assert torch.allclose(qwen(x), dream(x, mask=mask), atol=1e-5)
        for block, other in zip(dream.blocks, llama.blocks, strict=True):
            assert other.attn.qkv.bias is None
            block.attn.qkv.bias.zero_()
        dream.load_state_dict({k: v for k, v in llama.state_dict().items()}, strict=False)
        assert torch.allclose(llama(x), dream(x, mask=mask), atol=1e-5)


@section("public")
def test_config_fields_that_change_the_mathematics_are_refused():
    """What is not implemented stops with the field and its value; harmless fields do not."""
    wrong = {
        "LLaDA-8B-Instruct": dict(
            alibi=True, layer_norm_type="default", activation_type="gelu", include_bias=True
        ),
        "Qwen2.5-7B": dict(
            use_sliding_window=True, hidden_act="gelu", rope_scaling={"type": "yarn"}, head_dim=9
        ),
        "Meta-Llama-3-8B-Instruct": dict(attention_bias=True, mlp_bias=True),
        "huginn-0125": dict(injection_type="add", norm_class_name="LayerNorm", state_init="zero", bias=True),
    }
    with tempfile.TemporaryDirectory() as d:
        folder = Path(d)
        for name, fields in wrong.items():
            for field, value in fields.items():
                (folder / "config.json").write_text(json.dumps(PUBLIC[name] | {field: value}))
                raises(f"{field} is {re.escape(repr(value))}; only", tiny_models.read_layout, folder)
        scaled = PUBLIC["Meta-Llama-3-8B-Instruct"] | {"rope_scaling": {"rope_type": "llama3"}}
        (folder / "config.json").write_text(json.dumps(scaled))
        raises("Llama 3.1.* is out of scope", tiny_models.read_layout, folder)
        (folder / "config.json").write_text(
            json.dumps(PUBLIC["Qwen2.5-7B"] | {"made_up": 7, "sliding_window": 9})
        )
        tiny_models.read_layout(folder)
        j = {k: v for k, v in PUBLIC["Qwen2.5-7B"].items() if k != "rms_norm_eps"}
        (folder / "config.json").write_text(json.dumps(j))
        raises("lacks the field 'rms_norm_eps'", tiny_models.read_layout, folder)


@section("public")
def test_special_ids_come_from_the_files():
    """config.json first, then generation_config.json, tokenizer_config.json; what is missing is named."""
    j = {k: v for k, v in PUBLIC["LLaDA-8B-Instruct"].items() if not k.endswith("_token_id")}
    with tempfile.TemporaryDirectory() as d:
        folder = Path(d)
        (folder / "config.json").write_text(json.dumps(j))
        raises("give a eos_token_id", tiny_models.read_layout, folder)
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
        raises("give a mask_token_id", tiny_models.read_layout, folder)
        tokens = {"mask_token": {"content": "<m>"}, "added_tokens_decoder": {"9": {"content": "<m>"}}}
        (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
        c = tiny_models.read_layout(folder)[0].config
        assert (c.eos_id, c.pad_id, c.mask_id) == (7, 7, 9)


@section("public")
def test_corrupt_checkpoints_are_refused():
    """Damaged headers, indices and shards, each with its sentence."""
    with tempfile.TemporaryDirectory() as d:
        good = public_checkpoint(Path(d) / "good", "Dream-v0-Base-7B", shards=2)
        index = json.loads((good / "model.safetensors.index.json").read_text())
        first, second = sorted(set(index["weight_map"].values()))

        def damaged(change, message):
            folder = Path(d) / "bad"
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(good, folder)
            change(folder)
            raises(message, load_checkpoint, folder)

        def header(change):
            def apply(folder):
                raw = (folder / first).read_bytes()
                n = 8 + int.from_bytes(raw[:8], "little")
                text = change(json.loads(raw[8:n]))
                text = text if isinstance(text, bytes) else json.dumps(text).encode()
                (folder / first).write_bytes(len(text).to_bytes(8, "little") + text + raw[n:])

            return apply

        def edit(h, **fields):
            name = list(h)[1]
            return h | {name: h[name] | fields}

        def remap(name, file):
            def apply(folder):
                where = index["weight_map"] | {name: file}
                (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))

            return apply

        def cut_off(folder):
            (folder / first).write_bytes((folder / first).read_bytes()[:-100])

        damaged(lambda f: (f / second).unlink(), f"{second} does not exist")
        damaged(cut_off, "truncated or damaged")
        damaged(lambda f: (f / first).write_bytes(b"\xff" * 7 + b"\0" + b"{}"), "the header ends at byte")
        damaged(header(lambda h: b"{nonsense"), "the header of .* is not valid JSON")
        damaged(header(lambda h: edit(h, dtype="F8_E4M3")), "has dtype F8_E4M3; known are")
        damaged(header(lambda h: edit(h, data_offsets=[0, 10**9])), "is said to be bytes")
        damaged(header(lambda h: h | {"other": h[list(h)[1]]}), "overlap at byte|unexpected 1 tensors: other")
        damaged(lambda f: (f / "config.json").write_text("{"), "config.json is not valid JSON")
        damaged(
            lambda f: (f / "model.safetensors.index.json").write_text("["), "index.json is not valid JSON"
        )
        damaged(remap("model.norm.weight", "../" + first), "not a file of this folder")
        damaged(remap("model.norm.weight", "/etc/passwd"), "not a file of this folder")
        damaged(remap("no.such.weight", first), "says that no.such.weight is in")


@section("public")
def test_loading_streams_from_the_files():
    """About 1 GB of bfloat16 in three shards: peak memory is at most 1.1 times the weights; it decodes."""
    with open("/proc/meminfo") if Path("/proc/meminfo").exists() else io.StringIO() as f:
        free = {line.split(":")[0]: int(line.split()[1]) for line in f}.get("MemAvailable", 0) / 1e6
    if free < 4 or shutil.disk_usage(tempfile.gettempdir()).free < 3e9:
        raise Skip("needs 4 GB of free memory (known on Linux only) and 3 GB of disk")
    sizes = dict(d_model=2048, n_layers=8, n_heads=16, n_kv_heads=16, mlp_hidden_size=8192)
    sizes |= dict(vocab_size=8192, embedding_size=8192)
    code = """if True:
        import sys, torch, d2f, tiny_models
        def resident(field):
            lines = open("/proc/self/status").read().splitlines()
            return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024
        torch.ones(64, 64) @ torch.ones(64, 64)
        before = resident("VmRSS")
        model = tiny_models.load_checkpoint(sys.argv[1], dtype=torch.bfloat16)
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        print(weights, (resident("VmHWM") - before) / weights)
        assert len(d2f.pipelined_decode(model, [[1, 2, 3]], 4, 4).answers[0]) in range(1, 5)
    """
    with tempfile.TemporaryDirectory() as d:
        folder = public_checkpoint(Path(d) / "big", "LLaDA-8B-Instruct", 3, torch.bfloat16, **sizes)
        p = run("-c", textwrap.dedent(code), folder)
    assert p.returncode == 0, p.stderr[-2000:]
    weights, ratio = map(float, p.stdout.split())
    print(f"{weights / 1e9:.2f} GB of weights, peak resident memory {ratio:.3f} times that")
    assert weights > 0.9e9 and ratio <= 1.1, p.stdout


@section("public")
def test_bfloat16_is_near_float32():
    """Logits in bfloat16 are within 2% (relative norm) of float32's, in every layout, freshly initialised.

    (On the golden checkpoints, whose weights are scaled up, rounding the weights alone moves them 1 to 6%.)
    """
    x = torch.randint(0, 250, (2, 24), generator=torch.Generator().manual_seed(0))
    with tempfile.TemporaryDirectory() as d:
        for name in PUBLIC:
            folder = public_checkpoint(Path(d) / name, name)
            model = load_checkpoint(folder).init_weights(torch.Generator().manual_seed(0))
            low = load_checkpoint(folder, dtype=torch.bfloat16)
            low.load_state_dict(model.state_dict())
            args = [(4, torch.zeros(2, 24, 32)) if hasattr(model, "recur") else ()] * 2
            args[1] = tuple(a.bfloat16() if isinstance(a, torch.Tensor) else a for a in args[1])
            exact, rough = model(x, *args[0]), low(x, *args[1]).float()
            error = ((rough - exact).norm() / exact.norm()).item()
            assert low.dtype == torch.bfloat16 and 0 < error < 0.02, (name, error)


@section("public")
def test_the_reader_agrees_with_the_safetensors_package():
    """The same names, dtypes, shapes and values, both ways."""
    needs("safetensors")
    from safetensors.torch import load_file, save_file

    with tempfile.TemporaryDirectory() as d:
        tensors = {f"{t}": torch.arange(12).reshape(3, 4).to(t) for t in tiny_models.DTYPES.values()}
        tensors |= {"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 4)}
        tiny_models.write_safetensors(f"{d}/ours", tensors)
        save_file(tensors, f"{d}/theirs")
        for one, other in ((load_file(f"{d}/ours"), tensors), (read_safetensors(f"{d}/theirs"), tensors)):
            assert one.keys() == other.keys()
            assert all(one[k].dtype == v.dtype and torch.equal(one[k], v) for k, v in other.items())


@section("public")
def test_dry_run_counts_from_the_config_alone():
    """Parameters, weight and cache bytes, work and the bandwidth floor of the five at full size."""
    with tempfile.TemporaryDirectory() as d:
        for name, j in PUBLIC.items():
            (Path(d) / name).mkdir()
            (Path(d) / name / "config.json").write_text(json.dumps(j))
        rows = {name: tiny_models.describe(Path(d) / name, 2000.0) for name in PUBLIC}
        p = run("d2f.py", "--dry-run", *(f"{d}/{name}" for name in PUBLIC))
    llada = rows["LLaDA-8B-Instruct"]
    assert llada["weights, GB"] == "16.0" and llada["KV cache per 1,000 tokens, MB"] == "524"
    used = 8.0156e9 - 126464 * 4096  # the embedding is looked up
    assert abs(float(llada["forwards/s at 2000 GB/s"]) / (2e12 / (2 * used)) - 1) < 0.01
    huginn = float(rows["huginn-0125"]["GFLOP a position"])
    assert 60 < huginn < 120, huginn  # 32 recurrences of 4 layers of 0.4e9 parameters each
    assert p.returncode == 0 and all(f"|{name}|" in p.stdout for name in PUBLIC), p.stderr


@section("lora")
def test_merged_adapters_give_the_released_logits():
    """W + (alpha / r) B A in the fused rows of q, k, v: the adapters of the released loss vectors."""
    for case in ("llada_mha", "dream_gqa"):
        t, j = read_safetensors(FIXTURES / case / "loss.safetensors"), golden(case, "loss")
        model = load_checkpoint(FIXTURES / case / "model", lora=FIXTURES / case / "lora")
        noisy, masked = t["noisy_batch"], t["masked_indices"]
        mask = d2f.block_causal_mask(noisy.shape[1], t["prompt_lengths"], j["block_size"])
        logits = d2f.align(model(noisy, mask=mask), model.config.shift)[masked]
        worst = (logits - t["student_logits_at_masked"]).abs().max().item()
        assert worst < 2e-3, (case, worst)
        base = d2f.align(golden_model(case)(noisy, mask=mask), model.config.shift)[masked]
        assert (base - t["student_logits_at_masked"]).abs().max() > 0.05, "the adapter changes nothing"


@section("lora")
def test_adapters_that_do_not_fit_are_refused():
    """Another base, features we lack, tensors that belong nowhere or have other shapes."""
    base, source = FIXTURES / "llada_mha" / "model", FIXTURES / "llada_mha" / "lora"
    with tempfile.TemporaryDirectory() as d:
        lora = Path(d) / "lora"

        def refused(message, tensors=None, **config):
            shutil.rmtree(lora, ignore_errors=True)
            shutil.copytree(source, lora)
            j = json.loads((source / "adapter_config.json").read_text())
            (lora / "adapter_config.json").write_text(json.dumps(j | config))
            if tensors:
                adapter = {
                    k: v.clone() for k, v in read_safetensors(source / "adapter_model.safetensors").items()
                }
                tensors(adapter)
                tiny_models.write_safetensors(lora / "adapter_model.safetensors", adapter)
            raises(message, load_checkpoint, base, lora=lora)

        name = "base_model.model.model.transformer.blocks.0.q_proj.lora_A.weight"
        refused(
            "is an adapter for GSAI/LLaDA-8B-Base, but the checkpoint is model",
            base_model_name_or_path="GSAI/LLaDA-8B-Base",
        )
        load_checkpoint(base, lora=lora, any_base=True)
        refused("use_dora is True", use_dora=True)
        refused("use_rslora is True", use_rslora=True)
        refused("bias is 'all'", bias="all")
        refused("modules_to_save is", modules_to_save=["wte"])
        refused("rank_pattern is", rank_pattern={"q_proj": 8})
        refused("is not a pair of lora_A and lora_B", lambda t: t.pop(name))
        refused("is not a pair", lambda t: t.update({name.replace("q_proj", "other"): t.pop(name)}))
        refused("has shapes", lambda t: t.update({name: t[name][:, :5].clone()}))
        refused("unexpected tensors: .*lora_A.bias", lambda t: t.update({name[:-6] + "bias": t[name]}))
        raises("has no adapter_config.json", load_checkpoint, base, lora=d)
        j = json.loads((source / "adapter_config.json").read_text())
        shutil.rmtree(lora)
        shutil.copytree(source, lora)
        j["base_model_name_or_path"] = "GSAI-ML/LLaDA-8B-Instruct"
        (lora / "adapter_config.json").write_text(json.dumps(j))
        cached = Path(d) / "models--GSAI-ML--LLaDA-8B-Instruct" / "snapshots" / "0123abcd"
        shutil.copytree(base, cached)
        load_checkpoint(cached, lora=lora)  # a folder of the hub's cache has the name of its checkpoint


@section("tokenizer")
def test_chat_formats():
    """One user turn in each family's literal form; a checkpoint's own template goes first."""
    needs("tokenizers")
    llada = "<|startoftext|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
    llada += "<|start_header_id|>assistant<|end_header_id|>\n\n"
    chatml = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    expected = {
        "LLaDA-8B-Instruct": llada,
        "Dream-v0-Base-7B": "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n" + chatml,
        "Qwen2.5-7B": "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. "
        "You are a helpful assistant.<|im_end|>\n" + chatml,
        "Meta-Llama-3-8B-Instruct": llada.replace("startoftext", "begin_of_text"),
        "huginn-0125": "<|begin_text|><|begin_header|>user<|end_header|>\n\nHi<|end_turn|>"
        "<|begin_header|>Huginn<|end_header|>\n\n",
    }
    with tempfile.TemporaryDirectory() as d:
        for name, text in expected.items():
            tokenizer = tiny_models.load_tokenizer(public_checkpoint(Path(d) / name, name))
            assert tokenizer.chat("Hi") == text, name
            assert tokenizer.instruct == ("Instruct" in name), name
        needs("jinja2")
        template = "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{% endfor %}"
        template += "{% if add_generation_prompt %} [me]{% endif %}"
        settings = {"chat_template": template, "bos_token": {"content": "<s>"}}
        (Path(d) / "huginn-0125" / "tokenizer_config.json").write_text(json.dumps(settings))
        assert tiny_models.load_tokenizer(Path(d) / "huginn-0125").chat("Hi") == "<s>[user] Hi [me]"
        (Path(d) / "huginn-0125" / "chat_template.jinja").write_text("{{ messages[0]['content'] }}!")
        assert tiny_models.load_tokenizer(Path(d) / "huginn-0125").chat("Hi") == "Hi!"


@section("tokenizer")
def test_tokenizers_of_checkpoints():
    """Round trips, special tokens, stop ids; a table smaller than the tokenizer, or none, is refused."""
    needs("tokenizers")
    with tempfile.TemporaryDirectory() as d:
        folder = public_checkpoint(Path(d) / "a", "LLaDA-8B-Instruct")
        t = tiny_models.load_tokenizer(folder)
        text = "12 + 3 = 15\n\u00e9\u4f60 "
        assert t.decode(t.encode(text)) == text and t.encode(text).dtype == np.int64
        assert t.encode("<|eot_id|>a").tolist() == [258, 97] and t.decode([258, 97, 256]) == "a"
        assert t.stop_ids == {256, 258} and t.turn_end == 258 and t.n_tokens == 262
        small = public_checkpoint(Path(d) / "b", "LLaDA-8B-Instruct", vocab_size=260, embedding_size=260)
        raises("the tokenizer has 262 ids, the model only 260", tiny_models.load_tokenizer, small)
        j = json.loads((folder / "tokenizer.json").read_text())
        first = [
            {"SpecialToken": {"id": "<|startoftext|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ]
        ids = {"<|startoftext|>": {"id": "<|startoftext|>", "ids": [261], "tokens": ["<|startoftext|>"]}}
        rule = {"type": "TemplateProcessing", "single": first, "pair": first, "special_tokens": ids}
        (folder / "tokenizer.json").write_text(json.dumps(j | {"post_processor": rule}))
        t = tiny_models.load_tokenizer(folder)
        assert t.encode("a").tolist() == t.encode("<|startoftext|>a").tolist() == [261, 97]
        (folder / "tokenizer.json").unlink()
        raises("has no tokenizer.json", tiny_models.load_tokenizer, folder)


@section("tokenizer")
def test_byte_level_bpe_from_vocab_and_merges():
    """Dream's way: vocab.json, merges.txt and added tokens. By hand on a small vocabulary: merges, digits one
    by one, words with their space, contractions; added tokens are never split and keep their ids.
    """
    needs("tokenizers")
    alphabet = byte_alphabet()
    space = alphabet[32]
    merges = [("h", "i"), (space, "hi"), ("1", "2"), ("'", "s")]
    vocab = alphabet + [a + b for a, b in merges]
    with tempfile.TemporaryDirectory() as d:
        folder = public_checkpoint(Path(d) / "a", "Dream-v0-Base-7B")
        (folder / "tokenizer.json").unlink()
        (folder / "vocab.json").write_text(json.dumps({c: i for i, c in enumerate(vocab)}))
        (folder / "merges.txt").write_text(
            "#version: 0.2\n" + "\n".join(f"{a} {b}" for a, b in merges) + "\n"
        )
        added = {"260": {"content": "<|im_end|>"}, "261": {"content": "<|mask|>"}}
        (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
        t = tiny_models.load_tokenizer(folder)
        assert t.encode("hi hi").tolist() == [256, 257]
        assert t.encode("12").tolist() == [49, 50], "digits stand alone, so 1 and 2 never merge"
        assert t.encode("hi's").tolist() == [256, 259]
        assert t.encode("hi<|im_end|>hi").tolist() == [256, 260, 256] and t.turn_end == 260
        assert t.decode(t.encode("hi hi's 12 \u00e9<|mask|>")) == "hi hi's 12 \u00e9"
        wrong = {"270": {"content": "<|im_end|>"}}
        (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": wrong}))
        raises("does not get its id 270", tiny_models.load_tokenizer, folder)


# ---------------------------------------------------------------------- full checkpoints: their command lines


def command(module, *args) -> tuple[str, str, str]:
    """What module.main(args) prints on its two streams, and its last words if it exits."""
    out, err, words = io.StringIO(), io.StringIO(), ""
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            module.main([str(a) for a in args])
        except SystemExit as e:
            words = str(e.code)
    return out.getvalue(), err.getvalue(), words


def jsonl(path, *rows):
    Path(path).write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return path


@section("full")
def test_command_lines_answer_a_prompt():
    """Every method on its checkpoint: what was streamed is the text of the answer, then statistics."""
    needs("tokenizers")
    lines = {
        ("LLaDA-8B-Instruct", d2f): ("pipelined", "vanilla", "cached"),
        ("Dream-v0-Base-7B", d2f): ("pipelined", "vanilla", "cached"),
        ("Qwen2.5-7B", d2f): ("ar",),
        ("huginn-0125", rs): rs.METHODS,
    }
    with tempfile.TemporaryDirectory() as d:
        for (name, module), methods in lines.items():
            folder = public_checkpoint(Path(d) / name, name)
            model, t = load_checkpoint(folder), tiny_models.load_tokenizer(folder)
            model.config.n_tokens = t.n_tokens
            for method in methods:
                args = ["--checkpoint", folder, "--prompt", "1+1=", "--raw", "--method", method]
                args += ["--max-new-tokens", 11, "--device", "cpu"]
                out, err, words = command(module, *args)
                assert not words, (name, method, words)
                options = module.parse_args(
                    [str(a) for a in [*args, "--r", 32]][: None if module is rs else -2]
                )
                if module is d2f:
                    d2f.settle_options(options, model.config.shift)
                options.inner = 4
                ids = module.decode(options, model, t.encode("1+1=")).answers[0]
                assert out == tiny_models.answer_text(t, ids) + "\n", (name, method)
                assert f"{len(ids)} answer tokens" in err and "peak memory" in err, err
                watched, _, words = command(module, *args, "--watch")
                assert not words and (watched.count("positions") > 1 or method in rs.METHODS[1:]), method
        p = run(
            "d2f.py",
            "--checkpoint",
            Path(d) / "Dream-v0-Base-7B",
            "--prompt",
            "-",
            "--max-new-tokens",
            9,
            input="1+1=",
        )
        assert p.returncode == 0 and "answer tokens" in p.stderr, p.stderr


@section("full")
def test_command_lines_refuse_in_one_sentence():
    """Empty and overlong prompts, methods a model cannot run, missing folders and arguments."""
    needs("tokenizers")
    with tempfile.TemporaryDirectory() as d:
        llada, qwen = (public_checkpoint(Path(d) / n, n) for n in ("LLaDA-8B-Instruct", "Qwen2.5-7B"))
        for args, message in (
            (["--checkpoint", llada, "--prompt", " "], "the prompt is empty"),
            (["--checkpoint", llada, "--prompt", "x" * 300], "together at most 256"),
            (["--checkpoint", qwen, "--prompt", "x"], "no mask token"),
            (["--checkpoint", llada, "--prompt", "x", "--method", "ar", "--max-new-tokens", 3], "causal"),
            (["--checkpoint", f"{d}/none/at/all", "--prompt", "x"], "neither a folder nor a name"),
            (["--checkpoint", llada], "give two numbers to add, or --checkpoint with --prompt"),
            (["--checkpoint", llada, "--prompt", "x", "--tau-conf", 2], "tau_conf is 2.0"),
            (["--checkpoint", llada, "--prompt", "x", "--temperature", -1], "temperature is -1.0"),
            ([1], "give two numbers"),
        ):
            words = command(d2f, *args)[2]
            assert message in words and "\n" not in words, (args, words)


@section("full")
def test_presets_are_table_8():
    """--preset takes the row of the checkpoint's family; what is given explicitly wins."""
    for shift, benchmark, expected in (
        (False, "gsm8k", (512, 64, 0.7, 0.95, 0.9)),
        (False, "mbpp", (512, 32, 0.9, 0.95, 0.9)),
        (False, "humaneval", (512, 32, 0.1, 0.95, 0.9)),
        (False, "math", (512, 32, 0.1, 0.95, 0.9)),
        (True, "gsm8k", (256, 32, 0.1, 0.95, 0.9)),
        (True, "mbpp", (256, 48, 0.1, 0.95, 0.9)),
        (True, "humaneval", (256, 32, 0.9, 0.95, 0.95)),
        (True, "math", (256, 64, 0.1, 0.95, 0.9)),
    ):
        args = d2f.parse_args(["--preset", benchmark])
        d2f.settle_options(args, shift)
        got = (args.max_new_tokens, args.block_size, args.tau_add, args.tau_act, args.tau_conf)
        assert got == expected, (shift, benchmark, got)
    args = d2f.parse_args(["--preset", "gsm8k", "--tau-add", "0.3"])
    d2f.settle_options(args, False)
    assert (args.tau_add, args.block_size) == (0.3, 64)


@section("full")
def test_streams_show_whole_characters():
    """What is shown grows to the answer's text; the bytes of a character wait for each other."""
    needs("tokenizers")
    with tempfile.TemporaryDirectory() as d:
        t = tiny_models.load_tokenizer(public_checkpoint(Path(d) / "a", "LLaDA-8B-Instruct"))
        out, ids = io.StringIO(), [*t.encode("a\u00e9\u4f60b"), 256, 97]
        stream = tiny_models.Stream(t, out)
        for n in range(len(ids) + 1):
            stream.show(ids[:n])
            assert "\ufffd" not in out.getvalue() and "a\u00e9\u4f60b".startswith(out.getvalue())
        stream.show(ids, last=True)
        assert out.getvalue() == "a\u00e9\u4f60b\n"


@section("full")
def test_the_last_number_is_the_answer():
    """Flexible extraction: the last number, without $, thousands separators and a final full stop."""
    for text, number in (
        ("so 3 + 4 = 7.", "7"),
        ("It costs $1,234.50 in all", "1234.5"),
        ("-12", "-12"),
        ("5.00 dollars", "5"),
        ("from 10 to 20, then", "20"),
        ("none", None),
    ):
        assert tiny_models.last_number(text) == number, text
    gsm = {"question": "q", "answer": "thinking 3 4\n#### 1,000"}
    assert tiny_models.is_right("I say 7, no: 1000.", gsm) and not tiny_models.is_right("1000, no: 7", gsm)
    word = {"prompt": "p", "reference": "yes"}
    assert tiny_models.is_right(" yes\n", word) and not tiny_models.is_right("yes 1", word)


@section("full")
def test_evaluation_counts_resumes_and_reports():
    """Accuracy against answers made with the model itself; few-shot text; a broken line; a killed run
    goes on without redoing what is done; other settings are refused.
    """
    needs("tokenizers")
    with tempfile.TemporaryDirectory() as d:
        folder = public_checkpoint(Path(d) / "llada", "LLaDA-8B-Instruct")
        common = ["--checkpoint", folder, "--raw", "--max-new-tokens", 8, "--device", "cpu"]
        asked = [f"{i}+{i}=" for i in range(4)]
        said = [command(d2f, *common, "--prompt", q)[0].strip() for q in asked]
        problems = [{"prompt": q, "reference": a} for q, a in zip(asked, said, strict=True)]
        problems[2]["reference"] = "something else"
        file = jsonl(f"{d}/p.jsonl", *problems[:2], "{broken", *problems[2:], {"question": "no answer"})
        args = [*common, "--eval", file]
        out, err, words = command(d2f, *args)
        assert not words and "4 problems, 75.0% right" in out, (out, words)
        assert "line 3 is not valid JSON" in err and "line 6 has no question and answer" in err, err

        saved = Path(f"{file}.results.jsonl")
        lines = saved.read_text().splitlines()
        assert len(lines) == 5 and [json.loads(x)["right"] for x in lines[1:]] == [True, True, False, True]
        marked = json.loads(lines[1]) | {"right": False}  # shows that it is not redone
        saved.write_text("\n".join([lines[0], json.dumps(marked), lines[2], lines[3][:20]]))
        assert "4 problems, 50.0% right" in command(d2f, *args)[0]
        assert len(saved.read_text().splitlines()) == 5
        words = command(d2f, *args, "--block-size", 4)[2]
        assert "holds results of other settings" in words

        examples = [{"question": f"q{i}", "answer": f"a{i}"} for i in range(3)]
        text = tiny_models.problem_text({"question": "q", "answer": "#### 1"}, examples[:2])
        assert text == "Question: q0\nAnswer: a0\n\nQuestion: q1\nAnswer: a1\n\nQuestion: q\nAnswer:"
        gsm = jsonl(f"{d}/g.jsonl", {"question": "1+1?", "answer": "#### 2"})
        shots = ["--few-shot", jsonl(f"{d}/s.jsonl", *examples), "--shots", 2]
        out, _, words = command(d2f, *common, "--eval", gsm, *shots)
        assert not words and "1 problems" in out
        huginn = public_checkpoint(Path(d) / "huginn-0125", "huginn-0125")
        more = [
            "--checkpoint",
            huginn,
            "--raw",
            "--eval",
            gsm,
            "--max-new-tokens",
            8,
            "--save",
            f"{d}/h.jsonl",
        ]
        more += ["--eps", 10]  # an untrained model never settles
        out, _, words = command(rs, *more)
        assert not words and "core passes" in Path(f"{d}/h.jsonl").read_text(), words


@section("full")
def test_lm_evaluation_harness_runs_a_local_task():
    """Both adapters in lm-evaluation-harness: a local task of two lines, one of them answered right."""
    needs("lm_eval", "tokenizers")
    with tempfile.TemporaryDirectory() as d:
        for name, public, module in (("d2f", "LLaDA-8B-Instruct", d2f), ("wavefront", "huginn-0125", rs)):
            folder = public_checkpoint(Path(d) / public, public)
            options = ["--checkpoint", folder, "--max-new-tokens", 6, "--device", "cpu"]
            options += ["--raw"] + (["--eps", 10] if module is rs else [])
            said = [command(module, *options, "--prompt", q)[0].rstrip("\n") for q in ("1+1=", "2+2=")]
            rows = [dict(q="1+1=", a=said[0]), dict(q="2+2=", a=said[1] + " and more")]
            task = dict(
                task="two_lines", dataset_path="json", test_split="test", output_type="generate_until",
                dataset_kwargs={"data_files": {"test": str(jsonl(f"{d}/two.jsonl", *rows))}},
                doc_to_text="{{q}}", doc_to_target="{{a}}", generation_kwargs={"until": ["</s>"]},
                metric_list=[dict(metric="exact_match", aggregation="mean", higher_is_better=True)],
            )  # fmt: skip
            (Path(d) / "two_lines.yaml").write_text(json.dumps(task))  # JSON is YAML
            args = f"checkpoint={folder},max_new_tokens=6,raw=True" + (",eps=10" if module is rs else "")
            where = ["--tasks", "two_lines", "--include_path", d, "--device", "cpu"]
            env = {"HF_HOME": d, "HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}
            p = run("experiments/harness.py", "--model", name, "--model_args", args, *where, env=env)
            assert p.returncode == 0, p.stderr[-3000:]
            line = next(x for x in p.stdout.splitlines() if "exact_match" in x)
            assert "|0.5" in line.replace(" ", ""), p.stdout


# ------------------------------------------------------ full checkpoints: what their command lines must stand


def tiny_checkpoint(folder, **changes) -> Path:
    """An untrained model of characters, as train_tiny.py saves one: no optional package reads it."""
    t = CharTokenizer()
    ids = dict(n_tokens=t.n_tokens, mask_id=t.mask_id, eos_id=t.eos_id, pad_id=t.pad_id)
    save_checkpoint(folder, random_model(**ids, **changes), alphabet=t.alphabet)
    return Path(folder)


class Pieces(io.StringIO):
    """A stream that remembers what was written at a time."""

    def __init__(self):
        super().__init__()
        self.pieces = []

    def write(self, text):
        self.pieces += [text] if text else []
        return super().write(text)


@section("full")
def test_text_streams_in_pieces_and_is_the_answer():
    """While the answer grows more than once something new is printed, never taken back; together the
    answer's text. A line end of standard input is no part of the prompt.
    """
    with tempfile.TemporaryDirectory() as d:
        folder = tiny_checkpoint(f"{d}/tiny")
        args = ["--checkpoint", folder, "--max-new-tokens", 40, "--device", "cpu", "--block-size", 8]
        model, t = load_checkpoint(folder), CharTokenizer()
        ids = d2f.pipelined_decode(model, t.encode("12+34="), 40, 8).answers[0]
        for extra, stdin in ((["--prompt", "12+34="], None), (["--prompt", "-", "--chat"], "12+34=\n")):
            out = Pieces()
            before, sys.stdin = sys.stdin, io.StringIO(stdin)
            try:
                with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
                    d2f.main([str(a) for a in [*args, *extra]])
            finally:
                sys.stdin = before
            assert out.getvalue() == tiny_models.answer_text(t, ids) + "\n", extra
            assert len(out.pieces) > 3, out.pieces


@section("full")
def test_a_stream_survives_a_tokenizer_that_rewrites():
    """Where a longer answer's text does not begin with the shorter one's, the whole of it is said at last."""

    class Rewriting(CharTokenizer):
        def decode(self, ids, **_):
            return super().decode(ids).replace("12", "7")

    t, out = Rewriting(), io.StringIO()
    stream = tiny_models.Stream(t, out)
    for n in range(1, 5):
        stream.show(t.encode("3120")[:n])
    stream.show(t.encode("3120"), last=True)
    assert out.getvalue() == "31\n370\n", out.getvalue()


@section("full")
def test_an_answer_ends_at_any_stop_id():
    """Text and count of tokens end at the first id that ends a text or a turn, whichever it is."""
    needs("tokenizers")
    with tempfile.TemporaryDirectory() as d:
        t = tiny_models.load_tokenizer(public_checkpoint(Path(d) / "a", "LLaDA-8B-Instruct"))
        turn, text = (int(t.encode(s)[0]) for s in ("<|eot_id|>", "<|endoftext|>"))
        for ids in ([97, 98, turn, 99, text], [97, 98, text, turn]):
            assert tiny_models.until_stop(t, ids) == ids[:3] and tiny_models.answer_text(t, ids) == "ab"
        assert tiny_models.until_stop(t, [97]) == [97]
        args = SimpleNamespace(prompt="x", chat=False, device="cpu")
        said = io.StringIO()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
            answer = [97, 98, turn, 99, text], {"forwards": 2}
            tiny_models.answer_prompt(args, t, lambda ids, watch: answer, None)
        assert said.getvalue().startswith("3 answer tokens, 2 forwards, 1.5 tokens a forward"), (
            said.getvalue()
        )


@section("full")
def test_command_lines_refuse_what_cannot_be():
    """The other paper's model, devices that are not there, options that exclude or need each other, limits:
    one sentence each, and a file that is no results file stays as it is.
    """
    with tempfile.TemporaryDirectory() as d:
        tiny, deep = tiny_checkpoint(f"{d}/tiny"), Path(d) / "deep"
        save_checkpoint(deep, tiny_recurrent(), alphabet=CharTokenizer().alphabet)
        problems = jsonl(f"{d}/p.jsonl", {"prompt": "1+1=", "reference": "2"})
        asked = ["--checkpoint", tiny, "--prompt", "1"]
        for module, args, message in (
            (d2f, ["--checkpoint", deep, "--prompt", "1"], "is a RecurrentDepth where a Transformer"),
            (rs, asked, "is a Transformer where a RecurrentDepth"),
            (d2f, [*asked, "--device", "nowhere"], "device 'nowhere' cannot be used here"),
            (d2f, [*asked, "--eval", problems], "--prompt and --eval exclude each other"),
            (d2f, [*asked, "--few-shot", problems], "--few-shot needs --eval"),
            (d2f, [*asked, "--limit", 3], "--limit needs --eval"),
            (rs, ["--checkpoint", deep, "--prompt", " "], "the prompt is empty"),
            (rs, ["--checkpoint", deep, "--prompt", "1", "--inner", 0], "inner is 0; it must be at least 1"),
            (rs, ["--checkpoint", deep, "--prompt", "1", "--top-p", 0], "top_p is 0.0"),
            (rs, ["--checkpoint", deep, "--prompt", "1", "--max-new-tokens", 0], "max_new_tokens is 0"),
            (
                d2f,
                ["--checkpoint", tiny, "--eval", problems, "--limit", 0],
                "limit is 0; it must be at least 1",
            ),
            (d2f, ["--checkpoint", tiny, "--eval", problems, "--shots", -1], "shots is -1"),
            (d2f, ["--checkpoint", tiny, "--eval", d], "does not exist or is not a file"),
            (d2f, ["--checkpoint", tiny, "--eval", f"{d}/none.jsonl"], "does not exist or is not a file"),
            (
                d2f,
                ["--checkpoint", tiny, "--dry-run", "--bandwidth", 0],
                "bandwidth is 0; it must be above 0",
            ),
            (rs, ["--dry-run"], "give a program to run, or --checkpoint"),
            (d2f, ["--checkpoint", tiny, "--eval", problems, "--save", problems], "holds no results"),
        ):
            words = command(module, *args)[2]
            assert message in words and "\n" not in words, (args, words)
        assert Path(problems).read_text() == '{"prompt": "1+1=", "reference": "2"}\n'
        out, _, words = command(d2f, "--checkpoint", tiny, "--dry-run")
        assert not words and "|tiny|" in out, (out, words)


@section("full")
def test_more_numbers_that_end_an_answer():
    """Minus and $ in either order, a bare decimal point, dots and commas that belong to the sentence."""
    for text, number in (
        ("a loss of $-5", "-5"),
        ("a loss of -$5.10!", "-5.1"),
        ("half is .5", "0.5"),
        ("minus a half is -.50", "-0.5"),
        ("and the answer is...42", "42"),
        ("1,234.50.", "1234.5"),
        ("3, 4, and 100,", "100"),
        ("100", "100"),
        ("0", "0"),
        ("...", None),
        ("", None),
    ):
        assert tiny_models.last_number(text) == number, (text, tiny_models.last_number(text))


@section("full")
def test_evaluation_asks_what_a_prompt_would():
    """The response to a problem with solved examples is that to the whole text given by hand: so many
    examples as --shots says, and as a turn of a chat if it is one.
    """
    needs("tokenizers")
    with tempfile.TemporaryDirectory() as d:
        folder = public_checkpoint(Path(d) / "llada", "LLaDA-8B-Instruct")
        examples = [{"question": f"{i}?", "answer": f"#### {i}"} for i in range(4)]
        file = jsonl(f"{d}/p.jsonl", {"question": "7?", "answer": "#### 7"})
        common = ["--checkpoint", folder, "--max-new-tokens", 8, "--device", "cpu"]
        few = ["--few-shot", jsonl(f"{d}/s.jsonl", *examples)]
        said = set()
        for shots, form in ((0, "--raw"), (1, "--raw"), (3, "--raw"), (3, "--chat")):
            solved = "".join(f"Question: {i}?\nAnswer: #### {i}\n\n" for i in range(shots))
            by_hand = command(d2f, *common, form, "--prompt", f"{solved}Question: 7?\nAnswer:")[0][:-1]
            saved = Path(d) / f"{shots}{form}.jsonl"
            words = command(d2f, *common, form, "--eval", file, *few, "--shots", shots, "--save", saved)[2]
            assert not words, words
            assert json.loads(saved.read_text().splitlines()[1])["response"] == by_hand, (shots, form)
            said.add(by_hand)
        assert len(said) == 4, said


@section("full")
def test_evaluation_of_odd_lines():
    """Lines that are no problems are named by their number, what cannot be asked counts as wrong, all others
    are answered; a file that was mended meanwhile is not misread.
    """
    with tempfile.TemporaryDirectory() as d:
        folder, file = tiny_checkpoint(f"{d}/tiny"), Path(d) / "p.jsonl"
        args = ["--checkpoint", folder, "--max-new-tokens", 4, "--device", "cpu", "--eval", file]
        said = {q: command(d2f, *args[:-2], "--prompt", q)[0].strip() for q in ("1+1=", "2+2=", "3+3=")}
        lines = [json.dumps({"prompt": q, "reference": a, "note": "a\u2028b"}) for q, a in said.items()]
        lines[1:1] = ["5", "[]", '{"prompt": ["1"], "reference": "2"}', '{"question": "x"}', "\udcff", ""]
        lines[1:1] = [json.dumps({"prompt": "1" * 300, "reference": "1"}), json.dumps({"prompt": "?"})]
        lines += [json.dumps({"prompt": "a?", "reference": 1})]
        file.write_bytes(
            "\n".join(lines).encode("utf-8", "surrogateescape").replace(b"\\u2028", b"\xe2\x80\xa8")
        )
        out, err, words = command(d2f, *args)
        assert not words and out.startswith("5 problems, 60.0% right"), (out, err, words)
        assert "2 of them could not be asked, 6 broken lines left out" in out, out
        for n in (3, 4, 5, 6, 7, 8):
            assert f"line {n} " in err, (n, err)
        assert "line 2 counts as wrong: prompt 0 has 300 tokens" in err, err
        assert "line 12 counts as wrong: character" in err, err

        saved = Path(f"{file}.results.jsonl")
        n_lines = len(saved.read_text().splitlines())
        lines[3], lines[9] = json.dumps({"prompt": "4+4=", "reference": "no"}), lines[9].replace("2+2", "5+5")
        lines = [line.encode("utf-8", "surrogateescape") for line in lines]
        file.write_bytes(b"\n".join(lines).replace(b"\\u2028", b"\xe2\x80\xa8"))
        out, _, words = command(d2f, *args)
        assert not words and out.startswith("6 problems, "), (out, words)
        assert len(saved.read_text().splitlines()) == n_lines + 2  # the mended line and the changed one


@section("full")
def test_results_files_of_other_kinds():
    """A killed first line is begun again; other settings are refused by name; examples must be there."""
    with tempfile.TemporaryDirectory() as d:
        folder = tiny_checkpoint(f"{d}/tiny")
        file = jsonl(f"{d}/p.jsonl", {"prompt": "1+1=", "reference": "2"})
        args = ["--checkpoint", folder, "--max-new-tokens", 4, "--device", "cpu", "--eval", file]
        saved = Path(f"{file}.results.jsonl")
        out, _, words = command(d2f, *args)
        assert not words and out.startswith("1 problems"), words
        whole = saved.read_text()
        for n in (0, 1, 20):
            saved.write_text(whole[:n])
            assert not command(d2f, *args)[2] and len(saved.read_text().splitlines()) == 2, n
        assert "(tau_conf 0.9, now 0.5)" in command(d2f, *args, "--tau-conf", 0.5)[2]
        broken = jsonl(f"{d}/s.jsonl", {"prompt": "1+2=", "reference": "3"}, "{")
        few = [*args, "--save", f"{d}/r.jsonl", "--few-shot"]
        assert "line 2 is not valid JSON" in command(d2f, *few, broken)[2]
        few += [jsonl(f"{d}/s.jsonl", {"prompt": "1+2=", "reference": "3"})]
        assert "has 1 examples; --shots is 4" in command(d2f, *few)[2]
    mixed = [{"question": "q", "answer": "#### 1"}, {"prompt": "p", "reference": 2}]
    assert tiny_models.problem_text({"prompt": "x="}, mixed) == "Question: q\nAnswer: #### 1\n\np2\n\nx="


@section("full")
def test_a_killed_evaluation_goes_on():
    """SIGKILL and Ctrl-C in the middle: no finished line is lost or redone, and in the end all is as if it
    had never been stopped.
    """
    with tempfile.TemporaryDirectory() as d:
        folder = tiny_checkpoint(f"{d}/tiny", d_model=64, n_layers=4)
        rows = [{"prompt": f"{i}+{i}=", "reference": str(2 * i)} for i in range(30)]
        args = ["--checkpoint", folder, "--method", "vanilla", "--max-new-tokens", 60, "--device", "cpu"]
        args += ["--eval", jsonl(f"{d}/p.jsonl", *rows), "--block-size", 8, "--dtype", "float32"]
        saved, finished = Path(f"{d}/p.jsonl.results.jsonl"), [0]
        for stop in (signal.SIGKILL, signal.SIGINT):
            line = [sys.executable, "d2f.py", *map(str, args)]
            p = start(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            until = time.monotonic() + 120
            while time.monotonic() < until and p.poll() is None:
                if saved.exists() and saved.read_bytes().count(b"\n") > finished[-1] + 2:
                    break
                time.sleep(0.01)
            p.send_signal(stop)
            _, err = p.communicate(timeout=60)
            finished.append(saved.read_bytes().count(b"\n"))
            assert finished[-1] > finished[-2] + 2, err.decode()[-500:]
            if stop == signal.SIGINT:
                assert p.returncode == 1, err.decode()[-500:]
                assert err.decode().strip().endswith("interrupted; the same command goes on from here"), err
        assert finished[-1] < len(rows) + 1, "it was not stopped in the middle"
        kept = saved.read_bytes()
        kept = kept[: kept.rfind(b"\n") + 1]
        with open(saved, "ab") as f:
            f.write(b'{"line": 99, "che')
        again = run("d2f.py", *args)
        assert again.returncode == 0 and again.stdout.startswith("30 problems"), again.stderr[-500:]
        assert saved.read_bytes().startswith(kept)
        run("d2f.py", *args, "--save", f"{d}/at-once.jsonl")
        stopped, at_once = (
            [{k: v for k, v in json.loads(x).items() if k != "seconds"} for x in p.read_text().splitlines()]
            for p in (saved, Path(f"{d}/at-once.jsonl"))
        )
        assert stopped == at_once and len(stopped) == 31


@section("full")
def test_harness_stops_and_refuses():
    """generate_until: stop strings, max_gen_toks and its limit, prompts that are too long; an adapter's name;
    a chat; likelihoods are refused in one sentence.
    """
    needs("lm_eval", "tokenizers")
    sys.path.insert(0, str(HERE / "experiments"))
    import harness

    with tempfile.TemporaryDirectory() as d:
        for kind, name, more in (("d2f", "LLaDA-8B-Instruct", {}), ("wavefront", "huginn-0125", {"eps": 10})):
            folder = public_checkpoint(Path(d) / name, name)
            cls = harness.register()[kind]
            lm = cls(checkpoint=str(folder), max_new_tokens=12, raw=True, device="cpu", **more)

            def ask(context, lm=lm, **settings):
                return lm.generate_until([SimpleNamespace(args=(context, settings))])[0]

            whole, lengths = ask("1+1="), []
            for n in (5, 12, 99):
                before = lm.written
                ask("1+1=", max_gen_toks=n)
                lengths.append(lm.written - before)
            assert 1 <= lengths[0] <= 5 < lengths[1] == lengths[2] <= 12, lengths
            stop = whole[3:5]
            cut = whole[: whole.index(stop)]
            assert cut == ask("1+1=", until=["never there", stop]) == ask("1+1=", until=stop) != whole
            assert ask("a" * 500 + "b") == ask("a" * (256 - 12 - 1) + "b")
            chat = lm.apply_chat_template(
                [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
            )
            assert chat == lm.tokens.chat("s\n\nu")
            for call in (lm.loglikelihood, lm.loglikelihood_rolling):
                raises("tasks that need likelihoods cannot be run", call, [])
        raises("must name a checkpoint", cls, watch=False)
        raises("neither a folder nor a name", cls, checkpoint=f"{d}/none/at/all", device="cpu")
        base = str(public_checkpoint(Path(d) / "LLaDA-8B-Instruct", "LLaDA-8B-Instruct"))
        raises(
            "neither a folder nor a name",
            harness.register()["d2f"],
            checkpoint=base,
            lora=f"{d}/no/lora/here",
        )


# ---------------------------------------------------------------------------------------------------- running


def too_long(signum, frame):
    raise TimeoutError("the test ran into its time limit")


def run_test(f, verbose: bool, limit: int) -> str:
    """PASS, FAIL or SKIP; prints the line, and why. Fails after `limit` seconds, where the system can."""
    started, out, why = time.perf_counter(), io.StringIO(), ""
    torch.manual_seed(0)
    if hasattr(signal, "SIGALRM"):
        signal.signal(signal.SIGALRM, too_long)
        signal.alarm(limit)
    try:
        with contextlib.redirect_stdout(sys.stdout if verbose else out):
            f()
        status = "PASS"
    except Skip as e:
        status, why = "SKIP", f": {e}"
    except KeyboardInterrupt:
        raise
    except BaseException:
        status = "FAIL"
        traceback.print_exc(file=sys.stdout)
    finally:
        if hasattr(signal, "SIGALRM"):
            signal.alarm(0)
    print(f"{status} {time.perf_counter() - started:6.2f} s  {f.__name__}{why}", flush=True)
    return status


def main():
    p = argparse.ArgumentParser(description="Run the project's tests.")
    p.add_argument("--list", action="store_true", help="print the tests and their sections, run nothing")
    p.add_argument("-k", metavar="WORD", default="", help="only tests whose name contains WORD")
    p.add_argument("--only", choices=sorted({s for s, _ in TESTS}), help="only this section")
    p.add_argument("-v", action="store_true", help="show what tests print")
    p.add_argument("--limit", type=int, default=240, help="seconds that a test may take (%(default)s)")
    args = p.parse_args()
    chosen = [(s, f) for s, f in TESTS if args.k in f.__name__ and args.only in (None, s)]
    if args.list:
        for name, f in chosen:
            print(f"{name:8s} {f.__name__}: {f.__doc__.splitlines()[0]}")
        return
    torch.set_num_threads(1)
    results = [run_test(f, args.v, args.limit) for _, f in chosen]
    skipped = f", {results.count('SKIP')} skipped" if "SKIP" in results else ""
    print(f"{results.count('PASS')} passed, {results.count('FAIL')} failed{skipped}")
    sys.exit("FAIL" in results)


if __name__ == "__main__":
    main()
