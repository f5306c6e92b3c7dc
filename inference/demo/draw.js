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
