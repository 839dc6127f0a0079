"""The command line: parses arguments, calls the function that does the work, prints what it returns."""

import io
import json
import signal
import sys
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tangram_plan.ir import CheckFailedError, MismatchError, TangramError, load_artefact, missing_statistics
from tangram_plan.profiles import Level

from .terminal import err, log, print_data, print_tables

if TYPE_CHECKING:
    from rich.console import RenderableType

CHECK_FAILED, WRONG_INPUT, INTERRUPTED = 1, 2, 130  # exit codes; 130 is what typer makes of Ctrl-C

UsageError: Any = typer.BadParameter.__bases__[0]  # click's, of whichever copy of click typer uses

app = typer.Typer(
    help="Compile measured per-head retention into a plan for a non-uniform KV cache.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
profile_app = typer.Typer(help="Make profiles from arrays, and look at them.", no_args_is_help=True)
bench_app = typer.Typer(help="Measure, and print the figures that the project claims.", no_args_is_help=True)
app.add_typer(profile_app, name="profile")
app.add_typer(bench_app, name="bench")

ConfigFile = Annotated[
    Path, typer.Argument(metavar="MODEL.YAML", help="Configuration; see examples/quickstart/model.yaml.")
]
Artefact = Annotated[Path, typer.Argument(metavar="OUT", help="Folder that `build` wrote.")]
ProfileName = Annotated[
    str, typer.Argument(metavar="PROFILE", help="A profile file or folder, or builtin:MODEL/SCORER.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key, such as grouping.max_groups=16; repeatable."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
FiguresFile = Annotated[
    Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write the figures as JSON, too.")
]
PromptTokens = Annotated[int, typer.Option(min=1, metavar="N", help="Tokens of the prompt.")]
ChunkTokens = Annotated[int, typer.Option(min=1, metavar="N", help="Tokens of a chunk.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No logs and no progress on stderr.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"tangram-plan {version('tangram-plan')}\n")
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    pass


@app.command()
def build(
    config_file: ConfigFile,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="OUT", help="Folder of the artefact; by default `plan` beside the configuration."
        ),
    ] = None,
    overrides: Overrides = None,
    stop_after: Annotated[
        str | None, typer.Option(metavar="STAGE", help="Stop after a stage and print its product.")
    ] = None,
    dump: Annotated[Path | None, typer.Option(metavar="DIR", help="Write every stage's product into DIR.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Compile and show the plan, write nothing.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Build although the profile is unstable or of another model.")
    ] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Compile a plan: budgets, head groups, pages, partitions, kernels, manifest."""
    from .build import build_plan

    summary = build_plan(
        config_file,
        None if dry_run else output or config_file.parent / "plan",
        overrides=tuple(overrides or ()),
        stop_after=stop_after,
        dump=dump,
        force=force,
        quiet=quiet,
    )
    _print_plan(summary, as_json=as_json)


@app.command()
def show(artefact: Artefact, as_json: AsJson = False, quiet: Quiet = False) -> None:  # noqa: ARG001 - says nothing anyway
    """Show the plan of an artefact."""
    from .report import plan_summary, read_solver_report

    plan = load_artefact(artefact)
    missing = missing_statistics(plan, artefact)
    summary = plan_summary(plan, read_solver_report(artefact), missing_statistics=missing) | {"artefact": str(artefact)}
    _print_plan(summary, as_json=as_json)


@app.command()
def verify(artefact: Artefact, as_json: AsJson = False, quiet: Quiet = False) -> None:
    """Check schema, hashes, every invariant of the plan, and its kernels against the reference."""
    from .verify_artefact import verify_artefact, verify_tables

    log(f"checking {artefact}: hashes, invariants, kernels in Triton's interpreter and compiler ...", quiet=quiet)
    result = verify_artefact(artefact)
    if as_json:
        print_data(result)
    else:
        print_tables(verify_tables(result))
    if not result["ok"]:
        raise typer.Exit(CHECK_FAILED)


@app.command()
def ablate(
    config_file: ConfigFile,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="DIR",
            help="Folder for ablation.csv and the plots; by default `ablation` beside the configuration.",
        ),
    ] = None,
    overrides: Overrides = None,
    force: Annotated[
        bool, typer.Option("--force", help="Go on although the profile is unstable or of another model.")
    ] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Compare every clustering solver with every partition solver on one objective."""
    from .ablation import ablation_table, run_ablation, write_ablation

    rows = run_ablation(config_file, overrides=tuple(overrides or ()), force=force, quiet=quiet)
    for path in write_ablation(rows, output or config_file.parent / "ablation"):
        log(f"wrote {path}", quiet=quiet)
    if as_json:
        print_data(rows)
    else:
        print_tables(ablation_table(rows))


@app.command()
def calibrate(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Folder or id of a Hugging Face causal LM, or a GGUF file.")
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="PROFILE", help="Folder of the profiles; one file per scorer.")
    ],
    texts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON Lines with `text` and `source`; by default the texts that ship."),
    ] = None,
    device: Annotated[str, typer.Option(help="Where the model runs, as torch names it.")] = "cpu",
    max_tokens: Annotated[int, typer.Option(min=64, help="Longest sample; longer texts are cut.")] = 2048,
    min_samples: Annotated[int, typer.Option(min=1, help="Fewest samples that make a profile.")] = 4,
    name: Annotated[
        str | None, typer.Option(help="What the profiles call the model; by default its id or folder.")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Measure what every KV head of a model keeps; go on where a stopped run ended."""
    from rich.console import Console

    from .calibrate import calibrate as run_calibration

    console = Console(stderr=True, quiet=quiet)
    for path in run_calibration(
        model,
        output,
        texts=texts,
        device=device,
        max_tokens=max_tokens,
        min_samples=min_samples,
        name=name,
        console=console,
    ):
        sys.stdout.write(f"{path}\n")


@app.command()
def reorder(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Folder of a safetensors checkpoint.")],
    artefact: Annotated[
        Path, typer.Argument(metavar="PLAN", help="Folder that `build` wrote with grouping.reorder_heads.")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="Folder of the new checkpoint.")],
    quiet: Quiet = False,
) -> None:
    """Rewrite a checkpoint so that its KV heads stand in a plan's order."""
    from .model_config import load_model_shape
    from .reorder import reorder_checkpoint

    plan = load_artefact(artefact)
    shape, config_path = load_model_shape(str(model), relative_to=Path())
    if shape.fingerprint != plan.model.fingerprint:
        raise MismatchError(
            "plan is for another model",
            where=str(artefact),
            got=f"{plan.model.model_type} {plan.model.fingerprint[:12]}",
            expected=f"{shape.model_type} {shape.fingerprint[:12]} ({config_path})",
        )
    reorder_checkpoint(model, shape, plan.head_order, output)
    log(f"wrote {output}: KV heads in the order {plan.head_order.hash[:12]}", quiet=quiet)


ServedModel = Annotated[str, typer.Option(metavar="MODEL", help="Folder or id of the model, as `vllm serve` takes it.")]
PASS_ON: dict[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True}


@app.command(context_settings=PASS_ON)
def serve(
    context: typer.Context,
    artefact: Artefact,
    model: ServedModel,
    print_line: Annotated[
        bool, typer.Option("--print", help="Print the `vllm serve` line that would be started, and stop.")
    ] = False,
) -> None:
    """Serve a model with its cache compressed as planned; every other option is one of `vllm serve`."""
    from .serve import prepare_service, start

    service = prepare_service(artefact, model, context.args)
    if print_line:
        sys.stdout.write(f"{service.line}\n")
        return
    log(service.line, quiet=False)
    start(service)


@app.command(context_settings=PASS_ON)
def doctor(
    context: typer.Context,
    artefact: Artefact,
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Folder or id of the model, as `vllm serve` takes it.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what would keep a plan from being served here, and what to do; options of `vllm serve` are checked, too."""
    from .doctor import doctor_table, examine

    result = examine(artefact, model, context.args)
    if as_json:
        print_data(result)
    else:
        print_tables(doctor_table(result))
    if not result["ok"]:
        raise typer.Exit(CHECK_FAILED)


@app.command()
def schema() -> None:
    """Print the JSON Schema of model.yaml."""
    from .config import BuildConfig

    print_data(BuildConfig.model_json_schema())


@profile_app.command("import")
def import_profile(
    arrays: Annotated[
        Path, typer.Argument(metavar="ARRAYS", help="An .npz file, or an .npy file with the retained fractions alone.")
    ],
    model: Annotated[str, typer.Option(metavar="DIR", help="The model that was measured; only config.json is read.")],
    scorer: Annotated[str, typer.Option(help="The scorer that was measured.")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="PROFILE", help="The profile file to write.")],
    key: Annotated[str, typer.Option(help="Array [samples, layers, kv_heads] of retained fractions.")] = "retained",
    layer_ids: Annotated[str | None, typer.Option(help="Array that says which layers the rows are.")] = None,
    ratio_key: Annotated[str | None, typer.Option(help="Array that holds the requested ratio.")] = None,
    ratio: Annotated[float | None, typer.Option(help="The requested ratio, if the file does not hold it.")] = None,
    meta_key: Annotated[str | None, typer.Option(help="Array whose rows are equal for samples of one context.")] = None,
    level: Annotated[Level, typer.Option(help="Scope of the pooled top-k that was measured.")] = Level.MODEL,
    name: Annotated[str | None, typer.Option(help="What the profile calls the model.")] = None,
    quiet: Quiet = False,
) -> None:
    """Make a profile from retained fractions that another tool measured."""
    from tangram_plan.profiles import save_profile

    from .import_arrays import DEFAULT_RATIO, ArrayKeys, import_arrays
    from .model_config import load_model_shape

    shape, config_path = load_model_shape(model, relative_to=Path())
    if ratio is not None and ratio_key is not None:
        raise TangramError("the requested ratio is given twice", where="--ratio, --ratio-key", expected="one of them")
    if not scorer.strip():
        raise TangramError("scorer has no name", where="--scorer")
    if ratio is None and ratio_key is None:
        log(f"no --ratio and no --ratio-key: the requested ratio is taken to be {DEFAULT_RATIO}", quiet=quiet)
    keys = ArrayKeys(key, layer_ids, ratio_key, meta_key)
    profile = import_arrays(
        arrays,
        keys,
        shape,
        model=name or config_path.parent.resolve().name,
        scorer=scorer,
        level=level,
        requested_ratio=ratio,
    )
    save_profile(profile, output)
    log(
        f"wrote {output}: {len(profile.samples)} samples of {len({s.context for s in profile.samples})} contexts, {len(profile.kv_heads)} KV heads",
        quiet=quiet,
    )


@profile_app.command("show")
def show_profile(
    name: ProfileName,
    as_json: AsJson = False,
    quiet: Quiet = False,  # noqa: ARG001 - says nothing anyway
    level: Annotated[Level | None, typer.Option(help="Level of the heat map.")] = None,
    ratio: Annotated[float | None, typer.Option(help="Ratio of the heat map; by default the one next to 0.3.")] = None,
) -> None:
    """Show what a profile holds: heat map, rank stability, spread, overflow."""
    from tangram_plan.profiles import find_profile, load_profile

    from .profile_report import profile_summary, profile_tables

    profile = load_profile(find_profile(name))
    if as_json:
        print_data(profile_summary(profile))
    else:
        print_tables(profile_tables(profile, level, ratio))


@bench_app.command("planner")
def bench_planner(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder with SCORER/MODEL/profile*.npz arrays of retained fractions.")
    ],
    output: FiguresFile = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Memory, tensor parallelism, overflow, splits and planning time on measured retention."""
    from .bench.planner import planner_figures, planner_tables

    figures = planner_figures(folder, quiet=quiet)
    _print_figures(figures, planner_tables(figures), output, as_json=as_json)
    if not all(goal["met"] for goal in figures["goals"]):
        raise typer.Exit(CHECK_FAILED)


@bench_app.command("decode")
def bench_decode(
    artefact: Artefact,
    output: FiguresFile = None,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Plot shares of the bandwidth.")] = None,
    with_peers: Annotated[bool, typer.Option("--peers/--no-peers", help="Time FlashInfer, FA3 and torch, too.")] = True,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Time the generated decode kernels on a GPU, beside peers and what the cost model predicted."""
    from .bench.decode import bench_decode as measure
    from .bench.decode import decode_tables, plot_decode

    figures = measure(artefact, with_peers=with_peers, quiet=quiet)
    _print_figures(figures, decode_tables(figures), output, as_json=as_json)
    if plot is not None:
        plot_decode(figures, plot)


@bench_app.command("prefill")
def bench_prefill(
    artefact: Artefact,
    output: FiguresFile = None,
    prompt_tokens: PromptTokens = 102400,
    chunk_tokens: ChunkTokens = 8192,
    all_layers: Annotated[bool, typer.Option("--all-layers", help="Every layer, not three of them.")] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Time attention of a prompt's chunks over their compressed past on a GPU, beside the full past."""
    from .bench.prefill import bench_prefill as measure
    from .bench.prefill import prefill_tables

    figures = measure(
        artefact, prompt_tokens=prompt_tokens, chunk_tokens=chunk_tokens, all_layers=all_layers, quiet=quiet
    )
    _print_figures(figures, prefill_tables(figures), output, as_json=as_json)


@bench_app.command("evict")
def bench_evict(
    artefact: Artefact,
    output: FiguresFile = None,
    prompt_tokens: PromptTokens = 102400,
    chunk_tokens: ChunkTokens = 8192,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Time scoring, selection and eviction after a prompt's chunks on a GPU."""
    from .bench.evict import bench_evict as measure
    from .bench.evict import evict_tables

    figures = measure(artefact, prompt_tokens=prompt_tokens, chunk_tokens=chunk_tokens, quiet=quiet)
    _print_figures(figures, evict_tables(figures), output, as_json=as_json)


@bench_app.command("serve", context_settings=PASS_ON)
def bench_serve(
    context: typer.Context,
    artefact: Artefact,
    model: ServedModel,
    workloads: Annotated[
        list[str],
        typer.Option("-w", "--workload", metavar="REQUESTSxPROMPT+NEW", help="As 16x65536+1024; more than once."),
    ],
    kv_gib: Annotated[float, typer.Option(help="GiB for keys and values, the same for both engines.")],
    rate: Annotated[
        float | None, typer.Option(help="Requests per second, of a Poisson process; without it all arrive at once.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of prompts and arrivals.")] = 0,
    only: Annotated[str | None, typer.Option(metavar="stock|plan", help="Measure one engine.")] = None,
    output: FiguresFile = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Serve the same requests by stock vLLM and from a plan; every other option is one of `vllm serve`, for both."""
    from .bench.serve import PLAN, STOCK, Workload, serve_table
    from .bench.serve import bench_serve as measure

    if only not in (None, PLAN, STOCK):
        raise TangramError("there is no such engine", where="--only", got=only, expected=f"{STOCK} or {PLAN}")
    parsed = [Workload.parse(text) for text in workloads]
    figures = measure(
        artefact,
        model,
        context.args,
        parsed,
        kv_gib=kv_gib,
        rate=rate,
        seed=seed,
        engines=(only,) if only else (STOCK, PLAN),
        quiet=quiet,
    )
    _print_figures(figures, serve_table(figures), output, as_json=as_json)


@bench_app.command("tune")
def bench_tune(
    artefact: Artefact,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="Where the description goes.")],
    quiet: Quiet = False,
) -> None:
    """Find the best tiles, steps, warps and CTAs for the GPU at hand, and write its device description."""
    from .bench.tune import bench_tune as measure
    from .bench.tune import tune_table

    figures = measure(artefact, output, quiet=quiet)
    print_tables(tune_table(figures))


def _count_interrupts() -> list[int]:
    """A list that grows by the signal number whenever Ctrl-C is pressed; the interrupt itself is raised as always."""
    seen: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, interrupt)
    return seen


def main() -> None:
    """Entry point: wrong input is one line and exit code 2 (1 for a check that failed), all else keeps its traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a name that the terminal's encoding lacks is no fault
    interrupts = _count_interrupts()
    try:
        code = app(prog_name="tangram-plan", standalone_mode=False)
    except TangramError as error:
        err().print(f"error: {error}")
        code = CHECK_FAILED if isinstance(error, CheckFailedError) else WRONG_INPUT
    except UsageError as error:
        message = " ".join(error.format_message().split())
        err().print(f"error: {message}; see `{error.ctx.command_path if error.ctx else 'tangram-plan'} --help`")
        code = WRONG_INPUT
    except BaseException:
        if not interrupts:
            raise
        code = INTERRUPTED  # extensions that are interrupted while they load raise errors of their own
    if code == INTERRUPTED:
        err().print("interrupted; no half-written artefact or profile was left")
    sys.exit(code if isinstance(code, int) else 0)


def _print_plan(summary: dict[str, Any], *, as_json: bool) -> None:
    from .report import plan_tables

    if as_json or "plan_hash" not in summary:
        print_data(summary)
    else:
        print_tables(plan_tables(summary))


def _print_figures(figures: dict[str, Any], tables: "RenderableType", output: Path | None, *, as_json: bool) -> None:
    if output:
        try:
            output.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise TangramError("figures cannot be written", where=str(output), got=error.strerror) from error
    if as_json:
        print_data(figures)
    else:
        print_tables(tables)
