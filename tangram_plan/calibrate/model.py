"""The model to calibrate: loading, its identity, and the prompts that it reads."""

import datetime
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tangram_plan.ir import ORIGINAL_ORDER, ModelShape, TangramError, check_head_order, user_path
from tangram_plan.model_config import model_shape_from_config

from .texts import CalibrationText

REPEAT_FIRST = "\n\nRepeat the previous context exactly."
REPEAT_NEXT = "\n\nRepeat the part of the previous context exactly, starting with"
REPEAT_TOKENS = 2048  # a context is repeated in pieces of this many tokens
OVERLAP_TOKENS = 8  # tokens of the piece before that a request to go on quotes
MIN_TEXT_TOKENS = 64
MARK = "TANGRAM-TEXT"  # where the text stands when a chat template is cut in two


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model, ready to run.

    Args:
        name: what profiles call it.
        shape: its attention shape.
        weights: hash over the beginning of every parameter, to tell models of one shape apart.
        model: the transformers model.
        tokenizer: its tokenizer.
        device: where it runs.
    """

    name: str
    shape: ModelShape
    weights: str
    model: Any
    tokenizer: Any
    device: str


@dataclass(frozen=True)
class Prompt:
    """Token ids of one sample: the context, and what the repeat passes read after it, a pass each."""

    context: tuple[int, ...]
    repeats: tuple[tuple[int, ...], ...]


def load_model(model: str, *, device: str, name: str | None = None) -> LoadedModel:
    """Load a Hugging Face folder, a .gguf file, a folder that holds one, or else a model id, in its own dtype.

    Raises:
        TangramError: packages are missing, or there is no such model or device, or it cannot be read.
    """
    try:
        import torch
        import transformers
    except ImportError as error:
        raise TangramError(
            "a package is missing", where="calibrate", got=error, fix="pip install 'tangram-plan[calibrate]'"
        ) from error
    _check_device(torch, device)
    folder, gguf_file, own_name = _locate(model)
    source: dict[str, Any] = {"gguf_file": gguf_file} if gguf_file else {}
    dtype = torch.float32 if gguf_file else "auto"
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # calibration has its own
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **source)
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **source)
    except ImportError as error:
        raise TangramError(
            "a package is missing", where=model, got=error, fix="pip install 'tangram-plan[calibrate]'"
        ) from error
    except Exception as error:  # readers of broken files raise errors of a dozen libraries
        raise TangramError(
            "cannot load the model",
            where=model,
            got=(str(error).strip().splitlines() or [type(error).__name__])[0],
            expected="a Hugging Face folder or id, a .gguf file, or a folder that holds one",
        ) from error
    config = loaded.config.to_dict()
    check_head_order(config, ORIGINAL_ORDER, where=model)
    loaded = loaded.eval().requires_grad_(requires_grad=False).to(device)
    return LoadedModel(
        name=name or own_name,
        shape=model_shape_from_config(config, model),
        weights=_hash_weights(loaded),
        model=loaded,
        tokenizer=tokenizer,
        device=device,
    )


def build_prompt(loaded: LoadedModel, text: CalibrationText, max_tokens: int) -> Prompt:
    """Put a text, cut to `max_tokens` with all that stands before it, inside the model's chat template.

    Raises:
        TangramError: the text is too short, or the model has too few positions.
    """
    prefix, suffix = _chat_template(loaded)
    room = max_tokens - len(prefix)
    if room < MIN_TEXT_TOKENS:
        raise TangramError(
            "max-tokens is too small", got=max_tokens, expected=f"at least {MIN_TEXT_TOKENS + len(prefix)}"
        )
    body = _encode(loaded, text.text)[:room]
    if len(body) < MIN_TEXT_TOKENS:
        raise TangramError(
            "text is too short", where=text.where, got=f"{len(body)} tokens", expected=f"at least {MIN_TEXT_TOKENS}"
        )
    repeats = []
    for start in range(0, len(body), REPEAT_TOKENS):
        request = _encode(loaded, REPEAT_NEXT if start else REPEAT_FIRST) + body[max(0, start - OVERLAP_TOKENS) : start]
        repeats.append(tuple(request + suffix + body[start : start + REPEAT_TOKENS]))
    prompt = Prompt(tuple(prefix + body), tuple(repeats))
    positions = getattr(loaded.model.config.get_text_config(), "max_position_embeddings", None)
    needed = len(prompt.context) + max(map(len, repeats))
    if positions is not None and needed > positions:
        raise TangramError(
            "the model has too few positions to read a text and repeat it",
            where=text.where,
            got=f"{positions} positions",
            expected=f"{needed} for max-tokens {max_tokens}",
            fix="choose a smaller --max-tokens",
        )
    return prompt


def _check_device(torch: Any, device: str) -> None:
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise TangramError(
            "cannot use the device", where="device", got=device, expected="cpu, cuda, cuda:0 ..."
        ) from error


def _locate(model: str) -> tuple[str, str | None, str]:
    """Folder or id; the GGUF file in it, if that is what shall be read; and a name for the model."""
    path = user_path(model, relative_to=Path(), where="MODEL")
    if path.is_file():
        if path.suffix != ".gguf":
            raise TangramError("not a model file", where=model, expected="a .gguf file or a folder")
        return str(path.parent), path.name, path.stem
    if path.is_dir():
        ggufs = sorted(file.name for file in path.glob("*.gguf"))
        if (path / "config.json").is_file() and (any(path.glob("*.safetensors")) or not ggufs):
            return str(path), None, path.resolve().name
        if len(ggufs) == 1:
            return str(path), ggufs[0], path.resolve().name
        raise TangramError(
            "folder holds several GGUF files" if ggufs else "folder holds no model",
            where=model,
            got=", ".join(ggufs) or None,
            expected="config.json with weights, or one .gguf file",
            fix="name the file" if ggufs else "",
        )
    if path.suffix == ".gguf" or path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise TangramError("model does not exist", where=model, expected="a folder, a .gguf file or a Hugging Face id")
    return model, None, model


def _hash_weights(model: Any) -> str:
    digest = hashlib.sha256()
    for name, parameter in model.state_dict().items():
        beginning = parameter.flatten()[:1024].float().cpu().numpy()
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode() + beginning.tobytes())
    return digest.hexdigest()


def _encode(loaded: LoadedModel, text: str) -> list[int]:
    return list(loaded.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _chat_template(loaded: LoadedModel) -> tuple[list[int], list[int]]:
    """Token ids before and after the text of a first user turn; a fixed date, so that days do not differ."""
    if not getattr(loaded.tokenizer, "chat_template", None):
        bos = loaded.tokenizer.bos_token_id
        return ([bos] if bos is not None and loaded.tokenizer("a")["input_ids"][0] == bos else []), []
    rendered = loaded.tokenizer.apply_chat_template(
        [{"role": "user", "content": MARK}],
        tokenize=False,
        add_generation_prompt=True,
        strftime_now=datetime.date(2024, 7, 26).strftime,
    )
    prefix, mark, suffix = rendered.partition(MARK)
    if not mark or MARK in suffix:
        raise TangramError(
            "cannot use the chat template",
            where=loaded.name,
            got=rendered[:80],
            expected="a template that shows a user's text once",
        )
    return _encode(loaded, prefix), _encode(loaded, suffix)
