"""The page as HTML: complete without JavaScript, every text of it escaped.

The roles of tables are written out, since a browser forgets them where CSS lays a table out as something else.
"""

from __future__ import annotations

from html import escape
from typing import Any

from proxy.live import chart
from proxy.live.view import TABLES, Row, Table

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>GPU queue</title>
<link rel="icon" href="/-/page.svg">
<link rel="stylesheet" href="/-/page.css">
<script src="/-/page.js" defer></script>
</head>
<body>
<header>
<h1>GPU queue</h1>
<p><strong id="summary">{summary}</strong> <span id="turn">{turn}</span></p>
<p id="status" role="status"></p>
<p id="still">Without its script this page shows the moment at which it was loaded. <a href="/-/">Load it again</a></p>
</header>
<main>
{tables}
<section aria-labelledby="hour-heading">
<h2 id="hour-heading">The last hour</h2>
<figure>
<svg viewBox="0 0 {width} {height}" preserveAspectRatio="none" role="img" aria-labelledby="hour">
<g id="chart">{chart}</g>
</svg>
<figcaption>
<p id="hour">{hour}</p>
<p>Bars: the longest wait of each minute, <span id="scale">{scale}</span> at the top. Below them whose turn it was:</p>
<ul id="legend">{legend}</ul>
</figcaption>
</figure>
</section>
</main>
</body>
</html>
"""


def page(view: dict[str, Any]) -> str:
    """The whole page for this view."""
    first, *others = (_section(table, view["tables"][table.id]) for table in TABLES)
    return _PAGE.format(
        summary=escape(view["summary"]),
        turn=escape(view["turn"]),
        tables="\n".join([first, *others]),
        width=chart.WIDTH,
        height=chart.HEIGHT,
        chart="".join(map(_rectangle, view["chart"])),
        hour=escape(view["hour"]),
        scale=escape(view["scale"]),
        legend="".join(f'<li><span class="{escape(css)}"></span>{escape(text)}</li>' for css, text in view["legend"]),
    )


def _section(table: Table, rows: list[Row]) -> str:
    columns = "".join(f'<th scope="col" role="columnheader">{escape(column)}</th>' for column in table.columns)
    hidden, empty = (" hidden", "") if not rows else ("", " hidden")
    return (
        f'<section aria-labelledby="{table.id}-heading">\n'
        f'<h2 id="{table.id}-heading" tabindex="-1">{escape(table.heading)}</h2>\n'
        f'<p id="{table.id}-empty"{empty}>{escape(table.empty)}</p>\n'
        f'<table role="table" aria-labelledby="{table.id}-heading"{hidden}>\n'
        f'<thead role="rowgroup"><tr role="row">{columns}</tr></thead>\n'
        f'<tbody role="rowgroup" id="{table.id}">{"".join(_row(table, row) for row in rows)}</tbody></table>\n'
        "</section>"
    )


def _row(table: Table, row: Row) -> str:
    pairs = zip(table.columns, row["cells"], strict=True)
    cells = "".join(f'<td role="cell" data-column="{escape(column)}">{escape(text)}</td>' for column, text in pairs)
    return f'<tr role="row" data-key="{escape(row["key"])}">{cells}</tr>'


def _rectangle(drawn: chart.Rectangle) -> str:
    css, x, y, width, height = drawn
    return f'<rect class="{css}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"/>'
