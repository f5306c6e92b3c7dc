// What the model answers, shown as bars; of many classes the likeliest alone.
const MOST = 10;
let asking = false, waiting = null, usual;  // usual: how long an answer takes, in ms

// Answer for an example's values, null for none. Of what comes while the model works only the last is answered.
async function ask(values) {
  waiting = {values};
  if (asking) return;
  asking = true;
  await attempt(async () => {
    while (waiting) {
      const {values} = waiting;
      waiting = null;
      await (values ? answer(values) : showNothing());
    }
  });
  asking = false;
}

// Do it, and show what is wrong with it, if anything is.
async function attempt(action) {
  $("problem").textContent = "";
  try {
    await action();
  } catch (error) {
    $("problem").textContent = error.message ?? error;
  }
}

async function answer(values) {
  await ready;  // the first answer does not pay for unpacking
  const start = performance.now();
  const {data, dims} = await run(values);
  const took = performance.now() - start;
  usual = usual === undefined ? took : 0.9 * usual + 0.1 * took;
  $("latency").textContent = `${usual < 10 ? usual.toFixed(1) : Math.round(usual)} ms for an answer`;
  const numbers = Array.from(data, Number);
  if (!classes(dims)) showNumbers(numbers, dims);
  else showShares(facts.answers === "logits" ? softmax(numbers) : numbers);
}

function showShares(shares) {
  const order = [...shares.keys()].sort((a, b) => shares[b] - shares[a]);
  const shown = shares.length > MOST ? order.slice(0, MOST) : [...shares.keys()];
  $("bars").replaceChildren(...shown.map((i) => bar(label(i), shares[i], i === order[0])));
  tell(label(order[0]), percent(shares[order[0]]));
}

function showNumbers(numbers, dims) {
  const shown = numbers.slice(0, 100).map((x) => Number(x.toPrecision(6))).join(", ");
  $("output").textContent = `${dims.join(" × ")}\n${shown}${numbers.length > 100 ? ", …" : ""}`;
  $("best").hidden = true;
}

async function showNothing() {
  const count = classes((await ready).output);
  if (count <= MOST) $("bars").replaceChildren(...Array.from({length: count}, (_, i) => bar(label(i))));
  $("latency").textContent = "";
  tell("–", "");
}

function bar(name, share = null, best = false) {
  const row = document.createElement("li");
  row.classList.toggle("best", best);
  row.style.setProperty("--share", share ?? 0);
  row.append(...[name, "", share === null ? "" : percent(share)].map((text) => {
    const part = document.createElement("span");
    part.textContent = text;
    return part;
  }));
  return row;
}

function tell(name, share) {
  if ($("best").firstChild.textContent !== name) $("best").firstChild.textContent = name;  // read aloud when it changes
  $("best").classList.toggle("long", name.length > 4);
  $("best").lastChild.textContent = share;
}

function softmax(logits) {
  const most = logits.reduce((a, b) => Math.max(a, b));
  const parts = logits.map((x) => Math.exp(x - most));
  const sum = parts.reduce((a, b) => a + b);
  return parts.map((x) => x / sum);
}

// How many an output of this shape tells of.
const classes = (dims) => facts.answers !== "numbers" && dims.length === 2 ? dims[1] : 0;
const label = (i) => facts.labels?.[i] ?? String(i);
const percent = (share) => `${(100 * share).toFixed(1)}%`;
