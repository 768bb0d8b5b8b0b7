"""``modeld tokenize``: the model's own tokenizer."""

from __future__ import annotations

import click

from modeld.cli import texts
from modeld.cli.daemon_start import connect
from modeld.cli.main import Settings, global_options, pass_settings
from modeld.cli.output import emit_json, note, say


@click.command(short_help="Show how a model cuts a text into tokens.")
@click.argument("model")
@click.argument("text")
@click.option("--parse-special", is_flag=True, help="Recognise control tokens in the text.")
@click.option("--add-bos", is_flag=True, help="Put the model's beginning-of-text token first.")
@click.option(
    "--no-load", is_flag=True, help="Fail (MODEL_NOT_ACTIVE) rather than load the model for this."
)
@global_options
@pass_settings
def tokenize(
    settings: Settings, model: str, text: str, parse_special: bool, add_bos: bool, no_load: bool
) -> None:
    """Show how MODEL cuts TEXT into tokens: ids, and each token's own text. '-': from stdin.

    Doesn't start a daemon: exit status 3 if none runs.
    """
    text = texts.stdin() if text == "-" else texts.argument(text, "TEXT")
    with connect(settings) as client:
        tokens = client.tokenize(
            model, text, parse_special=parse_special, add_bos=add_bos, load=not no_load
        )
    if settings.json:
        emit_json(
            {
                "token_ids": tokens.token_ids,
                "pieces": [piece.decode(errors="replace") for piece in tokens.pieces],
                "count": len(tokens.token_ids),
            }
        )
        return
    for token_id, piece in zip(tokens.token_ids, tokens.pieces, strict=True):
        say(f"{token_id:>8}  {piece.decode(errors='backslashreplace')!r}")
    note(f"{len(tokens.token_ids)} tokens")
