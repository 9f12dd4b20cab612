"""``weft generate``, ``weft quantize`` and, from their packages, ``weft serve`` and ``weft bench-llm``."""

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from weft.console import Json, out, print_json, print_line, told
from weft.inference.bench.command import bench_llm
from weft.inference.server.command import CACHE_DTYPE, DRAFT, MODEL, QUANTIZE, TENSOR_PARALLEL, serve

PANEL = "Inference"


def register(app: typer.Typer) -> None:
    """Adds the commands to the ``weft`` command."""
    app.command(rich_help_panel=PANEL)(generate)
    app.command(rich_help_panel=PANEL)(serve)
    app.command("bench-llm", rich_help_panel=PANEL)(bench_llm)
    app.command("quantize", rich_help_panel=PANEL)(quantize_folder)


def generate(
    folder: Annotated[str, typer.Argument(help=MODEL)],
    prompt: Annotated[str, typer.Argument(help="text to go on from, or with --chat a question")],
    chat: Annotated[
        bool, typer.Option("--chat/--plain", help="through the model's chat template, if it has one")
    ] = True,
    max_tokens: Annotated[int, typer.Option(min=1, help="generated at most")] = 256,
    temperature: Annotated[float, typer.Option(min=0, help="0 for the most probable token")] = 0.0,
    top_p: Annotated[float, typer.Option(help="only the most probable tokens whose probabilities sum to it")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="only so many of the most probable tokens; 0 for all")] = 0,
    min_p: Annotated[float, typer.Option(help="only tokens of at least this share of the best's probability")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="divides logits of tokens in prompt or output")] = 1.0,
    presence_penalty: Annotated[float, typer.Option(help="taken once from the logit of a generated token")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="taken for each time it was generated")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="of the random numbers")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="text that ends the output; may be given several times")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu")] = None,
    dtype: Annotated[str | None, typer.Option(help="of weights and arithmetic")] = None,
    quantize: Annotated[str | None, typer.Option(help=QUANTIZE)] = None,
    cache_dtype: Annotated[str | None, typer.Option(help=CACHE_DTYPE)] = None,
    batch_invariant: Annotated[bool, typer.Option("--batch-invariant", help="bits do not depend on the batch")] = False,
    draft: Annotated[str | None, typer.Option(help=DRAFT)] = None,
    schema: Annotated[Path | None, typer.Option(help="file with a JSON schema that the output is of")] = None,
    tensor_parallel: Annotated[int, typer.Option(min=1, help=TENSOR_PARALLEL)] = 1,
    as_json: Json = False,
) -> None:
    """Generate text with a model on this machine."""
    import time

    with _importing("generate"):
        from weft.inference.config import read_object
        from weft.inference.llm import LLM
        from weft.inference.parameters import SamplingParameters
    parameters = SamplingParameters(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p,
        repetition_penalty=repetition_penalty, presence_penalty=presence_penalty, frequency_penalty=frequency_penalty,
        seed=seed, stop=tuple(stop or ()), json_schema=None if schema is None else read_object(schema),
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        if tensor_parallel > 1:
            from weft.inference.server.team import team

            stack.enter_context(team(tensor_parallel))
        llm = LLM(folder, device=device, dtype=dtype, quantize=quantize, cache_dtype=cache_dtype, draft=draft,
                  batch_invariant=batch_invariant, tensor_parallel=tensor_parallel, most_sequences=1)  # fmt: skip
        templated = chat and llm.tokenizer.template is not None
        tokens = (
            llm.tokenizer.chat([{"role": "user", "content": prompt}]) if templated else llm.tokenizer.encode(prompt)
        )
        begin = time.perf_counter()
        first, count, text, reason = 0.0, 0, "", None
        shown = not as_json and llm.rank == 0
        try:
            for output in llm.stream(tokens, parameters):
                if output.error is not None:
                    raise ValueError(output.error)
                first = first or time.perf_counter() - begin
                count += len(output.token_ids)
                text += output.text
                reason = output.finish_reason
                if shown:
                    out.out(output.text, end="")
        finally:  # Ctrl-C too: what is said next has a line of its own
            if shown and count:
                out.out("")
        seconds = time.perf_counter() - begin
        rate = (count - 1) / (seconds - first) if count > 1 else 0.0
        if llm.rank:
            return
        if as_json:
            found: dict[str, Any] = {
                "text": text, "finish_reason": reason, "prompt_tokens": len(tokens), "generated_tokens": count,
                "first_token_s": first, "tokens_per_s": rate,
            }  # fmt: skip
            print_json(found)
            return
        told(f"{len(tokens)} + {count} tokens, first after {first:.2f} s, then {rate:.1f} tokens/s ({reason})")


def quantize_folder(
    model: Annotated[str, typer.Argument(help=MODEL)],
    folder: Annotated[
        str | None,
        typer.Argument(
            help="new folder for the quantised model, embedding and head as floats; without it nothing is written"
        ),
    ] = None,
    quantize: Annotated[
        list[str] | None,
        typer.Option(
            help="FORMAT[:GROUP][:asymmetric]: fp8, int8, int4, int4:64:asymmetric; int4 if not given; without FOLDER several "
            "to compare, and the head in int8"
        ),
    ] = None,
    cache_dtype: Annotated[str | None, typer.Option(help="also with keys and values of this dtype: fp8")] = None,
    text: Annotated[Path | None, typer.Option(help="text file to predict; the course's lessons if not given")] = None,
    tokens: Annotated[int, typer.Option(min=0, help="of the text; 0 to skip perplexity")] = 4096,
    window: Annotated[int, typer.Option(min=2, help="tokens that are predicted from one another")] = 512,
    device: Annotated[str | None, typer.Option(help="cuda or cpu")] = None,
    as_json: Json = False,
) -> None:
    """Round a model's linear layers to 8 or 4 bits, with perplexity before and after."""
    with _importing("quantize"):
        from weft.inference import quantize_model
        from weft.inference.llm import CACHE_DTYPES, dtype_of
        from weft.inference.quantized import Scheme
    schemes = [Scheme.of(name) for name in quantize or ["int4"]]
    stored = dtype_of("cache_dtype", cache_dtype, CACHE_DTYPES)
    if folder is not None and len(schemes) != 1:
        raise ValueError(
            f"{len(schemes)} formats for one folder; expected one --quantize, or no folder to compare several"
        )
    if folder is None and not tokens:
        raise ValueError(
            "--tokens is 0 and no folder is given; expected one of them, else nothing is measured or written"
        )
    words = None if text is None else text.read_text(encoding="utf-8")  # before minutes of work
    size = None if folder is None else quantize_model.write(model, folder, schemes[0], device)
    found = []
    if tokens:
        caches = [None] if stored is None else [None, stored]
        options: dict[str, Any] = {
            "text": words,
            "tokens": tokens,
            "window": window,
            "caches": caches,
            "device": device,
        }
        found = quantize_model.measure(model, [None, *([] if folder else schemes)], **options)
        if folder is not None:
            after = quantize_model.measure(folder, [None], **options)
            found += [replace(q, weights=str(schemes[0])) for q in after]
    if as_json:
        print_json({"folder": folder, "bytes": size, "quality": [asdict(q) for q in found]})
        return
    if folder is not None:
        print_line(f"{folder}: {(size or 0) / 1e6:.1f} MB of weights")
    if found:
        out.print(_table(found))


def _table(found: Any) -> Any:
    from rich import box
    from rich.table import Table

    title = f"Perplexity over {found[0].tokens} tokens; bits with scales and padded rows, as in memory"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("weights", "cache", "bits a weight", "MB a step", "perplexity", "of the first"):
        table.add_column(name, justify="left" if name in ("weights", "cache") else "right")
    for q in found:
        cache = q.cache.replace("float8_e4m3fn", "fp8")
        table.add_row(q.weights, cache, f"{q.bits:.2f}", f"{q.bytes / 1e6:.1f}", f"{q.perplexity:.3f}",
                      f"{q.perplexity / found[0].perplexity:.4f}")  # fmt: skip
    return table


@contextlib.contextmanager
def _importing(verb: str) -> Iterator[None]:
    """Of what needs PyTorch; without it the error says how to install it."""
    try:
        yield
    except ModuleNotFoundError as missing:
        if missing.name != "torch":
            raise
        message = f"weft {verb} needs PyTorch: pip install 'weft[gpu,inference]'"
        raise ModuleNotFoundError(message, name="torch") from missing
