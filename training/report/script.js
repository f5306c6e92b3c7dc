"use strict";
// Pointing at a chart shows its values; pointing at a run's name fades the lines of other runs.
// Without this script the page lacks only that.
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
  const right = event.clientX + 18, left = event.clientX - 18 - tip.offsetWidth;
  const x = right + tip.offsetWidth < innerWidth ? right : left;
  const y = Math.min(event.clientY + 16, innerHeight - tip.offsetHeight - 8);
  tip.style.transform = `translate(${Math.max(4, x)}px, ${Math.max(4, y)}px)`;
}

function when(step) {
  const text = `step ${step.toLocaleString("en")}`;
  if (!ends.length) return text;
  if (!step) return "before training";
  const done = ends.filter((end) => end < step).length;
  return `epoch ${done + 1} · ${text}`;
}

// The index of the step that is nearest to a value; steps ascend.
function nearest(steps, value) {
  let low = 0, high = steps.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < value) low = middle + 1; else high = middle;
  }
  return low > 0 && value - steps[low - 1] < steps[low] - value ? low - 1 : low;
}

function number(value) {
  const extreme = Math.abs(value) >= 1e7 || (value && Math.abs(value) < 1e-4);
  return extreme ? value.toExponential(4) : String(Number(value.toPrecision(6)));
}

for (const chart of document.querySelectorAll(".chart:not(.parallel)")) {
  const {last, bounds, lines} = JSON.parse(chart.querySelector(":scope > script").textContent);
  for (const area of chart.querySelectorAll(".area")) {
    const kind = area.dataset.kind, [low, high] = bounds[kind];
    const up = (y) =>
      kind === "log" ? Math.log(y / low) / Math.log(high / low) : (y - low) / (high - low);
    const leave = () => {
      tip.hidden = true;
      area.querySelectorAll(".cross, .mark").forEach((element) => element.remove());
    };
    const point = (event) => {
      const box = area.getBoundingClientRect();
      const pointed = (event.clientX - box.left) / box.width * last;
      const spots = lines.filter((line) => line.x.length).map((line) => {
        const i = nearest(line.x, pointed);
        return {name: line.label, colour: line.colour, x: line.x[i], y: line.y[i]};
      });
      spots.sort((a, b) => Math.abs(a.x - pointed) - Math.abs(b.x - pointed));
      leave();
      if (!spots.length) return;
      const step = spots[0].x, reach = last * 0.01, seen = new Set(), rows = [];
      const cross = make("div");
      cross.className = "cross";
      cross.style.left = `${100 * step / last}%`;
      area.append(cross);
      for (const {name, colour, x, y} of spots) {
        if (Math.abs(x - step) > reach || y === null || seen.has(name)) continue;
        seen.add(name);
        const label = x === step ? name : `${name}, step ${x.toLocaleString("en")}`;
        const row = make("div");
        row.append(make("i", "", colour), make("span", label), make("b", number(y)));
        rows.push(row);
        if (kind === "log" && y <= 0) continue;
        const mark = make("div", "", colour);
        mark.className = "mark";
        mark.style.left = `${100 * x / last}%`;
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
  if (cell) showTip(event, make("span", cell.dataset.tip));
  else if (!event.target.closest(".area")) tip.hidden = true;
});

for (const name of document.querySelectorAll("li[data-run]")) {
  const groups = [...document.querySelectorAll(".area g")];
  const others = groups.filter((group) => group.dataset.run !== name.dataset.run);
  name.addEventListener("pointerenter", () => others.forEach((g) => g.classList.add("away")));
  name.addEventListener("pointerleave", () => others.forEach((g) => g.classList.remove("away")));
}
