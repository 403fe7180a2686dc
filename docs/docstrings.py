"""Docstrings as Markdown: examples become blocks, and papers links."""

import re
import textwrap

import griffe

EXAMPLE = re.compile(
    r"(?:^Example:\n)?((?:^[ ]*)>>> .*\n?(?:^[ ]*\S.*\n?)*)", re.MULTILINE
)
PAPER = re.compile(r"arXiv:(\d{4}\.\d{4,5})")


class Docstrings(griffe.Extension):
    """Rewrites every docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **kwargs: object) -> None:
        if obj.docstring is None:
            return
        text = EXAMPLE.sub(_block, obj.docstring.value)
        obj.docstring.value = PAPER.sub(
            r"[arXiv:\1](https://arxiv.org/abs/\1)", text
        )


def _block(match):
    return f"\n```pycon\n{textwrap.dedent(match[1]).strip()}\n```\n"
