// A picture from a file: its middle, in the size that the model takes.
function startPicture() {
  show(picture(() => {}), $("picture"));
  $("file").addEventListener("change", (event) => take(event.target.files[0]));
  addEventListener("dragover", (event) => event.preventDefault());
  addEventListener("drop", (event) => { event.preventDefault(); take(event.dataTransfer.files[0]); });
  ask(null);
}

async function take(file) {
  const source = file && await createImageBitmap(file).catch(() => null);
  if (!source) return attempt(() => { throw new Error("That is no picture that this browser can read."); });
  const {height, width} = facts;
  const scale = Math.max(width / source.width, height / source.height);
  const [w, h] = [scale * source.width, scale * source.height];
  const seen = picture((context) => {
    context.imageSmoothingQuality = "high";
    context.drawImage(source, (width - w) / 2, (height - h) / 2, w, h);
  });
  show(seen, $("picture"));
  ask(valuesOf(seen));
}
