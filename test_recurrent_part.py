"""Tests of recurrent_sampler.py and RecurrentDepth, to be merged into test_all.py."""

import json
import shutil
import tempfile
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

import recurrent_sampler as rs
import tiny_models as tm
from recurrent_sampler import (
    Sampling,
    Wave,
    adaptive_decode,
    autoregressive_decode,
    speculative_decode,
    wavefront_decode,
)

FIXTURES = Path(__file__).parent / "fixtures"
HUGINN = ("huginn_a", "huginn_untied_sharded")
ZERO = Sampling(init_scale=0.0)


@cache
def huginn(case):
    """(model, samplers.json, its tensors, forward's tensors) of a reference case."""
    folder = FIXTURES / case
    runs = json.loads((folder / "samplers.json").read_text())
    tensors = [tm.read_safetensors(folder / f"{name}.safetensors") for name in ("samplers", "forward")]
    return tm.load_checkpoint(folder / "model"), runs, *tensors


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
    model = tm.RecurrentDepth(tm.RecurrentConfig(**(sizes | changes))).init_weights(generator)
    for name, p in model.named_parameters():
        p.requires_grad_(False)
        if "qk_bias" in name:
            p.normal_(0.0, 0.5, generator=generator)
        else:
            p.mul_(3.0 if "norm" not in name else 1.0)
    model.adapter.weight[:, : model.config.d_model] *= 0.3  # so that states settle, as trained ones do
    return model.eval()


def random_prompts(seed=0, lengths=(5, 1, 9, 3), n_tokens=20):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, n_tokens, n) for n in lengths]


def run_decoder(name, model, prompts, n, sampling=None, watch=None):
    """One of the four samplers with settings small enough for a test."""
    if name == "wavefront":
        return wavefront_decode(model, prompts, n, Wave(inner=2, eps=0.1), 6, 1, sampling, watch)
    if name == "noisy wavefront":
        wave = Wave(inner=1, eps=0.2, beta=0.5, headway=2, max_wave=5, continuous=True)
        return wavefront_decode(model, prompts, n, wave, 6, 1, sampling, watch)
    if name == "adaptive":
        return adaptive_decode(model, prompts, n, 8, 0.1, True, sampling, watch)
    if name == "speculative":
        return speculative_decode(model, prompts, n, 6, 2, 3, 1.0, sampling, watch)
    return autoregressive_decode(model, prompts, n, 5, 1, sampling, watch)


DECODERS = ("autoregressive", "adaptive", "speculative", "wavefront", "noisy wavefront")


def raises(message, call, *args, **kwargs):
    """The call must raise ValueError with this text in its message."""
    try:
        call(*args, **kwargs)
    except ValueError as e:
        assert message in str(e), f"expected {message!r} in: {e}"
    else:
        raise AssertionError(f"no error; expected {message!r}")


# ---------------------------------------------------------------------------------- against the released code


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


def test_huginn_loss_and_gradients_match_released():
    """The truncated loss and its gradients, through the last recurrences and P, agree with the release."""
    for case in HUGINN:
        _, runs, _, t = huginn(case)
        model, loss = tm.load_checkpoint(FIXTURES / case / "model").requires_grad_(True), runs["loss"]
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


def test_autoregressive_matches_released():
    """Greedy decoding at fixed r, full and shared cache: which slot recurrence i reads and writes."""
    for case in HUGINN:
        model, runs, t, _ = huginn(case)
        for run in runs["autoregressive"]:
            s = run["settings"]
            n_slots = s["num_steps"] if s["cache_lookup_strategy"] == "full" else 1
            with fixed_start(model, s, t["init_vec_autoregressive"]):
                got = autoregressive_decode(
                    model, run["prompt"], s["max_new_tokens"], s["num_steps"], n_slots
                )
            assert got.answers[0] == run["sequence"][s["prompt_length"] :], f"{case}: {s}"


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
                autoregressive_decode(model, fits[0]["prompt"], s["max_new_tokens"], s["num_steps"], n_slots)
            error = (torch.cat(seen)[:, -1] - t[f"logits_{kind}"]).abs().max()
            assert error < 5e-3, f"{case}, {kind} cache: logits differ by {error}"


def test_adaptive_matches_released():
    """Adaptive compute: tokens, and at which recurrence each token's state had settled.

    Out of scope here: other cache look-ups than the shared one and other criteria than the latent distance.
    """
    model, runs, t, _ = huginn("huginn_a")
    for run in runs["adaptive"]:
        s, spent = run["settings"], []
        with fixed_start(model, s, t["init_vec_autoregressive"]):
            got = adaptive_decode(
                model,
                run["prompt"],
                s["max_new_tokens"],
                s["num_steps"],
                s["effective_threshold"],
                watch=lambda step: spent.append(int(step.recurrences[0])),  # noqa: B023
            )
        assert got.answers[0] == run["sequence"][s["prompt_length"] :], s
        assert spent == run["compute_steps_per_token"], s


def test_speculative_matches_released():
    """Self-speculative decoding: tokens, and how many each round accepted (the last may be cut)."""
    for case in HUGINN:
        model, runs, t, _ = huginn(case)
        for run in runs["speculative"]:
            s, accepted = run["settings"], []
            got = speculative_decode(
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
    return Wave(
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
                got = wavefront_decode(
                    model,
                    run["prompt"],
                    s["max_new_tokens"],
                    wave,
                    s["num_steps"],
                    n_slots,
                    watch=lambda step: seen.append(trace(step)),  # noqa: B023
                )
            answer = np.array(run["sequence"][s["prompt_length"] :][: s["max_new_tokens"]])
            assert got.answers[0] == rs.cut(answer, 61 if s["eos_token_id"] else -1), name
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


def test_wavefront_states_match_released():
    """The latent states after each step's recurrences, so that no error hides behind equal tokens."""
    for case in HUGINN:
        model, runs, t, _ = huginn(case)
        run, seen, decode = runs["wavefront"][0], [], model.decode
        s = run["settings"]
        keep = patched(model, "decode", lambda z, *a: seen.append(z[0]) or decode(z, *a))  # noqa: B023
        with fixed_start(model, s, t["init_vec_wavefront"]), keep:
            wavefront_decode(model, run["prompt"], s["max_new_tokens"], released_wave(s), s["num_steps"])
        for j in range(6):
            assert torch.allclose(seen[j + 1], t[f"states_step{j}"], atol=2e-3), f"{case}, step {j}"


# -------------------------------------------------------------------------------------- the wave's properties


def test_wave_with_all_recurrences_is_autoregressive():
    """Algorithm 1 with r' = r is autoregressive decoding, token for token and pass for pass."""
    for seed in range(4):
        model, prompts = tiny_recurrent(seed), random_prompts(seed)
        slow = autoregressive_decode(model, prompts, 12, r=4)
        fast = wavefront_decode(model, prompts, 12, Wave(inner=4, exit="fixed", eta=0.0), r=4)
        assert fast.answers == slow.answers, f"seed {seed}"
        assert fast.core_passes == slow.core_passes and fast.max_wave == 1, f"seed {seed}"


def test_wave_of_one_is_adaptive():
    """W = 1 with r' = 1 is per-token adaptive compute (the released wave of one never moves)."""
    for seed in range(4):
        model, prompts = tiny_recurrent(seed), random_prompts(seed)
        slow = adaptive_decode(model, prompts, 12, r=200, eps=0.05, prefill_exit=False)
        fast = wavefront_decode(model, prompts, 12, Wave(inner=1, eps=0.05, eta=0.0, max_wave=1), r=200)
        assert fast.answers == slow.answers, f"seed {seed}"
        assert fast.max_wave == 1


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
        last, _ = rs.freeze(book, Wave(freeze="last"), settled.copy())
        prefix, _ = rs.freeze(book, Wave(freeze="prefix"), settled.copy())
        for row in range(3):
            unbroken = np.append(settled[row], False).argmin()
            assert prefix[row] == book.n[row] + max(0, unbroken - 1)
            where = np.flatnonzero(settled[row])
            assert last[row] == book.n[row] + (where[-1] if len(where) else 0)
            assert prefix[row] <= last[row]


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
        model, prompts, frozen = tiny_recurrent(seed), random_prompts(seed), {}
        wave = Wave(**({"inner": 2, "eps": 0.1, "max_steps": 200} | changes))

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

        wavefront_decode(model, prompts, 14, wave, r=6, watch=watch)


def test_contractive_wave_converges_to_autoregressive():
    """With a contractive core and eps -> 0 the wave is autoregressive decoding at large r."""
    for seed in range(5):
        model, prompts = tiny_recurrent(seed), random_prompts(seed)
        model.adapter.weight[:, : model.config.d_model] *= 0.5  # less of the old state remains
        a, b = (model.initial_state(1, 8, torch.Generator().manual_seed(i)) for i in (1, 2))
        w = model.window(8)
        e = model.embed(torch.arange(8)[None], w)
        shrink = (model.recur(a, e, w) - model.recur(b, e, w)).norm() / (a - b).norm()
        assert shrink < 0.8, f"seed {seed}: not a contraction, factor {shrink}"
        slow = autoregressive_decode(model, prompts, 16, r=60)
        for inner in (1, 3):
            fast = wavefront_decode(model, prompts, 16, Wave(inner=inner, eps=1e-5, freeze="prefix"), r=60)
            assert fast.answers == slow.answers, f"seed {seed}, r' = {inner}"


def test_headway_opens_that_many_positions():
    """Headway h opens h positions a step while the wave has room."""
    for headway in (1, 2, 3):
        sizes, model = [], tiny_recurrent(3, eos_id=23, pad_id=22)
        wavefront_decode(
            model,
            random_prompts()[0],
            30,
            Wave(headway=headway, eps=0.0, max_steps=4),
            watch=lambda step: sizes.append(int((step.stop - step.start)[0])),  # noqa: B023
        )
        assert sizes[1:] == [1 + headway * j for j in range(4)], f"headway {headway}: {sizes}"


def test_momentum_follows_its_formula():
    """e = eta e_prev + (1 - eta) P(y) per position, (1 - eta) P(y) for new ones; eta = 0 is P(y) itself."""
    for eta in (0.0, 0.3):
        model, fresh, mixed = tiny_recurrent(1, eos_id=23, pad_id=22), [], []
        embed, recur = model.embed, model.recur
        record = patched(model, "embed", lambda *a: fresh.append(embed(*a)) or fresh[-1])  # noqa: B023
        spy = patched(model, "recur", lambda z, e, *a: mixed.append(e) or recur(z, e, *a))  # noqa: B023
        with record, spy:
            wavefront_decode(
                model, random_prompts()[0], 20, Wave(inner=1, eps=0.0, eta=eta, max_steps=5), r=2
            )
        fresh, mixed = fresh[1:], mixed[2:]  # without the prompt's
        before = fresh.pop(0)
        for new, e in zip(fresh, mixed, strict=True):
            expected = (1 - eta) * new
            expected[:, : before.shape[1]] += eta * before
            assert torch.allclose(e, expected, atol=1e-6), f"eta {eta}"
            before = e


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
        rs.start_wave(book)
        book.age[0, 3:6] = (4, 2, 0)
        book.open(np.array([3]), np.array([6]))
        with patched(model, "initial_state", lambda B, T, g=None: torch.ones(B, T, 32)):
            z = rs.add_noise(book, Wave(inner=2, beta=0.5, noise=noise), 7)
        expected = weight(
            np.array([4 * 2 + 7, 2 * 2, 0])
        )  # states were zero; the first counts the prompt's r too
        assert np.allclose(z[0, :, 0].numpy(), expected, atol=1e-6), noise
    draws, model = [], tiny_recurrent(0)
    draw = model.initial_state
    with patched(model, "initial_state", lambda *a: draws.append(a) or draw(*a)):
        wavefront_decode(model, [1, 2, 3], 10, Wave(beta=0.0), r=4)
    assert len(draws) == 1, "noise was drawn although beta is 0"


def test_distance_matches_its_formula():
    """delta = ||z - z_prev|| / ||z|| for each position, not over the window."""
    rng = np.random.default_rng(0)
    z, before = rng.normal(size=(2, 2, 3, 8))
    expected = np.linalg.norm(z - before, axis=-1) / np.linalg.norm(z, axis=-1)
    got = rs.relative_distance(torch.tensor(z), torch.tensor(before))
    assert np.allclose(got, expected, atol=1e-6)


def test_distances_compare_a_position_with_itself():
    """After a freeze each state is compared with its own previous one (released: with another position's)."""
    model, kept, steps = tiny_recurrent(2, eos_id=23, pad_id=22), [], []
    decode = model.decode
    keep = patched(model, "decode", lambda z, *a: kept.append(z[0].clone()) or decode(z, *a))
    with keep:
        wavefront_decode(
            model, [1, 2], 24, Wave(inner=2, eps=0.2), r=6, watch=lambda s: steps.append(trace(s))
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


def test_core_passes_match_the_closed_form():
    """Costs: autoregressive r w passes; the fixed exit r + r' (w - 2 + ceil(r / r')), so about r' w."""
    model = tiny_recurrent(0, eos_id=23, pad_id=22)
    for w, r, inner in ((10, 8, 2), (7, 8, 3), (5, 6, 6), (2, 8, 4)):
        slow = autoregressive_decode(model, [1, 2, 3], w, r)
        fast = wavefront_decode(model, [1, 2, 3], w, Wave(inner=inner, exit="fixed"), r)
        assert slow.core_passes == r * w and slow.steps == w
        ceil = -(-r // inner)
        assert fast.core_passes == r + inner * (w - 2 + ceil), f"w {w}, r {r}, r' {inner}"
        assert fast.positions == 3 * r + inner * ceil * (w - 1), "each position is refined ceil(r / r') times"
        assert fast.max_wave == min(ceil, w - 1)


# -------------------------------------------------------------------------------------------------- KV caches


def test_cached_recurrent_decoding_equals_uncached():
    """Decoding with the full cache gives the tokens of whole forwards without any cache."""
    model, prompt = tiny_recurrent(5), list(random_prompts(5)[0])
    got = autoregressive_decode(model, prompt, 10, r=3, n_slots=3, sampling=ZERO).answers[0]
    tokens = list(prompt)
    for token in got:
        x = torch.tensor(tokens)[None]
        logits = model(x, 3, torch.zeros(1, len(tokens), 32))[0, -1]
        logits[21:] = float("-inf")
        assert int(logits.argmax()) == token
        tokens.append(token)


def test_shared_cache_does_not_grow_with_r():
    """The shared cache holds one entry a core layer, the full one r of them."""
    model = tiny_recurrent(0, n_core=2)
    shared = [autoregressive_decode(model, [1, 2], 3, r, 1) for r in (2, 8)]
    full = [autoregressive_decode(model, [1, 2], 3, r, r) for r in (2, 8)]
    assert shared[0].cache_bytes == shared[1].cache_bytes
    assert full[1].core_cache_bytes == 4 * full[0].core_cache_bytes == 8 * shared[0].core_cache_bytes


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

    class Appending(tm.KVCache):
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


def test_speculative_is_lossless():
    """Greedy self-speculation gives autoregressive decoding's tokens at full r, whatever the draft."""
    for seed in range(4):
        model, prompts = tiny_recurrent(seed), random_prompts(seed)
        slow = autoregressive_decode(model, prompts, 13, r=6, n_slots=6)
        for draft_r, lookahead in ((1, 2), (3, 5), (6, 4)):
            fast = speculative_decode(model, prompts, 13, 6, draft_r, lookahead)
            assert fast.answers == slow.answers, f"seed {seed}, draft {draft_r} x {lookahead}"
        assert fast.steps < slow.steps * 1.6, "drafts of full depth must all be accepted"


# -------------------------------------------------------------------------- batches, ends, randomness, limits


def test_recurrent_batches_equal_singles():
    """Every sampler gives a row the same answer in a batch as alone: ragged prompts, early ends."""
    for seed in range(3):
        model, prompts = tiny_recurrent(seed), random_prompts(seed, (5, 1, 9, 3, 5, 12))
        for name in DECODERS:
            batch = run_decoder(name, model, prompts, 15).answers
            for b, prompt in enumerate(prompts):
                alone = run_decoder(name, model, [prompt], 15, Sampling(seed=b)).answers[0]
                assert batch[b] == alone, f"{name}, seed {seed}, row {b}"


def test_recurrent_batches_equal_singles_when_sampling():
    """The same at temperature above 0: each row draws from its own generator."""
    model, prompts = tiny_recurrent(7), random_prompts(7)
    for name in ("autoregressive", "adaptive", "wavefront", "noisy wavefront"):
        batch = run_decoder(name, model, prompts, 12, Sampling(0.9, 0.9, seed=3)).answers
        for b, prompt in enumerate(prompts):
            alone = run_decoder(name, model, [prompt], 12, Sampling(0.9, 0.9, seed=3 + b)).answers[0]
            assert batch[b] == alone, f"{name}, row {b}"
        assert batch == run_decoder(name, model, prompts, 12, Sampling(0.9, 0.9, seed=3)).answers
        assert batch != run_decoder(name, model, prompts, 12, Sampling(0.9, 0.9, seed=30)).answers


def test_zero_states_make_greedy_decoding_deterministic():
    """Zero initial states: no draw is left, so the seed does not matter."""
    model, prompts = tiny_recurrent(2), random_prompts(2)
    for name in ("autoregressive", "adaptive", "speculative", "wavefront"):
        a, b = (
            run_decoder(name, model, prompts, 10, Sampling(init_scale=0.0, seed=s)).answers for s in (0, 9)
        )
        assert a == b, name


def test_recurrent_answers_end_and_hold_no_foreign_ids():
    """Answers end at their first EOS or at their length, and hold no padding or id beyond the tokenizer."""
    for seed in range(3):
        model = tiny_recurrent(seed)
        model.embedding.weight[21:] *= 4  # the padding id and those beyond the tokenizer would often win
        for name in DECODERS:
            for n in (1, 2, 9):
                for answer in run_decoder(name, model, random_prompts(seed), n).answers:
                    assert 1 <= len(answer) <= n, f"{name}: {len(answer)} tokens of {n}"
                    assert max(answer) < 21, f"{name}: {answer}"
                    assert 20 not in answer[:-1] and (len(answer) == n or answer[-1] == 20), (
                        f"{name}: {answer}"
                    )


def test_nothing_is_computed_after_a_frozen_eos():
    """A row leaves the batch in the step that freezes its EOS; its text is what it was without the stop."""
    ended = 0
    for seed in range(3):
        model, prompts, last = tiny_recurrent(seed, eos_id=23, pad_id=22), random_prompts(seed), {}
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
                assert answer == rs.cut(np.array(free.answers[b]), eos), f"seed {seed}, eos {eos}, row {b}"
                if eos in answer:
                    ended += 1
                    before, after = last[b]
                    assert before <= len(prompts[b]) + len(answer) - 1 < after
    assert ended > 5, "no answer ended early, so nothing was tested"


def trace_ends(step):
    return [(int(a), int(b)) for a, b in zip(step.n_before, step.n_frozen, strict=True)]


def test_untrained_recurrent_models_terminate():
    """Weights that never settle (eps 0): the step limit ends decoding, and what was frozen is returned."""
    model = tiny_recurrent(0)
    got = wavefront_decode(model, random_prompts(), 10, Wave(eps=0.0, max_wave=4, max_steps=7), r=4)
    assert got.steps == 1 + 7 and all(len(a) == 1 for a in got.answers)
    full = autoregressive_decode(model, list(range(10)), 54, r=2)  # prompt and answer fill the context
    assert len(full.answers[0]) <= 54


def test_top_p_keeps_the_nucleus():
    """Sampling stays in the smallest set of probability top_p and follows the probabilities inside it."""
    model = tiny_recurrent(0, vocab_size=8, n_tokens=8, eos_id=7, pad_id=7)
    book = rs.Book(model, [[1]], 4, Sampling(temperature=1.0, top_p=0.8), None)
    p = torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15, 0.0, 0.0, 0.0])
    tokens, _ = book.choose(p.log().expand(1, 4000, 8), 4000)
    share = np.bincount(tokens[0], minlength=8) / 4000
    assert np.allclose(share, [0, 0.4 / 0.85, 0, 0.3 / 0.85, 0.15 / 0.85, 0, 0, 0], atol=0.04), share


def test_bad_input_to_recurrent_samplers():
    """Each mistake gives one sentence that names the value and the limit."""
    model = tiny_recurrent(0)
    for prompts, n, message in (
        ([], 4, "the batch is empty"),
        ([[1], []], 4, "prompt 1 has shape (0,)"),
        ([[1.5, 2.0]], 4, "prompt 0 has dtype float64"),
        ([[1, 22]], 4, "prompt 0 holds ids 1 to 22; this model knows 0 to 21"),
        ([[1] * 60], 5, "prompt 0 has 60 tokens and max_new_tokens is 5; together at most 64"),
        ([[1]], 0, "max_new_tokens is 0"),
    ):
        for name in DECODERS:
            raises(message, run_decoder, name, model, prompts, n)
    raises("r is 0", autoregressive_decode, model, [[1]], 4, 0)
    raises("draft_r is 9; it must be between 1 and r = 8", speculative_decode, model, [[1]], 4, 8, 9)
    for changes, message in (
        ({"inner": 0}, "inner is 0"),
        ({"eps": -1.0}, "eps is -1.0"),
        ({"eta": 1.5}, "eta is 1.5"),
        ({"exit": "never"}, "exit 'never' is unknown"),
        ({"max_wave": 0}, "max_wave is 0"),
    ):
        raises(message, Wave, **changes)
    raises("temperature is -1", Sampling, temperature=-1)
    raises("top_p is 0", Sampling, top_p=0)


# --------------------------------------------------------------------------------------------------- training


def test_recurrence_counts_have_the_right_distribution():
    """r = 1 + Poisson(LogNormal): mean m + 1 and variance m + m^2 (e^(1/4) - 1) over 20,000 draws."""
    for mean in (8, 32):
        r = rs.sample_recurrences(mean, 20000, torch.Generator().manual_seed(0)).double()
        variance = mean + mean**2 * (np.exp(0.25) - 1)
        assert abs(r.mean() - mean - 1) < 5 * (variance / 20000) ** 0.5, f"mean {r.mean()}"
        assert abs(r.var() / variance - 1) < 0.1, f"variance {r.var()} instead of {variance}"
        assert r.min() >= 1


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


def test_recurrent_checkpoints_round_trip():
    """save_checkpoint and load_checkpoint give the same model back; a tied head on disk is ignored."""
    folder = Path(tempfile.mkdtemp())
    try:
        model = tiny_recurrent(0)
        tm.save_checkpoint(folder / "a", model)
        again = tm.load_checkpoint(folder / "a")
        x = torch.arange(6)[None]
        assert again.config == model.config
        assert torch.equal(model(x, 3, torch.zeros(1, 6, 32)), again(x, 3, torch.zeros(1, 6, 32)))
        shutil.copytree(FIXTURES / "huginn_a" / "model", folder / "b")
        tensors = {k: v.clone() for k, v in tm.read_tensors(folder / "b").items()}
        tensors["lm_head.weight"] = tensors["transformer.wte.weight"]
        tm.write_safetensors(folder / "b" / "model.safetensors", tensors)
        assert torch.equal(
            tm.load_checkpoint(folder / "b").embedding.weight, huginn("huginn_a")[0].embedding.weight
        )
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    import sys
    import time
    import traceback

    torch.set_num_threads(1)
    for test in [f for name, f in list(globals().items()) if name.startswith("test_")]:
        if len(sys.argv) > 1 and not any(a in test.__name__ for a in sys.argv[1:]):
            continue
        begin = time.time()
        try:
            test()
            print(f"ok    {time.time() - begin:5.1f} s  {test.__name__}")
        except Exception:
            print(f"FAIL  {time.time() - begin:5.1f} s  {test.__name__}")
            traceback.print_exc(limit=-3)
