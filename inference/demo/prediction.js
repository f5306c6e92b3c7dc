// Shows the model's prediction: bars for classes (only the likeliest of many), or plain numbers.
const MAX_BARS = 10;
let running = false, pending = null, averageTime;  // averageTime: of a prediction, in ms

// Request a prediction for an example's values; null clears it. While the model is running, only
// the latest request is kept.
async function request(values) {
  pending = {values};
  if (running) return;
  running = true;
  await attempt(async () => {
    while (pending) {
      const {values} = pending;
      pending = null;
      await (values ? showPrediction(values) : clearPrediction());
    }
  });
  running = false;
}

async function showPrediction(values) {
  await ready;  // so that the first measured time does not include unpacking
  const start = performance.now();
  const {data, dims} = await run(values);
  const time = performance.now() - start;
  averageTime = averageTime === undefined ? time : 0.9 * averageTime + 0.1 * time;
  const rounded = averageTime < 10 ? averageTime.toFixed(1) : Math.round(averageTime);
  $("latency").textContent = `${rounded} ms per prediction`;
  const numbers = Array.from(data, Number);
  if (!classCount(dims)) showNumbers(numbers, dims);
  else showProbabilities(facts.output_kind === "logits" ? softmax(numbers) : numbers);
}

function showProbabilities(probabilities) {
  const all = [...probabilities.keys()];
  const order = [...all].sort((a, b) => probabilities[b] - probabilities[a]);
  const shown = all.length > MAX_BARS ? order.slice(0, MAX_BARS) : all;
  $("bars").replaceChildren(...shown.map((i) => bar(label(i), probabilities[i], i === order[0])));
  showBest(label(order[0]), percent(probabilities[order[0]]));
}

function showNumbers(numbers, dims) {
  const shown = numbers.slice(0, 100).map((x) => Number(x.toPrecision(6))).join(", ");
  const ellipsis = numbers.length > 100 ? ", …" : "";
  $("output").textContent = `${dims.join(" × ")}\n${shown}${ellipsis}`;
  $("best").hidden = true;
}

async function clearPrediction() {
  const count = classCount((await ready).output);
  const emptyBars = Array.from({length: count}, (_, i) => bar(label(i)));
  if (count <= MAX_BARS) $("bars").replaceChildren(...emptyBars);
  $("latency").textContent = "";
  showBest("–", "");
}

function bar(name, probability = null, best = false) {
  const row = document.createElement("li");
  row.classList.toggle("best", best);
  row.style.setProperty("--share", probability ?? 0);
  row.append(...[name, "", probability === null ? "" : percent(probability)].map((text) => {
    const cell = document.createElement("span");
    cell.textContent = text;
    return cell;
  }));
  return row;
}

function showBest(name, probability) {
  const text = $("best").firstChild;
  if (text.textContent !== name) text.textContent = name;  // screen readers announce each change
  $("best").classList.toggle("long", name.length > 4);
  $("best").lastChild.textContent = probability;
}

function softmax(logits) {
  const max = logits.reduce((a, b) => Math.max(a, b));
  const exponentials = logits.map((x) => Math.exp(x - max));
  const sum = exponentials.reduce((a, b) => a + b);
  return exponentials.map((x) => x / sum);
}

// The number of classes in an output of this shape; 0 if it has none.
const classCount = (dims) => facts.output_kind !== "numbers" && dims.length === 2 ? dims[1] : 0;
const label = (i) => facts.labels?.[i] ?? String(i);
const percent = (share) => `${(100 * share).toFixed(1)}%`;
