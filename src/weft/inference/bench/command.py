"""``weft bench-llm``."""

import asyncio
import math
import os
import re
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from weft.console import Json, out, print_json, print_line, told
from weft.inference.bench import figures
from weft.inference.bench.load import Client, Http, InProcess, Load, Timeline, run
from weft.inference.server.command import CACHE_DTYPE, DRAFT, MODEL, QUANTIZE


def bench_llm(
    model: Annotated[str, typer.Argument(metavar="MODEL|URL", help=f"{MODEL}; or HOST:PORT of a server")],
    rates: Annotated[
        list[str] | None,
        typer.Option("--rate", help="requests a second (Poisson), several to compare; inf: all at once"),
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="of each rate")] = 32,
    inputs: Annotated[str, typer.Option("--input", help="tokens of a prompt: N or LEAST:MOST")] = "128",
    outputs: Annotated[str, typer.Option("--output", help="tokens to generate: N or LEAST:MOST")] = "64",
    shared: Annotated[int, typer.Option(min=0, help="tokens of a prefix that all prompts have")] = 0,
    seed: Annotated[int, typer.Option(help="of prompts, lengths and arrivals")] = 0,
    slo: Annotated[
        str | None, typer.Option(help="service level, seconds: ttft=0.5,itl=0.05; gives the goodput")
    ] = None,
    peers: Annotated[list[str] | None, typer.Option("--peer", help="transformers or vllm, beside --rate inf")] = None,
    compiled: Annotated[bool, typer.Option("--compile", help="torch.compile for transformers")] = False,
    api_key: Annotated[str | None, typer.Option(envvar="WEFT_API_KEY", help="for a URL")] = None,
    name: Annotated[str | None, typer.Option(help="of the model behind a URL; else its first")] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu")] = None,
    dtype: Annotated[str | None, typer.Option(help="of weights and arithmetic")] = None,
    quantize: Annotated[str | None, typer.Option(help=QUANTIZE)] = None,
    cache_dtype: Annotated[str | None, typer.Option(help=CACHE_DTYPE)] = None,
    draft: Annotated[str | None, typer.Option(help=f"{DRAFT}; without bounds")] = None,
    save: Annotated[bool, typer.Option("--save", help="append a record to results/<machine>/serving.jsonl")] = False,
    as_json: Json = False,
) -> None:
    """Measure what a model serves: throughput, first token, time between tokens, goodput, against what the machine allows."""
    first = Load(requests, math.inf, _range("input", inputs), _range("output", outputs), shared, seed)
    loads = [replace(first, rate=rate, seed=seed + i) for i, rate in enumerate(map(_rate, rates or ["inf"]))]
    level = None if slo is None else figures.Slo.parse(slo)
    url = _url(model)
    if url and (peers or device or dtype or quantize or cache_dtype or draft):
        names = "--peer, --device, --dtype, --quantize, --cache-dtype and --draft"
        raise ValueError(f"{names} are of a model here; expected no URL")
    offline = next((load for load in loads if math.isinf(load.rate)), loads[0])
    if peers:
        from weft.inference.bench import peers as others

        for peer in peers:
            others.check(peer, model, offline)
    if url:
        record, runs = _of_server(url, api_key, name, loads, level)
        compared: list[dict[str, Any]] = []
    else:
        record, runs = _of_model(
            model, loads, level, device=device, dtype=dtype, quantize=quantize, cache_dtype=cache_dtype, draft=draft
        )
        compared = []
        for peer in peers or []:
            told(f"{peer}: all {offline.requests} prompts at once")
            try:
                compared.append(others.measure(peer, model, offline, record["device"], record["dtype"], compiled))
            except Exception as error:  # of another engine: what was measured here is not lost
                compared.append({"peer": peer, "error": f"{type(error).__name__}: {error}"[:300]})
    record |= {"slo": slo, "runs": runs, "peers": compared}
    if save:
        _save(record)
    if as_json:
        print_json(record)
    else:
        _print(record)
    if any(each["figures"]["failed"] for each in runs) or any("error" in peer for peer in compared):
        raise typer.Exit(1)


def _url(model: str) -> str | None:
    """The URL of a server's API, also where HOST:PORT is given; None for a model here.

    Raises:
        FileNotFoundError: neither a model nor an address.
    """
    url = model
    if not model.startswith(("http://", "https://")):
        if model == "smollm2" or Path(model).exists():
            return None
        if not re.fullmatch(r"([\w.-]+|\[[\da-fA-F:.]+\]):\d+(/.*)?", model):
            raise FileNotFoundError(
                f"no model at {model}; expected a folder, a .gguf file, smollm2, HOST:PORT or http://HOST:PORT/v1"
            )
        url = f"http://{model}"
    return url if urlsplit(url).path.strip("/") else f"{url.rstrip('/')}/v1"


def _of_server(
    url: str, key: str | None, name: str | None, loads: list[Load], slo: figures.Slo | None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    async def whole() -> tuple[str, list[list[Timeline]]]:
        client = Http(url, key, name)
        async with client.http:
            found = await client.find_model()
            return found, await _all(client, loads)

    served, lines = asyncio.run(whole())
    return {"model": served, "url": url}, _measured(loads, lines, slo, None)


def _of_model(
    model: str, loads: list[Load], slo: figures.Slo | None, **options: Any
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError as missing:
        message = "weft bench-llm MODEL needs PyTorch: pip install 'weft[gpu,inference]'"
        raise ModuleNotFoundError(message, name="torch") from missing
    from weft.hardware import ceilings
    from weft.inference.server.driver import Driver
    from weft.inference.server.team import EngineProcess

    with closing(EngineProcess({"folder": model, **options})) as engine:
        engine.loaded()
        facts = engine.facts
        others = os.getloadavg()[0] if facts.device == "cpu" and hasattr(os, "getloadavg") else None
        longest = max(load.input_tokens[1] + load.output_tokens[1] for load in loads)
        if longest > facts.length:
            raise ValueError(
                f"--input and --output make {longest} tokens; expected at most {facts.length}, the room of model and cache"
            )
        driver = Driver(engine, most_requests=max(load.requests for load in loads))
        try:
            lines = asyncio.run(_all(InProcess(driver), loads))
        finally:
            driver.stop()
    bound: figures.Bound | None = None
    if options["draft"] is None:  # with one a step gives several tokens; the engine's memory is free now
        bound = figures.Bound.of(facts, facts.token_bytes, ceilings.measure(facts.device, quick=True, say=told))
    about: dict[str, Any] = {
        "model": Path(model).name, "device": facts.device, "dtype": facts.dtype,
        "quantize": options["quantize"], "cache_dtype": facts.cache_dtype,
        "draft": options["draft"] and Path(options["draft"]).name,
        "load_average": others,  # of a CPU, before the run: what else ran on it
        "bound": bound and {k: v if math.isfinite(v) else None for k, v in asdict(bound).items()},
    }  # fmt: skip
    return about, _measured(loads, lines, slo, bound)


async def _all(client: Client, loads: list[Load]) -> list[list[Timeline]]:
    """Each load in turn, after a few requests that warm kernels up."""
    await run(client, replace(loads[0], requests=min(4, loads[0].requests), rate=math.inf, seed=loads[0].seed - 1))
    found = []
    for load in loads:
        rate = None if math.isinf(load.rate) else load.rate
        told(f"{load.requests} requests, {figures.rate_text(rate)}{'' if rate is None else ' a second'}")
        found.append(await run(client, load))
    return found


def _measured(
    loads: list[Load], lines: list[list[Timeline]], slo: figures.Slo | None, bound: figures.Bound | None
) -> list[dict[str, Any]]:
    found = []
    for load, each in zip(loads, lines, strict=True):
        rate = None if math.isinf(load.rate) else load.rate
        measured = figures.summary(each, slo, bound, at_once=rate is None)
        found.append({"load": {**asdict(load), "rate": rate}, "figures": measured})
    return found


def _save(record: dict[str, Any]) -> None:
    from weft.hardware import query
    from weft.records import Store, commit, now

    device = record.get("device") or ("cuda" if query.has_gpu() else "cpu")
    machine = query.name(device)
    line = {"run": now(), "commit": commit(), "versions": query.versions(), "machine": machine, **record}
    told(f"saved in {Store().append(machine, figures.FILE, line)}")


def _print(record: dict[str, Any]) -> None:
    from rich import box
    from rich.table import Table

    from weft.drawing.quantities import figures as digits
    from weft.drawing.quantities import ratio, si

    runs = record["runs"]
    where = record.get("url") or f"{record['device']}, {record['dtype']}"
    print_line(f"{record['model']} · {where} · {runs[0]['load']['requests']} requests of "
               f"{figures.lengths_text(runs[0]['load'])}")  # fmt: skip
    head, body = figures.rows(runs)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, text in enumerate(head):
        table.add_column(text, justify="right" if i else "left", no_wrap=not i)
    for row in body:
        table.add_row(*row)
    out.print(table)
    if bound := record.get("bound"):
        rate = si(bound["matrix"], "FLOP/s") if bound["matrix"] else f"not measured in {record['dtype']}"
        read = f"{si(bound['weights'], 'B')} of weights a step, {si(bound['token'], 'B')} of cache a token"
        flops = si(bound["layers"] + bound["head"], "FLOP")
        print_line(f"bound: {read}, at {si(bound['bandwidth'], 'B/s')}; {flops} a token, at {rate}")
    ours = next((r["figures"].get("output_tokens_per_s") for r in runs if r["load"]["rate"] is None), None)
    for peer in record["peers"]:
        if "error" in peer:
            print_line(f"{peer['peer']} failed: {peer['error']}")
            continue
        theirs = peer["output_tokens_per_s"]
        against = f", weft {ratio(ours / theirs)}" if ours else ""
        print_line(f"{peer['peer']} ({peer['how']}): {digits(theirs)} output tokens/s{against}")
    for each in runs:
        for error in each["figures"].get("errors", []):
            print_line(f"failed: {error}")


def _range(option: str, text: str) -> tuple[int, int]:
    parts = text.split(":")
    try:
        least, most = int(parts[0]), int(parts[-1])
    except ValueError:
        least, most = 0, 0
    if len(parts) > 2 or not 1 <= least <= most:
        raise ValueError(f"--{option} is {text!r:.40}; expected TOKENS or LEAST:MOST, with 1 <= LEAST <= MOST")
    return least, most


def _rate(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"--rate is {text!r:.40}; expected requests a second, above 0, or inf") from None
