"""Prompts that differ in script, spacing, punctuation and length; each in a prefix and a suffix."""

from __future__ import annotations

VARIED: tuple[tuple[str, str], ...] = (
    ("You are a helpful assistant.", "What is the capital of France?"),
    ("Answer in one word.", "Is water wet?"),
    ("", "Hello"),
    ("You write Python.", "def fib(n):\n    if n < 2:\n        return n\n    return"),
    ("You are a poet.", "Roses are red,\nviolets are blue,\n"),
    ("Translate to German.", "Good morning, how are you today?"),
    ("Du bist ein Assistent.", "Wie heißt die Hauptstadt von Österreich? Grüße!"),
    ("你是一个助手。", "北京在哪里？"),
    ("Ты помощник.", "Как дела? Расскажи о Москве."),
    ("Use emoji 🙂.", "How is the weather? ☀️🌧️👩‍👩‍👧"),
    ('{"role": "json"}', '{"a": [1, 2, {"b": null}], "c": "\\u00e9"}'),
    ("Do arithmetic.", "12 + 30 = ? 7 * 8 = ? 1000000 / 3 = ?"),
    ("  leading and trailing spaces  ", "  two  spaces   between    words  "),
    ("Line\nbreaks\n\nin\n\n\nthe system", "\n\nquestion after blank lines\n\n"),
    ("\tTabs\tand\tmore", "\tif (x) {\n\t\treturn y;\n\t}"),
    ("You know SQL.", "SELECT name, COUNT(*) FROM users WHERE age >= 18 GROUP BY name;"),
    ("THE SYSTEM SHOUTS.", "WHY ARE YOU SHOUTING???!!!"),
    ("Summarise.", "The old lighthouse keeper wrote each evening what the sea had brought. " * 3),
    ("a", "b"),
    ("مرحبا", "ما اسمك؟"),
    ("URLs: https://example.org/a?b=c&d=%20e#f", "user@example.org, 192.168.0.1, 2024-02-29"),
    ("Punctuation… – — “quotes” ‘single’", "¿Qué? ¡Sí! «Oui» №5 ±1 °C"),
)
