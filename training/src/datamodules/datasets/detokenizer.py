"""Undo the tokenisation that some corpora were published with."""

import re
from collections.abc import Callable

_RULES = [
    (r"s '", "s'"),
    # "@-@" within numbers and compounds
    (r" @-@ ", "-"),
    (r" @,@ ", ","),
    (r" @\.@ ", "."),
    # blanks before punctuation
    (r" ([:;.!?,]) ", r"\1 "),
    # blanks just inside of pairs
    (r"\(\s*([^)]*?)\s*\)", r"(\1)"),
    (r"\[\s*([^\]]*?)\s*\]", r"[\1]"),
    (r"\{\s*([^}]*?)\s*\}", r"{\1}"),
    (r'"\s*([^"]*?)\s*"', r'"\1"'),
    (r"'\s*([^']*?)\s*'", r"'\1'"),
    # headings, the longest first
    (r"= = = =", "===="),
    (r"= = =", "==="),
    (r"= =", "=="),
    # the rest
    (r" ° ", "°"),
    (r" \n", "\n"),
    (r"\n ", "\n"),
    (r" N ", " 1 "),
    (r" 's", "'s"),
]
_COMPILED = [(re.compile(pattern), replacement) for pattern, replacement in _RULES]


def wikitext_detokenize(string: str) -> str:
    """Text of WikiText as it was before its words and punctuation were set apart by blanks.

    >>> wikitext_detokenize("Valkyria Chronicles III ( 2 @,@ 5 million copies ) , the series ' third .")
    "Valkyria Chronicles III (2,5 million copies), the series' third ."
    """
    for pattern, replacement in _COMPILED:
        string = pattern.sub(replacement, string)
    return string


DATASET_TOKENIZATION_REGISTRY: dict[str, Callable[[str], str]] = {"wikitext": wikitext_detokenize}


def detokenizer_of(dataset: str) -> Callable[[str], str] | None:
    """The function for a corpus by the last part of its name ("Salesforce/wikitext", "data/wikitext-2"), or None."""
    name = dataset.rstrip("/").rsplit("/", 1)[-1]
    for key, function in DATASET_TOKENIZATION_REGISTRY.items():
        if name == key or name.startswith(f"{key}-"):
            return function
    return None
