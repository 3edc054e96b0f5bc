"""`bench`: the same load against both sides, on the same devices."""

from pathlib import Path
from typing import Annotated

import typer

from pdctl.cli.app import settings
from pdctl.cli.stack import AsJson
from pdctl.exits import UsageError


def register(app: typer.Typer) -> None:
    app.command()(bench)


def bench(
    context: typer.Context,
    mode: Annotated[
        list[str] | None,
        typer.Option(help="[NAME=]PROFILE[+KEY=VALUE] or URL; repeatable. Default: colocated, pd=demo"),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="3 prompts x 2 concurrencies, 2 rounds, within 5 minutes")
    ] = False,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="also measure stages, for `pdctl plan --stages`")
    ] = False,
    prompt: Annotated[list[int] | None, typer.Option(help="tokens; repeatable")] = None,
    mix: Annotated[
        list[str] | None, typer.Option(metavar="N,N,..", help="prompts of these lengths, as many of each; repeatable")
    ] = None,
    output: Annotated[int, typer.Option(help="tokens of an answer")] = 0,
    concurrency: Annotated[
        list[int] | None, typer.Option("-c", "--concurrency", help="closed loop; repeatable")
    ] = None,
    rate: Annotated[list[str] | None, typer.Option(help="open loop, requests/s, or 1..16; repeatable")] = None,
    burst: Annotated[float, typer.Option(help="of an open loop: 1 = Poisson, above: in bursts")] = 1.0,
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Azure LLM, Mooncake or BurstGPT")] = None,
    shared: Annotated[float, typer.Option(help="share of the prompt that all requests have in common")] = 0.0,
    turns: Annotated[int, typer.Option(help="of a conversation")] = 1,
    rounds: Annotated[int, typer.Option(help="repeats, modes interleaved")] = 0,
    requests: Annotated[int, typer.Option(help="a cell and round, beside the first wave")] = 0,
    limit: Annotated[str | None, typer.Option(metavar="TIME", help="end a cell after this")] = None,
    within: Annotated[
        str | None, typer.Option(metavar="TIME", help="of all: begin no cell that would end after this")
    ] = None,
    ttft: Annotated[str, typer.Option(metavar="TIME", help="objective")] = "800ms",
    tpot: Annotated[str, typer.Option(metavar="TIME", help="objective")] = "40ms",
    sweep_budget: Annotated[list[int] | None, typer.Option(help="colocated at this token budget; repeatable")] = None,
    max_len: Annotated[int, typer.Option(help="cut what a trace has longer")] = 0,
    key: Annotated[str, typer.Option(envvar="OPENAI_API_KEY", help="for URLs")] = "none-needed",
    model: Annotated[str, typer.Option(help="for URLs that do not say")] = "",
    seed: Annotated[int, typer.Option()] = 1,
    vocab: Annotated[int, typer.Option(help="prompts are made of ids below this")] = 30_000,
    compare: Annotated[tuple[Path, Path] | None, typer.Option(metavar="A.json B.json", help="two results")] = None,
    fail_on: Annotated[
        list[str] | None, typer.Option(metavar="CRITERION", help="such as ttft_p95>800ms: exit 8")
    ] = None,
    report: Annotated[Path | None, typer.Option(metavar="R.html")] = None,
    out: Annotated[Path | None, typer.Option("-o", metavar="R.json")] = None,
    as_json: AsJson = False,
) -> int:
    """Colocated and disaggregated in turn under the same load, or servers that run: does splitting pay?"""
    from pdctl.bench import run
    from pdctl.cli.run import seconds

    criteria = tuple(fail_on or ())
    if compare is not None:
        return run.compare_files(*compare, fail_on=criteria, as_json=as_json)
    if rounds < 0 or turns < 1 or output < 0 or any(n < 1 for n in [*(prompt or ()), *(concurrency or ())]):
        raise UsageError("counts must be above 0")
    asked = run.Asked(
        root=settings(context).root,
        modes=tuple(mode or ()),
        prompts=tuple(prompt or ()),
        mixes=tuple(run.mix_of(text) for text in mix or ()),
        output=output,
        concurrencies=tuple(concurrency or ()),
        rates=run.rates_of(rate or ()),
        burst=burst,
        trace=trace,
        shared=shared,
        turns=turns,
        rounds=rounds,
        requests=requests,
        limit_s=seconds(limit, "--limit", without="no limit"),
        within_s=seconds(within, "--within", without="no limit; --quick alone: 285s"),
        ttft_s=seconds(ttft, "--ttft", without="800ms") or 0.0,
        tpot_s=seconds(tpot, "--tpot", without="40ms") or 0.0,
        budgets=tuple(sweep_budget or ()),
        is_quick=quick,
        is_calibrating=calibrate,
        max_len=max_len,
        key=key,
        model=model,
        seed=seed,
        vocab=vocab,
    )
    return run.bench(asked, fail_on=criteria, output=out, report=report, as_json=as_json)
