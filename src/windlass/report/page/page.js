// Draws the page's charts on canvas, with axes, hover values, keys, tables and exports; follows a run where the page is served.
// The data is in the element #data; its form is in drawn_data.py and charts.py. Only a served page asks anyone, its own origin.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const state = { axis: "step", smooth: 2, marks: true, hidden: new Set(), logs: new Map() };
const AXES = { step: "steps", tokens: "tokens", time: "time" };
const STRONG_MARKS = { "resumed": "--c7", "not finite": "--c4", "incident": "--c4", "end": "--c7" };
const WEAK_MARKS = { "checkpoint": "--c2", "validation": "--c1" };
const DASHES = [[], [6, 3], [2, 3], [9, 3, 2, 3]]; // of one run from its ninth line on; several: of a chart with few lines a colour is a run, else a line
const SPIKE = 8; // a bucket is a spike where its range is this many times the usual one; our choice
const drawn = new Map(); // key of a chart -> its elements and what was drawn last

// ---- numbers and words

function colour(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

function short(value) {
  const size = Math.abs(value);
  for (const [unit, least] of [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]])
    if (size >= least * 0.9995) return Number((value / least).toPrecision(3)) + " " + unit;
  return String(Number(value.toPrecision(4)));
}

function duration(seconds) {
  if (seconds < 60) return Number(seconds.toPrecision(3)) + "s";
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return minutes + "m";
  const hours = Math.floor(minutes / 60), rest = minutes % 60;
  return hours >= 48 ? Number((minutes / 1440).toPrecision(3)) + "d" : hours + "h" + (rest ? String(rest).padStart(2, "0") + "m" : "");
}

function written(value, form) {
  if (value === null || value === undefined) return "not finite";
  if (form === "percent") return Number((100 * value).toPrecision(4)) + "%";
  if (form === "count") return short(value);
  if (value !== 0 && (form === "exponent" || Math.abs(value) < 1e-3 || Math.abs(value) >= 1e6))
    return value.toExponential(3).replace(/\.?0+e/, "e");
  return String(Number(value.toPrecision(5)));
}

function placeWritten(x, axis) {
  if (axis === "time") return duration(x) + " since the start";
  return axis === "tokens" ? short(x) + " tokens" : "step " + Math.round(x).toLocaleString("en");
}

function element(tag, fields, ...children) {
  const { aria, ...own } = fields;
  const made = Object.assign(document.createElement(tag), own);
  for (const [name, value] of Object.entries(aria || {})) made.setAttribute(name === "role" ? name : "aria-" + name, value);
  made.append(...children);
  return made;
}

// ---- from data to curves

function upTo(sorted, x) { // how many of `sorted` are <= x
  let low = 0, high = sorted.length;
  while (low < high) { const middle = (low + high) >> 1; if (sorted[middle] <= x) low = middle + 1; else high = middle; }
  return low;
}

function positionOf(run, step) { // a step's position on the axis, between the buckets around it
  if (state.axis === "step") return step;
  const steps = run.grid.step, positions = run.grid[state.axis];
  if (!steps.length) return 0;
  const at = upTo(steps, step);
  if (at === 0) return state.axis === "time" ? positions[0] : positions[0] * step / (steps[0] || 1);
  if (at === steps.length || steps[at - 1] === step) return positions[at - 1];
  return positions[at - 1] + (positions[at] - positions[at - 1]) * (step - steps[at - 1]) / (steps[at] - steps[at - 1]);
}

function smoothed(values, gaps) { // centred running mean over a share of all points, at least 5; gaps stay gaps
  const reach = Math.max(2, Math.round(values.length * state.smooth / 200)), sums = [0], counts = [0];
  values.forEach((value, at) => { sums.push(sums[at] + (value === null ? 0 : value)); counts.push(counts[at] + (value === null ? 0 : 1)); });
  return values.map((value, at) => {
    const from = Math.max(0, at - reach), to = Math.min(values.length, at + reach + 1);
    return value === null ? null : (sums[to] - sums[from]) / (counts[to] - counts[from]);
  });
}

function curvesOf(chart) {
  const found = [], several = data.runs.length > 1, byLine = !several || chart.lines.length > 3;
  data.runs.forEach((run, runIndex) => chart.lines.forEach((line, lineIndex) => {
    const source = line.series ? run.series[line.series] : run.points[line.points];
    if (!source) return;
    const name = !several ? line.name : chart.lines.length > 1 ? run.name + ": " + line.name : run.name;
    const curve = { key: chart.key + "/" + run.name + "/" + (line.points ? "p" : "s") + line.name, name, run, isPoints: !line.series,
      colour: "--c" + (byLine ? lineIndex : runIndex) % 8, dash: DASHES[(!several ? Math.floor(lineIndex / 8) : byLine ? runIndex : lineIndex) % DASHES.length],
      step: line.series ? run.grid.step : source.step, y: source.y.slice(), low: source.low, high: source.high, source,
      gaps: new Set(source.gaps || []) };
    curve.x = line.series ? run.grid[state.axis] : curve.step.map((step) => positionOf(run, step));
    curve.isHidden = state.hidden.has(curve.key);
    found.push(curve);
  }));
  if (chart.stack) { // each on top of those before it
    const sums = found[0] ? found[0].y.map(() => 0) : [];
    for (const curve of found) if (!curve.isHidden) {
      curve.floor = sums.slice(); curve.own = curve.y; curve.low = curve.high = undefined;
      curve.y = curve.y.map((value, at) => (sums[at] += value || 0));
    }
  }
  for (const curve of found) if (chart.smooth && state.smooth && !curve.isPoints && curve.y.length >= 50)
    curve.smooth = smoothed(curve.y, curve.gaps);
  return found;
}

// ---- scales

function steps(low, high, most, least = 0) { // nice ticks, at least so far apart
  const raw = Math.max((high - low) / most, least), base = 10 ** Math.floor(Math.log10(raw || 1));
  const step = base * [1, 2, 5, 10].find((times) => times * base >= raw * 0.999);
  const ticks = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high * (1 + 1e-9) + 1e-300 && ticks.length < 20; at++) ticks.push(at * step);
  return ticks;
}

function timeSteps(high, most) {
  const step = [1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400, 172800, 604800].find((one) => high / one <= most) || high / most;
  return Array.from({ length: Math.floor(high / step) + 1 }, (_, at) => at * step);
}

function logTicks(low, high, most) {
  const ticks = [], from = Math.floor(Math.log10(low)), to = Math.ceil(Math.log10(high));
  const every = Math.max(1, Math.ceil((to - from) / most));
  for (let power = from; power <= to; power++) for (const times of to - from <= 2 ? [1, 2, 5] : [1])
    if ((power - from) % every === 0 && times * 10 ** power >= low * 0.999 && times * 10 ** power <= high * 1.001) ticks.push(times * 10 ** power);
  return ticks;
}

function scalesOf(chart, curves, isLog, width, height) {
  const shown = curves.filter((curve) => !curve.isHidden), xs = [], ys = [];
  for (const curve of shown) {
    for (const x of curve.x) if (x !== null) xs.push(x);
    for (const values of [curve.y, curve.low, curve.high]) for (const y of values || []) if (y !== null && (!isLog || y > 0)) ys.push(y);
  }
  if (!isLog || shown.length) for (const level of shown.length ? chart.levels : []) ys.push(level.y);
  const least = (values) => values.reduce((a, b) => Math.min(a, b), Infinity), most = (values) => values.reduce((a, b) => Math.max(a, b), -Infinity);
  let [left, right, low, high] = xs.length && ys.length ? [least(xs), most(xs), least(ys), most(ys)] : [0, 1, isLog ? 1 : 0, isLog ? 10 : 1];
  if (state.axis !== "step" || left <= right * 0.05) left = 0;
  if (right === left) right = left + 1;
  if (isLog) { const room = (high / low) ** 0.04 || 1; low /= Math.max(room, 1.05); high *= Math.max(room, 1.05); }
  else {
    if (chart.zero || chart.stack) low = Math.min(low, 0);
    high = Math.max(high, chart.least_top);
    if (high === low) { high += Math.abs(high) * 0.1 || 1; if (!chart.zero) low -= Math.abs(low) * 0.1; }
    const room = (high - low) * 0.05; high += room; if (!(chart.zero && low === 0)) low -= room;
  }
  const yTicks = isLog ? logTicks(low, high, height / 40) : steps(low, high, height / 45);
  const xTicks = state.axis === "time" ? timeSteps(right, width / 80) : steps(left, right, width / 80, 1);
  return { left, right, low, high, isLog, xTicks, yTicks };
}

// ---- drawing

function paint(context, chart, width, height, hover) {
  const isLog = state.logs.has(chart.key) ? state.logs.get(chart.key) : chart.log;
  const curves = curvesOf(chart), scales = scalesOf(chart, curves, isLog, width, height);
  context.font = "11px " + getComputedStyle(document.documentElement).fontFamily;
  const label = (value) => written(value, chart.form === "exponent" && value === 0 ? "number" : chart.form);
  const labels = scales.yTicks.map(label), gutter = Math.max(30, ...labels.map((text) => context.measureText(text).width)) + 10;
  const box = { left: gutter, right: width - 12, top: 12, bottom: height - 22 };
  const toX = (x) => box.left + (x - scales.left) / (scales.right - scales.left) * (box.right - box.left);
  const share = (y) => isLog ? Math.log(y / scales.low) / Math.log(scales.high / scales.low) : (y - scales.low) / (scales.high - scales.low);
  const toY = (y) => box.bottom - share(y) * (box.bottom - box.top);
  const look = { context, box, toX, toY, isLog };
  paintAxes(look, scales, labels);
  if (state.marks) paintMarks(look, scales, chart);
  context.save();
  context.beginPath(); context.rect(box.left, box.top - 4, box.right - box.left + 4, box.bottom - box.top + 8); context.clip();
  for (const curve of curves) if (!curve.isHidden) paintCurve(look, curve);
  context.restore();
  if (curves.some((curve) => !curve.isHidden)) paintLevels(look, chart);
  if (hover !== null && hover !== undefined) {
    context.strokeStyle = colour("--muted"); context.lineWidth = 1; context.setLineDash([]);
    context.beginPath(); context.moveTo(toX(hover), box.top); context.lineTo(toX(hover), box.bottom); context.stroke();
  }
  return { curves, scales, box, toX, toY };
}

function paintAxes({ context, box, toX, toY }, scales, labels) {
  context.strokeStyle = colour("--grid"); context.fillStyle = colour("--muted"); context.lineWidth = 1; context.setLineDash([]);
  context.textAlign = "right"; context.textBaseline = "middle";
  scales.yTicks.forEach((tick, at) => {
    const y = Math.round(toY(tick)) + 0.5;
    context.beginPath(); context.moveTo(box.left, y); context.lineTo(box.right, y); context.stroke();
    context.fillText(labels[at], box.left - 6, y);
  });
  context.textBaseline = "top";
  for (const tick of scales.xTicks) {
    const text = state.axis === "time" ? duration(tick) : short(tick), half = context.measureText(text).width / 2, x = toX(tick);
    context.textAlign = x + half > box.right + 10 ? "right" : "center";
    context.fillText(text, Math.min(x, box.right + 10), box.bottom + 7);
  }
}

function paintMarks({ context, box, toX }, scales, chart) {
  data.runs.forEach((run) => run.marks.forEach(([step, kind, , quantity, last]) => {
    const position = positionOf(run, step), x = toX(position);
    if (position < scales.left || position > scales.right) return;
    if (quantity && !chart.lines.some((line) => line.series === quantity)) return; // another chart's curve is interrupted
    const isStrong = kind in STRONG_MARKS;
    context.strokeStyle = colour(isStrong ? STRONG_MARKS[kind] : WEAK_MARKS[kind]); context.lineWidth = 1;
    context.setLineDash(isStrong ? [3, 3] : []);
    const from = kind === "checkpoint" ? box.bottom - 7 : kind === "validation" ? box.bottom - 3 : box.top;
    context.beginPath(); context.moveTo(x, from); context.lineTo(x, box.bottom); context.stroke();
    if (kind === "not finite" || kind === "incident") {
      context.fillStyle = colour("--c4"); context.beginPath();
      context.moveTo(x - 4, box.top - 6); context.lineTo(x + 4, box.top - 6); context.lineTo(x, box.top + 1); context.fill();
      if (last > step) context.fillRect(x, box.top - 6, toX(positionOf(run, last)) - x, 3);
    }
  }));
  context.setLineDash([]);
}

function pieces(curve, values, isLog) { // runs of neighbouring points without a gap: lists of indices
  const found = [[]];
  values.forEach((value, at) => {
    if (value !== null && curve.x[at] !== null && (!isLog || value > 0)) found[found.length - 1].push(at);
    if (curve.gaps.has(at) && found[found.length - 1].length) found.push([]);
  });
  return found.filter((piece) => piece.length);
}

function paintCurve({ context, toX, toY, isLog }, curve) {
  context.strokeStyle = context.fillStyle = colour(curve.colour); context.setLineDash(curve.dash); context.lineJoin = "round";
  const bottom = curve.floor || curve.low, top = curve.floor ? curve.y : curve.high;
  if (bottom && top) {
    context.globalAlpha = curve.floor ? 0.45 : 0.2;
    for (const piece of pieces(curve, top, isLog)) {
      context.beginPath();
      piece.forEach((at) => context.lineTo(toX(curve.x[at]), toY(top[at])));
      piece.slice().reverse().forEach((at) => context.lineTo(toX(curve.x[at]), toY(isLog && bottom[at] <= 0 ? top[at] : bottom[at])));
      context.fill();
    }
    if (!curve.floor) paintSpikes({ context, toX, toY, isLog }, curve, bottom, top);
  }
  const lines = curve.smooth ? [[curve.y, 1, 0.4], [curve.smooth, 2, 1]] : [[curve.y, 1.8, 1]];
  for (const [values, width, alpha] of lines) {
    context.lineWidth = width; context.globalAlpha = alpha;
    for (const piece of pieces(curve, values, isLog)) {
      context.beginPath();
      piece.forEach((at) => context.lineTo(toX(curve.x[at]), toY(values[at])));
      context.stroke();
      const isDotted = curve.isPoints ? piece : piece.length === 1 ? piece : [];
      if (isDotted.length <= 120) for (const at of isDotted) {
        context.beginPath(); context.arc(toX(curve.x[at]), toY(values[at]), 3, 0, 7); context.fill();
      }
    }
  }
  context.globalAlpha = 1; context.setLineDash([]);
}

function paintSpikes({ context, toX, toY, isLog }, curve, bottom, top) { // as lines: a shade is thinner than a pixel there
  const spans = top.map((y, at) => y === null ? 0 : y - bottom[at]), usual = spans.slice().sort((a, b) => a - b)[spans.length >> 1];
  context.globalAlpha = 0.9; context.lineWidth = 1.5;
  for (const piece of pieces(curve, top, isLog)) for (const at of piece) if (spans[at] > SPIKE * usual) {
    const x = toX(curve.x[at]), least = isLog && bottom[at] <= 0 ? curve.y[at] : bottom[at];
    context.beginPath(); context.moveTo(x, toY(least)); context.lineTo(x, toY(top[at])); context.stroke();
  }
}

function paintLevels({ context, box, toY, isLog }, chart) {
  context.strokeStyle = context.fillStyle = colour("--muted"); context.textAlign = "right"; context.textBaseline = "bottom";
  let above = Infinity;
  for (const level of chart.levels.slice().sort((a, b) => a.y - b.y)) if (!isLog || level.y > 0) {
    const y = toY(level.y);
    context.setLineDash([5, 4]); context.beginPath(); context.moveTo(box.left, y); context.lineTo(box.right, y); context.stroke();
    if (above - y > 12) { context.fillText(level.name, box.right - 2, y - 2); above = y; }
  }
  context.setLineDash([]);
}

// ---- a chart's elements

function redraw(chart) {
  const parts = drawn.get(chart.key), canvas = parts.canvas, scale = window.devicePixelRatio || 1;
  const width = canvas.clientWidth, height = canvas.clientHeight;
  if (!width) return;
  if (canvas.width !== Math.round(width * scale)) { canvas.width = Math.round(width * scale); canvas.height = Math.round(height * scale); }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  parts.seen = paint(context, chart, width, height, parts.hover);
}

function described(chart) { // for who cannot see the canvas
  const words = parts(chart).curves.map((curve) => {
    const known = curve.y.map((y, at) => [y, curve.step[at]]).filter(([y]) => y !== null);
    if (!known.length) return curve.name + ": no number";
    const [first, last] = [known[0], known[known.length - 1]];
    return `${curve.name}: ${written(first[0], chart.form)} at step ${first[1]}, ${written(last[0], chart.form)} at step ${last[1]}`;
  });
  return `${chart.title}${chart.unit ? " in " + chart.unit : ""} against ${AXES[state.axis]}. ${words.slice(0, 8).join("; ")}. Arrow keys read values.`;
}

function parts(chart) { return drawn.get(chart.key).seen || { curves: curvesOf(chart) }; }

function build(chart, isFirst) {
  const canvas = element("canvas", { tabIndex: 0, id: "plot-" + chart.key, aria: { role: "img" } });
  const button = (text, title, act) => element("button", { type: "button", textContent: text, title, onclick: act, aria: { label: `${text}: ${title} of ${chart.title}` } });
  const log = button("log", "logarithmic axis", () => {
    state.logs.set(chart.key, !(state.logs.has(chart.key) ? state.logs.get(chart.key) : chart.log)); update(chart);
  });
  const keys = element("div", { className: "keys", aria: { role: "group", label: "Curves of " + chart.title } });
  const rows = element("div", { tabIndex: 0, aria: { role: "region", label: "Table of " + chart.title } });
  const table = element("details", {}, element("summary", { textContent: "table" }), rows);
  const tip = element("div", { className: "tip", hidden: true });
  const figure = element("figure", { className: "card chart" + (isFirst ? " first" : "") },
    element("div", { className: "top" }, element("h3", { textContent: chart.title }), element("small", { textContent: chart.unit }),
      log, button("PNG", "save a picture", () => savePng(chart)), button("CSV", "save the numbers", () => saveCsv(chart))),
    canvas, tip, keys, table);
  drawn.set(chart.key, { figure, canvas, keys, rows, table, tip, log, hover: null, at: null });
  canvas.addEventListener("pointermove", (event) => point(chart, event.offsetX));
  canvas.addEventListener("pointerleave", () => unpoint(chart));
  canvas.addEventListener("blur", () => unpoint(chart));
  canvas.addEventListener("keydown", (event) => walk(chart, event));
  table.addEventListener("toggle", () => fillTable(chart));
  return figure;
}

function update(chart) {
  const held = drawn.get(chart.key);
  redraw(chart);
  held.log.setAttribute("aria-pressed", String(state.logs.has(chart.key) ? state.logs.get(chart.key) : chart.log));
  held.canvas.setAttribute("aria-label", described(chart));
  const curves = parts(chart).curves, isFocused = held.keys.contains(document.activeElement) && document.activeElement.dataset.key;
  held.keys.replaceChildren(...(curves.length < 2 ? [] : curves.map((curve) => {
    const key = data.runs.length > 1 || curves.length > 8 ? stroke(curve) : element("i", { className: "key " + curve.colour.slice(2) });
    const made = element("button", { type: "button", onclick: () => {
      if (!state.hidden.delete(curve.key)) state.hidden.add(curve.key);
      update(chart);
    }, aria: { pressed: String(!curve.isHidden) } }, key, curve.name);
    made.dataset.key = curve.key;
    return made;
  })));
  for (const made of held.keys.children) if (made.dataset.key === isFocused) made.focus();
  fillTable(chart);
}

function paintStroke(context, curve, x, y) { // 26 pixels of the curve's line
  context.strokeStyle = colour(curve.colour); context.lineWidth = 2; context.setLineDash(curve.dash);
  context.beginPath(); context.moveTo(x, y); context.lineTo(x + 26, y); context.stroke(); context.setLineDash([]);
}

function stroke(curve) { // the key of a curve among more than there are colours
  const canvas = element("canvas", { width: 52, height: 20, aria: { hidden: "true" } }), context = canvas.getContext("2d");
  context.setTransform(2, 0, 0, 2, 0, 0);
  paintStroke(context, curve, 0, 5);
  return canvas;
}

function nearest(curve, x) { // index of the point beside a position
  const at = upTo(curve.x, x);
  return at === 0 ? 0 : at === curve.x.length || x - curve.x[at - 1] <= curve.x[at] - x ? at - 1 : at;
}

function point(chart, offset) {
  const held = drawn.get(chart.key), { scales, box, curves } = held.seen;
  const longest = mainCurve(curves);
  if (!longest) return;
  const x = scales.left + (offset - box.left) / (box.right - box.left) * (scales.right - scales.left);
  showAt(chart, nearest(longest, x));
}

function mainCurve(curves) {
  return curves.filter((curve) => !curve.isHidden && curve.x.length).sort((a, b) => b.x.length - a.x.length)[0];
}

function showAt(chart, at, isSpoken) {
  const held = drawn.get(chart.key), main = mainCurve(held.seen.curves), x = main.x[at];
  held.at = at; held.hover = x;
  redraw(chart);
  const lines = [placeWritten(x, state.axis) + (state.axis === "step" ? "" : ", step " + main.step[at].toLocaleString("en"))];
  for (const curve of held.seen.curves) if (!curve.isHidden && curve.x.length) {
    const index = nearest(curve, x), low = curve.low && curve.low[index], high = curve.high && curve.high[index];
    let text = `${curve.name} ${written((curve.own || curve.y)[index], chart.form)}`;
    if (curve.isPoints && curve.step[index] !== main.step[at]) text += ` at step ${curve.step[index].toLocaleString("en")}`;
    if (typeof low === "number" && low !== high) {
      const first = curve.run.grid.first[index];
      text += `, from ${written(low, chart.form)} (step ${first + curve.source.low_at[index]}) to ${written(high, chart.form)} (step ${first + curve.source.high_at[index]})`;
    }
    lines.push(text);
  }
  const from = main.run.grid.first[main.isPoints ? 0 : at];
  for (const [step, kind, text] of main.run.marks) if (kind !== "validation" && step >= (main.isPoints ? main.step[at] : from) && step <= main.step[at]) lines.push(text + ` (step ${step})`);
  held.tip.replaceChildren(...lines.map((line) => element("p", { textContent: line })));
  held.tip.hidden = false;
  const left = held.seen.toX(x) + held.canvas.offsetLeft, room = held.figure.clientWidth;
  const width = held.tip.offsetWidth;
  held.tip.style.left = Math.max(4, left + width + 20 > room ? Math.min(left - width - 10, room - width - 4) : left + 12) + "px";
  held.tip.style.top = held.canvas.offsetTop + 14 + "px";
  if (isSpoken) document.getElementById("say").textContent = lines.join("; ");
}

function unpoint(chart) {
  const held = drawn.get(chart.key);
  held.hover = held.at = null; held.tip.hidden = true;
  redraw(chart);
}

function walk(chart, event) {
  const held = drawn.get(chart.key), main = mainCurve(held.seen.curves);
  if (event.key === "Escape") return unpoint(chart);
  const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -Math.ceil(main ? main.x.length / 20 : 1), PageDown: Math.ceil(main ? main.x.length / 20 : 1), Home: -Infinity, End: Infinity }[event.key];
  if (by === undefined || !main) return;
  event.preventDefault();
  const from = held.at === null ? (by > 0 ? -1 : main.x.length) : held.at;
  showAt(chart, Math.max(0, Math.min(main.x.length - 1, from + by)), true);
}

function fillTable(chart) {
  const held = drawn.get(chart.key);
  if (!held.table.open) return held.rows.replaceChildren();
  const curves = parts(chart).curves, main = mainCurve(curves);
  if (!main) return held.rows.replaceChildren();
  const most = 20, all = main.step.length, chosen = all <= most ? main.step.map((_, at) => at) : Array.from({ length: most }, (_, at) => Math.round(at * (all - 1) / (most - 1)));
  const head = element("tr", {}, ...["step", ...curves.map((curve) => curve.name)].map((text) => element("th", { scope: "col", textContent: text })));
  const body = chosen.map((at) => element("tr", {}, element("th", { scope: "row", textContent: main.step[at].toLocaleString("en") }),
    ...curves.map((curve) => element("td", { textContent: curve.x.length ? written((curve.own || curve.y)[nearest(curve, main.x[at])], chart.form) : "" }))));
  held.rows.replaceChildren(element("table", {}, head, ...body));
}

// ---- exports

function save(blob, name) {
  const link = element("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

function fileName(chart, end) { return `${document.title.replace(/ - windlass$/, "").replace(/[^\w.-]+/g, "_")}-${chart.key}.${end}`; }

function picture(chart) {
  const canvas = element("canvas", { width: 2000, height: 1000 }), context = canvas.getContext("2d");
  context.fillStyle = colour("--card"); context.fillRect(0, 0, 2000, 1000);
  context.setTransform(2, 0, 0, 2, 0, 40 * 2);
  const { curves } = paint(context, chart, 1000, 460, null);
  context.setTransform(2, 0, 0, 2, 0, 0);
  context.textAlign = "left"; context.textBaseline = "alphabetic"; context.fillStyle = colour("--ink");
  context.font = "bold 15px sans-serif"; context.fillText(chart.title + (chart.unit ? " (" + chart.unit + ")" : ""), 14, 20);
  context.font = "12px sans-serif";
  let x = 14;
  for (const curve of curves) if (!curve.isHidden && x < 900) {
    paintStroke(context, curve, x, 34);
    context.fillStyle = colour("--ink"); context.fillText(curve.name, x + 31, 38);
    x += context.measureText(curve.name).width + 48;
  }
  return canvas;
}

function savePng(chart) { picture(chart).toBlob((blob) => save(blob, fileName(chart, "png")), "image/png"); }

function csv(chart) { // one row per point; where a point holds several steps, its mean, its lowest and its highest
  const quoted = (text) => /[",\n\r]/.test(text) ? '"' + text.replace(/"/g, '""') + '"' : /^[=+\-@\t]/.test(text) ? "'" + text : text;
  const rows = [["run", "curve", "step", "tokens", "seconds", "value", "lowest", "highest"]];
  for (const curve of curvesOf(chart)) {
    const name = chart.lines.find((line) => curve.key.endsWith("/" + (line.points ? "p" : "s") + line.name)).name;
    curve.step.forEach((step, at) => {
      const grid = curve.isPoints ? {} : curve.run.grid, value = (curve.own || curve.y)[at];
      const pick = (values) => !values || values[at] === null || values[at] === undefined ? "" : values[at];
      rows.push([quoted(curve.run.name), quoted(name), step, pick(grid.tokens), pick(grid.time), value === null ? "" : value, pick(curve.low), pick(curve.high)]);
    });
  }
  return rows.map((row) => row.join(",")).join("\r\n") + "\r\n";
}

function saveCsv(chart) { save(new Blob([csv(chart)], { type: "text/csv" }), fileName(chart, "csv")); }

// ---- the page

function buildControls() {
  const choice = ([axis, text]) => element("label", {}, element("input", { type: "radio", name: "axis", value: axis, checked: axis === state.axis,
    onchange: () => { state.axis = axis; updateAll(); } }), " " + text);
  const smooth = element("select", { onchange: (event) => { state.smooth = Number(event.target.value); updateAll(); } },
    ...[["none", 0], ["2 %", 2], ["5 %", 5], ["10 %", 10]].map(([text, value]) => element("option", { value, textContent: text, selected: value === state.smooth })));
  const marks = element("input", { type: "checkbox", checked: true, onchange: (event) => { state.marks = event.target.checked; updateAll(); } });
  const form = document.getElementById("controls");
  form.addEventListener("submit", (event) => event.preventDefault());
  form.append(element("fieldset", {}, element("legend", { textContent: "Against" }), ...Object.entries(AXES).map(choice)),
    element("label", {}, "Smoothing ", smooth),
    element("label", { title: "Dotted: resumes and ends. Red: not finite, incidents. Ticks: checkpoints, validations." }, marks, " marks"));
}

function updateAll() { data.charts.forEach(update); }

function buildCharts() { // those that are new; others keep their elements, and with them the reader's place
  const parent = document.getElementById("charts");
  data.charts.forEach((chart, at) => {
    if (drawn.has(chart.key)) return;
    const figure = build(chart, at === 0);
    parent.insertBefore(figure, parent.children[at] || null);
  });
  updateAll();
}

function joined(run, news) { // a run's data with what is new of it
  if (news.from === 0) return news;
  const cut = (old, fresh) => (old || Array(news.from).fill(null)).slice(0, news.from).concat(fresh);
  const grid = Object.fromEntries(Object.keys(news.grid).map((name) => [name, cut(run.grid[name], news.grid[name])]));
  const series = {};
  for (const [name, fresh] of Object.entries(news.series)) {
    const old = run.series[name] || {};
    series[name] = { gaps: (old.gaps || []).filter((at) => at < news.from).concat(fresh.gaps) };
    for (const part of ["y", "low", "high", "low_at", "high_at"]) if (fresh[part]) series[name][part] = cut(old[part], fresh[part]);
  }
  return { ...news, grid, series };
}

async function follow() {
  const status = document.getElementById("part-status");
  try {
    const have = data.runs.map((run) => `${run.offset}.${run.revision}.${run.grid.step.length}`).join("_");
    const answer = await fetch(`${data.live.path}?have=${have}`, { cache: "no-store" });
    if (!answer.ok) throw new Error(String(answer.status));
    status.classList.remove("lost");
    if (answer.status === 204) return;
    const news = await answer.json();
    data.charts = news.charts;
    data.runs = news.runs.map((fresh, at) => joined(data.runs[at], fresh));
    for (const [name, html] of Object.entries(news.parts)) document.getElementById("part-" + name).innerHTML = html;
    buildCharts();
  } catch (error) {
    status.classList.add("lost");
  } finally {
    setTimeout(follow, data.live.every_ms);
  }
}

buildControls();
buildCharts();
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", updateAll);
new ResizeObserver(() => data.charts.forEach(redraw)).observe(document.getElementById("charts"));
if (data.live) setTimeout(follow, data.live.every_ms);
