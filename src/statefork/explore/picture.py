"""A trace as an SVG picture, and as an HTML page that needs nothing but itself: no script from elsewhere, no font, no image."""

from __future__ import annotations

import re
from html import escape

from statefork.explore.drawing import Drawing, plain
from statefork.explore.model import Node

__all__ = ["as_html", "as_svg"]

_COLUMN, _ROW, _BOX_WIDTH, _BOX_HEIGHT, _MARGIN = 250, 44, 214, 34, 16
_TERMINAL = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-_])")
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What XML 1.0 cannot hold, however it is written."""

_STYLE = """
.edge { fill: none; stroke: #b6bcc4; stroke-width: 1.5 }
.edge.way { stroke: #1a7f37; stroke-width: 3 }
.box { stroke: #8b949e; stroke-width: 1; rx: 6 }
.way > .box { stroke: #1a7f37; stroke-width: 3 }
.failed > .box { stroke: #cf222e; stroke-dasharray: 4 3 }
.words { font: 12px ui-monospace, monospace; fill: #1f2328 }
.small { font: 10px ui-monospace, monospace; fill: #57606a }
"""

_PAGE_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem; color: #1f2328; background: #fff }
h1 { font-size: 1.3rem } pre, code { font: 13px ui-monospace, monospace }
pre { background: #f6f8fa; padding: .6rem; overflow-x: auto; max-height: 24rem; white-space: pre-wrap }
.tree { overflow: auto; border: 1px solid #d0d7de; max-height: 75vh }
details { border-top: 1px solid #d0d7de; padding: .3rem 0 } details:target { background: #fff8c5 }
summary { cursor: pointer; font: 13px ui-monospace, monospace } summary.way { font-weight: bold }
table { border-collapse: collapse } td { padding: 0 1rem 0 0 } a:focus-visible > .box { stroke: #0969da; stroke-width: 3 }
"""

_SCRIPT = """
function show() {
  const found = location.hash && document.getElementById(location.hash.slice(1));
  if (found) { found.open = true; found.scrollIntoView({block: "center"}); }
}
addEventListener("hashchange", show);
show();
"""


def as_svg(drawing: Drawing) -> str:
    """A document of its own; each node's tooltip has its command, times and output."""
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{_svg(drawing, links=False)}\n'


def as_html(drawing: Drawing) -> str:
    """A click on a node opens what it did and printed."""
    title = f"{drawing.run.get('algorithm', 'search')}: {len(drawing.nodes)} nodes"
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    budget = drawing.run.get("budget") or {}
    facts = {
        "started": drawing.run.get("started_at"),
        "budget": ", ".join(f"{name} {value}" for name, value in budget.items() if value is not None),
        "seed": drawing.run.get("seed"),
    }
    rows = "".join(f"<tr><td>{_text(k)}</td><td>{_text(v)}</td></tr>" for k, v in facts.items() if v not in (None, ""))
    nodes = "\n".join(_details(drawing, node) for node in drawing.nodes.values())
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{_text(title)}</title>
<style>{_PAGE_STYLE}</style>
</head>
<body>
<h1>{_text(drawing.summary)}</h1>
<table>{rows}</table>
<div class="tree">
{_svg(drawing, links=True)}
</div>
<h2>Nodes</h2>
{nodes}
<script>{_SCRIPT}</script>
</body>
</html>
"""


# -- the tree -------------------------------------------------------------------------------------------------------------


def _svg(drawing: Drawing, *, links: bool) -> str:
    rows = _rows(drawing)
    depths = {node.id: node.depth for node in drawing.nodes.values()}
    width = _COLUMN * max(depths.values(), default=0) + _BOX_WIDTH + 2 * _MARGIN
    height = round(_ROW * max(rows.values(), default=0)) + _BOX_HEIGHT + 2 * _MARGIN
    way = drawing.way
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        f' role="img" aria-label="{_text(drawing.summary)}">',
        f"<style>{_STYLE}</style>",
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]
    where = {n: (_MARGIN + _COLUMN * depths[n], _MARGIN + round(_ROW * row)) for n, row in rows.items()}
    for node in drawing.nodes.values():
        if node.parent is not None:
            parts.append(_edge(where[node.parent.id], where[node.id], on_way=node.id in way))
    for node in drawing.nodes.values():
        parts.append(_box(drawing, node, where[node.id], on_way=node.id in way, link=links))
    return "\n".join([*parts, "</svg>"])


def _rows(drawing: Drawing) -> dict[int, float]:
    """Each leaf has a row of its own; above them each node stands in the middle of its children."""
    rows: dict[int, float] = {}
    if not drawing.nodes:
        return rows
    order, waiting = [], [drawing.nodes[0]]
    while waiting:
        node = waiting.pop()
        order.append(node)
        waiting.extend(reversed(node.children))
    free = 0
    for node in order:
        if not node.children:
            rows[node.id] = float(free)
            free += 1
    for node in reversed(order):
        if node.children:
            rows[node.id] = (rows[node.children[0].id] + rows[node.children[-1].id]) / 2
    return rows


def _edge(start: tuple[int, int], end: tuple[int, int], *, on_way: bool) -> str:
    x1, y1 = start[0] + _BOX_WIDTH, start[1] + _BOX_HEIGHT // 2
    x2, y2 = end[0], end[1] + _BOX_HEIGHT // 2
    middle = (x1 + x2) // 2
    kind = "edge way" if on_way else "edge"
    return f'<path class="{kind}" d="M{x1} {y1} C{middle} {y1} {middle} {y2} {x2} {y2}"/>'


def _box(drawing: Drawing, node: Node, at: tuple[int, int], *, on_way: bool, link: bool) -> str:
    x, y = at
    kinds = " ".join(["node", *(["way"] if on_way else []), *(["failed"] if node.error else [])])
    name = "start" if node.action is None else plain(node.action.name)
    name = name if len(name) <= 28 else f"{name[:27]}…"
    small = f"#{node.id}  score {node.score:.3g}  {drawing.spent_ms(node):.0f} ms"
    small += f"  exit {node.exit_code}" if node.exit_code else ""
    inner = (
        f"<title>{_text(_tooltip(drawing, node))}</title>"
        f'<rect class="box" x="{x}" y="{y}" width="{_BOX_WIDTH}" height="{_BOX_HEIGHT}" fill="{_colour(node.score)}"/>'
        f'<text class="words" x="{x + 8}" y="{y + 14}">{_text(name)}</text>'
        f'<text class="small" x="{x + 8}" y="{y + 28}">{_text(small)}</text>'
    )
    tag = f'a href="#n{node.id}"' if link else "g"
    return f'<{tag} class="{kinds}">{inner}</{tag.split()[0]}>'


def _tooltip(drawing: Drawing, node: Node) -> str:
    command = "" if node.action is None else node.action.command[:500] + "\n"
    times = ", ".join(
        f"{name.removesuffix('_ms')} {value:.0f} ms" for name, value in drawing.times.get(node.id, {}).items()
    )
    return f"{command}{times}\n{node.output[-600:]}".strip()


def _colour(score: float) -> str:
    """From pale red over yellow to green: none, half, solved."""
    share = min(max(score, 0.0), 1.0)
    return f"hsl({round(120 * share)} 70% 88%)"


# -- the nodes ------------------------------------------------------------------------------------------------------------


def _details(drawing: Drawing, node: Node) -> str:
    way = ' class="way"' if node.id in drawing.way else ""
    times = "".join(
        f"<tr><td>{_text(name.removesuffix('_ms'))}</td><td>{value:.1f} ms</td></tr>"
        for name, value in drawing.times.get(node.id, {}).items()
    )
    facts = [f"<table>{times}</table>"]
    if node.action is not None:
        facts.insert(0, f"<pre>{_text(node.action.command)}</pre>")
    if node.output:
        facts.append(f"<pre>{_text(node.output)}</pre>")
    if node.error:
        facts.append(f"<p>failed: {_text(node.error)}</p>")
    above = "" if node.parent is None else f' <a href="#n{node.parent.id}">from {node.parent.id}</a>'
    return (
        f'<details id="n{node.id}"><summary{way}>{node.id}  {_text(drawing.label(node))}</summary>'
        f"{''.join(facts)}{above}</details>"
    )


def _text(value: object) -> str:
    """What a program printed is shown, never obeyed."""
    return escape(_FORBIDDEN.sub("\ufffd", _TERMINAL.sub("", str(value))))
