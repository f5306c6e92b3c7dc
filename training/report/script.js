"use strict";
// Pointing at a chart tells its values; pointing at a name sets its lines apart. Without this script the page only lacks that.
const tip = document.getElementById("tip");
const ends = JSON.parse(document.querySelector("#ends script").textContent);

function make(name, text, colour) {
  const element = document.createElement(name);
  if (text !== undefined) element.textContent = text;
  if (colour !== undefined) element.style.setProperty("--c", `var(--c${colour % 8})`);
  return element;
}

function showTip(event, ...content) {
  tip.replaceChildren(...content);
  tip.hidden = false;
  const beside = event.clientX + 18 + tip.offsetWidth < innerWidth ? event.clientX + 18 : event.clientX - 18 - tip.offsetWidth;
  const above = Math.min(event.clientY + 16, innerHeight - tip.offsetHeight - 8);
  tip.style.transform = `translate(${Math.max(4, beside)}px, ${Math.max(4, above)}px)`;
}

function when(step) {
  const told = `step ${step.toLocaleString("en")}`;
  if (!ends.length) return told;
  if (!step) return "before training";
  const done = ends.filter((end) => end < step).length;
  return `epoch ${done + 1} · ${told}`;
}

// the place of the value whose step is nearest; steps ascend
function nearest(steps, wanted) {
  let low = 0, high = steps.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < wanted) low = middle + 1; else high = middle;
  }
  return low > 0 && wanted - steps[low - 1] < steps[low] - wanted ? low - 1 : low;
}

function number(value) {
  return Math.abs(value) >= 1e7 || (value && Math.abs(value) < 1e-4) ? value.toExponential(4) : String(Number(value.toPrecision(6)));
}

for (const chart of document.querySelectorAll(".chart")) {
  const told = JSON.parse(chart.querySelector(":scope > script").textContent);
  for (const area of chart.querySelectorAll(".area")) {
    const kind = area.dataset.kind, [low, high] = told.bounds[kind];
    const up = (y) => kind === "log" ? Math.log(y / low) / Math.log(high / low) : (y - low) / (high - low);
    const leave = () => { tip.hidden = true; area.querySelectorAll(".cross, .mark").forEach((e) => e.remove()); };
    const point = (event) => {
      const box = area.getBoundingClientRect();
      const wanted = (event.clientX - box.left) / box.width * told.last;
      const found = told.lines.filter((line) => line.x.length).map((line) => ({line, at: nearest(line.x, wanted)}));
      found.sort((a, b) => Math.abs(a.line.x[a.at] - wanted) - Math.abs(b.line.x[b.at] - wanted));
      leave();
      if (!found.length) return;
      const step = found[0].line.x[found[0].at], reach = told.last * 0.01, seen = new Set(), rows = [];
      const cross = make("div");
      cross.className = "cross";
      cross.style.left = `${100 * step / told.last}%`;
      area.append(cross);
      for (const {line, at} of found) {
        const x = line.x[at], y = line.y[at], name = line.label;
        if (Math.abs(x - step) > reach || y === null || seen.has(name)) continue;
        seen.add(name);
        const row = make("div");
        row.append(make("i", "", line.colour), make("span", x === step ? name : `${name}, step ${x.toLocaleString("en")}`), make("b", number(y)));
        rows.push(row);
        if (kind === "log" && y <= 0) continue;
        const mark = make("div", "", line.colour);
        mark.className = "mark";
        mark.style.left = `${100 * x / told.last}%`;
        mark.style.bottom = `${100 * up(y)}%`;
        area.append(mark);
      }
      showTip(event, make("p", when(step)), ...rows);
    };
    area.addEventListener("pointermove", point);
    area.addEventListener("pointerdown", point);
    area.addEventListener("pointerleave", leave);
  }
}

document.addEventListener("pointerover", (event) => {
  const cell = event.target.closest("[data-tip]");
  if (cell) showTip(event, make("span", cell.dataset.tip)); else if (!event.target.closest(".area")) tip.hidden = true;
});

for (const name of document.querySelectorAll("li[data-run]")) {
  const lines = [...document.querySelectorAll(".area g")].filter((g) => g.dataset.run !== name.dataset.run);
  name.addEventListener("pointerenter", () => lines.forEach((g) => g.classList.add("away")));
  name.addEventListener("pointerleave", () => lines.forEach((g) => g.classList.remove("away")));
}
