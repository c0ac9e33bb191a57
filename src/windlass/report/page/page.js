// Draws the figures of the page's JSON with plotly, in the colours of the page's style, and again when light turns to dark.
"use strict";

const figures = JSON.parse(document.getElementById("figures").textContent);
const dark = window.matchMedia("(prefers-color-scheme: dark)");

function baseLayout() {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const axis = {
    gridcolor: colour("--grid"), linecolor: colour("--grid"), zerolinecolor: colour("--grid"),
    automargin: true, title: { font: { size: 11, color: colour("--muted") }, standoff: 8 },
  };
  return {
    font: { family: style.getPropertyValue("font-family"), size: 11, color: colour("--muted") },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    margin: { l: 48, r: 12, t: 8, b: 36 }, showlegend: false, hovermode: "x unified",
    hoverlabel: { bgcolor: colour("--card"), bordercolor: colour("--grid"), font: { color: colour("--ink") } },
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { color: colour("--ink") } },
    xaxis: axis, yaxis: axis, yaxis2: axis,
  };
}

function merged(base, own) {
  const result = { ...base };
  for (const [key, value] of Object.entries(own)) {
    const both = value && base[key] && typeof value === "object" && !Array.isArray(value);
    result[key] = both ? merged(base[key], value) : value;
  }
  return result;
}

function draw() {
  for (const [name, figure] of Object.entries(figures)) {
    const place = document.getElementById("plot-" + name);
    if (!place) continue;
    const layout = merged(baseLayout(), figure.layout);
    if (!figure.layout.yaxis2) delete layout.yaxis2;
    if (name === "bits" || name === "ledger") layout.hovermode = "closest";
    if (name === "ledger") layout.margin = { l: 4, r: 4, t: 0, b: 20 };
    Plotly.react(place, figure.data, layout, { displaylogo: false, responsive: true, displayModeBar: false });
  }
}

draw();
dark.addEventListener("change", draw);
