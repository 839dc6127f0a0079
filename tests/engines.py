"""A small real model, plans of it, and engines that serve it; each is made once for all of pytest's workers, by the first that needs it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from filelock import FileLock

from tangram_plan.calibrate import shipped_texts
from tangram_plan.ir import load_artefact, most_pages
from tests.engine_runs import ENVIRONMENT, ROOT, Query, Run, Served, read_served, serve
from tests.tiny_models import DEVICE, PROFILE, write_tiny_model

MODEL_YAML = """
model: {model}
profile: {profile}
scorer: recent
retention: {{ratio: {ratio}, sink_tokens: {sink_tokens}}}
kv_dtype: float32
compress_chunk_tokens: 64
max_new_tokens: 128
partition: {{device: {device}}}
"""

NEEDLE = "The secret code of Ada is 7391. The secret code of Bob is 2846.\n\n"
QUESTION = "\n\nThe secret code of Ada is"
ANSWER = " 7391."

PROMPT_TOKENS = (17, 64, 65, 129, 200, 420, 900, 2000)
ALONE = (0, 4, 6)  # numbers of prompts that are served alone, too
NUM_SHORT = 6  # prompts that are served again, with longer answers
SHORT_TOKENS = 512  # of prompt and answer, at most
LONG_ANSWER = 80
SINK_TOKENS = 32
TEXT_TOKENS = 700  # of a prompt whose log-probabilities are compared


@dataclass(frozen=True)
class Engines:
    """Engines in processes of their own, and what they answered."""

    folder: Path
    model: Path
    profile: str = "builtin:smollm2-135m-instruct/kvzip"
    device: str = "h200"

    def once(self, name: str, make: Callable[[Path], None]) -> Path:
        """A folder that `make` fills, once for all workers."""
        folder = self.folder / name
        with FileLock(self.folder / f"{name}.lock"):
            if not (folder / "done").exists():
                folder.mkdir(exist_ok=True)
                make(folder)
                (folder / "done").touch()
        return folder

    def served(self, name: str, run: Run) -> Served:
        """What an engine answers."""
        return read_served(self.once(name, partial(serve, run)))

    def artefact(self, ratio: float, *overrides: str) -> Path:
        """A plan that keeps so much; one that keeps everything serves as it did before.

        Args:
            ratio: of retention.
            overrides: of other keys, each KEY=VALUE.
        """

        def build(folder: Path) -> None:
            inputs = {"model": self.model, "profile": self.profile, "device": self.device}
            (folder / "model.yaml").write_text(MODEL_YAML.format(**inputs, ratio=ratio, sink_tokens=SINK_TOKENS))
            settings = [word for override in overrides for word in ("--set", override)]
            _tangram_plan("build", str(folder / "model.yaml"), *settings, "-o", str(folder / "plan"))

        return self.once("-".join(["plan", str(ratio), *overrides]), build) / "plan"

    def reordered(self, artefact: Path) -> Path:
        """The model with its KV heads in a plan's order."""

        def reorder(folder: Path) -> None:
            _tangram_plan("reorder", str(self.model), str(artefact), "-o", str(folder / "model"))

        return self.once(f"reordered-{artefact.parent.name}", reorder) / "model"

    @classmethod
    def start(cls, folder: Path) -> "Engines":
        """With the model in the folder; it comes as a package."""
        folder.mkdir(exist_ok=True)

        def write(model: Path) -> None:
            command = [sys.executable, "-m", "tests.smollm2", str(model)]
            subprocess.run(command, cwd=ROOT, env=os.environ | ENVIRONMENT, check=True, capture_output=True)

        return cls(folder, cls(folder, folder).once("smollm2", write))

    @classmethod
    def start_tiny(cls, folder: Path, family: str, *, quantised: bool = False) -> "Engines":
        """With a tiny model of random weights, in a folder in the folder."""
        folder = folder / (f"{family}-int8" if quantised else family)
        folder.mkdir(parents=True, exist_ok=True)
        model = cls(folder, folder).once("model", partial(write_tiny_model, family=family, quantised=quantised))
        return cls(folder, model, str(model / PROFILE), str(model / DEVICE))

    def tokens(self) -> dict[str, list[int]]:
        """Of a long text (Shakespeare, Milton), of a needle, of what asks for it, and of what answers."""

        def tokenize(folder: Path) -> None:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(self.model)
            texts = [json.loads(line)["text"] for line in shipped_texts().read_text(encoding="utf-8").splitlines()]
            strings = {"text": "\n\n".join(texts[:5]), "needle": NEEDLE, "question": QUESTION, "answer": ANSWER}
            tokens = {name: tokenizer(string)["input_ids"] for name, string in strings.items()}
            (folder / "tokens.json").write_text(json.dumps(tokens))

        return dict(json.loads((self.once("text", tokenize) / "tokens.json").read_text()))

    def prompts(self) -> list[list[int]]:
        """Of all lengths, each from another place in Shakespeare."""
        text = self.tokens()["text"]
        return [text[100 * i : 100 * i + length] for i, length in enumerate(PROMPT_TOKENS)]

    def loads(self) -> list[list[Query]]:
        """All prompts together; then the shorter ones, with longer answers."""
        prompts = self.prompts()
        return [
            [Query(prompt) for prompt in prompts],
            [Query(prompt, max_tokens=LONG_ANSWER) for prompt in prompts[:NUM_SHORT]],
        ]

    def under_pressure(self, ratio: float) -> Served:
        """The second load in a pool that holds all its prompts, but not all its answers."""
        artefact = self.artefact(ratio)
        plan = load_artefact(artefact)
        prompts = PROMPT_TOKENS[:NUM_SHORT]
        least = sum(plan.num_pages(prompt, prompt) for prompt in prompts)
        most = sum(plan.num_pages(prompt, prompt + LONG_ANSWER) for prompt in prompts)
        num_pages = (least + most) // 2
        assert num_pages > most_pages(plan, SHORT_TOKENS)
        arguments = {
            "max_model_len": SHORT_TOKENS,
            "kv_cache_memory_bytes": (num_pages + 1) * plan.layout.page_bytes,
        }
        run = Run(str(self.model), str(artefact), self.loads()[1:], arguments)
        return self.served(f"pressure-{ratio}", run)


def _tangram_plan(*words: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "tangram_plan", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
