from pathlib import Path
from typing import Any

import pytest
import yaml

from tangram_plan.config import BuildConfig, load_config
from tangram_plan.ir import KVDtype, TangramError
from tangram_plan.profiles import Level

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart" / "model.yaml"
MINIMAL = "model: config.json\nprofile: p.npz\n"


def write(folder: Path, text: str = MINIMAL) -> Path:
    (folder / "model.yaml").write_text(text)
    return folder / "model.yaml"


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(TangramError) as error:
        load_config(path, overrides)
    assert "\n" not in str(error.value)
    return str(error.value)


# --- what is valid


def test_two_keys_are_enough(tmp_path: Path) -> None:
    config = load_config(write(tmp_path))
    assert config == BuildConfig(model="config.json", profile="p.npz")
    assert (config.retention.rule, config.retention.ratio, config.retention.level) == ("target", 0.3, Level.MODEL)
    assert (config.retention.sink_tokens, config.retention.window_tokens) == (4, 32)
    assert (config.grouping.solver, config.grouping.max_groups, config.grouping.page_slots) == ("cp_sat", 24, "auto")
    assert config.partition.contexts == (2048, 8192, 32768, 131072)
    assert (config.tensor_parallel, config.kv_dtype) == (1, KVDtype.BFLOAT16)


def test_the_quickstart_names_every_key_with_its_default() -> None:
    raw = yaml.safe_load(QUICKSTART.read_text())
    defaults = BuildConfig(model=raw["model"], profile=raw["profile"]).model_dump(mode="json")
    assert raw == defaults
    assert load_config(QUICKSTART) == BuildConfig.model_validate(raw)


@pytest.mark.parametrize("ratio", [1e-9, 0.3, 0.999, 1, 1.0])
def test_a_ratio_above_0_and_up_to_1_is_valid(tmp_path: Path, ratio: float) -> None:
    assert load_config(write(tmp_path), (f"retention.ratio={ratio:.9f}",)).retention.ratio == ratio


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("grouping.max_groups=16", lambda config: config.grouping.max_groups == 16),
        ("grouping.page_slots=512", lambda config: config.grouping.page_slots == 512),
        ("grouping.page_slots=auto", lambda config: config.grouping.page_slots == "auto"),
        ("grouping.max_groups_per_layer=null", lambda config: config.grouping.max_groups_per_layer is None),
        ("grouping.reorder_heads=true", lambda config: config.grouping.reorder_heads is True),
        ("partition.batch_sizes=[1, 2]", lambda config: config.partition.batch_sizes == (1, 2)),
        ("partition.contexts=[2147483648]", lambda config: config.partition.contexts == (2**31,)),
        ("kv_dtype=float16", lambda config: config.kv_dtype is KVDtype.FLOAT16),
        ("retention.level=layer", lambda config: config.retention.level is Level.LAYER),
        ("model=other=x", lambda config: config.model == "other=x"),
        ("retention={ratio: 0.5}", lambda config: config.retention.ratio == 0.5),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_override_replaces_one_key(tmp_path: Path, override: str, value: Any) -> None:
    config = load_config(write(tmp_path, MINIMAL + "scorer: snapkv\n"), (override,))
    assert value(config)
    assert config.scorer == "snapkv"


def test_the_last_of_two_overrides_wins_and_others_stay(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + "retention: {ratio: 0.5, sink_tokens: 1}\n")
    config = load_config(path, ("retention.ratio=0.6", "retention.ratio=0.7"))
    assert (config.retention.ratio, config.retention.sink_tokens) == (0.7, 1)


# --- what is not


@pytest.mark.parametrize("ratio", ["0", "0.0", "-0.3", "1.0001", "30", ".nan", ".inf", "-.inf", "true", "much", "null"])
def test_a_ratio_that_is_no_part_is_refused(tmp_path: Path, ratio: str) -> None:
    message = refusal(write(tmp_path), f"retention.ratio={ratio}")
    assert f"{tmp_path / 'model.yaml'}: retention.ratio is not valid" in message
    assert f"got {yaml.safe_load(ratio)}" in message or ratio == "null"
    assert "expected " in message


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("retention.alpha=-1", ("retention.alpha", "got -1")),
        ("retention.alpha=.nan", ("retention.alpha", "got nan")),
        ("retention.alpha=.inf", ("retention.alpha", "got inf")),
        ("retention.rule=median", ("retention.rule", "got median", "'target' or 'mean_std'")),
        ("retention.level=head", ("retention.level", "got head", "'model' or 'layer'")),
        ("retention.sink_tokens=-1", ("retention.sink_tokens", "got -1")),
        ("retention.window_tokens=-1", ("retention.window_tokens", "got -1")),
        ("retention.window_tokens=1.5", ("retention.window_tokens", "got 1.5")),
        ("retention.window_tokens=8189", ("at least sink_tokens + window_tokens = 8193, not 8192",)),
        ("compress_chunk_tokens=35", ("at least sink_tokens + window_tokens = 36, not 35",)),
        ("compress_chunk_tokens=0", ("compress_chunk_tokens", "got 0")),
        ("max_new_tokens=0", ("max_new_tokens", "got 0")),
        ("max_new_tokens=2147483649", ("max_new_tokens", "got 2147483649")),
        ("grouping.solver=best", ("grouping.solver", "got best", "'cp_sat'")),
        ("grouping.scope=heads", ("grouping.scope", "got heads")),
        ("grouping.max_groups=0", ("grouping.max_groups", "got 0")),
        ("grouping.max_groups=many", ("grouping.max_groups", "got many")),
        ("grouping.max_groups=true", ("grouping.max_groups", "got True")),
        ("grouping.max_groups_per_layer=0", ("grouping.max_groups_per_layer", "got 0")),
        ("grouping.page_slots=0", ("grouping.page_slots", "got 0", "multiple of 16")),
        ("grouping.page_slots=-16", ("grouping.page_slots", "got -16", "multiple of 16")),
        ("grouping.page_slots=24", ("grouping.page_slots", "got 24", "multiple of 16")),
        ("grouping.page_slots=large", ("grouping.page_slots", "got large")),
        ("partition.solver=best", ("partition.solver", "got best", "'greedy'")),
        ("partition.batch_sizes=[]", ("partition.batch_sizes", "rising positive integers")),
        ("partition.batch_sizes=[0, 1]", ("partition.batch_sizes", "got [0, 1]")),
        ("partition.batch_sizes=[1, 1]", ("partition.batch_sizes", "got [1, 1]")),
        ("partition.batch_sizes=4", ("partition.batch_sizes", "got 4")),
        ("partition.batch_sizes=[65537]", ("partition", "up to 65536")),
        ("partition.contexts=[8192, 2048]", ("partition.contexts", "got [8192, 2048]")),
        ("partition.contexts=[2048, x]", ("partition.contexts", "got x")),
        ("partition.contexts=[2147483649]", ("partition", "up to 2147483648")),
        ("tensor_parallel=0", ("tensor_parallel", "got 0")),
        ("tensor_parallel=yes", ("tensor_parallel", "got True")),
        ("kv_dtype=fp8", ("kv_dtype", "got fp8", "'bfloat16'")),
        ("scorer=''", ("scorer",)),
        ("model=7", ("model", "got 7")),
        ("profile=null", ("profile",)),
        ("retention=0.3", ("retention", "got 0.3")),
        ("grouping=null", ("grouping",)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_value_out_of_range_is_refused_by_key_value_and_range(
    tmp_path: Path, override: str, parts: tuple[str, ...]
) -> None:
    message = refusal(write(tmp_path), override)
    for part in (str(tmp_path / "model.yaml"), "is not valid", *parts):
        assert part in message


@pytest.mark.parametrize(
    ("key", "fix"),
    [
        ("profil", "unknown key profil; did you mean profile?"),
        ("tensor_paralel", "unknown key tensor_paralel; did you mean tensor_parallel?"),
        ("retention.ration", "unknown key retention.ration; did you mean ratio?"),
        ("grouping.max_group", "unknown key grouping.max_group; did you mean max_groups?"),
        ("partition.context", "unknown key partition.context; did you mean contexts?"),
        ("grouping.xyzzy", "unknown key grouping.xyzzy; known keys: solver, scope, max_groups,"),
        ("xyzzy", "unknown key xyzzy; known keys: model, profile, scorer,"),
        ("interval", "unknown key interval;"),
        ("partition.literals", "unknown key partition.literals;"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_that_exists(tmp_path: Path, key: str, fix: str) -> None:
    assert f"{tmp_path / 'model.yaml'}: {fix}" in refusal(write(tmp_path), f"{key}=1")


def test_an_unknown_key_of_the_file_is_refused_too(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + "retentoin: {ratio: 0.3}\n")
    assert "unknown key retentoin; did you mean retention?" in refusal(path)


def test_further_faults_are_counted(tmp_path: Path) -> None:
    message = refusal(write(tmp_path), "tensor_parallel=0", "max_new_tokens=0")
    assert "max_new_tokens is not valid (and 1 more)" in message


@pytest.mark.parametrize("key", ["model", "profile"])
def test_a_missing_key_is_named(tmp_path: Path, key: str) -> None:
    text = "".join(f"{line}\n" for line in MINIMAL.splitlines() if not line.startswith(key))
    assert f"key {key} is missing; add `{key}:`" in refusal(write(tmp_path, text))


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"", "configuration is not a mapping: got NoneType"),
        (b"- 1\n", "configuration is not a mapping: got list"),
        (b"model\n", "configuration is not a mapping: got str"),
        (b"model: [1\n", "configuration is not YAML"),
        (b"model: a\n  b: c\n", "configuration is not YAML"),
        (b"model: &a [*b]\n", "configuration is not YAML"),
        (b"a: !!python/object/apply:os.getcwd []\n", "configuration is not YAML"),
        (b"a: \x00\n", "configuration is not YAML"),
        (b"[" * 2000, "configuration is not YAML"),
        (b"\xff\xfe", "configuration cannot be read"),
        (MINIMAL.encode() + b"1: 2\n", "1 is not valid: got 1"),
    ],
    ids=range(11),
)
def test_a_file_that_is_no_configuration_is_refused_in_one_line(tmp_path: Path, content: bytes, part: str) -> None:
    (tmp_path / "model.yaml").write_bytes(content)
    message = refusal(tmp_path / "model.yaml")
    assert str(tmp_path / "model.yaml") in message
    assert part in message


def test_a_missing_file_or_a_folder_is_named(tmp_path: Path) -> None:
    assert f"{tmp_path / 'none.yaml'}: configuration does not exist" in refusal(tmp_path / "none.yaml")
    assert f"{tmp_path}: configuration cannot be read" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("ratio", "--set: override cannot be read: got ratio, expected KEY=VALUE"),
        ("=1", "--set: override cannot be read: got =1"),
        ("", "--set: override cannot be read"),
        ("model=[", "--set model: override is not YAML: got ["),
        ("model.name=1", "--set model.name: override names a key inside a plain value: got model"),
    ],
)
def test_an_override_that_cannot_be_read_is_named(tmp_path: Path, override: str, part: str) -> None:
    assert part in refusal(write(tmp_path), override)


def test_key_written_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.yaml"
    path.write_text("model: a\nprofile: b\nmodel: c\n", encoding="utf-8")
    with pytest.raises(TangramError, match="key model is written twice"):
        load_config(path)
