// A board to draw on. What is drawn is prepared as MNIST's digits were, which models of digits are trained on.
const BOX = 20 / 28;  // MNIST's digits are 20 of the picture's 28 pixels high or wide,
const PEN = 2.8 / 28;  // and their lines about that thick
const SMALLEST = 0.1;  // of the board; what is smaller is not enlarged further, so that a dot stays one
let strokes = [];  // each a list of [x, y], in parts of the board's side

function startDrawing() {
  const board = $("board");
  const point = (event) => {
    const {left, top, width} = board.getBoundingClientRect();
    return [event.clientX - left, event.clientY - top].map((x) => Math.min(Math.max(x / width, 0), 1));
  };
  let stroke = null;
  board.addEventListener("pointerdown", (event) => {
    if (!event.isPrimary || event.button) return;
    board.setPointerCapture(event.pointerId);
    strokes.push(stroke = [point(event)]);
    drawn();
  });
  board.addEventListener("pointermove", (event) => {
    if (!stroke || !event.isPrimary) return;
    const passed = event.getCoalescedEvents?.() ?? [];
    stroke.push(...(passed.length ? passed : [event]).map(point));
    drawn();
  });
  for (const end of ["pointerup", "pointercancel"]) board.addEventListener(end, () => { stroke = null; });
  $("clear").addEventListener("click", () => { strokes = []; drawn(); });
  new ResizeObserver(showBoard).observe(board);
  drawn();
}

// The drawing has changed.
function drawn() {
  $("hint").hidden = strokes.length > 0;
  $("clear").disabled = !strokes.length;
  showBoard();
  const seen = prepared();
  show(seen, $("seen"));
  ask(strokes.length ? valuesOf(seen) : null);
}

function showBoard() {
  const board = $("board");
  board.width = board.height = Math.round(board.clientWidth * devicePixelRatio);
  paint(board.getContext("2d"), board.width, 0, 0, BOX * PEN * board.width);
}

// The drawing as the model sees it: scaled to the box, and moved by whole pixels until its centre of mass is the middle.
function prepared() {
  if (!strokes.length) return picture(() => {});
  const size = facts.width, pen = PEN * size;
  const [left, right] = extent(0), [top, bottom] = extent(1);
  const scale = (BOX * size - pen) / Math.max(right - left, bottom - top, SMALLEST);
  const edge = (1 - BOX) / 2 * size + pen / 2;
  const placed = (dx, dy) => picture((context) => paint(context, scale, edge - scale * left + dx, edge - scale * top + dy, pen));
  const [x, y] = centreOfMass(placed(0, 0));
  return placed(Math.round(size / 2 - x), Math.round(size / 2 - y));
}

// The least and the greatest coordinate.
function extent(axis) {
  return strokes.flat().reduce(([least, most], point) => [Math.min(least, point[axis]), Math.max(most, point[axis])], [Infinity, -Infinity]);
}

// White lines, with the board's side `scale` pixels long and its corner at (x, y).
function paint(context, scale, x, y, pen) {
  Object.assign(context, {strokeStyle: "#fff", lineWidth: pen, lineCap: "round", lineJoin: "round"});
  context.beginPath();
  for (const stroke of strokes) {
    context.moveTo(x + scale * stroke[0][0] + 0.01, y + scale * stroke[0][1]);  // a dot, too, is a line: others are not drawn
    for (const [right, down] of stroke) context.lineTo(x + scale * right, y + scale * down);
  }
  context.stroke();
}

// In pixels, each counted at the place that MNIST counts it: its corner.
function centreOfMass(canvas) {
  const bytes = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  let mass = 0, x = 0, y = 0;
  for (let i = 0; i < bytes.length / 4; i++) {
    const ink = bytes[4 * i];
    mass += ink;
    x += ink * (i % canvas.width);
    y += ink * Math.floor(i / canvas.width);
  }
  return [x / mass, y / mass];
}
