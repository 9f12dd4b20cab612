"""``weft generate``."""

from typing import Annotated, Any

import typer

from weft.console import Json, out, print_json, told

PANEL = "Inference"


def register(app: typer.Typer) -> None:
    """Adds the commands to the ``weft`` command."""
    app.command(rich_help_panel=PANEL)(generate)


def generate(
    folder: Annotated[str, typer.Argument(help="model folder in Hugging Face's format")],
    prompt: Annotated[str, typer.Argument(help="text to go on from, or with --chat a question")],
    chat: Annotated[
        bool, typer.Option("--chat/--plain", help="through the model's chat template, if it has one")
    ] = True,
    max_tokens: Annotated[int, typer.Option(min=1, help="generated at most")] = 256,
    temperature: Annotated[float, typer.Option(min=0, help="0 for the most probable token")] = 0.0,
    top_p: Annotated[float, typer.Option(help="only the most probable tokens whose probabilities sum to it")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="only so many of the most probable tokens; 0 for all")] = 0,
    seed: Annotated[int | None, typer.Option(help="of the random numbers")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="text that ends the output; may be given several times")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu")] = None,
    dtype: Annotated[str | None, typer.Option(help="of weights and arithmetic")] = None,
    batch_invariant: Annotated[bool, typer.Option("--batch-invariant", help="bits do not depend on the batch")] = False,
    as_json: Json = False,
) -> None:
    """Generate text with a model on this machine."""
    import time

    try:
        from weft.inference.llm import LLM
        from weft.inference.parameters import SamplingParameters
    except ModuleNotFoundError as missing:
        if missing.name != "torch":
            raise
        raise ModuleNotFoundError(
            "weft generate needs PyTorch: pip install 'weft[gpu,inference]'", name="torch"
        ) from missing
    parameters = SamplingParameters(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=tuple(stop or ())
    )
    llm = LLM(folder, device=device, dtype=dtype, batch_invariant=batch_invariant, most_sequences=1)
    templated = chat and llm.tokenizer.template is not None
    tokens = llm.tokenizer.chat([{"role": "user", "content": prompt}]) if templated else llm.tokenizer.encode(prompt)
    begin = time.perf_counter()
    first, count, text, reason = 0.0, 0, "", None
    for output in llm.stream(tokens, parameters):
        first = first or time.perf_counter() - begin
        count += len(output.token_ids)
        text += output.text
        reason = output.finish_reason
        if not as_json:
            out.out(output.text, end="")
    seconds = time.perf_counter() - begin
    rate = (count - 1) / (seconds - first) if count > 1 else 0.0
    if as_json:
        found: dict[str, Any] = {
            "text": text, "finish_reason": reason, "prompt_tokens": len(tokens), "generated_tokens": count,
            "first_token_s": first, "tokens_per_s": rate,
        }  # fmt: skip
        print_json(found)
        return
    out.out("")
    told(f"{len(tokens)} + {count} tokens, first after {first:.2f} s, then {rate:.1f} tokens/s ({reason})")
