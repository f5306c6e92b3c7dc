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
