"""The demo's page: one HTML file that needs nothing else, every figure marked as simulated or measured."""

from collections.abc import Sequence
from html import escape

import msgspec

from proxy.demo.chart import distribution, lines, percent, strip, thousands
from proxy.demo.results import Outcome, Step
from proxy.demo.table import ROWS

_STYLE = """
:root { color-scheme: light dark; --paper: #fcfcfb; --ink: #1d2327; --soft: #5b656c; --rule: #dfe3e5;
  --s0: #c4552d; --s1: #1f6f8b; --s2: #4d7c2f; --alive: #1f6f8b; --dead: #c4552d; --gone: #dfe3e5;
  --mark: #fff1c9; --mark-ink: #6b4e00; }
@media (prefers-color-scheme: dark) { :root { --paper: #14181b; --ink: #e8ebed; --soft: #9aa5ac;
  --rule: #2d3439; --s0: #e88a63; --s1: #62b3cf; --s2: #9ac278; --alive: #62b3cf; --dead: #e88a63;
  --gone: #2d3439; --mark: #4a3a08; --mark-ink: #ffe9a8; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 40px 24px 72px; max-width: 800px; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, sans-serif; }
h1 { font-size: 27px; line-height: 1.2; margin: 0 0 6px; } h2 { font-size: 19px; margin: 44px 0 4px; }
p { margin: 6px 0 12px; } .soft, figcaption { color: var(--soft); font-size: 14px; }
.badge { display: inline-block; padding: 3px 10px; border-radius: 4px; background: var(--mark);
  color: var(--mark-ink); font-weight: 650; font-size: 13px; letter-spacing: .05em; }
table { width: 100%; border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 14px 0; }
th, td { text-align: right; padding: 7px 10px; border-bottom: 1px solid var(--rule); }
th:first-child, td:first-child { text-align: left; } thead th { font-size: 14px; }
figure { margin: 12px 0 0; } svg { width: 100%; height: auto; display: block; }
.grid { stroke: var(--rule); } .tick { fill: var(--soft); font-size: 12px; }
.tick.mid { text-anchor: middle; } .tick.end { text-anchor: end; }
.line { fill: none; stroke-width: 2; } .line.s0 { stroke: var(--s0); } .line.s1 { stroke: var(--s1); }
.line.s2 { stroke: var(--s2); }
.legend span { margin-right: 18px; font-size: 14px; white-space: nowrap; }
.legend span::before { content: ""; display: inline-block; width: 18px; height: 3px; margin: 0 7px 4px 0; }
.legend .s0::before { background: var(--s0); } .legend .s1::before { background: var(--s1); }
.legend .s2::before { background: var(--s2); }
.legend .alive::before, .legend .dead::before, .legend .gone::before { width: 11px; height: 11px;
  border-radius: 2px; margin-bottom: -1px; }
.legend .alive::before { background: var(--alive); } .legend .dead::before { background: var(--dead); }
.legend .gone::before { background: var(--gone); }
ol { padding-left: 22px; } li { margin: 14px 0; } li b { font-weight: 650; }
.strip { margin-top: 6px; } .chunk.alive { fill: var(--alive); } .chunk.dead { fill: var(--dead); }
.chunk.gone { fill: var(--gone); } code { font-size: 14px; }
"""


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """What was run: the page says it, so that a figure can be made again."""

    simulated: bool
    workload: str
    hardware: str
    command: str
    caveats: Sequence[str]


def page(setting: Setting, outcomes: Sequence[Outcome], steps: Sequence[Step]) -> str:
    """The whole page. `steps` follow one compaction; without any the section is left out."""
    badge = "SIMULATED" if setting.simulated else "MEASURED"
    sections = [
        f'<p><span class="badge">{badge}</span></p>',
        "<h1>What an agent knows, and what the cache does with it</h1>",
        f'<p class="soft">{escape(setting.workload)}<br>{escape(setting.hardware)}</p>',
        _table(outcomes),
        _figure(
            "Dead KV in the cache",
            "Tokens in memory and storage that no context can hit any more, over time.",
            outcomes,
            lines(
                [(o.title, [(s.at_seconds, float(s.dead_tokens)) for s in o.samples]) for o in outcomes],
                x_label=f"{badge.lower()} seconds",
                y_label="dead tokens",
                y_text=thousands,
            ),
        ),
        _figure(
            "Prompt tokens found in the cache",
            "Share of all prompt tokens so far that did not have to be computed again.",
            outcomes,
            lines(
                [
                    (
                        o.title,
                        [
                            (s.at_seconds, s.cached_tokens / s.prompt_tokens)
                            for s in o.samples
                            if s.prompt_tokens
                        ],
                    )
                    for o in outcomes
                ],
                x_label=f"{badge.lower()} seconds",
                y_label="cached share",
                y_text=percent,
                y_max=1.0,
            ),
        ),
        _figure(
            f"Time to first token ({badge})",
            "Share of calls whose first token came within so many seconds.",
            outcomes,
            distribution(
                [(o.title, [c.ttft_seconds for c in o.calls]) for o in outcomes],
                x_label=f"{badge.lower()} seconds",
                y_label="share of calls",
            ),
        ),
        _compaction(steps),
        _method(setting),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>KVTether demo ({badge})</title><style>{_STYLE}</style></head>"
        f"<body>{''.join(sections)}</body></html>\n"
    )


def _table(outcomes: Sequence[Outcome]) -> str:
    head = "".join(f"<th>{escape(o.title)}</th>" for o in outcomes)
    rows = "".join(
        f"<tr><td>{escape(row.name)}</td>{''.join(f'<td>{escape(row.text(o))}</td>' for o in outcomes)}</tr>"
        for row in ROWS
    )
    what = "".join(f"<br>{escape(o.title)}: {escape(o.what)}" for o in outcomes).removeprefix("<br>")
    return (
        f"<table><thead><tr><th></th>{head}</tr></thead><tbody>{rows}</tbody></table>"
        f'<p class="soft">{what}</p>'
    )


def _figure(title: str, caption: str, outcomes: Sequence[Outcome], chart: str) -> str:
    legend = "".join(f'<span class="s{number}">{escape(o.title)}</span>' for number, o in enumerate(outcomes))
    return (
        f"<h2>{escape(title)}</h2><figure><figcaption>{escape(caption)}</figcaption>"
        f'<p class="legend">{legend}</p>{chart}</figure>'
    )


def _compaction(steps: Sequence[Step]) -> str:
    if not steps:
        return ""
    items = "".join(
        f"<li><b>{escape(step.title)}</b> {escape(step.text)}"
        f"{strip([('alive', step.alive), ('dead', step.dead), ('gone', step.gone)])}</li>"
        for step in steps
    )
    legend = (
        '<p class="legend"><span class="alive">held by a context</span>'
        '<span class="dead">dead, still in the cache</span><span class="gone">gone</span></p>'
    )
    return f"<h2>One compaction, step by step</h2>{legend}<ol>{items}</ol>"


def _method(setting: Setting) -> str:
    caveats = "".join(f"<li>{escape(each)}</li>" for each in setting.caveats)
    return (
        f'<h2>How this was made</h2><p class="soft"><code>{escape(setting.command)}</code></p>'
        f'<ul class="soft">{caveats}</ul>'
    )
