"""The look of a report page: one style sheet, light and dark, no remote fonts."""

PHASE_COLOURS = {
    "init_run": "--grey",
    "plan": "--grey",
    "rollout": "--blue",
    "reward": "--yellow",
    "flush": "--magenta",
    "train": "--aqua",
    "publish": "--orange",
    "evaluate": "--violet",
    "report": "--slate",
}

STYLE = """
:root { color-scheme: light dark;
  --page: #f6f6f3; --card: #ffffff; --ink: #15181d; --soft: #565c66; --rule: #e2e2dc; --code: #f1f1ec;
  --blue: #2a78d6; --aqua: #179a6b; --yellow: #e0a100; --violet: #5b46b8; --magenta: #d9629b; --orange: #e0662c;
  --grey: #9a9a94; --slate: #5f6b7a; --red: #c9302f; --heat: #1f66c1; --on-strong: #ffffff; }
@media (prefers-color-scheme: dark) { :root {
  --page: #121316; --card: #1b1d21; --ink: #eceef1; --soft: #a3a9b3; --rule: #33363d; --code: #24272c;
  --blue: #4b97f0; --aqua: #2fb886; --yellow: #d9a520; --violet: #9c8cf0; --magenta: #e07fb0; --orange: #ee8350;
  --grey: #84878d; --slate: #8fa0b5; --red: #f0706c; --heat: #3b82e0; --on-strong: #ffffff; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 28px 20px 56px; }
h1 { font-size: 26px; line-height: 1.2; margin: 0 0 4px; letter-spacing: -0.01em; overflow-wrap: anywhere; }
h2 { font-size: 16px; margin: 0 0 2px; }
p { margin: 0 0 10px; }
.lead, .quiet, .hint { color: var(--soft); }
.hint { font-size: 13px; margin-bottom: 10px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(166px, 1fr)); gap: 12px; margin: 22px 0 16px; }
.tile, section { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; }
.tile { padding: 12px 16px; }
.tile b { display: block; white-space: nowrap;
  font-size: 18px; font-weight: 600; line-height: 1.3; font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: 13px; }
.grid2 { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); gap: 16px; }
section { padding: 16px 18px 14px; margin: 0 0 16px; min-width: 0; }
.grid2 > section { margin: 0; }
.grid2 { margin-bottom: 16px; }
svg { display: block; width: 100%; max-width: 780px; height: auto; }
svg text { fill: var(--soft); font-size: 11.5px; font-variant-numeric: tabular-nums; }
svg .axis-label { fill: var(--soft); font-size: 12px; }
svg .grid { stroke: var(--rule); stroke-width: 1; }
svg .axis { stroke: var(--soft); stroke-width: 1; }
svg .line { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
svg .dot { fill: var(--mark); stroke: var(--card); stroke-width: 1; }
svg .hollow { fill: var(--card); stroke: var(--red); stroke-width: 2; }
svg .part { stroke: var(--card); stroke-width: 0.6; }
svg .span.running { fill-opacity: 0.45; }
svg .span.interrupted, svg .span.failed { fill-opacity: 0.35; stroke: var(--red); stroke-width: 1.5; }
svg .alert { fill: var(--red); font-weight: 700; font-size: 13px; }
svg .on-strong { fill: var(--on-strong); }
svg .on-weak { fill: var(--ink); }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 4px 16px; margin: 0 0 8px; padding: 0;
  font-size: 13px; color: var(--soft); }
.swatch { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 6px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th, td { padding: 5px 10px; text-align: right; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th { color: var(--soft); font-weight: 500; font-size: 12.5px; vertical-align: bottom; }
th:first-child, td:first-child { padding-left: 0; }
tbody tr:last-child td { border-bottom: 0; }
.text th, .text td { text-align: left; white-space: normal; overflow-wrap: anywhere; vertical-align: top; }
.yes { color: var(--aqua); } .no { color: var(--red); }
code, pre { font: 12.5px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
pre { background: var(--code); border-radius: 8px; padding: 12px 14px; margin: 8px 0 2px; overflow-x: auto; }
details { border-top: 1px solid var(--rule); padding: 8px 0; }
details:first-of-type { border-top: 0; }
summary { cursor: pointer; }
ul.notes { margin: 0; padding-left: 20px; }
ul.notes li { margin-bottom: 4px; }
footer { color: var(--soft); font-size: 13px; }
"""
