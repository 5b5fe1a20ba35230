"""Both samplers in lm-evaluation-harness, for MATH, HumanEval and MBPP, whose scoring is its own.

    python experiments/harness.py --model d2f --tasks gsm8k --num_fewshot 4 \\
        --model_args checkpoint=FOLDER,lora=FOLDER,preset=gsm8k
    python experiments/harness.py --model wavefront --tasks humaneval --model_args checkpoint=FOLDER,inner=4

The arguments after --model are the harness's; those in --model_args are options of d2f.py or
recurrent_sampler.py, a dash written as an underline. Needs the optional package lm_eval.
"""

import functools
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import d2f
import recurrent_sampler
from tiny_models import RecurrentDepth, Transformer, answer_text, open_checkpoint, optional, until_stop


def command_line(options: dict) -> list[str]:
    """{"tau_conf": 0.9, "raw": True, "watch": False} -> ["--tau-conf", "0.9", "--raw"]."""
    words = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if value is not False:
            words += [flag] if value is True else [flag, str(value)]
    return words


@functools.cache  # the harness refuses a name that it knows
def register():
    """Make the models "d2f" and "wavefront" known to the harness; returns their classes by name."""
    LM = optional("lm_eval", "lm_eval.api.model").LM
    register_model = optional("lm_eval", "lm_eval.api.registry").register_model

    class Sampler(LM):
        """generate_until by one of the two samplers. Likelihoods are not defined for them."""

        module = None  # d2f or recurrent_sampler

        def __init__(self, device=None, batch_size=1, **options):
            super().__init__()
            words = command_line(options | ({"device": device} if device else {}))
            self.args = self.module.parse_args(words)
            if self.args.checkpoint is None:
                raise ValueError("--model_args must name a checkpoint, as in checkpoint=FOLDER")
            adapter = {
                name: getattr(self.args, name) for name in ("lora", "any_base") if hasattr(self.args, name)
            }
            kind = Transformer if self.module is d2f else RecurrentDepth
            self.model, self.tokens = open_checkpoint(self.args, kind, **adapter)
            shift = [self.model.config.shift] if self.module is d2f else []
            self.module.settle_options(self.args, *shift)
            self.longest = self.args.max_new_tokens
            self.answers, self.seconds, self.written = 0, 0.0, 0

        @property
        def tokenizer_name(self) -> str:
            return Path(self.args.checkpoint).name

        def apply_chat_template(self, chat_history, add_generation_prompt=True) -> str:
            """The turns of a chat as one user turn, since the samplers answer a single one."""
            return self.tokens.chat("\n\n".join(turn["content"] for turn in chat_history))

        def generate_until(self, requests, disable_tqdm=False) -> list[str]:
            """The text of each request's answer, up to the first of its stop strings."""
            answers = [self.answer(*request.args) for request in requests]
            speed = self.written / max(self.seconds, 1e-9)
            print(f"{self.answers} answers, {self.written} tokens, {speed:.1f} tokens/s", file=sys.stderr)
            return answers

        def answer(self, context: str, settings: dict) -> str:
            self.args.max_new_tokens = min(self.longest, settings.get("max_gen_toks", self.longest))
            room = self.model.config.max_len - self.args.max_new_tokens
            ids = self.tokens.encode(context)[
                -room:
            ]  # of a prompt that is too long the end, as the harness does
            started = time.perf_counter()
            written = self.module.decode(self.args, self.model, ids).answers[0]
            self.seconds += time.perf_counter() - started
            self.answers += 1
            self.written += len(until_stop(self.tokens, written))
            text, stops = answer_text(self.tokens, written), settings.get("until") or []
            for stop in [stops] if isinstance(stops, str) else stops:
                text = text.split(stop)[0] if stop else text
            return text

        def loglikelihood(self, requests, disable_tqdm=False):
            raise ValueError(
                "these samplers generate text; tasks that need likelihoods cannot be run with them"
            )

        loglikelihood_rolling = loglikelihood

    models = {}
    for name, module in (("d2f", d2f), ("wavefront", recurrent_sampler)):
        models[name] = type(name, (Sampler,), {"module": module})
        register_model(name)(models[name])
    return models


def main():
    try:
        register()
        optional("lm_eval", "lm_eval.__main__").cli_evaluate()
    except ValueError as e:
        sys.exit(str(e))


if __name__ == "__main__":
    main()
