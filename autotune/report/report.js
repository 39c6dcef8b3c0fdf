"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const tip = document.getElementById("tip");
const SVG = "http://www.w3.org/2000/svg";
const LABEL = 7;  // pixels of a character of a label, at most
const NARROW = 560;  // pixels below which labels stand above their bars
const PAPER = 680;  // pixels of a printed page

function svg(name, attributes, ...children) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes))
    if (key === "text") node.textContent = value; else if (value !== null) node.setAttribute(key, value);
  node.append(...children);
  return node;
}
const line = (x1, y1, x2, y2, kind, width) => svg("line", { x1, y1, x2, y2, class: kind, "stroke-width": width || 1 });
const text = (x, y, label, anchor, kind) => svg("text", { x, y, text: label, "text-anchor": anchor || "start", class: kind || null });
const number = (value, digits) => value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits });
const factor = (value) => "×" + (value >= 100 ? number(value, 0) : value >= 10 ? number(value, 1) : number(value, 2));
const shown = (figure) => factor(figure.value) + (figure.low < figure.high ? ` (${number(figure.low, 2)} to ${number(figure.high, 2)})` : "");
const clamp = (value, low, high) => Math.max(low, Math.min(high, value));

// ------------------------------------------------------------------------------------------ scales and ticks

/* Round ticks of a linear axis. */
function linearTicks(low, high, most) {
  const rough = (high - low) / most, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((times) => times * power >= rough * 0.999), first = Math.ceil(low / step - 1e-9);
  return Array.from({ length: most + 1 }, (_, index) => Number(((first + index) * step).toPrecision(12))).filter((tick) => tick <= high);
}
/* Round ticks of a logarithmic axis: 1, 2 and 5 of each power of ten, powers alone where that is too many. */
function ratioTicks(low, high, most) {
  if (high / low < 4) return linearTicks(low, high, most).filter((tick) => tick > 0);
  const powers = Array.from({ length: 25 }, (_, index) => 10 ** (index - 12));
  const inside = (ticks) => ticks.map((tick) => Number(tick.toPrecision(6))).filter((tick) => tick >= low && tick <= high);
  const all = inside(powers.flatMap((power) => [power, 2 * power, 5 * power]));
  return all.length <= most + 2 ? all : inside(powers);
}
const clock = (seconds) => Math.floor(seconds / 60) + ":" + String(Math.floor(seconds % 60)).padStart(2, "0");
const linear = (low, high, from, to) => (value) => from + (to - from) * (value - low) / (high - low);
const logarithmic = (low, high, from, to) => (value) => linear(Math.log(low), Math.log(high), from, to)(Math.log(Math.max(value, 1e-12)));

// ------------------------------------------------------------------------------------------------- a chart

/* Draw a chart at the width that it has, so that labels keep their size on a phone, and again where that changes.
   `paint(width, points)` returns the children of the drawing and its height, and adds points that the pointer and the
   arrow keys find: { x, y, tip }. */
function plot(name, label, paint) {
  const host = document.getElementById(name);
  if (!host) return;
  let width = 0, points = [], chosen = -1;
  const draw = (now) => {
    if (!now || now === width) return;
    width = now;
    points = [];
    const [height, children] = paint(width, points);
    host.replaceChildren(svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height }, ...children));
  };
  const hide = () => { tip.style.display = "none"; };
  const show = (index) => {
    const box = host.getBoundingClientRect(), point = points[index];
    chosen = index;
    tip.textContent = point.tip;
    tip.style.display = "block";
    tip.style.left = clamp(box.left + point.x + 12, 4, Math.max(4, innerWidth - tip.offsetWidth - 8)) + "px";
    tip.style.top = clamp(box.top + point.y + 12, 4, Math.max(4, innerHeight - tip.offsetHeight - 8)) + "px";
  };
  host.tabIndex = 0;
  host.setAttribute("role", "img");
  host.setAttribute("aria-label", `${label}. Arrow keys go from point to point.`);
  host.addEventListener("pointermove", (event) => {
    const box = host.getBoundingClientRect();
    const apart = points.map((point) => Math.hypot(point.x - event.clientX + box.left, point.y - event.clientY + box.top));
    const nearest = apart.indexOf(Math.min(...apart));
    if (nearest >= 0 && apart[nearest] < 30) show(nearest); else hide();
  });
  host.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape") hide();
    if (!step || !points.length) return;
    event.preventDefault();
    show(clamp(chosen + step, 0, points.length - 1));
  });
  host.addEventListener("pointerleave", hide);
  host.addEventListener("blur", hide);
  const fit = () => draw(Math.round(host.clientWidth));
  new ResizeObserver(fit).observe(host);
  addEventListener("beforeprint", () => draw(PAPER));
  addEventListener("afterprint", fit);
  fit();
}
/* The lines and labels of both axes, inside of a frame. */
function axes(frame, x, xTicks, xLabel, y, yTicks, yLabel) {
  const { left, right, top, bottom } = frame;
  return [
    ...yTicks.flatMap((tick) => [line(left, y(tick), right, y(tick), "axis"), text(left - 7, y(tick) + 4, yLabel(tick), "end")]),
    ...xTicks.map((tick) => text(x(tick), bottom + 17, xLabel(tick), x(tick) > right - 24 ? "end" : "middle")),
  ];
}

// ------------------------------------------------------------------------------------- losses over seconds

const loss = (value) => value !== 0 && (Math.abs(value) >= 1e6 || Math.abs(value) < 1e-4) ? value.toExponential(2)
  : value.toLocaleString("en", { maximumSignificantDigits: 4 });
function paintLosses(drawn, width, points) {
  const height = 300, { curves, gap } = drawn, all = curves.flatMap((curve) => curve.points);
  const least = Math.min(...all.map((point) => point.low)), most = Math.max(...all.map((point) => point.high));
  const edge = 0.06 * (most - least || Math.abs(most) || 1), last = Math.max(...all.map((point) => point.seconds));
  const yTicks = linearTicks(least - edge, most + edge, 6), left = 14 + LABEL * Math.max(...yTicks.map((tick) => loss(tick).length));
  const frame = { left, right: width - 10, top: 26, bottom: height - 44 };
  const x = linear(0, last, frame.left, frame.right), y = linear(least - edge, most + edge, frame.bottom, frame.top);
  const time = (seconds) => last >= 120 ? clock(seconds) : Number(seconds.toPrecision(3)) + " s";
  const children = axes(frame, x, linearTicks(0, last, Math.max(2, Math.floor((frame.right - frame.left) / 90))), time, y, yTicks, loss);
  for (const { name, kind, points: own } of curves) {
    const around = [...own.map((point) => [point.seconds, point.high]), ...own.map((point) => [point.seconds, point.low]).reverse()];
    children.push(svg("path", { d: "M" + around.map(([seconds, value]) => `${x(seconds)},${y(value)}`).join("L") + "Z", class: `${kind} band` }));
    children.push(svg("polyline", { points: own.map((point) => `${x(point.seconds)},${y(point.mean)}`).join(" "), class: `${kind} line`, "stroke-width": 2 }));
    for (const point of own)
      points.push({ x: x(point.seconds), y: y(point.mean), tip: `${name}, after ${time(point.seconds)}: loss ${loss(point.mean)} (${loss(point.low)} to ${loss(point.high)})` });
  }
  if (gap) {
    const at = y(gap.loss), [from, to] = [x(gap.before), x(gap.after)];
    const interval = line(x(gap.bounds[0]), at, x(Math.min(gap.bounds[1], last)), at, "gap line", 7);
    interval.setAttribute("stroke-opacity", 0.35);
    children.push(interval, line(from, at, to, at, "gap line", 2), svg("path", { d: `M${to},${at}l9,-5v10Z`, class: "gap fill" }));
    const room = LABEL * gap.text.length / 2, middle = clamp((from + to) / 2, frame.left + room, Math.max(frame.left + room, frame.right - room));
    children.push(text(middle, at - 9, gap.text, "middle", "name halo"));
    points.push({ x: to, y: at, tip: `loss ${loss(gap.loss)} after ${time(gap.after)} instead of ${time(gap.before)}: ${gap.text}` });
  }
  children.push(text(2, 14, drawn.losses), text(frame.right, height - 8, "time of the training", "end"));
  return [height, children];
}
if (data.losses) plot("loss-chart", "Losses over the time of the training", (width, points) => paintLosses(data.losses, width, points));

// ------------------------------------------------------------------- bars: the way from ×1 to the answer

/* Rows of a logarithmic axis, bars with their intervals: { name, from, value, low, high, kind, note, tip }. */
function paintBars(rows, width, points) {
  const isNarrow = width < NARROW, size = isNarrow ? 46 : 28;
  const longest = Math.max(...rows.map((row) => row.name.length)), right = width - 62;
  const left = isNarrow ? 8 : Math.min(LABEL * longest + 12, 0.45 * width), room = Math.floor((isNarrow ? width - 10 : left - 8) / LABEL);
  const low = Math.min(1, ...rows.map((row) => Math.max(row.low, row.value / 3)), ...rows.map((row) => row.from)) / 1.04;
  const high = Math.max(1, ...rows.map((row) => Math.min(row.high, 3 * row.value)), ...rows.map((row) => row.from)) * 1.04;
  const x = logarithmic(low, high, left, right), within = (value) => clamp(x(value), left, right), height = size * rows.length + 26;
  const children = ratioTicks(low, high, isNarrow ? 4 : 8).flatMap((tick) => [line(x(tick), 0, x(tick), height - 24, "axis"),
    text(x(tick), height - 8, "×" + Number(tick.toPrecision(3)), "middle")]);
  rows.forEach((row, index) => {
    const top = size * index, y = top + (isNarrow ? 32 : 15);
    const name = row.name.length > room ? row.name.slice(0, Math.max(1, room - 1)) + "…" : row.name;
    children.push(text(isNarrow ? 2 : 0, isNarrow ? top + 15 : y + 4, name, "start", "name"));
    children.push(svg("rect", { x: Math.min(x(row.from), x(row.value)), y: y - 7, width: Math.max(2, Math.abs(x(row.value) - x(row.from))), height: 14, rx: 2,
      class: `${row.kind} fill` }));
    if (row.low < row.high) children.push(line(within(row.low), y, within(row.high), y, "bound", 2));
    children.push(text(width - 2, y + 4, row.note, "end", "name"));
    points.push({ x: within(row.value), y, tip: row.tip });
  });
  return [height, children];
}
const kindOf = (low, high) => low > 1 ? "gain" : high < 1 ? "loss" : "unclear";
if (data.waterfall.length) {
  const rows = data.waterfall.map((step) => ({ name: step.name, from: step.begins_at, value: step.ends_at, low: step.begins_at * step.gain.low,
    high: step.begins_at * step.gain.high, kind: step.gain.low === step.gain.high ? "rest" : kindOf(step.gain.low, step.gain.high), note: factor(step.gain.value),
    tip: `${step.name}: ${shown(step.gain)}` }));
  const all = rows[rows.length - 1].value;
  if (rows.length > 1)
    rows.push({ name: "the answer", from: 1, value: all, low: all, high: all, kind: "same", note: factor(all), tip: `the answer: ${factor(all)}` });
  plot("waterfall-chart", "From ×1 to the answer, by change", (width, points) => paintBars(rows, width, points));
}

// ---------------------------------------------------------------------------------------- the table of trials

function sortAndFilter() {
  const body = document.getElementById("trial-rows");
  if (!body) return;
  const rows = [...body.rows], heads = [...document.querySelectorAll("#trial-table thead th")];
  const filter = document.getElementById("filter"), outcome = document.getElementById("outcome"), count = document.getElementById("count");
  const words = new Map(rows.map((row) => [row, row.textContent.toLowerCase()]));
  const value = (row, place) => {
    const shown = row.cells[place].textContent, figure = parseFloat(shown.replace(/[×,]/g, ""));
    if (!heads[place].classList.contains("number")) return shown;
    return isNaN(figure) ? null : figure;
  };
  const select = () => {
    const wanted = filter.value.toLowerCase();
    for (const row of rows) row.hidden = (outcome.value !== "" && value(row, 2) !== outcome.value) || !words.get(row).includes(wanted);
    const shownRows = rows.filter((row) => !row.hidden).length;
    count.textContent = shownRows === rows.length ? "" : `${shownRows} of ${rows.length} trials`;
  };
  const sort = (place, isDown) => {
    const numbered = rows.map((row) => [row, value(row, place), value(row, 0)]);
    numbered.sort(([, a, first], [, b, second]) => {
      if (a === b) return first - second;
      if (a === null || b === null) return a === null ? 1 : -1;  // what was not measured comes last
      return (a < b ? -1 : 1) * (isDown ? -1 : 1);
    });
    heads.forEach((head, index) => head.setAttribute("aria-sort", index !== place ? "none" : isDown ? "descending" : "ascending"));
    body.append(...numbered.map(([row]) => row));
  };
  heads.forEach((head, place) => head.querySelector("button").addEventListener("click", () => {
    const before = head.getAttribute("aria-sort");
    sort(place, before === "ascending" || (before !== "descending" && place > 0 && head.classList.contains("number")));
  }));
  filter.addEventListener("input", select);
  outcome.addEventListener("change", select);
  filter.closest(".tools").hidden = false;
}
sortAndFilter();
