"""The header names the repository that a clone comes from; blocks of
```pipeline in pages become pictures of who does what when, a lane for each
part of a kernel:

    producer:    copy Q K2 | copy K1 V2
    warpgroup 1:           | mma S2 = Q K2 | exp P2 | =

A cell begins with what is done, a word of KINDS; `=` makes the cell before it
longer, an empty one is idle time. Time runs from left to right. It shows an
order, not a measurement.
"""

import os
import re
import subprocess
from html import escape

# Colours that are distinct for the colour-blind and in grey (Okabe and Ito).
KINDS = {
    "copy": ("#56b4e9", "copy"),
    "mma": ("#e69f00", "multiply"),
    "exp": ("#8fd3bd", "exponentials and other elementwise steps"),
    "store": ("#f0e442", "write results"),
    "wait": ("#dddddd", "wait"),
}
CHARACTER, LINE, GAP = 6.6, 34, 10
# Addresses of the web and of ssh, with a host and a path; not a folder.
WEB = re.compile(
    r"(?:https://|ssh://)?(?:\w+@)?([\w-]+(?:\.[\w-]+)+)[:/]([\w./-]+?)(?:\.git)?"
)


def on_config(config):
    """Name the repository: that of a workflow, or else `origin`."""
    server, repository = (
        os.environ.get(f"GITHUB_{name}")
        for name in ("SERVER_URL", "REPOSITORY")
    )
    found = f"{server}/{repository}" if repository else _origin()
    if match := WEB.fullmatch(found):
        config.repo_name = match[2]
        config.repo_url = f"https://{match[1]}/{match[2]}"
    return config


def _origin():
    command = ["git", "config", "--get", "remote.origin.url"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    return run.stdout.strip()


def fence(source, language, css_class, options, md, **kwargs):
    """The SVG picture of a block, as pymdownx.superfences asks for it."""
    lanes = [line.split(":", 1) for line in source.strip().splitlines()]
    lanes = [
        (name.strip(), [cell.strip() for cell in cells.split("|")])
        for name, cells in lanes
    ]
    columns = max(len(cells) for _, cells in lanes)
    widths = [40.0] * columns
    for _, cells in lanes:
        for i, cell in enumerate(cells):
            if cell not in ("", "=") and cells[i + 1 : i + 2] != ["="]:
                widths[i] = max(
                    widths[i],
                    CHARACTER * len(cell.partition(" ")[2]) + 2 * GAP,
                )
    left = CHARACTER * max(len(name) for name, _ in lanes) + 2 * GAP
    starts = [left + sum(widths[:i]) for i in range(columns + 1)]
    parts, used = [], {}
    for row, (name, cells) in enumerate(lanes):
        top = row * (LINE + GAP)
        parts.append(_text(0, top + LINE / 2 + 4, name, "start", "bold"))
        for i, cell in enumerate(cells):
            if cell in ("", "="):
                continue
            kind, _, label = cell.partition(" ")
            end = i + 1
            while cells[end : end + 1] == ["="]:
                end += 1
            colour, used[kind] = KINDS[kind]
            width = starts[end] - starts[i] - 3
            parts.append(
                f'<rect x="{starts[i]:.0f}" y="{top}" width="{width:.0f}" height="{LINE}" rx="4" fill="{colour}"/>'
            )
            parts.append(
                _text(
                    starts[i] + width / 2, top + LINE / 2 + 4, label, "middle"
                )
            )
    bottom, x = len(lanes) * (LINE + GAP) + GAP, 0.0
    for kind, meaning in used.items():
        parts.append(
            f'<rect x="{x:.0f}" y="{bottom}" width="14" height="14" rx="3" fill="{KINDS[kind][0]}"/>'
        )
        parts.append(_text(x + 20, bottom + 12, meaning, "start"))
        x += 20 + CHARACTER * len(meaning) + 3 * GAP
    size = f"{max(starts[-1], x):.0f} {bottom + 20}"
    described = escape(
        "; ".join(
            f"{name}: {', '.join(c.partition(' ')[2] for c in cells if c)}"
            for name, cells in lanes
        )
    )
    return (
        f'<p><svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" role="img" aria-label="{described}" '
        f'style="width:100%;max-width:{max(starts[-1], x):.0f}px">{"".join(parts)}</svg></p>'
    )


def _text(x, y, text, anchor, weight="normal"):
    style = f'font-family="sans-serif" font-size="12" font-weight="{weight}" fill="#111" text-anchor="{anchor}"'
    return f'<text x="{x:.0f}" y="{y:.0f}" {style}>{escape(text)}</text>'
