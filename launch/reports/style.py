"""How the page of a report looks, in light and in dark, and what it does under a pointer."""

from typing import Final

STYLE: Final = """
:root { color-scheme:light dark; --paper:#fff; --ink:#1c2733; --soft:#5b6877; --rule:#e3e8ee;
  --card:#f7f9fb; --device:#2f6fdb; --host:#0f9d77; --storage:#e07b18; --fourth:#a04fc4;
  --computed:#b4bdc8; --bad:#c62f2f }
@media (prefers-color-scheme: dark) { :root {--paper:#12171d; --ink:#e4e9ef; --soft:#97a4b3;
  --rule:#2a333d; --card:#191f27; --device:#6ea1ff; --host:#3ecfa4; --storage:#ffac55;
  --fourth:#cf92ec; --computed:#56616e; --bad:#ff7d7d } }
* { box-sizing:border-box }
body { margin:0 auto; max-width:1240px; padding:28px 24px 60px; background:var(--paper);
  color:var(--ink); font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif }
h1 { font-size:25px; margin:0 }
h2 { font-size:19px; margin:38px 0 12px }
p.sub { color:var(--soft); margin:4px 0 22px }
.tiles { display:grid; grid-template-columns:repeat(auto-fit,minmax(150px,1fr)); gap:12px }
.tile { background:var(--card); border:1px solid var(--rule); border-radius:10px; padding:12px
  14px }
.tile b { display:block; font-size:22px; font-weight:600; font-variant-numeric:tabular-nums }
.tile span { color:var(--soft); font-size:13px }
.fault { border-left:4px solid var(--bad); background:var(--card); padding:8px 14px; margin:10px
  0; color:var(--bad) }
.plots { margin-top:16px; display:grid;
  grid-template-columns:repeat(auto-fit,minmax(min(100%,460px),1fr)); gap:16px }
figure { margin:0; background:var(--card); border:1px solid var(--rule); border-radius:10px;
  padding:14px 14px 8px; position:relative }
figure h3 { font-size:15px; margin:0 }
figure p { margin:1px 0 6px; color:var(--soft); font-size:13px }
svg.plot { display:block; width:100%; height:auto; touch-action:pan-y }
svg text { fill:var(--soft); font-size:12px; font-variant-numeric:tabular-nums }
text.y { text-anchor:end }
text.x { text-anchor:middle }
.grid,.tick,.axis { stroke:var(--rule); stroke-width:1 }
.axis,.tick { stroke:var(--soft) }
.line { fill:none; stroke-width:2; stroke-linejoin:round; stroke-linecap:round }
.cursor { stroke:var(--soft); stroke-dasharray:3 3; visibility:hidden }
.line.device { stroke:var(--device) }
.line.host { stroke:var(--host) }
.line.storage { stroke:var(--storage) }
.line.fourth { stroke:var(--fourth) }
.bar.device { fill:var(--device) }
.bar.host { fill:var(--host) }
.bar.storage { fill:var(--storage) }
.bar.computed { fill:var(--computed) }
.key { display:flex; flex-wrap:wrap; gap:2px 16px; font-size:13px; color:var(--soft); padding:0 0
  4px 62px }
.key i,.tip i { display:inline-block; width:10px; height:10px; border-radius:3px; margin-right:6px
  }
i.device { background:var(--device) }
i.host { background:var(--host) }
i.storage { background:var(--storage) }
i.fourth { background:var(--fourth) }
i.computed { background:var(--computed) }
.tip { position:absolute; pointer-events:none; background:var(--paper); border:1px solid
  var(--rule); border-radius:8px; padding:6px 10px; font-size:12.5px; box-shadow:0 4px 14px #0003;
  white-space:nowrap; visibility:hidden; z-index:1 }
.tip b { font-weight:600; padding-left:10px }
.tip div { font-variant-numeric:tabular-nums }
.wide { overflow-x:auto }
table { border-collapse:collapse; width:100%; font-size:14px }
th,td { text-align:left; padding:5px 12px 5px 0; border-bottom:1px solid var(--rule);
  vertical-align:top }
th { color:var(--soft); font-weight:500 }
td.value { text-align:right; white-space:nowrap; font-variant-numeric:tabular-nums }
th.value { text-align:right }
td.label { white-space:pre }
td.meaning { color:var(--soft); padding-left:18px }
tr.end td { border-bottom-color:var(--soft) }
pre { overflow-x:auto; background:var(--card); padding:14px; border:1px solid var(--rule);
  border-radius:10px; font-size:13px; line-height:1.35 }
summary { cursor:pointer; color:var(--soft); margin-top:18px }
"""

SCRIPT: Final = """
for (const figure of document.querySelectorAll("figure")) {
  const svg = figure.querySelector("svg.plot"), cursor = svg.querySelector(".cursor");
  const tip = figure.querySelector(".tip"), data = JSON.parse(svg.dataset.points);
  const line = (name, colour, text) => {
    const row = document.createElement("div");
    if (colour) row.appendChild(document.createElement("i")).className = colour;
    row.append(name);
    if (text) row.appendChild(document.createElement("b")).textContent = text;
    return row;
  };
  const hide = () => { tip.style.visibility = cursor.style.visibility = "hidden"; };
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
    const at = (event.clientX - box.left) * scale;
    let best = 0;
    data.x.forEach((x, i) => { if (Math.abs(x - at) < Math.abs(data.x[best] - at)) best = i; });
    cursor.setAttribute("x1", data.x[best]);
    cursor.setAttribute("x2", data.x[best]);
    const rows = data.series.filter((each) => each[2][best]);
    tip.replaceChildren(line(data.title[best]), ...rows.map((e) => line(e[0], e[1], e[2][best])));
    const frame = figure.getBoundingClientRect();
    const left = box.left - frame.left + data.x[best] / scale + 14;
    const over = left + tip.offsetWidth > figure.clientWidth;
    tip.style.left = (over ? Math.max(4, left - tip.offsetWidth - 28) : left) + "px";
    tip.style.top = event.clientY - frame.top + 12 + "px";
    tip.style.visibility = cursor.style.visibility = "visible";
  });
}
"""
