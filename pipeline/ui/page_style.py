"""The style sheet of the page: light and dark, from a telephone to a wide screen, and on paper."""

from __future__ import annotations

from collections.abc import Sequence

from ktconvert.pipeline.ui.heat_maps import STEPS

# From small to large, away from the background; colours between them are mixed in equal parts.
LIGHT = ("#f5efe0", "#f7c98b", "#ee8a5a", "#c2416b", "#7b1f73", "#30104f")
DARK = ("#22253a", "#45287a", "#8c2f80", "#d44c6c", "#f8955f", "#fcecb4")

BASE = """
:root {
  color-scheme: light dark;
  --page: #fbfaf8; --card: #ffffff; --ink: #1d2129; --soft: #5b6270; --line: #dfe1e6; --head: #f3f2ef;
  --good: #12692f; --good-page: #e3f4e7; --bad: #a4161a; --bad-page: #fdeaea; --bar: #3b6fb6; --none: #e6e6e9;
  --strange: #00a3a3;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14161c; --card: #1b1e26; --ink: #e6e8ee; --soft: #a0a7b5; --line: #333845; --head: #232732;
    --good: #7fdc9a; --good-page: #17301f; --bad: #ff9c95; --bad-page: #3a1b1d; --bar: #7fb0f0; --none: #2c303b;
    --strange: #2fd6d6;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1500px; margin: 0 auto; padding: 1.25rem clamp(.75rem, 3vw, 2.5rem) 3rem; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .5rem; }
p { margin: .3rem 0 .8rem; max-width: 75em; overflow-wrap: anywhere; }
.soft, .hint, caption, figcaption, .axis { color: var(--soft); }
header { display: flex; flex-wrap: wrap; gap: .3rem .9rem; align-items: center; }
header p { flex-basis: 100%; margin: 0; }
.verdict { border-radius: 99px; padding: .1rem .8rem; font-weight: 600; white-space: nowrap; }
.good { color: var(--good); } .bad { color: var(--bad); }
.verdict.good { background: var(--good-page); } .verdict.bad { background: var(--bad-page); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: .7rem; margin: 1.1rem 0; }
.tiles div { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: .55rem .8rem; }
.tiles b { display: block; font-size: 1.35rem; line-height: 1.3; font-variant-numeric: tabular-nums; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: 0 2rem; }
.pair > * { min-width: 0; }
.box { overflow-x: auto; max-width: 100%; }
.maps + .box, .maps + details { margin-top: 1rem; }
.box:focus-visible, summary:focus-visible { outline: 2px solid var(--bar); outline-offset: 2px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
caption { text-align: left; padding: .2rem 0; }
th, td { text-align: left; vertical-align: top; padding: .28rem .9rem .28rem .2rem; font-weight: 400;
  border-bottom: 1px solid var(--line); }
thead th { font-weight: 600; border-bottom: 2px solid var(--line); white-space: nowrap; }
tbody th { white-space: nowrap; }
td { overflow-wrap: anywhere; min-width: 4.5em; }
.number { text-align: right; white-space: nowrap; }
.problems { background: var(--bad-page); border-left: 4px solid var(--bad); padding: .5rem 1rem; border-radius: 4px; }
.problems ul, .notes { margin: .2rem 0; padding-left: 1.2rem; overflow-wrap: anywhere; }
summary { cursor: pointer; color: var(--bar); padding: .4rem 0; width: fit-content; }
.maps { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr)); gap: 1rem 1.6rem; }
.maps.wide { grid-template-columns: minmax(0, 1fr); }
.maps > * { min-width: 0; }
.heat { table-layout: fixed; min-width: calc(var(--columns) * 3px + 3.2em); font-size: 11px; line-height: 1.1; }
.heat caption { font-size: 13px; line-height: 1.5; } caption b, figcaption b { color: var(--ink); }
.heat th { width: 3.6em; padding: 0 .5em 0 0; border: 0; color: var(--soft); white-space: nowrap; }
.heat thead th { font-weight: 400; padding: 0 0 .2em; } .heat thead th:not(:first-child) { width: auto; }
.heat tbody th { text-align: right; vertical-align: middle; } .heat tbody th[rowspan] { vertical-align: top; }
.heat td { height: var(--height); min-width: 0; padding: 0; border: 0; text-align: center; vertical-align: middle;
  overflow: hidden; white-space: nowrap; }
.heat td:hover { outline: 2px solid var(--ink); outline-offset: -1px; }
.heat td:empty:not([class]), .legend .none { background: repeating-linear-gradient(45deg, transparent 0 3px,
  var(--none) 3px 5px); }
.legend { max-width: none; display: flex; flex-wrap: wrap; align-items: center; gap: .1rem .6rem; font-size: 13px; }
.legend i { display: inline-block; width: .95em; height: .95em; vertical-align: -.12em; }
.legend .hint { margin-left: auto; } .heat .legend { flex-wrap: nowrap; } .heat .legend i { width: .65em; }
.legend span { white-space: nowrap; } .ramp { line-height: 0; }
.x { background: var(--strange); }
figure { margin: 0; } figcaption { font-size: 13px; }
svg { display: block; width: 100%; height: 120px; border-bottom: 1px solid var(--soft); }
rect { fill: var(--bar); } rect:hover { fill: var(--ink); }
.axis { display: flex; justify-content: space-between; font-size: 12px; font-variant-numeric: tabular-nums; }
footer { margin-top: 2.5rem; border-top: 1px solid var(--line); padding-top: .6rem; color: var(--soft);
  font-size: 13px; }
@media print { .box { overflow: visible; } body { background: none; } }
"""


def style() -> str:
    """All of it."""
    light, dark = ("\n".join(_steps(anchors)) for anchors in (LIGHT, DARK))
    return f"{BASE}{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}\n@media print {{ td, i {{ " + (
        "print-color-adjust: exact; -webkit-print-color-adjust: exact; } }\n"
    )


def _steps(anchors: Sequence[str]) -> list[str]:
    """A rule for each class: its colour, and black or white on it, whichever has more contrast (WCAG 2.2)."""
    rules = []
    for number, step in enumerate(STEPS):
        colour = _mixed(anchors, number / (len(STEPS) - 1))
        linear = [(c / 255 + 0.055) ** 2.4 / 1.055**2.4 if c > 10 else c / 255 / 12.92 for c in colour]
        luminance = sum(share * c for share, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
        ink = "#000" if (luminance + 0.05) ** 2 > 0.05 * 1.05 else "#fff"
        rules.append(f".{step} {{ background: #{bytes(colour).hex()}; color: {ink} }}")
    return rules


def _mixed(anchors: Sequence[str], share: float) -> list[int]:
    """The colour at this share of the way: red, green, blue."""
    at = share * (len(anchors) - 1)
    left = min(int(at), len(anchors) - 2)
    low, high = (bytes.fromhex(anchor[1:]) for anchor in anchors[left : left + 2])
    return [round(a + (at - left) * (b - a)) for a, b in zip(low, high, strict=True)]
