"""`plan`: how many of each, before anything is started."""

from pathlib import Path
from typing import Annotated

import typer

from pdctl.cli.stack import AsJson


def register(app: typer.Typer) -> None:
    app.command()(plan)


def plan(
    profile: Annotated[str | None, typer.Argument(help="its SLO and sizes; else the defaults")] = None,
    prompt: Annotated[int, typer.Option(help="tokens of a prompt")] = 0,
    output: Annotated[int, typer.Option(help="tokens of an answer")] = 0,
    spread: Annotated[float, typer.Option(help="coefficient of variation of both lengths")] = 0.0,
    rate: Annotated[float, typer.Option(help="requests/s that have to be served")] = 0.0,
    burst: Annotated[float, typer.Option(help="1 = Poisson, above: in bursts")] = 1.0,
    ttft: Annotated[str | None, typer.Option(metavar="TIME", help="objective, such as 800ms")] = None,
    tpot: Annotated[str | None, typer.Option(metavar="TIME", help="objective, such as 40ms")] = None,
    prefill_tok_s: Annotated[float, typer.Option(help="prompt tokens/s of a prefill worker")] = 0.0,
    decode_tok_s: Annotated[float, typer.Option(help="output tokens/s of a decode worker with a full batch")] = 0.0,
    stages: Annotated[Path | None, typer.Option(metavar="RESULT", help="of `pdctl bench --calibrate`")] = None,
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Azure LLM, Mooncake or BurstGPT")] = None,
    model: Annotated[str, typer.Option(help="for the estimate where nothing was measured")] = "llama-3.1-8b",
    device: Annotated[str, typer.Option(help="likewise")] = "h200",
    devices: Annotated[int, typer.Option(help="how many there are; default: as the ratio needs")] = 0,
    threshold: Annotated[list[int] | None, typer.Option(help="hybrid.threshold_tokens to try; repeatable")] = None,
    requests: Annotated[int, typer.Option(help="simulated for each probe, more with more devices")] = 400,
    check: Annotated[Path | None, typer.Option(metavar="RESULT", help="predicted against measured")] = None,
    as_json: AsJson = False,
) -> int:
    """How many prefill and decode workers a load needs, and whether splitting them pays at all."""
    from pdctl.cli.run import seconds
    from pdctl.plan import run

    if check is not None:
        return run.check_result(check, stages, as_json=as_json)
    asked = run.Asked(
        profile=profile,
        prompt=prompt,
        output=output,
        spread=spread,
        burst=burst,
        rate=rate,
        ttft_s=seconds(ttft, "--ttft", without="slo.ttft_p95 of the profile"),
        tpot_s=seconds(tpot, "--tpot", without="slo.tpot_p95 of the profile"),
        prefill_tok_s=prefill_tok_s,
        decode_tok_s=decode_tok_s,
        stages=stages,
        trace=trace,
        model=model,
        device=device,
        num_devices=devices,
        thresholds=tuple(threshold or ()),
        count=requests,
    )
    return run.plan(asked, as_json=as_json)
