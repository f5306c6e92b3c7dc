// A page on which a model predicts: of a drawing, an image or numbers.

// Runs a model that takes one example, or a batch of them.
const SIZE = facts.shape.reduce((a, b) => a * b, 1);  // of one example
const ready = openModel(async (ort, session) => {
  const [{name, type}] = session.inputMetadata;
  if (!(type in ARRAYS)) {
    throw new Error(`it takes ${type}; this page provides ${Object.keys(ARRAYS).join(", ")}`);
  }
  const array = (values) =>
    type === "int64" ? BigInt64Array.from(values, BigInt) : ARRAYS[type].from(values);
  const tensor = (values, shape) => new ort.Tensor(type, array(values), shape);
  const zeros = tensor(new Array(SIZE).fill(0), [1, ...facts.shape]);
  await session.run({[name]: zeros});  // the first run is slower
  return {session, name, type, tensor, output: session.outputMetadata[0].shape};
});

// The first output for one or more examples; `values` may be nested.
async function run(values) {
  const {session, name, tensor} = await ready;
  const flat = Array.isArray(values) ? values.flat(Infinity) : values;
  if (!flat.length || flat.length % SIZE) {
    throw new Error(`${flat.length} numbers; an example has ${facts.shape.join(" × ")}`);
  }
  const outputs = await session.run({[name]: tensor(flat, [flat.length / SIZE, ...facts.shape])});
  return outputs[session.outputNames[0]];
}

window.predict = async (values) => Array.from((await run(values)).data, Number);

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

// Images as the model takes them.

// A black canvas of the model's size, on which `paint` draws.
function newImage(paint) {
  const canvas = new OffscreenCanvas(facts.width, facts.height);
  const context = canvas.getContext("2d", {willReadFrequently: true});
  context.fillRect(0, 0, canvas.width, canvas.height);
  paint(context);
  return canvas;
}

// The model's input values for a canvas of its size.
function valuesOf(canvas) {
  const {height, width, channels, layout} = facts, size = height * width;
  const perChannel = (value) => Array.isArray(value) ? value : Array(channels).fill(value);
  const black = perChannel(facts.black), white = perChannel(facts.white);
  const {data} = canvas.getContext("2d").getImageData(0, 0, width, height);  // (height, width, 4)
  const values = new Array(size * channels);
  for (let i = 0; i < size; i++) {
    const [red, green, blue] = data.subarray(4 * i, 4 * i + 3);
    const grey = Math.round(0.299 * red + 0.587 * green + 0.114 * blue);
    for (let c = 0; c < channels; c++) {
      const byte = channels === 1 ? grey : data[4 * i + c];
      const index = layout === "nchw" ? c * size + i : i * channels + c;
      values[index] = black[c] + (white[c] - black[c]) * byte / 255;
    }
  }
  return values;
}

// Show a canvas of the model's size on a canvas of the page, pixel by pixel.
function show(canvas, target) {
  target.width = canvas.width;
  target.height = canvas.height;
  target.getContext("2d").drawImage(canvas, 0, 0);
}

// A board to draw on. Drawings are prepared as MNIST's digits were, since digit models are trained
// on those.
const BOX = 20 / 28;  // MNIST's digits are 20 of the image's 28 pixels high or wide,
const PEN = 2.8 / 28;  // and their lines are about this thick
const SMALLEST = 0.1;  // of the board; smaller drawings are not enlarged, so that a dot stays a dot
let strokes = [];  // each a list of [x, y], as shares of the board's side

function startDrawing() {
  const board = $("board");
  const point = (event) => {
    const {left, top, width} = board.getBoundingClientRect();
    const clip = (x) => Math.min(Math.max(x / width, 0), 1);
    return [event.clientX - left, event.clientY - top].map(clip);
  };
  let stroke = null;
  board.addEventListener("pointerdown", (event) => {
    if (!event.isPrimary || event.button) return;
    board.setPointerCapture(event.pointerId);
    strokes.push(stroke = [point(event)]);
    updateDrawing();
  });
  board.addEventListener("pointermove", (event) => {
    if (!stroke || !event.isPrimary) return;
    const coalesced = event.getCoalescedEvents?.() ?? [];
    stroke.push(...(coalesced.length ? coalesced : [event]).map(point));
    updateDrawing();
  });
  for (const end of ["pointerup", "pointercancel"]) {
    board.addEventListener(end, () => { stroke = null; });
  }
  $("clear").addEventListener("click", () => { strokes = []; updateDrawing(); });
  new ResizeObserver(showBoard).observe(board);
  updateDrawing();
}

// Show the current strokes and request their prediction.
function updateDrawing() {
  $("hint").hidden = strokes.length > 0;
  $("clear").disabled = !strokes.length;
  showBoard();
  const image = prepareDrawing();
  show(image, $("seen"));
  request(strokes.length ? valuesOf(image) : null);
}

function showBoard() {
  const board = $("board");
  board.width = board.height = Math.round(board.clientWidth * devicePixelRatio);
  paint(board.getContext("2d"), board.width, 0, 0, BOX * PEN * board.width);
}

// The drawing as the model sees it: scaled to the box, and moved by whole pixels until its center
// of mass is in the middle.
function prepareDrawing() {
  if (!strokes.length) return newImage(() => {});
  const size = facts.width, pen = PEN * size;
  const [left, right] = extent(0), [top, bottom] = extent(1);
  const scale = (BOX * size - pen) / Math.max(right - left, bottom - top, SMALLEST);
  const edge = (1 - BOX) / 2 * size + pen / 2;
  const draw = (dx, dy) => newImage((context) =>
    paint(context, scale, edge - scale * left + dx, edge - scale * top + dy, pen));
  const [x, y] = centerOfMass(draw(0, 0));
  return draw(Math.round(size / 2 - x), Math.round(size / 2 - y));
}

// The smallest and the largest coordinate along an axis.
function extent(axis) {
  const coordinates = strokes.flat().map((point) => point[axis]);
  const min = coordinates.reduce((a, b) => Math.min(a, b));
  return [min, coordinates.reduce((a, b) => Math.max(a, b))];
}

// Paint white lines, with the board's side `scale` pixels long and its corner at (x, y).
function paint(context, scale, x, y, pen) {
  const style = {strokeStyle: "#fff", lineWidth: pen, lineCap: "round", lineJoin: "round"};
  Object.assign(context, style);
  context.beginPath();
  for (const stroke of strokes) {
    // A canvas does not paint a line of length 0, so a dot starts 0.01 pixels to the right.
    context.moveTo(x + scale * stroke[0][0] + 0.01, y + scale * stroke[0][1]);
    for (const [right, down] of stroke) context.lineTo(x + scale * right, y + scale * down);
  }
  context.stroke();
}

// In pixels; as in MNIST, the position of a pixel is its corner.
function centerOfMass(canvas) {
  const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  let mass = 0, x = 0, y = 0;
  for (let i = 0; i < data.length / 4; i++) {
    const ink = data[4 * i];
    mass += ink;
    x += ink * (i % canvas.width);
    y += ink * Math.floor(i / canvas.width);
  }
  return [x / mass, y / mass];
}

// An image from a file: its middle, resized to the size that the model takes.
function startImage() {
  show(newImage(() => {}), $("picture"));
  $("file").addEventListener("change", (event) => openFile(event.target.files[0]));
  addEventListener("dragover", (event) => event.preventDefault());
  addEventListener("drop", (event) => {
    event.preventDefault();
    openFile(event.dataTransfer.files[0]);
  });
  request(null);
}

async function openFile(file) {
  const source = file && await createImageBitmap(file).catch(() => null);
  if (!source) {
    return attempt(() => { throw new Error("This browser cannot read the file as an image."); });
  }
  const {height, width} = facts;
  const scale = Math.max(width / source.width, height / source.height);
  const [w, h] = [scale * source.width, scale * source.height];
  const image = newImage((context) => {
    context.imageSmoothingQuality = "high";
    context.drawImage(source, (width - w) / 2, (height - h) / 2, w, h);
  });
  show(image, $("picture"));
  request(valuesOf(image));
}

// Any other input, entered as JSON.
function startNumbers() {
  const submit = () => attempt(async () => request(await numbersIn($("values").value)));
  $("wanted").textContent = facts.shape.join(" × ");
  $("values").value = JSON.stringify(zeros(facts.shape));
  $("run").addEventListener("click", submit);
  submit();
}

// All numbers in a JSON text; raises where the model's array would hold another value.
async function numbersIn(text) {
  const values = [JSON.parse(text)].flat(Infinity), {type} = await ready;
  for (const value of values) {
    if (typeof value !== "number") throw new Error(`${JSON.stringify(value)} is not a number`);
    if (!fits(value, type)) throw new Error(`${value} is not a number of type ${type}`);
  }
  return values;
}

const fits = (value, type) => type === "float32" ||
  (type === "int64" ? Number.isSafeInteger(value) : ARRAYS[type].of(value)[0] === value);

const zeros = ([size, ...rest]) =>
  size === undefined ? 0 : Array.from({length: size}, () => zeros(rest));

// Show the form for the model's input.
$(facts.input).hidden = false;
({draw: startDrawing, image: startImage, numbers: startNumbers})[facts.input]();
