// Pictures as the model takes them.

// A canvas of the model's size, black, on which `paint` draws.
function picture(paint) {
  const canvas = new OffscreenCanvas(facts.width, facts.height);
  const context = canvas.getContext("2d", {willReadFrequently: true});
  context.fillRect(0, 0, canvas.width, canvas.height);
  paint(context);
  return canvas;
}

// What the model takes for a canvas of its size.
function valuesOf(canvas) {
  const {height, width, channels, layout} = facts, size = height * width;
  const [black, white] = [facts.black, facts.white].map((ends) => Array.isArray(ends) ? ends : Array(channels).fill(ends));
  const bytes = canvas.getContext("2d").getImageData(0, 0, width, height).data;  // (height, width, 4)
  const values = new Array(size * channels);
  for (let i = 0; i < size; i++) {
    const colour = bytes.subarray(4 * i, 4 * i + 4);
    for (let c = 0; c < channels; c++) {
      const byte = channels === 1 ? Math.round(0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2]) : colour[c];
      values[layout === "nchw" ? c * size + i : i * channels + c] = black[c] + (white[c] - black[c]) * byte / 255;
    }
  }
  return values;
}

// Show a canvas of the model's size, pixel by pixel.
function show(canvas, place) {
  place.width = canvas.width;
  place.height = canvas.height;
  place.getContext("2d").drawImage(canvas, 0, 0);
}
