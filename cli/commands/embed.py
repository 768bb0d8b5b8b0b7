"""``modeld embed``: texts to vectors."""

from __future__ import annotations

import click

from modeld.cli import texts
from modeld.cli.daemon_start import connect
from modeld.cli.main import Settings, global_options, pass_settings
from modeld.cli.output import emit_json, note, say, seconds
from modeld.shared.embedding import POOLINGS

SHOWN = 6  # numbers of a vector that people are shown


@click.command(short_help="Turn texts into vectors with an embedding model.")
@click.argument("model")
@click.argument("text", nargs=-1)
@click.option(
    "--pooling",
    type=click.Choice(POOLINGS),
    default=None,
    help="How a text's tokens become one vector. Default: what the model declares, else mean.",
)
@click.option("--raw", is_flag=True, help="Leave the vectors' lengths as they come out, not 1.")
@click.option(
    "--no-wait", is_flag=True, help="Fail (MODEL_BUSY) rather than wait for another call."
)
@global_options
@pass_settings
def embed(
    settings: Settings,
    model: str,
    text: tuple[str, ...],
    pooling: str | None,
    raw: bool,
    no_wait: bool,
) -> None:
    """Turn each TEXT into a vector with the embedding model MODEL, which is loaded if need be.

    Without TEXT the lines of stdin are the texts; empty lines are left out. With --json all of
    every vector is printed. Doesn't start a daemon: exit status 3 if none runs.
    """
    given = [texts.argument(one, "TEXT") for one in text]
    if not given:
        given = [line for line in texts.stdin().splitlines() if line]
    if not given:
        raise click.UsageError("There is nothing to embed: give a TEXT, or lines on stdin.")
    with connect(settings) as client:
        made = client.embed(model, given, pooling=pooling or "", normalize=not raw, no_wait=no_wait)
    if settings.json:
        emit_json(
            {
                "dimensions": made.dimensions,
                "pooling": made.pooling,
                "normalized": made.normalized,
                "embeddings": [
                    {"tokens": one.tokens, "values": list(one.values)} for one in made.embeddings
                ],
            }
        )
        return
    for one in made.embeddings:
        numbers = "  ".join(f"{value:+.4f}" for value in one.values[:SHOWN])
        more = "  …" if made.dimensions > SHOWN else ""
        say(f"{one.tokens:>6} tokens  {numbers}{more}")
    note(
        f"{len(made.embeddings)} vectors of {made.dimensions} dimensions, {made.pooling} pooling, "
        f"in {seconds(made.engine_seconds)}"
    )
